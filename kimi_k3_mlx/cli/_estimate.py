"""What a planned build is and needs, as text and as JSON: for `--dry-run` and for `estimate`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kimi_k3_mlx.cli._output import table
from kimi_k3_mlx.units import format_bytes, format_duration, format_rate

if TYPE_CHECKING:
    from kimi_k3_mlx.convert.estimate import Estimate
    from kimi_k3_mlx.convert.memory import MacFit, Running
    from kimi_k3_mlx.schema import BuildPlan
    from kimi_k3_mlx.tensors.source import Source

CONTEXT = 32_768
SHOWN_MACS = 3
NOT_WRITTEN = "nothing was written. run without --dry-run to start; the same command resumes."


def running_of(plan: BuildPlan, context: int) -> Running:
    """Memory of the build when it runs with a context of so many tokens."""
    from converters.config import read_dims
    from kimi_k3_mlx.convert.memory import running

    return running(read_dims(plan.config), plan.total_size, context)


def plan_json(plan: BuildPlan, source: Source, out: str) -> dict[str, Any]:
    """The plan without its half million spans."""
    return {
        "version": 1,
        "source": {"path": source.where} | asdict(plan.source),
        "profile": plan.profile.to_json(),
        "prune_sha256": plan.prune.sha256 if plan.prune else None,
        "plan_sha256": plan.sha256,
        "mlx_path": out,
        "n_shards": len(plan.shards),
        "n_tensors": sum(1 for _ in plan.tensors),
        "n_bytes": plan.n_bytes,
        "total_size": plan.total_size,
        "shards": [{"name": shard.name, "n_bytes": shard.n_bytes} for shard in plan.shards],
    }


def plan_text(plan: BuildPlan, source: Source, out: str) -> str:
    """Source, output, and what the build is made by."""
    kept = f"{len(source.shards)} shards", f"{len(source.tensors):,} tensors"
    made = f"{len(plan.shards)} shards", f"{sum(1 for _ in plan.tensors):,} tensors"
    shape = table(
        [
            ("source ", source.where, *kept, format_bytes(source.total_size)),
            ("output ", out, *made, format_bytes(plan.n_bytes)),
        ]
    )
    return f"{shape}\nprofile  {plan.profile.name}: {plan.profile.summary}{plan_experts(plan)}"


def plan_experts(plan: BuildPlan) -> str:
    """`plan     242 of 896 experts in each layer`, on a line of its own, if there is a plan."""
    if plan.prune is None:
        return ""
    counts = [len(layer.keep) for layer in plan.prune.layers.values()]
    low, high = min(counts), max(counts)
    kept = f"{low}" if low == high else f"{low} to {high}"
    n_low = sum(len(layer.low) for layer in plan.prune.layers.values())
    graded = f", {n_low:,} of {sum(counts):,} in banks of {plan.prune.low}" if n_low else ""
    padded = f", padded to {high}" if plan.prune.pad_uniform else ""
    needs = "" if plan.prune.is_uniform else "; needs our model file (stock mlx-lm: trust it)"
    return (
        f"\nplan     {kept} of {plan.prune.n_experts} experts in each layer{graded}{padded}{needs}"
    )


def needs_text(sizes: Estimate) -> str:
    """Disk, memory, bytes to read and the time that takes."""
    pace = "time unknown until it runs"
    if sizes.seconds is not None and sizes.read_rate is not None:
        rate = format_rate(sizes.read_rate)
        pace = f"{format_duration(sizes.seconds)} at least, at {rate} as measured on the headers"
    return (
        f"needs    disk {format_bytes(sizes.n_write)} (free {format_bytes(sizes.n_free)})  "
        f"memory {format_bytes(sizes.n_memory)}\n"
        f"reads    {format_bytes(sizes.n_read)}  {pace}"
    )


def macs_text(memory: Running) -> str:
    """On which Macs it runs, the smallest that holds it first."""
    from kimi_k3_mlx.convert.memory import MACS

    fits = [memory.on(ram) for ram in MACS]
    holding = [fit for fit in fits if fit.verdict != "no"] or fits[-1:]
    others = [fit for fit in fits if fit.verdict == "no" and fit.ram_gib < holding[0].ram_gib]
    shown = holding[:SHOWN_MACS] + others[-1:]
    return (
        f"runs on  {'  ·  '.join(map(mac_text, shown))}\n"
        f"         with {format_bytes(memory.n_bytes)} wired: weights, one sequence of "
        f"{memory.context:,} tokens (a model, not a measurement)"
    )


def mac_text(fit: MacFit) -> str:
    """`512 GB Mac: yes, after sudo sysctl iogpu.wired_limit_mb=478362`."""
    limit = f"sudo sysctl iogpu.wired_limit_mb={fit.wired_limit_mb}"
    says = {
        "yes": "yes",
        "raise": f"yes, after {limit}",
        "tight": f"only just, after {limit}",
        "no": "no",
    }
    return f"{fit.ram_gib} GB Mac: {says[fit.verdict]}"
