"""Selecting, stacking and renumbering experts, and the router's rows in lockstep with them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from converters.dense import PAD_ZEROS, apply_transform
from converters.experts import consecutive_runs, kept_rows, requantized, stacked
from kimi_k3_mlx.schema import Quantization, TensorInfo

keeps = st.sets(st.integers(0, 30), min_size=1).map(sorted)


@given(keeps)
def test_runs_cover_exactly_the_numbers(keep: list[int]) -> None:
    runs = list(consecutive_runs(keep))
    assert [number for begin, end in runs for number in range(begin, end)] == keep
    assert all(before[1] < after[0] for before, after in pairwise(runs))


@given(keeps)
def test_router_rows_follow_the_experts(keep: list[int]) -> None:
    """The new row of an expert must be its place in the stack."""
    rows = np.arange(31 * 4, dtype=np.uint16).reshape(31, 4)
    info = TensorInfo("gate", "BF16", rows.shape, 0, rows.nbytes)
    built = kept_rows("gate", "router", info, keep)
    data = b"".join(rows.tobytes()[span.begin : span.end] for span in built.spans)
    assert np.array_equal(np.frombuffer(data, np.uint16).reshape(built.shape), rows[keep])
    experts = [TensorInfo(f"{i}.weight_packed", "U8", (2, 16), 0, 32) for i in range(31)]
    stack = stacked("stack", experts, keep)
    assert [span.tensor for span in stack.spans] == [f"{i}.weight_packed" for i in keep]


def test_packed_bytes_become_words_and_scales_stay() -> None:
    packed = [TensorInfo(f"{i}.weight_packed", "U8", (8, 16), 0, 128) for i in range(3)]
    scales = [TensorInfo(f"{i}.weight_scale", "U8", (8, 1), 0, 8) for i in range(3)]
    weight = stacked("w", packed, range(3))
    assert (weight.dtype, weight.shape, weight.n_bytes) == ("U32", (3, 8, 4), 384)
    scale = stacked("s", scales, [0, 2])
    assert (scale.dtype, scale.shape, scale.n_bytes) == ("U8", (2, 8, 1), 16)


def test_a_padded_layer_has_zeros_and_a_bias_that_never_wins() -> None:
    """What comes after the kept experts; the transforms write it."""
    experts = [TensorInfo(f"{i}.weight_packed", "U8", (2, 16), 0, 32) for i in range(4)]
    stack = stacked("stack", experts, [0, 3], 5)
    assert (stack.shape, stack.n_bytes, stack.n_read) == ((5, 2, 4), 160, 64)
    assert stack.transform == PAD_ZEROS
    bias = TensorInfo("gate.e_score_correction_bias", "F32", (4,), 0, 16)
    padded = kept_rows("mlp.e_score_correction_bias", "router", bias, [0, 3], 5)
    values = np.frombuffer(apply_transform(padded, np.float32([0.25, -7]).tobytes()), np.float32)
    assert values.tolist()[:2] == [0.25, -7]
    assert (values[2:] <= -1e29).all()
    assert np.isfinite(values).all()


def test_requantized_experts_read_codes_and_scales_in_turn() -> None:
    packed = [TensorInfo(f"{i}.weight_packed", "U8", (8, 64), 0, 512) for i in range(3)]
    scales = [TensorInfo(f"{i}.weight_scale", "U8", (8, 4), 0, 32) for i in range(3)]
    three_bits = Quantization("affine", 3, 64)
    weight, scale, bias = requantized("m", packed, scales, [0, 2], three_bits)
    assert [span.tensor[:8] for span in weight.spans] == [
        "0.weight",
        "0.weight",
        "2.weight",
        "2.weight",
    ]
    assert (weight.dtype, weight.shape) == ("U32", (2, 8, 128 * 3 // 32))
    assert (scale.dtype, scale.shape) == (bias.dtype, bias.shape) == ("BF16", (2, 8, 2))
    assert weight.n_bytes * 8 == 2 * 8 * 128 * 3, "really that many bits"
    assert scale.n_read == bias.n_read == 0
