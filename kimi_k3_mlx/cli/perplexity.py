"""Measure the perplexity of a build on text, source by source, with intervals over documents.

The build must fit in memory; kimi-k3 compare measures checkpoints that don't. Text is cut and
counted as there, so that the numbers can be set side by side. Says which of the text the build's
prune plan was calibrated on: there the numbers flatter.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimi_k3_mlx.cli._options import Parser, common_options, folder, read_prune_plan
from kimi_k3_mlx.cli._output import progress, say, table, write, write_json
from kimi_k3_mlx.cli.compare import interval_text, read_text, source_text, text_options
from kimi_k3_mlx.cli.generate import memory_options

if TYPE_CHECKING:
    from kimi_k3_mlx.reap.corpus import Corpus

USAGE = "--model DIR --text SPECS [options]"
EXAMPLES = (
    "kimi-k3 perplexity --model ./Kimi-K3-mlx --text held.jsonl=code,zh.txt=zh",
    "kimi-k3 perplexity --model ./Kimi-K3-mlx --text held.jsonl --seq-len 8192 --json",
)


def add_options(parser: Parser) -> None:
    """Declare the options."""
    group = parser.add_argument_group("model and text")
    group.add_argument(
        "--model", dest="source", metavar="DIR", type=folder, required=True,
        help="folder of a build",
    )  # fmt: skip
    text_options(group)
    memory_options(parser.add_argument_group("machine"))
    common_options(parser)


def run(args: argparse.Namespace) -> None:
    """Read the text, load, measure, show."""
    # transformers warns that it does not know K3; only its tokenizer is used.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from kimi_k3_mlx.runtime.build import check_build
    from kimi_k3_mlx.runtime.load import load
    from kimi_k3_mlx.runtime.perplexity import measure, summary
    from kimi_k3_mlx.runtime.wiring import wiring

    check_build(args.source)
    corpus = read_text(args)
    with progress(args.quiet) as shown, wiring(not args.no_wire):
        build = load(args.source, progress=shown, force=args.force)
        nats = measure(build, corpus, told(args.quiet, corpus.n_tokens))
    value = {"model": str(args.source), **summary(corpus, nats)}
    value["calibrated_on"] = calibrated_on(args.source, corpus)
    if args.json:
        write_json(value)
    else:
        write(text(value))


def told(quiet: bool, n_tokens: int) -> Callable[[int], None]:
    """Says how far it is, at every twentieth of the tokens."""
    told = 0

    def tell(done: int) -> None:
        nonlocal told
        if not quiet and 20 * done // n_tokens > told:
            told = 20 * done // n_tokens
            say(f"{done:,} of {n_tokens:,} tokens")

    return tell


def calibrated_on(build: Path, corpus: Corpus) -> dict[str, Any] | None:
    """What of the text the build's plan was calibrated on; None for a build without a plan."""
    from kimi_k3_mlx.convert.sidecars import PRUNE_PLAN
    from kimi_k3_mlx.reap.seen_text import corpora_of, find_overlap, statistics_runs

    path = build / PRUNE_PLAN
    plan = read_prune_plan(str(path)) if path.is_file() else None
    if plan is None:
        return None
    return find_overlap(corpus, corpora_of(statistics_runs(plan.chosen_by))).to_json(corpus)


def text(value: dict[str, Any]) -> str:
    """A line for each source, and what to know of them."""
    rows = [("source", "documents", "tokens", "perplexity")]
    rows += [
        (
            source_text(row), f"{row['documents']:,}", f"{row['tokens']:,}",
            interval_text(row["perplexity"], ".3f"),
        )
        for row in value["rows"]
    ]  # fmt: skip
    lines = [table(rows), "in brackets 95 % intervals, bootstrapped by document"]
    if few := value["few_documents"]:
        lines.append(f"under 10 documents, intervals not reliable: {', '.join(few)}")
    seen = value["calibrated_on"]
    if seen and (seen["documents"] or seen["files"]):
        what = f"documents: {len(seen['documents'])}, files: {len(seen['files'])}"
        lines.append(f"CALIBRATED ON THIS TEXT: the build's plan ({what})")
    elif seen and not seen["provenance_is_complete"]:
        lines.append("not known whether the build's plan was calibrated on this text")
    return "\n".join(lines)
