"""Quantized bytes are MLX's own, and the stated loss is that of the naive decoder."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from converters.affine import quantize, requantize
from converters.mxfp4 import decode
from kimi_k3_mlx.schema import Quantization

FORMATS = [Quantization("affine", bits, group) for bits in (8, 6, 5, 4) for group in (64, 32)]
FORMATS += [Quantization("mxfp8", 8, 32)]


def bfloat16(values: np.ndarray) -> mx.array:
    return mx.array(values.astype(np.float32)).astype(mx.bfloat16)


def raw(array: mx.array) -> bytes:
    return np.array(array.view(mx.uint8)).tobytes()


@pytest.mark.parametrize("quantization", FORMATS, ids=str)
def test_the_parts_are_those_of_mlx(quantization: Quantization) -> None:
    values = bfloat16(np.random.default_rng(0).standard_normal((6, 128)))
    result = quantize(raw(values), "BF16", 128, quantization)
    expected = mx.quantize(values, **quantization.to_json())
    assert list(result.parts) == [raw(part) for part in expected]
    plain = np.array(values.astype(mx.float32))
    assert result.squared_norm == pytest.approx(float((plain**2).sum()), rel=1e-5)
    error = (result.squared_error / result.squared_norm) ** 0.5
    assert error < {8: 0.03, 6: 0.04, 5: 0.06, 4: 0.12}[quantization.bits]


def test_a_trunk_in_float32_has_scales_in_float32() -> None:
    values = mx.random.normal((4, 64), key=mx.random.key(1))
    result = quantize(raw(values), "F32", 64, Quantization("affine", 8, 64))
    assert [len(part) for part in result.parts] == [4 * 64, 4 * 4, 4 * 4]


@pytest.mark.parametrize("tiny", [1e-36, 1e-37, -3e-38])
def test_mxfp8_of_almost_nothing_is_nothing(tiny: float) -> None:
    """mlx 0.32.4 makes infinities of a group whose largest number is about 1e-37."""
    values = np.zeros((2, 64))
    values[0, :32], values[1, 40] = tiny, 0.5
    mxfp8 = Quantization("mxfp8", 8, 32)
    result = quantize(raw(bfloat16(values)), "BF16", 64, mxfp8)
    words = mx.array(np.frombuffer(result.parts[0], np.uint32).reshape(2, 16))
    scales = mx.array(np.frombuffer(result.parts[1], np.uint8).reshape(2, 2))
    decoded = np.array(mx.dequantize(words, scales, **mxfp8.to_json(), dtype=mx.float32))
    assert decoded[1, 40] == 0.5
    assert np.abs(decoded).sum() == 0.5
    assert result.squared_error < 1e-60


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([(2, 64), (3, 32), (2, 128), (3, 64)]))
def test_requantizing_starts_from_the_exact_values(seed: int, form: tuple[int, int]) -> None:
    """An MXFP4 number fits in BF16, so nothing is lost before the fewer bits."""
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (3, 64), np.uint8)
    scales = rng.integers(100, 140, (3, 4), np.uint8)
    quantization = Quantization("affine", *form)
    result = requantize(packed.tobytes(), scales.tobytes(), 128, quantization)
    exact = decode(packed, scales)
    expected = mx.quantize(bfloat16(exact), **quantization.to_json())
    assert np.array_equal(np.array(bfloat16(exact).astype(mx.float32)), exact)
    assert list(result.parts) == [raw(part) for part in expected]
    assert result.squared_norm == pytest.approx(float((exact**2).sum()), rel=1e-4)
