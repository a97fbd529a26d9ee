"""MLX's quantized matrices, decoded a second time in plain numpy, and how far off they may be.

Input: the bytes of some rows of `weight`, `scales` and `biases`. Output: their values, and for each
the largest distance from the source that honest rounding explains. No MLX and no `converters`:
a test proves the decoder against `mx.dequantize`, and the bounds against `mx.quantize`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kimi_k3_mlx.schema import Quantization

Floats = NDArray[np.float32]
Codes = NDArray[np.uint8]

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
UNITS = {"BF16": 2.0**-8, "F32": 2.0**-23}
"""How far rounding moves a scale, in parts of it."""
TINY = 1e-7
"""The least step of MLX's affine groups: what is smaller than that may vanish."""

FLOORS = {2: 0.80, 3: 0.94, 4: 0.98, 5: 0.99, 6: 0.998, 8: 0.999}
"""The least cosine between a matrix and itself in so many bits affine; normal weights lose less
than half of that: 0.92, 0.982, 0.996, 0.9990, 0.9998, 0.99997 in groups of 64."""
FLOOR_MXFP8 = 0.998
STEP = 1 << 18
"""Bytes of codes that are decoded at a time."""


class Rows(NamedTuple):
    """Some rows of a quantized matrix, as a build stores them."""

    weight: bytes
    scales: bytes
    biases: bytes = b""


def decoded(
    rows: Rows, wanted: Floats, quantization: Quantization, dtype: str
) -> tuple[Floats, Floats]:
    """The rows' values, shaped as the source's `wanted`, and how far off each of them may be.

    The bounds follow from the range of the source's own groups, not from the build's scales, which
    may be damaged. `dtype` is that of affine scales.
    """
    grouped = wanted.reshape(-1, quantization.group_size)
    if quantization.mode == "mxfp8":
        values, bounds = _mxfp8(rows, grouped)
    else:
        values, bounds = _affine(rows, grouped, quantization.bits, dtype)
    return values.reshape(wanted.shape), bounds.reshape(wanted.shape)


def least_cosine(quantization: Quantization) -> float:
    """Below this, a matrix is not the one that was quantized."""
    return FLOOR_MXFP8 if quantization.mode == "mxfp8" else FLOORS[quantization.bits]


def unpacked(words: bytes, bits: int) -> Codes:
    """Codes of a little-endian stream of bits: 32 of them fill `bits` words exactly."""
    columns = np.frombuffer(words, np.uint32).reshape(-1, bits).T.copy()
    codes = np.empty((columns.shape[1], 32), np.uint8)
    for number in range(32):
        at, shift = divmod(number * bits, 32)
        value = columns[at] >> np.uint32(shift)
        if shift + bits > 32:
            value |= columns[at + 1] << np.uint32(32 - shift)
        codes[:, number] = value & np.uint32((1 << bits) - 1)
    return codes.ravel()


def widened(words: bytes, dtype: str) -> Floats:
    """BF16 or F32 as numbers."""
    if dtype == "F32":
        return np.frombuffer(words, np.float32)
    return (np.frombuffer(words, np.uint16).astype(np.uint32) << 16).view(np.float32)


def _affine(rows: Rows, wanted: Floats, bits: int, dtype: str) -> tuple[Floats, Floats]:
    """MLX puts a group's extreme on a whole step: of n steps from end to end, that makes each up to
    n/(n−1) of a step, or cuts the other end off by up to one. Rounding the step to `dtype` moves
    code q by q times the error of that.
    """
    scales, biases = (widened(part, dtype)[:, None] for part in (rows.scales, rows.biases))
    codes = unpacked(rows.weight, bits).reshape(wanted.shape)
    values = codes * scales
    values += biases
    top = (1 << bits) - 1
    step = np.ptp(wanted, axis=1, keepdims=True) * np.float32(1.0001 / (top - 1))
    steps = np.arange(top + 1, dtype=np.float32) * np.float32(UNITS[dtype]) + np.float32(0.5)
    steps[top] += np.float32(0.5)
    bounds: Floats = steps.take(codes) * step
    bounds += np.abs(wanted).max(axis=1, keepdims=True) * np.float32(2.0**-20) + np.float32(TINY)
    return values, bounds


def _mxfp8(rows: Rows, wanted: Floats) -> tuple[Floats, Floats]:
    """MLX takes the least power of two that leaves a group's largest within 448: the spacing of the
    smallest values is at most 2^-9 times 2/448 of that; 3 bits of mantissa do for all others.
    """
    codes = np.frombuffer(rows.weight, np.uint8).reshape(wanted.shape)
    exponents = np.frombuffer(rows.scales, np.uint8).astype(np.int32)[:, None]
    values = _E4M3[codes] * _POWERS[exponents]
    sizes = np.abs(wanted)
    smallest = sizes.max(axis=1, keepdims=True) * np.float32(2.0**-10 / 223.9)
    return values, np.maximum(sizes / np.float32(14.99), smallest + np.float32(2.0**-120))


def _e4m3() -> Floats:
    """The 256 values of E4M3: a sign, 4 bits of exponent less 7, 3 of mantissa, no infinities."""
    codes = np.arange(256)
    exponents, mantissas = (codes >> 3) & 15, codes & 7
    normal = np.ldexp(1 + mantissas / 8, exponents - 7)
    values = np.where(exponents == 0, np.ldexp(mantissas / 8, -6), normal)
    values = np.where(codes & 127 == 127, np.nan, values)
    return np.where(codes & 128, -values, values).astype(np.float32)


_E4M3 = _e4m3()
_POWERS = np.append(np.ldexp(np.float32(1), np.arange(-127, 128)), np.float32(np.nan))
"""E8M0: powers of two; 255 is no number."""


def mxfp4_as_bf16(packed: bytes, scales: bytes) -> bytes:
    """An MXFP4 matrix in BF16, exactly: two codes a byte, low nibble first, a scale for 32."""
    return b"".join(
        _mxfp4(packed[at : at + STEP], scales[at // 16 : (at + STEP) // 16])
        for at in range(0, len(packed), STEP)
    )


def _mxfp4(packed: bytes, scales: bytes) -> bytes:
    values = _PAIRS.take(np.frombuffer(packed, np.uint8)).view(np.float32).reshape(-1, 32)
    values *= _POWERS[np.frombuffer(scales, np.uint8)][:, None]
    words: NDArray[np.uint16] = (values.view(np.uint32) >> 16).astype(np.uint16)
    return words.tobytes()


_CODES = np.concatenate([E2M1, -E2M1])
_PAIRS = np.stack([_CODES[np.arange(256) & 15], _CODES[np.arange(256) >> 4]], axis=-1).view("u8")
"""The two values of each byte, side by side in one word."""
