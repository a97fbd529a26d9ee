"""What one routed pair of token and expert says: the formulas, on numpy arrays.

Input: gates, norms and dots of a MoE layer, [tokens, k]. Output: values. Nothing is added up.

g is the weight that the model mixes with (sigmoid, renormalised, without the selection bias),
N = ‖e‖ the norm of the expert's output in the latent space, before the latent norm, c = gN,
y = Σ g e the token's mix, d = ⟨g e, y⟩. Leaving the pair out gives y′ = y − g e, with
‖y′‖² = ‖y‖² − 2d + c², and because the latent norm removes the scale, what is lost is direction:
Δ = 2 − 2 cos(y, y′). r = c/‖y‖ is the pair's relative share.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

GRID = 2.0**36
NOTHING = 1e-13
"""What rounding leaves of ‖y′‖²/‖y‖² when y′ is zero."""


def short(values: Array) -> Array:
    """Values in 24 bits, so that float64 has room to add many of them exactly."""
    return np.asarray(values, np.float32).astype(np.float64)


def fixed(values: Array) -> Array:
    """Values of a natural scale in steps of 2⁻³⁶: they add up exactly to 131,072."""
    return np.round(np.asarray(values, np.float64) * GRID) / GRID


def co_selected(experts: NDArray[np.integer], n_experts: int) -> NDArray[np.int64]:
    """How often two experts were chosen for the same token [E, E], from experts [T, k].

    Symmetric; 0 on the diagonal.
    """
    both = experts[:, :, None].astype(np.int64) * n_experts + experts[:, None, :]
    counts = np.bincount(both.ravel(), minlength=n_experts**2).reshape(n_experts, n_experts)
    np.fill_diagonal(counts, 0)
    return counts


def pair_values(gates: Array, norms: Array, dots: Array, y_squares: Array) -> dict[str, Array]:
    """What each pair adds to `saliency.SUMS`, rounded; see the module's text for the formulas."""
    gates, norms = np.asarray(gates, np.float64), np.asarray(norms, np.float64)
    exact = gates * norms
    loo = fixed(distortion(exact, np.asarray(dots, np.float64), y_squares))
    size = np.sqrt(np.asarray(y_squares, np.float64))[:, None]
    relative = np.divide(exact, size, out=np.zeros_like(exact), where=size > 0)
    norm, weighted = short(norms), short(exact)
    return {
        "pairs": np.ones_like(weighted),
        "gate": fixed(gates),
        "norm": norm,
        "norm_sq": short(norms**2),
        "weighted": weighted,
        "weighted_sq": short(exact**2),
        "relative": short(relative),
        "loo": loo,
        "loo_sq": fixed(loo**2),
    }


def distortion(weighted: Array, dots: Array, y_squares: Array) -> Array:
    """Δ = 2 − 2 cos(y, y′) [T, k]; for small angles as 2 sin²/(1 + cos), which keeps its digits.

    A y of zero has no direction to lose: 0. A y′ of zero has lost it all: 2.
    """
    total = np.asarray(y_squares, np.float64)[:, None]
    rest = total - 2 * dots + weighted**2
    rest = np.where(rest > NOTHING * total, rest, 0)
    scale = total * rest
    root = np.sqrt(scale)
    cos = np.divide(total - dots, root, out=np.zeros_like(root), where=root > 0)
    cos = np.clip(cos, -1, 1)
    sin_sq = np.maximum(total * weighted**2 - dots**2, 0)
    sin_sq = np.divide(sin_sq, scale, out=np.ones_like(scale), where=scale > 0)
    delta = np.where(cos > 0, 2 * np.minimum(sin_sq, 1) / (1 + np.abs(cos)), 2 - 2 * cos)
    return np.where(total > 0, delta, 0.0)
