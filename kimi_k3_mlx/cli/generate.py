"""Continue a prompt with a build, through mlx-lm's own generation.

The text goes to stdout as it is decoded, the numbers to stderr. The prompt is continued as it
stands: no chat format is put around it. Code that lies in the build is never executed.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from kimi_k3_mlx.cli._options import (
    Parser,
    common_options,
    count,
    folder,
    fraction,
    not_negative,
    positive,
    seed,
)
from kimi_k3_mlx.cli._output import say, write, write_json
from kimi_k3_mlx.errors import UsageError
from kimi_k3_mlx.units import format_bytes

if TYPE_CHECKING:
    from kimi_k3_mlx.runtime.generate import Completion

USAGE = "--model DIR -p TEXT [options]"
EXAMPLES = (
    "kimi-k3 generate --model ./Kimi-K3-mlx -p 'def quicksort('",
    "kimi-k3 generate --model ./Kimi-K3-mlx -p - -m 400 --temp 0.7 --top-p 0.95 < prompt.txt",
    "kimi-k3 generate --model ./Kimi-K3-mlx -p 'Once upon a time' --seed 1 --temp 1 --json",
)


def add_options(parser: Parser) -> None:
    """Declare the options; names and defaults are those of mlx_lm.generate."""
    model = parser.add_argument_group("model and prompt")
    model.add_argument(
        "--model", metavar="DIR", type=folder, required=True, help="folder of a build"
    )
    model.add_argument(
        "-p", "--prompt", metavar="TEXT", required=True, help="text to continue; - reads stdin"
    )
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "-m",
        "--max-tokens",
        metavar="N",
        type=positive,
        default=100,
        help="most tokens to generate",
    )
    sampling.add_argument(
        "--temp", metavar="T", type=not_negative, default=0.0, help="temperature; 0 is greedy"
    )
    sampling.add_argument(
        "--top-p", metavar="P", type=fraction, default=1.0, help="nucleus probability"
    )
    sampling.add_argument(
        "--top-k",
        metavar="K",
        type=count,
        default=0,
        help="most likely tokens to keep; 0 keeps all",
    )
    sampling.add_argument(
        "--min-p", metavar="P", type=fraction, default=0.0, help="least share of the best token"
    )
    sampling.add_argument("--seed", metavar="N", type=seed, help="seed of the sampler")
    common_options(parser)


def run(args: argparse.Namespace) -> None:
    """Load, generate, report."""
    prompt = read_prompt(args.prompt)
    # transformers warns that it does not know K3; only its tokenizer is used.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from kimi_k3_mlx.runtime.generate import Sampling, generate
    from kimi_k3_mlx.runtime.load import load

    sampling = Sampling(args.max_tokens, args.temp, args.top_p, args.top_k, args.min_p, args.seed)
    build = load(args.model)
    completion = generate(build, prompt, sampling, discard if args.json else stream)
    if args.json:
        write_json({"version": 1} | vars(completion))
        return
    write("")
    if not args.quiet:
        say(statistics(completion))


def read_prompt(option: str) -> str:
    """The prompt, from the option or from stdin; bytes that are no text may come as surrogates."""
    try:
        prompt = sys.stdin.read() if option == "-" else option
        prompt.encode()
    except UnicodeError as error:
        raise UsageError("the prompt is not UTF-8.", "convert it: iconv -f L1 -t UTF-8") from error
    if not prompt:
        raise UsageError("the prompt is empty.", "give some text: -p 'def main('")
    return prompt


def stream(text: str) -> None:
    """Show a piece of text at once."""
    write(text, end="")


def discard(text: str) -> None:
    """With --json the text comes at the end."""


def statistics(completion: Completion) -> str:
    """Counts, time and memory; speeds only if the weights were wired."""
    speeds = ""
    if completion.wired:
        speeds = (
            f", prompt {completion.prompt_tokens_per_second:.1f} tok/s"
            f", generation {completion.generation_tokens_per_second:.1f} tok/s"
        )
    return (
        f"[{completion.prompt_tokens} prompt + {completion.generation_tokens} generated tokens "
        f"in {completion.seconds:.1f} s{speeds}, peak {format_bytes(completion.peak_memory)}, "
        f"stopped by {completion.finish_reason}]"
    )
