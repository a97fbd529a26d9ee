"""What `convert` and `prune` do alike: refuse or estimate or write, and say what was done."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kimi_k3_mlx.cli._estimate import (
    CONTEXT,
    NOT_WRITTEN,
    macs_text,
    needs_text,
    plan_json,
    plan_text,
    running_of,
)
from kimi_k3_mlx.cli._options import Parser
from kimi_k3_mlx.cli._output import progress, say, table, write, write_json
from kimi_k3_mlx.errors import UsageError
from kimi_k3_mlx.units import format_bytes, format_rate

if TYPE_CHECKING:
    from kimi_k3_mlx.convert.run import BuildSummary
    from kimi_k3_mlx.schema import BuildPlan
    from kimi_k3_mlx.tensors.source import Source


def writing_options(parser: Parser) -> None:
    """`--dry-run`, `--overwrite`, `-y` and `--force`."""
    group = parser.add_argument_group("writing")
    group.add_argument(
        "--dry-run", action="store_true", help="show plan and estimate; write nothing"
    )
    group.add_argument(
        "--overwrite", action="store_true", help="delete the build in the output folder first"
    )
    group.add_argument("-y", "--yes", action="store_true", help="do not ask before deleting")
    group.add_argument("--force", action="store_true", help="try even if the disk looks too small")


def dry_run_or_build(args: argparse.Namespace, plan: BuildPlan, source: Source, out: Path) -> None:
    """Do what `writing_options` ask for."""
    (dry_run if args.dry_run else build)(args, plan, source, out)


def dry_run(args: argparse.Namespace, plan: BuildPlan, source: Source, out: Path) -> None:
    """Refuse what a run would refuse, and say what it would write."""
    from kimi_k3_mlx.convert.disk import read_rate
    from kimi_k3_mlx.convert.estimate import check_fits, estimate
    from kimi_k3_mlx.convert.folder import check_folder
    from kimi_k3_mlx.convert.sidecars import read_sidecars

    check_folder(plan, source, out, overwrite=args.overwrite)
    read_sidecars(plan, source)
    sizes = estimate(plan, out, overwrite=args.overwrite, read_rate=read_rate(source))
    memory = running_of(plan, CONTEXT) if plan.profile.layout == "mlx" else None
    if args.json:
        parts = {"estimate": sizes.to_json(), "running": memory and memory.to_json()}
        write_json(plan_json(plan, source, str(out)) | parts)
    else:
        lines = [plan_text(plan, source, str(out)), needs_text(sizes)]
        write("\n".join([*lines, *([macs_text(memory)] if memory else []), NOT_WRITTEN]))
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
        write_json(plan_json(plan, source, str(out)) | {"build": summary.to_json()})
        return
    if not args.quiet:
        say(done_text(summary, time.monotonic() - began))
    if summary.changed and (not args.quiet or getattr(args, "allow_requantize", False)):
        say(changed_text(summary))


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


def done_text(summary: BuildSummary, seconds: float) -> str:
    """What a finished run did."""
    if summary.n_reused == summary.n_shards:
        return f"{summary.path} was finished already: {summary.n_shards} shards."
    reused = f", {summary.n_reused} of them from before" if summary.n_reused else ""
    speed = f" at {format_rate(summary.n_bytes / seconds)}" if not summary.n_reused else ""
    equal = "" if summary.changed else ", every tensor bit-equal to the source's"
    return (
        f"{summary.path}: {summary.n_shards} shards{reused}, {format_bytes(summary.n_bytes)} "
        f"in {seconds:.1f} s{speed}{equal}"
    )


def changed_text(summary: BuildSummary) -> str:
    """Every tensor that is not bit-equal to the source's, by pattern, with its error."""
    rows = [("not bit-equal", "tensors", "stored as", "relative error")]
    for change in summary.changed:
        rows.append((change.name, f"{change.n_tensors}", change.stored_as, f"{change.error:.2%}"))
    return table(rows)
