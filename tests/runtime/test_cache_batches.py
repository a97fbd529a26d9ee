"""Going back in batches: rows of different lengths, and rows that join and leave."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, BatchKVCache, trim_prompt_cache

from kimi_k3_mlx.runtime import cache as module
from kimi_k3_mlx.runtime.cache import RewindableCache, rewindable
from kimi_k3_mlx.runtime.load import load
from tests.runtime.one_layer import MODEL, TEXT, OneLayer, check, naive, run


@pytest.fixture
def model() -> OneLayer:
    return MODEL


@pytest.fixture(scope="module")
def whole(tiny_float_source: Path) -> Any:
    return load(tiny_float_source).model


# Batches, as mlx-lm's BatchGenerator makes them: merge, prepare, run, finalize, extend, filter,
# extract.

LENGTHS = [11, 40, 23]


def merged(caches: list[list[Any]]) -> list[Any]:
    return [rows[0].merge(list(rows)) for rows in zip(*caches, strict=True)]


def prefill_ragged(model: Any, caches: list[Any], lengths: list[int], step: int = 64) -> None:
    """Prompts of different lengths, padded on the right, as mlx-lm's PromptProcessingBatch does."""
    ids, most = TEXT[:, : max(lengths)].copy(), max(lengths)
    for row, length in zip(ids, lengths, strict=True):
        row[length:] = 0
    for cache in caches:
        cache.prepare(lengths=lengths, right_padding=[most - n for n in lengths])
    for first in range(0, most, step):
        model(mx.array(ids[:, first : first + step]), caches)
        mx.eval([c.state for c in caches])
    for cache in caches:
        cache.finalize()


def check_rows(model: Any, caches: list[Any], lengths: list[int], tail: np.ndarray) -> None:
    """Every row answers the tail as a sequence of its own would."""
    got = run(model, caches, tail, [1, *[4] * ((tail.shape[1] - 1) // 4)])
    for i, length in enumerate(lengths):
        check(got[i : i + 1], naive(model, TEXT[i : i + 1, :length], tail[i : i + 1]))


@pytest.mark.parametrize("step", [64, 9])
@pytest.mark.parametrize("window", [2, 16, 40])
def test_ragged_prompts(window: int, step: int, model: Any) -> None:
    caches = merged([rewindable(model.make_cache(), window) for _ in LENGTHS])
    prefill_ragged(model, caches, LENGTHS, step)
    check_rows(model, caches, LENGTHS, TEXT[:, 100:105])


@pytest.mark.parametrize("extra", [0, 5])
@pytest.mark.parametrize("n", [1, 4])
def test_ragged_prompts_go_back(n: int, extra: int, model: Any) -> None:
    """Into the prompt when there is room in every row, and within what followed it."""
    lengths = [38, 40, 35]
    caches = merged([rewindable(model.make_cache(), 16) for _ in lengths])
    prefill_ragged(model, caches, lengths)
    if extra:
        run(model, caches, TEXT[:, 60 : 60 + extra], [1] * extra)
    assert caches[0].room == 11 + extra
    trim_prompt_cache(caches, n + extra)
    check_rows(model, caches, [length - n for length in lengths], TEXT[:, 100:105])


def test_a_row_that_ended_long_ago_has_nothing_to_take_back(model: Any) -> None:
    caches = merged([rewindable(model.make_cache(), 16) for _ in LENGTHS])
    prefill_ragged(model, caches, LENGTHS)
    assert caches[0].room == 0
    run(model, caches, TEXT[:, 60:66], [3, 3])
    trim_prompt_cache(caches, 6)
    check_rows(model, caches, LENGTHS, TEXT[:, 100:105])


@pytest.mark.parametrize("trims", [(0, 0, 0), (3, 0, 9), (1, 2, 3)])
def test_sequences_become_a_batch_and_go_back_together(trims: tuple[int, ...], model: Any) -> None:
    singles = []
    for i, (length, n) in enumerate(zip(LENGTHS, trims, strict=True)):
        singles.append(rewindable(model.make_cache(), 10))
        run(model, singles[-1], TEXT[i : i + 1, :length], [length - 5, 5])
        trim_prompt_cache(singles[-1], n)
    lengths = [length - n for length, n in zip(LENGTHS, trims, strict=True)]
    caches = merged(singles)
    check_rows(model, copy.deepcopy(caches), lengths, TEXT[:, 100:105])
    room = caches[0].room
    assert room == min(c[0].room for c in singles) > 0
    trim_prompt_cache(caches, room)
    check_rows(model, caches, [length - room for length in lengths], TEXT[:, 100:105])


@pytest.mark.parametrize("stale", [False, True])
def test_rows_join_and_leave(stale: bool, model: Any) -> None:
    first, second = (merged([rewindable(model.make_cache())]) for _ in range(2))
    run(model, first, TEXT[:1, :20])
    run(model, second, TEXT[1:2, :30], [24, 6])
    if stale:
        trim_prompt_cache(first, 2)
    for a, b in zip(first, second, strict=True):
        a.extend(b)
    lengths = [18 if stale else 20, 30]
    check_rows(model, copy.deepcopy(first), lengths, TEXT[:2, 100:105])
    alone = [c.extract(1) for c in first]
    assert {type(c) for c in alone} == {RewindableCache}
    trim_prompt_cache(alone, 4)
    check(run(model, alone, TEXT[1:2, 100:103]), naive(model, TEXT[1:2, :26], TEXT[1:2, 100:103]))
    for cache in first:
        cache.filter([0])
    check_rows(model, first, lengths[:1], TEXT[:1, 100:105])


def test_a_new_sequence_joins_one_that_runs(model: Any) -> None:
    old, new = rewindable(model.make_cache()), rewindable(model.make_cache())
    run(model, old, TEXT[:1, :20], [15, 5])
    caches = merged([old, new])
    assert caches[0].room == 0
    check_rows(model, caches, [20, 0], TEXT[:2, 100:105])


def test_left_padding_is_not_seen(whole: Any) -> None:
    padding = [3, 0]
    caches = [
        RewindableCache(16, padding) if type(c) is ArraysCache else BatchKVCache(padding)
        for c in whole.make_cache()
    ]
    ids = TEXT[:2, :12].copy()
    ids[0] = np.concatenate([np.zeros(3, int), ids[0, :9]])
    run(whole, caches, ids)
    trim_prompt_cache(caches, 2)
    check_rows(whole, caches, [7, 10], TEXT[:2, 100:105])


def test_the_batch_tests_can_fail(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding between a row's tokens shows: in the convolution, not in the masked state."""
    monkeypatch.setattr(module, "padding_first", lambda last, rows, padding: (last, rows))
    caches = merged([rewindable(model.make_cache()) for _ in LENGTHS])
    prefill_ragged(model, caches, LENGTHS)
    run(model, caches, TEXT[:, 60:62])
    trim_prompt_cache(caches, 1)
    with pytest.raises(AssertionError):
        check_rows(model, caches, LENGTHS, TEXT[:, 60:61].repeat(1, axis=1))
