"""Measure what plans cost on held-out text, before any of them is built.

The parent and every plan go through together, one layer in memory at a time: perplexity, paired
differences, KL and agreement of each, by source, with intervals over documents. Refuses text that a
plan was calibrated on. After an interruption the same command continues, if it has --out.
"""

from __future__ import annotations

import argparse
import json
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimi_k3_mlx.cli._options import (
    Parser,
    budgets,
    common_options,
    count,
    memory_size,
    opened,
    positive,
    read_prune_plan,
    source_options,
)
from kimi_k3_mlx.cli._output import progress, say, table, write, write_json
from kimi_k3_mlx.cli._runs import checked_out, files_of, memory_of, run_folder, short_names
from kimi_k3_mlx.cli.calibrate import counts_text, tokenizer
from kimi_k3_mlx.errors import UsageError

if TYPE_CHECKING:
    from kimi_k3_mlx.prune_plan import PrunePlan
    from kimi_k3_mlx.reap.corpus import Corpus
    from kimi_k3_mlx.reap.pictures import Rules
    from kimi_k3_mlx.reap.seen_text import Overlap

USAGE = "--hf-path DIR|REPO --plans FILE... --text SPECS [options]"
EXAMPLES = (
    "kimi-k3 compare --hf-path ./Kimi-K3 --plans 448.json 320.json --text a.jsonl=code,zh.txt=zh "
    "--memory 64GB --out costs.json",
    "kimi-k3 compare --hf-path ./Kimi-K3 --plans p.json --text held.jsonl --stats s.safetensors",
)
WORST_LAYERS = 3


def add_options(parser: Parser) -> None:
    """Declare the options."""
    source_options(parser)
    group = parser.add_argument_group("plans and text")
    group.add_argument("--plans", metavar="FILE", nargs="+", required=True, help="prune plans")
    text_options(group)
    group.add_argument(
        "--stats", metavar="FILE", nargs="+", default=(),
        help="statistics whose texts must not be among these either",
    )  # fmt: skip
    group.add_argument(
        "--allow-calibrated-text", action="store_true",
        help="go on with text that was calibrated on; the output says so",
    )  # fmt: skip
    group = parser.add_argument_group("run")
    group.add_argument("--out", metavar="FILE", help="everything measured (JSON)")
    group.add_argument(
        "--memory", metavar="SIZE", type=memory_size, help="64GB (default: half of this machine's)"
    )
    group.add_argument("--spill", action="store_true", help="keep activations on the disk")
    common_options(parser)


def text_options(group: Any) -> None:
    """The text that is measured on."""
    group.add_argument(
        "--text", metavar="SPECS", required=True,
        help="held-out files (text, JSONL) and data sets, as calibrate --corpus takes them",
    )  # fmt: skip
    group.add_argument(
        "--seq-len", metavar="N", type=positive, default=2048, help="tokens of a sequence"
    )
    group.add_argument(
        "--tokens-per-source", metavar="N|LIST", type=budgets,
        help="most tokens of each source, or of some: code=500000,zh=200000",
    )  # fmt: skip
    group.add_argument("--seed", metavar="N", type=count, default=0, help="order of documents")
    group.add_argument("--bos", action="store_true", help="put [BOS] before each document")
    group.add_argument(
        "--tokenizer", metavar="DIR", help="folder with tokenizer.json (default: the checkpoint's)"
    )


def run(args: argparse.Namespace) -> None:
    """Read plans and text, refuse what was calibrated on, measure, show."""
    # transformers warns that it does not know K3; only its tokenizer is used.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from kimi_k3_mlx.vision.tower import read_rules

    if args.spill and not args.out:
        raise UsageError("--spill needs a place on the disk.", "give --out.")
    inputs = [*args.plans, *args.stats, *files_of(args.text)]
    out = checked_out(args.out, inputs) if args.out else None
    folder = run_folder(out) if out else None
    named = [(name, read_prune_plan(path)) for name, path in short_names(args.plans)]
    plans = {name: plan for name, plan in named if plan}
    source = opened(args.source, args.revision)
    corpus = read_text(args, partial(read_rules, source))
    if not args.json and not args.quiet:
        say(counts_text(corpus))
    overlaps = checked_overlaps(args, plans, corpus)
    value = measure(args, source, corpus, plans, folder) | {"calibrated_on": overlaps}
    if out and folder:
        save(out, value, folder)
    if args.json:
        write_json(value)
    else:
        write(shown(value))


def read_text(args: argparse.Namespace, rules: Rules | None = None) -> Corpus:
    """The held-out text; a page of a text file stays one document."""
    from kimi_k3_mlx.reap.corpus import load_corpus, parse_specs

    return load_corpus(
        parse_specs(args.text),
        tokenizer(Path(args.tokenizer or args.source)),
        seq_len=args.seq_len,
        tokens_per_source=args.tokens_per_source,
        seed=args.seed,
        bos=args.bos,
        whole_texts=True,
        rules=rules,
    )


def checked_overlaps(
    args: argparse.Namespace, plans: dict[str, PrunePlan], corpus: Corpus
) -> dict[str, Any]:
    """What of the text each plan or store was calibrated on; raise UsageError if anything."""
    from kimi_k3_mlx.reap.saliency import load_saliency
    from kimi_k3_mlx.reap.seen_text import corpora_of, find_overlap, statistics_runs

    runs = {f"plan {name}": statistics_runs(plan.chosen_by) for name, plan in plans.items()}
    runs |= {f"statistics {path}": load_saliency(Path(path)).runs for path in args.stats}
    overlaps = {name: find_overlap(corpus, corpora_of(those)) for name, those in runs.items()}
    for name, overlap in overlaps.items():
        if overlap.any and not args.allow_calibrated_text:
            raise UsageError(
                f"{overlap_text(overlap, corpus)} {name} was calibrated on.",
                "give other text, or --allow-calibrated-text: the numbers flatter then.",
            )
    return {name: overlap.to_json(corpus) for name, overlap in overlaps.items()}


def overlap_text(overlap: Overlap, corpus: Corpus) -> str:
    """`The text has 3 of 40 documents (first: a.jsonl:7) that`."""
    if not overlap.documents:
        return f"The text is of {overlap.files[0]}, which"
    first = corpus.documents[overlap.documents[0]]
    n_documents = f"{len(overlap.documents):,} of {len(corpus.documents):,} documents"
    return f"The text has {n_documents} (first: {first}) that"


def measure(
    args: argparse.Namespace,
    source: Any,
    corpus: Corpus,
    plans: dict[str, PrunePlan],
    folder: Path | None,
) -> dict[str, Any]:
    """Run it; with --out, in a folder that goes when the result has been written."""
    from kimi_k3_mlx.reap.compare import evaluate
    from kimi_k3_mlx.reap.costs import Costs

    memory = memory_of(args)
    with progress(args.quiet) as seen:
        evaluation = evaluate(
            source, corpus, plans, memory=memory, folder=folder, spill=args.spill, progress=seen
        )
    return Costs(evaluation).to_json()


def save(out: Path, value: dict[str, Any], folder: Path) -> None:
    """Write the result, then let go of the run."""
    from kimi_k3_mlx.stream.journal import discard
    from kimi_k3_mlx.tensors.writer import write_file

    write_file(out, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())
    discard(folder)


def shown(value: dict[str, Any]) -> str:
    """The tables: each plan, plans against each other, and what to know of them."""
    parts = [plan_text(name, plan, value["parent"]) for name, plan in value["plans"].items()]
    if value["between_plans"]:
        parts.append(between_text(value["between_plans"]))
    return "\n\n".join([*parts, "\n".join(notes(value))])


def plan_text(name: str, plan: dict[str, Any], parent: list[dict[str, Any]]) -> str:
    """One plan: a line for each source, the worst first, then the layers."""
    before = {row["source"]: row["perplexity"] for row in parent}
    rows = [("source", "documents", "tokens", "parent ppl", "ppl", "ΔNLL", "KL", "agreement")]
    rows += [
        (
            source_text(row), f"{row['documents']:,}", f"{row['tokens']:,}",
            interval_text(before[row["source"]], ".2f"), interval_text(row["perplexity"], ".2f"),
            interval_text(row["delta"], "+.4f"), interval_text(row["kl"], ".4f"),
            interval_text(row["agreement"], ".1%"),
        )
        for row in plan["rows"]
    ]  # fmt: skip
    counts = sorted(plan["counts"].values())
    kept = f"{counts[0]}" if counts[0] == counts[-1] else f"{counts[0]} to {counts[-1]}"
    low = "; its low bank as if at full bits" if plan["low_bank_at_full_bits"] else ""
    head = f"{name}: {kept} experts in each layer{low}"
    return "\n".join([head, table(rows), layers_text(plan["layers"])])


def layers_text(layers: list[dict[str, Any]]) -> str:
    """How far the routed output turned away, over layers, and where most."""
    from statistics import median

    worst = sorted(layers, key=lambda layer: layer["cosine"])[:WORST_LAYERS]
    return "\n".join(
        [
            f"cosine of the routed output with the parent's: median "
            f"{median(layer['cosine'] for layer in layers):.3f} of {len(layers)} MoE layers, least "
            + ", ".join(f"{layer['cosine']:.3f} (layer {layer['layer']})" for layer in worst),
            f"share of the parent's gates that stays: median "
            f"{median(layer['coverage'] for layer in layers):.1%}",
        ]
    )


def between_text(pairs: list[dict[str, Any]]) -> str:
    """Plans against each other."""
    rows = [("plan", "against", "source", "ΔNLL")]
    rows += [
        (pair["plan"], pair["against"], source_text(row), interval_text(row, "+.4f"))
        for pair in pairs
        for row in pair["delta"]
    ]
    return table(rows)


def notes(value: dict[str, Any]) -> list[str]:
    """What a reader must know to judge the numbers."""
    lines = [
        "ΔNLL, KL: nats for a token; in brackets 95 % intervals, paired, bootstrapped by document"
    ]
    if few := value["intervals"]["few_documents"]:
        lines.append(f"under 10 documents, intervals not reliable: {', '.join(few)}")
    for name, it in value["calibrated_on"].items():
        if it["documents"] or it["files"]:
            what = f"documents: {len(it['documents'])}, files: {len(it['files'])}"
            lines.append(f"CALIBRATED ON THIS TEXT: {name} ({what})")
        elif not it["provenance_is_complete"]:
            lines.append(f"not known whether this text was calibrated on: {name}")
    return [*lines, *(f"not measured: {what}" for what in value["not_measured"])]


def source_text(row: dict[str, Any]) -> str:
    """A source's name, or that it is all text."""
    return "all" if row["source"] is None else str(row["source"])


def interval_text(interval: dict[str, Any], form: str) -> str:
    """`12.63 [11.90, 13.41]`."""
    value = format(interval["value"], form)
    if interval["low"] is None:
        return value
    return f"{value} [{interval['low']:{form}}, {interval['high']:{form}}]"
