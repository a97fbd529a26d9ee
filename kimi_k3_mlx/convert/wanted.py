"""What a build must hold, worked out from its source by `naive`: its tensors and its config.

Input: an opened source and build, the layout. Output: `Wanted`s by build tensor, or MismatchError
for a tensor that the build lacks, has too many or has in another form. Reads no tensor byte, and
shares no code with `converters`.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from dataclasses import dataclass, field
from random import Random

from kimi_k3_mlx.convert.naive import Form, Layout, Place
from kimi_k3_mlx.errors import MismatchError
from kimi_k3_mlx.prune_plan import PrunePlan
from kimi_k3_mlx.schema import Json, Quantization
from kimi_k3_mlx.tensors.local import LocalSource
from kimi_k3_mlx.tensors.source import Source

AGAIN = "make it again with --overwrite."
DROPPED = ("quantization_config", "auto_map", "model_file")


@dataclass
class Wanted:
    """A build tensor and all that fills it, in order."""

    form: Form
    places: list[Place] = field(default_factory=list)

    @property
    def n_bytes(self) -> int:
        """Bytes of the values that fill it, padding included."""
        if self.form.padded:
            return self.form.n_bytes
        return sum(place.n_bytes for place in self.places)


def wanted_tensors(source: Source, build: LocalSource, layout: Layout) -> dict[str, Wanted]:
    """What a build must hold, by name (`….weight` for quantized ones).

    Raises MismatchError when the build lacks a tensor, has one too many, or one in another form.
    """
    wanted: dict[str, Wanted] = {}
    for tensor in source.tensors.values():
        for form, place in layout.places(tensor):
            if form.build not in wanted:
                _check_parts(build, form, tensor.name)
                wanted[form.build] = Wanted(form)
            wanted[form.build].places.append(place)
    names = {name for tensor in wanted.values() for name in tensor.form.parts()}
    for name, found in build.tensors.items():
        if name not in names:
            raise _without_counterpart(name, found.n_bytes, found.n_bytes)
    for filled in wanted.values():
        _check_filled(filled)
    return wanted


def sample_experts(wanted: dict[str, Wanted], count: int, seed: str) -> dict[str, Wanted]:
    """The same with `count` experts of each layer, in the build's order, and no padding."""
    numbers: dict[int, set[int]] = defaultdict(set)
    for tensor in wanted.values():
        for place in tensor.places:
            if place.expert:
                numbers[place.expert[0]].add(place.expert[1])
    chosen = {
        (layer, number)
        for layer, all_numbers in sorted(numbers.items())
        for number in Random(f"{seed} {layer}").sample(
            sorted(all_numbers), min(count, len(all_numbers))
        )
    }
    sampled = {}
    for name, tensor in wanted.items():
        places = [place for place in tensor.places if place.expert in chosen]
        if not any(place.expert for place in tensor.places):
            sampled[name] = tensor
        elif places:
            sampled[name] = Wanted(tensor.form._replace(padded=False), places)
    return sampled


def expected_config(
    config: Json, layout: Layout, prune: PrunePlan | None, forms: list[Form]
) -> Json:
    """A source's config as a build must have it."""
    wanted = copy.deepcopy(config)
    text, counts = wanted["text_config"], {}
    if prune:
        counts = {layer: len(plan.keep) for layer, plan in prune.layers.items()}
        text["num_experts"] = max(counts.values())
    if layout.profile.layout == "moonshot":
        return wanted
    for holder in (wanted, text):
        for name in DROPPED:
            holder.pop(name, None)
    experts = layout.profile.experts
    wanted["quantization"] = _json(experts) | {
        form.build.removesuffix(".weight"): _json(form.stored)
        for form in forms
        if form.stored and form.stored != experts
    }
    low = {layer: len(plan.low) for layer, plan in prune.layers.items()} if prune else {}
    is_ragged = len(set(counts.values())) > 1 and not (prune and prune.pad_uniform)
    if is_ragged or any(low.values()):
        layers = range(text["num_hidden_layers"])
        wanted["model_file"] = "kimi_k3.py"
        text["expert_counts"] = [counts.get(layer, 0) for layer in layers]
        if any(low.values()):
            text["low_expert_counts"] = [low.get(layer, 0) for layer in layers]
    return wanted


def _json(stored: Quantization) -> Json:
    return {"mode": stored.mode, "bits": stored.bits, "group_size": stored.group_size}


def _check_parts(build: LocalSource, form: Form, source: str) -> None:
    for name, (dtype, shape) in form.parts().items():
        found = build.tensors.get(name)
        if found is None:
            raise MismatchError(
                f"tensor {name} is missing in the build (source tensor {source}).", AGAIN
            )
        if (found.dtype, found.shape) != (dtype, shape):
            raise MismatchError(
                f"tensor {name}: {found.dtype} {found.shape}, expected {dtype} {shape}.", AGAIN
            )


def _check_filled(wanted: Wanted) -> None:
    """Sort the places and see that they leave no gap."""
    wanted.places.sort(key=lambda place: place.begin)
    position, n_bytes = 0, wanted.form.n_bytes
    for place in wanted.places:
        if place.begin != position:
            raise _without_counterpart(wanted.form.build, n_bytes - position, n_bytes)
        position += place.n_bytes
    if position != n_bytes and not wanted.form.padded:
        raise _without_counterpart(wanted.form.build, n_bytes - position, n_bytes)


def _without_counterpart(name: str, n_missing: int, n_bytes: int) -> MismatchError:
    return MismatchError(
        f"tensor {name}: {n_missing:,} of its {n_bytes:,} bytes have no counterpart in the source.",
        AGAIN,
    )
