"""One plan against one store: what it retains of each source, how sure its border is, its layers.

Input: a store and a plan. Output: JSON values. A plan is judged by the criterion and the weights
that it says it was chosen by; masses of different sums are never in one table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kimi_k3_mlx.errors import UsageError
from kimi_k3_mlx.prune_plan import PrunePlan, check_plan
from kimi_k3_mlx.reap.criteria import (
    CRITERIA,
    Criterion,
    Mask,
    Masses,
    mix_of,
    scores,
    standard_errors,
    super_experts,
)
from kimi_k3_mlx.reap.overlap import held_out
from kimi_k3_mlx.reap.pairs import Array
from kimi_k3_mlx.reap.saliency import TOGETHER, Saliency
from kimi_k3_mlx.reap.shape import curve, favoured, gini, mean_crossing, near_the_cut
from kimi_k3_mlx.schema import Json

UNSAID = "reap"
"""The criterion by which a plan is judged that doesn't say by which it was chosen."""
MAX_WEIGHT = 1e100
"""Of a source: sums of more might not be finite."""
POINTS = 33
"""Of the curves of retained mass."""


class NamedPlan(NamedTuple):
    """A plan under the name that the report calls it by."""

    name: str
    plan: PrunePlan


class Judged(NamedTuple):
    """A plan and what it is judged by."""

    name: str
    plan: PrunePlan
    criterion: Criterion
    is_own: bool
    """Whether the plan says that it was chosen by this criterion."""
    mix: Array
    kept: Mask


def judge(store: Saliency, item: NamedPlan) -> Judged:
    """The plan's own criterion and weights, as far as it says them and the store knows them."""
    name, plan = item
    check_plan(plan, store.n_experts, store.layers, store.top_k)
    said = plan.chosen_by
    model = object_in(said.get("statistics")).get("model", store.model)
    if model != store.model:
        raise UsageError(
            f"plan {name} was chosen for model {str(model)[:12]}, "
            f"the statistics are of {store.model[:12]}.",
            "give the statistics of the plan's model with --stats.",
        )
    own = CRITERIA.get(str(object_in(said.get("criterion")).get("name")))
    mix = np.array([weight_of(source, item) for source in store.sources])
    mix = np.where(store.tokens > 0, mix, 0)
    mix = mix / mix.sum() if mix.sum() > 0 else mix_of(store)
    kept = np.zeros((len(store.layers), store.n_experts), bool)
    for row, layer in enumerate(store.layers):
        kept[row, list(plan.layers[layer].keep)] = True
    return Judged(name, plan, own or CRITERIA[UNSAID], own is not None, mix, kept)


def weight_of(source: str, item: NamedPlan) -> float:
    """What the plan weighs a source by, 0 if it doesn't say; UsageError for what is no weight."""
    weight = object_in(item.plan.chosen_by.get("weights")).get(source, 0)
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not is_number or not 0 <= weight <= MAX_WEIGHT:
        raise UsageError(
            f"plan {item.name}: chosen_by.weights.{source} is {weight!r}, which is no weight.",
            "cut the plan again: kimi-k3 plan",
        )
    return float(weight)


def object_in(value: object) -> Json:
    """A JSON object, empty when the value is none: provenance is for people and may be anything."""
    return value if isinstance(value, dict) else {}


def chosen_from(plan: PrunePlan, store: Saliency) -> str:
    """Whether the plan was chosen from the tokens that judge it: or what it says of it."""
    runs = object_in(plan.chosen_by.get("statistics")).get("runs")
    if not isinstance(runs, list) or not runs:
        return "unknown"
    shared = [run for run in runs if run in store.runs]
    if not shared:
        return "other runs"
    return "these runs" if len(shared) == len(runs) == len(store.runs) else "some of these runs"


def plan_json(store: Saliency, item: Judged) -> Json:
    """What the plan retains of each source, how sure its border is, and its layers."""
    counts = item.kept.sum(1)
    values = scores(store, item.criterion, item.mix)
    errors = standard_errors(store, item.criterion, item.mix)
    near = None if errors is None else near_the_cut(values, errors, item.kept, forced(store, item))
    retained = retained_json(store, item, counts)
    return {
        "name": item.name,
        "sha256": item.plan.sha256,
        "criterion": item.criterion.to_json() | {"mass": item.criterion.mass},
        "criterion_is_its_own": item.is_own,
        "chosen_from": chosen_from(item.plan, store),
        "weights": dict(zip(store.sources, item.mix.tolist(), strict=True)),
        "kept": {"mean": float(counts.mean()), "min": int(counts.min()), "max": int(counts.max())},
        "retained": retained,
        "worst": min(retained, key=lambda source: float(retained[source]["coverage"])),
        "cut": {
            "slots": int(counts.sum()),
            "ambiguous": None if near is None else int(near.sum()),
            "ambiguous_kept": None if near is None else int((near & item.kept).sum()),
        },
        "partners": partners(store, item.kept),
        "by_layer": {
            "kept": counts.tolist(),
            "gini": gini(values).tolist(),
            "mean_crossing": mean_crossing(values).tolist(),
            "ambiguous": None if near is None else near.sum(1).tolist(),
        },
    }


def forced(store: Saliency, item: Judged) -> Mask:
    """Experts that the plan says it keeps whatever their score."""
    guards = object_in(item.plan.chosen_by.get("protections"))
    found = np.zeros_like(item.kept)
    listed = object_in(guards.get("listed"))
    for row, layer in enumerate(store.layers):
        experts = listed.get(str(layer))
        numbers = [it for it in experts if isinstance(it, int)] if isinstance(experts, list) else []
        found[row] = np.isin(np.arange(store.n_experts), numbers)
    outlying = object_in(guards.get("super_experts")).get("protected") is True
    if outlying and "norm_max" in store.arrays:
        found |= super_experts(store, item.mix)
    return found & item.kept


def partners(store: Saliency, kept: Mask) -> Json | None:
    """Of the experts that tokens chose beside a dropped one, and beside any: the share kept."""
    together = store.arrays.get(TOGETHER)
    if together is None or kept.all():
        return None
    found = np.zeros((2, 2))
    for counts, stays in zip(together, kept, strict=True):
        with_kept = counts[:, stays].sum(1, dtype=np.float64)
        with_any = counts.sum(1, dtype=np.float64)
        found += [[part[~stays].sum(), part.sum()] for part in (with_kept, with_any)]
    if not found[1, 0]:
        return None
    return dict(zip(("kept", "kept_of_all"), (found[0] / found[1]).tolist(), strict=True))


def retained_json(store: Saliency, item: Judged, counts: NDArray[np.int64]) -> Json:
    """By source: mass, coverage, both again held out, and the experts that it favours."""
    masses = Masses(store, item.criterion)
    mass, coverage = masses.retained(item.kept), masses.coverage(item.kept)
    unseen = held_out(store, item.criterion, item.mix, counts)
    likes = favoured(store)
    found: Json = {}
    for number, name in enumerate(store.sources):
        if not masses.measured[number]:
            continue
        pair = [float("nan")] * 2 if unseen is None else [float(row[number]) for row in unseen]
        found[name] = {
            "mass": float(mass[number]),
            "coverage": float(coverage[number]),
            "held_out_mass": None if np.isnan(pair[0]) else pair[0],
            "held_out_coverage": None if np.isnan(pair[1]) else pair[1],
            "favoured": int(likes[number].sum()),
            "favoured_dropped": int((likes[number] & ~item.kept).sum()),
        }
    return found


def curves(store: Saliency, judged: Sequence[Judged]) -> list[Json]:
    """For each mass that a plan is judged by: what every source's own best choices retain."""
    counts = np.unique(np.linspace(0, store.n_experts, POINTS).round().astype(np.int64))
    found = []
    for total in dict.fromkeys(item.criterion.total for item in judged):
        members = [item for item in judged if item.criterion.total == total]
        masses = Masses(store, members[0].criterion)
        rows = curve(masses, counts).tolist()
        found.append(
            {
                "mass": members[0].criterion.mass,
                "total": total,
                "plans": [item.name for item in members],
                "experts": counts.tolist(),
                "by_source": {
                    name: row
                    for name, row, known in zip(store.sources, rows, masses.measured, strict=True)
                    if known
                },
            }
        )
    return found
