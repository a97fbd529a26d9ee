"""Intervals hold the truth as often as they say, and paired ones are the narrower."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_k3_mlx.prune_plan import LayerPlan, PrunePlan
from kimi_k3_mlx.reap import intervals
from kimi_k3_mlx.reap.compare import Evaluation
from kimi_k3_mlx.reap.corpus import load_corpus, parse_specs
from kimi_k3_mlx.reap.costs import Costs
from kimi_k3_mlx.reap.intervals import Interval, drawn_sums, resample
from tests.reap.test_corpus_scripts import one_byte_each

NLL, TOKENS = np.array([1.0, 0.0]), np.array([0.0, 1.0])


def documents(rng: np.random.Generator, n: int) -> np.ndarray:
    """Nats and tokens of documents of skewed lengths, each with a level of its own."""
    tokens = np.ceil(rng.lognormal(5, 0.7, n))
    return np.stack([tokens * (2 + 0.4 * rng.standard_normal(n)), tokens], axis=1)


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    """The true ratio is 2: lengths and levels are independent. Percentiles of 60 are a bit narrow;
    intervals by token would hold it far less often."""
    rng = np.random.default_rng(0)
    held = 0
    for trial in range(300):
        columns = documents(rng, 60)
        sums = resample(columns, np.zeros(60, int), 1, resamples=400, seed=trial)
        found = sums.ratio(0, NLL, TOKENS)
        held += found.low <= 2 <= found.high
    assert 0.89 <= held / 300 <= 0.98


def naive(columns: np.ndarray, resamples: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    for _ in range(resamples):
        yield sum(columns[rng.integers(len(columns))] for _ in columns)


def test_replicas_are_spread_as_those_of_the_slow_twin() -> None:
    columns = documents(np.random.default_rng(1), 12)
    fast = drawn_sums(columns, 4000, np.random.default_rng(2))
    slow = np.array(list(naive(columns, 4000, np.random.default_rng(3))))
    for one, other in ((fast.mean(0), slow.mean(0)), (np.cov(fast.T), np.cov(slow.T))):
        assert np.allclose(one, other, rtol=0.08)


def test_blocks_of_resamples_are_all_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = documents(np.random.default_rng(1), 12)
    monkeypatch.setattr(intervals, "BLOCK", 12 * 7)
    found = drawn_sums(columns, 100, np.random.default_rng(0))
    assert found.shape == (100, 2)
    assert len(np.unique(found[:, 0])) == 100


def test_one_seed_gives_the_same_and_another_does_not() -> None:
    columns, groups = documents(np.random.default_rng(1), 20), np.arange(20) % 2
    one, same, other = (resample(columns, groups, 2, seed=seed) for seed in (0, 0, 1))
    assert np.array_equal(one.replicas, same.replicas)
    assert not np.array_equal(one.replicas, other.replicas)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(0, 9))
def test_groups_are_drawn_within_themselves(groups: list[int], seed: int) -> None:
    """A column of ones: every replica has as many documents of a group as there are."""
    columns = np.ones((len(groups), 1))
    found = resample(columns, np.array(groups), 4, resamples=20, seed=seed)
    counts = [*np.bincount(groups, minlength=4), len(groups)]
    assert found.n_documents.tolist() == counts
    assert (found.replicas[:, :, 0] == counts).all()
    assert found.sums[:, 0].tolist() == counts


def test_one_document_has_no_interval_and_none_no_value() -> None:
    found = resample(np.array([[4.0, 2.0]]), np.array([1]), 2)
    assert found.ratio(1, NLL, TOKENS) == Interval(2.0, None, None)
    assert found.ratio(1, NLL, TOKENS).map(np.exp) == Interval(np.exp(2.0), None, None)
    assert np.isnan(found.ratio(0, NLL, TOKENS).value)
    both = resample(documents(np.random.default_rng(0), 7), np.array([0] * 6 + [2]), 3)
    assert both.ratio(0, NLL, TOKENS).low is not None
    assert both.ratio(-1, NLL, TOKENS).low is both.ratio(3, NLL, TOKENS).low is None
    more = resample(documents(np.random.default_rng(0), 7), np.array([0] * 5 + [2] * 2), 3)
    assert more.ratio(-1, NLL, TOKENS).low is not None


@pytest.fixture(scope="module")
def evaluation(tmp_path_factory: pytest.TempPathFactory) -> Evaluation:
    """Made up: 12 documents of `a`, 3 of `b` and an empty one; plan `y` costs b more than a."""
    folder = tmp_path_factory.mktemp("made-up")
    for tag, n in (("a", 12), ("b", 4)):
        (folder / f"{tag}.jsonl").write_text('{"tokens": [1, 2, 3]}\n' * n)
    specs = parse_specs(f"{folder}/a.jsonl,{folder}/b.jsonl")
    corpus = load_corpus(specs, one_byte_each(), seq_len=8)
    rng = np.random.default_rng(4)
    tokens = np.append(rng.integers(50, 900, 15), 0).astype(float)
    sources = np.array([0] * 12 + [1] * 4)
    level = rng.uniform(1, 4, 16)
    extra = rng.normal(0.05, 0.02, (2, 16)) + np.outer((0, 1), 0.3 * sources)
    nll = tokens * np.concatenate([level[None], level + extra])
    plan = PrunePlan(8, {1: LayerPlan((0, 1)), 2: LayerPlan((0, 1, 2))})
    inside = rng.uniform(size=(2, 2, 16)) * tokens
    return Evaluation(
        model="m", plans={"x": plan, "y": plan}, corpus=corpus, document_sources=sources,
        tokens=tokens, positions=tokens + 1, nll=nll, kl=tokens * abs(extra),
        agree=np.stack([tokens * 0.75, tokens * 0.5]), layers=(1, 2), cosine=inside,
        coverage=inside / 2,
    )  # fmt: skip


def test_values_are_ratios_of_sums(evaluation: Evaluation) -> None:
    costs, it = Costs(evaluation), evaluation
    b = it.document_sources == 1
    n = it.tokens[b].sum()
    assert costs.perplexity("parent", "b").value == pytest.approx(np.exp(it.nll[0, b].sum() / n))
    assert costs.perplexity("y").value == pytest.approx(np.exp(it.nll[2].sum() / it.tokens.sum()))
    assert costs.delta("y", "b").value == pytest.approx((it.nll[2, b] - it.nll[0, b]).sum() / n)
    assert costs.delta("y", "b", "x").value == pytest.approx(
        (it.nll[2, b] - it.nll[1, b]).sum() / n
    )
    assert costs.kl("x", "b").value == pytest.approx(it.kl[0, b].sum() / n)
    assert costs.kl("y").value == pytest.approx(it.kl[1].sum() / it.tokens.sum())
    assert costs.agreement("x").value == pytest.approx(0.75)
    assert costs.agreement("y", "a").value == pytest.approx(0.5)
    expected = it.cosine[:, 1, b].sum(-1) / it.positions[b].sum()
    assert np.allclose(costs.inside("cosine", "y", "b"), expected)
    with pytest.raises(ValueError, match="not in tuple"):
        costs.kl("parent")


def test_paired_differences_are_narrower_than_unpaired_ones(evaluation: Evaluation) -> None:
    """Documents differ much in level, little in what a plan costs them."""
    costs = Costs(evaluation)
    paired, one, other = costs.delta("x", "a"), costs.nll("x", "a"), costs.nll("parent", "a")
    unpaired = np.hypot(one.high - one.low, other.high - other.low)
    assert (paired.high - paired.low) < 0.2 * unpaired
    assert paired.low > 0


def test_the_worst_source_is_first_and_few_documents_are_named(evaluation: Evaluation) -> None:
    costs = Costs(evaluation)
    assert costs.worst_first("y") == ["b", "a"]
    assert costs.few == ["b"]
    assert costs.n_documents("b") == 3
    assert costs.n_documents() == 15
    assert costs.n_tokens() == evaluation.tokens.sum()


def test_json_holds_everything(evaluation: Evaluation, tmp_path: Path) -> None:
    import json

    said = json.loads(json.dumps(Costs(evaluation).to_json()))
    assert [row["source"] for row in said["plans"]["y"]["rows"]] == ["b", "a", None]
    assert [row["source"] for row in said["parent"]] == [None, "a", "b"]
    (between,) = said["between_plans"]
    assert (between["plan"], between["against"], len(between["delta"])) == ("x", "y", 3)
    layer = said["plans"]["x"]["layers"][1]
    assert layer["layer"] == 2
    assert layer["by_source"].keys() == {"a", "b"}
    assert said["documents"]["nll"]["y"] == evaluation.nll[2].tolist()
    assert said["intervals"]["few_documents"] == ["b"]


def test_two_thousand_resamples_of_many_documents_take_little() -> None:
    import time

    columns = np.random.default_rng(0).random((3000, 14))
    began = time.perf_counter()
    resample(columns, np.arange(3000) % 5, 5)
    assert time.perf_counter() - began < 5
