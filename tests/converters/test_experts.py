"""Selecting, stacking and renumbering experts, and the router's rows in lockstep with them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from converters.experts import check_keep, consecutive_runs, kept_rows, stacked
from kimi_k3_mlx.errors import UsageError
from kimi_k3_mlx.schema import TensorInfo

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
    stack = stacked("stack", "expert", experts, keep)
    assert [span.tensor for span in stack.spans] == [f"{i}.weight_packed" for i in keep]


def test_packed_bytes_become_words_and_scales_stay() -> None:
    packed = [TensorInfo(f"{i}.weight_packed", "U8", (8, 16), 0, 128) for i in range(3)]
    scales = [TensorInfo(f"{i}.weight_scale", "U8", (8, 1), 0, 8) for i in range(3)]
    weight = stacked("w", "expert", packed, range(3))
    assert (weight.dtype, weight.shape, weight.n_bytes) == ("U32", (3, 8, 4), 384)
    scale = stacked("s", "expert", scales, [0, 2])
    assert (scale.dtype, scale.shape, scale.n_bytes) == ("U8", (2, 8, 1), 16)


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (range(12), "plan keeps 12 experts in layer 40 but the router selects 16 per token."),
        ([*range(16), 15], "plan lists expert 15 after 15 in layer 40"),
        ([*range(1, 17), 0], "plan lists expert 0 after 16 in layer 40"),
        ([*range(16), 896], "plan keeps expert 896 in layer 40, which has 896 experts."),
        ([-1, *range(16)], "plan lists expert -1 after -1 in layer 40"),
    ],
)
def test_keep_sets_that_can_not_be(keep: list[int], message: str) -> None:
    with pytest.raises(UsageError) as error:
        check_keep(40, keep, 896, 16)
    assert message in error.value.message


def test_the_hint_for_too_few() -> None:
    with pytest.raises(UsageError) as error:
        check_keep(40, range(12), 896, 16)
    assert error.value.hint == "raise --keep to at least 16 (64 recommended)."
    check_keep(40, range(16), 896, 16)
