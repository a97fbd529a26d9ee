"""Convert, verify, run, prune and show a picture to the small trained model that comes along.

Runs the same commands that you would type, and shows each. Needs no download; a minute or so.
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
SEQUENCES = ["--seq-len", "512", "--bos", "--tokens-per-source"]
TEXT = "Let the build continue the prompt; its text begins where the prompt ends."
TINY_TEXT = "With 5 million weights it writes what looks like Python, not what runs."
DOMAINS = ("code", "english", "chinese")
KEEP = "32"
"""Half of the tiny model's experts."""


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
    """Run the verbs one after the other."""
    began = time.monotonic()
    source = Path(args.source) if args.source else bundled_model()
    folder = nullcontext(args.out) if args.out else tempfile.TemporaryDirectory(prefix="kimi-k3-")
    with folder as out:
        commands = converting(source, Path(out) / "build", args)
        if not args.source:
            commands += [*pruning(source, Path(out), args), seeing(source, Path(out) / "build")]
        code = run_steps(commands)
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


Steps = list[tuple[str, list[str]]]
"""A sentence and a command for each step."""


def converting(source: Path, build: Path, args: argparse.Namespace) -> Steps:
    """From the checkpoint to text."""
    about = TEXT if args.source else f"{TEXT}\n{TINY_TEXT}"
    return [
        ("What is in the checkpoint? Only headers are read.", ["inspect", str(source)]),
        (
            "Write the MLX build: experts byte for byte, the rest value for value.",
            ["convert", "--hf-path", str(source), "--mlx-path", str(build), *again(build)],
        ),
        (
            "Compare every tensor of the build with the source.",
            ["verify", "--mlx-path", str(build), "--hf-path", str(source)],
        ),
        (about, ["generate", "--model", str(build), *text_options(args)]),
    ]


def pruning(source: Path, out: Path, args: argparse.Namespace) -> Steps:
    """From texts to a plan, to what it costs, to a build of half the experts."""
    at = ["--hf-path", str(source)]
    stats, plan, build = (str(out / name) for name in ("stats.safetensors", "plan.json", "pruned"))
    calibration, held_out = (
        ",".join(f"{source / part / domain}.txt={domain}" for domain in DOMAINS)
        for part in ("calibration", "held_out")
    )
    return [
        (
            "Measure which experts three kinds of text need, one layer in memory at a time.",
            ["calibrate", *at, "--corpus", calibration, *SEQUENCES, "3500", "--out", stats],
        ),
        (
            "Choose half of the experts of each layer.",
            ["plan", "--stats", stats, "--keep", KEEP, "--weights", "equal", "--out", plan],
        ),
        (
            "What does the plan cost? Measured on other texts, before anything is built.",
            ["compare", *at, "--plans", plan, "--text", held_out, *SEQUENCES, "1500"],
        ),
        (
            "Write the build of the plan, and compare it with the source.",
            ["convert", *at, "--prune-plan", plan, "--mlx-path", build, *again(Path(build))],
        ),
        ("", ["verify", *at, "--mlx-path", build]),
        ("The same prompt.", ["generate", "--model", build, *text_options(args)]),
    ]


def seeing(source: Path, build: Path) -> tuple[str, list[str]]:
    """A question about a picture that the tiny model has not been trained on."""
    picture = str(source / "pictures" / "red-circle.png")
    return (
        "Show it a picture: the tiny model has learnt eight colours and six shapes.",
        ["generate", "--model", str(build), "--image", picture, "-p", "The picture shows a"],
    )


def again(build: Path) -> list[str]:
    """A demo that is run again replaces its own build."""
    return ["--overwrite", "-y"] if build.exists() else []


def text_options(args: argparse.Namespace) -> list[str]:
    """What both builds continue, and how."""
    return ["-p", args.prompt, "-m", str(args.max_tokens), *SAMPLING]


def run_steps(commands: Steps) -> int:
    """Show and run each command; stop at the first that fails."""
    from kimi_k3_mlx.cli import main

    for number, (sentence, command) in enumerate(commands, 1):
        about = f"{sentence}\n" if sentence else ""
        say(f"\n[{number}/{len(commands)}] {about}$ kimi-k3 {shlex.join(command)}")
        code = main(command)
        sys.stdout.flush()
        if code:
            return code
    return 0
