"""Write an MLX build of a source checkpoint.

Everything is planned and checked from headers before a byte is written. Experts are copied byte for
byte. The folder loads only when it is finished; after an interruption the same command continues.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimi_k3_mlx.cli._options import Parser, common_options, source_options
from kimi_k3_mlx.cli._output import progress, say, table, write, write_json
from kimi_k3_mlx.errors import UsageError
from kimi_k3_mlx.units import format_bytes, format_rate

if TYPE_CHECKING:
    from kimi_k3_mlx.convert.estimate import Estimate
    from kimi_k3_mlx.convert.run import BuildSummary
    from kimi_k3_mlx.schema import BuildPlan
    from kimi_k3_mlx.tensors.source import Source

USAGE = "--hf-path DIR [--mlx-path DIR] [options]"
EXAMPLES = (
    "kimi-k3 convert --hf-path ./Kimi-K3 --dry-run",
    "kimi-k3 convert --hf-path ./Kimi-K3 --mlx-path /Volumes/models/Kimi-K3-mlx",
    "kimi-k3 convert --hf-path ./Kimi-K3 --mlx-path ./Kimi-K3-mlx --overwrite -y",
)
TOKENIZER = "tokenizer.json"
NO_TOKENIZER = (
    f"warning: the source has no {TOKENIZER}: kimi-k3 generate and mlx_lm can't run this build "
    "without one (K3's tiktoken.model needs remote code)"
)


def add_options(parser: Parser) -> None:
    """Declare the options."""
    source_options(parser)
    build = parser.add_argument_group("build")
    build.add_argument(
        "--mlx-path", metavar="DIR", help="output folder (default: SOURCE-mlx-PROFILE, here)"
    )
    build.add_argument(
        "--profile", metavar="NAME", default="mxfp4", help="a profile's name, or a .toml file"
    )
    build.add_argument(
        "--dry-run", action="store_true", help="show plan and estimate; write nothing"
    )
    build.add_argument(
        "--overwrite", action="store_true", help="delete the build in the output folder first"
    )
    build.add_argument("-y", "--yes", action="store_true", help="do not ask before deleting")
    build.add_argument("--force", action="store_true", help="try even if the disk looks too small")
    common_options(parser)


def run(args: argparse.Namespace) -> None:
    """Plan, then estimate or build."""
    from kimi_k3_mlx.convert.plan import plan_build
    from kimi_k3_mlx.convert.profiles import load_profile
    from kimi_k3_mlx.tensors.source import open_source

    source = open_source(Path(args.source))
    plan = plan_build(source, load_profile(args.profile))
    out = Path(args.mlx_path or f"{source.path.resolve().name}-mlx-{plan.profile.name}")
    if not (source.path / TOKENIZER).exists():
        say(NO_TOKENIZER)
    (dry_run if args.dry_run else build)(args, plan, source, out)


def dry_run(args: argparse.Namespace, plan: BuildPlan, source: Source, out: Path) -> None:
    """Refuse what a run would refuse, and say what it would write."""
    from kimi_k3_mlx.convert.estimate import check_fits, estimate
    from kimi_k3_mlx.convert.folder import check_folder
    from kimi_k3_mlx.convert.sidecars import check_readable

    check_folder(plan, source, out, overwrite=args.overwrite)
    check_readable(source.path)
    sizes = estimate(plan, out, overwrite=args.overwrite)
    if args.json:
        write_json(plan_json(plan, source, out) | {"estimate": sizes.to_json()})
    else:
        write(dry_run_text(plan, source, out, sizes))
    if not args.force:
        check_fits(sizes)


def build(args: argparse.Namespace, plan: BuildPlan, source: Source, out: Path) -> None:
    """Write the build and say what was done."""
    from kimi_k3_mlx.convert.run import run as run_plan

    if args.overwrite and out.is_dir() and any(out.iterdir()):
        confirm(f"delete the build in {out}?", args.yes)
    began = time.monotonic()
    with progress(args.quiet) as shown:
        summary = run_plan(plan, source, out, shown, force=args.force, overwrite=args.overwrite)
    if summary.nan_scales:
        say(f"warning: {summary.nan_scales} expert scales are 255, which is no number")
    if args.json:
        write_json(plan_json(plan, source, out) | {"build": summary.to_json()})
    elif not args.quiet:
        say(done_text(plan, summary, time.monotonic() - began))


def confirm(question: str, yes: bool) -> None:
    """Ask before deleting; without a terminal there is nobody to ask."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError("--overwrite deletes a build.", "confirm it with -y.")
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        raise UsageError("nothing was deleted.", "choose another --mlx-path.")


def plan_json(plan: BuildPlan, source: Source, out: Path) -> dict[str, Any]:
    """The plan without its half million spans."""
    return {
        "version": 1,
        "source": {"path": str(source.path)} | asdict(plan.source),
        "profile": plan.profile.to_json(),
        "plan_sha256": plan.sha256,
        "mlx_path": str(out),
        "n_shards": len(plan.shards),
        "n_tensors": sum(1 for _ in plan.tensors),
        "n_bytes": plan.n_bytes,
    }


def dry_run_text(plan: BuildPlan, source: Source, out: Path, sizes: Estimate) -> str:
    """Plan and estimate in five lines."""
    size = format_bytes(source.total_size)
    rows = [
        (
            "source",
            f"{source.path}",
            f"{len(source.shards)} shards",
            f"{len(source.tensors):,}",
            size,
        ),
        (
            "output",
            f"{out}",
            f"{len(plan.shards)} shards",
            f"{sum(1 for _ in plan.tensors):,}",
            format_bytes(plan.n_bytes),
        ),
    ]
    shape = table([(*row[:3], f"{row[3]} tensors", row[4]) for row in rows])
    return (
        f"{shape}\n"
        f"profile  {plan.profile.name}: {plan.profile.summary}\n"
        f"needs    disk {format_bytes(sizes.n_write)} (free {format_bytes(sizes.n_free)})  "
        f"memory {format_bytes(sizes.n_memory)}  read {format_bytes(sizes.n_read)}\n"
        "nothing was written. run without --dry-run to start; the same command resumes."
    )


def done_text(plan: BuildPlan, summary: BuildSummary, seconds: float) -> str:
    """What a finished run did."""
    if summary.n_reused == summary.n_shards:
        return f"{summary.path} was finished already: {summary.n_shards} shards."
    reused = f", {summary.n_reused} of them from before" if summary.n_reused else ""
    speed = f" at {format_rate(summary.n_bytes / seconds)}" if not summary.n_reused else ""
    return (
        f"{summary.path}: {summary.n_shards} shards{reused}, {format_bytes(summary.n_bytes)} "
        f"in {seconds:.1f} s{speed}"
    )
