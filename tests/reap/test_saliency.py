"""The statistics against a naive loop, their exactness, and the store's file."""

from __future__ import annotations

import json
from dataclasses import replace
from math import fsum
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_k3_mlx.errors import CheckpointError, KimiError, UsageError
from kimi_k3_mlx.reap.pairs import distortion, fixed, short
from kimi_k3_mlx.reap.saliency import (
    CLUSTERS,
    MAXIMA,
    SUMS,
    Saliency,
    load_saliency,
    merge,
)
from tests.reap.routing import (
    EXPERTS,
    LAYERS,
    SOURCES,
    TOP_K,
    Batch,
    accumulator,
    feed,
    observe,
    random_batch,
    random_store,
)

Pair = dict[str, float]


def naive_pair(batch: Batch, t: int, slot: int) -> Pair:
    """One pair's values, from the vectors themselves: y′ is really computed without the expert."""
    weighted = batch.gates[t, :, None] * batch.outputs[t]
    y, rest = weighted.sum(0), np.delete(weighted, slot, 0).sum(0)
    units = y / np.linalg.norm(y), rest / np.linalg.norm(rest)
    norm = np.linalg.norm(batch.outputs[t, slot])
    delta = ((units[0] - units[1]) ** 2).sum()
    c = batch.gates[t, slot] * norm
    return {
        "pairs": 1.0,
        "gate": batch.gates[t, slot],
        "norm": norm,
        "norm_sq": norm**2,
        "weighted": c,
        "weighted_sq": c**2,
        "relative": c / np.linalg.norm(y),
        "loo": delta,
        "loo_sq": delta**2,
    }


def naive_values(batch: Batch, source: int, expert: int) -> dict[int, list[Pair]]:
    """The pairs of a source and an expert, by sequence."""
    found: dict[int, list[Pair]] = {}
    for t, slot in zip(*np.nonzero(batch.experts == expert), strict=True):
        if batch.tags.source[t] == source:
            found.setdefault(int(batch.tags.sequence[t]), []).append(naive_pair(batch, t, slot))
    return found


def sum_of(pairs: list[Pair], name: str) -> float:
    return fsum(pair[name] for pair in pairs)


@pytest.mark.parametrize("seed", range(3))
def test_every_sum_is_that_of_a_loop_over_pairs(seed: int) -> None:
    batch, acc = random_batch(seed), accumulator()
    feed(acc, 2, batch)
    state = {name: array.take(1, -2) for name, array in acc.state().items() if array.ndim > 2}
    lengths = np.bincount(batch.tags.sequence)
    for source in range(len(SOURCES)):
        for expert in range(EXPERTS):
            by_sequence = naive_values(batch, source, expert)
            pairs = [pair for group in by_sequence.values() for pair in group]
            for name in SUMS:
                expected = pytest.approx(sum_of(pairs, name), rel=1e-6, abs=1e-9)
                assert state[name][source, expert] == expected
            for name in MAXIMA:
                largest = max((pair[name[:-4]] for pair in pairs), default=0.0)
                assert state[name][source, expert] == pytest.approx(largest, rel=1e-6)
            for name, (one, other) in CLUSTERS.items():
                expected = fsum(
                    sum_of(group, one) * (lengths[q] if other == "tokens" else sum_of(group, other))
                    for q, group in by_sequence.items()
                )
                assert state[name][source, expert] == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_folds_and_tokens_add_up() -> None:
    batch, acc = random_batch(7), accumulator()
    feed(acc, 1, batch)
    state = acc.state()
    for name in ("pairs", "weighted", "loo"):
        assert np.array_equal(state[f"fold_{name}"].sum(0), state[name])
        assert (state[f"fold_{name}"][:, :, 0].sum((1, 2)) > 0).all()
    assert np.array_equal(state["fold_tokens"].sum(0), state["tokens"])
    assert state["tokens"][:, 0].tolist() == np.bincount(batch.tags.source).tolist()
    assert state["sequences"][:, 0].tolist() == [3, 3, 3]
    lengths = np.bincount(batch.tags.sequence)
    assert state["seq_tokens_sq"].sum() == (lengths**2).sum()
    assert state["pairs"].sum() == len(batch) * TOP_K
    assert not state["pairs"][:, :, EXPERTS - 1].any()
    assert all(np.isfinite(array).all() for array in state.values())


def same(one: Saliency | dict, other: Saliency | dict) -> bool:
    """Whether all arrays are, bit for bit."""
    a, b = (x.arrays if isinstance(x, Saliency) else x for x in (one, other))
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 999), st.randoms(use_true_random=False))
def test_order_and_grouping_of_sequences_change_no_bit(seed: int, random: object) -> None:
    batch, whole = random_batch(seed), accumulator()
    feed(whole, 1, batch)
    rows, sequences = list(range(len(batch))), list(range(9))
    random.shuffle(rows)  # type: ignore[attr-defined]
    random.shuffle(sequences)  # type: ignore[attr-defined]
    shuffled, groups = accumulator(), accumulator()
    feed(shuffled, 1, batch.take(np.array(rows)))
    for begin in range(0, 9, 2):
        part = accumulator((1,))
        feed(part, 1, batch.of(sequences[begin : begin + 2]))
        groups.restore(part.state(), (1,))
    assert same(shuffled.state(), whole.state())
    assert same(groups.state(), whole.state())


def test_the_order_of_the_slots_changes_no_bit() -> None:
    """`select_experts` gives a token's experts in no order."""
    batch, rng = random_batch(3), np.random.default_rng(0)
    order = rng.permuted(np.tile(np.arange(TOP_K), (len(batch), 1)), axis=1)
    moved = Batch(
        batch.tags,
        np.take_along_axis(batch.experts, order, 1),
        np.take_along_axis(batch.gates, order, 1),
        np.take_along_axis(batch.outputs, order[..., None], 1),
    )
    one, other = accumulator(), accumulator()
    feed(one, 4, batch)
    feed(other, 4, moved)
    assert same(one.state(), other.state())


def test_a_journal_gives_the_state_back() -> None:
    batch = random_batch(1)
    one, other = accumulator(), accumulator()
    for layer in LAYERS:
        feed(one, layer, batch)
    other.restore(one.state())
    assert same(one.state(), other.state())
    other.state()["pairs"][:] = 0
    assert same(one.state(), other.state())


def test_what_leaving_one_out_means_at_the_edges() -> None:
    """c, d and ‖y‖² of: nothing, the only expert, an orthogonal one, a tiny one, the opposite."""
    c = np.array([[0.0], [2.0], [1.0], [1e-6], [3.0]])
    dots = np.array([[0.0], [4.0], [1.0], [0.0], [-3.0]])
    y_squares = np.array([0.0, 4.0, 2.0, 1.0, 1.0])
    delta = distortion(c, dots, y_squares)[:, 0]
    assert delta[:2].tolist() == [0.0, 2.0]
    assert delta[2] == pytest.approx(2 - 2**0.5, rel=1e-14)
    assert delta[3] == pytest.approx(1e-12, rel=1e-9)
    assert delta[4] == pytest.approx(0, abs=1e-14)  # y′ = 4, the same direction
    assert distortion(np.array([[3.0]]), np.array([[3.0]]), np.array([1.0]))[0, 0] == 4.0


@given(st.lists(st.floats(1e-20, 1e20), min_size=1, max_size=20))
def test_rounding_is_that_of_float32_and_of_a_grid(values: list[float]) -> None:
    array = np.array(values)
    assert np.abs(short(array) / array - 1).max() < 2**-23
    gates = array / array.sum()
    assert np.abs(fixed(gates) - gates).max() <= 2**-37


def test_observing_many_tokens_is_observing_each() -> None:
    batch = random_batch(2, n_sequences=15, length=40)
    assert len(batch) > 128
    whole = observe(batch.experts, batch.gates, batch.outputs)
    for t in (0, 63, 64, 129):
        one = observe(*(x[t : t + 1] for x in (batch.experts, batch.gates, batch.outputs)))
        for a, b in zip(whole, one, strict=True):
            assert np.array_equal(a[t : t + 1], b)
    y = (batch.gates[..., None] * batch.outputs).sum(1)
    assert whole[2] == pytest.approx((y**2).sum(1), rel=1e-12)
    assert whole[1].sum(1) == pytest.approx(whole[2], rel=1e-12)


def test_a_sequence_comes_once_and_whole() -> None:
    batch, acc = random_batch(0), accumulator()
    feed(acc, 1, batch.of([0, 1]))
    feed(acc, 2, batch.of([1]))
    with pytest.raises(KimiError, match="layer 1: sequence 1 came in two parts"):
        feed(acc, 1, batch.of([1, 2]))
    folds = replace(batch.tags, fold=np.arange(len(batch)) % 2)
    with pytest.raises(KimiError, match="has tokens of one source in two folds"):
        feed(accumulator(), 1, replace(batch, tags=folds))
    with pytest.raises(KimiError, match=r"experts for \d+ tokens, expected 3 each"):
        feed(
            accumulator(),
            1,
            replace(
                batch,
                experts=batch.experts[:, :2],
                gates=batch.gates[:, :2],
                outputs=batch.outputs[:, :2],
            ),
        )


def test_numbers_that_are_none_are_refused() -> None:
    batch, acc = random_batch(0), accumulator()
    batch.outputs[3, 1, 0] = np.nan
    with pytest.raises(KimiError, match="layer 2: an expert's output is not a finite number"):
        feed(acc, 2, batch)
    assert not acc.state()["pairs"].any()


def test_a_run_that_missed_a_layer_is_not_finished() -> None:
    acc = accumulator()
    feed(acc, 1, random_batch(0))
    with pytest.raises(KimiError, match=r"layer 2 saw 0 tokens, layer 1 \d+"):
        acc.finish("model-a", {})


def test_merging_runs_is_running_both() -> None:
    one, other = random_store(1), random_store(2, first=9)
    both = accumulator()
    both.restore(one.arrays)
    both.restore(other.arrays)
    merged = merge(one, other)
    assert same(merged, both.state())
    assert same(merge(other, one), merged)
    assert merged.runs == ({"corpus": "seed 1"}, {"corpus": "seed 2"})


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 999), st.integers(1, 8))
def test_merging_two_parts_of_a_corpus_is_running_it_whole(seed: int, cut: int) -> None:
    batch = random_batch(seed)
    stores = []
    for sequences in (range(9), range(cut), range(cut, 9)):
        acc = accumulator()
        for layer in LAYERS:
            feed(acc, layer, batch.of(list(sequences)))
        stores.append(acc.finish("model-a", {"sequences": list(sequences)}))
    assert same(merge(stores[1], stores[2]), stores[0])


def test_merging_unites_the_sources() -> None:
    one, other = random_store(1), replace(random_store(2), sources=("zh", "ja", "code"))
    merged = merge(one, other)
    assert merged.sources == ("code", "zh", "en", "ja")
    for name, parts in {"code": (0, 2), "zh": (1, 0), "en": (2, None), "ja": (None, 1)}.items():
        for array in ("weighted", "fold_loo"):
            stores = zip((one, other), parts, strict=True)
            expected = sum(s.arrays[array][..., i, :, :] for s, i in stores if i is not None)
            found = merged.arrays[array][..., merged.sources.index(name), :, :]
            assert np.array_equal(found, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "model-b"}, "differ in model: model-a and model-b"),
        ({"top_k": 4}, "differ in top_k: 3 and 4"),
        ({"layers": (1, 2, 3)}, "differ in layers"),
        ({"runs": ({"corpus": "seed 1"},)}, "hold the same run"),
    ],
)
def test_what_can_not_be_merged(change: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        merge(random_store(1), replace(random_store(2), **change))


def test_the_store_survives_its_file(tmp_path: Path) -> None:
    store = random_store(5)
    path = tmp_path / "stats.safetensors"
    store.save(path)
    loaded = load_saliency(path)
    assert same(loaded, store)
    assert loaded.provenance() == store.provenance()
    from safetensors.numpy import load_file

    assert same(load_file(path), store.arrays)
    again = merge(loaded, random_store(6))
    assert again.arrays["pairs"].sum() > store.arrays["pairs"].sum()


def rewritten(path: Path, old: str, new: str) -> None:
    path.write_bytes(path.read_bytes().replace(old.encode(), new.encode()))


def test_a_file_that_is_no_store(tmp_path: Path) -> None:
    path = tmp_path / "stats.safetensors"
    with pytest.raises(UsageError, match=r"statistics .* don't exist"):
        load_saliency(path)
    random_store().save(path)
    whole = path.read_bytes()
    rewritten(path, '\\"version\\": 1', '\\"version\\": 2')
    with pytest.raises(UsageError, match="has version 2, expected 1"):
        load_saliency(path)
    path.write_bytes(whole)
    rewritten(path, '"seq_loo_sq"', '"seq_loo_xx"')
    with pytest.raises(CheckpointError, match="seq_loo_sq is missing"):
        load_saliency(path)
    path.write_bytes(whole)
    rewritten(path, '\\"n_experts\\": 12', '\\"n_experts\\": 13')
    with pytest.raises(CheckpointError, match=r"has shape \[3, 3, 12\], expected \[3, 3, 13\]"):
        load_saliency(path)
    path.write_bytes(whole[:-8])
    with pytest.raises(CheckpointError, match=r"truncated|expected"):
        load_saliency(path)
    path.write_bytes(whole)
    rewritten(path, "kimi_k3_mlx.saliency", "kimi_k3_mlx.somethin")
    with pytest.raises(CheckpointError, match="is not a saliency store"):
        load_saliency(path)
    assert json.dumps(random_store().provenance())
