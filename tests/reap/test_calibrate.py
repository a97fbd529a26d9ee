"""Calibration layer by layer measures what the whole model in memory shows, whatever the memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kimi_k3_mlx.convert.plan import plan_build
from kimi_k3_mlx.convert.profiles import load_profile
from kimi_k3_mlx.convert.run import run
from kimi_k3_mlx.convert.sidecars import PRUNE_PLAN
from kimi_k3_mlx.prune_plan import read_plan
from kimi_k3_mlx.reap.accumulate import Accumulator, Tags
from kimi_k3_mlx.reap.calibrate import calibrate, measure
from kimi_k3_mlx.reap.corpus import Corpus, load_corpus, parse_specs
from kimi_k3_mlx.reap.planner import Planner, Recipe
from kimi_k3_mlx.reap.saliency import Saliency, load_saliency, merge
from kimi_k3_mlx.runtime.load import load_weights
from kimi_k3_mlx.stream import engine
from kimi_k3_mlx.tensors.local import LocalSource, open_source
from tests.cli.conftest import program
from tests.reap.routing import observe
from tests.reap.test_corpus_scripts import one_byte_each
from tests.tiny_k3 import TinyConfig, write_source

GB = 10**9


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> LocalSource:
    sizes = TinyConfig(trunk_dtype="F32", vision=False)
    return open_source(write_source(tmp_path_factory.mktemp("calibrate") / "source", sizes))


def corpus_of(folder: Path, seed: int = 0) -> Corpus:
    """Two sources of random bytes, in documents of many lengths."""
    rng = np.random.default_rng(seed)
    paths = []
    for tag in ("one", "two"):
        rows = [
            {"id": f"{tag}{seed}-{i}", "tokens": rng.integers(0, 256, rng.integers(3, 40)).tolist()}
            for i in range(9)
        ]
        path = folder / f"{tag}-{seed}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        paths.append(f"{path}={tag}")
    return load_corpus(parse_specs(",".join(paths)), one_byte_each(), seq_len=32)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return corpus_of(tmp_path_factory.mktemp("corpus"))


def in_memory(source: LocalSource, corpus: Corpus, folder: Path) -> Saliency:
    """The naive twin: the whole model, one sequence at a time, with taps."""
    run(plan_build(source, load_profile("mxfp4")), source, folder)
    model, _ = load_weights(folder, lazy=False)
    total = Accumulator(corpus.sources, (1, 2, 3, 4), 8, 2)
    for number, sequence in enumerate(corpus.sequences):
        taps: dict[tuple[int, str], np.ndarray] = {}

        def tap(layer: int, name: str, array: mx.array, taps: Any = taps) -> None:
            taps[layer, name] = np.array(array)[0]

        mx.eval(model(mx.array(sequence.tokens)[None], None, tap))
        size = len(sequence)
        tags = Tags(*(np.full(size, n) for n in (sequence.source, number, sequence.fold)))
        for layer in (1, 2, 3, 4):
            experts, gates, outputs = (
                taps[layer, name] for name in ("experts", "router_weights", "expert_output")
            )
            values = observe(experts, gates, outputs)
            total.add(layer, tags, experts.astype(np.int64), gates, *values)
    return total.finish(source.id.headers_sha256, {})


COUNTS = (
    "pairs", "tokens", "sequences", "seq_pairs_sq", "seq_pairs_tokens", "seq_tokens_sq",
    "fold_pairs", "fold_tokens",
)  # fmt: skip


def nearly_equal(one: Saliency, other: Saliency, skip: str = "-") -> None:
    """Counts to the last one; sums as far as other shapes of matrices round otherwise."""
    for name, expected in one.arrays.items():
        found = other.arrays[name]
        if name.startswith(skip):
            continue
        if name in COUNTS:
            assert np.array_equal(found, expected), name
        else:
            assert np.abs(found - expected).max() <= 2e-4 * np.abs(expected).max(), name


def same_bits(one: Saliency, other: Saliency) -> None:
    assert one.arrays.keys() == other.arrays.keys()
    for name, array in one.arrays.items():
        assert np.array_equal(array, other.arrays[name]), name


def test_it_measures_what_the_whole_model_shows(
    source: LocalSource, corpus: Corpus, tmp_path: Path
) -> None:
    streamed = calibrate(source, corpus, memory=GB)
    nearly_equal(streamed, in_memory(source, corpus, tmp_path / "build"))
    assert streamed.arrays["pairs"].sum() == 4 * 2 * corpus.n_tokens
    assert streamed.model == source.id.headers_sha256


def test_any_grouping_gives_the_same_bits(
    source: LocalSource, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    micro_batches = engine.make_batches([it.tokens for it in corpus.sequences], 64)
    assert len(micro_batches) > 3
    monkeypatch.setattr(engine, "make_batches", lambda *_: micro_batches)
    whole = calibrate(source, corpus, memory=GB)
    real = engine.make_groups
    for size in (1, 3):

        def split(*arguments: Any, size: int = size) -> Any:
            batches = [batch for group in real(*arguments) for batch in group]
            return [tuple(batches[i : i + size]) for i in range(0, len(batches), size)]

        monkeypatch.setattr(engine, "make_groups", split)
        same_bits(calibrate(source, corpus, memory=GB), whole)


def test_two_runs_merged_are_one_run_over_both(source: LocalSource, tmp_path: Path) -> None:
    one, two = (calibrate(source, corpus_of(tmp_path, seed), memory=GB) for seed in (1, 2))
    tags = [(seed, tag) for seed in (1, 2) for tag in ("one", "two")]
    both = ",".join(f"{tmp_path}/{tag}-{seed}.jsonl={tag}" for seed, tag in tags)
    corpus = load_corpus(parse_specs(both), one_byte_each(), seq_len=32)
    together = calibrate(source, corpus, memory=GB)
    nearly_equal(merge(one, two), together, skip="fold_")  # folds are balanced within a run


def test_an_interrupted_run_continues_with_the_same_bits(
    source: LocalSource, corpus: Corpus, tmp_path: Path
) -> None:
    def stop(done: int, total: int, what: str) -> None:
        if "layer 4/" in what:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(source, corpus, memory=GB, folder=tmp_path / "run", progress=stop)
    same_bits(
        calibrate(source, corpus, memory=GB, folder=tmp_path / "run"),
        calibrate(source, corpus, memory=GB),
    )


def test_the_device_measures_as_numpy_does() -> None:
    rng = np.random.default_rng(0)
    experts = np.array([[3, 1], [0, 2]])
    gates, outputs = rng.random((2, 2)), rng.standard_normal((2, 2, 64))
    found = measure(mx.array(gates.astype(np.float32)), mx.array(outputs.astype(np.float32)))
    for ours, expected in zip(found, observe(experts, gates, outputs), strict=True):
        assert np.allclose(ours, expected, rtol=1e-5)


def test_on_the_command_line_from_text_to_a_plan(tmp_path: Path) -> None:
    tiny = Path(__file__).parents[2] / "kimi_k3_mlx/assets/tiny-k3"
    stats, plan = tmp_path / "s.safetensors", tmp_path / "plan.json"
    corpus = f"{tiny}/held_out/code.txt=code,{tiny}/held_out/chinese.txt=zh"
    args = ["--hf-path", tiny, "--corpus", corpus, "--seq-len", "64", "--tokens-per-source", "256"]
    told = program("calibrate", *args, "--bos", "--out", stats)
    assert told.code == 0, told.err
    assert "red: code: " in told.err
    assert "han " in told.err
    assert not (tmp_path / "s.safetensors.run").exists()
    assert load_saliency(stats).sources == ("code", "zh")
    planned = program("plan", "--stats", stats, "--keep", "32", "--out", plan, "--hf-path", tiny)
    assert planned.code == 0, planned.err
    built = program(
        "convert", "--hf-path", tiny, "--prune-plan", plan, "--mlx-path", tmp_path / "out", "-q"
    )
    assert (built.code, built.err) == (0, "")


def test_prune_takes_a_count_and_statistics(tmp_path: Path) -> None:
    """The same experts as a plan of that size keeps."""
    tiny = open_source(Path(__file__).parents[2] / "kimi_k3_mlx/assets/tiny-k3")
    store = calibrate(tiny, corpus_of(tmp_path), memory=GB)
    store.save(tmp_path / "s.safetensors")
    out, stats = tmp_path / "out", ["--stats", tmp_path / "s.safetensors"]
    args = ["prune", "--hf-path", tiny.path, "--out", out, "-q"]
    done = program(*args, *stats, "--keep", "24")
    assert (done.code, done.err) == (0, "")
    expected = Planner(store, Recipe()).cut(24)
    assert read_plan((out / PRUNE_PLAN).read_text(), "p").layers == expected.layers
    both = [*stats, "--keep", "24", "--prune-plan", out / PRUNE_PLAN]
    for wrong in (stats, ["--keep", "24"], both):
        refused = program(*args, *wrong)
        assert refused.code == 2
        assert refused.err.startswith("kimi-k3: error: what stays must be said once.")


def test_a_dry_run_says_what_the_corpus_holds(tmp_path: Path) -> None:
    tiny = Path(__file__).parents[2] / "kimi_k3_mlx/assets/tiny-k3"
    out = tmp_path / "s.safetensors"
    corpus = f"{tiny}/held_out/english.txt=en"
    told = program(
        "calibrate", "--hf-path", tiny, "--corpus", corpus, "--out", out, "--dry-run", "--json"
    )
    assert told.code == 0, told.err
    assert json.loads(told.out)["corpus"]["counts"]["en"]["latin"] > 1000
    assert list(tmp_path.iterdir()) == []
