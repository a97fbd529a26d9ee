"""Loads a build through mlx-lm's own loader, with the installed `kimi_k3` as its model.

Input: a folder, and the group when several Macs share the model. Output: model, tokenizer and
config. mlx-lm makes the model without reading a weight; then weights are read piece by piece, so
that memory holds each of them once. Code that lies in the build is never executed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kimi_k3_mlx.convert.memory import Running, running
from kimi_k3_mlx.errors import CheckpointError, DoesNotFitError
from kimi_k3_mlx.runtime.build import MAKE_AGAIN, TOKENIZER, check_build, explained, summary
from kimi_k3_mlx.runtime.cluster import (
    TENSOR,
    check_same_build,
    check_split,
    dims_here,
    share,
    size_of,
    together,
)
from kimi_k3_mlx.runtime.machine import Machine, Probes
from kimi_k3_mlx.runtime.wired import advise
from kimi_k3_mlx.schema import Json, Progress, silent
from kimi_k3_mlx.tensors.source import CONFIG
from kimi_k3_mlx.units import format_bytes

if TYPE_CHECKING:
    from mlx.core.distributed import Group

PIECE_BYTES = 4 << 30
"""Read at once: all of 300 GB in one evaluation trips macOS's GPU watchdog (mlx-lm#1572)."""
CONTEXT = 8192


class Loaded(NamedTuple):
    """A build in memory."""

    model: Any
    tokenizer: Any
    config: dict[str, Any]


def load(
    path: str | Path,
    *,
    lazy: bool = False,
    progress: Progress = silent,
    context: int = CONTEXT,
    force: bool = False,
    group: Group | None = None,
    split: str = TENSOR,
    probes: Probes | None = None,
) -> Loaded:
    """Load a finished build; with `lazy`, weights are read when they are first used.

    With a `group` (`cluster.group_of`), this rank's share only: `split` is `tensor` or `pipeline`.
    Raises, before a weight is read, CheckpointError, naming the file, for a folder that is damaged
    or no Kimi-K3; UsageError when there is no folder, or for a split that can't be; and
    DoesNotFitError, unless `force`, on a Mac too small for weights and `context` tokens.
    """
    path = Path(path)
    with together(group):
        build = check_build(path)
    check_same_build(group, build.id.headers_sha256)
    with together(group), explained(path):
        model, config = load_weights(path, lazy=True)
        if group is not None:
            check_split(model, group.size(), split)
            share(model, group, split)
        if not force:
            machine = Machine.read(path, probes or Probes())
            check_fits(path, machine, memory_here(model, config, context, group, split))
        tokenizer = load_tokenizer(path, config.get("eos_token_id"))
    with together(group), explained(path):
        if not lazy:
            read_weights(path, model, progress, PIECE_BYTES // size_of(group))
    return Loaded(model, tokenizer, config)


def load_weights(path: Path, lazy: bool) -> tuple[Any, Json]:
    """The model with its weights, and the config."""
    from mlx_lm.utils import load_model

    try:
        model, config = load_model(
            path, lazy=True, model_config={"model_file": None}, get_model_classes=installed_classes
        )
    except ValueError as error:
        raise CheckpointError(
            f"the weights in {path} don't fit its {CONFIG}: {summary(error)}."
        ) from error
    if not lazy:
        read_weights(path, model)
    return model, config


def installed_classes(config: Json) -> tuple[type, type]:
    """The model and its arguments: always the installed module, whatever the build carries."""
    from kimi_k3 import Model, ModelArgs

    return Model, ModelArgs


def parameters(model: Any) -> list[tuple[str, Any]]:
    """Paths and arrays, in the order of layers."""
    from mlx.utils import tree_flatten

    flat: list[tuple[str, Any]] = tree_flatten(model.parameters())
    return flat


def read_weights(
    path: Path, model: Any, progress: Progress = silent, piece_bytes: int = PIECE_BYTES
) -> None:
    """Read every weight that is not in memory yet; raise CheckpointError when a shard fails."""
    import mlx.core as mx

    named = parameters(model)
    done, total = 0, sum(array.nbytes for _, array in named)
    n_layers = len(model.model.layers)
    for name, arrays in pieces(named, piece_bytes):
        progress(done, total, what_is_read(name, n_layers))
        try:
            mx.eval(arrays)
        except RuntimeError as error:
            raise CheckpointError(
                f"{path}: the weights up to {name} can't be read: {summary(error)}.", MAKE_AGAIN
            ) from error
        # A stacked or shared weight leaves its parts behind, which MLX would keep for later.
        mx.clear_cache()
        done += sum(array.nbytes for array in arrays)
    progress(done, total, "weights")


def pieces(named: list[tuple[str, Any]], n_bytes: int) -> Iterator[tuple[str, list[Any]]]:
    """Lists of arrays of at most so many bytes, or of one larger array, and the last one's path."""
    piece: list[Any] = []
    held, last = 0, ""
    for name, array in named:
        if piece and held + array.nbytes > n_bytes:
            yield last, piece
            piece, held = [], 0
        piece.append(array)
        held, last = held + array.nbytes, name
    if piece:
        yield last, piece


def what_is_read(name: str, n_layers: int) -> str:
    """`layer 37/93` of a path in it."""
    _, found, rest = name.partition(".layers.")
    return f"layer {int(rest.split('.')[0]) + 1}/{n_layers}" if found else "weights"


def memory_here(model: Any, config: Json, context: int, group: Group | None, split: str) -> Running:
    """Memory of this rank's share when it runs, by the rule of `convert.memory`."""
    n_weights = sum(array.nbytes for _, array in parameters(model))
    return running(dims_here(model, config, group, split), n_weights, context)


def check_fits(path: Path, machine: Machine, memory: Running) -> None:
    """Raise DoesNotFitError on a Mac that can't wire so much."""
    if machine.is_mac and (advice := advise(machine, memory)).verdict == "no":
        raise DoesNotFitError(
            f"{path} takes {format_bytes(memory.n_bytes)} with {memory.context:,} tokens, but of "
            f"{machine.ram_gib} GB at most {format_bytes(advice.most_mb << 20)} can be wired.",
            "a smaller build (kimi-k3 fit), more Macs (docs/cluster.md), or --force to try.",
        )


def load_tokenizer(path: Path, eos_token_ids: Any) -> Any:
    """The tokenizer, as mlx-lm wraps it."""
    from mlx_lm import utils

    try:
        return utils.load_tokenizer(path, {"trust_remote_code": False}, eos_token_ids=eos_token_ids)
    except (KeyError, TypeError, ValueError) as error:
        # transformers checks little: what it doesn't find or can't use surfaces as any of these.
        raise CheckpointError(
            f"{path / TOKENIZER} or tokenizer_config.json is no tokenizer: {summary(error)}."
        ) from error
