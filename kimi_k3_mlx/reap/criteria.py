"""What makes an expert worth keeping: the criteria as data, scores, their errors, retained mass.

Input: a saliency store and a mix of its sources. Output: arrays [layers, experts]. A criterion is a
sum and its denominator: published cards use several under the one name REAP, so neither is ever
left out. Nothing here chooses experts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from kimi_k3_mlx.errors import UsageError
from kimi_k3_mlx.reap.pairs import Array
from kimi_k3_mlx.reap.saliency import Saliency
from kimi_k3_mlx.schema import Json

Mask = NDArray[np.bool_]

DENOMINATORS = {
    "pairs": "n, the tokens that were routed to the expert",
    "tokens": "T, all tokens",
}
Z95 = 1.96
"""Half a 95 % interval, in standard errors."""


@dataclass(frozen=True)
class Criterion:
    """A sum over an expert's routed pairs (`saliency.SUMS`) and what it is divided by."""

    name: str
    formula: str
    total: str
    per: str
    published: str
    """Where it comes from."""

    @property
    def mass(self) -> str:
        """What retained mass adds up: the sum, whatever the denominator."""
        return self.formula.split("/")[0]

    def to_json(self) -> Json:
        """A JSON object, with the denominator in words."""
        return asdict(self) | {"denominator": DENOMINATORS[self.per]}


CRITERIA = {
    criterion.name: criterion
    for criterion in (
        Criterion("reap", "Σc/n", "weighted", "pairs", "REAP, arXiv:2510.13999, eq. 9"),
        Criterion("loo", "ΣΔ/n", "loo", "pairs", "leave-one-out direction, this project"),
        Criterion("loo-sum", "ΣΔ/T", "loo", "tokens", "leave-one-out direction, this project"),
        Criterion("frequency", "n/T", "pairs", "tokens", "selection frequency"),
        Criterion("soft-frequency", "Σg/T", "gate", "tokens", "SEER-MoE, arXiv:2404.05089"),
        Criterion("ean", "ΣN/T", "norm", "tokens", "expert activation norm (ean_sum of REAP)"),
        Criterion("man", "ΣN/n", "norm", "pairs", "MAN, arXiv:2606.15716 (ean_mean of REAP)"),
        Criterion("msan", "ΣN²/n", "norm_sq", "pairs", "MSAN, arXiv:2606.15716"),
        Criterion(
            "weighted-ean", "Σc/T", "weighted", "tokens", "weighted_ean_sum of REAP's code; "
            "called REAP by PipeNetwork/kimi-k3-mlx",
        ),
        Criterion("reap-l2", "Σc²/n", "weighted_sq", "pairs", "reap_l2 of REAP's code"),
        Criterion("relative", "Σr/n", "relative", "pairs", "share of the mix, this project"),
    )
}  # fmt: skip


def criterion_named(name: str) -> Criterion:
    """The criterion; raise UsageError listing those that there are."""
    if name not in CRITERIA:
        raise UsageError(f"there is no criterion {name!r}.", f"known: {', '.join(CRITERIA)}.")
    return CRITERIA[name]


def mix_of(
    store: Saliency, weights: Mapping[str, float] | None = None, masked: Collection[str] = ()
) -> Array:
    """Each source's share of the ranking [sources]; they add up to 1.

    Without `weights`, sources count by their tokens, as if the corpus were one. With them, by
    weight whatever their tokens; a source that is not named weighs 1. A masked one has no say.
    """
    for name in (*(weights or ()), *masked):
        if name not in store.sources:
            raise UsageError(
                f"the statistics have no source {name!r}.", f"known: {', '.join(store.sources)}."
            )
    shares = store.tokens.copy()
    if weights is not None:
        asked = np.array([float(weights.get(name, 1.0)) for name in store.sources])
        if (asked < 0).any() or not np.isfinite(asked).all():
            raise UsageError("weights of sources must be finite and not negative.")
        shares = np.where(shares > 0, asked, 0.0)
    shares[[name in masked for name in store.sources]] = 0
    if not shares.sum() > 0:
        raise UsageError("no source with tokens is left to rank the experts by.")
    return np.asarray(shares / shares.sum(), np.float64)


def scores(store: Saliency, criterion: Criterion, mix: Array) -> Array:
    """The criterion under a mix: Σ_s w_s A_s/T_s, over Σ_s w_s n_s/T_s if its denominator is n.

    An expert that was never routed to has 0.
    """
    total = _mixed(store, criterion.total, mix)
    if criterion.per == "tokens":
        return total
    return _ratio(total, _mixed(store, "pairs", mix))


def standard_errors(store: Saliency, criterion: Criterion, mix: Array) -> Array | None:
    """Cluster-robust errors of `scores`, by the sequences that were drawn; None: not measured.

    Var(Σ_q A_q/Σ_q B_q) = Σ_q (A_q − R B_q)² / (Σ_q B_q)², PRUNING §4.2, for a mix with the
    sources' weights inside both sums. B counts pairs, or the tokens of each source.
    """
    name, arrays = criterion.total, store.arrays
    cross = f"seq_{name}_{criterion.per}"
    if f"seq_{name}_sq" not in arrays or cross not in arrays:
        return None
    per_token = _per_token(store, mix)[:, None, None]
    if criterion.per == "pairs":
        r = scores(store, criterion, mix)[None]
        squares, below = arrays["seq_pairs_sq"], _mixed(store, "pairs", mix)
    else:
        tokens = store.tokens[:, None, None]
        r = _ratio(np.asarray(arrays[name]), np.broadcast_to(tokens, arrays[name].shape))
        squares, below = arrays["seq_tokens_sq"][..., None], np.ones(arrays[name].shape[1:])
    residual = arrays[f"seq_{name}_sq"] - 2 * r * arrays[cross] + r**2 * squares
    variance = (per_token**2 * np.maximum(residual, 0)).sum(0)
    return _ratio(np.sqrt(variance), below)


class Masses:
    """How much of each source's mass (the criterion's sum) a choice of experts retains."""

    def __init__(self, store: Saliency, criterion: Criterion) -> None:
        mass = np.asarray(store.arrays[criterion.total])
        total = mass.sum(axis=2, keepdims=True)
        self.shares = _ratio(mass, np.broadcast_to(total, mass.shape))
        """Of the layer's mass [sources, layers, experts]."""
        self.measured: Mask = store.tokens > 0
        best = np.cumsum(-np.sort(-self.shares, axis=2), axis=2)
        self._best = np.concatenate([np.zeros_like(best[..., :1]), best], axis=2)

    def retained(self, kept: Mask) -> Array:
        """Mean over the layers of kept/all [sources]; raw sums would follow the loudest layers."""
        return np.asarray(self._by_layer(kept).mean(1))

    def coverage(self, kept: Mask) -> Array:
        """The same, over what as many experts of the source's own choice retain [sources]."""
        counts = kept.sum(1)
        best = self._best[:, np.arange(len(counts)), counts]
        found = self._by_layer(kept)
        return np.asarray(np.where(best > 0, _ratio(found, best), 1.0).mean(1))

    def _by_layer(self, kept: Mask) -> Array:
        return np.asarray(np.einsum("sle,le->sl", self.shares, kept.astype(np.float64)))


def super_experts(store: Saliency, mix: Array) -> Mask:
    """Experts of the first three quarters of the layers whose largest output norm stands out.

    The rule of REAP's code, with norms for activations: above the 99.5 % quantile of all experts
    and above a tenth of the largest. K3's activation is bounded, so that this is a question and
    not a verdict.
    """
    largest = store.arrays["norm_max"][mix > 0].max(axis=0)
    limit = max(np.quantile(largest, 0.995), largest.max() / 10)
    early = np.arange(len(largest)) < 3 * len(largest) // 4
    return np.asarray((largest > limit) & early[:, None])


def _per_token(store: Saliency, mix: Array) -> Array:
    return _ratio(mix, store.tokens)


def _mixed(store: Saliency, name: str, mix: Array) -> Array:
    return np.asarray(np.tensordot(_per_token(store, mix), store.arrays[name], 1))


def _ratio(one: Array, other: Array) -> Array:
    """one/other, and 0 where other is 0."""
    return np.divide(one, other, out=np.zeros_like(one), where=other > 0)
