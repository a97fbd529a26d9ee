"""Trunk tensors: which bytes of the source a build tensor is made of, and two transforms of bytes.

Input: a build name and the source tensors in fusing order. Output: `BuildTensor`s. Only `embed_q`
needs arithmetic on positions (a transpose); all else is ranges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import numpy as np

from converters.config import Dims
from kimi_k3_mlx.errors import CheckpointError
from kimi_k3_mlx.schema import DTYPE_BYTES, BuildTensor, Span, TensorInfo

SWAP_LAST_AXES = "swap_last_axes"
DROP_ZERO_TAIL = "drop_zero_tail"

_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def whole(tensor: TensorInfo) -> Span:
    """All bytes of a tensor."""
    return Span(tensor.name, 0, tensor.n_bytes)


def copied(name: str, role: str, tensor: TensorInfo) -> BuildTensor:
    """A tensor as it is."""
    return BuildTensor(name, tensor.dtype, tensor.shape, role, (whole(tensor),))


def joined(name: str, role: str, tensors: Sequence[TensorInfo]) -> BuildTensor:
    """Tensors `[n_i, …]` one after the other on axis 0."""
    first = tensors[0]
    shape = (sum(tensor.shape[0] for tensor in tensors), *first.shape[1:])
    return BuildTensor(name, first.dtype, shape, role, tuple(map(whole, tensors)))


def joined_conv(name: str, role: str, tensors: Sequence[TensorInfo]) -> BuildTensor:
    """Depthwise kernels `[n, 1, width]` as one `[Σn, width, 1]`: the bytes stay in order."""
    fused = joined(name, role, tensors)
    n, _, width = fused.shape
    return BuildTensor(name, fused.dtype, (n, width, 1), role, fused.spans)


def a_log(name: str, role: str, tensor: TensorInfo, dims: Dims) -> BuildTensor:
    """`A_log` of the heads alone; what head_dim pads it with must be zero."""
    heads = dims.sizes["kda_heads"]
    transform = None if tensor.shape == (heads,) else DROP_ZERO_TAIL
    return BuildTensor(name, tensor.dtype, (heads,), role, (whole(tensor),), transform)


def absorbed(names: Sequence[str], role: str, tensor: TensorInfo, dims: Dims) -> list[BuildTensor]:
    """`kv_b_proj [heads·(nope+value), lora]` as `embed_q [heads, lora, nope]` and
    `unembed_out [heads, value, lora]`."""
    row = tensor.shape[1] * DTYPE_BYTES[tensor.dtype]
    head = dims.nope + dims.value
    starts = [index * head * row for index in range(dims.heads)]
    split, end = dims.nope * row, head * row
    keys = tuple(Span(tensor.name, at, at + split) for at in starts)
    values = tuple(Span(tensor.name, at + split, at + end) for at in starts)
    embed_q, unembed_out = names
    lora = tensor.shape[1]
    return [
        BuildTensor(
            embed_q, tensor.dtype, (dims.heads, lora, dims.nope), role, keys, SWAP_LAST_AXES
        ),
        BuildTensor(unembed_out, tensor.dtype, (dims.heads, dims.value, lora), role, values),
    ]


def apply_transform(tensor: BuildTensor, data: bytes) -> bytes:
    """The bytes of a build tensor from those of its spans.

    Raises CheckpointError when values forbid it.
    """
    if tensor.transform is None:
        return data
    return _TRANSFORMS[tensor.transform](tensor, data)


def _swap_last_axes(tensor: BuildTensor, data: bytes) -> bytes:
    *outer, rows, columns = tensor.shape
    words = np.frombuffer(data, _WORDS[DTYPE_BYTES[tensor.dtype]])
    return words.reshape(*outer, columns, rows).swapaxes(-1, -2).tobytes()


def _drop_zero_tail(tensor: BuildTensor, data: bytes) -> bytes:
    n_kept = prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]
    tail = np.frombuffer(data[n_kept:], np.float32)
    if tail.any():
        index = int(np.flatnonzero(tail)[0])
        raise CheckpointError(
            f"tensor {tensor.spans[0].tensor}: element {tensor.shape[0] + index} is {tail[index]}, "
            f"expected 0 after the {tensor.shape[0]} heads.",
            "the checkpoint is not a Kimi-K3 that this version knows.",
        )
    return data[:n_kept]


_TRANSFORMS: dict[str, Callable[[BuildTensor, bytes], bytes]] = {
    SWAP_LAST_AXES: _swap_last_axes,
    DROP_ZERO_TAIL: _drop_zero_tail,
}
