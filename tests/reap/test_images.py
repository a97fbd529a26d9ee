"""Calibrating and comparing with pictures is what the whole model shows that sees them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from scipy.special import log_softmax

from kimi_k3_mlx.convert.plan import plan_build
from kimi_k3_mlx.convert.profiles import load_profile
from kimi_k3_mlx.convert.run import run
from kimi_k3_mlx.errors import CheckpointError, UsageError
from kimi_k3_mlx.reap.accumulate import Accumulator, Tags
from kimi_k3_mlx.reap.agree import NamedStore
from kimi_k3_mlx.reap.calibrate import calibrate
from kimi_k3_mlx.reap.compare import evaluate
from kimi_k3_mlx.reap.corpus import Corpus, load_corpus, parse_specs
from kimi_k3_mlx.reap.costs import Costs
from kimi_k3_mlx.reap.judge import NamedPlan
from kimi_k3_mlx.reap.planner import Planner, Recipe
from kimi_k3_mlx.reap.report import make_report
from kimi_k3_mlx.reap.saliency import Saliency
from kimi_k3_mlx.reap.scripts import IMAGE
from kimi_k3_mlx.runtime.load import load_weights
from kimi_k3_mlx.runtime.vision import Eyes, embed, load_vision
from kimi_k3_mlx.stream import engine
from kimi_k3_mlx.tensors.local import LocalSource, open_source
from tests.cli.conftest import program
from tests.reap.pictured import corpus_in, load, paint, rows, write
from tests.reap.routing import observe
from tests.reap.test_calibrate import nearly_equal, same_bits
from tests.reap.test_compare import HALF, equal
from tests.reap.test_corpus_scripts import one_byte_each
from tests.stream.conftest import CHOOSE, with_blocks
from tests.tiny_k3 import TinyConfig, write_json, write_source

GB = 10**9
LAYERS = (1, 2, 3, 4)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> LocalSource:
    config = TinyConfig(trunk_dtype="F32")
    return open_source(write_source(tmp_path_factory.mktemp("sees") / "source", config))


@pytest.fixture(scope="module")
def corpus(source: LocalSource, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return corpus_in(tmp_path_factory.mktemp("corpus"), source)


@pytest.fixture(scope="module")
def build(source: LocalSource) -> LocalSource:
    folder = source.path.parent / "build"
    run(plan_build(source, load_profile("mxfp4")), source, folder)
    return open_source(folder)


@pytest.fixture(scope="module")
def model(build: LocalSource) -> Any:
    return load_weights(build.path, lazy=False)[0]


@pytest.fixture(scope="module")
def eyes(build: LocalSource) -> Eyes:
    return load_vision(build.path)


@pytest.fixture(scope="module")
def store(source: LocalSource, corpus: Corpus) -> Saliency:
    return calibrate(source, corpus, memory=GB)


@pytest.fixture
def micro(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of 256 tokens, so that there are several."""
    monkeypatch.setitem(engine.run_stream.__kwdefaults__, "micro_tokens", 256)


def forward(model: Any, eyes: Eyes, sequence: Any) -> tuple[np.ndarray, dict[Any, np.ndarray]]:
    """Logits [T, V] of a sequence with its pictures, in the way of `kimi-k3 generate`; its taps."""
    images = [picture.image() for picture in sequence.pictures]
    prompt = embed(model, eyes, sequence.tokens.tolist(), images)
    taps: dict[Any, np.ndarray] = {}

    def tap(layer: int, name: str, array: mx.array) -> None:
        taps[layer, name] = np.array(array)[0]

    logits = model(prompt.ids[None], None, tap, input_embeddings=prompt.embeddings[None])
    return np.array(logits)[0].astype(np.float64), taps


def in_memory(model: Any, eyes: Eyes, corpus: Corpus) -> Saliency:
    """The naive twin: the whole model, one sequence at a time, with taps."""
    total = Accumulator(corpus.sources, LAYERS, 8, 2)
    for number, sequence in enumerate(corpus.sequences):
        _, taps = forward(model, eyes, sequence)
        tags = (np.full(len(sequence), n) for n in (sequence.source, number, sequence.fold))
        tagged = Tags(*tags)
        for layer in LAYERS:
            experts, gates, outputs = (
                taps[layer, name] for name in ("experts", "router_weights", "expert_output")
            )
            values = observe(experts, gates, outputs)
            total.add(layer, tagged, experts.astype(np.int64), gates, *values)
    return total.finish("model", {})


def without_pictures(corpus: Corpus) -> Corpus:
    """The same tokens, placeholders as text."""
    blind = [
        replace(it, pictures=(), scripts=np.where(it.scripts == IMAGE, 13, it.scripts))
        for it in corpus.sequences
    ]
    return replace(corpus, sequences=tuple(blind))


def test_it_measures_what_the_whole_model_shows(
    store: Saliency, corpus: Corpus, model: Any, eyes: Eyes
) -> None:
    nearly_equal(store, in_memory(model, eyes, corpus))
    assert store.arrays["pairs"].sum() == 4 * 2 * corpus.n_tokens
    (run,) = store.runs
    assert run["corpus"]["counts"]["seen"]["image"] == 27


def test_another_picture_routes_otherwise(
    store: Saliency, source: LocalSource, tmp_path: Path
) -> None:
    """So the features do arrive: only pixels differ."""
    documents = rows(tmp_path)
    paint(tmp_path / "pictures/wide.png", 84, 56, seed=77)
    other = calibrate(source, load(write(tmp_path / "seen.jsonl", documents), source), memory=GB)
    assert other.arrays["tokens"].tolist() == store.arrays["tokens"].tolist()
    assert not np.array_equal(other.arrays["pairs"], store.arrays["pairs"])


def test_a_build_measures_the_same(store: Saliency, build: LocalSource, corpus: Corpus) -> None:
    nearly_equal(store, calibrate(build, corpus, memory=GB))


@pytest.mark.usefixtures("micro")
@pytest.mark.parametrize("n_block", [0, 3])
def test_any_grouping_gives_the_same_bits(
    n_block: int, source: LocalSource, corpus: Corpus, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Groups of one micro-batch or all; experts whole or in blocks; activations on the disk."""
    monkeypatch.setattr(engine, "choose_budget", with_blocks(0))
    whole = calibrate(source, corpus, memory=GB)
    monkeypatch.setattr(CHOOSE, with_blocks(n_block))
    spilled = calibrate(source, corpus, memory=GB, folder=tmp_path / "spill", spill=True)
    same_bits(spilled, whole)
    split_in_single_batches(monkeypatch)
    same_bits(calibrate(source, corpus, memory=GB), whole)


def split_in_single_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    real = engine.make_groups

    def split(*arguments: Any) -> Any:
        batches = [batch for group in real(*arguments) for batch in group]
        assert len(batches) > 2
        return [(batch,) for batch in batches]

    monkeypatch.setattr(engine, "make_groups", split)


@pytest.mark.usefixtures("micro")
@pytest.mark.parametrize("where", ["group 1/3, layer 4/", "group 2/3, layer 1/"])
def test_an_interrupted_run_continues_with_the_same_bits(
    where: str, source: LocalSource, corpus: Corpus, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def stop(done: int, total: int, what: str) -> None:
        if where in what:
            raise KeyboardInterrupt

    whole = calibrate(source, corpus, memory=GB)
    split_in_single_batches(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        calibrate(source, corpus, memory=GB, folder=tmp_path / "run", progress=stop)
    same_bits(calibrate(source, corpus, memory=GB, folder=tmp_path / "run"), whole)


def test_a_changed_picture_is_another_run(source: LocalSource, tmp_path: Path) -> None:
    corpus = corpus_in(tmp_path, source)
    calibrate(source, corpus, memory=GB, folder=tmp_path / "run")
    paint(tmp_path / "pictures/wide.png", 84, 56, seed=77)
    with pytest.raises(UsageError, match=r"wide\.png has changed since the corpus was read"):
        calibrate(source, corpus, memory=GB)
    changed = load(write(tmp_path / "seen.jsonl", rows(tmp_path)[1:2]), source)
    paint(tmp_path / "pictures/square.png", 50, 50, seed=78)
    again = load(str(tmp_path / "seen.jsonl"), source)
    calibrate(source, again, memory=GB, folder=tmp_path / "other")
    assert changed.token_sha256 == again.token_sha256
    with pytest.raises(UsageError, match="another corpus"):
        calibrate(source, changed, memory=GB, folder=tmp_path / "other")


def test_pictures_are_seen_one_after_the_other(
    source: LocalSource, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tower is given one picture at a time, and each as often as it stands in the corpus."""
    from kimi_k3_vision import Vision

    seen, real = [], Vision.see
    monkeypatch.setattr(Vision, "see", lambda *a: seen.append(len(a[2])) or real(*a))
    calibrate(source, corpus, memory=GB)
    assert seen == [1] * sum(len(it.pictures) for it in corpus.sequences)


def test_placeholders_and_pictures_must_match(
    source: LocalSource, corpus: Corpus, tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_text('{"tokens": [1, 277, 2]}\n')
    spec = parse_specs(f"{tmp_path}/a.jsonl")
    tokens = load_corpus(spec, one_byte_each(), seq_len=8)
    for text in (tokens, without_pictures(corpus)):
        for measure in (calibrate, lambda *a, **k: evaluate(*a, {}, **k)):
            with pytest.raises(UsageError, match="has the placeholder 277 of an image, and no"):
                measure(source, text, memory=GB, folder=tmp_path / "run")
    other = LocalSource(**vars_of(source) | {"config": source.config | {
        "media_placeholder_token_id": 300
    }})  # fmt: skip
    with pytest.raises(CheckpointError, match=r"^\w+: .*images is 277; .* says 300"):
        calibrate(other, corpus, memory=GB, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def vars_of(source: LocalSource) -> dict[str, Any]:
    names = ("where", "id", "config", "shards", "weight_map", "tensors")
    return {name: getattr(source, name) for name in names}


def test_rules_of_another_checkpoint_are_refused(
    source: LocalSource, corpus: Corpus, tiny_text_source: Path, tmp_path: Path
) -> None:
    folder = write_source(tmp_path / "source", TinyConfig(trunk_dtype="F32"))
    write_json(folder / "preprocessor_config.json", {"media_proc_cfg": {"in_patch_limit": 4}})
    with pytest.raises(UsageError, match=r"pixels has \d tokens in the corpus, \d by the rules"):
        calibrate(open_source(folder), corpus, memory=GB)
    with pytest.raises(CheckpointError, match="has no vision_config"):
        calibrate(open_source(tiny_text_source), corpus, memory=GB)


def naive_costs(model: Any, eyes: Eyes, corpus: Corpus) -> dict[str, np.ndarray]:
    """Nats and number of tokens that are predicted, by document; rows of pictures are not."""
    sums = {name: np.zeros(len(corpus.documents)) for name in ("nll", "tokens", "positions")}
    for it in corpus.sequences:
        logs = log_softmax(forward(model, eyes, it)[0], axis=-1)
        sums["positions"][it.document] += len(it)
        for place, token in enumerate(it.tokens[1:].tolist()):
            if token != eyes.placeholder:
                sums["nll"][it.document] -= logs[place, token]
                sums["tokens"][it.document] += 1
    return sums


def test_compare_predicts_text_beside_pictures(
    source: LocalSource, corpus: Corpus, model: Any, eyes: Eyes, tmp_path: Path
) -> None:
    """The parent against the whole model; a plan's lane against a pruned build of it."""
    found = evaluate(source, corpus, {"half": HALF}, memory=GB)
    expected = naive_costs(model, eyes, corpus)
    assert expected["tokens"].sum() == corpus.n_tokens - len(corpus.sequences) - 27
    assert np.array_equal(found.tokens, expected["tokens"])
    assert np.array_equal(found.positions, expected["positions"])
    assert np.allclose(found.nll[0], expected["nll"], rtol=1e-4)
    assert (found.agree <= found.tokens).all()
    run(plan_build(source, load_profile("mxfp4"), HALF), source, tmp_path / "pruned")
    built = evaluate(open_source(tmp_path / "pruned"), corpus, {}, memory=GB)
    assert np.allclose(built.nll[0], found.nll[1], rtol=1e-5)
    assert not any("images" in line for line in Costs(found).to_json()["not_measured"])


@pytest.mark.usefixtures("micro")
def test_compare_gives_the_same_bits_in_any_groups(
    source: LocalSource, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = evaluate(source, corpus, {"half": HALF}, memory=GB)
    split_in_single_batches(monkeypatch)
    equal(evaluate(source, corpus, {"half": HALF}, memory=GB), whole)


def test_the_report_says_whether_images_were_seen(store: Saliency) -> None:
    (run,) = store.runs
    counts = {"seen": {"latin": 9}}
    blind = replace(store, runs=({**run, "corpus": run["corpus"] | {"counts": counts}},))
    unknown = replace(store, runs=({"corpus": "seed 4"},))
    for of, is_said in ((store, False), (blind, True), (unknown, True)):
        plan = NamedPlan("half", Planner(of, Recipe(floor=2)).cut(4))
        lines = make_report([NamedStore("s", of)], [plan])["not_measured"]
        assert any("no image token is on record" in line for line in lines) is is_said


@pytest.mark.slow
def test_on_the_command_line(source: LocalSource, tmp_path: Path) -> None:
    spec = write(tmp_path / "seen.jsonl", rows(tmp_path))
    base = ["--hf-path", source.path, "--seq-len", "512"]
    calibrated = ["calibrate", *base, "--corpus", spec, "--out", tmp_path / "s.safetensors"]
    told = program(*calibrated, "--dry-run")
    assert told.code == 0, told.err
    assert "image 27" in told.err
    assert "no images" not in told.err
    (tmp_path / "p.json").write_text(HALF.to_text())
    told = program("compare", *base, "--plans", tmp_path / "p.json", "--text", spec, "--json", "-q")
    assert told.code == 0, told.err
    assert json.loads(told.out)["corpus"]["counts"]["seen"]["image"] == 27
    (tmp_path / "pictures/wide.png").unlink()
    told = program(*calibrated)
    assert told.code == 2
    assert told.err.startswith(f"kimi-k3: error: {spec}:1: ")
    assert not (tmp_path / "s.safetensors.run").exists()
