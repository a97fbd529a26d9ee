"""Overlaps, flips and their noise: by hand, by counting, and by drawing at random."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_k3_mlx.reap.criteria import CRITERIA, Masses, mix_of, scores
from kimi_k3_mlx.reap.overlap import (
    Halves,
    best,
    flips,
    held_out,
    noise,
    of_folds,
    overlap,
    pooled_choice,
    shared_tokens,
    source_scores,
    split_half,
)
from kimi_k3_mlx.reap.saliency import merge
from tests.reap.routing import EXPERTS, LAYERS, SOURCES, feed, random_batch, random_store
from tests.reap.routing import accumulator as empty

STORE = random_store(3, n_sequences=30)
REAP = CRITERIA["reap"]


def mask(*layers: tuple[int, ...], n_experts: int = EXPERTS) -> np.ndarray:
    found = np.zeros((len(layers), n_experts), bool)
    for row, experts in enumerate(layers):
        found[row, list(experts)] = True
    return found


def test_overlap_by_hand() -> None:
    """Two layers of 4 of 8: 3 and 2 shared of 4; chance 2, variance 4·4·4·4/(64·7) = 4/7 each."""
    one = mask((0, 1, 2, 3), (0, 1, 2, 3), n_experts=8)
    other = mask((1, 2, 3, 4), (2, 3, 6, 7), n_experts=8)
    found = overlap(one, other)
    assert found is not None
    assert (found.share, found.chance) == (5 / 8, 1 / 2)
    assert found.z == pytest.approx((5 - 4) / np.sqrt(8 / 7))
    assert flips(one, other) == 3


def test_the_chance_of_a_published_card() -> None:
    """PRUNING §3.24: top 242 of 896, 92 layers: sd 0.254 points; 57.2 % is +119, 17.8 % −36."""
    one = np.zeros((92, 896), bool)
    one[:, :242] = True
    for shared, z in ((round(0.572 * 242), 119), (round(0.178 * 242), -36)):
        found = overlap(one, np.roll(one, 242 - shared, axis=1))
        assert found is not None
        assert found.z is not None
        assert found.chance == pytest.approx(0.2701, abs=1e-4)
        deviation = (found.share - found.chance) / found.z
        assert deviation == pytest.approx(0.00254, abs=1e-5)
        assert found.z == pytest.approx(z, abs=1)


def test_random_sets_have_the_moments_of_chance() -> None:
    rng = np.random.default_rng(0)
    values = rng.random((2, 400, 5, 20))
    values[1, :, 3:] *= rng.random((400, 2, 20)) < 0.2  # some choices are smaller
    pairs = [overlap(best(a, 6), best(b, 6)) for a, b in zip(*values, strict=True)]
    z = np.array([pair.z for pair in pairs if pair and pair.z is not None])
    assert len(z) == 400
    assert abs(z.mean()) < 4 / np.sqrt(400)
    assert 0.85 < z.std() < 1.15


def test_choices_without_a_choice() -> None:
    everything = np.ones((2, 4), bool)
    found = overlap(everything, everything)
    assert found is not None
    assert (found.share, found.chance, found.z) == (1, 1, None)
    assert overlap(everything, ~everything) is None


def test_experts_without_a_score_are_never_chosen() -> None:
    """Ties at 0 would all go to the first experts, and look like agreement."""
    values = np.array([[0.0, 0.0, 0.0, 2.0, 1.0], [3.0, 3.0, 3.0, 1.0, 0.0]])
    assert best(values, 3).tolist() == mask((3, 4), (0, 1, 2), n_experts=5).tolist()


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 999), st.integers(1, 9))
def test_overlap_and_flips_are_counts(seed: int, keep: int) -> None:
    values = np.random.default_rng(seed).integers(0, 4, (2, 3, 9)).astype(float)
    one, other = (best(part, keep) for part in values)
    n_flips, shared, smaller = 0, 0, 0
    for a, b in zip(one, other, strict=True):
        first, second = set(np.flatnonzero(a)), set(np.flatnonzero(b))
        n_flips += max(len(first - second), len(second - first))
        shared += len(first & second)
        smaller += min(len(first), len(second))
    assert flips(one, other) == n_flips == flips(other, one)
    found = overlap(one, other)
    assert (found.share if found else None) == (shared / smaller if smaller else None)


def test_noise_by_hand() -> None:
    """PRUNING §0.7: the noise of nested samples is √(1/n_small − 1/n_big)."""
    half = Halves(1000, (50.0, 50.0))
    assert half.constant == pytest.approx(1000 / np.sqrt(2 / 50))
    infinite = noise(half.constant, 100, 1e18)
    assert infinite == pytest.approx(1000 / 2, rel=1e-6)
    nested = noise(half.constant, 100, 400, shared=100)
    assert nested == pytest.approx(half.constant * np.sqrt(1 / 100 - 1 / 400))
    apart = noise(half.constant, 100, 400)
    assert apart == pytest.approx(half.constant * np.sqrt(1 / 100 + 1 / 400))
    assert noise(half.constant, 100, 100, shared=100) == 0


def test_the_floor_of_a_published_card() -> None:
    """PRUNING §0.7: 1,222 flips from 0.70 to 1.42 M nested tokens are 615 from there to 1.92 M."""
    constant = 1222 / np.sqrt(1 / 0.70 - 1 / 1.42)
    floor = noise(constant, 1.42, 1.92, shared=1.42)
    assert floor == pytest.approx(615, abs=0.5)
    assert 3971 / floor == pytest.approx(6.5, abs=0.05)


def test_nested_samples_flip_as_often_as_the_law_says() -> None:
    """Means of one law: 40 small samples in big ones, and apart from them."""
    rng = np.random.default_rng(1)
    truth = rng.normal(10, 1, (40, 1, 400))

    def sample(n_tokens: int) -> np.ndarray:
        return truth + rng.normal(0, 2 / np.sqrt(n_tokens), truth.shape)

    small, rest, other, half = sample(400), sample(800), sample(1200), (sample(200), sample(200))
    big = small / 3 + rest * 2 / 3
    found = [
        sum(flips(best(a, 200), best(b, 200)) for a, b in zip(one, two, strict=True))
        for one, two in ((small, big), (small, other), half)
    ]
    constant = Halves(found[2], (200.0, 200.0)).constant
    assert found[0] == pytest.approx(noise(constant, 400, 1200, shared=400), rel=0.12)
    assert found[1] == pytest.approx(noise(constant, 400, 1200), rel=0.12)


def test_what_stores_share() -> None:
    one, other = random_store(1), replace(random_store(2), runs=({"corpus": "seed 2"},))
    both = merge(one, other)
    assert shared_tokens(one, both) == shared_tokens(both, one) == one.tokens.sum()
    assert shared_tokens(one, other) == 0
    assert shared_tokens(replace(one, runs=()), both) == 0


def test_folds_are_the_sequences_in_them() -> None:
    """Against an accumulator that saw one fold's sequences only."""
    acc = empty()
    for layer in LAYERS:
        batch = random_batch(3, 30, layer=layer)
        feed(acc, layer, batch.take(np.flatnonzero(batch.tags.fold == 1)))
    alone, part = acc.finish("model-a", {}), of_folds(STORE, [1])
    mix = mix_of(alone)
    for name in ("reap", "loo", "frequency"):
        expected = scores(alone, CRITERIA[name], mix)
        assert scores(part, CRITERIA[name], mix) == pytest.approx(expected, rel=1e-12)
    assert (part.tokens == alone.tokens).all()


@pytest.mark.parametrize("name", ["reap", "loo-sum"])
def test_held_out_mass_is_the_naive_one(name: str) -> None:
    criterion, mix = CRITERIA[name], mix_of(STORE, {"zh": 2.0})
    counts = np.array([4, 6, 3])
    found = held_out(STORE, criterion, mix, counts)
    assert found is not None
    expected = np.zeros(len(SOURCES))
    arrays = STORE.arrays
    for fold, s, layer in product((0, 1), range(len(SOURCES)), range(len(LAYERS))):
        values = scores(of_folds(STORE, [1 - fold]), criterion, mix)[layer]
        kept = sorted(range(EXPERTS), key=lambda expert: -values[expert])[: counts[layer]]
        mass = arrays[f"fold_{criterion.total}"][fold, s, layer]
        expected[s] += mass[kept].sum() / mass.sum() / 2 / len(LAYERS)
    assert found[0] == pytest.approx(expected, rel=1e-12)
    assert (found[1] >= found[0]).all()


def test_what_is_chosen_is_never_better_on_other_tokens() -> None:
    """On average; a choice by the sum is the best there is on its own tokens."""
    gaps = []
    for seed in range(12):
        store = random_store(seed, n_sequences=12)
        choice = pooled_choice(store, CRITERIA["weighted-ean"], 4)
        found = held_out(store, CRITERIA["weighted-ean"], mix_of(store), choice.sum(1))
        assert found is not None
        gaps.append(Masses(store, CRITERIA["weighted-ean"]).retained(choice) - found[0])
    assert np.mean(gaps) > 0.01


def test_what_folds_cannot_say() -> None:
    assert held_out(STORE, CRITERIA["man"], mix_of(STORE), np.full(3, 4)) is None
    assert split_half(STORE, CRITERIA["man"], 4) is None
    arrays = {name: array.copy() for name, array in STORE.arrays.items()}
    for name in ("fold_tokens", "fold_pairs", "fold_weighted", "fold_loo"):
        arrays[name][1, 0] = 0  # the first source is in one fold only
    found = held_out(replace(STORE, arrays=arrays), REAP, mix_of(STORE), np.full(3, 4))
    assert found is not None
    assert np.isnan(found[0]).tolist() == [True, False, False]
    arrays["fold_tokens"][1] = 0
    assert split_half(replace(STORE, arrays=arrays), REAP, 4) is None
    without = {name: array for name, array in STORE.arrays.items() if "fold" not in name}
    assert split_half(replace(STORE, arrays=without), REAP, 4) is None


def test_halves_of_another_mix_of_sources_are_not_noise() -> None:
    """Both folds of every source say the same, but hold other shares of the sources."""
    arrays = dict(STORE.arrays)
    for name in ("tokens", "pairs", "weighted", "loo"):
        same = arrays[f"fold_{name}"][:1]
        scale = np.array([1.0, 9.0, 1.0]).reshape(3, *(1,) * (same.ndim - 2))
        arrays[f"fold_{name}"] = np.concatenate([same, same * scale])
        arrays[name] = arrays[f"fold_{name}"].sum(0)
    store = replace(STORE, arrays=arrays)
    parts = [of_folds(store, [fold]) for fold in (0, 1)]
    assert flips(*(pooled_choice(part, REAP, 4) for part in parts)) > 0
    half = split_half(store, REAP, 4)
    assert half is not None
    assert half.flips == 0


def test_each_source_has_its_own_scores() -> None:
    found = source_scores(STORE, REAP)
    for s, name in enumerate(SOURCES):
        others = tuple(set(SOURCES) - {name})
        assert (found[s] == scores(STORE, REAP, mix_of(STORE, masked=others))).all()
    half = split_half(STORE, REAP, 4)
    assert half is not None
    assert half.tokens == tuple(STORE.arrays["fold_tokens"][:, :, 0].sum(1))
