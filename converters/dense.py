"""Trunk tensors: which bytes of the source a build tensor is made of, and the transforms of bytes.

Input: a build name and the source tensors in fusing order. Output: `BuildTensor`s. Most are ranges;
`embed_q` is transposed, and what a profile narrows or quantizes is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

import numpy as np

from converters.config import Dims
from kimi_k3_mlx.errors import CheckpointError
from kimi_k3_mlx.schema import DTYPE_BYTES, NARROW, BuildTensor, Quantization, Span, TensorInfo

SWAP_LAST_AXES = "swap_last_axes"
DROP_ZERO_TAIL = "drop_zero_tail"
PAD_ZEROS = "pad_zeros"
PAD_BIAS = "pad_bias"

NEVER_CHOSEN = -1e30  # finite, so that no tool makes a NaN of it

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


def narrowed(tensor: BuildTensor) -> BuildTensor:
    """An F32 tensor as BF16, rounded to nearest even."""
    if tensor.dtype != "F32":
        return tensor
    return replace(tensor, dtype="BF16", transform=NARROW)


def quantized(tensor: BuildTensor, quantization: Quantization | None) -> list[BuildTensor]:
    """The tensors of MLX's quantized form of a matrix `[…, out, in]`; the matrix itself when its
    rows don't divide into groups, as in mlx_lm.convert."""
    *outer, width = tensor.shape
    if quantization is None or width % quantization.group_size:
        return [tensor]
    mode, bits, group_size = quantization
    module = tensor.name.removesuffix(".weight")
    words, groups = (*outer, width * bits // 32), (*outer, width // group_size)
    weight = replace(tensor, dtype="U32", shape=words, quantization=quantization)
    scales = replace(
        weight, name=f"{module}.scales", dtype=tensor.dtype, shape=groups, spans=(), transform=None
    )
    if mode != "affine":
        return [weight, replace(scales, dtype="U8")]
    return [weight, scales, replace(scales, name=f"{module}.biases")]


def unquantized(tensor: BuildTensor, dtype: str) -> BuildTensor:
    """A quantized `weight` as the matrix `[…, out, in]` that it is made of, of dtype `dtype`."""
    if tensor.quantization is None:
        return tensor
    *outer, words = tensor.shape
    shape = (*outer, words * 32 // tensor.quantization.bits)
    return replace(tensor, dtype=dtype, shape=shape, quantization=None)


def apply_transform(tensor: BuildTensor, data: bytes) -> bytes:
    """The bytes of a build tensor from those of its spans.

    Raises CheckpointError when values forbid it.
    """
    transform = _TRANSFORMS.get(tensor.transform or "")
    return transform(tensor, data) if transform else data


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


def _narrow(tensor: BuildTensor, data: bytes) -> bytes:
    bits = np.frombuffer(data, np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()


def _pad_zeros(tensor: BuildTensor, data: bytes) -> bytes:
    return data.ljust(tensor.n_bytes, b"\0")


def _pad_bias(tensor: BuildTensor, data: bytes) -> bytes:
    n_missing = (tensor.n_bytes - len(data)) // 4
    return data + np.full(n_missing, NEVER_CHOSEN, np.float32).tobytes()


_TRANSFORMS: dict[str, Callable[[BuildTensor, bytes], bytes]] = {
    SWAP_LAST_AXES: _swap_last_axes,
    DROP_ZERO_TAIL: _drop_zero_tail,
    NARROW: _narrow,
    PAD_ZEROS: _pad_zeros,
    PAD_BIAS: _pad_bias,
}
