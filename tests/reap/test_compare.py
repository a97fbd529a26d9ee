"""What the stream says a plan costs is what the whole model in memory, and a pruned build, cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from scipy.special import log_softmax

from converters.dense import NEVER_CHOSEN
from kimi_k3_mlx.convert.plan import plan_build
from kimi_k3_mlx.convert.profiles import load_profile
from kimi_k3_mlx.convert.run import run
from kimi_k3_mlx.errors import KimiError, UsageError
from kimi_k3_mlx.prune_plan import LayerPlan, PrunePlan
from kimi_k3_mlx.reap import compare
from kimi_k3_mlx.reap.compare import CostObserver, Evaluation, evaluate
from kimi_k3_mlx.reap.corpus import Corpus, load_corpus, parse_specs
from kimi_k3_mlx.runtime.load import load_weights
from kimi_k3_mlx.stream import engine
from kimi_k3_mlx.stream.budget import make_batches, make_budget
from kimi_k3_mlx.stream.layers import open_layers
from kimi_k3_mlx.tensors.local import LocalSource, open_source
from tests.reap.test_corpus_scripts import one_byte_each
from tests.tiny_k3 import TinyConfig, write_source

GB = 10**9
ARRAYS = ("tokens", "positions", "nll", "kl", "agree", "cosine", "coverage")
HALF = PrunePlan(8, {
    1: LayerPlan((0, 2, 3, 5)), 2: LayerPlan((1, 2, 3, 4, 5, 7)),
    3: LayerPlan((0, 7)), 4: LayerPlan((2, 3, 6)),
})  # fmt: skip
WHOLE = PrunePlan(8, {layer: LayerPlan(tuple(range(8))) for layer in range(1, 5)})
PLANS = {"half": HALF, "whole": WHOLE}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> LocalSource:
    sizes = TinyConfig(trunk_dtype="F32", vision=False)
    return open_source(write_source(tmp_path_factory.mktemp("compare") / "source", sizes))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Two sources of random bytes; a document of one token, and some of several sequences."""
    folder, rng = tmp_path_factory.mktemp("corpus"), np.random.default_rng(5)
    paths = []
    for tag, lengths in {"one": (1, 40, 9, 21), "two": (75, 30, 2)}.items():
        rows = [{"id": f"{tag}{n}", "tokens": rng.integers(0, 256, n).tolist()} for n in lengths]
        (folder / f"{tag}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        paths.append(f"{folder / tag}.jsonl={tag}")
    return load_corpus(parse_specs(",".join(paths)), one_byte_each(), seq_len=32)


@pytest.fixture(scope="module")
def evaluation(source: LocalSource, corpus: Corpus) -> Evaluation:
    return evaluate(source, corpus, PLANS, memory=GB)


@pytest.fixture(scope="module")
def model(source: LocalSource, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("compare") / "build"
    run(plan_build(source, load_profile("mxfp4")), source, folder)
    return load_weights(folder, lazy=False)[0]


Seen = tuple[np.ndarray, dict[int, tuple[np.ndarray, ...]]]


def forward(model: Any, ids: np.ndarray, plan: PrunePlan | None = None) -> Seen:
    """Logits [T, V] of the whole model, and of each MoE layer experts, gates and y."""
    modules = model.language_model.model.layers
    own = {layer: modules[layer].mlp.e_score_correction_bias for layer in range(1, 5)}
    taps: dict[tuple[int, str], np.ndarray] = {}
    for layer in own if plan else ():
        kept = np.isin(np.arange(8), plan.layers[layer].keep)
        bias = np.where(kept, np.array(own[layer]), NEVER_CHOSEN)
        modules[layer].mlp.e_score_correction_bias = mx.array(bias.astype(np.float32))

    def tap(layer: int, name: str, array: mx.array) -> None:
        taps[layer, name] = np.array(array.astype(mx.float32))[0]

    logits = np.array(model(mx.array(ids)[None], None, tap).astype(mx.float32))[0]
    for layer, bias in own.items():
        modules[layer].mlp.e_score_correction_bias = bias
    seen = {}
    for layer in own:
        gates, outputs = taps[layer, "router_weights"], taps[layer, "expert_output"]
        y = np.einsum("tk,tkc->tc", gates.astype(np.float64), outputs.astype(np.float64))
        seen[layer] = (taps[layer, "experts"].astype(int), gates, y)
    return logits.astype(np.float64), seen


def naive(model: Any, corpus: Corpus, plans: list[PrunePlan]) -> dict[str, np.ndarray]:
    """The slow twin: one sequence at a time, the whole model, float64 NumPy, loops."""
    n_plans, n_documents = len(plans), len(corpus.documents)
    sums = {name: np.zeros((n_plans, n_documents)) for name in ("kl", "agree")}
    sums |= {name: np.zeros((4, n_plans, n_documents)) for name in ("cosine", "coverage")}
    sums |= {"nll": np.zeros((n_plans + 1, n_documents))}
    sums |= {name: np.zeros(n_documents) for name in ("tokens", "positions")}
    for it in corpus.sequences:
        d, targets = it.document, it.tokens[1:]
        sums["tokens"][d] += len(targets)
        sums["positions"][d] += len(it)
        parent, inside = forward(model, it.tokens)
        p = log_softmax(parent[:-1], axis=-1)
        sums["nll"][0, d] -= p[np.arange(len(targets)), targets].sum()
        for number, plan in enumerate(plans):
            logits, own = forward(model, it.tokens, plan)
            q = log_softmax(logits[:-1], axis=-1)
            sums["nll"][number + 1, d] -= q[np.arange(len(targets)), targets].sum()
            sums["kl"][number, d] += (np.exp(p) * (p - q)).sum()
            sums["agree"][number, d] += (p.argmax(-1) == q.argmax(-1)).sum()
            for layer in range(4):
                experts, gates, y = inside[layer + 1]
                other = own[layer + 1][2]
                norms = np.linalg.norm(y, axis=-1) * np.linalg.norm(other, axis=-1)
                sums["cosine"][layer, number, d] += ((y * other).sum(-1) / norms).sum()
                kept = np.isin(experts, plan.layers[layer + 1].keep)
                shares = (gates * kept).sum(-1) / gates.sum(-1)
                sums["coverage"][layer, number, d] += shares.sum()
    return sums


def test_it_is_what_the_whole_model_shows(
    evaluation: Evaluation, model: Any, corpus: Corpus
) -> None:
    expected = naive(model, corpus, list(PLANS.values()))
    for name in ARRAYS:
        found = getattr(evaluation, name)
        assert np.allclose(found, expected[name], rtol=1e-4, atol=2e-4), name
    assert evaluation.nll.min(where=evaluation.tokens > 0, initial=np.inf) > 0
    assert (evaluation.kl[0][evaluation.tokens > 0] > 0.01).all()
    assert evaluation.document_sources.tolist() == [0, 0, 0, 0, 1, 1, 1]


def test_a_plan_that_drops_nothing_costs_nothing(evaluation: Evaluation) -> None:
    assert np.array_equal(evaluation.nll[2], evaluation.nll[0])
    assert np.array_equal(evaluation.agree[1], evaluation.tokens)
    assert not evaluation.kl[1].any()
    assert np.allclose(evaluation.coverage[:, 1], evaluation.positions)
    assert np.allclose(evaluation.cosine[:, 1], evaluation.positions)


def test_a_lane_costs_what_a_pruned_build_does(
    source: LocalSource, corpus: Corpus, evaluation: Evaluation, tmp_path: Path
) -> None:
    """The build is evaluated as a parent of its own."""
    run(plan_build(source, load_profile("mxfp4"), HALF), source, tmp_path / "pruned")
    built = evaluate(open_source(tmp_path / "pruned"), corpus, {}, memory=GB)
    assert built.nll.shape == (1, len(corpus.documents))
    assert np.allclose(built.nll[0], evaluation.nll[1], rtol=1e-5)
    assert not np.allclose(built.nll[0], evaluation.nll[0], rtol=1e-3)


def small_batches(monkeypatch: pytest.MonkeyPatch, n_in_group: int) -> None:
    real = engine.make_groups

    def split(*arguments: Any) -> Any:
        batches = [batch for group in real(*arguments) for batch in group]
        assert len(batches) > 3
        return [tuple(batches[i : i + n_in_group]) for i in range(0, len(batches), n_in_group)]

    monkeypatch.setattr(engine, "make_groups", split)


def equal(one: Evaluation, other: Evaluation) -> None:
    for name in ARRAYS:
        assert np.array_equal(getattr(one, name), getattr(other, name)), name


@pytest.fixture
def micro(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of 64 tokens: `run_stream` took its default when it was defined."""
    monkeypatch.setitem(engine.run_stream.__kwdefaults__, "micro_tokens", 64)


@pytest.mark.usefixtures("micro")
def test_any_grouping_gives_the_same_bits(
    source: LocalSource, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = evaluate(source, corpus, PLANS, memory=GB)
    small_batches(monkeypatch, 1)
    equal(evaluate(source, corpus, PLANS, memory=GB), whole)


@pytest.mark.usefixtures("micro")
@pytest.mark.parametrize("stop_at", [3, 6, 9])
def test_an_interrupted_run_continues_with_the_same_bits(
    stop_at: int, source: LocalSource, corpus: Corpus, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """In a layer, at the head of the first group, in the second group."""
    small_batches(monkeypatch, 2)
    expected = evaluate(source, corpus, PLANS, memory=GB)
    real, calls = CostObserver.state, []

    def state(self: CostObserver) -> Any:
        calls.append(0)
        if len(calls) == stop_at:
            raise KeyboardInterrupt
        return real(self)

    with monkeypatch.context() as patch:
        patch.setattr(CostObserver, "state", state)
        with pytest.raises(KeyboardInterrupt):
            evaluate(source, corpus, PLANS, memory=GB, folder=tmp_path / "run")
    equal(evaluate(source, corpus, PLANS, memory=GB, folder=tmp_path / "run"), expected)


def test_pieces_of_the_vocabulary_change_nothing(
    monkeypatch: pytest.MonkeyPatch, corpus: Corpus
) -> None:
    """A piece of one row, of a few rows that don't divide the batch, and of all of them."""
    rng = np.random.default_rng(1)
    (batch, *_) = make_batches([sequence.tokens for sequence in corpus.sequences], 128)
    flat, parent = (
        mx.array(rng.standard_normal((batch.size, 300)).astype(np.float32)) for _ in range(2)
    )
    whole = [np.array(value) for value in compare.predictions(flat, parent, batch)]
    for n_rows in (1, 7):
        monkeypatch.setattr(compare, "PIECE", 300 * n_rows)
        parts = compare.predictions(flat, parent, batch)
        for one, other in zip(parts, whole, strict=True):
            assert np.allclose(np.array(one), other, rtol=1e-6)


def test_large_logits_keep_their_precision() -> None:
    """Against float64, with logits that overflow when they are exponentiated."""
    rng = np.random.default_rng(2)
    values = (rng.standard_normal((2, 5, 4000)) * 40 + 300).astype(np.float32)
    targets = rng.integers(0, 4000, 5)
    nll, kl, agree = compare.costs(*map(mx.array, values), mx.array(targets))
    own, other = log_softmax(values.astype(np.float64), axis=-1)
    assert np.allclose(np.array(nll), -own[np.arange(5), targets], rtol=1e-5)
    assert np.allclose(np.array(kl), (np.exp(other) * (other - own)).sum(-1), rtol=1e-5)
    assert np.array(agree).tolist() == (own.argmax(-1) == other.argmax(-1)).tolist()


def test_what_is_no_number_is_refused(source: LocalSource, corpus: Corpus) -> None:
    layers = open_layers(source)
    observer = CostObserver(layers, corpus, [HALF])
    (batch, *_) = make_batches([sequence.tokens for sequence in corpus.sequences], 64)
    with pytest.raises(KimiError, match="nll of lane 0 is not a finite number"):
        observer.logits(0, batch, mx.full((*batch.ids.shape, 512), float("nan")))


def test_bad_plans_and_texts_are_refused_before_anything_runs(
    source: LocalSource, corpus: Corpus, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    for plans, match in (
        ({"parent": HALF}, "can't be called 'parent'"),
        ({"x": PrunePlan(9, HALF.layers)}, "9 experts"),
        ({"x": PrunePlan(8, {1: LayerPlan((0, 1))})}, "layer 2"),
    ):
        with pytest.raises(UsageError, match=match):
            evaluate(source, corpus, plans, memory=GB, folder=folder)
    (tmp_path / "a.jsonl").write_text('{"tokens": [1]}\n')
    nothing = load_corpus(parse_specs(f"{tmp_path}/a.jsonl"), one_byte_each(), seq_len=8)
    with pytest.raises(UsageError, match="nothing is predicted"):
        evaluate(source, nothing, PLANS, memory=GB, folder=folder)
    assert not folder.exists()


def test_the_budget_of_the_stream_holds_where_logits_are_wide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the parent's logits held beside a plan's; a piece is a small part of them, as in K3."""
    sizes = TinyConfig(layers=2, vision=False, vocab=4096)
    opened = open_source(write_source(tmp_path / "source", sizes))
    rows = ({"tokens": [n % 256 for n in range(i, i + 60)]} for i in range(12))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = load_corpus(parse_specs(f"{tmp_path}/a.jsonl"), one_byte_each(), seq_len=64)
    batches = make_batches([it.tokens for it in text.sequences], 2048)
    budget = make_budget(open_layers(opened), batches, 3)
    memory = budget.fixed + budget.per_token * text.n_tokens
    plans = {name: PrunePlan(8, {1: LayerPlan((0, 1, 2, 3))}) for name in ("a", "b")}

    def peak(piece: int) -> int:
        monkeypatch.setattr(compare, "PIECE", piece)
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        evaluate(opened, text, plans, memory=memory)
        return mx.get_peak_memory() - before

    assert peak(1 << 16) <= memory
    assert peak(1 << 30) > memory
