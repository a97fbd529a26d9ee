"""Measure which experts a corpus needs: one layer in memory at a time, any number of tokens.

Says what the corpus holds before it begins, and where it is too small to tell. Statistics of
several runs add up: kimi-k3 stats merge. After an interruption the same command continues.
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from kimi_k3_mlx.cli._options import (
    Parser,
    budgets,
    common_options,
    count,
    memory_size,
    opened,
    positive,
    source_options,
)
from kimi_k3_mlx.cli._output import progress, say, table, write_json
from kimi_k3_mlx.cli._runs import checked_out, files_of, memory_of, run_folder
from kimi_k3_mlx.errors import UsageError

if TYPE_CHECKING:
    from kimi_k3_mlx.reap.corpus import Corpus
    from kimi_k3_mlx.tensors.source import Source

USAGE = "--hf-path DIR|REPO --corpus SPECS --out FILE [options]"
EXAMPLES = (
    "kimi-k3 calibrate --hf-path ./Kimi-K3 --corpus code.jsonl=code,zh.txt=zh --out s.safetensors",
    "kimi-k3 calibrate --hf-path ./Kimi-K3 --corpus 'org/data[sub](train):2000=web' "
    "--seq-len 4096 --tokens-per-source 500000 --memory 64GB --out web.safetensors",
    "kimi-k3 calibrate --hf-path ./Kimi-K3 --corpus code.txt --out s.safetensors --dry-run",
)
TOKENIZER = "tokenizer.json"


def add_options(parser: Parser) -> None:
    """Declare the options."""
    source_options(parser)
    group = parser.add_argument_group("corpus")
    group.add_argument(
        "--corpus", metavar="SPECS", required=True,
        help="files (text, JSONL) and data sets: a.jsonl=code,org/data[subset](split):n=web",
    )  # fmt: skip
    group.add_argument(
        "--seq-len", metavar="N", type=positive, default=2048, help="tokens of a sequence"
    )
    group.add_argument(
        "--tokens-per-source", metavar="N|LIST", type=budgets,
        help="most tokens of each source, or of some: code=500000,zh=200000",
    )  # fmt: skip
    group.add_argument(
        "--tokens-per-document", metavar="N", type=positive, help="most tokens of each document"
    )
    group.add_argument("--seed", metavar="N", type=count, default=0, help="order of documents")
    group.add_argument("--bos", action="store_true", help="put [BOS] before each document")
    group.add_argument(
        "--tokenizer", metavar="DIR", help=f"folder with {TOKENIZER} (default: the checkpoint's)"
    )
    run_options(parser)
    common_options(parser)


def run_options(parser: Parser) -> None:
    """Where it goes, and with how much memory."""
    group = parser.add_argument_group("run")
    group.add_argument("--out", metavar="FILE", required=True, help="statistics (safetensors)")
    group.add_argument(
        "--memory", metavar="SIZE", type=memory_size, help="64GB (default: half of this machine's)"
    )
    group.add_argument("--spill", action="store_true", help="keep activations on the disk")
    group.add_argument(
        "--dry-run", action="store_true", help="show what the corpus holds; measure nothing"
    )


def run(args: argparse.Namespace) -> None:
    """Read the corpus, say what it holds, then measure."""
    # transformers warns that it does not know K3; only its tokenizer is used.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    out = checked_out(args.out, files_of(args.corpus))
    folder = run_folder(out)
    source = opened(args.source, args.revision)
    corpus = read_corpus(args, source)
    sizes = source.config["text_config"]
    warnings = corpus.warnings(sizes["num_experts"], sizes["num_experts_per_token"])
    if not args.json and not args.quiet:
        say(counts_text(corpus))
    for warning in warnings:
        about = f"{warning.source}: " if warning.source else ""
        say(f"{warning.level}: {about}{warning.message}")
    value: dict[str, Any] = {"version": 1, "corpus": corpus.to_json()}
    if not args.dry_run:
        value |= measure(args, source, corpus, out, folder)
    if args.json:
        write_json(value)


def measure(
    args: argparse.Namespace, source: Any, corpus: Corpus, out: Path, folder: Path
) -> dict[str, Any]:
    """Run it, and write the store; what the run kept in the folder goes when that is done."""
    from kimi_k3_mlx.reap.calibrate import calibrate
    from kimi_k3_mlx.stream.journal import discard

    memory = memory_of(args)
    with progress(args.quiet) as shown:
        store = calibrate(
            source, corpus, memory=memory, folder=folder, spill=args.spill, progress=shown
        )
    sha256 = store.save(out)
    discard(folder)
    if not args.quiet:
        say(f"wrote {out}: {corpus.n_tokens:,} tokens through {len(store.layers)} MoE layers")
    return {"out": str(out), "sha256": sha256}


def read_corpus(args: argparse.Namespace, source: Source) -> Corpus:
    """The corpus that the options ask for."""
    from kimi_k3_mlx.reap.corpus import load_corpus, parse_specs
    from kimi_k3_mlx.vision.tower import read_rules

    specs = parse_specs(args.corpus)
    return load_corpus(
        specs,
        tokenizer(Path(args.tokenizer or args.source)),
        seq_len=args.seq_len,
        tokens_per_source=args.tokens_per_source,
        tokens_per_document=args.tokens_per_document,
        seed=args.seed,
        bos=args.bos,
        rules=partial(read_rules, source),
    )


def tokenizer(folder: Path, hint: str = "give a folder that has one with --tokenizer.") -> Any:
    """The tokenizer in a folder; remote code is never run."""
    from kimi_k3_mlx.convert.sidecars import made_tokenizer, needs_tokenizer
    from kimi_k3_mlx.runtime.load import load_tokenizer

    if (folder / TOKENIZER).is_file():
        return load_tokenizer(folder, None)
    if not folder.is_dir() or not needs_tokenizer(os.listdir(folder)):
        raise UsageError(f"{folder} has no {TOKENIZER}.", hint)
    with TemporaryDirectory() as made:
        for name, content in made_tokenizer(opened(str(folder), None)).items():
            (Path(made) / name).write_bytes(content)
        return load_tokenizer(Path(made), None)


def counts_text(corpus: Corpus) -> str:
    """Tokens by source and script."""
    rows = [("source", "tokens", "sequences", "scripts")]
    counts = corpus.counts()
    for number, source in enumerate(corpus.sources):
        scripts = sorted(counts[source].items(), key=lambda item: -item[1])
        shown = ", ".join(f"{name} {n:,}" for name, n in scripts if n)
        n_sequences = sum(sequence.source == number for sequence in corpus.sequences)
        n_tokens = corpus.tokens_by_source()[source]
        rows.append((source, f"{n_tokens:,}", f"{n_sequences:,}", shown))
    return table(rows)
