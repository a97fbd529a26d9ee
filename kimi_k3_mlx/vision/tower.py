"""What a checkpoint needs to see: tower and projector with their weights, its rules for pictures.

Input: an opened source or build, on disk or on the Hub. Output: `kimi_k3_vision.Vision` in the
dtype of the checkpoint, and `ImageRules`. Only the installed code runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from converters.dense import copied
from kimi_k3_mlx.errors import CheckpointError
from kimi_k3_mlx.schema import BuildTensor
from kimi_k3_mlx.stream.layers import allocate, fill, seen
from kimi_k3_mlx.tensors.source import Source, download_hint, parse_json
from kimi_k3_mlx.vision.images import require_pillow
from kimi_k3_vision import PREFIXES, Vision, VisionArgs, sanitize

if TYPE_CHECKING:
    from kimi_k3_vl.processing import ImageRules

RULES = "preprocessor_config.json"


def load_tower(checkpoint: Source) -> Vision:
    """Tower and projector; raises CheckpointError when config and weights don't fit."""
    import mlx.core as mx

    tensors = tower_tensors(checkpoint)
    memory = allocate(tensors)
    with checkpoint.reader() as reader:
        fill(reader, tensors, memory)
    try:
        args = VisionArgs.from_dict(checkpoint.config["vision_config"])
        vision = Vision(args)
        vision.load_weights(list(sanitize(args, seen(memory)).items()))
    except ValueError as error:
        reason = " ".join(str(error).split())[:200].rstrip(" ,.:")
        raise CheckpointError(
            f"{checkpoint.where}: vision_config and weights don't fit: {reason}."
        ) from error
    mx.eval(vision.parameters())
    return vision


def tower_tensors(checkpoint: Source) -> list[BuildTensor]:
    """The tensors of tower and projector."""
    infos = checkpoint.tensors.values()
    return [copied(info.name, "vision", info) for info in infos if info.name.startswith(PREFIXES)]


def read_rules(checkpoint: Source) -> ImageRules:
    """What the checkpoint's preprocessor_config.json says, or K3's rules if it has none.

    Raises CheckpointError for a checkpoint without vision, or whose rules are not supported;
    UsageError when Pillow is not installed.
    """
    if not checkpoint.config.get("vision_config"):
        raise CheckpointError(
            f"{checkpoint.where} has no vision_config: it can't see.",
            "leave out the images, or give a build of a source with vision.",
        )
    require_pillow()
    from kimi_k3_vl.processing import ImageRules

    where, found = f"{checkpoint.where}/{RULES}", {}
    if RULES in checkpoint.files():
        found = parse_json(checkpoint.read_file(RULES), where, download_hint(RULES))
    try:
        return ImageRules.from_config(found)
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}") from error
