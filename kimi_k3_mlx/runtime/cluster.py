"""One model on several Macs through mlx.distributed: who holds what, and how ranks stay together.

A rank is a process that `mlx.launch` starts. With `tensor` it holds its part of every layer's heads
and expert widths, with `pipeline` whole layers: rank 0 the last ones. Input: a model whose weights
are not read yet, and the group. All ranks must do the same: compute the same tokens from the same
prompt and seed, and fail together.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from converters.config import Dims, read_dims
from kimi_k3_mlx.errors import CheckpointError, KimiError, UsageError
from kimi_k3_mlx.schema import Json

if TYPE_CHECKING:
    from mlx.core.distributed import Group

TENSOR, PIPELINE = "tensor", "pipeline"
MOST_RANKS = 16
START = "start it by mlx.launch, see docs/cluster.md"


def group_of(pipeline: bool = False) -> Group | None:
    """The group that `mlx.launch` started this process in; None when it runs alone.

    Raises UsageError when it is alone and a pipeline was asked for.
    """
    import mlx.core as mx

    group = mx.distributed.init()
    if group.size() > 1:
        return group
    if pipeline:
        raise UsageError("--pipeline shares a model over several Macs, and this is one.", START)
    return None


def size_of(group: Group | None) -> int:
    """How many ranks there are."""
    return 1 if group is None else group.size()


def check_split(model: Any, size: int, split: str) -> None:
    """Raise UsageError, with the reason, for a number of ranks that can't share the model."""
    if reason := obstacle(model, size, split):
        fits = [n for n in range(2, MOST_RANKS + 1) if not obstacle(model, n, split)]
        others = f"use {' or '.join(map(str, fits))} ranks" if fits else "use one Mac"
        raise UsageError(f"{size} ranks can't share this model: {reason}.", others)


def obstacle(model: Any, size: int, split: str) -> str:
    """Why so many ranks can't share the model; empty when they can."""
    n_layers = len(model.model.layers)
    if split == PIPELINE:
        return f"it has only {n_layers} layers" if size > n_layers else ""
    for layer, module in enumerate(model.model.layers):
        if (heads := module.self_attn.num_heads) % size:
            return f"layer {layer} has {heads} attention heads"
        for path, linear in module.named_modules():
            if path.endswith(("o_proj", "down_proj")) and "routed_expert" not in path:
                width, group = inputs_of(linear)
                if width % (size * group):
                    groups = f" in groups of {group}" if group > 1 else ""
                    return f"{path} of layer {layer} has {width:,} inputs{groups}"
    return ""


def inputs_of(linear: Any) -> tuple[int, int]:
    """Inputs of a matrix, which `sharded-to-all` splits, and how many share a scale."""
    width = linear.weight.shape[-1]
    if "scales" in linear:
        return width * 32 // linear.bits, linear.group_size
    return width, 1


def share(model: Any, group: Group, split: str) -> None:
    """Leave in the model what this rank holds; reads nothing."""
    if split == PIPELINE:
        model.model.pipeline(group)
    else:
        model.shard(group)


def dims_here(model: Any, config: Json, group: Group | None, split: str) -> Dims:
    """The sizes of this rank's part, for sums of caches and states."""
    dims = read_dims(config)
    if group is None:
        return dims
    if split == PIPELINE:
        own = range(model.model.start_idx, model.model.end_idx)
        return replace(dims, n_layers=len(own), mla_layers=dims.mla_layers & set(own))
    return replace(dims, sizes=dims.sizes | {"kda": dims.sizes["kda"] // group.size()})


@contextmanager
def together(group: Group | None) -> Iterator[None]:
    """Do something on all ranks: wait for the others, and fail when one of them does.

    A rank that failed raises its own error, the others KimiError.
    """
    error: KimiError | None = None
    try:
        yield
    except KimiError as raised:
        error = raised
    n_failed = 0 if group is None else sum(gathered(group, error is not None))
    if error is not None:
        raise error
    if n_failed:
        raise KimiError(f"{n_failed} of {size_of(group)} ranks failed.", "see what they say.")


def check_same_build(group: Group | None, sha256: str) -> None:
    """Raise CheckpointError when the ranks have builds with different headers."""
    if group is None:
        return
    if len(set(gathered(group, int(sha256[:7], 16)))) > 1:
        raise CheckpointError(
            "the ranks have different builds, by their headers.",
            "copy the folder of rank 0 to the other Macs.",
        )


def shared_seed(group: Group | None, seed: int | None) -> int | None:
    """Rank 0's seed on every rank, for sampling; one is drawn when it has none."""
    if group is None:
        return seed
    import secrets

    return gathered(group, secrets.randbits(30) if seed is None else seed)[0]


def leave_together(group: Group | None) -> None:
    """Wait at the end of a generation until all ranks are there.

    mlx-lm has begun one more step by then: a rank that ended before it would fail the others.
    """
    if group is None:
        return
    import mlx.core as mx
    from mlx_lm.generate import generation_stream

    mx.synchronize(generation_stream)
    gathered(group, 0)


def gathered(group: Group, number: int) -> list[int]:
    """Every rank's number, below 2^31, by rank. No generation may be going on: exchanges of two
    streams can meet in another order on another rank."""
    import mlx.core as mx

    mine = mx.array([number], mx.int32)
    everyone: Any = mx.distributed.all_gather(mine, group=group, stream=mx.cpu)
    return list(map(int, everyone.tolist()))
