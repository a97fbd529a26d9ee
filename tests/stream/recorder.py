"""An observer that remembers all it was shown, and one that adds it up."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from kimi_k3_mlx.stream.budget import Batch

Key = tuple[Any, ...]
Arrays = dict[str, np.ndarray]


def as_numpy(array: mx.array) -> np.ndarray:
    """Values in float32 or as integers."""
    return np.array(array.astype(mx.float32) if array.dtype == mx.bfloat16 else array)


class Recorder:
    """By layer, lane and sequence, the rows of its real tokens."""

    def __init__(self) -> None:
        self.moes: dict[Key, list[np.ndarray]] = {}
        self.ends: dict[Key, np.ndarray] = {}
        self.restored: Arrays | None = None

    def moe(self, layer: int, lane: int, batch: Batch, *taps: mx.array) -> None:
        for row, index in enumerate(batch.indices):
            key = (layer, lane, index)
            assert key not in self.moes
            self.moes[key] = [as_numpy(tap)[row, : batch.lengths[row]] for tap in taps]

    def logits(self, lane: int, batch: Batch, logits: mx.array) -> None:
        for row, index in enumerate(batch.indices):
            assert (lane, index) not in self.ends
            self.ends[lane, index] = as_numpy(logits)[row, : batch.lengths[row]]

    def state(self) -> Arrays:
        return {}

    def restore(self, arrays: Arrays) -> None:
        self.restored = arrays


class Adder:
    """Sums per layer, lane and expert, in the way of a saliency store."""

    def __init__(self, n_experts: int) -> None:
        self.n_experts = n_experts
        self.delta: Arrays = {}
        self.sums: Arrays = {}

    def moe(self, layer: int, lane: int, batch: Batch, experts, weights, outputs) -> None:
        chosen = np.array(batch.real(experts)).ravel()
        norm = np.linalg.norm(as_numpy(batch.real(outputs)).astype(np.float64), axis=-1)
        saliency = (np.array(batch.real(weights)) * norm).ravel()
        count, total, top = (np.zeros(self.n_experts) for _ in range(3))
        np.add.at(count, chosen, 1)
        np.add.at(total, chosen, saliency)
        np.maximum.at(top, chosen, norm.ravel())
        self.put(f"count.{layer}.{lane}", count.astype(np.int64))
        self.put(f"total.{layer}.{lane}", total)
        key = f"max_norm.{layer}.{lane}"
        self.delta[key] = np.maximum(self.delta.get(key, 0.0), top)

    def logits(self, lane: int, batch: Batch, logits: mx.array) -> None:
        values = as_numpy(batch.real(logits)).astype(np.float64)
        self.put(f"logits.{lane}", np.array([len(values), np.square(values).sum()]))

    def put(self, key: str, values: np.ndarray) -> None:
        self.delta[key] = self.delta[key] + values if key in self.delta else values

    def state(self) -> Arrays:
        delta, self.delta = self.delta, {}
        return delta

    def restore(self, arrays: Arrays) -> None:
        self.sums = {key: array.copy() for key, array in arrays.items()}
