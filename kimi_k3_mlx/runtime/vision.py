"""Pictures for a loaded text model: the tower of the same build, and prompts with its features.

Input: a build's folder, images, token ids with one placeholder per image. Output: embeddings and
ids for mlx-lm's `generate_step(ids, model, input_embeddings=embeddings)`. The text model is not
touched: pruned, graded and quantized builds see alike. Only the installed code runs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kimi_k3_mlx.errors import UsageError
from kimi_k3_mlx.runtime.build import explained
from kimi_k3_mlx.tensors.local import open_source
from kimi_k3_mlx.vision.tower import load_tower, read_rules

if TYPE_CHECKING:
    import mlx.core as mx
    from PIL.Image import Image

    from kimi_k3_vision import Vision
    from kimi_k3_vl.processing import ImageRules


KEPT_BYTES = 256 << 20
"""Of rows of pictures: 18,000 of K3's in bfloat16."""


class Prompt(NamedTuple):
    """A prompt with its pictures."""

    ids: mx.array
    """[T] int32; a picture is as many placeholders as it has rows."""
    embeddings: mx.array
    """[T, hidden], in the dtype of the text model's embedding."""


@dataclass(frozen=True)
class Eyes:
    """What a build needs to see: tower and projector, rules for pictures, two token ids."""

    vision: Vision
    rules: ImageRules
    placeholder: int
    pad: int | None

    kept: OrderedDict[bytes, mx.array] = field(default_factory=OrderedDict, repr=False)
    """Rows of the last pictures, by a hash of their patches: a conversation sends them again."""

    def features(self, images: Sequence[Image]) -> list[mx.array]:
        """Evaluated rows [n, hidden] of each picture; one that was just seen is not seen again."""
        import mlx.core as mx
        import numpy as np

        patches = [self.rules.patches(image) for image in images]
        grids = [self.rules.grid(*image.size) for image in images]
        keys = [
            sha256(repr(grid).encode() + rows.tobytes()).digest()
            for grid, rows in zip(grids, patches, strict=True)
        ]
        new = {key: at for at, key in enumerate(keys) if key not in self.kept}
        if new:
            packed = mx.array(np.concatenate([patches[at] for at in new.values()]))
            rows = self.vision.see(packed, [grids[at] for at in new.values()])
            self.kept.update(zip(new, rows, strict=True))
        seen = [self.kept[key] for key in keys]
        for key in keys:
            self.kept.move_to_end(key)
        while sum(rows.nbytes for rows in self.kept.values()) > KEPT_BYTES:
            self.kept.popitem(last=False)
        return seen

    def expanded(self, ids: Sequence[int], images: Sequence[Image]) -> list[int]:
        """The ids with as many placeholders for each picture as it has rows.

        Raises UsageError when there are neither as many placeholders as pictures nor as rows.
        """
        from kimi_k3_vl.prompt import expand

        counts = [self.rules.n_tokens(*image.size) for image in images]
        try:
            prompts: list[list[int]] = expand([list(ids)], counts, self.placeholder)
        except ValueError as error:
            raise UsageError(str(error), "give one image for each place in the prompt.") from error
        return prompts[0]


def load_vision(path: str | Path) -> Eyes:
    """Tower and projector of a build or a source, with its rules for pictures.

    Raises CheckpointError for a checkpoint without vision, or whose weights don't fit its config;
    UsageError when Pillow is not installed.
    """
    folder = Path(path)
    with explained(folder):
        build = open_source(folder)
    rules = read_rules(build)
    with explained(folder):
        tower = load_tower(build)
    config = build.config
    return Eyes(tower, rules, config["media_placeholder_token_id"], config.get("pad_token_id"))


def embed(model: Any, eyes: Eyes, ids: Sequence[int], images: Sequence[Image]) -> Prompt:
    """A prompt for `generate_step(prompt.ids, model, input_embeddings=prompt.embeddings)`.

    Placeholders and pictures are counted before the tower runs: raises UsageError.
    """
    from kimi_k3_vl.prompt import merge

    expanded = eyes.expanded(ids, images)
    features = eyes.features(images)
    table = model.model.embed_tokens
    merged = merge(table, [expanded], features, eyes.placeholder, eyes.pad)
    return Prompt(merged.ids[0], merged.embeddings[0])
