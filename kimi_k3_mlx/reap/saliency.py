"""The additive statistics of a calibration run, and the store that keeps them.

Input: what a layer's router and experts did with tagged tokens. Output: float64 sums for each
(source, layer, expert), and one safetensors file. Nothing here ranks experts or runs a model.

The symbols g, N, c, r and Δ of a routed pair are those of `reap.pairs`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kimi_k3_mlx.errors import CheckpointError, KimiError, UsageError
from kimi_k3_mlx.reap.pairs import Array, observe, pair_values, short
from kimi_k3_mlx.schema import Json, TensorInfo
from kimi_k3_mlx.tensors.header import encode_header, read_header
from kimi_k3_mlx.tensors.writer import write_file

State = dict[str, Array]

__all__ = ["Accumulator", "Saliency", "Tags", "load_saliency", "merge", "observe"]

KIND = "kimi_k3_mlx.saliency"
VERSION = 1

SUMS = {
    "pairs": "n: routed pairs",
    "gate": "Σg: SEER-MoE's soft count, arXiv:2404.05089",
    "norm": "ΣN: expert activation norm (EAN)",
    "norm_sq": "ΣN²",
    "weighted": "Σc: divided by n, REAP, arXiv:2510.13999 eq. 9",
    "weighted_sq": "Σc²",
    "relative": "Σr, r = c/‖y‖",
    "loo": "ΣΔ: leave-one-out directional distortion",
    "loo_sq": "ΣΔ²",
}
"""Sums over the pairs of (source, layer, expert)."""

MAXIMA = {"norm_max": "max N", "weighted_max": "max c"}
"""Largest values of (source, layer, expert): they merge by maximum."""

FOLDED = ("pairs", "weighted", "loo")
"""Sums that exist once more for each fold, as `fold_*` [folds, source, layer, expert]."""

CLUSTERS = {
    "seq_pairs_sq": ("pairs", "pairs"),
    "seq_pairs_tokens": ("pairs", "tokens"),
    "seq_weighted_sq": ("weighted", "weighted"),
    "seq_weighted_pairs": ("weighted", "pairs"),
    "seq_weighted_tokens": ("weighted", "tokens"),
    "seq_loo_sq": ("loo", "loo"),
    "seq_loo_pairs": ("loo", "pairs"),
    "seq_loo_tokens": ("loo", "tokens"),
}
"""Σ_q A_q B_q over sequences q, of their own sums A_q and B_q: for cluster-robust errors."""

TOKENS = ("tokens", "sequences", "seq_tokens_sq")
"""T, the number of sequences and Σ_q T_q², for each (source, layer)."""

FOLD_TOKENS = "fold_tokens"


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
        self._state = {name: np.zeros(shape) for name, shape in shapes.items()}
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

    def state(self) -> State:
        """A copy of all sums, for the journal: they add up, see `restore`."""
        return {name: array.copy() for name, array in self._state.items()}

    def restore(self, state: State, layers: tuple[int, ...] | None = None) -> None:
        """Add the state of an accumulator with these layers (all of this one's by default)."""
        where = [self.layers.index(layer) for layer in layers or self.layers]
        for name, array in self._state.items():
            axis = layer_axis(name)
            at = (slice(None),) * axis + (where,)
            array[at] = _joined(name, array[at], state[name])

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


@dataclass(frozen=True)
class Saliency:
    """The statistics of one or more runs over one model; `arrays` as `state_shapes` says."""

    model: str
    """Fingerprint of the calibrated checkpoint."""
    sources: tuple[str, ...]
    layers: tuple[int, ...]
    """MoE layers, counted from 0."""
    n_experts: int
    top_k: int
    arrays: State = field(repr=False)
    runs: tuple[Json, ...] = ()
    """Provenance of each run."""

    @property
    def n_folds(self) -> int:
        """Number of folds."""
        return len(self.arrays[FOLD_TOKENS])

    @property
    def tokens(self) -> Array:
        """T of each source."""
        return self.arrays["tokens"][:, 0]

    def provenance(self) -> Json:
        """Everything but the arrays, as JSON."""
        return {
            "kind": KIND,
            "version": VERSION,
            "model": self.model,
            "sources": list(self.sources),
            "layers": list(self.layers),
            "n_experts": self.n_experts,
            "top_k": self.top_k,
            "n_folds": self.n_folds,
            "runs": list(self.runs),
        }

    def save(self, path: Path) -> str:
        """Write the file whole or not at all; return its SHA-256."""
        metadata = {KIND: json.dumps(self.provenance(), ensure_ascii=False, sort_keys=True)}
        blobs, infos, begin = [], [], 0
        for name, array in sorted(self.arrays.items()):
            blobs.append(np.ascontiguousarray(array, "<f8").tobytes())
            infos.append(TensorInfo(name, "F64", array.shape, begin, begin + len(blobs[-1])))
            begin = infos[-1].end
        return write_file(path, b"".join([encode_header(infos, metadata), *blobs]))


def load_saliency(path: Path) -> Saliency:
    """Open a store, its arrays mapped; raise UsageError or CheckpointError when it is none."""
    if not path.is_file():
        raise UsageError(f"statistics {path} don't exist.", "measure them: kimi-k3 calibrate")
    header = read_header(path)
    try:
        said = json.loads(header.metadata[KIND])
        if said["version"] != VERSION:
            raise UsageError(f"{path.name} has version {said['version']}, expected {VERSION}.")
        store = Saliency(
            model=said["model"],
            sources=tuple(said["sources"]),
            layers=tuple(said["layers"]),
            n_experts=said["n_experts"],
            top_k=said["top_k"],
            arrays=dict(_mapped(path, header.n_bytes, header.tensors)),
            runs=tuple(said["runs"]),
        )
        n_folds = said["n_folds"]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path.name} is not a saliency store: {error}.") from error
    shapes = state_shapes(len(store.sources), len(store.layers), store.n_experts, n_folds)
    for name, shape in shapes.items():
        found = store.arrays.get(name)
        if found is None or found.shape != shape:
            what = "is missing" if found is None else f"has shape {list(found.shape)}"
            raise CheckpointError(f"{path.name}: {name} {what}, expected {list(shape)}.")
    return store


def merge(one: Saliency, other: Saliency) -> Saliency:
    """Both runs' statistics: sums added, the sources of both, those of `one` first."""
    for what in ("model", "layers", "n_experts", "top_k", "n_folds"):
        if getattr(one, what) != getattr(other, what):
            raise UsageError(
                f"the statistics differ in {what}: {getattr(one, what)} and {getattr(other, what)}."
            )
    if any(run in other.runs for run in one.runs):
        raise UsageError("both statistics hold the same run, which would count twice.")
    sources = tuple(dict.fromkeys((*one.sources, *other.sources)))
    shapes = state_shapes(len(sources), len(one.layers), one.n_experts, one.n_folds)
    arrays = {name: np.zeros(shape) for name, shape in shapes.items()}
    for store in (one, other):
        where = [sources.index(source) for source in store.sources]
        for name, array in arrays.items():
            at = (slice(None),) * (layer_axis(name) - 1) + (where,)
            array[at] = _joined(name, array[at], store.arrays[name])
    runs = (*one.runs, *other.runs)
    return Saliency(one.model, sources, one.layers, one.n_experts, one.top_k, arrays, runs)


def state_shapes(
    n_sources: int, n_layers: int, n_experts: int, n_folds: int
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all arrays."""
    flat: tuple[int, ...] = (n_sources, n_layers)
    full: tuple[int, ...] = (*flat, n_experts)
    shapes = dict.fromkeys((*SUMS, *MAXIMA, *CLUSTERS), full) | dict.fromkeys(TOKENS, flat)
    shapes |= {f"fold_{name}": (n_folds, *full) for name in FOLDED}
    return shapes | {FOLD_TOKENS: (n_folds, *flat)}


def layer_axis(name: str) -> int:
    """Which axis of an array counts layers; the one before it counts sources."""
    return 2 if name.startswith("fold_") else 1


def _joined(name: str, one: Array, other: Array) -> Array:
    return np.maximum(one, other) if name in MAXIMA else one + other


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


def _mapped(path: Path, begin: int, tensors: tuple[TensorInfo, ...]) -> Iterator[tuple[str, Array]]:
    """The arrays, read when they are used."""
    data = np.memmap(path, np.uint8, "r")
    for tensor in tensors:
        part = data[begin + tensor.begin : begin + tensor.end]
        yield tensor.name, part.view("<f8").reshape(tensor.shape)
