"""Say what a build would be: its size to the byte, what it needs, and the Macs that run it.

Reads headers only and writes nothing. `--keep` asks for a size without a plan: a build's size
depends on how many experts stay, not on which.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from kimi_k3_mlx.cli._estimate import CONTEXT, macs_text, plan_json, plan_text, running_of
from kimi_k3_mlx.cli._options import (
    Parser,
    common_options,
    opened,
    plan_options,
    planned,
    positive,
    read_prune_plan,
    source_options,
)
from kimi_k3_mlx.cli._output import write, write_json
from kimi_k3_mlx.errors import UsageError

if TYPE_CHECKING:
    from kimi_k3_mlx.prune_plan import PrunePlan
    from kimi_k3_mlx.tensors.source import Source

USAGE = "--hf-path DIR|REPO [--keep N] [options]"
EXAMPLES = (
    "kimi-k3 estimate --hf-path moonshotai/Kimi-K3 --keep 242 --profile mxfp4-q8",
    "kimi-k3 estimate --hf-path ./Kimi-K3 --keep 320 --profile moonshot",
    "kimi-k3 estimate --hf-path ./Kimi-K3 --prune-plan plan.json --context 131072 --json",
)


def add_options(parser: Parser) -> None:
    """Declare the options."""
    source_options(parser)
    plan_options(parser)
    group = parser.add_argument_group("estimate")
    group.add_argument("--keep", metavar="N", type=positive, help="experts that stay in each layer")
    group.add_argument(
        "--context", metavar="N", type=positive, default=CONTEXT, help="tokens of context"
    )
    common_options(parser, quiet=False)


def run(args: argparse.Namespace) -> None:
    """Plan, and say what came out."""
    if args.keep and args.prune_plan:
        raise UsageError("--keep and --prune-plan exclude each other.")
    prune = read_prune_plan(args.prune_plan)
    source = opened(args.source, args.revision)
    plan = planned(args, source, first_experts(args.keep, source) if args.keep else prune)
    memory = running_of(plan, args.context)
    name = f"{source.name}-mlx-{plan.profile.name}"
    if args.json:
        write_json(plan_json(plan, source, name) | {"running": memory.to_json()})
        return
    lines = [plan_text(plan, source, name), f"exactly  {plan.n_bytes:,} bytes in shards"]
    write("\n".join([*lines, *([macs_text(memory)] if plan.profile.layout == "mlx" else [])]))


def first_experts(count: int, source: Source) -> PrunePlan:
    """A plan that keeps so many experts of each layer, never mind which."""
    from converters.config import read_dims
    from kimi_k3_mlx.prune_plan import keep_first

    dims = read_dims(source.config)
    if count > dims.n_experts:
        raise UsageError(f"--keep is {count}, but the layers have {dims.n_experts} experts.")
    return keep_first(count, dims.n_experts, dims.moe_layers)
