"""Quantized matrices: MLX computes them, on the CPU, a few rows or one expert at a time.

Input: bytes of a matrix in BF16 or F32, or of one MXFP4 expert. Output: the bytes of `weight`,
`scales` and `biases` as `mx.quantize` makes them, and what rounding cost. The one converter that
needs MLX; it is imported when a profile asks for it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from kimi_k3_mlx.schema import MXFP4, Quantization

TINY = 1e-30
SHAPED_LIKE = {"U32": np.uint32, "U8": np.uint8, "BF16": np.uint16, "F32": np.float32}


class Quantized(NamedTuple):
    """Bytes of the tensors `weight`, `scales` and, when the mode has them, `biases`."""

    parts: tuple[bytes, ...]
    squared_error: float
    """Σ(ŵ−w)², w as the source has it."""
    squared_norm: float
    """Σw²."""


def quantize(data: bytes, dtype: str, width: int, quantization: Quantization) -> Quantized:
    """Quantize rows of `width` weights, BF16 or F32; scales and biases have that dtype too."""
    return _quantized(_matrix(data, dtype, width), quantization)


def requantize(packed: bytes, scales: bytes, width: int, quantization: Quantization) -> Quantized:
    """Decode one MXFP4 matrix with rows of `width` weights and quantize it anew."""
    words, exponents = _matrix(packed, "U32", width // 8), _matrix(scales, "U8", width // 32)
    values = mx.dequantize(
        words, exponents, **MXFP4.to_json(), dtype=mx.bfloat16, stream=mx.cpu
    )  # exact: an E2M1 code and a power of two fit in BF16
    return _quantized(values, quantization)


def _quantized(values: mx.array, quantization: Quantization) -> Quantized:
    options: dict[str, Any] = quantization.to_json()
    if quantization.mode == "mxfp8":  # mlx 0.32.4 makes infinities of groups of nothing else
        tiny = mx.abs(values, stream=mx.cpu) < TINY
        values = mx.where(tiny, mx.zeros((), values.dtype), values, stream=mx.cpu)
    parts = mx.quantize(values, **options, stream=mx.cpu)
    if quantization.mode == "affine":
        scales, biases = (part.astype(mx.float32, stream=mx.cpu) for part in parts[1:])
        decoded = mx.dequantize(parts[0], scales, biases, **options, stream=mx.cpu)
    else:
        decoded = mx.dequantize(*parts, **options, dtype=mx.float32, stream=mx.cpu)
    wanted = np.array(values.astype(mx.float32, stream=mx.cpu), copy=False).ravel()
    error = np.array(decoded, copy=False).ravel() - wanted
    return Quantized(
        tuple(map(_bytes, parts)),
        float(error @ error),
        float(wanted @ wanted),
    )


def _matrix(data: bytes, dtype: str, width: int) -> mx.array:
    words = mx.array(np.frombuffer(data, SHAPED_LIKE[dtype]).reshape(-1, width))
    return words.view(mx.bfloat16, stream=mx.cpu) if dtype == "BF16" else words


def _bytes(array: mx.array) -> bytes:
    if array.dtype == mx.bfloat16:
        array = array.view(mx.uint16, stream=mx.cpu)
    return np.array(array, copy=False).tobytes()
