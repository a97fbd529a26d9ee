"""Time how a build reads prompts and writes, context by context, through mlx-lm's own generation.

Tokens a second are told only when the weights are wired; else seconds, and why. On a Mac whose
chip is known, decoding is compared with what its memory allows (a model: bytes over bandwidth).
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimi_k3_mlx.cli._options import Parser, common_options, folder, positive
from kimi_k3_mlx.cli._output import progress, say, table, write, write_json
from kimi_k3_mlx.cli.generate import memory_options
from kimi_k3_mlx.errors import UsageError
from kimi_k3_mlx.units import format_bytes

if TYPE_CHECKING:
    from kimi_k3_mlx.runtime.bench import Trial

USAGE = "--model DIR [options]"
EXAMPLES = (
    "kimi-k3 benchmark --model ./Kimi-K3-mlx",
    "kimi-k3 benchmark --model ./Kimi-K3-mlx -p 512,4096,32768 -g 256 --csv k3.csv --svg k3.svg",
)


def add_options(parser: Parser) -> None:
    """Declare the options; names are those of mlx_lm.benchmark."""
    group = parser.add_argument_group("model and measurement")
    group.add_argument(
        "--model", metavar="DIR", type=folder, required=True, help="folder of a build"
    )
    group.add_argument(
        "-p", "--prompt-tokens", metavar="N,N", type=lengths, default="512,4096",
        help="lengths of the prompts",
    )  # fmt: skip
    group.add_argument(
        "-g", "--generation-tokens", metavar="N", type=positive, default=128,
        help="tokens to write after each; the first one counts to the prompt",
    )  # fmt: skip
    group.add_argument(
        "-n", "--num-trials", metavar="N", type=positive, default=3, help="runs of each prompt"
    )
    group.add_argument(
        "--prefill-step-size", metavar="N", type=positive, default=4096,
        help="prompt tokens of one pass",
    )  # fmt: skip
    memory_options(parser.add_argument_group("machine"))
    group.add_argument("--csv", metavar="FILE", type=Path, help="every run, as a table")
    group.add_argument("--svg", metavar="FILE", type=Path, help="a figure of it")
    common_options(parser)


def lengths(text: str) -> list[int]:
    """`512,4096`: numbers of tokens, in ascending order, each once."""
    return sorted({positive(part.strip()) for part in text.split(",")})


def run(args: argparse.Namespace) -> None:
    """Load, measure, show."""
    if args.generation_tokens < 2:
        raise UsageError("-g 1 times no decoding: the first token comes with the prompt.", "-g 128")
    for path in filter(None, (args.csv, args.svg)):
        if path.is_dir() or not os.access(path.parent, os.W_OK):
            raise UsageError(f"{path} can't be written.", "name a file in a folder of yours.")
    # transformers warns that it does not know K3; only its tokenizer is used.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from kimi_k3_mlx.runtime import bench
    from kimi_k3_mlx.runtime.load import load
    from kimi_k3_mlx.runtime.machine import Machine, Probes
    from kimi_k3_mlx.runtime.wiring import wiring
    from kimi_k3_mlx.tensors.writer import write_file

    with progress(args.quiet) as shown, wiring(not args.no_wire):
        build = load(args.model, progress=shown, force=args.force)
        asked = (args.prompt_tokens, args.generation_tokens, args.num_trials)
        trials = bench.measure(build, *asked, args.prefill_step_size, told(args.quiet))
        reason = bench.why_not_wired(build, not args.no_wire)
    machine = Machine.read(args.model, Probes())
    value = bench.summary(build, trials, machine, reason) | {"model": str(args.model)}
    if args.csv:
        write_file(args.csv, bench.csv_text(value).encode())
    if args.svg:
        write_file(args.svg, bench.svg(value, f"{args.model.resolve().name}, {machine}"))
    if args.json:
        write_json(value)
    else:
        write(f"{head(value, str(machine))}\n\n{text(value)}")


def told(quiet: bool) -> Any:
    """What to do with a trial when it is done."""

    def tell(trial: Trial) -> None:
        say(
            f"{trial.n_prompt:,} tokens: prefill {trial.prefill_seconds:.2f} s, "
            f"{trial.n_decoded:,} decoded in {trial.decode_seconds:.2f} s"
        )

    return (lambda trial: None) if quiet else tell


def head(value: dict[str, Any], machine: str) -> str:
    """Where it was measured, and whether speeds can be told."""
    limit = value["wired_limit"]
    wired = f"up to {format_bytes(limit)} can be wired" if limit else "no wired limit"
    named = {"Python": value["machine"]["python"]} | value["machine"]["versions"]
    versions = ", ".join(f"{name} {version}" for name, version in named.items() if version)
    lines = [f"{value['model']} on {machine}; {wired}", versions]
    if not value["wired"]:
        lines.append(f"no tokens a second: the weights were not wired, {value['why_not_wired']}")
    return "\n".join(lines)


def text(value: dict[str, Any]) -> str:
    """A line for each context: medians, in brackets the extremes of the trials."""
    rows = value["rows"]
    head = ["prompt", "prefill (s)", "decode (s)"]
    head += ["prefill (tok/s)", "decode (tok/s)", "at most", "of that"] if value["wired"] else [
        "prefill a token", "decode a token",
    ]  # fmt: skip
    lines = [(*head, "bytes a token", "peak memory")]
    for found in rows:
        cells = [
            f"{found['prompt_tokens']:,}",
            *(spread(found, it) for it in ("prefill", "decode")),
        ]
        cells += speeds(found) if value["wired"] else ratios(found, rows[0])
        needed = found["bytes_per_token"]["total"], found["peak_memory"]
        lines.append((*cells, *map(format_bytes, needed)))
    notes = [f"decode: {rows[0]['decoded_tokens']} tokens after the first; prompts: random tokens"]
    notes.append("bytes a token, at most: model (weights, cache and state; bandwidth over that)")
    if not value["wired"]:
        notes.append("prefill, decode a token: seconds, the shortest prompt's being 1")
    return "\n".join([table(lines), *notes])


def spread(found: dict[str, Any], name: str) -> str:
    """`1.23 [1.20, 1.31]`."""
    it = found[f"{name}_seconds"]
    return f"{it['median']:.2f} [{it['min']:.2f}, {it['max']:.2f}]"


def speeds(found: dict[str, Any]) -> list[str]:
    """Tokens a second, and their share of the ceiling."""
    ceiling, share = found["ceiling_tokens_per_second"], found["share_of_ceiling"]
    return [
        f"{found['prefill_tokens_per_second']:.1f}",
        f"{found['decode_tokens_per_second']:.2f}",
        f"{ceiling:.1f}" if ceiling else "-",
        f"{share:.0%}" if share else "-",
    ]


def ratios(found: dict[str, Any], first: dict[str, Any]) -> list[str]:
    """Seconds a token over those of the shortest prompt."""
    cells = []
    for name, tokens in (("prefill", "prompt_tokens"), ("decode", "decoded_tokens")):
        one, other = (it[f"{name}_seconds"]["median"] / it[tokens] for it in (found, first))
        cells.append(f"{one / other:.2f}")
    return cells
