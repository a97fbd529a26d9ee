"""Pushes sequences through a model layer by layer, and shows an observer what it computes.

Input: `Layers`, token ids, lanes (variants of the model), an observer, bytes of memory. Groups of
micro-batches are outside, layers inside, micro-batches and lanes innermost: a layer is read once
for each group, its experts in blocks if two layers are more than the memory. With a folder, a run
that was killed continues and ends with identical arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice, product
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

import kimi_k3
from converters.dense import NEVER_CHOSEN
from kimi_k3_mlx import __version__
from kimi_k3_mlx.errors import UsageError
from kimi_k3_mlx.prune_plan import PrunePlan, check_plan
from kimi_k3_mlx.schema import Json, Progress, silent
from kimi_k3_mlx.stream.activations import Activations, Held, Spilled, State
from kimi_k3_mlx.stream.blocks import Blocks, stream_in_blocks
from kimi_k3_mlx.stream.budget import (
    MICRO_TOKENS,
    Batch,
    Budget,
    Group,
    check_ids,
    choose_budget,
    make_batches,
    make_groups,
    packed,
    sequences_sha256,
)
from kimi_k3_mlx.stream.journal import Arrays, FolderTotals, Totals, locked
from kimi_k3_mlx.stream.layers import Layers
from kimi_k3_mlx.stream.passes import OBSERVED, BlockPass, Pass, fill

SPILL = "kimi_k3_mlx.spill"
Place = tuple[int, int]
"""A micro-batch of the group, and a lane."""


@dataclass(frozen=True)
class Lane:
    """A variant of the model that goes through together with the others."""

    name: str
    plan: PrunePlan | None = None
    """What of it stays; None: the parent. How a plan stores its low bank is not simulated."""


class Embedder:
    """Gives what goes into the first layer: here, the embeddings of the tokens."""

    n_bytes = 0
    """What it holds at once beside the embedding and what it gives."""

    def __call__(self, layers: Layers, group: Group) -> Iterator[mx.array]:
        """[B, T, hidden] of each micro-batch."""
        for batch in group:
            yield layers.embed(mx.array(batch.ids))


class Observer(Protocol):
    """Sees every MoE layer and the logits, and adds up what it wants of them.

    Of one micro-batch, the lanes follow each other. Padding is there too: `Batch.real` drops it.
    """

    def moe(
        self,
        layer: int,
        lane: int,
        batch: Batch,
        experts: mx.array,
        router_weights: mx.array,
        expert_output: mx.array,
    ) -> None:
        """One MoE layer: chosen experts and their weights [B, T, k], and what they gave before it
        was weighted [B, T, k, latent]."""

    def logits(self, lane: int, batch: Batch, logits: mx.array) -> None:
        """What comes out at the end [B, T, vocabulary]."""

    def state(self) -> Arrays:
        """What was added since the last call, by name; names that begin with `max_` are maxima.

        Called after each layer of each group, so it is best to give only what that layer changed.
        """

    def restore(self, arrays: Arrays) -> None:
        """Hold exactly these sums, instead of what was held: the run calls it at its end."""


def run_stream(
    layers: Layers,
    sequences: Sequence[NDArray[Any]],
    lanes: Sequence[Lane],
    observer: Observer,
    *,
    memory: int,
    folder: Path | None = None,
    fingerprint: str = "",
    spill: bool = False,
    logits: bool = True,
    embedder: Embedder | None = None,
    micro_tokens: int = MICRO_TOKENS,
    progress: Progress = silent,
) -> None:
    """Push all sequences through all lanes; at the end the observer has the sums over everything.

    `fingerprint` stands for what the caller did to get here: options, corpus, tokenizer. Without
    `logits`, the head is neither read nor computed. Raises DoesNotFitError, UsageError for wrong
    lanes, sequences, or a folder that holds another run.
    """
    check_lanes(layers, lanes)
    if spill and folder is None:
        raise UsageError("activations can be spilled only into a folder.", "give a folder.")
    batches = make_batches(sequences, micro_tokens)
    check_ids(sequences, layers.args.vocab_size)
    embedder = embedder or Embedder()
    budget = choose_budget(layers, batches, len(lanes), memory, spill)
    ends = layers.n_bytes_ends + embedder.n_bytes
    budget = replace(budget, layers=max(budget.layers, ends))
    groups = make_groups(batches, budget, memory, spill)
    with locked(folder):
        totals = Totals()
        if folder is not None:
            own = {"fingerprint": fingerprint, "sequences": sequences_sha256(sequences)}
            totals = FolderTotals(folder, own | identity(layers, lanes, groups))
        states = Spilled(folder / SPILL, layers.args.rms_norm_eps) if spill and folder else Held()
        stream = Stream(
            layers, tuple(lanes), observer, totals, states, progress, len(groups), budget, memory,
            logits, embedder,
        )  # fmt: skip
        for number, group in enumerate(groups):
            if number >= totals.n_finished():
                stream.run(number, group)
        states.close()
        observer.restore(totals.arrays)


def check_lanes(layers: Layers, lanes: Sequence[Lane]) -> None:
    """Raise UsageError unless there are lanes, named differently, with plans for this model."""
    args = layers.args
    if not lanes or len({lane.name for lane in lanes}) < len(lanes):
        raise UsageError(f"{len(lanes)} lanes need at least one name, and each its own.")
    moe_layers = [layer for layer in range(layers.n_layers) if args.is_moe(layer)]
    for lane in lanes:
        if lane.plan is None:
            continue
        if args.expert_counts is not None:
            raise UsageError(
                f"lane {lane.name}: plans are for models with one number of experts in all layers.",
                "stream the checkpoint that the plan was made for.",
            )
        check_plan(lane.plan, args.num_experts, moe_layers, args.num_experts_per_token)


def identity(layers: Layers, lanes: Sequence[Lane], groups: Sequence[Group]) -> Json:
    """What a folder's run must have in common with the one that continues it."""
    return {
        "kind": "kimi_k3_mlx.stream",
        "version": __version__,
        "checkpoint": asdict(layers.checkpoint.id),
        "lanes": [[lane.name, lane.plan and lane.plan.sha256] for lane in lanes],
        "groups": [[list(batch.ids.shape) for batch in group] for group in groups],
        "device": str(mx.default_device()),
    }


@dataclass
class Stream:
    """A run: what all groups share."""

    layers: Layers
    lanes: tuple[Lane, ...]
    observer: Observer
    totals: Totals
    states: Activations
    progress: Progress
    n_groups: int
    budget: Budget
    memory: int
    logits: bool
    embedder: Embedder

    def run(self, number: int, group: Group) -> None:
        """One group, from where it is in the journal to the end."""
        n_layers, n_observed = self.layers.n_layers, self.totals.n_observed(number)
        if n_observed <= n_layers:
            first = self.begin(number, group)
            rounds = self.rounds(group)
            for layer, module, blocks in self.read(range(first, n_layers), len(rounds)):
                self.layer(layer, module, blocks, rounds, group, observed=layer >= n_observed)
                del module  # before the one after the next is read
                mx.clear_cache()
                if layer >= n_observed:
                    self.totals.add(number, layer, self.observer.state())
                self.keep(number, layer + 1, group)
                self.note(number, layer)
            if self.logits:
                self.head(group)
            self.totals.add(number, n_layers, self.observer.state())
        self.totals.finish(number)
        self.states.clear()

    def begin(self, number: int, group: Group) -> int:
        """Put the states there that go into the first layer to be run; return its number."""
        self.states.clear()
        eps = self.layers.args.rms_norm_eps
        if first := self.totals.resume(number, self.states, eps):
            return first
        for place, prefix in enumerate(self.embedder(self.layers, group)):
            mx.eval(prefix)
            for lane in range(len(self.lanes)):
                self.states.put(place, lane, State(prefix, kimi_k3.BlockStack(eps)))
        self.layers.release()
        return 0

    def read(self, numbers: Sequence[int], n_rounds: int) -> Iterator[tuple[int, Any, Blocks]]:
        """The layers, each with what gives a round the blocks of its experts, or with none."""
        if self.budget.n_block:
            return stream_in_blocks(self.layers, numbers, self.budget.n_block, n_rounds)
        # A loop here would hold on to a layer while the one after the next is read.
        return map(_without_blocks, self.layers.stream(numbers))

    def rounds(self, group: Group) -> list[list[Place]]:
        """The micro-batches and lanes that are on their way through a layer at the same time."""
        lanes = range(len(self.lanes))
        if not self.budget.n_block:
            return [[(place, lane)] for place in range(len(group)) for lane in lanes]
        places = iter(range(len(group)))
        parts = packed(group, self.budget, self.memory - self.budget.fixed)
        return [list(product(islice(places, len(part)), lanes)) for part in parts]

    def layer(
        self,
        layer: int,
        module: Any,
        blocks: Blocks,
        rounds: list[list[Place]],
        group: Group,
        observed: bool,
    ) -> None:
        """Push every micro-batch and lane through a layer."""
        biases = self.biases(layer, module) if self.layers.args.is_moe(layer) else []
        begun = BlockPass if self.budget.n_block and biases else Pass
        for places in rounds:
            passes = []
            for place, lane in places:
                if biases:
                    module.mlp.e_score_correction_bias = biases[lane]
                passes.append(begun(module, self.states.get(place, lane), observed))
            fill(passes, blocks())
            for place, lane in places:
                taps = self.finish(passes.pop(0), place, lane)
                if taps:
                    self.observer.moe(layer, lane, group[place], *map(taps.pop, OBSERVED))

    def finish(self, one: Pass, place: int, lane: int) -> dict[str, mx.array]:
        """Keep the state after a layer; return what was tapped."""
        self.states.put(place, lane, one.finish())
        return one.taps

    def biases(self, layer: int, module: Any) -> list[mx.array]:
        """Every lane's bias on the router's choice: a dropped expert is never chosen."""
        own = module.mlp.e_score_correction_bias
        biases = []
        for lane in self.lanes:
            bias = own
            if lane.plan is not None:
                kept = np.zeros(own.shape, np.bool_)
                kept[list(lane.plan.layers[layer].keep)] = True
                bias = mx.where(mx.array(kept), own, mx.array(NEVER_CHOSEN, own.dtype))
            biases.append(bias)
        mx.eval(biases)
        return biases

    def head(self, group: Group) -> None:
        """Show the logits of every micro-batch and lane."""
        for place, batch in enumerate(group):
            for lane in range(len(self.lanes)):
                logits = self.layers.head(*self.states.get(place, lane))
                mx.eval(logits)
                self.observer.logits(lane, batch, logits)
        self.layers.release()
        mx.clear_cache()

    def keep(self, number: int, layer: int, group: Group) -> None:
        """Keep the states that go into a layer that starts a block."""
        every = self.layers.args.attn_res_block_size
        if layer % every == 0 and self.totals.n_observed(number) == layer < self.layers.n_layers:
            self.totals.keep(number, layer, self.states, len(group), len(self.lanes))

    def note(self, number: int, layer: int) -> None:
        """Tell the progress how many bytes of layers were read."""
        sizes = [self.layers.n_bytes(index) for index in range(self.layers.n_layers)]
        done = number * sum(sizes) + sum(sizes[: layer + 1])
        what = f"group {number + 1}/{self.n_groups}, layer {layer + 1}/{len(sizes)}"
        self.progress(done, self.n_groups * sum(sizes), what)


def _without_blocks(layer: tuple[int, Any]) -> tuple[int, Any, Blocks]:
    return *layer, tuple
