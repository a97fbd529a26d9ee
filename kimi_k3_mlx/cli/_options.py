"""The argument parser of every verb, and the options that several verbs share.

Usage errors become `UsageError` with the nearest option that exists; nothing here exits.
"""

from __future__ import annotations

import argparse
import difflib
import re
import shutil
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from kimi_k3_mlx.errors import UsageError
from kimi_k3_mlx.units import DECIMAL

if TYPE_CHECKING:
    from kimi_k3_mlx.prune_plan import PrunePlan
    from kimi_k3_mlx.schema import BuildPlan
    from kimi_k3_mlx.tensors.source import Source

MAX_WIDTH = 100
REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*")
MAX_SEED = 2**64 - 1
UNITS = DECIMAL | {"MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Help that looks the same under every Python, with the defaults that matter."""

    def __init__(self, prog: str, **_: object) -> None:
        width = min(shutil.get_terminal_size().columns, MAX_WIDTH)
        super().__init__(prog, max_help_position=30, width=width)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        value = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
        return ", ".join(action.option_strings) + value

    def _get_help_string(self, action: argparse.Action) -> str | None:
        silent = action.default in (None, False, argparse.SUPPRESS) or action.nargs == 0
        return action.help if silent else f"{action.help} (default: %(default)s)"


class Parser(argparse.ArgumentParser):
    """A parser that raises UsageError where argparse would print and exit."""

    def __init__(self, *, examples: Iterable[str], **options: str | None) -> None:
        lines = "\n".join(f"  {example}" for example in examples)
        super().__init__(
            prog=options["prog"],
            usage=options["usage"],
            description=options["description"],
            epilog=f"examples:\n{lines}",
            formatter_class=Formatter,
            allow_abbrev=False,
            add_help=False,
        )
        # Python 3.14 colours help by itself; docs/cli.md and pipes want plain text.
        self.color = False

    def parse(self, argv: list[str]) -> argparse.Namespace:
        """Parse a verb's arguments; an unknown option is named with the nearest one that exists."""
        known = [flag for flag in self._option_string_actions if flag.startswith("--")]
        for token in argv:
            flag = token.split("=")[0]
            if token == "--":
                break
            if flag.startswith("--") and flag not in known and " " not in token:
                hint = nearest(flag, known, f"{self.prog} --help")
                raise UsageError(f"unknown option {flag} for {self.prog}.", hint)
        return self.parse_args(argv)

    def error(self, message: str) -> NoReturn:
        """Raise instead of exiting."""
        hint = f"{self.prog} --help"
        if value_missing := re.fullmatch(r"argument (\S+): expected one argument", message):
            flag = value_missing[1].split("/")[0]
            hint = f"give a value; one that begins with - needs an equals sign: {flag}=-x"
        raise UsageError(f"{message}.", hint)


def nearest(word: str, known: Iterable[str], otherwise: str) -> str:
    """A hint that names the closest known word, or another command when none is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else otherwise


def source_options(parser: Parser, *, required: bool = True) -> None:
    """`--hf-path` and `--revision`: the checkpoint in Moonshot's layout."""
    group = parser.add_argument_group("source")
    group.add_argument(
        "--hf-path",
        "--model",
        dest="source",
        metavar="DIR|REPO",
        required=required,
        help="folder of the source checkpoint, or its repository on the Hub",
    )
    group.add_argument("--revision", metavar="NAME", help="branch, tag or commit on the Hub")


def opened(where: str, revision: str | None = None) -> Source:
    """The checkpoint in a folder, or on the Hub when it is named like a repository."""
    from kimi_k3_mlx.tensors.hub import open_repository
    from kimi_k3_mlx.tensors.local import open_source

    if REPOSITORY.fullmatch(where) and not Path(where).parent.exists():
        return open_repository(where, revision)
    if revision is not None:
        raise UsageError(
            f"--revision {revision} is for repositories on the Hub; {where} is a folder."
        )
    return open_source(Path(where))


def opened_as_begun(args: argparse.Namespace, source: Source, out: Path) -> Source:
    """The source, at the commit that an unfinished build in the folder began with."""
    from kimi_k3_mlx.convert.folder import begun_commit
    from kimi_k3_mlx.tensors.hub import HubSource

    commit = begun_commit(out)
    moved = isinstance(source, HubSource) and commit not in (None, source.id.commit)
    return opened(args.source, commit) if moved and args.revision is None else source


def plan_options(parser: Parser) -> None:
    """`--profile`, `--prune-plan`, and what changes them."""
    group = parser.add_argument_group("build")
    group.add_argument(
        "--profile", metavar="NAME", default="mxfp4", help="a profile's name, or a .toml file"
    )
    group.add_argument("--prune-plan", metavar="FILE", help="plan that says which experts stay")
    group.add_argument(
        "--pad-uniform",
        action="store_true",
        help="fill layers up to one count with experts that are never chosen, for stock tools",
    )
    group.add_argument("--q-bits", metavar="N", type=positive, help="trunk: 4, 5, 6 or 8 bits")
    group.add_argument(
        "--q-group-size", metavar="N", type=positive, help="trunk: 32 or 64 weights a scale"
    )
    group.add_argument("--q-mode", metavar="MODE", help="trunk: affine or mxfp8")
    group.add_argument(
        "--allow-requantize",
        action="store_true",
        help="allow profiles and plans that store MXFP4 experts in fewer bits",
    )


def planned(args: argparse.Namespace, source: Source, prune: PrunePlan | None) -> BuildPlan:
    """The plan that `plan_options` ask for."""
    from kimi_k3_mlx.convert.plan import plan_build
    from kimi_k3_mlx.convert.profiles import load_profile, with_trunk

    profile = load_profile(args.profile)
    if args.q_bits or args.q_group_size or args.q_mode:
        profile = with_trunk(profile, args.q_mode, args.q_bits, args.q_group_size)
    if args.pad_uniform:
        if prune is None:
            raise UsageError("--pad-uniform needs a plan.", "give one with --prune-plan.")
        prune = replace(prune, pad_uniform=True)
    low = prune.low if prune and any(layer.low for layer in prune.layers.values()) else None
    fewer = [q for q in (profile.experts, low) if q and q.mode != "mxfp4"]
    if fewer and not args.allow_requantize:
        raise UsageError(
            f"this requantizes MXFP4 experts to {fewer[0]}, which loses what no calibration "
            "has weighed.",
            "pass --allow-requantize if you mean it; the loss is printed.",
        )
    return plan_build(source, profile, prune)


def read_prune_plan(path: str | None) -> PrunePlan | None:
    """The plan in a file, if one is named."""
    from kimi_k3_mlx.prune_plan import read_plan

    if path is None:
        return None
    try:
        return read_plan(Path(path).read_text("utf-8"), path)
    except FileNotFoundError as error:
        raise UsageError(f"plan {path} doesn't exist.") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"plan {path} is not UTF-8: {error}.") from error


def common_options(parser: Parser, *, json: bool = True, quiet: bool = True) -> None:
    """`-q`, `--json` and `--help`, in the last group of every verb."""
    group = parser.add_argument_group("output")
    if quiet:
        group.add_argument("-q", "--quiet", action="store_true", help="no progress on stderr")
    if json:
        group.add_argument("--json", action="store_true", help="one JSON object on stdout")
    group.add_argument("-h", "--help", action="help", help="show this text")


def folder(text: str) -> Path:
    """A checkpoint's folder; the name of a repository is answered with how to fetch it."""
    path = Path(text)
    if REPOSITORY.fullmatch(text) and not path.parent.exists():
        raise UsageError(
            f"{text} is not a folder.",
            f"fetch it first: kimi-k3 download {text} --local-dir ./{path.name}",
        )
    return path


def positive(text: str) -> int:
    """An integer of at least one."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def count(text: str) -> int:
    """An integer of at least zero."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def seed(text: str) -> int:
    """An unsigned integer of 64 bits."""
    value = count(text)
    if value > MAX_SEED:
        raise argparse.ArgumentTypeError(f"{text} is more than {MAX_SEED}, the largest seed")
    return value


def fraction(text: str) -> float:
    """A number from 0 to 1."""
    return number(text, 1.0, "from 0 to 1")


def not_negative(text: str) -> float:
    """A finite number of at least 0."""
    return number(text, sys.float_info.max, "of at least 0")


def number(text: str, highest: float, wanted: str) -> float:
    """A number from 0 to `highest`."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 <= value <= highest:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number {wanted}")
    return value


def n_bytes(text: str) -> int:
    """Bytes with a unit: 451GB, 420GiB, or a plain number."""
    match = SIZE.fullmatch(text.strip())
    units = {name.upper(): value for name, value in UNITS.items()} | {"": 1}
    if not match or match[2].upper() not in units:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 451GB or 420GiB")
    return int(float(match[1]) * units[match[2].upper()])


def memory_size(text: str) -> int:
    """Bytes to run in: at least one."""
    value = n_bytes(text)
    if not value:
        raise argparse.ArgumentTypeError(f"{text!r} is no memory to run in: give it as 64GB")
    return value


def budgets(text: str) -> int | dict[str, int]:
    """A number for each source, or `code=50000,zh=20000` for those that are named."""
    if "=" not in text:
        return positive(text)
    found = {}
    for part in text.split(","):
        name, _, value = part.rpartition("=")
        if not name.strip() or name.strip() in found:
            raise argparse.ArgumentTypeError(f"{part!r} is not one source's budget: code=50000")
        found[name.strip()] = positive(value)
    return found
