"""Work out, and with --apply set, the limit of memory that the GPU of a Mac may wire.

With --model it is what the build needs at that context: weights, caches, states, activations. The
system always keeps 16 GiB. Nothing changes without --apply, --persist or --undo, which show the
commands, ask, and run them with sudo.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from kimi_k3_mlx.cli._estimate import CONTEXT, mac_text
from kimi_k3_mlx.cli._options import Parser, common_options, folder, positive
from kimi_k3_mlx.cli._output import say, table, write, write_json
from kimi_k3_mlx.errors import KimiError, UsageError
from kimi_k3_mlx.units import format_bytes

if TYPE_CHECKING:
    from kimi_k3_mlx.convert.memory import Running
    from kimi_k3_mlx.runtime.machine import Machine

USAGE = "[--model DIR | --set MB] [--apply | --persist | --undo] [options]"
EXAMPLES = (
    "kimi-k3 wired-limit --model ./Kimi-K3-mlx --context 131072",
    "kimi-k3 wired-limit --model ./Kimi-K3-mlx --apply",
    "kimi-k3 wired-limit --set 480000 --persist",
    "kimi-k3 wired-limit --undo",
)


def add_options(parser: Parser) -> None:
    """Declare the options."""
    group = parser.add_argument_group("limit")
    value = group.add_mutually_exclusive_group()
    value.add_argument("--model", metavar="DIR", type=folder, help="folder of a build")
    value.add_argument("--set", metavar="MB", type=positive, dest="mib", help="the limit in MiB")
    group.add_argument(
        "--context", metavar="N", type=positive, default=CONTEXT, help="tokens of context"
    )
    group.add_argument(
        "--sequences", metavar="N", type=positive, default=1, help="sequences at a time"
    )
    change = parser.add_argument_group("change")
    how = change.add_mutually_exclusive_group()
    how.add_argument("--apply", action="store_true", help="set it, until the next start")
    how.add_argument(
        "--persist", action="store_true", help="set it now and at every start (LaunchDaemon)"
    )
    how.add_argument(
        "--undo", action="store_true", help="back to the system's default, now and at every start"
    )
    change.add_argument("-y", "--yes", action="store_true", help="do not ask before sudo")
    common_options(parser, quiet=False)


class Proposal(NamedTuple):
    """What is said, as text and as JSON, and the limit to set in MiB; None: nothing to do."""

    rows: list[tuple[str, str]]
    facts: dict[str, Any]
    mib: int | None


def run(args: argparse.Namespace) -> None:
    """Say the limit, and change it if asked to."""
    from kimi_k3_mlx.runtime import machine, wired

    if args.undo and (args.model or args.mib):
        raise UsageError("--undo goes back to the default: it has no --model and no --set.")
    changes = args.apply or args.persist or args.undo
    here = machine.Machine.read(args.model or Path.cwd(), machine.Probes())
    if changes or args.mib:
        wired.check_mac(here)
    rows, facts, mib = proposal(args, here)
    if not args.json:
        write(table(rows))
    if changes and mib is not None:
        facts["commands"] = change(args, here, mib)
    if args.json:
        write_json({"version": 1, "machine": here.to_json()} | facts)


def proposal(args: argparse.Namespace, here: Machine) -> Proposal:
    """What there is, what is needed, and the line that sets it."""
    from kimi_k3_mlx.runtime import wired

    if args.model:
        memory = wired.memory_of(args.model, args.context, args.sequences)
        return for_build(args, here, memory) if here.is_mac else elsewhere(here, memory)
    rows = [("now", now(here))]
    if args.undo:
        return Proposal(rows, {"set_mb": 0}, 0)
    if args.mib:
        wired.check_setting(here, args.mib)
        return Proposal([*rows, ("set", line(here, args.mib))], {"set_mb": args.mib}, args.mib)
    if args.apply or args.persist:
        raise UsageError("which limit?", "give --model DIR or --set MB.")
    return Proposal(rows, {}, None)


def elsewhere(here: Machine, memory: Running) -> Proposal:
    """What a build needs, on a machine that has no limit."""
    from kimi_k3_mlx.convert.memory import MACS

    facts = {"running": memory.to_json()}
    macs = [("on a", mac_text(memory.on(ram))) for ram in MACS]
    return Proposal([("now", now(here)), ("needs", needs(memory)), *macs], facts, None)


def for_build(args: argparse.Namespace, here: Machine, memory: Running) -> Proposal:
    """What a build needs on this Mac; raises DoesNotFitError when that is too much."""
    from kimi_k3_mlx.runtime import wired

    advice = wired.advise(here, memory)
    wired.check_fits(here, advice)
    rows = [("needs", needs(memory)), ("now", now(here))]
    facts = {"advice": advice.to_json(), "set_mb": advice.set_mb}
    if advice.verdict == "tight":
        say("warning: weights are over 0.9 of the most that can be set: mlx-lm will warn")
    if advice.now_mb >= advice.set_mb and not (args.persist and here.wired_limit):
        rows.append(("set", f"nothing: {advice.set_mb} MiB are enough"))
        return Proposal(rows, facts, None)
    return Proposal([*rows, ("set", line(here, advice.set_mb))], facts, advice.set_mb)


def needs(memory: Running) -> str:
    """The sum, part by part."""
    return (
        f"{format_bytes(memory.n_bytes)} wired: {format_bytes(memory.n_weights)} weights, "
        f"{format_bytes(memory.n_cache)} cache ({memory.context:,} tokens a sequence), "
        f"{format_bytes(memory.n_state)} state, {format_bytes(memory.n_activations)} activations"
    )


def now(here: Machine) -> str:
    """The limit as it is."""
    from kimi_k3_mlx.convert.memory import MIB
    from kimi_k3_mlx.runtime.machine import limit_key

    if not here.is_mac:
        return f"not a Mac: {here}"
    kind = "as set" if here.wired_limit else "the system's default"
    return f"{here.limit // MIB} MiB, {kind} ({limit_key(here.macos).name})"


def line(here: Machine, mib: int) -> str:
    """The command, as one types it."""
    from kimi_k3_mlx.runtime import machine, wired

    return str(wired.set_command(machine.limit_key(here.macos), mib))


def change(args: argparse.Namespace, here: Machine, mib: int) -> list[str]:
    """Show the commands, ask, run them, and read the limit again; returns what was run."""
    from kimi_k3_mlx.convert.memory import MIB
    from kimi_k3_mlx.runtime import machine, wired

    how = next(name for name in ("apply", "persist", "undo") if getattr(args, name))
    with TemporaryDirectory() as place:
        commands = wired.commands(here, mib, how, Path(place), wired.DAEMONS)
        for plist in Path(place).iterdir():
            say(f"{plist.name}:\n{plist.read_text('utf-8')}")
        say("\n".join(map(str, commands)))
        confirm(args.yes)
        wired.execute(commands, wired.run_command)
    found = machine.Machine.read(Path.cwd(), machine.Probes()).wired_limit
    if found != mib * MIB:
        raise KimiError(f"the limit is {found} bytes after it was set to {mib} MiB.")
    return [str(command) for command in commands]


def confirm(yes: bool) -> None:
    """Ask before sudo; without a terminal there is nobody to ask."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError("this changes a setting of the system.", "confirm it with -y.")
    sys.stderr.write("run this with sudo? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        raise UsageError("nothing was changed.")
