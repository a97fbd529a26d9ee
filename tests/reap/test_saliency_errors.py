"""The sums for cluster-robust errors, against resampling the sequences."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.reap.routing import Batch, accumulator, feed, random_batch


def ratio(batch: Batch, sequences: np.ndarray) -> float:
    """Σc/n of expert 0 over some sequences, each as often as it is drawn."""
    c = np.where(batch.experts == 0, batch.gates * np.linalg.norm(batch.outputs, axis=-1), 0).sum(1)
    n = (batch.experts == 0).any(axis=1)
    by_sequence = [np.bincount(batch.tags.sequence, x)[sequences].sum() for x in (c, n)]
    return by_sequence[0] / by_sequence[1]


def test_the_clustered_error_is_that_of_a_bootstrap_over_sequences() -> None:
    """Var = (ΣC² − 2R ΣCn + R² Σn²)/n², PRUNING §4.2; the error of single tokens is too small."""
    rng = np.random.default_rng(0)
    batch = random_batch(0, n_sequences=240, length=30)
    loud = rng.lognormal(sigma=0.5, size=240)[batch.tags.sequence]  # what sequences share
    batch = replace(batch, outputs=batch.outputs * loud[:, None, None])
    batch = replace(batch, tags=replace(batch.tags, source=np.zeros(len(batch), np.int64)))
    acc = accumulator()
    feed(acc, 1, batch)
    s = {name: array[0, 0, 0] for name, array in acc.state().items() if array.ndim == 3}
    r = s["weighted"] / s["pairs"]
    variance = s["seq_weighted_sq"] - 2 * r * s["seq_weighted_pairs"] + r**2 * s["seq_pairs_sq"]
    clustered = variance**0.5 / s["pairs"]
    single = ((s["weighted_sq"] / s["pairs"] - r**2) / s["pairs"]) ** 0.5
    drawn = [ratio(batch, rng.integers(0, 240, 240)) for _ in range(400)]
    assert clustered == pytest.approx(np.std(drawn), rel=0.15)
    assert single < 0.8 * clustered
