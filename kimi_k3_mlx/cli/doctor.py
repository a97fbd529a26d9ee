"""Say whether this machine, and a build on it, are fit to run, and what to type if not.

Checks chip, macOS, Python, packages, memory and its limits, disk and file limit; with --model also
whether the build is whole, whether it fits, and how fast its disk reads. Exits 1 if a check fails.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from kimi_k3_mlx.cli._estimate import CONTEXT
from kimi_k3_mlx.cli._options import Parser, common_options, folder, positive
from kimi_k3_mlx.cli._output import write, write_json

if TYPE_CHECKING:
    from kimi_k3_mlx.runtime.doctor import Check

USAGE = "[--model DIR] [options]"
EXAMPLES = (
    "kimi-k3 doctor",
    "kimi-k3 doctor --model ./Kimi-K3-mlx --context 131072",
    "kimi-k3 doctor --json",
)


def add_options(parser: Parser) -> None:
    """Declare the options."""
    group = parser.add_argument_group("what to check")
    group.add_argument("--model", metavar="DIR", type=folder, help="folder of a build")
    group.add_argument(
        "--context", metavar="N", type=positive, default=CONTEXT, help="tokens of context"
    )
    common_options(parser, quiet=False)


def run(args: argparse.Namespace) -> int:
    """Check, and say what was found."""
    from kimi_k3_mlx.runtime import doctor, machine

    here = machine.Machine.read(args.model or Path.cwd(), machine.Probes())
    checks = doctor.examine(here, args.model, args.context)
    if args.json:
        listed = [check.to_json() for check in checks]
        write_json({"version": 1, "machine": here.to_json(), "checks": listed})
    else:
        write(text(checks))
    return int(any(check.status == doctor.FAIL for check in checks))


def text(checks: list[Check]) -> str:
    """A line for each check, and below it what mends it."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{check.status}  {check.name:{width}}  {check.fact}")
        if check.remedy:
            lines.append(f"{'':{width + 8}}{check.remedy}")
    counts = Counter(check.status for check in checks)
    lines.append(", ".join(f"{counts[status]} {status}" for status in ("PASS", "WARN", "FAIL")))
    return "\n".join(lines)
