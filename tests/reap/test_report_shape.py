"""Gini, mean crossing, the border, support and favours: by hand and against naive twins."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_k3_mlx.reap.criteria import CRITERIA, Masses
from kimi_k3_mlx.reap.shape import (
    FAVOURED,
    curve,
    favoured,
    gini,
    mean_crossing,
    near_the_cut,
    support,
)
from tests.reap.routing import EXPERTS, LAYERS, SOURCES, random_store

STORE = random_store(3, n_sequences=30)


def test_gini_by_hand() -> None:
    values = np.array([[1, 1, 1, 1], [0, 0, 0, 4], [1, 2, 3, 4], [0, 0, 0, 0]], float)
    assert gini(values).tolist() == pytest.approx([0, 0.75, 0.25, 0])


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 50), min_size=2, max_size=9).filter(any))
def test_gini_is_the_mean_difference(values: list[int]) -> None:
    """Half the mean absolute difference of two draws, over the mean."""
    n = len(values)
    differences = sum(abs(a - b) for a in values for b in values) / n**2
    expected = differences / 2 / (sum(values) / n)
    assert gini(np.array([values], float))[0] == pytest.approx(expected)


def test_mean_crossing_by_hand() -> None:
    values = np.array([[9, 1, 1, 1], [3, 3, 1, 1], [0.1] * 4, [0, 0, 0, 0]])
    assert mean_crossing(values).tolist() == [0.25, 0.5, 1, 1]
    assert mean_crossing(np.full((1, 7), 0.1)).tolist() == [1]


def test_the_border_by_hand() -> None:
    """Scores 5 4 2 1, two stay: the border is 3; intervals reach 1.96 errors."""
    values = np.array([[4.0, 1.0, 5.0, 2.0]] * 3)
    errors = np.array([[0.52, 0.5, 0.5, 0.5], [0.5] * 4, [9.0] * 4])
    kept = np.array([[True, False, True, False]] * 2 + [[True] * 4])
    none = np.zeros_like(kept)
    near = near_the_cut(values, errors, kept, none)
    assert near.tolist() == [[True, False, False, False], [False] * 4, [False] * 4]
    assert near_the_cut(values, errors * 2, kept, none)[1].tolist() == [True, False, False, True]


def test_an_expert_that_is_protected_is_no_border_and_not_ambiguous() -> None:
    """Scores 5 4 2 1; the last is kept for another reason: the border stays 3, or there is none."""
    values, errors = np.array([[4.0, 1.0, 5.0, 2.0]]), np.full((1, 4), 1.0)
    kept = np.array([[True, True, True, False]])
    forced = np.array([[False, True, False, False]])
    assert near_the_cut(values, errors, kept, forced).tolist() == [[True, False, False, True]]
    assert not near_the_cut(values, errors, kept, kept).any()


def test_support_by_hand() -> None:
    found = support(np.array([[0, 10, 20, 30, 40], [50, 60, 70, 80, 90], [0, 100, 100, 100, 100]]))
    assert found == {
        "mean": pytest.approx(850 / 15), "min": 0, "q10": pytest.approx(4), "median": 60,
        "q90": 100, "dead": 2,
    }  # fmt: skip


def test_favours_are_their_definition() -> None:
    found, pairs = favoured(STORE), STORE.arrays["pairs"]
    assert 0 < found.sum() < found.size / 2
    for s in range(len(SOURCES)):
        others = [o for o in range(len(SOURCES)) if o != s]
        for layer, expert in np.ndindex(len(LAYERS), EXPERTS):
            own = pairs[s, layer, expert] / STORE.tokens[s]
            rest = pairs[others, layer, expert].sum() / STORE.tokens[others].sum()
            assert found[s, layer, expert] == (own > 0 and own >= FAVOURED * rest)


def test_curves_are_sums_of_the_best() -> None:
    """Concave whatever the scores are: no bend in them means anything."""
    masses = Masses(STORE, CRITERIA["loo"])
    counts = np.arange(EXPERTS + 1)
    found = curve(masses, counts)
    for s in range(len(SOURCES)):
        for keep in counts:
            best = [sorted(layer, reverse=True)[:keep] for layer in masses.shares[s].tolist()]
            assert found[s, keep] == pytest.approx(np.mean([sum(layer) for layer in best]))
    assert (np.diff(found, n=2) < 1e-12).all()
