"""The MLX port's statistics: what they hold, what can be planned with them, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kimi_k3_mlx.errors import CheckpointError, UsageError
from kimi_k3_mlx.prune_plan import read_plan
from kimi_k3_mlx.reap.criteria import CRITERIA, mix_of, scores, standard_errors
from kimi_k3_mlx.reap.planner import Planner, Recipe
from kimi_k3_mlx.reap.saliency import UNKNOWN, Saliency, load_saliency, merge
from kimi_k3_mlx.reap.sizes import check_same_model
from kimi_k3_mlx.tensors.local import open_source
from tests.cli.conftest import program
from tests.reap.routing import random_store

LAYERS, EXPERTS, TOP_K = 5, 8, 2
TOKENS = (300, 100)
MEASURED = ("frequency", "reap", "weighted-ean")
Arrays = dict[str, Any]


def port(tagged: bool = True) -> Arrays:
    """What reap_calibrate.py saves of a model with one dense layer, added up pair by pair."""
    rng = np.random.default_rng(0)
    sums, counts = np.zeros((2, 2, LAYERS, EXPERTS))
    for layer in range(1, LAYERS):
        for source, n_tokens in enumerate(TOKENS):
            for _ in range(n_tokens):
                for expert in rng.permutation(EXPERTS - source)[:TOP_K]:
                    sums[source, layer, expert] += rng.random()
                    counts[source, layer, expert] += 1
    return {
        "saliency": sums.sum(0), "counts": counts.sum(0), "n_tokens": np.array(sum(TOKENS)),
        "moe_layers": np.arange(1, LAYERS), "num_experts": np.array(EXPERTS),
        "top_k": np.array(TOP_K), "num_hidden_layers": np.array(LAYERS),
        "per_source": sums if tagged else np.zeros_like(sums[:1]),
        "per_source_counts": counts if tagged else np.zeros_like(counts[:1]),
        "source_labels": np.array(["code", "zh"] if tagged else ["all"]),
        "source_tokens": np.array(TOKENS if tagged else [sum(TOKENS)]),
        "act_mag": np.zeros((LAYERS, 32)), "act_n": np.full(LAYERS, 400.0),
    }  # fmt: skip


def saved(path: Path, arrays: Arrays) -> Path:
    np.savez(path, **arrays)
    return path


@pytest.fixture
def npz(tmp_path: Path) -> Path:
    return saved(tmp_path / "port.npz", port())


def test_its_sums_are_ours_under_other_names(npz: Path) -> None:
    store, arrays = load_saliency(npz), port()
    assert (store.model, store.sources, store.layers) == (UNKNOWN, ("code", "zh"), (1, 2, 3, 4))
    assert (store.n_experts, store.top_k) == (EXPERTS, TOP_K)
    for expected, name in (("per_source", "weighted"), ("per_source_counts", "pairs")):
        assert np.array_equal(store.arrays[name], arrays[expected][:, 1:])
    assert store.tokens.tolist() == list(TOKENS)
    assert store.runs[0]["file"] == "port.npz"


@pytest.mark.parametrize("kind", ["untagged", "first version", "subset"])
def test_without_sums_by_source_there_is_one_source(kind: str, tmp_path: Path) -> None:
    """Untagged: zeros. The first version and reap_subset.py wrote no arrays by source at all."""
    arrays = port(tagged=kind == "subset")
    if kind != "untagged":
        arrays = {name: array for name, array in arrays.items() if "per_source" not in name}
    if kind == "first version":
        del arrays["source_labels"], arrays["source_tokens"]
    store = load_saliency(saved(tmp_path / "port.npz", arrays))
    assert store.sources == (("code+zh",) if kind == "subset" else ("all",))
    assert np.array_equal(store.arrays["weighted"][0], arrays["saliency"][1:])
    assert store.tokens.tolist() == [sum(TOKENS)]


def test_what_it_measured_ranks_and_what_it_did_not_is_named(npz: Path) -> None:
    store = load_saliency(npz)
    for name, criterion in CRITERIA.items():
        recipe = Recipe(criterion=name, floor=TOP_K)
        if name in MEASURED:
            assert scores(store, criterion, mix_of(store)).shape == (4, EXPERTS)
            assert standard_errors(store, criterion, mix_of(store)) is None
            plan = Planner(store, recipe).cut(4)
            assert plan.chosen_by["protections"]["super_experts"]["flagged"] is None
        else:
            with pytest.raises(UsageError, match=f"the statistics lack {criterion.total} "):
                Planner(store, recipe)
    with pytest.raises(UsageError, match="lack norm_max: it was not measured"):
        Planner(store, Recipe(keep_super_experts=True))
    whole = load_saliency(npz).arrays
    expected = whole["weighted"].sum(0) / whole["pairs"].sum(0)
    assert np.allclose(scores(store, CRITERIA["reap"], mix_of(store)), expected)


def test_it_is_not_merged(npz: Path) -> None:
    for one, other in ((load_saliency(npz), random_store()), (random_store(), load_saliency(npz))):
        with pytest.raises(UsageError, match="can't be merged"):
            merge(one, other)


def test_of_an_unknown_checkpoint_the_sizes_are_compared(npz: Path, tiny_text_source: Path) -> None:
    source, store = open_source(tiny_text_source), load_saliency(npz)
    check_same_model(store, source)
    other = Saliency(UNKNOWN, store.sources, store.layers, EXPERTS, 3, store.arrays)
    with pytest.raises(UsageError, match="8 experts, 3 a token, in 4 layers"):
        check_same_model(other, source)


def damaged(what: str) -> Arrays:
    """Arrays with one thing wrong."""
    arrays = port()
    arrays |= {
        "object": {"counts": np.array([{}], object)},
        "shape": {"saliency": arrays["saliency"][1:]},
        "nan": {"per_source": arrays["per_source"] * np.nan},
        "negative": {"counts": -arrays["counts"]},
        "text": {"n_tokens": np.array("many")},
        "none": {"top_k": np.array(0)},
        "layers": {"moe_layers": np.array([1, 2, 3, 5])},
        "order": {"moe_layers": np.array([2, 1, 3, 4])},
        "counts": {"per_source_counts": arrays["per_source_counts"] * 2},
        "labels": {"source_labels": np.array(["code", "code"])},
        "tokens": {"source_tokens": np.array([300, 101])},
        "sources": {"source_labels": np.array(["code"])},
    }[what]
    return arrays


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("object", "can't be read as .npz: Object arrays cannot be loaded"),
        ("shape", r"an array saliency of float64 \[4, 8\], expected \[5, 8\]"),
        ("nan", "numbers in per_source that are negative or not finite"),
        ("negative", "numbers in counts that are negative"),
        ("text", "an array n_tokens of <U4"),
        ("none", "says top_k 0"),
        ("layers", r"of 5 layers, \[1, 2, 3, 5\] have experts"),
        ("order", "have experts"),
        ("counts", "other counts for code than its tokens times top_k 2"),
        ("labels", r"sources \['code', 'code'\]"),
        ("tokens", r"of \[300, 101\] tokens, 400 in all"),
        ("sources", r"source_tokens of int64 \[2\], expected \[1\]"),
    ],
)
def test_what_the_port_did_not_write_is_refused(what: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_saliency(saved(tmp_path / "odd.npz", damaged(what)))


@pytest.mark.parametrize("name", ["saliency", "counts", "n_tokens", "moe_layers", "source_tokens"])
def test_a_missing_array_is_named(name: str, tmp_path: Path) -> None:
    arrays = port()
    del arrays[name]
    with pytest.raises(CheckpointError, match=f"has no array {name}"):
        load_saliency(saved(tmp_path / "odd.npz", arrays))


def test_a_file_that_is_no_npz(npz: Path) -> None:
    whole = npz.read_bytes()
    for content in (
        b"",
        b"\x80\x04",
        whole[:300],
        whole[:-30],
        whole[:200] + b"x" * 99 + whole[299:],
    ):
        npz.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"can't be read as \.npz"):
            load_saliency(npz)


def test_on_the_command_line(npz: Path, tiny_text_source: Path, tmp_path: Path) -> None:
    shown = program("stats", "show", npz)
    assert (shown.code, shown.err) == (0, "")
    assert "model unknown: 4 layers of 8 experts, 2 a token" in shown.out
    assert "not measured: gate, norm," in shown.out
    told = json.loads(program("stats", "show", npz, "--json").out)
    assert told["by_source"]["zh"] == {
        "tokens": 100, "sequences": None, "pairs_per_expert": 25.0,
    }  # fmt: skip
    assert "loo" in told["unmeasured"]
    plan = ["plan", "--stats", npz, "--floor", "2", "--keep", "4", "--out", tmp_path / "plan.json"]
    made = program(*plan, "--criterion", "weighted-ean", "--hf-path", tiny_text_source)
    assert made.code == 0, made.err
    assert "only its sizes were compared" in made.err
    assert "norms were not measured" in made.out
    read = read_plan((tmp_path / "plan.json").read_text(), "plan.json")
    assert read.chosen_by["statistics"]["model"] == UNKNOWN
    refused = program(*plan, "--criterion", "loo")
    assert refused.code == 2
    assert refused.err.count("\n") <= 2
    assert "the statistics lack loo (ΣΔ: leave-one-out directional distortion)" in refused.err
