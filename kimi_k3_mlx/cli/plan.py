"""Choose which experts stay, from measured statistics: as many as you say, or as fit.

Cuts a prune plan out of what calibration measured, and says what it retains of each source, worst
first. With --target-size or --fit, it keeps the most experts whose build fits, to the byte. No
tensor byte is read, so that further tiers of the same statistics cost seconds.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimi_k3_mlx.cli._estimate import CONTEXT
from kimi_k3_mlx.cli._options import (
    Parser,
    common_options,
    fraction,
    n_bytes,
    opened,
    positive,
    source_options,
)
from kimi_k3_mlx.cli._output import say, write, write_json
from kimi_k3_mlx.cli._runs import checked_out
from kimi_k3_mlx.errors import UsageError
from kimi_k3_mlx.units import format_bytes

if TYPE_CHECKING:
    from kimi_k3_mlx.profile import Profile
    from kimi_k3_mlx.prune_plan import PrunePlan
    from kimi_k3_mlx.reap.planner import Planner, Recipe
    from kimi_k3_mlx.reap.saliency import Saliency
    from kimi_k3_mlx.reap.sizes import Limit
    from kimi_k3_mlx.tensors.source import Source

USAGE = "--stats FILE (--keep N | --target-size SIZE | --fit RAM) --out FILE [options]"
EXAMPLES = (
    "kimi-k3 plan --stats stats.safetensors --keep 448 --out plan.json",
    "kimi-k3 plan --stats stats.safetensors --hf-path ./Kimi-K3 --target-size 451GB --trunk q8 "
    "--out plan.json",
    "kimi-k3 plan --stats stats.safetensors --hf-path ./Kimi-K3 --fit 512GB --context 131072 "
    "--trunk q8 --criterion loo --objective max-min --out plan.json",
    "kimi-k3 plan --stats stats.safetensors --ratio 0.5 --weights code=2,zh=1 --mask-source ja "
    "--out plan.json --json",
)


def add_options(parser: Parser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--stats", metavar="FILE", required=True, help="what calibrate measured, or the port's .npz"
    )
    parser.add_argument("--out", metavar="FILE", required=True, help="where the plan goes (JSON)")
    source_options(parser, required=False)
    size_options(parser)
    choice_options(parser)
    common_options(parser, quiet=False)


def size_options(parser: Parser) -> None:
    """How many experts stay, and the build that has to fit."""
    group = parser.add_argument_group("size")
    count = group.add_mutually_exclusive_group()
    count.add_argument("--keep", metavar="N", type=positive, help="experts that stay in each layer")
    count.add_argument(
        "--ratio", metavar="R", type=fraction, help="share of the experts that go, 0 to 1"
    )
    group.add_argument(
        "--target-size", metavar="SIZE", type=n_bytes, help="most bytes of the shards: 451GB"
    )
    group.add_argument(
        "--fit", metavar="RAM", type=ram_gib, help="memory of the Mac that has to run it: 512GB"
    )
    group.add_argument(
        "--context", metavar="N", type=positive, help=f"tokens of context (default: {CONTEXT})"
    )
    build = group.add_mutually_exclusive_group()
    build.add_argument("--profile", metavar="NAME", help="the build's profile, or a .toml file")
    build.add_argument("--trunk", metavar="NAME", help="short for a profile: q8 is mxfp4-q8")
    group.add_argument("--first", metavar="N", type=positive, help="graded: experts at full bits")
    group.add_argument("--low-bits", metavar="N", type=positive, help="graded: bits of the others")
    group.add_argument(
        "--low-group-size", metavar="N", type=positive, default=64, help="graded: their groups"
    )


def choice_options(parser: Parser) -> None:
    """By what experts are chosen."""
    group = parser.add_argument_group("choice")
    group.add_argument(
        "--criterion",
        metavar="NAME",
        default="reap",
        help="reap, loo, frequency, weighted-ean, ean, man, ...: each is printed with its formula",
    )
    group.add_argument(
        "--mode", metavar="NAME", default="uniform", help="uniform, per-layer or graded"
    )
    group.add_argument(
        "--objective",
        metavar="NAME",
        default="mass",
        help="mass, or max-min: weigh the sources so that the worst is covered best",
    )
    group.add_argument(
        "--weights",
        metavar="LIST",
        type=weights,
        help="code=2,zh=1, others 1; or equal; without it, sources weigh as many tokens they have",
    )
    group.add_argument("--mask-source", metavar="NAME", action="append", help="leave a source out")
    group.add_argument(
        "--floor", metavar="N", type=positive, help="fewest experts of a layer; else 4 * top-k"
    )
    group.add_argument(
        "--multiple", metavar="N", type=positive, default=1, help="counts are multiples of N"
    )
    group.add_argument(
        "--protect", metavar="LAYER:LIST", type=experts, action="append",
        help="experts that stay: 12:5,7; may be repeated",
    )  # fmt: skip
    group.add_argument(
        "--keep-super-experts", action="store_true", help="experts with outlying norms stay"
    )


def run(args: argparse.Namespace) -> None:
    """Cut the plan, write it, say what it is."""
    from kimi_k3_mlx.reap.planner import Planner
    from kimi_k3_mlx.reap.saliency import load_saliency
    from kimi_k3_mlx.reap.sizes import check_same_model, only_sizes
    from kimi_k3_mlx.tensors.writer import write_file

    out = checked_out(args.out, [args.stats])
    if not args.source and (args.trunk or args.profile or args.context):
        raise UsageError(
            "--trunk, --profile and --context say what build has to fit.", "give --hf-path."
        )
    store = load_saliency(Path(args.stats))
    planner = Planner(store, recipe_of(args))
    source = opened(args.source, args.revision) if args.source else None
    if source:
        check_same_model(store, source)
        if note := only_sizes(store):
            say(note)
    plan = chosen(args, planner, source)
    write_file(out, plan.to_text().encode())
    if args.json:
        counts = {str(layer): len(kept.keep) for layer, kept in sorted(plan.layers.items())}
        identity = {"version": 1, "plan": args.out, "sha256": plan.sha256}
        write_json(identity | {"chosen_by": plan.chosen_by, "counts": counts})
        return
    write(plan_summary(plan, args.out))


def chosen(args: argparse.Namespace, planner: Planner, source: Source | None) -> PrunePlan:
    """The plan of the size that was asked for."""
    from kimi_k3_mlx.reap.sizes import largest, with_size

    keep, limit = kept_of(args, planner.store), limit_of(args)
    if limit is None:
        if keep is None and args.first:
            keep = planner.store.n_experts
        if keep is None:
            raise UsageError(
                "the plan's size is missing.",
                "give one of --keep, --ratio, --target-size and --fit.",
            )
        plan = planner.cut(keep, args.first)
        context = args.context or CONTEXT
        return with_size(plan, source, profile_of(args), context)[0] if source else plan
    if source is None:
        raise UsageError("--target-size and --fit need the checkpoint's sizes.", "give --hf-path.")
    if args.first or (keep is not None and args.mode != "graded"):
        raise UsageError(
            f"{'--first' if args.first else '--keep and --ratio'} can't be said together with "
            "--target-size or --fit, which look for it."
        )
    return largest(planner, source, profile_of(args), limit, keep)[0]


def recipe_of(args: argparse.Namespace) -> Recipe:
    """How the experts are to be chosen."""
    from kimi_k3_mlx.reap.planner import Recipe
    from kimi_k3_mlx.schema import Quantization

    protected: dict[int, tuple[int, ...]] = {}
    for layer, numbers in args.protect or ():
        protected[layer] = protected.get(layer, ()) + numbers
    bits = args.low_bits
    return Recipe(
        criterion=args.criterion,
        weights=args.weights,
        masked=tuple(args.mask_source or ()),
        objective=args.objective,
        mode=args.mode,
        low=Quantization("affine", bits, args.low_group_size) if bits else None,
        floor=args.floor,
        multiple=args.multiple,
        keep_super_experts=args.keep_super_experts,
        protected=protected,
    )


def kept_of(args: argparse.Namespace, store: Saliency) -> int | None:
    """Experts a layer, if they were said."""
    if args.ratio is None:
        return None if args.keep is None else int(args.keep)
    return int(round(store.n_experts * (1 - args.ratio)) // args.multiple * args.multiple)


def limit_of(args: argparse.Namespace) -> Limit | None:
    """What the build has to fit into, if anything."""
    from kimi_k3_mlx.reap.sizes import Limit

    if args.target_size is None and args.fit is None:
        return None
    return Limit(args.target_size, args.fit, args.context or CONTEXT)


def profile_of(args: argparse.Namespace) -> Profile:
    """The profile by its name or by its trunk's."""
    from kimi_k3_mlx.convert.profiles import load_profile

    return load_profile(f"mxfp4-{args.trunk}" if args.trunk else args.profile or "mxfp4")


def plan_summary(plan: PrunePlan, out: str) -> str:
    """What was chosen and by what, what it retains, how sure it is, how large it is."""
    said = plan.chosen_by
    by, guards = said["criterion"], said["protections"]
    shares = ", ".join(f"{name} {share:.3f}" for name, share in said["weights"].items())
    lines = [
        f"plan     {counts_text(plan)} of {plan.n_experts} experts in each layer",
        f"chosen   by {by['name']} = {by['formula']}, over {by['denominator']} ({by['published']})",
        f"weights  {shares} ({said['objective']}, {said['mode']})",
        *retained_lines(said["retained"]),
        f"cut      {cut_text(said['cut'])}",
        f"guards   floor {guards['floor']}; {norms_text(guards['super_experts'])}; "
        f"{guards['never_routed']} never routed",
    ]
    if size := said.get("size"):
        lines.append(
            f"size     {format_bytes(size['n_bytes'])} in shards ({size['n_bytes']:,} bytes), "
            f"{format_bytes(size['running'])} running, profile {size['profile']}"
        )
    return "\n".join([*lines, f"wrote    {out}"])


def norms_text(norms: dict[str, Any]) -> str:
    """How many experts have outlying norms, and how many of them go."""
    if norms["flagged"] is None:
        return "norms were not measured"
    return f"{norms['flagged']} experts with outlying norms, {norms['dropped']} of them dropped"


def counts_text(plan: PrunePlan) -> str:
    """`242`, `180 to 301`, or `242 (100 of them at full bits)`."""
    counts = [len(layer.keep) for layer in plan.layers.values()]
    low, high = min(counts), max(counts)
    first = f" ({plan.chosen_by['first']} of them at full bits)" if plan.low else ""
    return (f"{low}" if low == high else f"{low} to {high}") + first


def retained_lines(retained: dict[str, Any]) -> list[str]:
    """Each source's retained mass, the one that is covered worst first."""
    rows = sorted(retained["by_source"].items(), key=lambda row: row[1]["coverage"])
    lines = [
        f"retains  {row['mass']:.1%} of {name} ({row['coverage']:.1%} of its own best choice)"
        + (f", {row['at_full_bits']:.1%} at full bits" if "at_full_bits" in row else "")
        for name, row in rows
    ]
    return [*lines, f"         mass: {retained['of']}"]


def cut_text(cut: dict[str, Any]) -> str:
    """How sure the border is."""
    kept = f"{cut['slots']:,} experts stay in all"
    if cut["ambiguous"] is None:
        return f"{kept}; errors of this criterion were not measured"
    if cut["standard_error"] is None:
        return kept
    return (
        f"{kept}, {cut['ambiguous_kept']:,} of them ambiguous at 95 %; standard error at the "
        f"border {cut['standard_error']:.1%}"
    )


def ram_gib(text: str) -> int:
    """A Mac's memory: what is sold as 512GB is 512 GiB."""
    match = re.fullmatch(r"(\d+)\s*gi?b", text.strip(), re.IGNORECASE)
    if not match or not int(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a memory size such as 512GB")
    return int(match[1])


def weights(text: str) -> dict[str, float]:
    """`code=2,zh=1`, or `equal`."""
    if text == "equal":
        return {}
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.rpartition("=")
        try:
            found[name.strip()] = float(value)
        except ValueError:
            name = ""
        if not name:
            raise argparse.ArgumentTypeError(f"{part!r} is not a weight such as code=2")
    return found


def experts(text: str) -> tuple[int, tuple[int, ...]]:
    """`12:5,7`: a layer and its experts."""
    if not re.fullmatch(r"\d+:\d+(,\d+)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a layer with experts such as 12:5,7")
    layer, _, numbers = text.partition(":")
    return int(layer), tuple(map(int, numbers.split(",")))
