"""Cuts prune plans out of a saliency store: which experts stay, and in which bank.

Input: a store and a `Recipe`. Output: a `PrunePlan` that says how it was chosen. How large the
build of a plan is, is asked in `reap.sizes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kimi_k3_mlx.errors import UsageError
from kimi_k3_mlx.profile import EXPERT_BITS, EXPERT_GROUPS
from kimi_k3_mlx.prune_plan import LayerPlan, PrunePlan, check_plan
from kimi_k3_mlx.reap.criteria import (
    Mask,
    Masses,
    criterion_named,
    mix_of,
    scores,
    standard_errors,
    super_experts,
)
from kimi_k3_mlx.reap.pairs import Array
from kimi_k3_mlx.reap.saliency import Saliency
from kimi_k3_mlx.reap.shape import near_the_cut
from kimi_k3_mlx.schema import Json, Quantization

MODES = ("uniform", "per-layer", "graded")
OBJECTIVES = ("mass", "max-min")
FLOOR = 4
"""Times top-k: fewer experts a layer leave the router no choice."""
STEPS, RATE = 16, 8.0
"""Of the search for the sources' weights under max-min."""
RULE = "above the 99.5 % quantile and a tenth of the largest norm, first 3/4 of the layers"

RETAINED = (
    "mean over layers of kept/all; coverage: over what the source's own best choice of as many "
    "experts retains; on the tokens calibrated on"
)
AT_THE_CUT = (
    "standard_error: of the last kept expert over its score, clustered by sequence, median of "
    "layers; ambiguous: experts on either side whose 95 % interval holds the border"
)

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Recipe:
    """How a plan is chosen.

    `mass` keeps the best experts under the sources' weights. `max-min` moves the weights: it looks
    for those under which the source that is covered worst is covered best, by multiplicative
    updates from the given ones, and keeps the best plan seen; `mass`'s is the first.
    """

    criterion: str = "reap"
    weights: Mapping[str, float] | None = None
    """By source; None: as many as its tokens."""
    masked: tuple[str, ...] = ()
    """Sources without a say."""
    objective: str = "mass"
    mode: str = "uniform"
    """`uniform`; `per-layer`: one total, filled by each layer's own share of its scores; `graded`:
    the best in the first bank, the others in one with fewer bits."""
    low: Quantization | None = None
    """The second bank, for `graded`."""
    floor: int | None = None
    """Fewest experts of a layer; None: four times top-k."""
    multiple: int = 1
    """Counts are multiples of this, for expert parallelism."""
    keep_super_experts: bool = False
    protected: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """By layer, experts that stay whatever their score."""


class Cut(NamedTuple):
    """A choice before it is a plan."""

    mix: Array
    scores: Array
    order: NDArray[np.int64]
    """Experts of each layer, the best first."""
    counts: Counts
    kept: Mask


class Planner:
    """A store and a recipe, ready to cut any number of tiers."""

    def __init__(self, store: Saliency, recipe: Recipe) -> None:
        _check_choices(recipe)
        self.store, self.recipe = store, recipe
        self.criterion = criterion_named(recipe.criterion)
        self.mix = mix_of(store, recipe.weights, recipe.masked)
        self.masses = Masses(store, self.criterion)
        # None where norms were not measured, unless the recipe asks for them.
        asked = recipe.keep_super_experts or "norm_max" in store.arrays
        self.supers = super_experts(store, self.mix) if asked else None
        self.floor = self._checked_floor()
        self.forced = self._forced()

    def cut(self, keep: int, first: int | None = None) -> PrunePlan:
        """Keep so many experts a layer (on average, if layers differ), `first` in the first bank.

        Raises UsageError when the recipe's floor, protections or multiple forbid it.
        """
        self.check_keep(keep)
        cut = self._most_even(keep) if self.recipe.objective == "max-min" else None
        cut = cut or self._choose(self.mix, keep)
        first = self._checked_first(keep, first)
        layers = {}
        for index, layer in enumerate(self.store.layers):
            ranked = cut.order[index, : cut.counts[index]]
            low = ranked[first:] if first else ()
            layers[layer] = LayerPlan(_ascending(ranked), _ascending(low))
        graded = any(layer.low for layer in layers.values())
        plan = PrunePlan(
            n_experts=self.store.n_experts,
            layers=layers,
            low=self.recipe.low if graded else None,
            chosen_by=self._chosen_by(cut, keep, first),
        )
        check_plan(plan, self.store.n_experts, self.store.layers, self.store.top_k)
        return plan

    def keeps(self) -> range:
        """The numbers of experts a layer that the recipe allows."""
        multiple = self.recipe.multiple
        low = max(self.floor, int(self.forced.sum(1).max()))
        keeps = range(-(-low // multiple) * multiple, self.store.n_experts + 1, multiple)
        if not keeps:
            raise UsageError(
                f"no multiple of {multiple} is from {low}, the floor, to {self.store.n_experts}."
            )
        return keeps

    def _choose(self, mix: Array, keep: int) -> Cut:
        values = scores(self.store, self.criterion, mix)
        order = np.argsort(-np.where(self.forced, np.inf, values), axis=1, kind="stable")
        counts = np.full(len(order), keep)
        if self.recipe.mode == "per-layer":
            counts = self._filled(values, order, keep)
        return Cut(mix, values, order, counts, _mask(order, counts))

    def _filled(self, values: Array, order: NDArray[np.int64], keep: int) -> Counts:
        """Counts of `keep` on average: floors, then the greatest shares of their layer's score."""
        multiple = self.recipe.multiple
        total = values.sum(axis=1, keepdims=True)
        shares = np.divide(values, total, out=np.zeros_like(values), where=total > 0)
        ranked = np.where(np.take_along_axis(self.forced, order, 1), np.inf, 0)
        ranked += np.take_along_axis(shares, order, 1)
        n_blocks = ranked.shape[1] // multiple
        blocks = ranked[:, : n_blocks * multiple].reshape(len(ranked), n_blocks, multiple).sum(2)
        floor = -(-self.floor // multiple)
        blocks[:, :floor] = np.inf
        wanted = keep * len(ranked) // multiple
        chosen = np.zeros(blocks.size, bool)
        chosen[np.argsort(-blocks, axis=None, kind="stable")[:wanted]] = True
        return np.asarray(chosen.reshape(blocks.shape).sum(1) * multiple, np.int64)

    def _most_even(self, keep: int) -> Cut:
        """The best of `STEPS` cuts, each with more weight on what the last one covered less."""
        heard = self.mix > 0
        mix, best, highest = self.mix, self._choose(self.mix, keep), -1.0
        for step in range(STEPS):
            cut = self._choose(mix, keep) if step else best
            coverage = self.masses.coverage(cut.kept)
            if (worst := float(coverage[heard].min())) > highest:
                best, highest = cut, worst
            behind = np.where(heard, coverage[heard].mean() - coverage, 0)
            mix = mix * np.exp(RATE / np.sqrt(step + 1) * behind)
            mix = mix / mix.sum()
        return best

    def _chosen_by(self, cut: Cut, keep: int, first: int | None) -> Json:
        """All that a reader of the plan must know to judge it."""
        recipe, store = self.recipe, self.store
        return {
            "criterion": self.criterion.to_json(),
            "objective": recipe.objective,
            "mode": recipe.mode,
            "keep": keep,
            "first": first,
            "weights": dict(zip(store.sources, cut.mix.tolist(), strict=True)),
            "asked_weights": None if recipe.weights is None else dict(recipe.weights),
            "masked": list(recipe.masked),
            "protections": self._protections(cut),
            "statistics": {
                "model": store.model,
                "tokens": dict(zip(store.sources, map(int, store.tokens), strict=True)),
                "runs": list(store.runs),
            },
            "retained": self._retained(cut, first),
            "cut": self._at_the_cut(cut),
        }

    def _protections(self, cut: Cut) -> Json:
        recipe = self.recipe
        return {
            "floor": self.floor,
            "multiple": recipe.multiple,
            "listed": {str(layer): list(experts) for layer, experts in recipe.protected.items()},
            "super_experts": {
                "rule": RULE,
                "protected": recipe.keep_super_experts,
                "flagged": None if self.supers is None else int(self.supers.sum()),
                "dropped": None if self.supers is None else int((self.supers & ~cut.kept).sum()),
            },
            "never_routed": int((self.store.arrays["pairs"].sum(axis=0) == 0).sum()),
        }

    def _retained(self, cut: Cut, first: int | None) -> Json:
        """Of each source's mass; one without tokens was not measured."""
        named: dict[str, Json] = {}
        masses = self.masses.retained(cut.kept), self.masses.coverage(cut.kept)
        full = self.masses.retained(_mask(cut.order, np.minimum(cut.counts, first or cut.counts)))
        rows = zip(self.store.sources, self.masses.measured, *masses, full, strict=True)
        for source, measured, retained, coverage, at_full_bits in rows:
            if measured:
                named[source] = {"mass": float(retained), "coverage": float(coverage)}
                if first is not None:
                    named[source]["at_full_bits"] = float(at_full_bits)
        return {
            "of": f"{self.criterion.mass}, {RETAINED}",
            "by_source": named,
            "worst": min(named, key=lambda source: float(named[source]["coverage"])),
        }

    def _at_the_cut(self, cut: Cut) -> Json:
        """How sure the border is: experts whose 95 % interval straddles it."""
        errors = standard_errors(self.store, self.criterion, cut.mix)
        slots, n_experts = int(cut.counts.sum()), cut.order.shape[1]
        found: Json = {"slots": slots, "standard_error": None, "ambiguous": None}
        rows = np.flatnonzero(cut.counts < n_experts)
        if errors is None or not len(rows):
            return found if errors is None else found | {"ambiguous": 0, "ambiguous_kept": 0}
        near = near_the_cut(cut.scores, errors, cut.kept, self.forced)
        last = cut.order[rows, cut.counts[rows] - 1]
        own = cut.scores[rows, last]
        relative = np.divide(errors[rows, last], own, out=np.zeros_like(own), where=own > 0)
        return found | {
            "standard_error": float(np.median(relative)),
            "ambiguous": int(near.sum()),
            "ambiguous_kept": int((near & cut.kept).sum()),
            "of": AT_THE_CUT,
        }

    def _forced(self) -> Mask:
        store, recipe = self.store, self.recipe
        forced = np.zeros((len(store.layers), store.n_experts), np.bool_)
        if self.supers is not None and recipe.keep_super_experts:
            forced |= self.supers
        for layer, experts in recipe.protected.items():
            if layer not in store.layers:
                raise UsageError(f"layer {layer} has no routed experts to protect.")
            for expert in experts:
                if not 0 <= expert < store.n_experts:
                    raise UsageError(
                        f"expert {expert} of layer {layer} can't be protected: "
                        f"the layers have {store.n_experts}."
                    )
                forced[store.layers.index(layer), expert] = True
        return forced

    def _checked_floor(self) -> int:
        store, floor = self.store, self.recipe.floor
        if floor is None:
            return min(FLOOR * store.top_k, store.n_experts)
        if not store.top_k <= floor <= store.n_experts:
            raise UsageError(
                f"the floor is {floor}, expected {store.top_k} (top-k) to {store.n_experts}."
            )
        return floor

    def check_keep(self, keep: int) -> None:
        """Raise UsageError when the recipe forbids to keep so many."""
        store, multiple = self.store, self.recipe.multiple
        if keep > store.n_experts:
            raise UsageError(f"keep is {keep}, but the layers have {store.n_experts} experts.")
        can_be_lower = self.floor > store.top_k
        if keep < self.floor:
            raise UsageError(
                f"keep is {keep}, below the floor of {self.floor} experts a layer "
                f"(top-k is {store.top_k}).",
                "keep more" + (", or cut a plan: kimi-k3 plan --floor" if can_be_lower else ""),
            )
        if keep % multiple:
            raise UsageError(f"keep is {keep}, not a multiple of {multiple}.")
        forced = self.forced.sum(1)
        if (forced > keep).any():
            layer = int(forced.argmax())
            raise UsageError(
                f"{forced[layer]} experts of layer {store.layers[layer]} are protected, "
                f"but keep is {keep}."
            )

    def _checked_first(self, keep: int, first: int | None) -> int | None:
        if (self.recipe.mode == "graded") != (first is not None):
            raise UsageError("the first bank has a size of its own in mode graded, and only there.")
        if first is not None and not self.store.top_k <= first <= keep:
            raise UsageError(
                f"the first bank has {first} experts, expected {self.store.top_k} to {keep}."
            )
        return first


def _check_choices(recipe: Recipe) -> None:
    for what, known in (("mode", MODES), ("objective", OBJECTIVES)):
        if (value := getattr(recipe, what)) not in known:
            raise UsageError(f"there is no {what} {value!r}.", f"known: {', '.join(known)}.")
    if (recipe.mode == "graded") != (recipe.low is not None):
        raise UsageError("mode graded needs the format of its second bank, other modes have none.")
    if (low := recipe.low) and (low.bits not in EXPERT_BITS or low.group_size not in EXPERT_GROUPS):
        raise UsageError(
            f"a second bank can't have {low}.",
            f"known: {' or '.join(map(str, EXPERT_BITS))} bits, groups of "
            f"{', '.join(map(str, EXPERT_GROUPS))}.",
        )
    if recipe.multiple < 1:
        raise UsageError(f"counts can't be multiples of {recipe.multiple}.")


def _mask(order: NDArray[np.int64], counts: Counts) -> Mask:
    """The first experts of each layer's order, as many as it has."""
    mask = np.zeros(order.shape, bool)
    np.put_along_axis(mask, order, np.arange(order.shape[1]) < counts[:, None], 1)
    return mask


def _ascending(experts: NDArray[np.int64] | tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(int(expert) for expert in experts))
