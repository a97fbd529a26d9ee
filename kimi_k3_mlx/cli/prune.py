"""Write a pruned checkpoint in Moonshot's own layout, which vLLM and SGLang serve.

Experts that go are dropped, those that stay are renumbered in ascending order, router rows and
correction bias with them; every tensor that stays is copied byte for byte. Needs no MLX. After an
interruption the same command continues.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from kimi_k3_mlx.cli._build import dry_run_or_build, writing_options
from kimi_k3_mlx.cli._options import (
    Parser,
    common_options,
    opened,
    opened_as_begun,
    positive,
    read_prune_plan,
    source_options,
)
from kimi_k3_mlx.cli._output import say
from kimi_k3_mlx.errors import KimiError, UsageError

if TYPE_CHECKING:
    from kimi_k3_mlx.prune_plan import PrunePlan
    from kimi_k3_mlx.tensors.source import Source

USAGE = "--hf-path DIR|REPO (--prune-plan FILE | --stats FILE --keep N) [--out DIR] [options]"
EXAMPLES = (
    "kimi-k3 prune --hf-path ./Kimi-K3 --prune-plan plan.json --dry-run",
    "kimi-k3 prune --hf-path ./Kimi-K3 --prune-plan plan.json --out ./Kimi-K3-pruned",
    "kimi-k3 prune --hf-path ./Kimi-K3 --stats stats.safetensors --keep 448",
)
PROFILE = "moonshot"


def add_options(parser: Parser) -> None:
    """Declare the options."""
    source_options(parser)
    group = parser.add_argument_group("checkpoint")
    group.add_argument("--prune-plan", metavar="FILE", help="plan that says which experts stay")
    group.add_argument("--stats", metavar="FILE", help="without a plan: what calibrate measured")
    group.add_argument(
        "--keep", metavar="N", type=positive, help="with --stats: experts that stay, by REAP"
    )
    group.add_argument("--out", metavar="DIR", help="output folder (default: SOURCE-EXPERTS, here)")
    writing_options(parser)
    common_options(parser)


def run(args: argparse.Namespace) -> None:
    """Plan, then estimate or write."""
    from kimi_k3_mlx.convert.plan import plan_build
    from kimi_k3_mlx.convert.profiles import load_profile

    source = opened(args.source, args.revision)
    prune = kept(args, source)
    plan = plan_build(source, load_profile(PROFILE), prune)
    default = f"{source.name}-{plan.config['text_config']['num_experts']}-experts"
    out = Path(default if args.out is None else args.out)
    if (begun := opened_as_begun(args, source, out)) is not source:
        source, plan = begun, plan_build(begun, load_profile(PROFILE), prune)
    try:
        dry_run_or_build(args, plan, source, out)
    except KimiError as error:
        error.hint = error.hint.replace("--mlx-path", "--out")
        raise


def kept(args: argparse.Namespace, source: Source) -> PrunePlan:
    """The plan that is given, or the best experts of each layer by what was measured."""
    from kimi_k3_mlx.reap.planner import Planner, Recipe
    from kimi_k3_mlx.reap.saliency import load_saliency
    from kimi_k3_mlx.reap.sizes import check_same_model, only_sizes

    plan = read_prune_plan(args.prune_plan)
    if plan is not None and not (args.stats or args.keep):
        return plan
    if plan is not None or not (args.stats and args.keep):
        raise UsageError(
            "what stays must be said once.", "give --prune-plan, or --stats and --keep together."
        )
    store = load_saliency(Path(args.stats))
    check_same_model(store, source)
    if note := only_sizes(store):
        say(note)
    return Planner(store, Recipe()).cut(args.keep)
