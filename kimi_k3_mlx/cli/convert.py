"""Write an MLX build of a source checkpoint, in a folder or on the Hub.

Everything is planned and checked from headers before a byte is written. Experts are copied byte for
byte. From the Hub, only the byte ranges that the plan keeps are fetched, and the source is never
stored. The folder loads only when it is finished; after an interruption the same command continues.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kimi_k3_mlx.cli._build import dry_run_or_build, writing_options
from kimi_k3_mlx.cli._options import (
    Parser,
    common_options,
    opened,
    opened_as_begun,
    plan_options,
    planned,
    read_prune_plan,
    source_options,
)
from kimi_k3_mlx.cli._output import say

USAGE = "--hf-path DIR|REPO [--mlx-path DIR] [options]"
EXAMPLES = (
    "kimi-k3 convert --hf-path ./Kimi-K3 --dry-run",
    "kimi-k3 convert --hf-path ./Kimi-K3 --mlx-path /Volumes/models/Kimi-K3-mlx",
    "kimi-k3 convert --hf-path moonshotai/Kimi-K3 --prune-plan plan.json --profile mxfp4-q8",
    "kimi-k3 convert --hf-path ./Kimi-K3 --mlx-path ./Kimi-K3-mlx --overwrite -y",
)
TOKENIZER, TIKTOKEN = "tokenizer.json", "tiktoken.model"
NO_TOKENIZER = (
    f"warning: the source has neither {TOKENIZER} nor {TIKTOKEN}: kimi-k3 generate and mlx_lm "
    "can't run this build"
)


def add_options(parser: Parser) -> None:
    """Declare the options."""
    source_options(parser)
    plan_options(parser)
    writing_options(parser)
    parser.add_argument(
        "--mlx-path", metavar="DIR", help="output folder (default: SOURCE-mlx-PROFILE, here)"
    )
    common_options(parser)


def run(args: argparse.Namespace) -> None:
    """Plan, then estimate or build."""
    prune = read_prune_plan(args.prune_plan)
    source = opened(args.source, args.revision)
    plan = planned(args, source, prune)
    if not {TOKENIZER, TIKTOKEN} & {*source.files()}:
        say(NO_TOKENIZER)
    default = f"{source.name}-mlx-{plan.profile.name}"
    out = Path(default if args.mlx_path is None else args.mlx_path)
    if (begun := opened_as_begun(args, source, out)) is not source:
        source, plan = begun, planned(args, begun, prune)
    dry_run_or_build(args, plan, source, out)
