"""The largest plan whose build fits: into so many bytes of files, or into a Mac's memory.

Input: a planner, the source, a profile and a `Limit`. Output: the plan and its `BuildPlan`. The
answer is `convert`'s own: a formula only says where to look, and what it finds is planned whole.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from converters.config import read_dims
from kimi_k3_mlx.convert.memory import Running, running
from kimi_k3_mlx.convert.plan import plan_build
from kimi_k3_mlx.errors import DoesNotFitError, UsageError
from kimi_k3_mlx.profile import Profile
from kimi_k3_mlx.prune_plan import LayerPlan, PrunePlan
from kimi_k3_mlx.reap.planner import Planner
from kimi_k3_mlx.reap.saliency import UNKNOWN, Saliency
from kimi_k3_mlx.schema import BuildPlan, Json, Quantization
from kimi_k3_mlx.tensors.source import Source
from kimi_k3_mlx.units import format_bytes

RUNS = ("yes", "raise")
"""Verdicts of `MacFit` that count: weights wired, without a warning of mlx-lm."""


@dataclass(frozen=True)
class Limit:
    """Either a number of bytes for the shards, or a Mac that has to run the build."""

    n_bytes: int | None = None
    ram_gib: int | None = None
    context: int = 32_768

    def allows(self, running: Running, n_files: int) -> bool:
        """Whether a build of so many bytes is small enough."""
        small = self.n_bytes is None or n_files <= self.n_bytes
        runs = self.ram_gib is None or running.on(self.ram_gib).verdict in RUNS
        return small and runs

    def __str__(self) -> str:
        parts = []
        if self.n_bytes is not None:
            parts.append(f"{format_bytes(self.n_bytes)} ({self.n_bytes:,} bytes)")
        if self.ram_gib is not None:
            parts.append(f"a Mac with {self.ram_gib} GiB and {self.context:,} tokens of context")
        return " and ".join(parts)


@dataclass(frozen=True)
class Sizes:
    """Tensor bytes of a build by the number of its experts in all layers together: exact."""

    n_trunk: int
    n_expert: int
    """Of one expert of the first bank, with its row of the router."""
    n_low: int
    """Of one of the second bank."""

    def total(self, n_first: int, n_low: int = 0) -> int:
        """`BuildPlan.total_size`."""
        return self.n_trunk + n_first * self.n_expert + n_low * self.n_low


def measured(source: Source, profile: Profile, low: Quantization | None = None) -> Sizes:
    """The sizes, from two small plans, or three."""
    dims = read_dims(source.config)
    top_k, n_layers = dims.top_k, len(dims.moe_layers)

    def total(keep: int, n_low: int = 0) -> int:
        experts = tuple(range(keep))
        layer = LayerPlan(experts, experts[keep - n_low :])
        layers = dict.fromkeys(dims.moe_layers, layer)
        plan = PrunePlan(dims.n_experts, layers, low=low if n_low else None)
        return plan_build(source, profile, plan).total_size

    if top_k == dims.n_experts:
        return Sizes(total(top_k), 0, 0)
    small, more = total(top_k), total(top_k + 1)
    n_expert = (more - small) // n_layers
    n_low = (total(top_k + 1, 1) - small) // n_layers if low else 0
    return Sizes(small - n_layers * top_k * n_expert, n_expert, n_low)


def largest(
    planner: Planner, source: Source, profile: Profile, limit: Limit, keep: int | None = None
) -> tuple[PrunePlan, BuildPlan]:
    """The plan with the most experts, or in mode graded the most experts in the first bank of
    `keep` (all by default), whose build is within the limit.

    Raises DoesNotFitError when the smallest that the recipe allows is too large.
    """
    graded = planner.recipe.mode == "graded"
    sizes = measured(source, profile, planner.recipe.low)
    dims = read_dims(source.config)
    n_layers = len(dims.moe_layers)
    kept = planner.keeps()[-1] if keep is None else keep
    planner.check_keep(kept)
    numbers: Sequence[int] = range(dims.top_k, kept + 1) if graded else planner.keeps()

    def too_large(number: int) -> bool:
        """By tensor bytes alone: headers come on top."""
        n_low = kept - number if graded else 0
        total = sizes.total(n_layers * number, n_layers * n_low)
        return not limit.allows(running(dims, total, limit.context), total)

    index = bisect_right(numbers, False, key=too_large)
    build = None
    for number in reversed(numbers[:index]):
        plan = planner.cut(kept, number) if graded else planner.cut(number)
        build = plan_build(source, profile, plan)
        memory = running(dims, build.total_size, limit.context)
        if limit.allows(memory, build.n_bytes):
            return sized(plan, build, memory, limit), build
    smallest = build.n_bytes if build else sizes.total(n_layers * numbers[0])
    raise DoesNotFitError(
        f"{numbers[0]} experts a layer, the fewest that the recipe allows, take "
        f"{format_bytes(smallest)}: more than {limit} has room for.",
        "choose a profile with fewer bits, or lower --floor.",
    )


def check_same_model(store: Saliency, source: Source) -> None:
    """Raise UsageError unless the statistics are of this checkpoint, by its headers' hash.

    Of those that don't say which they are of, experts, top-k and MoE layers are compared.
    """
    if store.model == UNKNOWN:
        dims = read_dims(source.config)
        theirs = store.n_experts, store.top_k, tuple(store.layers)
        if theirs != (dims.n_experts, dims.top_k, tuple(dims.moe_layers)):
            raise UsageError(
                f"the statistics are of {store.n_experts} experts, {store.top_k} a token, in "
                f"{len(store.layers)} layers; {source.where} has {dims.n_experts}, {dims.top_k} "
                f"and {len(dims.moe_layers)}, or other layers.",
                "give the checkpoint that was calibrated.",
            )
    elif store.model != source.id.headers_sha256:
        raise UsageError(
            f"the statistics are of another checkpoint ({store.model[:12]}) "
            f"than {source.where} ({source.id.headers_sha256[:12]}).",
            "give the checkpoint that was calibrated.",
        )


def only_sizes(store: Saliency) -> str | None:
    """What `check_same_model` could not check, in words."""
    if store.model != UNKNOWN:
        return None
    return "the statistics don't say which checkpoint they are of: only its sizes were compared."


def with_size(
    plan: PrunePlan, source: Source, profile: Profile, context: int
) -> tuple[PrunePlan, BuildPlan]:
    """The plan, with the sizes of its build; and the build."""
    build = plan_build(source, profile, plan)
    memory = running(read_dims(source.config), build.total_size, context)
    return sized(plan, build, memory, None), build


def sized(plan: PrunePlan, build: BuildPlan, memory: Running, limit: Limit | None) -> PrunePlan:
    """The plan, with the sizes of its build among what it says of itself."""
    size: Json = {
        "profile": build.profile.name,
        "n_bytes": build.n_bytes,
        "total_size": build.total_size,
        "running": memory.n_bytes,
        "context": memory.context,
        "limit": limit and asdict(limit),
    }
    return replace(plan, chosen_by=plan.chosen_by | {"size": size})
