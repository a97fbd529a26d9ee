"""Show what plans retain, source by source, and how far their statistics can be trusted.

Writes a page with tables, the same numbers as JSON, and figures. The first statistics judge the
plans; others are compared with them: how many choices change, and how many would by chance.
Nothing here is about quality: kimi-k3 compare measures that.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from kimi_k3_mlx.cli._options import Parser, common_options, positive, read_prune_plan
from kimi_k3_mlx.cli._output import say, write_json
from kimi_k3_mlx.cli._runs import short_names
from kimi_k3_mlx.errors import UsageError

if TYPE_CHECKING:
    from kimi_k3_mlx.reap.judge import NamedPlan
    from kimi_k3_mlx.reap.saliency import Saliency

USAGE = "--stats FILE... (--plan FILE... | --keep N) --out DIR [options]"
EXAMPLES = (
    "kimi-k3 report --stats stats.safetensors --plan p448.json p242.json --out report",
    "kimi-k3 report --stats all.safetensors code.safetensors --plan p448.json --out report",
    "kimi-k3 report --stats stats.safetensors --keep 448 --criterion loo --out report --json",
)


def add_options(parser: Parser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--stats", metavar="FILE", nargs="+", action="extend", required=True,
        help="what calibrate measured; the first judges, others are compared with it",
    )  # fmt: skip
    parser.add_argument("--plan", metavar="FILE", nargs="+", action="extend", help="plans to judge")
    parser.add_argument("--out", metavar="DIR", required=True, help="folder of the report")
    group = parser.add_argument_group("without a plan")
    group.add_argument("--keep", metavar="N", type=positive, help="judge the best N of each layer")
    group.add_argument("--criterion", metavar="NAME", help="by which they are best (default: reap)")
    common_options(parser, quiet=False)


def run(args: argparse.Namespace) -> None:
    """Load, judge, draw, write."""
    from kimi_k3_mlx.reap.agree import NamedStore
    from kimi_k3_mlx.reap.report import make_report
    from kimi_k3_mlx.reap.report_files import DATA, check_folder, render, write_folder
    from kimi_k3_mlx.reap.saliency import load_saliency

    out = Path(args.out)
    check_folder(out)
    names = short_names(args.stats)
    stores = [NamedStore(name, load_saliency(Path(path))) for name, path in names]
    report = make_report(stores, plans_of(args, stores[0].store))
    files = render(report)
    write_folder(out, files)
    if args.json:
        write_json(json.loads(files[DATA]))
        return
    say(f"wrote {out / 'report.md'} and {len(files) - 2} files of figures")


def plans_of(args: argparse.Namespace, store: Saliency) -> list[NamedPlan]:
    """The plans that are named, or the one that --keep cuts."""
    from kimi_k3_mlx.reap.judge import NamedPlan
    from kimi_k3_mlx.reap.planner import Planner, Recipe

    if args.plan and (args.keep or args.criterion):
        raise UsageError("--keep and --criterion cut a plan; with --plan there is one.")
    if args.plan:
        named = [(name, read_prune_plan(path)) for name, path in short_names(args.plan)]
        return [NamedPlan(name, plan) for name, plan in named if plan]
    if not args.keep:
        raise UsageError("there is nothing to judge.", "give plans with --plan, or --keep N.")
    recipe = Recipe(criterion=args.criterion or "reap", floor=store.top_k)
    return [NamedPlan(f"best {args.keep}", Planner(store, recipe).cut(args.keep))]
