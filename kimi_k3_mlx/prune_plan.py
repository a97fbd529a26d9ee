"""The prune plan: which experts stay, layer by layer, and how that was chosen. One JSON file.

It is the only thing that calibration hands to conversion. A plan is checked whole against the model
that it is for when it is loaded: a bad one is refused with its layer and the rule it breaks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from kimi_k3_mlx.errors import UsageError
from kimi_k3_mlx.profile import EXPERT_BITS, EXPERT_GROUPS, affine
from kimi_k3_mlx.schema import Json, Quantization, canonical

KIND = "kimi_k3_mlx.prune_plan"
FOR_THIS_MODEL = "make a plan from statistics of this model."


@dataclass(frozen=True)
class LayerPlan:
    """The experts of one layer that stay, by their original numbers, ascending."""

    keep: tuple[int, ...]
    low: tuple[int, ...] = ()
    """Those of them that go into the second bank, with fewer bits."""

    @property
    def first(self) -> tuple[int, ...]:
        """The experts of the first bank."""
        low = set(self.low)
        return tuple(expert for expert in self.keep if expert not in low)

    def to_json(self) -> Json:
        """A JSON object; without a second bank, without `low`."""
        return {"keep": list(self.keep)} | ({"low": list(self.low)} if self.low else {})

    @property
    def order(self) -> tuple[int, ...]:
        """All experts that stay, in the order of the router's rows."""
        return self.first + self.low


@dataclass(frozen=True)
class PrunePlan:
    """A whole plan. `layers` maps MoE layers, counted from 0, to what stays of them."""

    n_experts: int
    """Experts of the model that the plan is for, in each of its layers."""
    layers: dict[int, LayerPlan] = field(repr=False)
    low: Quantization | None = None
    """How the second banks are stored."""
    pad_uniform: bool = False
    """Fill every layer up to the largest count with experts that are never chosen."""
    chosen_by: Json = field(default_factory=dict, repr=False)
    """Criterion, statistics and options, for people."""
    version: int = 1

    @cached_property
    def sha256(self) -> str:
        """Identity of what stays, however it was chosen."""
        return hashlib.sha256(canonical(self.to_json() | {"chosen_by": None})).hexdigest()

    @property
    def largest(self) -> int:
        """The largest number of experts in a layer."""
        return max(len(layer.keep) for layer in self.layers.values())

    @property
    def is_uniform(self) -> bool:
        """Whether stock mlx-lm can load what the plan makes: one number of experts, one bank."""
        counts = {len(layer.keep) for layer in self.layers.values()}
        graded = any(layer.low for layer in self.layers.values())
        return not graded and (self.pad_uniform or len(counts) == 1)

    def to_json(self) -> Json:
        """A JSON object."""
        return {
            "kind": KIND,
            "version": self.version,
            "n_experts": self.n_experts,
            "pad_uniform": self.pad_uniform,
            "low": self.low and self.low.to_json(),
            "chosen_by": self.chosen_by,
            "layers": {str(n): layer.to_json() for n, layer in sorted(self.layers.items())},
        }

    def to_text(self) -> str:
        """The plan's file: JSON with a line for each layer."""
        value = self.to_json()
        layers = value.pop("layers")
        head = json.dumps(value, indent=2, ensure_ascii=False).removesuffix("\n}")
        lines = ",\n".join(f'    "{n}": {json.dumps(layer)}' for n, layer in layers.items())
        return f'{head},\n  "layers": {{\n{lines}\n  }}\n}}\n'


def read_plan(text: str, where: str) -> PrunePlan:
    """Read a plan's file; raise UsageError, naming the field, when it is none."""
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_no_number)
    except (RecursionError, ValueError) as error:
        raise UsageError(f"plan {where} is not JSON: {error}.") from error
    if not isinstance(value, dict) or value.get("kind") != KIND:
        raise UsageError(f"{where} is not a prune plan: its kind is not {KIND!r}.")
    if value.get("version") != PrunePlan.version:
        raise UsageError(
            f"plan {where} has version {value.get('version')}, expected {PrunePlan.version}.",
            "use the kimi-k3-mlx that made this plan.",
        )
    try:
        return PrunePlan(
            n_experts=_whole(value["n_experts"]),
            layers={_number(key): _layer(layer) for key, layer in value["layers"].items()},
            low=_low(value.get("low"), where),
            pad_uniform=bool(value.get("pad_uniform", False)),
            chosen_by=dict(value.get("chosen_by", {})),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        fact = f"lacks the field {error}" if isinstance(error, KeyError) else f"is damaged: {error}"
        raise UsageError(f"plan {where} {fact}.") from error


def keep_first(count: int, n_experts: int, layers: Iterable[int]) -> PrunePlan:
    """A plan of the right size that chose nothing: for estimates, which depend on counts only."""
    layer = LayerPlan(tuple(range(min(count, n_experts))))
    return PrunePlan(n_experts, dict.fromkeys(layers, layer), chosen_by={"criterion": "none"})


def check_plan(plan: PrunePlan, n_experts: int, moe_layers: Iterable[int], top_k: int) -> None:
    """Raise UsageError, naming layer and rule, unless the plan is one for this model."""
    if plan.n_experts != n_experts:
        raise UsageError(
            f"the plan is for a model with {plan.n_experts} experts a layer, "
            f"this one has {n_experts}.",
            FOR_THIS_MODEL,
        )
    expected = set(moe_layers)
    for layer in sorted(plan.layers.keys() ^ expected):
        fact = "has no routed experts" if layer in plan.layers else "is missing in the plan"
        raise UsageError(f"plan: layer {layer} {fact}.", FOR_THIS_MODEL)
    for layer, kept in sorted(plan.layers.items()):
        check_keep(layer, kept.keep, n_experts, top_k)
        _check_banks(layer, kept, plan)


def check_keep(layer: int, keep: Sequence[int], n_experts: int, top_k: int) -> None:
    """Raise UsageError unless `keep` ascends without repeats, in range, and has top-k at least."""
    if len(keep) < top_k:
        raise UsageError(
            f"plan keeps {len(keep)} experts in layer {layer} "
            f"but the router selects {top_k} per token.",
            f"raise --keep to at least {top_k} ({4 * top_k} recommended).",
        )
    for before, expert in zip((-1, *keep), keep, strict=False):
        if expert <= before:
            raise UsageError(
                f"plan lists expert {expert} after {before} in layer {layer}: "
                "experts must ascend without repeats."
            )
        if expert >= n_experts:
            raise UsageError(
                f"plan keeps expert {expert} in layer {layer}, which has {n_experts} experts."
            )


def _check_banks(layer: int, kept: LayerPlan, plan: PrunePlan) -> None:
    if not kept.low:
        return
    if plan.low is None:
        raise UsageError(f"plan: layer {layer} has a second bank, but the plan has no field 'low'.")
    if plan.pad_uniform:
        raise UsageError(f"plan: layer {layer} has a second bank, which can't be padded.")
    if list(kept.low) != sorted(set(kept.low) & set(kept.keep)):
        raise UsageError(
            f"plan: 'low' of layer {layer} must list, ascending, experts that 'keep' lists."
        )
    if len(kept.low) == len(kept.keep):
        raise UsageError(f"plan: layer {layer} has all its experts in the second bank.")


def _object(pairs: list[tuple[str, object]]) -> Json:
    """A JSON object without repeated fields, of which Python would keep the last."""
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{max(names, key=names.count)!r} occurs twice in an object")
    return value


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON's")


def _number(key: str) -> int:
    if not key.isdecimal() or str(int(key)) != key:
        raise ValueError(f"layer {key[:40]!r} is not a plain number")
    return int(key)


def _low(value: Json | None, where: str) -> Quantization | None:
    if value is None:
        return None
    if value.get("mode", "affine") != "affine":
        raise ValueError(f"the mode of 'low' is {str(value['mode'])[:40]!r}, expected 'affine'")
    sizes = {name: item for name, item in value.items() if name != "mode"}
    return affine(sizes, f"plan {where}: 'low'", EXPERT_BITS, EXPERT_GROUPS)


def _layer(value: Json) -> LayerPlan:
    keep, low = value["keep"], value.get("low", [])
    return LayerPlan(tuple(map(_whole, keep)), tuple(map(_whole, low)))


def _whole(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{str(value)[:40]!r} is not a whole number")
    return value
