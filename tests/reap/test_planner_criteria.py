"""Scores, their errors and retained mass against the formulas as they are written."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from kimi_k3_mlx.reap.criteria import CRITERIA, Masses, mix_of, scores, standard_errors
from kimi_k3_mlx.reap.saliency import SUMS, Saliency
from tests.reap.routing import (
    EXPERTS,
    LAYERS,
    SOURCES,
    accumulator,
    feed,
    random_batch,
    random_store,
)
from tests.reap.test_planner import STORE, kept_mask, planner


def naive_score(
    store: Saliency, name: str, weights: dict[str, float] | None, layer: int, expert: int
) -> float:
    """The formula as it is written, source by source."""
    criterion = CRITERIA[name]
    above, below = 0.0, 0.0
    share = 0.0
    for s, source in enumerate(store.sources):
        tokens = store.arrays["tokens"][s, layer]
        weight = tokens if weights is None else weights.get(source, 1.0)
        above += weight * store.arrays[criterion.total][s, layer, expert] / tokens
        below += weight * store.arrays["pairs"][s, layer, expert] / tokens
        share += weight
    if criterion.per == "tokens":
        return above / share
    return above / below if below else 0.0


@pytest.mark.parametrize("weights", [None, {"zh": 3.0}, {"code": 2.0, "zh": 1.0, "en": 0.0}])
@pytest.mark.parametrize("name", CRITERIA)
def test_scores_are_their_formula(name: str, weights: dict[str, float] | None) -> None:
    found = scores(STORE, CRITERIA[name], mix_of(STORE, weights))
    for layer in range(len(LAYERS)):
        for expert in range(EXPERTS):
            expected = naive_score(STORE, name, weights, layer, expert)
            assert found[layer, expert] == pytest.approx(expected, rel=1e-12)
    assert (found[:, EXPERTS - 1] == 0).all()
    assert np.isfinite(found).all()


def test_criteria_say_what_they_are() -> None:
    """PRUNING §0.1: three cards called three criteria REAP."""
    assert {c.total for c in CRITERIA.values()} <= SUMS.keys()
    for name, criterion in CRITERIA.items():
        assert criterion.name == name
        assert criterion.formula.endswith({"pairs": "/n", "tokens": "/T"}[criterion.per])
        assert criterion.to_json()["denominator"].startswith(criterion.formula[-1])
    assert CRITERIA["reap"].total == CRITERIA["weighted-ean"].total
    assert CRITERIA["weighted-ean"].mass == CRITERIA["reap"].mass == "Σc"


def test_the_default_mix_is_the_corpus_as_one() -> None:
    pooled = STORE.arrays["weighted"].sum(0), STORE.arrays["pairs"].sum(0)
    found = scores(STORE, CRITERIA["reap"], mix_of(STORE))
    routed = pooled[1] > 0
    assert found[routed] == pytest.approx(pooled[0][routed] / pooled[1][routed], rel=1e-12)
    assert mix_of(STORE, masked=("zh",))[1] == 0
    assert mix_of(STORE, {"code": 2, "zh": 1, "en": 1}).tolist() == [0.5, 0.25, 0.25]


@pytest.mark.parametrize("name", ["reap", "loo", "weighted-ean", "loo-sum", "frequency"])
def test_errors_are_those_of_resampled_sequences(name: str) -> None:
    """A bootstrap over sequences within each source, with unequal weights of the sources."""
    store = random_store(11, n_sequences=150, length=30)
    mix = mix_of(store, {"code": 3, "zh": 1, "en": 1})
    errors = standard_errors(store, CRITERIA[name], mix)
    assert errors is not None
    drawn = [scores(part, CRITERIA[name], mix) for part in resampled(11, 150, 30, 60)]
    routed = store.arrays["pairs"].sum(0) > 150
    ratio = errors[routed] / np.std(drawn, axis=0)[routed]
    assert routed.sum() > 10
    assert 0.8 < np.median(ratio) < 1.25


@cache
def resampled(seed: int, n_sequences: int, length: int, times: int) -> list[Saliency]:
    """Stores of sequences drawn with replacement, source by source."""
    parts = []
    for q in range(n_sequences):
        acc = accumulator()
        for layer in LAYERS:
            feed(acc, layer, random_batch(seed, n_sequences, length, 0, layer).of([q]))
        state = acc.state()
        parts.append({name: state[name] for name in (*SUMS, "tokens")})
    rng, stores = np.random.default_rng(0), []
    for _ in range(times):
        strata = [rng.choice(range(s, n_sequences, 3), n_sequences // 3) for s in range(3)]
        drawn = [parts[q] for q in np.concatenate(strata)]
        sums = {name: sum(part[name] for part in drawn) for name in parts[0]}
        stores.append(replace(STORE, arrays=STORE.arrays | sums))
    return stores


def test_no_error_is_made_up() -> None:
    for name in ("man", "ean", "msan", "relative"):
        assert standard_errors(STORE, CRITERIA[name], mix_of(STORE)) is None
        assert planner(criterion=name).cut(6).chosen_by["cut"]["ambiguous"] is None


@pytest.mark.parametrize("keep", [3, 6, 12])
def test_retained_mass_and_coverage(keep: int) -> None:
    masses = Masses(STORE, CRITERIA["loo"])
    kept = kept_mask(planner(criterion="loo").cut(keep))
    for s in range(len(SOURCES)):
        mass = STORE.arrays["loo"][s]
        shares = [mass[x][kept[x]].sum() / mass[x].sum() for x in range(3)]
        best = [np.sort(mass[x])[::-1][:keep].sum() / mass[x].sum() for x in range(3)]
        assert masses.retained(kept)[s] == pytest.approx(np.mean(shares))
        coverage = np.mean([a / b for a, b in zip(shares, best, strict=True)])
        assert masses.coverage(kept)[s] == pytest.approx(coverage)
    assert keep < 12 or masses.coverage(kept).tolist() == pytest.approx([1, 1, 1])


def test_the_docs_list_every_criterion_with_its_formula() -> None:
    text = (Path(__file__).parents[2] / "docs/reap.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\S+)` \| (\S+) \|", text, re.MULTILINE)
    assert rows == [(criterion.name, criterion.formula) for criterion in CRITERIA.values()]
