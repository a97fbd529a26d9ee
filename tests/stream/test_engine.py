"""Streamed values are those of the whole model, whatever the groups, and padding is never seen."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.base import create_attention_mask

import kimi_k3
from kimi_k3_mlx.errors import DoesNotFitError, UsageError
from kimi_k3_mlx.prune_plan import LayerPlan, PrunePlan
from kimi_k3_mlx.runtime.load import load_weights
from kimi_k3_mlx.stream.budget import Batch, make_batches, make_budget, make_groups
from kimi_k3_mlx.stream.engine import Embedder, Lane, run_stream
from kimi_k3_mlx.stream.layers import Layers, open_layers
from kimi_k3_mlx.stream.passes import OBSERVED
from kimi_k3_mlx.tensors.local import open_source
from tests.stream.conftest import PLAN, PLENTY, convert
from tests.stream.recorder import Adder, Recorder, as_numpy

PARENT = Lane("parent")
BOTH = (PARENT, Lane("pruned", PLAN))
MICRO = 64


def record(path: Path, sequences, lanes=(PARENT,), memory: int = PLENTY, **options) -> Recorder:
    layers, observer = open_layers(open_source(path)), Recorder()
    options = {"micro_tokens": MICRO} | options
    run_stream(layers, sequences, lanes, observer, memory=memory, **options)
    return observer


def same(found: Recorder, expected: Recorder) -> None:
    assert found.moes.keys() == expected.moes.keys()
    assert found.ends.keys() == expected.ends.keys()
    for key, taps in expected.moes.items():
        for a, b in zip(found.moes[key], taps, strict=True):
            assert np.array_equal(a, b), key
    for key, logits in expected.ends.items():
        assert np.array_equal(found.ends[key], logits), key


def test_logits_and_taps_are_the_whole_models_to_the_bit(build: Path, sequences) -> None:
    """The model's own forward pass, on the same padded micro-batches."""
    found = record(build, sequences)
    model, _ = load_weights(build, lazy=False)
    seen = Recorder()
    for batch in make_batches(sequences, MICRO):
        taps: dict[int, dict[str, mx.array]] = {}

        def tap(layer: int, name: str, array: mx.array, taps=taps) -> None:
            taps.setdefault(layer, {})[name] = array

        seen.logits(0, batch, model(mx.array(batch.ids), tap=tap))
        for layer, named in taps.items():
            if "experts" in named:
                seen.moe(layer, 0, batch, *(named[name] for name in OBSERVED))
    assert len(seen.moes) == 4 * len(sequences)
    same(found, seen)


class Reversed(Embedder):
    """The embeddings of each row's tokens from the last to the first."""

    def __call__(self, layers, group):
        for batch in group:
            rows = zip(batch.ids, batch.lengths, strict=True)
            ids = np.stack([np.append(row[:n][::-1], row[n:]) for row, n in rows])
            yield layers.embed(mx.array(ids))


def test_an_embedder_decides_what_goes_into_the_first_layer(build: Path, sequences) -> None:
    expected = record(build, [ids[::-1] for ids in sequences])
    same(record(build, sequences, embedder=Reversed()), expected)


def test_prefix_and_blocks_are_the_whole_models(build: Path, sequences) -> None:
    model, _ = load_weights(build, lazy=False)
    layers, ids = open_layers(open_source(build)), mx.array(sequences[1][None])
    found: dict[tuple[int, str], mx.array] = {}
    expected: dict[tuple[int, str], mx.array] = {}
    model(ids, tap=lambda layer, name, array: expected.__setitem__((layer, name), array))
    prefix, blocks = layers.embed(ids), kimi_k3.BlockStack(layers.args.rms_norm_eps)
    for number, layer in layers.stream(range(layers.n_layers)):
        mask = None if layer.is_linear else create_attention_mask(prefix, None, return_array=True)
        tap = partial(lambda n, name, array: found.__setitem__((n, name), array), number)
        prefix = layer(prefix, blocks, mask, None, tap)
        mx.eval(prefix, found)
    assert found.keys() == expected.keys()
    assert {name for _, name in found} >= {"hidden", "block", "router_scores"}
    assert all(mx.array_equal(found[key], array) for key, array in expected.items())


def test_every_sequence_alone_gives_the_same_to_a_few_roundings(
    float_build: Path, sequences
) -> None:
    """Padding and neighbours don't matter."""
    found = record(float_build, sequences)
    model, _ = load_weights(float_build, lazy=False)
    for index, ids in enumerate(sequences):
        expected = as_numpy(model(mx.array(ids[None])))[0]
        assert np.abs(found.ends[0, index] - expected).max() < 2e-5 * np.abs(expected).max()


@pytest.mark.parametrize("group_size", [1, 2])
def test_group_sizes_change_nothing(group_size: int, build: Path, sequences) -> None:
    layers = open_layers(open_source(build))
    batches = make_batches(sequences, MICRO)
    budget = make_budget(layers, batches, len(BOTH))
    memory = budget.fixed + group_size * budget.per_token * max(batch.size for batch in batches)
    groups = make_groups(batches, budget, memory, spill=False)
    assert max(map(len, groups)) >= group_size < len(batches)
    assert len(groups) > 1
    same(record(build, sequences, BOTH, memory), record(build, sequences, BOTH))


def test_spilled_activations_are_the_same(build: Path, sequences, tmp_path: Path) -> None:
    layers = open_layers(open_source(build))
    batches = make_batches(sequences, MICRO)
    budget = make_budget(layers, batches, len(BOTH))
    memory = budget.fixed + budget.per_token * max(batch.size for batch in batches)
    found = record(build, sequences, BOTH, memory, folder=tmp_path / "run", spill=True)
    same(found, record(build, sequences, BOTH))
    assert [path.name for path in (tmp_path / "run").iterdir() if path.is_dir()] == []


def test_source_and_build_are_the_same(tiny_text_source: Path, build: Path, sequences) -> None:
    same(record(tiny_text_source, sequences, BOTH), record(build, sequences, BOTH))


def test_a_lane_is_a_pruned_build(
    tiny_float_source: Path, float_build: Path, sequences, tmp_path: Path
) -> None:
    """Routing to the bit, logits to the roundings of sums in another order."""
    pruned = convert(tiny_float_source, tmp_path / "pruned", plan=PLAN)
    found, expected = record(float_build, sequences, BOTH), record(pruned, sequences)
    parent = record(float_build, sequences)
    for (layer, lane, index), (experts, weights, _) in found.moes.items():
        if lane:
            keep = np.array(PLAN.layers[layer].keep)
            renumbered = keep[expected.moes[layer, 0, index][0]]
            assert np.array_equal(np.sort(experts), np.sort(renumbered))
            own = np.sort(expected.moes[layer, 0, index][1])
            assert np.allclose(np.sort(weights), own, rtol=1e-5, atol=1e-7)
    for index in range(len(sequences)):
        logits = expected.ends[0, index]
        assert np.abs(found.ends[1, index] - logits).max() < 2e-5 * np.abs(logits).max()
        assert np.array_equal(found.ends[0, index], parent.ends[0, index])
    assert any(not np.allclose(found.ends[0, i], found.ends[1, i], 0.01) for i in range(3))


def test_what_fills_the_rows_is_never_observed(
    float_build: Path, sequences, monkeypatch: pytest.MonkeyPatch
) -> None:
    def observed() -> dict[str, np.ndarray]:
        adder = Adder(8)
        layers = open_layers(open_source(float_build))
        run_stream(layers, sequences, BOTH, adder, memory=PLENTY, micro_tokens=200)
        return adder.sums

    usual = observed()
    assert sum(usual["count.1.0"]) == 2 * sum(map(len, sequences))
    monkeypatch.setattr("kimi_k3_mlx.stream.budget.FILL", 77)
    filled = observed()
    assert usual.keys() == filled.keys()
    for key, sums in usual.items():
        exact = key.startswith("count")
        assert np.array_equal(filled[key], sums) if exact else np.allclose(filled[key], sums, 1e-4)


def test_progress_ends_at_its_total(build: Path, sequences) -> None:
    calls: list[tuple[int, int, str]] = []
    record(build, sequences, progress=lambda *call: calls.append(call))
    assert calls[-1][0] == calls[-1][1]
    assert calls[-1][2] == "group 1/1, layer 5/5"
    assert len(calls) == 5


def test_no_sequences_are_no_work(build: Path) -> None:
    assert record(build, []).restored == {}


def test_batches_hold_every_sequence_once_and_know_their_padding(sequences) -> None:
    batches = make_batches(sequences, MICRO)
    assert sorted(i for batch in batches for i in batch.indices) == list(range(len(sequences)))
    assert all(batch.size <= MICRO for batch in batches)
    assert len(batches) < len(sequences)
    for batch in batches:
        rows = [sequences[index] for index in batch.indices]
        assert np.array_equal(batch.real(mx.array(batch.ids)), np.concatenate(rows))


def test_too_little_memory_is_refused_with_what_would_do(build: Path, sequences) -> None:
    with pytest.raises(DoesNotFitError, match="at least") as caught:
        record(build, sequences, memory=1000)
    least = int(caught.value.hint.split()[2].replace(",", ""))
    record(build, sequences, memory=least)
    with pytest.raises(DoesNotFitError):
        record(build, sequences, memory=least - 1)


@pytest.mark.parametrize(
    ("lanes", "match"),
    [
        ((), "lanes"),
        ((PARENT, PARENT), "each its own"),
        ((Lane("x", PrunePlan(8, {1: LayerPlan((0, 1))})),), "layer 2"),
        ((Lane("x", PrunePlan(9, PLAN.layers)),), "9 experts"),
    ],
)
def test_wrong_lanes_are_refused(lanes, match: str, build: Path, sequences) -> None:
    with pytest.raises(UsageError, match=match):
        record(build, sequences, lanes)


@pytest.mark.parametrize(
    ("ids", "match"),
    [([], "no tokens"), ([512], "token id 512"), ([-1], "token id -1"), ([[1]], "not a row")],
)
def test_wrong_sequences_are_refused(ids, match: str, build: Path) -> None:
    with pytest.raises(UsageError, match=match):
        record(build, [np.array([1]), np.array(ids, np.int32)])


def test_a_plan_over_a_graded_build_is_refused(
    tiny_text_source: Path, sequences, tmp_path: Path
) -> None:
    uneven = convert(tiny_text_source, tmp_path / "uneven", plan=PLAN)
    assert record(uneven, sequences).ends
    with pytest.raises(UsageError, match="one number of experts"):
        record(uneven, sequences, BOTH)


def test_without_logits_the_head_is_not_even_read(build: Path, sequences, monkeypatch) -> None:
    expected = record(build, sequences, BOTH)
    monkeypatch.setattr(Layers, "head", None)
    found = record(build, sequences, BOTH, logits=False)
    assert found.ends == {}
    expected.ends.clear()
    same(found, expected)


def test_spilling_needs_a_folder(build: Path, sequences) -> None:
    with pytest.raises(UsageError, match="folder"):
        record(build, sequences, spill=True)


def test_a_batch_without_padding_is_not_copied() -> None:
    batch = Batch((0,), np.ones((1, 3), np.int32), np.array([3]))
    assert batch.real(mx.zeros((1, 3, 2))).shape == (3, 2)
