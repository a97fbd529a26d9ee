"""Compare a build with its source, tensor by tensor; or, without --hf-path, with its own manifest.

Against the source: experts that stay MXFP4 and all that is not quantized must be equal bit for bit,
quantized values as close as their rounding leaves them; config, small files, index and the shards'
hashes are checked as well. What belongs where is worked out anew, not taken from the code that
wrote the build. Alone: every file's SHA-256, and config and index against the headers.
A difference is named with its tensor and element, and exits with 3.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kimi_k3_mlx.cli._options import (
    Parser,
    common_options,
    count,
    opened,
    positive,
    read_prune_plan,
    source_options,
)
from kimi_k3_mlx.cli._output import progress, say, table, write, write_json
from kimi_k3_mlx.errors import UsageError
from kimi_k3_mlx.units import format_bytes

if TYPE_CHECKING:
    from kimi_k3_mlx.convert.alone import AloneReport
    from kimi_k3_mlx.convert.compare import Rounded
    from kimi_k3_mlx.convert.verify import VerifyReport
    from kimi_k3_mlx.prune_plan import PrunePlan

USAGE = "--mlx-path DIR [--hf-path DIR|REPO] [options]"
EXAMPLES = (
    "kimi-k3 verify --mlx-path ./Kimi-K3-mlx-mxfp4",
    "kimi-k3 verify --mlx-path ./Kimi-K3-mlx-mxfp4 --hf-path ./Kimi-K3",
    "kimi-k3 verify --mlx-path ./Kimi-K3-mlx-mxfp4 --hf-path moonshotai/Kimi-K3 --sample 8",
    "kimi-k3 verify --mlx-path ./Kimi-K3-mlx-mxfp4 --hf-path ./Kimi-K3 -q --json",
)


def add_options(parser: Parser) -> None:
    """Declare the options."""
    build = parser.add_argument_group("build")
    build.add_argument("--mlx-path", metavar="DIR", required=True, help="folder of the build")
    build.add_argument("--prune-plan", metavar="FILE", help="plan that it must be made with")
    source_options(parser, required=False)
    extent = parser.add_argument_group("extent, with --hf-path")
    choice = extent.add_mutually_exclusive_group()
    choice.add_argument(
        "--full", action="store_true", help="compare everything; that's the default"
    )
    choice.add_argument(
        "--sample",
        metavar="N",
        type=positive,
        help="of each layer's experts only N, chosen anew each time; all else whole; no hashes",
    )
    extent.add_argument("--seed", metavar="N", type=count, help="repeat the sample of that seed")
    common_options(parser)


def run(args: argparse.Namespace) -> None:
    """Compare, then say what agreed and what was not compared."""
    prune = read_prune_plan(args.prune_plan)
    began = time.monotonic()
    report = _against_source(args, prune) if args.source else _alone(args, prune)
    if args.json:
        write_json(report.to_json())
        return
    write(_text(report, time.monotonic() - began))


def _against_source(args: argparse.Namespace, prune: PrunePlan | None) -> VerifyReport:
    from kimi_k3_mlx.convert.verify import verify_build

    if args.seed is not None and args.sample is None:
        raise UsageError("--seed is for --sample.", "give both, or neither.")
    source = opened(args.source, args.revision)
    with progress(args.quiet) as shown:
        report = verify_build(
            Path(args.mlx_path), source, shown, sample=args.sample, seed=args.seed, prune=prune
        )
    if report.nan_scales:
        say(f"warning: {report.nan_scales} expert scales are 255, which is no number")
    if report.model_file == "another version":
        say("warning: the build's model files are those of another kimi-k3-mlx than this one")
    return report


def _alone(args: argparse.Namespace, prune: PrunePlan | None) -> AloneReport:
    from kimi_k3_mlx.convert.alone import verify_alone

    for name in ("full", "sample", "seed", "revision"):
        if getattr(args, name) not in (None, False):
            raise UsageError(f"--{name} needs a source.", "give it with --hf-path.")
    with progress(args.quiet) as shown:
        return verify_alone(Path(args.mlx_path), shown, prune=prune)


def _text(report: VerifyReport | AloneReport, seconds: float) -> str:
    from kimi_k3_mlx.convert.verify import VerifyReport

    if isinstance(report, VerifyReport):
        head = f"{report.build} agrees with {report.source}"
        rows = list(_compared(report, seconds))
    else:
        head = f"{report.build} is as it was written"
        rows = list(_checked(report, seconds))
    return f"{head}\n{table(rows)}"


def _compared(report: VerifyReport, seconds: float) -> Iterator[tuple[str, str]]:
    others = report.n_tensors - report.n_expert_tensors
    yield (
        "compared",
        f"{report.n_expert_tensors:,} expert tensors and {others:,} others, "
        f"{format_bytes(report.n_bytes)} in {seconds:.1f} s",
    )
    all_rounded = defaultdict(list)
    for rounded in report.rounded:
        all_rounded[rounded.stored_as].append(rounded)
    for stored_as, members in all_rounded.items():
        yield f"in {stored_as}", _rounding(members)
    for name in report.narrowed:
        yield "in BF16", f"{name}: the nearest to each F32"
    yield "all else" if report.rounded or report.narrowed else "all", "equal, bit for bit"
    if report.sample:
        yield (
            "not compared",
            f"experts other than {report.sample.experts} of each layer "
            f"(--seed {report.sample.seed} repeats the choice), and the shards' SHA-256",
        )
    else:
        yield "SHA-256", "of all shards and small files as the manifest says"


def _rounding(members: list[Rounded]) -> str:
    count = sum(rounded.n_tensors for rounded in members)
    worst = min(members, key=lambda rounded: rounded.cosine)
    return (
        f"{count:,} tensors, every element within rounding; at worst cosine {worst.cosine:.5f}, "
        f"error {max(rounded.error for rounded in members):.2%} ({worst.name})"
    )


def _checked(report: AloneReport, seconds: float) -> Iterator[tuple[str, str]]:
    yield (
        "SHA-256",
        f"of {report.n_shards} shards and {report.n_sidecars} small files as the manifest says, "
        f"{format_bytes(report.n_bytes)} in {seconds:.1f} s",
    )
    yield "shapes", f"{report.n_tensors:,} tensors as index, headers and config.json say"
    yield "not compared", "values with the source: give it with --hf-path"
