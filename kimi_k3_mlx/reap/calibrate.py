"""Measures a checkpoint on a corpus: one layer in memory at a time, statistics in float64.

Input: an opened checkpoint, a corpus, bytes of memory. Output: a `Saliency` store. With a folder, a
run that was killed continues; any memory, and so any grouping, gives the same bits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from kimi_k3_mlx.errors import UsageError
from kimi_k3_mlx.reap.accumulate import Accumulator, Tags
from kimi_k3_mlx.reap.corpus import Corpus
from kimi_k3_mlx.reap.pairs import Array
from kimi_k3_mlx.reap.saliency import MAXIMA, Saliency, State
from kimi_k3_mlx.reap.sight import embedder_of
from kimi_k3_mlx.schema import Progress, silent
from kimi_k3_mlx.stream.budget import Batch
from kimi_k3_mlx.stream.engine import Lane, run_stream
from kimi_k3_mlx.stream.layers import Layers, open_layers
from kimi_k3_mlx.tensors.source import Source

PARENT = Lane("parent")


def calibrate(
    checkpoint: Source,
    corpus: Corpus,
    *,
    memory: int,
    folder: Path | None = None,
    spill: bool = False,
    progress: Progress = silent,
) -> Saliency:
    """Route the corpus through the whole model and add up what its experts did.

    Raises as `open_layers`, `embedder_of` and `run_stream` do, and UsageError without a token.
    """
    if not corpus.n_tokens:
        raise UsageError("the corpus has no tokens: there is nothing to measure.")
    layers = open_layers(checkpoint)
    embedder = embedder_of(checkpoint, corpus)
    observer = SaliencyObserver(layers, corpus)
    run_stream(
        layers,
        [sequence.tokens for sequence in corpus.sequences],
        [PARENT],
        observer,
        memory=memory,
        folder=folder,
        fingerprint=corpus.sha256,
        spill=spill,
        logits=False,
        embedder=embedder,
        progress=progress,
    )
    run = {"corpus": corpus.to_json(), "corpus_sha256": corpus.sha256}
    return observer.total.finish(checkpoint.id.headers_sha256, run)


class SaliencyObserver:
    """Adds up the statistics of one layer of one group; the stream's journal adds those up."""

    def __init__(self, layers: Layers, corpus: Corpus) -> None:
        args = layers.args
        moe_layers = tuple(layer for layer in range(layers.n_layers) if args.is_moe(layer))
        sizes = (args.num_experts, args.num_experts_per_token, corpus.options.folds)
        self._sizes = (corpus.sources, *sizes)
        self._corpus = corpus
        self._under_way: dict[int, Accumulator] = {}
        self.total = Accumulator(corpus.sources, moe_layers, *sizes)

    def moe(
        self,
        layer: int,
        lane: int,
        batch: Batch,
        experts: mx.array,
        router_weights: mx.array,
        expert_output: mx.array,
    ) -> None:
        """Add one micro-batch."""
        if layer not in self._under_way:
            sources, *sizes = self._sizes
            self._under_way[layer] = Accumulator(sources, (layer,), *sizes)
        gates = batch.real(router_weights).astype(mx.float32)
        norms, dots, squares = measure(gates, batch.real(expert_output))
        self._under_way[layer].add(
            layer,
            self._tags(batch),
            np.array(batch.real(experts)).astype(np.int64),
            np.array(gates).astype(np.float64),
            norms,
            dots,
            squares,
        )

    def logits(self, lane: int, batch: Batch, logits: mx.array) -> None:
        """Calibration asks nothing of them."""

    def state(self) -> dict[str, NDArray[Any]]:
        """The sums of the layer that was just run."""
        state = {
            f"{'max_' if name in MAXIMA else ''}{layer}.{name}": array
            for layer, accumulator in self._under_way.items()
            for name, array in accumulator.state().items()
        }
        self._under_way.clear()
        return state

    def restore(self, arrays: dict[str, NDArray[Any]]) -> None:
        """Take the sums over all groups and layers."""
        by_layer: dict[int, State] = {}
        for key, array in arrays.items():
            number, _, name = key.removeprefix("max_").partition(".")
            by_layer.setdefault(int(number), {})[name] = array
        for layer, state in by_layer.items():
            self.total.restore(state, (layer,))

    def _tags(self, batch: Batch) -> Tags:
        sequences = [self._corpus.sequences[index] for index in batch.indices]
        columns = (
            [sequence.source for sequence in sequences],
            list(batch.indices),
            [sequence.fold for sequence in sequences],
        )
        return Tags(*(np.repeat(np.array(column, np.int64), batch.lengths) for column in columns))


def measure(gates: mx.array, outputs: mx.array) -> tuple[Array, Array, Array]:
    """N, d [T, k] and ‖y‖² [T] of `reap.pairs`, in float32 where the model computes.

    gates [T, k], outputs [T, k, latent].
    """
    outputs = outputs.astype(mx.float32)
    y = (gates[..., None] * outputs).sum(1)
    norms = mx.sqrt(outputs.square().sum(-1))
    dots = gates * (outputs * y[:, None]).sum(-1)
    squares = y.square().sum(-1)
    mx.eval(norms, dots, squares)
    parts = (np.array(array).astype(np.float64) for array in (norms, dots, squares))
    return next(parts), next(parts), next(parts)
