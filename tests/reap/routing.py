"""Random routing to accumulate: whole sequences of tagged tokens, with real expert outputs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kimi_k3_mlx.reap.accumulate import Accumulator, Tags
from kimi_k3_mlx.reap.pairs import Array
from kimi_k3_mlx.reap.saliency import Saliency

SOURCES = ("code", "zh", "en")
LAYERS = (1, 2, 4)
EXPERTS, TOP_K, LATENT = 12, 3, 8
TOKENS_AT_ONCE = 64


@dataclass(frozen=True)
class Batch:
    """Tokens of some sequences in one layer."""

    tags: Tags
    experts: np.ndarray
    gates: np.ndarray
    outputs: np.ndarray

    def __len__(self) -> int:
        return len(self.experts)

    def take(self, rows: np.ndarray) -> Batch:
        """Some of the tokens, in another order."""
        tags = Tags(self.tags.source[rows], self.tags.sequence[rows], self.tags.fold[rows])
        return Batch(tags, self.experts[rows], self.gates[rows], self.outputs[rows])

    def of(self, sequences: list[int]) -> Batch:
        """The tokens of some sequences."""
        return self.take(np.flatnonzero(np.isin(self.tags.sequence, sequences)))


def random_batch(
    seed: int, n_sequences: int = 9, length: int = 20, first: int = 0, layer: int = 0
) -> Batch:
    """Sequences of one source each, the same in every layer, whose experts depend on both."""
    lengths = np.random.default_rng(seed).integers(1, length + 1, n_sequences)
    rng = np.random.default_rng((seed, layer))
    sequence = np.repeat(np.arange(n_sequences), lengths)
    source = sequence % len(SOURCES)
    taste = (
        rng.normal(size=(n_sequences, EXPERTS))
        + rng.normal(size=(3, EXPERTS))[np.arange(n_sequences) % 3]
    )
    scores = taste[sequence] + rng.normal(size=(len(sequence), EXPERTS))
    scores[:, EXPERTS - 1] = -99  # never routed
    experts = np.argsort(-scores, axis=1)[:, :TOP_K]
    gates = rng.uniform(0.05, 1, experts.shape)
    gates /= gates.sum(axis=1, keepdims=True)
    outputs = rng.lognormal(size=(*experts.shape, 1)) * rng.normal(size=(*experts.shape, LATENT))
    tags = Tags(source, sequence + first, sequence // len(SOURCES) % 2)
    return Batch(tags, experts, gates, outputs)


def accumulator(layers: tuple[int, ...] = LAYERS) -> Accumulator:
    """An empty one."""
    return Accumulator(SOURCES, layers, EXPERTS, TOP_K)


def feed(acc: Accumulator, layer: int, batch: Batch) -> None:
    """Add a batch."""
    seen = observe(batch.experts, batch.gates, batch.outputs)
    acc.add(layer, batch.tags, batch.experts, batch.gates, *seen)


def random_store(seed: int = 0, n_sequences: int = 9, length: int = 20, first: int = 0) -> Saliency:
    """A finished run over every layer."""
    acc = accumulator()
    for layer in LAYERS:
        feed(acc, layer, random_batch(seed, n_sequences, length, first, layer))
    return acc.finish("model-a", {"corpus": f"seed {seed}"})


def observe(
    experts: NDArray[np.integer], router_weights: Array, expert_output: Array
) -> tuple[Array, Array, Array]:
    """N, d [T, k] and ‖y‖² [T] from taps: experts, weights [T, k], outputs [T, k, latent].

    The naive twin of `reap.calibrate.measure`, in float64. Slots are added by ascending expert, so
    that the order in which they were selected is no matter.
    """
    norms, dots = np.zeros(experts.shape), np.zeros(experts.shape)
    y_squares = np.zeros(len(experts))
    for begin in range(0, len(experts), TOKENS_AT_ONCE):
        part = slice(begin, begin + TOKENS_AT_ONCE)
        order = np.argsort(experts[part], axis=1, kind="stable")
        gates = np.take_along_axis(np.asarray(router_weights[part], np.float64), order, 1)
        outputs = np.asarray(expert_output[part], np.float64)
        outputs = np.take_along_axis(outputs, order[..., None], 1)
        y = np.einsum("tk,tkd->td", gates, outputs)
        squares = np.einsum("tkd,tkd->tk", outputs, outputs)
        np.put_along_axis(norms[part], order, np.sqrt(squares), 1)
        np.put_along_axis(dots[part], order, gates * np.einsum("tkd,td->tk", outputs, y), 1)
        y_squares[part] = np.einsum("td,td->t", y, y)
    return norms, dots, y_squares
