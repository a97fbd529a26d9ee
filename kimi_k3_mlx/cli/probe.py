"""Let a build continue prompts greedily, and count loops and texts that never end.

Perplexity does not see that cliff. The prompts are the first tokens of documents; with --reference,
a second build continues the same ones and the difference is paired. Builds must fit in memory: a
model that is streamed would be read again for every token.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimi_k3_mlx.cli._options import Parser, common_options, count, folder, positive
from kimi_k3_mlx.cli._output import say, table, write, write_json
from kimi_k3_mlx.cli._runs import checked_out, files_of
from kimi_k3_mlx.cli.calibrate import tokenizer
from kimi_k3_mlx.cli.compare import interval_text, source_text
from kimi_k3_mlx.errors import UsageError

if TYPE_CHECKING:
    from kimi_k3_mlx.reap.corpus import Corpus
    from kimi_k3_mlx.reap.probe import Continuation

USAGE = "--model DIR --text SPECS [options]"
EXAMPLES = (
    "kimi-k3 probe --model ./K3-448 --text held.jsonl=code,zh.txt=zh --out probe.json",
    "kimi-k3 probe --model ./K3-242 --reference ./K3-448 --text held.jsonl --prompts 32",
    "kimi-k3 probe --model ./K3-242 --text agent.jsonl --prompt-tokens 30000 --prompts 1",
)
FORMS = {"looped": ".0%", "ended": ".0%", "distinct_4": ".3f", "longest_repeat": ".1f"}


def add_options(parser: Parser) -> None:
    """Declare the options."""
    group = parser.add_argument_group("builds")
    group.add_argument(
        "--model", metavar="DIR", type=folder, required=True, help="folder of a build"
    )
    group.add_argument(
        "--reference", metavar="DIR", type=folder, help="build to compare it with: the parent's"
    )
    group = parser.add_argument_group("prompts")
    group.add_argument(
        "--text", metavar="SPECS", required=True, help="files and data sets, as for compare"
    )
    group.add_argument(
        "--prompts", metavar="N", type=positive, default=16, help="most documents of each source"
    )
    group.add_argument(
        "--prompt-tokens", metavar="N", type=positive, default=64,
        help="tokens of a prompt; shorter documents are left out",
    )  # fmt: skip
    group.add_argument(
        "-m", "--max-tokens", metavar="N", type=positive, default=256, help="tokens to generate"
    )
    group.add_argument("--seed", metavar="N", type=count, default=0, help="order of documents")
    group.add_argument("--bos", action="store_true", help="put [BOS] before each document")
    group.add_argument("--out", metavar="FILE", help="everything measured, with the texts (JSON)")
    common_options(parser)


def run(args: argparse.Namespace) -> None:
    """Read the prompts, continue them, count."""
    out = checked_out(args.out, files_of(args.text)) if args.out else None
    for build in (args.model, args.reference or args.model):
        if not (build / "config.json").is_file():
            raise UsageError(
                f"{build} is not a build: it has no config.json.", "make one: kimi-k3 convert"
            )
    # transformers warns that it does not know K3; only its tokenizer is used.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from kimi_k3_mlx.reap.probe import summarize
    from kimi_k3_mlx.tensors.writer import write_file

    corpus = read_prompts(args)
    chosen = [sequence.source for sequence in corpus.sequences]
    texts, found = probed(args, args.model, corpus)
    value: dict[str, Any] = {"version": 1, "model": str(args.model), "corpus": corpus.to_json()}
    value |= {"prompt_tokens": args.prompt_tokens, "max_tokens": args.max_tokens}
    reference = None
    if args.reference:
        other_texts, reference = probed(args, args.reference, corpus)
        value |= {"reference": str(args.reference)}
    value["rows"] = summarize(corpus.sources, chosen, found, reference)
    if out:
        shown = {"model": texts} | ({"reference": other_texts} if reference else {})
        said = value | {"continuations": shown}
        write_file(out, (json.dumps(said, indent=1, ensure_ascii=False) + "\n").encode())
    if args.json:
        write_json(value)
    else:
        write(result_text(value))


def read_prompts(args: argparse.Namespace) -> Corpus:
    """A corpus of prompts, one a document, all of one length."""
    from dataclasses import replace

    from kimi_k3_mlx.reap.corpus import load_corpus, parse_specs

    corpus = load_corpus(
        parse_specs(args.text),
        tokenizer(args.model, "convert it again, with its tokenizer."),
        seq_len=args.prompt_tokens,
        tokens_per_document=args.prompt_tokens,
        seed=args.seed,
        bos=args.bos,
        whole_texts=True,
    )
    whole = [it for it in corpus.sequences if len(it) == args.prompt_tokens]
    by_source = [
        [it for it in whole if it.source == number] for number in range(len(corpus.sources))
    ]
    prompts = tuple(it for those in by_source for it in those[: args.prompts])
    if not prompts:
        raise UsageError(
            f"none of {len(corpus.documents):,} documents has {args.prompt_tokens} tokens.",
            "give fewer --prompt-tokens, or longer documents.",
        )
    return replace(corpus, sequences=prompts)


def probed(
    args: argparse.Namespace, path: Path, corpus: Corpus
) -> tuple[list[str], list[Continuation]]:
    """A build's continuations, as text and as numbers; the build is let go of."""
    import numpy as np

    from kimi_k3_mlx.reap.probe import examine
    from kimi_k3_mlx.runtime.greedy import continue_greedily
    from kimi_k3_mlx.runtime.load import load

    def note(done: int) -> None:
        if not args.quiet and done % 64 == 0:
            say(f"{path}: {done} of {args.max_tokens} tokens")

    build = load(path)
    prompts = np.stack([sequence.tokens for sequence in corpus.sequences])
    ends = build.tokenizer.eos_token_ids
    rows = continue_greedily(build.model, prompts, args.max_tokens, ends, note).tolist()
    return [build.tokenizer.decode(row) for row in rows], [examine(row, ends) for row in rows]


def result_text(value: dict[str, Any]) -> str:
    """A table for each build, and of their difference."""
    names = {"model": value["model"], "reference": value.get("reference")}
    names["difference"] = "difference (paired)" if "reference" in value else None
    parts = [lane_text(name, lane, value["rows"]) for lane, name in names.items() if name]
    note = (
        f"greedy, {value['prompt_tokens']} tokens of prompt, {value['max_tokens']} generated at "
        "most; in brackets 95 % intervals over prompts; a source with under 10 is not reliable"
    )
    return "\n\n".join([*parts, note])


def lane_text(name: str, lane: str, rows: list[dict[str, Any]]) -> str:
    """One build, or the difference of two."""
    head = ("source", "prompts", "looped", "ended", "distinct-4", "longest repeat (tokens)")
    lines: list[tuple[str, ...]] = [head]
    for row in rows:
        cells = [interval_text(row[lane][measure], form) for measure, form in FORMS.items()]
        lines.append((source_text(row), f"{row['prompts']:,}", *cells))
    return f"{name}\n{table(lines)}"
