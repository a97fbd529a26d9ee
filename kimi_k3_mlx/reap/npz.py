"""Statistics that the MLX port wrote: PipeNetwork/kimi-k3-mlx, scripts/reap_calibrate.py.

Input: its `.npz`. Output: what of a `reap.saliency.Saliency` is in it: `weighted` (its `saliency`),
`pairs` (its `counts`) and `tokens`, by source if it was given sources. It counts all layers, the
dense ones too, adds in float32, and doesn't say which checkpoint it measured.
"""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kimi_k3_mlx.errors import CheckpointError
from kimi_k3_mlx.schema import Json

NPZ = ".npz"
ALL = "all"
"""The source of a corpus without tags."""
NUMBERS, WHOLE, TEXT = "fiu", "iu", "U"
"""Kinds of NumPy's dtypes."""
UNREADABLE = (
    OSError, ValueError, EOFError, MemoryError, RuntimeError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip


class PortStatistics(NamedTuple):
    """The fields of a `Saliency` after its model."""

    sources: tuple[str, ...]
    layers: tuple[int, ...]
    n_experts: int
    top_k: int
    arrays: dict[str, NDArray[Any]]
    """`pairs`, `weighted` [source, layer, expert] and `tokens` [source, layer], float64."""
    runs: tuple[Json, ...]


class _Npz:
    """Arrays of a file, each checked when it is taken."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        try:
            with np.load(path, allow_pickle=False) as file:
                self._arrays = {name: np.asarray(file[name]) for name in file.files}
        except UNREADABLE as error:
            raise CheckpointError(f"{path.name} can't be read as {NPZ}: {error}.") from error

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def take(self, name: str, shape: tuple[int, ...], kinds: str = NUMBERS) -> NDArray[Any]:
        """An array of this shape, and of finite numbers from 0 on if of numbers; −1: any length."""
        if name not in self:
            raise self.error(f"has no array {name}")
        array = self._arrays[name]
        alike = len(array.shape) == len(shape) and all(
            expected in (-1, found) for found, expected in zip(array.shape, shape, strict=True)
        )
        if not alike or array.dtype.kind not in kinds:
            found = f"{array.dtype} {list(array.shape)}"
            raise self.error(f"has an array {name} of {found}, expected {list(shape)}")
        if kinds != TEXT and not (np.isfinite(array).all() and (array >= 0).all()):
            raise self.error(f"has numbers in {name} that are negative or not finite")
        return array

    def number(self, name: str) -> int:
        """A whole number from 1 on."""
        value = self.take(name, ())
        if value < 1 or value != int(value):
            raise self.error(f"says {name} {value}")
        return int(value)

    def error(self, fact: str) -> CheckpointError:
        return CheckpointError(f"{self.name} {fact}: it is not what reap_calibrate.py writes.")


def read_npz(path: Path) -> PortStatistics:
    """Read the file; raise CheckpointError, naming the array, when it is not the port's."""
    file = _Npz(path)
    names = ("num_hidden_layers", "num_experts", "top_k", "n_tokens")
    n_layers, n_experts, top_k, n_tokens = map(file.number, names)
    layers = file.take("moe_layers", (-1,), WHOLE)
    if (
        not len(layers)
        or (np.diff(layers) < 1).any()
        or not 0 <= layers[0] <= layers[-1] < n_layers
    ):
        raise file.error(f"says that of {n_layers} layers, {layers.tolist()} have experts")
    sources, tokens, counts, sums = _by_source(file, n_layers, n_experts, n_tokens)
    pairs, weighted = counts[:, layers], sums[:, layers]
    for name, own in zip(sources, (pairs.sum(2) != tokens[:, None] * top_k), strict=True):
        if own.any():
            raise file.error(f"has other counts for {name} than its tokens times top_k {top_k}")
    arrays = {
        "pairs": pairs.astype(np.float64),
        "weighted": weighted.astype(np.float64),
        "tokens": np.repeat(tokens[:, None].astype(np.float64), len(layers), 1),
    }
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    runs = ({"file": path.name, "sha256": sha256, "tokens": n_tokens},)
    return PortStatistics(sources, tuple(layers.tolist()), n_experts, top_k, arrays, runs)


def _by_source(
    file: _Npz, n_layers: int, n_experts: int, n_tokens: int
) -> tuple[tuple[str, ...], NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Names, tokens [S], counts and sums [S, all layers, E].

    Without tags, the port leaves its arrays by source at zero; its reap_subset.py leaves them out.
    """
    labels = [ALL]
    if "source_labels" in file:
        labels = [str(label) for label in file.take("source_labels", (-1,), TEXT)]
    shape = (n_layers, n_experts)
    counts, sums = file.take("counts", shape), file.take("saliency", shape)
    if "per_source" in file and (own := file.take("per_source_counts", (-1, *shape))).any():
        tokens = file.take("source_tokens", (len(labels),), WHOLE)
        own, parts = (
            file.take(name, (len(labels), *shape)) for name in ("per_source_counts", "per_source")
        )
        if len(set(labels)) < len(labels) or tokens.sum() != n_tokens:
            raise file.error(f"has sources {labels} of {tokens.tolist()} tokens, {n_tokens} in all")
        return tuple(labels), tokens, own, parts
    return ("+".join(labels),), np.array([n_tokens]), counts[None], sums[None]
