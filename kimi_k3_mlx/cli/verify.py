"""Compare a build with its source: experts byte for byte, every other tensor by value.

Nothing is sampled; config, tokenizer files, manifest and the shards' hashes are checked as well.
What belongs where is worked out anew, not taken from the code that wrote the build. A difference
is named with its tensor and element, and exits with 3.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from kimi_k3_mlx.cli._options import Parser, common_options, source_options
from kimi_k3_mlx.cli._output import progress, say, write, write_json
from kimi_k3_mlx.units import format_bytes

USAGE = "--mlx-path DIR --hf-path DIR [options]"
EXAMPLES = (
    "kimi-k3 verify --mlx-path ./Kimi-K3-mlx-mxfp4 --hf-path ./Kimi-K3",
    "kimi-k3 verify --mlx-path ./Kimi-K3-mlx-mxfp4 --hf-path ./Kimi-K3 -q --json",
)


def add_options(parser: Parser) -> None:
    """Declare the options."""
    build = parser.add_argument_group("build")
    build.add_argument("--mlx-path", metavar="DIR", required=True, help="folder of the build")
    source_options(parser)
    common_options(parser)


def run(args: argparse.Namespace) -> None:
    """Compare, then say what agreed."""
    from kimi_k3_mlx.convert.verify import verify_build
    from kimi_k3_mlx.tensors.source import open_source

    source = open_source(Path(args.source))
    began = time.monotonic()
    with progress(args.quiet) as shown:
        report = verify_build(Path(args.mlx_path), source, shown)
    if report.nan_scales:
        say(f"warning: {report.nan_scales} expert scales are 255, which is no number")
    if args.json:
        write_json(report.to_json())
        return
    n_others = report.n_tensors - report.n_expert_tensors
    write(
        f"{report.build} agrees with {report.source}: {report.n_expert_tensors:,} expert tensors "
        f"byte for byte, {n_others:,} others by value, {format_bytes(report.n_bytes)} "
        f"in {time.monotonic() - began:.1f} s"
    )
