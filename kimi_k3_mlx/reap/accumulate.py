"""Adds up what the experts of each layer did with tagged tokens.

Input: norms, dots and gates of routed pairs (`reap.calibrate.measure`). Output: the sums that a
`reap.saliency.Saliency` keeps. Nothing here ranks experts or runs a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kimi_k3_mlx.errors import KimiError
from kimi_k3_mlx.reap.pairs import Array, co_selected, pair_values, short
from kimi_k3_mlx.reap.saliency import (
    CLUSTERS,
    FOLD_TOKENS,
    FOLDED,
    MAXIMA,
    SUMS,
    TOGETHER,
    TOKENS,
    Saliency,
    State,
    joined,
    layer_axis,
    state_shapes,
)
from kimi_k3_mlx.schema import Json


@dataclass(frozen=True)
class Tags:
    """What is known of each token [T]: numbers of its source, its sequence and its fold."""

    source: NDArray[np.int64]
    sequence: NDArray[np.int64]
    fold: NDArray[np.int64]


class Accumulator:
    """Adds up one run's statistics, layer by layer.

    Values are rounded to 24 bits first (those that have a natural scale to 2⁻³⁶). While an expert's
    values span less than 2²⁹ over their number, the sums are then exact: any order, grouping or
    split of the sequences gives the same bits.
    """

    def __init__(
        self,
        sources: tuple[str, ...],
        moe_layers: tuple[int, ...],
        n_experts: int,
        top_k: int,
        n_folds: int = 2,
    ) -> None:
        self.sources, self.layers = sources, moe_layers
        self.n_experts, self.top_k, self.n_folds = n_experts, top_k, n_folds
        shapes = state_shapes(len(sources), len(moe_layers), n_experts, n_folds)
        self._state: State = {name: np.zeros(shape) for name, shape in shapes.items()}
        self._state[TOGETHER] = np.zeros((len(moe_layers), n_experts, n_experts), np.uint32)
        self._seen: dict[int, set[int]] = {layer: set() for layer in moe_layers}

    def add(
        self,
        layer: int,
        tags: Tags,
        experts: NDArray[np.integer],
        gates: Array,
        norms: Array,
        dots: Array,
        y_squares: Array,
    ) -> None:
        """Add whole sequences of a layer: experts, gates g, norms N, dots d [T, k], ‖y‖² [T]."""
        index = self.layers.index(layer)
        self._check(layer, tags, experts)
        if not (np.isfinite(norms).all() and np.isfinite(y_squares).all()):
            raise KimiError(f"layer {layer}: an expert's output is not a finite number.")
        clusters = _clusters(tags)
        values = pair_values(gates, norms, dots, y_squares)
        sums = {name: clusters.sums(experts, x, self.n_experts) for name, x in values.items()}
        state = self._state
        cell: Any = (clusters.source, index)
        fold_cell: Any = (clusters.fold, clusters.source, index)
        pair: Any = (np.asarray(tags.source)[:, None], index, experts)
        for name in SUMS:
            np.add.at(state[name], cell, sums[name])
        for name in FOLDED:
            np.add.at(state[f"fold_{name}"], fold_cell, sums[name])
        tokens = clusters.tokens[:, None]
        for name, (one, other) in CLUSTERS.items():
            product = sums[one] * (tokens if other == "tokens" else sums[other])
            np.add.at(state[name], cell, short(product))
        for name, amount in zip(TOKENS, (tokens, np.ones_like(tokens), tokens**2), strict=True):
            np.add.at(state[name], cell, amount[:, 0])
        np.add.at(state[FOLD_TOKENS], fold_cell, clusters.tokens)
        for name in MAXIMA:
            np.maximum.at(state[name], pair, values[name.removesuffix("_max")])
        state[TOGETHER][index] += co_selected(experts, self.n_experts).astype(np.uint32)

    def state(self) -> State:
        """A copy of all sums, for the journal: they add up, see `restore`."""
        return {name: array.copy() for name, array in self._state.items()}

    def restore(self, state: State, layers: tuple[int, ...] | None = None) -> None:
        """Add the state of an accumulator with these layers (all of this one's by default)."""
        where = [self.layers.index(layer) for layer in layers or self.layers]
        for name, array in self._state.items():
            axis = layer_axis(name)
            at = (slice(None),) * axis + (where,)
            array[at] = joined(name, array[at], state[name])

    def finish(self, model: str, run: Json) -> Saliency:
        """The store: of which model (a fingerprint), and of which run (corpus, options)."""
        tokens = self._state["tokens"]
        for layer, counts in zip(self.layers, tokens.T, strict=True):
            if (counts != tokens[:, 0]).any():
                raise KimiError(
                    f"layer {layer} saw {counts.sum():,.0f} tokens, "
                    f"layer {self.layers[0]} {tokens[:, 0].sum():,.0f}: the run is not finished."
                )
        return Saliency(
            model, self.sources, self.layers, self.n_experts, self.top_k, self.state(), (run,)
        )

    def _check(self, layer: int, tags: Tags, experts: NDArray[np.integer]) -> None:
        if experts.shape != (len(tags.source), self.top_k):
            raise KimiError(
                f"layer {layer}: {list(experts.shape)} experts for {len(tags.source)} tokens, "
                f"expected {self.top_k} each."
            )
        new = set(np.unique(tags.sequence).tolist())
        if again := new & self._seen[layer]:
            raise KimiError(
                f"layer {layer}: sequence {min(again)} came in two parts; give whole sequences."
            )
        self._seen[layer] |= new


class _Clusters(NamedTuple):
    """The (sequence, source) cells of a batch of tokens, in the order of their numbers."""

    of_token: NDArray[np.int64]
    source: NDArray[np.int64]
    fold: NDArray[np.int64]
    tokens: Array

    def sums(self, experts: NDArray[np.integer], values: Array, n_experts: int) -> Array:
        """Sums of the pairs' values over each cell and expert."""
        size = len(self.source) * n_experts
        slots = self.of_token[:, None] * n_experts + experts
        sums = np.bincount(slots.ravel(), values.ravel(), minlength=size)
        return np.asarray(sums, np.float64).reshape(-1, n_experts)


def _clusters(tags: Tags) -> _Clusters:
    rows = np.stack([tags.sequence, tags.source, tags.fold], axis=1)
    cells, of_token, counts = np.unique(rows, axis=0, return_inverse=True, return_counts=True)
    split = (cells[1:, :2] == cells[:-1, :2]).all(axis=1)
    if split.any():
        raise KimiError(
            f"sequence {cells[:-1][split][0, 0]} has tokens of one source in two folds."
        )
    return _Clusters(of_token.ravel(), cells[:, 1], cells[:, 2], counts.astype(np.float64))
