"""Prompt lookup: the same text in fewer passes, and no cost where nothing repeats."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from benchmarks.lookup import EDITS, Script, replay
from kimi_k3_mlx.errors import KimiError
from kimi_k3_mlx.runtime.load import load
from kimi_k3_mlx.runtime.lookup import MAX_PATIENCE, Lookahead, NGramIndex

VOCABULARY = 32


def written(model: Any, prompt: list[int], n: int, **options: Any) -> list[int]:
    """n tokens after the prompt."""
    return [token for token, _ in generate_step(mx.array(prompt), model, max_tokens=n, **options)]


# The index.


def test_the_index_foresees_a_repetition() -> None:
    index = NGramIndex([1, 2, 3, 4, 5, 9, 1, 2])
    assert index.draft(3) == [3, 4, 5]
    index.append(3)
    assert index.streak == 1
    index.append(7)
    assert (index.streak, index.draft(3)) == (0, [])


def test_it_stays_with_the_text_that_it_copies() -> None:
    """Not with a later occurrence of the same words."""
    index = NGramIndex([1, 2, 3, 4, 5, 6, 2, 3, 8, 8, 1, 2])
    index.append(3)
    assert index.draft(2) == [4, 5]


def test_the_longest_n_gram_decides() -> None:
    index = NGramIndex([1, 2, 3, 4, 5, 7, 7, 3, 4, 6, 8, 1, 2, 3, 4])
    assert index.draft(1) == [5]


tokens = st.lists(st.integers(0, 3), max_size=60)


@given(tokens)
def test_a_place_is_behind_the_same_tokens(text: list[int]) -> None:
    index = NGramIndex()
    for token in text:
        foreseen = index.draft(1) == [token]
        streak = index.streak
        index.append(token)
        assert index.streak == (streak + 1 if foreseen else 0)
        if index.place is not None:
            assert 2 <= index.place < len(index.tokens)
            assert index.tokens[index.place - 1] == token
        again = any(text[i : i + 2] == index.tokens[-2:] for i in range(len(index.tokens) - 2))
        assert (index.place is not None) >= again


# The same text.


@given(prompt=st.lists(st.integers(0, 5), min_size=1, max_size=40), text=tokens)
@settings(deadline=None, max_examples=50)
def test_a_script_is_written_as_it_stands(prompt: list[int], text: list[int]) -> None:
    script = Script([*prompt, *text, 0], VOCABULARY)
    model = Lookahead(script, 5)
    caches = model.make_cache()
    n = len(text)
    assert written(model, prompt, n, prompt_cache=caches) == text if n else True
    model.settle(caches)
    assert caches[0].offset == len(model.index.tokens)
    assert model.passes <= model.asked


@pytest.fixture(scope="module")
def model(tiny_float_source: Path) -> Any:
    return load(tiny_float_source).model


class Wrong(NGramIndex):
    """An index that is sure of itself, and wrong at every third token."""

    def __init__(self, truth: list[int]) -> None:
        super().__init__()
        self.truth = truth

    def append(self, token: int) -> None:
        super().append(token)
        self.streak = MAX_PATIENCE

    def draft(self, n: int) -> list[int]:
        at = len(self.tokens)
        return [
            (token + (i % 3 == 0)) % 512
            for i, token in enumerate(self.truth[at : at + n], start=at)
        ]


@pytest.mark.parametrize("max_draft", [2, 8])
def test_greedy_text_is_the_same_whatever_is_drafted(max_draft: int, model: Any) -> None:
    """C21, with rejections at every position of a draft."""
    prompt = [5, 9, 2, 11, 7]
    plain = written(model, prompt, 50)
    lookahead = Lookahead(model, max_draft)
    lookahead.index = Wrong(prompt + plain)
    assert written(lookahead, prompt, 50) == plain
    assert lookahead.passes < lookahead.asked


def test_a_cache_that_forgets_to_go_back_shows(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = [5, 9, 2, 11, 7]
    plain = written(model, prompt, 20)
    lookahead = Lookahead(model)
    lookahead.index = Wrong(prompt + plain)
    monkeypatch.setattr("kimi_k3_mlx.runtime.lookup.trim_prompt_cache", lambda *_: 0)
    assert written(lookahead, prompt, 20) != plain


def test_processors_see_the_text_as_in_plain_decoding(model: Any) -> None:
    """A repetition penalty changes every token; drafts that it makes wrong are taken back."""

    def options() -> dict[str, Any]:
        return {"logits_processors": make_logits_processors(repetition_penalty=1.3)}

    prompt = [3, 1, 4, 1, 5] * 6
    assert written(Lookahead(model), prompt, 30, **options()) == written(
        model, prompt, 30, **options()
    )


def test_a_seed_gives_the_same_sample_as_plain_decoding(model: Any) -> None:
    """The sampler is asked for one token at a time, from the same logits."""
    texts = []
    prompt = [3, 1, 4, 1, 5] * 6
    for candidate in (model, Lookahead(model)):
        mx.random.seed(4)
        texts.append(written(candidate, prompt, 30, sampler=make_sampler(0.8, top_p=0.95)))
    assert texts[0] == texts[1]


class Dice(Script):
    """A model of one distribution, whatever came before."""

    probabilities = np.array([0.5, 0.3, 0.15, 0.05])

    def __call__(self, inputs: mx.array, cache: list[Any], **_: Any) -> mx.array:
        cache[0].offset += inputs.shape[1]
        logits = mx.log(mx.array(self.probabilities.astype(np.float32)))
        return mx.broadcast_to(logits, (*inputs.shape, 4))


class Certain(NGramIndex):
    """Drafts one token, always."""

    def append(self, token: int) -> None:
        super().append(token)
        self.streak = MAX_PATIENCE

    def draft(self, n: int) -> list[int]:
        return [1] * n


def chi_square(counts: Counter[int], probabilities: np.ndarray) -> float:
    n = counts.total()
    return sum((counts[i] - n * p) ** 2 / (n * p) for i, p in enumerate(probabilities))


def sampled(greedy_about: int | None = None) -> tuple[list[int], Lookahead]:
    mx.random.seed(11)
    lookahead = Lookahead(Dice([0, 0], 4))
    lookahead.index = Certain()
    draw = make_sampler(1.0)

    def biased(logprobs: mx.array) -> mx.array:
        token = draw(logprobs)
        return mx.where(mx.random.uniform(shape=(1,)) < 0.1, greedy_about, token)

    sampler = draw if greedy_about is None else biased
    return written(lookahead, [0], 1500, sampler=sampler), lookahead


def test_samples_have_the_models_distribution() -> None:
    """Chi-square, single tokens and pairs: 3 and 15 degrees of freedom, one in a thousand."""
    text, lookahead = sampled()
    p = Dice.probabilities
    assert chi_square(Counter(text), p) < 16.3
    pairs = Counter(4 * a + b for a, b in zip(text[::2], text[1::2], strict=True))
    assert chi_square(pairs, np.outer(p, p).ravel()) < 37.7
    kept = lookahead.asked / lookahead.passes
    assert 1.3 < kept < 1.55, "a draft of probability 0.3 is kept so often: 1 / (1 - 0.3) = 1.43"


def test_a_bias_towards_the_draft_shows() -> None:
    text, _ = sampled(greedy_about=1)
    assert chi_square(Counter(text), Dice.probabilities) > 16.3


# Cost.


def test_nothing_is_drafted_and_nothing_awaited_where_nothing_repeats(model: Any) -> None:
    ids = np.random.default_rng(1).permutation(512).tolist()
    lookahead = Lookahead(Script(ids, 512))
    assert written(lookahead, ids[:100], 400) == ids[100:500]
    assert lookahead.passes == lookahead.asked
    assert lookahead.index.streak == 0


@pytest.mark.parametrize("most", [MAX_PATIENCE, 1])
def test_drafts_that_fail_are_not_tried_again(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every five tokens two are foreseen and the next one can't be. (1: without patience.)"""
    monkeypatch.setattr("kimi_k3_mlx.runtime.lookup.MAX_PATIENCE", most)
    others = np.random.default_rng(0).integers(4, 4000, 150)
    text = np.stack([np.full(150, i) for i in (0, 1, 2, 3)] + [others], axis=1).ravel().tolist()
    tried = []

    class Counting(Script):
        def __call__(self, inputs: mx.array, cache: list[Any], **options: Any) -> mx.array:
            tried.append(inputs.shape[1] > 1)
            return super().__call__(inputs, cache, **options)

    assert written(Lookahead(Counting(text, 4000)), text[:20], 500) == text[20:520]
    assert (sum(tried) < 5) == (most > 1)


def test_only_one_sequence() -> None:
    lookahead = Lookahead(Script([0, 1], 2))
    with pytest.raises(KimiError, match="one sequence, not 2"):
        lookahead(mx.zeros((2, 1), mx.int32), lookahead.make_cache())


def test_caches_that_can_not_go_back_are_refused(model: Any) -> None:
    """mlx-lm's trim would do nothing, and say so to nobody."""
    lookahead = Lookahead(model)
    lookahead.index = Wrong([0] * 99)
    with pytest.raises(KimiError, match="needs caches that can go back"):
        written(lookahead, [1, 2], 9, prompt_cache=model.make_cache())


def test_a_cache_with_a_past_needs_its_tokens(model: Any) -> None:
    """Prompt reuse: the index is told what the cache holds."""
    past, rest = [3, 1, 4, 1, 5, 9, 2, 6] * 4, [3, 1, 4]
    lookahead = Lookahead(model, tokens=past)
    caches = make_prompt_cache(lookahead)
    model(mx.array([past]), caches)
    assert written(lookahead, rest, 20, prompt_cache=caches) == written(model, past + rest, 20)
    lookahead.settle(caches)
    assert caches[3].offset == len(lookahead.index.tokens)


@pytest.mark.parametrize("edit", EDITS[2:3], ids=lambda edit: edit.module)
def test_a_code_edit_takes_few_passes(edit: Any) -> None:
    """At least 2.5 tokens a pass; benchmarks.lookup measures more files and the speed."""

    class Bytes:
        def encode(self, text: str) -> list[int]:
            return list(text.encode())

    assert replay(edit, Bytes(), 8).tokens_per_pass >= 2.5
