"""How scores and routed pairs are spread over the experts of a layer.

Input: scores, errors or counts. Output: one number for each layer or source. Nothing is chosen
here, and nothing here says how many experts are enough.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kimi_k3_mlx.reap.criteria import Z95, Mask, Masses
from kimi_k3_mlx.reap.pairs import Array
from kimi_k3_mlx.reap.saliency import Saliency
from kimi_k3_mlx.schema import Json

FAVOURED = 1.5
"""A source favours an expert that it routes to so many times as often as the others do."""
ROUNDING = 1e-12


def gini(values: Array) -> Array:
    """Of each row [layers, experts]: 0 when all are equal, near 1 when one has all."""
    n = values.shape[-1]
    rank = 2 * np.arange(1, n + 1) - n - 1
    total = values.sum(-1)
    above = (np.sort(values, axis=-1) * rank).sum(-1)
    return np.asarray(np.divide(above, n * total, out=np.zeros_like(total), where=total > 0))


def mean_crossing(values: Array) -> Array:
    """Share of each layer's experts [layers] whose score is not below the layer's mean."""
    mean = values.mean(-1, keepdims=True) * (1 - ROUNDING)
    return np.asarray((values >= mean).mean(-1))


def near_the_cut(values: Array, errors: Array, kept: Mask, forced: Mask) -> Mask:
    """Experts whose 95 % interval holds the border between the worst that stays and the best that
    goes. Those that are `forced` to stay are not near it, and don't set it.

    A layer where the scores decide nothing has no border.
    """
    stays, goes = kept & ~forced, ~kept & ~forced
    worst = np.where(stays, values, np.inf).min(-1, keepdims=True)
    best = np.where(goes, values, -np.inf).max(-1, keepdims=True)
    decided = stays.any(-1, keepdims=True) & goes.any(-1, keepdims=True)
    border = np.where(decided, worst, 0) / 2 + np.where(decided, best, 0) / 2
    return np.asarray((np.abs(values - border) < Z95 * errors) & ~forced & decided)


def support(pairs: Array) -> Json:
    """Routed pairs per expert, over all layers [layers, experts]: how they are distributed."""
    low, tenth, half, ninetieth = np.quantile(pairs, [0, 0.1, 0.5, 0.9]).tolist()
    return {
        "mean": float(pairs.mean()),
        "min": low,
        "q10": tenth,
        "median": half,
        "q90": ninetieth,
        "dead": int((pairs == 0).sum()),
    }


def favoured(store: Saliency) -> Mask:
    """Experts that a source favours (see `FAVOURED`) [sources, layers, experts]."""
    pairs, tokens = np.asarray(store.arrays["pairs"]), store.tokens[:, None, None]
    rest, others = pairs.sum(0) - pairs, tokens.sum() - tokens
    return np.asarray((pairs * others >= FAVOURED * rest * tokens) & (pairs > 0) & (others > 0))


def curve(masses: Masses, counts: NDArray[np.int64]) -> Array:
    """Mass that each source's own best `counts` experts retain, mean of layers [sources, counts].

    Sums of sorted values: the curve is concave whatever was measured.
    """
    ranked = -np.sort(-masses.shares, axis=2)
    sums = np.concatenate([np.zeros_like(ranked[..., :1]), np.cumsum(ranked, axis=2)], axis=2)
    return np.asarray(sums[..., counts].mean(axis=1))
