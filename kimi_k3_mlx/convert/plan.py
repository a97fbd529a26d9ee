"""From headers to a `BuildPlan`: every tensor of every shard with its inputs, before a byte moves.

Input: an opened source, a profile, and a prune plan if experts go. Output: the plan, or an error
naming the tensor or layer that does not fit. One shard per text layer, then the globals, the
projector and the vision tower.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache

from converters.config import Dims, build_config, check_source, pruned_config, read_dims
from converters.dense import a_log, absorbed, copied, joined, joined_conv, narrowed, quantized
from converters.experts import kept_rows, renumbered, requantized, stacked
from converters.names import BANKS, TABLE, Entry
from kimi_k3_mlx.convert.shelf import Shelf
from kimi_k3_mlx.errors import UsageError
from kimi_k3_mlx.profile import Profile
from kimi_k3_mlx.prune_plan import LayerPlan, PrunePlan, check_plan
from kimi_k3_mlx.schema import (
    DTYPE_BYTES,
    MXFP4,
    BuildPlan,
    BuildTensor,
    Json,
    PlannedShard,
    Quantization,
    TensorInfo,
)
from kimi_k3_mlx.tensors.header import encode_header
from kimi_k3_mlx.tensors.source import Source, paused_collector

ALIGN = {"mlx": 16 * 1024, "pt": 8}


def plan_build(source: Source, profile: Profile, prune: PrunePlan | None = None) -> BuildPlan:
    """Lay out a whole build.

    Raises CheckpointError when the config is not a source's of this architecture and packed format,
    or a tensor is missing, unknown, or of another shape or dtype than the config says; UsageError
    when the prune plan is not for this model or the layout can't hold it.
    """
    dims = read_dims(source.config)
    check_source(source.config)
    if prune:
        check_plan(prune, dims.n_experts, dims.moe_layers, dims.top_k)
        _check_low_bank(prune, profile)
    shelf = Shelf(source, dims)
    recipe = _Recipe(shelf, profile, prune)
    with paused_collector():
        shards = tuple(recipe.moonshot() if profile.layout == "moonshot" else recipe.mlx())
    shelf.check_all_taken()
    recipe.check_overrides()
    return BuildPlan(
        source=source.id,
        profile=profile,
        config=recipe.config(shards),
        n_layers=dims.n_layers,
        shards=shards,
        prune=prune,
    )


def shard_header(shard: PlannedShard) -> bytes:
    """The bytes of a planned shard up to its data section, which starts on 16 KiB in a build."""
    return encode_header(shard.infos(), {"format": shard.format}, ALIGN[shard.format])


class _Recipe:
    """What becomes of each row of the table under a profile and a prune plan."""

    def __init__(self, shelf: Shelf, profile: Profile, prune: PrunePlan | None) -> None:
        self.shelf = shelf
        self.dims = shelf.dims
        self.profile = profile
        self.prune = prune
        self._matrices: list[str] = []
        self._narrow = tuple(f".{module}" for module in profile.narrow)
        self.count = prune.largest if prune and prune.pad_uniform else None
        """Experts of every layer, with those that pad it."""

    def config(self, shards: Iterable[PlannedShard]) -> Json:
        """The build's config.json."""
        config = self.shelf.source.config
        if self.profile.layout == "moonshot":
            return pruned_config(config, self.prune)
        modules = {
            tensor.name.removesuffix(".weight"): tensor.quantization
            for shard in shards
            for tensor in shard.tensors
            if tensor.quantization and tensor.name.endswith(".weight")
        }
        return build_config(config, self.dims, self.profile.experts, modules, self.prune)

    def check_overrides(self) -> None:
        """Raise UsageError for an override of the profile that is about no matrix of the trunk."""
        for pattern, _ in self.profile.overrides:
            if not any(fnmatchcase(module, pattern) for module in self._matrices):
                raise UsageError(
                    f"profile {self.profile.name}: override {pattern!r} matches no matrix that can "
                    "be quantized.",
                    "module paths are those of the build: kimi-k3 inspect BUILD --tensors GLOB",
                )

    def mlx(self) -> Iterator[PlannedShard]:
        """The shards of an MLX build."""
        parts = list(self.shelf.scopes())
        for number, (what, scopes, layer) in enumerate(parts, 1):
            tensors = [
                tensor
                for scope in scopes
                for numbers in self.shelf.numbers(scope, layer)
                for tensor in self._scope(scope, numbers)
            ]
            yield _mlx_shard(f"model-{number:05d}-of-{len(parts):06d}.safetensors", what, tensors)

    def moonshot(self) -> Iterator[PlannedShard]:
        """The source's own shards, without the experts that go."""
        if self.prune and not replace(self.prune, pad_uniform=False).is_uniform:
            raise UsageError(
                "the plan's layers have different numbers of experts or two banks, "
                "which Moonshot's layout can't say.",
                "make a uniform plan, or convert with this one to MLX: kimi-k3 convert",
            )
        shards: dict[str, tuple[str, list[BuildTensor]]] = {}
        weight_map = self.shelf.source.weight_map
        for what, scopes, layer in self.shelf.scopes():
            for scope in scopes:
                for tensor in self._verbatim(scope, layer):
                    shard = weight_map[tensor.spans[0].tensor]
                    shards.setdefault(shard, (what, []))[1].append(tensor)
        places = self.shelf.source.tensors
        for name, (what, tensors) in sorted(shards.items()):
            tensors.sort(key=lambda tensor: places[tensor.spans[0].tensor].begin)
            yield _shard(PlannedShard(name, what, 0, tuple(tensors), "pt"))

    def _verbatim(self, scope: str, parent: tuple[int, ...]) -> Iterator[BuildTensor]:
        for entry in _rows(scope):
            for numbers in self.shelf.numbers(scope, parent):
                if entry.how == "stack":
                    (layer,) = numbers
                    tensors = self.shelf.experts(entry, layer)
                    yield from renumbered(entry, layer, tensors, self._plan(layer).keep)
                    continue
                tensor = self.shelf.take(entry, *numbers)
                if entry.how == "rows" and self.prune:
                    keep = self._plan(*numbers).keep
                    yield kept_rows(tensor.name, entry.role, tensor, keep)
                else:
                    yield copied(tensor.name, entry.role, tensor)

    def _scope(self, scope: str, numbers: tuple[int, ...]) -> Iterator[BuildTensor]:
        if scope == "expert":
            yield from self._experts(*numbers)
            return
        for group in _groups(scope):
            tensors = [self.shelf.take(row, *numbers) for row in group]
            for tensor in self._trunk(group[0], tensors, numbers):
                yield from self._stored(group[0], tensor)

    def _experts(self, layer: int) -> Iterator[BuildTensor]:
        for packed_row, scale_row in zip(*_expert_rows(), strict=True):
            packed = self.shelf.experts(packed_row, layer)
            scales = self.shelf.experts(scale_row, layer)
            module = packed_row.build[0].format(layer).removesuffix(".weight")
            for bank, keep, quantization in self._banks(layer):
                name = module.replace(BANKS[0], bank)
                if quantization == MXFP4:
                    yield stacked(f"{name}.weight", packed, keep, self.count)
                    yield stacked(f"{name}.scales", scales, keep, self.count)
                else:
                    yield from requantized(name, packed, scales, keep, quantization, self.count)

    def _banks(self, layer: int) -> Iterator[tuple[str, tuple[int, ...], Quantization]]:
        plan = self._plan(layer)
        yield BANKS[0], plan.first, self.profile.experts
        if plan.low and self.prune and self.prune.low:
            yield BANKS[1], plan.low, self.prune.low

    def _plan(self, layer: int) -> LayerPlan:
        return self.prune.layers[layer] if self.prune else _everything(self.dims)

    def _trunk(
        self, entry: Entry, tensors: list[TensorInfo], numbers: tuple[int, ...]
    ) -> list[BuildTensor]:
        names = [name.format(*numbers) for name in entry.build]
        name, role = names[0], entry.role
        match entry.how:
            case "join":
                return [joined(name, role, tensors)]
            case "conv":
                return [joined_conv(name, role, tensors)]
            case "a_log":
                return [a_log(name, role, tensors[0], self.dims)]
            case "kv_b":
                return absorbed(names, role, tensors[0], self.dims)
            case "rows":
                order = self._plan(*numbers).order
                return [kept_rows(name, role, tensors[0], order, self.count)]
            case _:
                return [copied(name, role, tensors[0])]

    def _stored(self, entry: Entry, tensor: BuildTensor) -> list[BuildTensor]:
        """A trunk tensor as the profile wants it."""
        module = tensor.name.removesuffix(".weight")
        if entry.quantizable:
            self._matrices.append(module)
            return quantized(tensor, self.profile.format_of(module, entry.role))
        return [narrowed(tensor) if module.endswith(self._narrow) else tensor]


def _check_low_bank(prune: PrunePlan, profile: Profile) -> None:
    if prune.low and prune.low.bits >= profile.experts.bits:
        raise UsageError(
            f"the plan's second banks have {prune.low.bits} bits, the profile's experts have "
            f"{profile.experts.bits}: the second bank must be the smaller one.",
            "choose another --profile, or make the plan with fewer bits.",
        )


def _everything(dims: Dims) -> LayerPlan:
    return LayerPlan(tuple(range(dims.n_experts)))


@cache
def _rows(scope: str) -> list[Entry]:
    return [entry for entry in TABLE if entry.scope == scope]


@cache
def _groups(scope: str) -> list[list[Entry]]:
    """Table rows of a scope, those of one build tensor together, in the table's order."""
    groups: dict[tuple[str, ...], list[Entry]] = {}
    for entry in _rows(scope):
        groups.setdefault(entry.build, []).append(entry)
    return list(groups.values())


@cache
def _expert_rows() -> tuple[list[Entry], list[Entry]]:
    """The rows of packed codes, and those of scales in the same order."""
    rows = _rows("expert")
    packed = [row for row in rows if row.source.endswith("weight_packed")]
    return packed, [row for row in rows if row not in packed]


def _mlx_shard(name: str, what: str, tensors: list[BuildTensor]) -> PlannedShard:
    """Experts first and big first, so that at K3's sizes each expert begins on 16 KiB."""
    ordered = sorted(
        tensors,
        key=lambda tensor: (
            tensor.role != "expert",
            -DTYPE_BYTES[tensor.dtype],
            -tensor.n_bytes,
            tensor.name,
        ),
    )
    return _shard(PlannedShard(name, what, 0, tuple(ordered)))


def _shard(shard: PlannedShard) -> PlannedShard:
    return replace(shard, header_n_bytes=len(shard_header(shard)))
