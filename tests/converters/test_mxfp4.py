"""The packed format: exact values, and the same bytes as MLX's."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import load_file

from converters.mxfp4 import count_nan_scales, decode, mlx_shape

VECTORS = load_file(Path(__file__).parents[1] / "golden/mxfp4_vectors.safetensors")
PACKED, SCALES = VECTORS["weight_packed"], VECTORS["weight_scale"]


def test_every_byte_at_every_scale_decodes_exactly() -> None:
    """The vectors are compressed-tensors' own: all 256 bytes at scales 0, 1, 2, 126 … 254."""
    values = decode(PACKED, SCALES)
    expected = VECTORS["dequantized_f64"]
    assert np.array_equal(values, expected)
    assert np.array_equal(np.signbit(values), np.signbit(expected))


def test_mlx_reads_the_same_bytes() -> None:
    sane = (SCALES[:, 0] > 1) & (SCALES[:, 0] < 253)
    words, scales = mx.array(PACKED[sane].view("<u4")), mx.array(SCALES[sane])
    values = mx.dequantize(words, scales, group_size=32, bits=4, mode="mxfp4", dtype=mx.float32)
    assert np.array_equal(np.array(values), decode(PACKED[sane], SCALES[sane]))


def test_the_shape_in_words() -> None:
    assert PACKED.view("<u4").shape == mlx_shape(PACKED.shape)
    assert mlx_shape((3072, 1792)) == (3072, 448)


def test_scale_255_is_no_number_and_is_counted() -> None:
    scales = np.array([[255, 127]], np.uint8)
    values = decode(np.zeros((1, 32), np.uint8), scales)
    assert np.isnan(values[0, :32]).all()
    assert np.isfinite(values[0, 32:]).all()
    assert count_nan_scales(scales.tobytes()) == 1


@pytest.mark.parametrize(("byte", "pair"), [(0x80, (0.0, -0.0)), (0x27, (6.0, 1.0))])
def test_the_low_nibble_comes_first(byte: int, pair: tuple[float, float]) -> None:
    packed = np.full((1, 16), byte, np.uint8)
    first = decode(packed, np.array([[127]], np.uint8))[0, :2]
    assert first.tolist() == list(pair)
    assert np.signbit(first).tolist() == [str(value).startswith("-") for value in pair]
