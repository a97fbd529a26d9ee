"""Peak memory is the budget, not the corpus."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from benchmarks import stream as benchmark
from kimi_k3_mlx.stream.budget import make_batches, make_groups
from kimi_k3_mlx.stream.engine import Lane, run_stream
from kimi_k3_mlx.stream.layers import Layers, open_layers
from kimi_k3_mlx.tensors.local import open_source
from tests.stream.conftest import CHOOSE, PLAN, with_blocks
from tests.tiny_k3 import TinyConfig, write_source

MICRO = 64
SHAPES = {
    "tiny": TinyConfig(vision=False, tokenizer=False),
    "float32": TinyConfig(vision=False, tokenizer=False, trunk_dtype="F32"),
    "vocabulary": TinyConfig(layers=2, vision=False, tokenizer=False, vocab=4096),
    "hidden": TinyConfig(layers=4, vision=False, tokenizer=False, hidden=1024, block_size=1),
    "dense": TinyConfig(layers=2, vision=False, tokenizer=False, intermediate=2048),
    "latent": TinyConfig(layers=2, vision=False, latent=256, moe_intermediate=256, top_k=4),
    "heads": TinyConfig(layers=4, vision=False, heads=8, mla_heads=16),
}


def peak(
    layers: Layers,
    n_sequences: int,
    n_tokens: int,
    lanes: list[Lane],
    n_block: int = 0,
    n_held: int = 3,
) -> tuple[int, int, int]:
    """The most that MLX held, the budget, and the number of groups."""
    choose = with_blocks(n_block)
    rng = np.random.default_rng(0)
    vocabulary = layers.args.vocab_size
    sequences = [rng.integers(0, vocabulary, n_tokens, np.int32) for _ in range(n_sequences)]
    batches = make_batches(sequences, MICRO)
    budget = choose(layers, batches, len(lanes))
    memory = budget.fixed + budget.per_token * n_held * max(MICRO, n_tokens)
    layers.release()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    counter = benchmark.Counter(layers.args)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CHOOSE, choose)
        run_stream(layers, sequences, lanes, counter, memory=memory, micro_tokens=MICRO)
    n_groups = len(make_groups(batches, budget, memory, spill=False))
    return mx.get_peak_memory() - before, memory, n_groups


@pytest.mark.parametrize("shape", SHAPES)
def test_the_budget_holds_whatever_is_wide(shape: str, tmp_path: Path) -> None:
    """With whole layers, and with two of the experts at a time."""
    layers = open_layers(open_source(write_source(tmp_path / "source", SHAPES[shape])))
    for n_block in (0, 2):
        found, memory, n_groups = peak(layers, 12, 48, [Lane("parent")], n_block)
        assert n_groups > 1
        assert found <= memory, n_block


@pytest.mark.parametrize("n_tokens", [1, 700])
def test_the_budget_holds_for_long_and_short(n_tokens: int, build: Path) -> None:
    found, memory, _ = peak(open_layers(open_source(build)), 4, n_tokens, [Lane("parent")])
    assert found <= memory


def test_eight_times_the_tokens_take_no_more_memory(tmp_path: Path) -> None:
    layers = open_layers(open_source(write_source(tmp_path / "source", SHAPES["hidden"])))
    lanes = [Lane("parent"), Lane("again")]
    once, memory, n_groups = peak(layers, 6, 64, lanes)
    more, same_memory, more_groups = peak(layers, 48, 64, lanes)
    assert memory == same_memory
    assert (n_groups, more_groups) == (2, 16)
    assert more <= 1.1 * once


def test_at_most_two_layers_are_loaded(build: Path) -> None:
    """Weights alone: one token, so that activations don't count."""
    layers = open_layers(open_source(build))
    found, _, _ = peak(layers, 1, 1, [Lane("pruned", PLAN)])
    assert found < 2.5 * layers.largest + 2 * layers.n_bytes_ends


def test_blocks_need_little_more_than_what_waits_for_them(tmp_path: Path) -> None:
    """Experts are nearly all of these layers, and one token doesn't weigh."""
    shape = TinyConfig(layers=4, experts=512, vision=False, tokenizer=False)
    layers = open_layers(open_source(write_source(tmp_path / "source", shape)))
    whole, _, _ = peak(layers, 1, 1, [Lane("parent")])
    assert 2 * layers.largest < whole < 2.5 * layers.largest
    found, memory, _ = peak(layers, 1, 1, [Lane("parent")], 8)
    assert found <= memory < layers.largest
    quarter, _, _ = peak(layers, 1, 1, [Lane("parent")], 128)
    assert found < quarter < 0.7 * layers.largest  # two blocks are half of it, three are more


def test_what_waits_for_the_experts_is_in_the_budget(tmp_path: Path) -> None:
    """So many tokens that nothing else weighs: the budget may be neither too small nor a guess."""
    layers = open_layers(open_source(write_source(tmp_path / "source", SHAPES["latent"])))
    found, memory, n_groups = peak(layers, 48, 64, [Lane("a"), Lane("b")], 2, n_held=24)
    assert n_groups == 2
    assert 0.7 * memory < found <= memory
