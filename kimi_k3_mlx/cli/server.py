"""Serve a build to programs that speak OpenAI's chat completions, on mlx-lm's own server.

One build, as it is; the model that a request names is not looked at. Requests are answered one
after the other. Code that lies in the build is never executed.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

from kimi_k3_mlx.cli._options import (
    Parser,
    common_options,
    count,
    folder,
    fraction,
    n_bytes,
    not_negative,
    positive,
)
from kimi_k3_mlx.cli._output import progress, say
from kimi_k3_mlx.cli.generate import cache_options

if TYPE_CHECKING:
    from kimi_k3_mlx.runtime.server.serve import Server

USAGE = "--model DIR [options]"
EXAMPLES = (
    "kimi-k3 server --model ./Kimi-K3-mlx",
    "kimi-k3 server --model ./Kimi-K3-mlx --prompt-cache-dir ./prompts --prompt-cache-bytes 16GB",
    'kimi-k3 server --model ./Kimi-K3-mlx --host 0.0.0.0 --api-key "$(cat key)"',
)
MOST_PORT = 65535
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def add_options(parser: Parser) -> None:
    """Declare the options; names are those of mlx_lm.server."""
    model = parser.add_argument_group("model and address")
    model.add_argument(
        "--model", metavar="DIR", type=folder, required=True, help="folder of a build"
    )
    model.add_argument("--host", metavar="HOST", default="127.0.0.1", help="address to listen on")
    model.add_argument("--port", metavar="N", type=port, default=8080, help="0 takes a free one")
    model.add_argument(
        "--api-key", metavar="KEY", help="what clients must send; needed if others reach --host"
    )
    model.add_argument(
        "--allowed-origins",
        metavar="LIST",
        type=lambda text: tuple(text.split(",")),
        default="*",
        help="web pages that may ask, by commas",
    )
    model.add_argument(
        "--log-level", metavar="LEVEL", choices=LEVELS, default="INFO", help="DEBUG to CRITICAL"
    )
    defaults = parser.add_argument_group("what a request gets that doesn't say")
    defaults.add_argument(
        "--max-tokens", metavar="N", type=positive, default=8192, help="most tokens of an answer"
    )
    defaults.add_argument(
        "--temp", metavar="T", type=not_negative, default=0.0, help="temperature; 0 is greedy"
    )
    defaults.add_argument(
        "--top-p", metavar="P", type=fraction, default=1.0, help="nucleus probability"
    )
    defaults.add_argument(
        "--top-k", metavar="K", type=count, default=0, help="likeliest tokens to keep; 0 keeps all"
    )
    defaults.add_argument(
        "--min-p", metavar="P", type=fraction, default=0.0, help="least share of the best token"
    )
    speed_options(parser)
    prompt_options(parser)
    common_options(parser, json=False)


def port(text: str) -> int:
    """A port's number; the system would take the rest of a larger one by 65,536."""
    if (number := count(text)) > MOST_PORT:
        raise argparse.ArgumentTypeError(f"{text} is more than {MOST_PORT}, the last port")
    return number


def speed_options(parser: Parser) -> None:
    """Declare how to compute."""
    speed = parser.add_argument_group("speed")
    speed.add_argument(
        "--lookup",
        action=argparse.BooleanOptionalAction,
        help="draft from the prompt and the output; without either: at temperature 0",
    )
    speed.add_argument(
        "--prefill-step-size",
        metavar="N",
        type=positive,
        default=4096,
        help="prompt tokens of one pass",
    )
    speed.add_argument(
        "--decode-concurrency",
        metavar="N",
        type=positive,
        default=1,
        help="requests answered at once",
    )
    speed.add_argument("--no-wire", action="store_true", help="let macOS page weights out")
    cache_options(parser)


def prompt_options(parser: Parser) -> None:
    """Declare where prompts are kept, and how many."""
    prompts = parser.add_argument_group("prompts that come again")
    prompts.add_argument(
        "--prompt-cache-size", metavar="N", type=positive, default=10, help="most in memory"
    )
    prompts.add_argument(
        "--prompt-cache-bytes", metavar="SIZE", type=n_bytes, default="8GiB", help="most in memory"
    )
    prompts.add_argument(
        "--prompt-cache-dir", metavar="DIR", type=Path, help="keep them on disk, too"
    )
    prompts.add_argument(
        "--prompt-cache-dir-bytes",
        metavar="SIZE",
        type=n_bytes,
        default="64GiB",
        help="most on disk",
    )


def run(args: argparse.Namespace) -> None:
    """Serve until somebody interrupts."""
    # transformers warns that it does not know K3; only its tokenizer is used.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from kimi_k3_mlx.runtime.server.serve import serve
    from kimi_k3_mlx.runtime.server.settings import Settings

    logging.basicConfig(
        level=args.log_level, format="%(asctime)s %(levelname)s %(message)s", force=True
    )
    # As a program only: who calls `main` keeps its handlers.
    if signal.getsignal(signal.SIGTERM) is signal.default_int_handler:
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is signal.default_int_handler:
                signal.signal(number, interrupt)
    options = vars(args).copy()
    options["wire"] = not options.pop("no_wire")
    for name in ("log_level", "quiet"):
        del options[name]

    # mlx-lm prints warnings to stdout, where only data may go.
    with redirect_stdout(sys.stderr), progress(args.quiet) as shown:

        def on_ready(server: Server) -> None:
            shown.close()
            say(f"listening at {server.url}; Ctrl-C ends it")

        serve(Settings(**options), shown, on_ready)


def interrupt(number: int, _frame: object) -> None:
    """End in order; the next signal ends the process at once, while MLX would abort it."""
    signal.signal(number, signal.SIG_DFL)
    raise KeyboardInterrupt
