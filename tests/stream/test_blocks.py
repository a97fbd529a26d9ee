"""Experts that are read in blocks change no bit, and need less memory than two layers."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_k3_mlx.errors import CheckpointError, DoesNotFitError
from kimi_k3_mlx.prune_plan import LayerPlan, PrunePlan
from kimi_k3_mlx.schema import BuildTensor, Quantization, Span
from kimi_k3_mlx.stream.blocks import block_pieces, expert_bytes, rows_of, stream_in_blocks
from kimi_k3_mlx.stream.budget import choose_budget, in_blocks, make_batches, make_budget
from kimi_k3_mlx.stream.layers import Layers, open_layers
from kimi_k3_mlx.tensors.local import LocalReader, open_source
from tests.stream.conftest import CHOOSE, PLAN, convert, with_blocks
from tests.stream.recorder import Recorder
from tests.stream.test_engine import BOTH, MICRO, PARENT, record, same
from tests.tiny_k3 import TinyConfig, write_source

EXPERTS = 8
LOW = PrunePlan(EXPERTS, {
    layer: LayerPlan(tuple(range(7)), (4, 5, 6)) for layer in (1, 2, 3, 4)
}, low=Quantization("affine", 3, 32))  # fmt: skip


def recorded(
    path: Path, sequences, lanes, monkeypatch: pytest.MonkeyPatch, n_block: int, **options
) -> Recorder:
    """A run in blocks of this size, whatever would be best, and groups of `n_tokens`."""
    layers, choose = open_layers(open_source(path)), with_blocks(n_block)
    budget = choose(layers, make_batches(sequences, MICRO), len(lanes))
    memory = budget.fixed + budget.per_token * options.pop("n_tokens", MICRO)
    with monkeypatch.context() as patch:
        patch.setattr(CHOOSE, choose)
        return record(path, sequences, lanes, memory, **options)


@pytest.mark.parametrize("n_block", [1, 3, EXPERTS])
@pytest.mark.parametrize("kind", ["source", "build"])
def test_blocks_change_no_bit(
    kind: str, n_block: int, tiny_text_source: Path, build: Path, sequences, monkeypatch
) -> None:
    """8 experts in blocks of 3: the last one is smaller."""
    path = tiny_text_source if kind == "source" else build
    expected = record(path, sequences, BOTH)
    same(recorded(path, sequences, BOTH, monkeypatch, n_block, n_tokens=128), expected)


@pytest.mark.parametrize(("profile", "plan"), [("q3-q8", None), ("mxfp4", PLAN), ("mxfp4", LOW)])
def test_blocks_of_other_builds(
    profile: str, plan: PrunePlan | None, tiny_text_source: Path, sequences, tmp_path, monkeypatch
) -> None:
    """Other bits, a number of experts of each layer's own, and a second bank of them."""
    path = convert(tiny_text_source, tmp_path / "out", profile, plan)
    found = recorded(path, sequences, [PARENT], monkeypatch, 2)
    same(found, record(path, sequences))


def test_float32_in_blocks(float_build: Path, sequences, monkeypatch) -> None:
    found = recorded(float_build, sequences, BOTH, monkeypatch, 3)
    same(found, record(float_build, sequences, BOTH))


def test_spilled_in_blocks(build: Path, sequences, tmp_path: Path, monkeypatch) -> None:
    """One group, several rounds of micro-batches that wait together."""
    reads = counted_reads(monkeypatch)
    options = {"folder": tmp_path / "run", "spill": True}
    found = recorded(build, sequences, BOTH, monkeypatch, 3, **options)
    n_read = sum(reads)
    same(found, record(build, sequences, BOTH))
    layers = open_layers(open_source(build))
    experts = sum(EXPERTS * expert_bytes(layers, number) for number in layers.tensors)
    n_rounds = (n_read - experts_apart(layers)) / experts
    assert n_rounds == int(n_rounds) > 1


def counted_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every block that is read from now on."""
    reads: list[int] = []

    class Counted(LocalReader):
        def blocks(self, spans):
            for block in super().blocks(spans):
                reads.append(len(block))
                yield block

    monkeypatch.setattr("kimi_k3_mlx.tensors.local.LocalReader", Counted)
    return reads


def experts_apart(layers: Layers) -> int:
    """Bytes of everything that isn't a routed expert, the ends included."""
    ends = sum(
        info.n_bytes for info in layers.checkpoint.tensors.values() if ".layers." not in info.name
    )
    experts = sum(EXPERTS * expert_bytes(layers, number) for number in layers.tensors)
    return ends + sum(map(layers.n_bytes, layers.tensors)) - experts


def test_every_block_is_read_once_for_a_group(build: Path, sequences, monkeypatch) -> None:
    reads = counted_reads(monkeypatch)
    recorded(build, sequences, BOTH, monkeypatch, 3, n_tokens=1000)
    layers = open_layers(open_source(build))
    ends = experts_apart(layers)
    assert sum(reads) == ends + sum(EXPERTS * expert_bytes(layers, n) for n in layers.tensors)


@pytest.fixture(scope="module")
def large_layers(tmp_path_factory: pytest.TempPathFactory) -> Layers:
    """Experts are most of it, as in K3: a layer's are 16 GB of 17."""
    sizes = TinyConfig(layers=2, experts=128, vision=False, tokenizer=False)
    return open_layers(open_source(write_source(tmp_path_factory.mktemp("large") / "s", sizes)))


def test_blocks_are_chosen_when_two_layers_dont_fit(large_layers: Layers, sequences) -> None:
    batches = make_batches(sequences, MICRO)
    whole = make_budget(large_layers, batches, 2)
    least = in_blocks(whole, large_layers, 2, 1).least(batches)
    assert least < 0.7 * whole.least(batches)
    assert choose_budget(large_layers, batches, 2, least, True).n_block == 1
    for memory in np.linspace(least, whole.least(batches) - 1, 20, dtype=int):
        budget = choose_budget(large_layers, batches, 2, memory, True)
        assert budget.n_block
        assert budget.least(batches) <= memory
    assert budget.n_block > 4
    assert choose_budget(large_layers, batches, 2, whole.least(batches), True) == whole


def test_blocks_are_chosen_when_they_make_much_larger_groups(large_layers: Layers) -> None:
    """A layer is read once for each group."""
    batches = make_batches([np.zeros(32, np.int32)] * 1000, MICRO)
    whole = make_budget(large_layers, batches, 1)
    scarce, plenty = whole.least(batches), whole.fixed + whole.per_token * 40_000
    blocks = choose_budget(large_layers, batches, 1, scarce, False)
    assert blocks.n_block
    assert blocks.tokens(scarce) > 2 * whole.tokens(scarce)
    assert choose_budget(large_layers, batches[:1], 1, scarce, False) == whole
    assert choose_budget(large_layers, batches, 1, plenty, False) == whole


def test_what_not_even_one_expert_fits_into_is_refused(large_layers: Layers, sequences) -> None:
    path, sequences = large_layers.checkpoint.path, sequences[:2]
    with pytest.raises(DoesNotFitError, match="one expert at a time") as caught:
        record(path, sequences, memory=1000)
    least = int(caught.value.hint.split()[2].replace(",", ""))
    same(record(path, sequences, memory=least), record(path, sequences))
    with pytest.raises(DoesNotFitError):
        record(path, sequences, memory=least - 1)


def test_a_bank_of_another_size_is_named(build: Path) -> None:
    layers = open_layers(open_source(build))
    layers.tensors[2] = [
        replace(tensor, shape=(7, *tensor.shape[1:])) if "up_proj.scales" in tensor.name else tensor
        for tensor in layers.tensors[2]
    ]
    with pytest.raises(CheckpointError, match=r"layers\.2\.mlp.*up_proj\.scales holds 7 experts"):
        list(stream_in_blocks(layers, range(5), 3, 1))


@settings(max_examples=50)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_rows_of_a_tensor_are_its_bytes(rows: list[int], data) -> None:
    """Against bytes that are joined and then cut."""
    total, width = sum(rows), 4
    spans, stored = [], {}
    for number, n in enumerate(rows):
        stored[str(number)] = bytes(np.random.default_rng(number).integers(0, 256, 7 + n * width))
        spans.append(Span(str(number), 7, 7 + n * width))
    tensor = BuildTensor("t", "U8", (total, width), "expert", tuple(spans))
    begin = data.draw(st.integers(0, total - 1))
    end = data.draw(st.integers(begin + 1, total))
    part = rows_of(tensor, begin, end)
    joined = b"".join(stored[span.tensor][span.begin : span.end] for span in spans)
    found = b"".join(stored[span.tensor][span.begin : span.end] for span in part.spans)
    assert found == joined[begin * width : end * width]
    assert math.prod(part.shape) == len(found)


def test_pieces_hold_every_expert_once(build: Path) -> None:
    layers = open_layers(open_source(build))
    assert block_pieces(layers, 0, 3) == []
    pieces = block_pieces(layers, 1, 3)
    assert [(piece.first, piece.size) for piece in pieces] == [(0, 3), (3, 3), (6, 2)]
    sizes = [sum(tensor.n_bytes for tensor in piece.tensors) for piece in pieces]
    assert sum(sizes) == EXPERTS * expert_bytes(layers, 1)


def test_memory_that_is_written_to_later_is_what_a_graph_computes_with() -> None:
    """What `BlockPass` relies on."""
    held = mx.zeros((2, 3), mx.uint16)
    mx.eval(held)
    later = held.view(mx.bfloat16).astype(mx.float32) * 2
    np.array(held, copy=False)[1] = np.array(mx.array([1.0, 2, 3], mx.bfloat16).view(mx.uint16))
    assert later.tolist() == [[0, 0, 0], [2, 4, 6]]
