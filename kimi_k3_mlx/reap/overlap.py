"""Choices of experts compared: what sources share, and how much of a difference is noise.

Input: scores of a saliency store, and choices as masks [layers, experts]. Output: overlaps beside
what chance and the noise of a sample would give. A choice never holds an expert whose score is 0:
such experts are tied, and an order among them would look like agreement.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kimi_k3_mlx.reap.criteria import Criterion, Mask, Masses, mix_of, scores
from kimi_k3_mlx.reap.pairs import Array
from kimi_k3_mlx.reap.saliency import FOLD_TOKENS, FOLDED, Saliency


class Overlap(NamedTuple):
    """What two choices share, of the smaller one in each layer."""

    share: float
    chance: float
    """The share that random choices of these sizes have on average."""
    z: float | None
    """Distance from chance in standard deviations of random choices; None: they can't differ."""


class Halves(NamedTuple):
    """What two halves of one store's sequences disagree about."""

    flips: int
    tokens: tuple[float, float]

    @property
    def constant(self) -> float:
        """Flips are this · √(1/T₁ + 1/T₂) for samples of T₁ and T₂ tokens."""
        one, other = self.tokens
        return float(self.flips / np.sqrt(1 / one + 1 / other))


def of_folds(store: Saliency, folds: Collection[int]) -> Saliency:
    """The part of a store that some of its folds measured: its folded sums, and its tokens."""
    chosen = sorted(folds)
    arrays = {name: store.arrays[f"fold_{name}"][chosen].sum(axis=0) for name in FOLDED}
    return replace(store, arrays=arrays | {"tokens": store.arrays[FOLD_TOKENS][chosen].sum(axis=0)})


def has_folds(store: Saliency, criterion: Criterion) -> bool:
    """Whether the criterion can be asked of parts of the store."""
    return FOLD_TOKENS in store.arrays and criterion.total in FOLDED and store.n_folds > 1


def halves(store: Saliency, criterion: Criterion) -> tuple[Saliency, Saliency] | None:
    """Even and odd folds; None when the criterion has no folds, or one of them no tokens."""
    if not has_folds(store, criterion):
        return None
    even, odd = (of_folds(store, range(first, store.n_folds, 2)) for first in (0, 1))
    return (even, odd) if even.tokens.any() and odd.tokens.any() else None


def best(values: Array, keep: int) -> Mask:
    """The `keep` highest of the last axis, where they are above 0; ties go to the first."""
    order = np.argsort(-values, axis=-1, kind="stable")[..., :keep]
    mask = np.zeros(values.shape, bool)
    np.put_along_axis(mask, order, True, axis=-1)
    return mask & (values > 0)


def source_scores(store: Saliency, criterion: Criterion) -> Array:
    """Each source's own scores [sources, layers, experts]."""
    return np.stack([scores(store, criterion, alone) for alone in np.eye(len(store.sources))])


def pooled_choice(
    store: Saliency, criterion: Criterion, keep: int, mix: Array | None = None
) -> Mask:
    """What all tokens together choose; their sources weigh as in `mix`, else by their tokens."""
    return best(scores(store, criterion, mix_of(store) if mix is None else mix), keep)


def overlap(one: Mask, other: Mask) -> Overlap | None:
    """Sums over the layers, against the hypergeometric law; None when a choice is empty.

    Two random sets of a and b out of E share ab/E on average, with variance
    ab(E−a)(E−b)/(E²(E−1)); layers are independent then.
    """
    n_experts = one.shape[-1]
    a, b = one.sum(-1).astype(np.float64), other.sum(-1).astype(np.float64)
    smaller = np.minimum(a, b).sum()
    if not smaller:
        return None
    shared, expected = (one & other).sum(), (a * b).sum() / n_experts
    above = (a * b * (n_experts - a) * (n_experts - b)).sum()
    deviation = np.sqrt(above / (n_experts**2 * (n_experts - 1)))
    z = float((shared - expected) / deviation) if above else None
    return Overlap(float(shared / smaller), float(expected / smaller), z)


def flips(one: Mask, other: Mask) -> int:
    """Slots that hold another expert, over all layers."""
    return int((np.maximum(one.sum(-1), other.sum(-1)) - (one & other).sum(-1)).sum())


def split_half(store: Saliency, criterion: Criterion, keep: int) -> Halves | None:
    """The flips between two halves of the store; None when it has no halves."""
    parts = halves(store, criterion)
    if parts is None:
        return None
    # Both weigh the sources as the whole does: else the halves' mixes would differ, not the noise.
    choices = [pooled_choice(part, criterion, keep, mix_of(store)) for part in parts]
    tokens = float(parts[0].tokens.sum()), float(parts[1].tokens.sum())
    return Halves(flips(*choices), tokens)


def noise(constant: float, one: float, other: float, shared: float = 0.0) -> float:
    """Flips between samples of so many tokens of one text, `shared` of them in both.

    The difference of two means has variance ∝ 1/T₁ + 1/T₂ − 2T₁₂/(T₁T₂): 1/T₁ − 1/T₂ if the first
    sample is inside the second one, 1/T₁ + 1/T₂ if they share nothing. Flips grow with its root
    while the noise is small beside the spread of the scores; then they saturate.
    """
    variance = 1 / one + 1 / other - 2 * shared / (one * other)
    return float(constant * np.sqrt(max(variance, 0.0)))


def shared_tokens(one: Saliency, other: Saliency) -> float:
    """Tokens of the runs that both stores hold; 0 if neither's runs are all in the other.

    Stores that share some of their runs only are taken for independent, which overstates the noise.
    """
    inside = [
        store.tokens.sum()
        for store, runs in ((one, other.runs), (other, one.runs))
        if store.runs and all(run in runs for run in store.runs)
    ]
    return float(min(inside, default=0.0))


def held_out(
    store: Saliency, criterion: Criterion, mix: Array, counts: NDArray[np.int64]
) -> tuple[Array, Array] | None:
    """Mass and coverage [sources] in each fold of what the other folds choose, mean of the folds.

    nan for a source that no fold could be asked about; None when the criterion has no folds.
    """
    if not has_folds(store, criterion):
        return None
    found = []
    for fold in range(store.n_folds):
        part = of_folds(store, [fold])
        rest = of_folds(store, set(range(store.n_folds)) - {fold})
        values = scores(rest, criterion, mix)
        masses = Masses(part, criterion)
        kept = np.stack([best(row, int(n)) for row, n in zip(values, counts, strict=True)])
        heard = (rest.tokens > 0) & masses.measured & values.any()
        both = np.stack([masses.retained(kept), masses.coverage(kept)])
        found.append(np.where(heard, both, np.nan))
    known = ~np.isnan(found)
    sums = np.where(known, found, 0).sum(axis=0)
    mean = np.divide(sums, known.sum(0), out=np.full_like(sums, np.nan), where=known.any(0))
    return mean[0], mean[1]
