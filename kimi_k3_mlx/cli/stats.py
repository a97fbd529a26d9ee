"""Add up the statistics of calibration runs, or show what they hold.

Runs over other texts, on other days and other machines, add up exactly: merging two runs is the
same as one run over both corpora.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimi_k3_mlx.cli._options import Parser, common_options
from kimi_k3_mlx.cli._output import say, table, write, write_json
from kimi_k3_mlx.cli._runs import checked_out
from kimi_k3_mlx.errors import UsageError

if TYPE_CHECKING:
    from kimi_k3_mlx.reap.saliency import Saliency

USAGE = "(merge FILE FILE... --out FILE | show FILE) [options]"
EXAMPLES = (
    "kimi-k3 stats merge code.safetensors chinese.safetensors --out both.safetensors",
    "kimi-k3 stats show both.safetensors --json",
)


def add_options(parser: Parser) -> None:
    """Declare the options."""
    parser.add_argument("action", metavar="merge|show", help="what to do with the files")
    parser.add_argument(
        "files",
        metavar="FILE",
        nargs="+",
        help="what calibrate measured; show: or the MLX port's .npz",
    )
    parser.add_argument("--out", metavar="FILE", help="merge: the file to write")
    common_options(parser, quiet=False)


def run(args: argparse.Namespace) -> None:
    """Load, merge if asked, and show."""
    from kimi_k3_mlx.reap.saliency import load_saliency, merge, shared_files

    check(args)
    out = checked_out(args.out, args.files) if args.out else None
    stores = [load_saliency(Path(file)) for file in args.files]
    store = stores[0]
    for other in stores[1:]:
        shared = shared_files(store, other)
        store = merge(store, other)
        if shared:
            say(f"warning: two of them read {', '.join(shared)}: what both took counts twice.")
    if out:
        store.save(out)
    if args.json:
        lacks = {"unmeasured": list(store.unmeasured)}
        found = {"by_source": by_source(store)} | never_routed(store) | lacks
        write_json(store.provenance() | found)
        return
    write(shown(store) + (f"\nwrote {args.out}" if args.out else ""))


def check(args: argparse.Namespace) -> None:
    """Raise UsageError unless action, files and --out belong together."""
    if args.action not in ("merge", "show"):
        raise UsageError(f"unknown action {args.action!r} of stats.", "merge or show.")
    if args.action == "show" and (args.out or len(args.files) > 1):
        raise UsageError("stats show takes one file and writes none.")
    if args.action == "merge" and len(args.files) < 2:
        raise UsageError("stats merge takes two files or more.")
    if args.action == "merge" and not args.out:
        raise UsageError("stats merge needs a file to write.", "give it with --out.")


def by_source(store: Saliency) -> dict[str, dict[str, Any]]:
    """Tokens, sequences (None: not counted) and mean pairs of an expert, for each source."""
    counts: Sequence[Any] = [None] * len(store.sources)
    if "sequences" in store.arrays:
        counts = store.arrays["sequences"][:, 0].tolist()
    return {
        source: {
            "tokens": int(tokens),
            "sequences": None if sequences is None else int(sequences),
            "pairs_per_expert": float(tokens) * store.top_k / store.n_experts,
        }
        for source, tokens, sequences in zip(store.sources, store.tokens, counts, strict=True)
    }


def never_routed(store: Saliency) -> dict[str, int]:
    """How many experts no token was routed to."""
    return {"never_routed": int((store.arrays["pairs"].sum(axis=0) == 0).sum())}


def shown(store: Saliency) -> str:
    """The same as text."""
    rows = [("source", "tokens", "sequences", "pairs per expert")]
    for source, row in by_source(store).items():
        sequences = "-" if row["sequences"] is None else f"{row['sequences']:,}"
        pairs = f"{row['pairs_per_expert']:,.0f}"
        rows.append((source, f"{row['tokens']:,}", sequences, pairs))
    n_layers = len(store.layers)
    head = (
        f"model {store.model[:12]}: {n_layers} layers of {store.n_experts} experts, "
        f"{store.top_k} a token; {len(store.runs)} runs"
    )
    dead = never_routed(store)["never_routed"]
    lines = [head, table(rows)]
    if store.unmeasured:
        lines.append(f"not measured: {', '.join(store.unmeasured)}")
    return "\n".join([*lines, f"{dead:,} of {n_layers * store.n_experts:,} never routed"])
