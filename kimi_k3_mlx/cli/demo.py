"""Inspect, convert, verify and generate with the small trained model that comes along.

Runs the same commands that you would type, and shows each. Needs no download and under a minute.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
import time
from contextlib import nullcontext
from importlib import resources
from pathlib import Path

from kimi_k3_mlx.cli._options import Parser, common_options, positive
from kimi_k3_mlx.cli._output import say
from kimi_k3_mlx.errors import CheckpointError

USAGE = "[--out DIR] [options]"
EXAMPLES = (
    "kimi-k3 demo",
    "kimi-k3 demo --out ./demo",
    "kimi-k3 demo -p 'import os' -m 120",
)
PROMPT = "class Counter:\n    def __init__(self"
SAMPLING = ["--temp", "0.6", "--top-p", "0.9", "--seed", "3"]
"""A model this small repeats itself when it is greedy."""
TEXT = "Let the build continue the prompt; its text begins where the prompt ends."
TINY_TEXT = "With 5 million weights it writes what looks like Python, not what runs."


def add_options(parser: Parser) -> None:
    """Declare the options."""
    group = parser.add_argument_group("demo")
    group.add_argument(
        "--out", metavar="DIR", help="keep the build here (default: a temporary folder)"
    )
    group.add_argument(
        "--hf-path", dest="source", metavar="DIR", help="another source (default: the tiny model)"
    )
    group.add_argument(
        "-p", "--prompt", metavar="TEXT", default=PROMPT, help="text to continue (default: Python)"
    )
    group.add_argument(
        "-m", "--max-tokens", metavar="N", type=positive, default=80, help="tokens to generate"
    )
    common_options(parser, json=False, quiet=False)


def run(args: argparse.Namespace) -> int:
    """Run the four verbs one after the other."""
    began = time.monotonic()
    source = Path(args.source) if args.source else bundled_model()
    folder = nullcontext(args.out) if args.out else tempfile.TemporaryDirectory(prefix="kimi-k3-")
    with folder as out:
        code = run_steps(steps(source, Path(out) / "build", args))
    if code == 0:
        say(f"\ndone in {time.monotonic() - began:.0f} s")
    return code


def bundled_model() -> Path:
    """The tiny model inside the package."""
    path = Path(str(resources.files("kimi_k3_mlx") / "assets" / "tiny-k3"))
    if not (path / "config.json").is_file():
        raise CheckpointError(
            f"the tiny model is missing: {path}.", "give another source: --hf-path DIR"
        )
    return path


def steps(source: Path, build: Path, args: argparse.Namespace) -> list[tuple[str, list[str]]]:
    """A sentence and a command for each step."""
    text = ["-p", args.prompt, "-m", str(args.max_tokens), *SAMPLING]
    again = ["--overwrite", "-y"] if build.exists() else []
    return [
        ("What is in the checkpoint? Only headers are read.", ["inspect", str(source)]),
        (
            "Write the MLX build: experts byte for byte, the rest value for value.",
            ["convert", "--hf-path", str(source), "--mlx-path", str(build), *again],
        ),
        (
            "Compare every tensor of the build with the source.",
            ["verify", "--mlx-path", str(build), "--hf-path", str(source)],
        ),
        (
            TEXT if args.source else f"{TEXT}\n{TINY_TEXT}",
            ["generate", "--model", str(build), *text],
        ),
    ]


def run_steps(commands: list[tuple[str, list[str]]]) -> int:
    """Show and run each command; stop at the first that fails."""
    from kimi_k3_mlx.cli import main

    for number, (sentence, command) in enumerate(commands, 1):
        say(f"\n[{number}/{len(commands)}] {sentence}\n$ kimi-k3 {shlex.join(command)}")
        code = main(command)
        sys.stdout.flush()
        if code:
            return code
    return 0
