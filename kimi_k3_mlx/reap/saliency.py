"""The additive statistics of calibration runs: what is in them, and the store that keeps them.

Input: sums for each (source, layer, expert), or a file of them. Output: one safetensors file.
Nothing here measures: that is `reap.accumulate`.

The symbols g, N, c, r and Δ of a routed pair are those of `reap.pairs`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kimi_k3_mlx.errors import CheckpointError, UsageError
from kimi_k3_mlx.reap.npz import NPZ, read_npz
from kimi_k3_mlx.reap.pairs import Array
from kimi_k3_mlx.schema import Json, TensorInfo
from kimi_k3_mlx.tensors.header import encode_header, read_header
from kimi_k3_mlx.tensors.writer import write_file

State = dict[str, NDArray[Any]]

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

TOGETHER = "together"
"""How often two experts were chosen for one token [layer, expert, expert], of all sources: uint32,
0 on the diagonal. A store may lack it."""

UNKNOWN = "unknown"
"""The model of statistics that don't say which checkpoint they are of."""

DTYPES = {"F64": "<f8", "U32": "<u4"}


class Measured(dict[str, NDArray[Any]]):
    """Arrays by name. Raises UsageError when one is asked for that was not measured."""

    def __missing__(self, name: str) -> NDArray[Any]:
        said = f" ({SUMS[name]})" if name in SUMS else ""
        raise UsageError(
            f"the statistics lack {name}{said}: it was not measured.",
            "measure again: kimi-k3 calibrate",
        )


@dataclass(frozen=True)
class Saliency:
    """The statistics of one or more runs over one model.

    `arrays` are those of `state_shapes`, and `TOGETHER`; what was not measured is not there.
    """

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

    def __post_init__(self) -> None:
        object.__setattr__(self, "arrays", Measured(self.arrays))

    @property
    def n_folds(self) -> int:
        """Number of folds."""
        return len(self.arrays[FOLD_TOKENS]) if FOLD_TOKENS in self.arrays else 0

    @property
    def unmeasured(self) -> tuple[str, ...]:
        """Names of arrays that a run of `reap.calibrate` has and this store lacks."""
        return tuple(n for n in (*state_shapes(1, 1, 1, 1), TOGETHER) if n not in self.arrays)

    @property
    def tokens(self) -> Array:
        """T of each source."""
        return np.asarray(self.arrays["tokens"][:, 0])

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
            dtype = "U32" if name == TOGETHER else "F64"
            blobs.append(np.ascontiguousarray(array, DTYPES[dtype]).tobytes())
            infos.append(TensorInfo(name, dtype, array.shape, begin, begin + len(blobs[-1])))
            begin = infos[-1].end
        return write_file(path, b"".join([encode_header(infos, metadata), *blobs]))


def load_saliency(path: Path) -> Saliency:
    """Open a store, its arrays mapped, or the MLX port's `.npz`.

    Raises UsageError or CheckpointError when it is neither.
    """
    if not path.is_file():
        raise UsageError(f"statistics {path} don't exist.", "measure them: kimi-k3 calibrate")
    if path.suffix == NPZ:
        return Saliency(UNKNOWN, *read_npz(path))
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
    if TOGETHER in store.arrays:
        shapes[TOGETHER] = (len(store.layers), store.n_experts, store.n_experts)
    for name, shape in shapes.items():
        found = store.arrays.get(name)
        if found is None or found.shape != shape:
            what = "is missing" if found is None else f"has shape {list(found.shape)}"
            raise CheckpointError(f"{path.name}: {name} {what}, expected {list(shape)}.")
    return store


def merge(one: Saliency, other: Saliency) -> Saliency:
    """Both runs' statistics: sums added, the sources of both, those of `one` first.

    What one of them lacks is left out of the sum.
    """
    if UNKNOWN in (one.model, other.model):
        raise UsageError("statistics that don't say which checkpoint they are of can't be merged.")
    for what in ("model", "layers", "n_experts", "top_k", "n_folds"):
        if getattr(one, what) != getattr(other, what):
            raise UsageError(
                f"the statistics differ in {what}: {getattr(one, what)} and {getattr(other, what)}."
            )
    if any(run in other.runs for run in one.runs):
        raise UsageError("both statistics hold the same run, which would count twice.")
    sources = tuple(dict.fromkeys((*one.sources, *other.sources)))
    shapes = state_shapes(len(sources), len(one.layers), one.n_experts, one.n_folds)
    arrays: State = {name: np.zeros(shape) for name, shape in shapes.items()}
    for store in (one, other):
        where = [sources.index(source) for source in store.sources]
        for name, array in arrays.items():
            at = (slice(None),) * (layer_axis(name) - 1) + (where,)
            array[at] = joined(name, array[at], store.arrays[name])
    if TOGETHER in one.arrays and TOGETHER in other.arrays:
        arrays[TOGETHER] = one.arrays[TOGETHER] + other.arrays[TOGETHER]
    runs = (*one.runs, *other.runs)
    return Saliency(one.model, sources, one.layers, one.n_experts, one.top_k, arrays, runs)


def shared_files(one: Saliency, other: Saliency) -> tuple[str, ...]:
    """Names of files that runs of both read, by their content, as far as it is on record."""
    theirs = _files_read(other)
    return tuple(name for sha256, name in _files_read(one).items() if sha256 in theirs)


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
    """Which axis of an array counts layers; the one before it counts sources, if there is one."""
    if name == TOGETHER:
        return 0
    return 2 if name.startswith("fold_") else 1


def joined(name: str, one: NDArray[Any], other: NDArray[Any]) -> NDArray[Any]:
    """Two values of an array merged."""
    return np.asarray(np.maximum(one, other) if name in MAXIMA else one + other)


def _files_read(store: Saliency) -> dict[str, str]:
    """Names of the files of the runs' corpora, by SHA-256."""
    found: dict[str, str] = {}
    for run in store.runs:
        corpus = run.get("corpus")
        for spec in corpus.get("specs", ()) if isinstance(corpus, dict) else ():
            if "sha256" in spec:
                found[spec["sha256"]] = spec["name"]
    return found


def _mapped(
    path: Path, begin: int, tensors: tuple[TensorInfo, ...]
) -> Iterator[tuple[str, NDArray[Any]]]:
    """The arrays, read when they are used."""
    data = np.memmap(path, np.uint8, "r")
    for tensor in tensors:
        part = data[begin + tensor.begin : begin + tensor.end]
        yield tensor.name, part.view(DTYPES[tensor.dtype]).reshape(tensor.shape)
