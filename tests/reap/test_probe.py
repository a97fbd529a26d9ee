"""Loops are found where they are, ends are counted, and greedy rows don't mind their neighbours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_k3_mlx.convert.plan import plan_build
from kimi_k3_mlx.convert.profiles import load_profile
from kimi_k3_mlx.convert.run import run
from kimi_k3_mlx.prune_plan import LayerPlan, PrunePlan
from kimi_k3_mlx.reap.probe import (
    LOOP_TIMES,
    LOOP_TOKENS,
    Continuation,
    Repeat,
    distinct,
    examine,
    longest_repeat,
    loops,
    summarize,
)
from kimi_k3_mlx.runtime.greedy import continue_greedily
from kimi_k3_mlx.runtime.load import load_weights
from kimi_k3_mlx.tensors.local import open_source
from tests.tiny_k3 import TinyConfig, write_source

TEXTS = st.lists(st.integers(0, 3), max_size=30)


def naive_repeat(tokens: list[int]) -> Repeat:
    """Every beginning, period and length."""
    best = Repeat(0, 0, 0)
    for period in range(1, len(tokens) // 2 + 1):
        for begin in range(len(tokens) - 2 * period + 1):
            length = period
            while begin + length < len(tokens) and (
                tokens[begin + length] == tokens[begin + length - period]
            ):
                length += 1
            if length >= 2 * period and length > best.length:
                best = Repeat(begin, period, length)
    return best


@settings(deadline=None)
@given(TEXTS)
def test_the_longest_repeat_is_the_slow_twins(tokens: list[int]) -> None:
    assert longest_repeat(tokens) == naive_repeat(tokens)


@settings(deadline=None)
@given(TEXTS, st.integers(1, 4))
def test_distinct_is_the_slow_twins(tokens: list[int], n: int) -> None:
    seen: list[list[int]] = []
    total = 0
    for i in range(len(tokens)):
        if len(gram := tokens[i : i + n]) == n:
            total += 1
            seen += [gram] if gram not in seen else []
    assert distinct(tokens, n) == (len(seen) / total if total else 1.0)


@settings(deadline=None)
@given(TEXTS, st.lists(st.integers(0, 9), min_size=1, max_size=20), st.integers(0, 19))
def test_a_text_that_ends_in_copies_loops(head: list[int], block: list[int], cut: int) -> None:
    """Also if the last copy is cut off; without enough copies or tokens it doesn't count."""
    copies = max(LOOP_TIMES, -(-LOOP_TOKENS // len(block))) * block
    part = block[: cut % len(block)]
    assert loops(head + copies + part)
    assert loops(copies)
    assert not loops([*head, *copies, 77])
    assert not loops([*head, *range(100, 100 + len(copies))])


def test_short_runs_are_no_loops() -> None:
    assert not loops([5] * (LOOP_TOKENS - 1))
    assert loops([1, 2] + [5] * LOOP_TOKENS)
    block = list(range(20))
    assert not loops(block * (LOOP_TIMES - 1))
    assert loops(block * LOOP_TIMES)


def test_a_continuation_counts_up_to_its_end() -> None:
    found = examine([4, 5, 4, 5, 9, 4, 4], {9, 8})
    assert found == Continuation(4, True, (0.5, 2 / 3, 1.0, 1.0), Repeat(0, 2, 4), False)
    endless = examine([4] * 40, {9})
    assert (endless.n_tokens, endless.ended, endless.looped) == (40, False, True)
    assert endless.longest_repeat == Repeat(0, 1, 40)
    assert not examine([4] * 40 + [9], {9}).looped
    empty = examine([9], {9})
    assert (empty.n_tokens, empty.ended, empty.distinct) == (0, True, (1.0, 1.0, 1.0, 1.0))


def test_summaries_are_means_worst_first_and_paired() -> None:
    loop, fine = examine([1] * 40, {9}), examine([*range(20, 50), 9], {9})
    model, reference = [fine, loop, loop, fine], [fine, loop, fine, fine]
    rows = summarize(("a", "empty", "b"), [0, 0, 2, 2], model, reference)
    assert [(row["source"], row["prompts"]) for row in rows] == [("a", 2), ("b", 2), (None, 4)]
    assert rows[2]["model"]["looped"]["value"] == 0.5
    assert rows[2]["reference"]["ended"]["value"] == 0.75
    assert rows[0]["difference"]["looped"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    assert rows[1]["difference"]["looped"]["value"] == 0.5
    assert rows[2]["model"]["distinct_4"]["value"] == pytest.approx((2 * 1 + 2 / 37) / 4)
    assert rows[2]["model"]["longest_repeat"]["value"] == 20
    worst = summarize(("a", "b"), [0, 1], [fine, loop])
    assert [row["source"] for row in worst] == ["b", "a", None]
    assert "difference" not in worst[0]


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A float32 build and a pruned one."""
    folder = tmp_path_factory.mktemp("probe")
    source = open_source(write_source(folder / "s", TinyConfig(trunk_dtype="F32", vision=False)))
    half = PrunePlan(8, {layer: LayerPlan((0, 2, 3, 5)) for layer in range(1, 5)})
    for name, plan in (("whole", None), ("half", half)):
        run(plan_build(source, load_profile("mxfp4"), plan), source, folder / name)
    return [folder / "whole", folder / "half"]


@pytest.fixture(scope="module")
def model(builds: list[Path]) -> Any:
    return load_weights(builds[0], lazy=False)[0]


def naive_greedy(model: Any, prompt: np.ndarray, n_tokens: int) -> list[int]:
    """The whole text again for every token, without a cache."""
    tokens = prompt.tolist()
    for _ in range(n_tokens):
        tokens.append(int(model(mx.array([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("length", [1, 7])
def test_greedy_continuations_are_the_slow_twins(length: int, model: Any) -> None:
    prompts = np.random.default_rng(0).integers(0, 256, (3, length)).astype(np.int32)
    seen: list[int] = []
    found = continue_greedily(model, prompts, 6, {-1}, seen.append)
    assert found.tolist() == [naive_greedy(model, prompt, 6) for prompt in prompts]
    assert seen == [1, 2, 3, 4, 5, 6]


def test_it_stops_when_every_row_has_ended(model: Any) -> None:
    prompts = np.random.default_rng(0).integers(0, 256, (2, 5)).astype(np.int32)
    whole = continue_greedily(model, prompts, 6, ())
    assert whole.shape == (2, 6)
    ends = {int(whole[0, 0]), int(whole[1, 2])}
    n_tokens = max(int(np.isin(row, list(ends)).argmax()) for row in whole) + 1
    assert n_tokens < 6
    assert np.array_equal(continue_greedily(model, prompts, 6, ends), whole[:, :n_tokens])
