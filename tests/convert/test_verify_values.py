"""The naive decoder is MLX's, and its bounds hold for honest values and for no others."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from converters.mxfp4 import decode
from kimi_k3_mlx.convert import packing
from kimi_k3_mlx.convert.packing import (
    FLOORS,
    Floats,
    Rows,
    decoded,
    least_cosine,
    mxfp4_as_bf16,
    unpacked,
    widened,
)
from kimi_k3_mlx.schema import Quantization

AFFINE = [Quantization("affine", bits, group) for bits in FLOORS for group in (32, 64, 128)]
ALL = [*AFFINE, Quantization("mxfp8", 8, 32)]
SOME = [stored for stored in AFFINE if stored.group_size == 64]
SOME += [Quantization("affine", 2, 32), Quantization("affine", 3, 128), ALL[-1]]
BY_NAME = {"ids": str}
DTYPES = {"BF16": mx.bfloat16, "F32": mx.float32}


def quantized(values: Floats, stored: Quantization, dtype: str = "BF16") -> tuple[Rows, Floats]:
    """MLX's rows of a matrix, and the matrix as the source has it."""
    matrix = mx.array(values).astype(DTYPES[dtype])
    parts = mx.quantize(matrix, **stored.to_json(), stream=mx.cpu)
    return Rows(*map(raw, parts)), np.array(matrix.astype(mx.float32))


def raw(array: mx.array) -> bytes:
    return np.array(array.view(mx.uint8)).tobytes()


def restored(rows: Rows, shape: tuple[int, ...], stored: Quantization, dtype: str) -> Floats:
    """What `mx.dequantize` makes of rows, in F32 throughout."""
    words = mx.array(np.frombuffer(rows.weight, np.uint32).reshape(shape[0], -1))
    if stored.mode == "mxfp8":
        scales = mx.array(np.frombuffer(rows.scales, np.uint8).reshape(shape[0], -1))
        parts, options = [words, scales], {"dtype": mx.float32}
    else:
        both = (widened(part, dtype).reshape(shape[0], -1) for part in (rows.scales, rows.biases))
        parts, options = [words, *map(mx.array, both)], {}
    return np.array(mx.dequantize(*parts, **stored.to_json(), **options, stream=mx.cpu))


def noise(seed: int, rows: int = 8, width: int = 256) -> Floats:
    return np.random.default_rng(seed).standard_normal((rows, width), np.float32)


def n_apart(rows: Rows, wanted: Floats, stored: Quantization, dtype: str = "BF16") -> int:
    values, bounds = decoded(rows, wanted, stored, dtype)
    return int(np.count_nonzero(~(np.abs(values - wanted) <= bounds)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", ALL, **BY_NAME)
def test_the_decoder_is_mlx_s(stored: Quantization, dtype: str) -> None:
    rows, wanted = quantized(noise(1), stored, dtype)
    values, _ = decoded(rows, wanted, stored, dtype)
    assert np.array_equal(values, restored(rows, wanted.shape, stored, dtype))


@pytest.mark.parametrize("stored", ALL, **BY_NAME)
def test_every_code_and_scale_decodes_as_in_mlx(stored: Quantization) -> None:
    """Random bits, and for mxfp8 all codes times all scales."""
    rng = np.random.default_rng(2)
    n_groups = 2048 // stored.group_size
    scales = np.arange(n_groups * 2, dtype=np.uint16) * 37 % 0x7F00
    rows = Rows(rng.bytes(256 * stored.bits), scales[:n_groups].tobytes(), scales[::2].tobytes())
    wanted = np.zeros((1, 2048), np.float32)
    if stored.mode == "mxfp8":
        codes = np.tile(np.arange(256, dtype=np.uint8), 256)
        powers = np.repeat(np.arange(256, dtype=np.uint8), 8)
        rows, wanted = Rows(codes.tobytes(), powers.tobytes()), np.zeros((1, 65536), np.float32)
    with np.errstate(over="ignore"):
        values, _ = decoded(rows, wanted, stored, "BF16")
    found = restored(rows, wanted.shape, stored, "BF16")
    if stored.mode == "mxfp8":
        assert not np.isfinite(values[0, -256:]).any()  # a scale of 255
        values, found = values[0, :-256], found[0, :-256]
    assert np.array_equal(values, found, equal_nan=True)


@pytest.mark.parametrize("bits", FLOORS)
def test_codes_are_a_stream_of_bits(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 1 << bits, 96)
    stream = sum(int(code) << (bits * number) for number, code in enumerate(codes))
    assert unpacked(stream.to_bytes(12 * bits, "little"), bits).tolist() == codes.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", SOME, **BY_NAME)
@settings(max_examples=15, deadline=None)
@given(
    values=hnp.arrays(
        np.float32,
        (2, 128),
        elements=st.floats(-1e4, 1e4, width=32)
        | st.floats(-1, 1, width=32)
        | st.sampled_from([0.0, 1.0, -1.0, 3.5, -3.5, 7.5, 1e-7, -5e-8, 449.0, 1e-20]),
    )
)
def test_honest_rounding_stays_within_the_bounds(
    values: Floats, stored: Quantization, dtype: str
) -> None:
    values[np.abs(values) < 1e-30] = 0  # see the next test
    rows, wanted = quantized(values, stored, dtype)
    assert n_apart(rows, wanted, stored, dtype) == 0


@pytest.mark.parametrize("value", [1e-36, 1e-37])
def test_an_overflow_of_mlx_itself_is_caught(value: float) -> None:
    """MLX 0.32.4 makes infinities of an mxfp8 group whose largest value is as small as that."""
    values = noise(4)
    values[2, 32:64] = value
    rows, wanted = quantized(values, ALL[-1])
    with np.errstate(over="ignore"):
        assert n_apart(rows, wanted, ALL[-1]) == 32


@pytest.mark.parametrize("stored", SOME, **BY_NAME)
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e30])
@pytest.mark.parametrize("shift", [0.0, 100.0])
def test_the_bounds_hold_for_whole_matrices(
    stored: Quantization, scale: float, shift: float
) -> None:
    """Also where MLX's step falls between two roundings, as with symmetric extremes."""
    values = (noise(3, 256) + np.float32(shift)) * np.float32(scale)
    values[::2, ::32], values[::2, 1::32] = 4 * scale, -4 * scale
    rows, wanted = quantized(values, stored)
    assert n_apart(rows, wanted, stored) == 0


@pytest.mark.parametrize("stored", SOME, **BY_NAME)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**9), what=st.sampled_from(["rows", "groups", "codes", "scales"]))
def test_what_belongs_elsewhere_breaks_the_bounds(
    seed: int, what: str, stored: Quantization
) -> None:
    """Two rows, groups, or the codes or scales of two rows, exchanged."""
    scale = np.exp2(np.arange(8, dtype=np.float32))[:, None] if what == "scales" else 1
    rows, wanted = quantized(noise(seed) * scale, stored)
    if what == "groups":
        found = wanted.reshape(-1, stored.group_size).copy()
        found[[0, 1]] = found[[1, 0]]
        rows, _ = quantized(found.reshape(wanted.shape), stored)
    else:
        changed = {"codes": (0,), "scales": (1, 2)}.get(what, (0, 1, 2))
        rows = Rows(*(swapped(part) if i in changed else part for i, part in enumerate(rows)))
    assert n_apart(rows, wanted, stored) >= stored.group_size // 8


def swapped(part: bytes) -> bytes:
    """Exchange the first two of eight rows."""
    values = np.frombuffer(part, np.uint8).reshape(8, -1).copy()
    values[[0, 1]] = values[[1, 0]]
    return values.tobytes()


@pytest.mark.parametrize("stored", SOME, **BY_NAME)
def test_one_wrong_code_breaks_the_bounds(stored: Quantization) -> None:
    """A code's highest bit; in 2 bits an extreme's bound is a whole step and more."""
    rows, wanted = quantized(noise(5), stored)
    weight = bytearray(rows.weight)
    n_caught = 0
    for number in range(64):
        bit = number * stored.bits + stored.bits - 1 - (stored.mode == "mxfp8")
        weight[bit // 8] ^= 1 << bit % 8
        n_caught += n_apart(rows._replace(weight=bytes(weight)), wanted, stored) > 0
        weight[bit // 8] ^= 1 << bit % 8
    assert n_caught >= (56 if stored.bits == 2 else 64)


@pytest.mark.parametrize("stored", SOME, **BY_NAME)
def test_no_number_is_within_no_bounds(stored: Quantization) -> None:
    rows, wanted = quantized(noise(6), stored)
    wanted[3, 5] = np.nan
    assert n_apart(rows, wanted, stored) > 0


@pytest.mark.parametrize("stored", SOME, **BY_NAME)
def test_normal_weights_are_far_above_the_least_cosine(stored: Quantization) -> None:
    rows, wanted = quantized(noise(7, 64), stored)
    values, _ = decoded(rows, wanted, stored, "BF16")
    cosine = np.vdot(values, wanted) / np.linalg.norm(values) / np.linalg.norm(wanted)
    assert 1 - cosine < (1 - least_cosine(stored)) / 2


def test_mxfp4_decodes_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = np.tile(np.arange(256, dtype=np.uint8), 16)
    scales = np.arange(256, dtype=np.uint8).clip(0, 252)[:, None]  # 6 times more is no F32
    packed = codes.reshape(256, 16)
    monkeypatch.setattr(packing, "STEP", 48)
    found = widened(mxfp4_as_bf16(packed.tobytes(), scales.tobytes()), "BF16")
    assert np.array_equal(found.reshape(256, 32), decode(packed, scales))
