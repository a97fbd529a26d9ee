"""How sure a measured number is: the bootstrap over documents, of sums and of their ratios.

Input: sums of each document, a group (source) for each document. Output: intervals. Documents, not
tokens, are drawn again: the tokens of a text resemble each other. Each group is drawn within
itself, since how much text of each there is was chosen, not found. A seed gives the same intervals.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

LEVEL = 0.95
RESAMPLES = 2_000
FEW = 10
"""With fewer documents the intervals are too narrow to be relied on."""
BLOCK = 1 << 21
"""Drawn documents that are held at once."""


class Interval(NamedTuple):
    """A value and where it would lie in 95 % of samples.

    Without ends if a source has one document: nothing tells how far others are from it.
    """

    value: float
    low: float | None = None
    high: float | None = None

    def map(self, function: np.ufunc) -> Interval:
        """The interval of an ascending function of the value."""
        if self.low is None or self.high is None:
            return Interval(float(function(self.value)))
        return Interval(*map(float, function(np.array(self))))


@dataclass(frozen=True, eq=False)
class Resampled:
    """Sums over the documents of each group, and, at the end, over all of them."""

    sums: Array = field(repr=False)
    """[groups + 1, columns]"""
    replicas: Array = field(repr=False)
    """The same of documents drawn again [resamples, groups + 1, columns]."""
    n_documents: NDArray[np.int64]
    """Documents of each group, and all."""

    def ratio(self, group: int, above: Array, below: Array) -> Interval:
        """Σ above / Σ below, both sums of columns with these weights [columns].

        Weights of +1 and -1 make a paired difference: both sides are of the same documents.
        """
        bottom = float(self.sums[group] @ below)
        if not bottom:
            return Interval(float("nan"))
        value = float(self.sums[group] @ above) / bottom
        if not self._varies(group):
            return Interval(value)
        replicas = (self.replicas[:, group] @ above) / (self.replicas[:, group] @ below)
        edge = (1 - LEVEL) / 2
        low, high = np.quantile(replicas, (edge, 1 - edge))
        return Interval(value, float(low), float(high))

    def _varies(self, group: int) -> bool:
        """Whether drawing again can change it: a source's only document is always itself."""
        is_all = group in (-1, len(self.n_documents) - 1)
        counts = self.n_documents[:-1] if is_all else self.n_documents[[group]]
        return bool((counts != 1).all() and counts.any())


def resample(
    columns: Array,
    groups: NDArray[np.integer],
    n_groups: int,
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Resampled:
    """Draw the documents of each group again, as many as it has.

    columns [documents, columns], groups [documents] from 0.
    """
    sums = np.zeros((n_groups + 1, columns.shape[1]))
    replicas = np.zeros((resamples, *sums.shape))
    counts = np.bincount(groups, minlength=n_groups)
    for group in range(n_groups):
        own = columns[groups == group]
        sums[group] = own.sum(0)
        if len(own):
            rng = np.random.default_rng([seed, group])
            replicas[:, group] = drawn_sums(own, resamples, rng)
    sums[-1] = sums[:-1].sum(0)
    replicas[:, -1] = replicas[:, :-1].sum(1)
    return Resampled(sums, replicas, np.append(counts, counts.sum()))


def drawn_sums(columns: Array, resamples: int, rng: np.random.Generator) -> Array:
    """Sums [resamples, columns] of documents that are drawn with replacement."""
    n_documents = len(columns)
    rows = max(1, BLOCK // n_documents)
    parts = []
    for begin in range(0, resamples, rows):
        n_rows = min(rows, resamples - begin)
        drawn = rng.integers(n_documents, size=(n_rows, n_documents))
        drawn += n_documents * np.arange(n_rows)[:, None]
        times = np.bincount(drawn.ravel(), minlength=n_rows * n_documents)
        parts.append(times.reshape(n_rows, n_documents) @ columns)
    return np.concatenate(parts)
