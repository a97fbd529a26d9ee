"""The limit of memory that the GPU may wire: what a build needs, and the commands that set it.

Input: a `Machine` and the memory of a running build. Output: `Advice`, and `Command`s that a runner
executes. Nothing here is executed without one: `run_command` is the real runner, on macOS only.
"""

from __future__ import annotations

import plistlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from converters.config import read_dims
from kimi_k3_mlx.convert.memory import MIB, SYSTEM_RESERVE, Running, running
from kimi_k3_mlx.errors import DoesNotFitError, KimiError, UsageError
from kimi_k3_mlx.reap.sizes import RUNS
from kimi_k3_mlx.runtime.build import explained
from kimi_k3_mlx.runtime.machine import MAC, SYSCTL, LimitKey, Machine, limit_key
from kimi_k3_mlx.schema import Json
from kimi_k3_mlx.tensors.local import open_source
from kimi_k3_mlx.units import format_bytes

LABEL = "io.github.kimi-k3-mlx.wired-limit"
DAEMONS = Path("/Library/LaunchDaemons")
SUDO, LAUNCHCTL, INSTALL = "/usr/bin/sudo", "/bin/launchctl", "/usr/bin/install"
PLUTIL, REMOVE = "/usr/bin/plutil", "/bin/rm"
PROGRAMS = (SUDO, SYSCTL, LAUNCHCTL, INSTALL, PLUTIL, REMOVE)
"""With their folders: nothing that PATH finds is run as root."""
LEAST_MB = 4096
"""What `--set` accepts at least: with less the screen itself may starve."""


class Command(NamedTuple):
    """A program and its arguments; one that `may_fail` only tidies up."""

    argv: tuple[str, ...]
    may_fail: bool = False

    def __str__(self) -> str:
        """As one types it: `sudo sysctl …`."""
        return " ".join(Path(part).name if part in PROGRAMS else part for part in self.argv)


Runner = Callable[[Sequence[str]], int]
"""Executes a program and returns its exit status."""


@dataclass(frozen=True)
class Advice:
    """What a machine needs for a build.

    `enough`: nothing to do. `raise`: set the limit. `tight`: set it, and mlx-lm still warns, since
    weights are over 0.9 of the most that can be wired. `no`: it doesn't fit.
    """

    verdict: str
    set_mb: int
    """The limit to set, in MiB."""
    now_mb: int
    """The limit as it is."""
    most_mb: int
    """RAM without what the system keeps."""
    memory: Running

    def to_json(self) -> Json:
        """A JSON object."""
        return asdict(self) | {"n_bytes": self.memory.n_bytes}


def memory_of(build: Path, context: int, sequences: int = 1) -> Running:
    """Memory of a build when it runs, by its headers; caches and states are per sequence."""
    with explained(build):
        source = open_source(build)
        one = running(read_dims(source.config), source.total_size, context)
    return replace(one, n_cache=sequences * one.n_cache, n_state=sequences * one.n_state)


def most_mb(machine: Machine) -> int:
    """MiB that may be wired at most, so that the system keeps 16 GiB."""
    return max(0, machine.ram - SYSTEM_RESERVE) // MIB


def advise(machine: Machine, memory: Running) -> Advice:
    """The limit that a build needs here: by the rule of `Running.on`, and this machine's limit."""
    fit = memory.on(machine.ram_gib)
    now_mb = machine.limit // MIB
    verdict = fit.verdict
    if verdict in RUNS:
        verdict = "enough" if now_mb >= fit.wired_limit_mb else "raise"
    return Advice(verdict, fit.wired_limit_mb, now_mb, most_mb(machine), memory)


def check_fits(machine: Machine, advice: Advice) -> None:
    """Raise DoesNotFitError when the machine is too small for the build."""
    if advice.verdict == "no":
        raise DoesNotFitError(
            f"{format_bytes(advice.memory.n_bytes)} would have to be wired, but of "
            f"{machine.ram_gib} GB at most {format_bytes(advice.most_mb * MIB)} can be: the system "
            f"keeps {format_bytes(SYSTEM_RESERVE)}.",
            "a smaller --context, fewer --sequences, or a smaller build: kimi-k3 fit",
        )


def check_setting(machine: Machine, mib: int) -> None:
    """Raise UsageError for a limit that leaves the system, or the GPU, too little."""
    if mib > most_mb(machine):
        raise UsageError(
            f"--set {mib} is more than {most_mb(machine)} MiB: of {machine.ram // MIB} MiB the "
            f"system keeps {SYSTEM_RESERVE // MIB}.",
            f"at most: kimi-k3 wired-limit --set {most_mb(machine)}",
        )
    if mib < LEAST_MB:
        raise UsageError(
            f"--set {mib} is less than {LEAST_MB} MiB; it counts MiB, and 512 GB are 524288.",
            "to go back to the system's default: kimi-k3 wired-limit --undo",
        )


def check_mac(machine: Machine) -> None:
    """Raise UsageError where there is no such limit."""
    if not machine.is_mac:
        raise UsageError(
            f"not a Mac: {machine}; there is no wired limit to set.",
            "run it on the Mac; what a build needs there: kimi-k3 wired-limit --model DIR",
        )


def set_command(key: LimitKey, mib: int) -> Command:
    """`sudo sysctl iogpu.wired_limit_mb=…`; 0 is the system's default."""
    return Command((SUDO, SYSCTL, key.setting(mib)))


def plist(key: LimitKey, mib: int) -> bytes:
    """A LaunchDaemon that sets the limit when the Mac starts."""
    arguments = [SYSCTL, key.setting(mib)]
    return plistlib.dumps({"Label": LABEL, "ProgramArguments": arguments, "RunAtLoad": True})


def plist_path(folder: Path) -> Path:
    """Where the LaunchDaemon lies."""
    return folder / f"{LABEL}.plist"


def commands(machine: Machine, mib: int, how: str, place: Path, folder: Path) -> list[Command]:
    """What `apply`, `persist` or `undo` run; a plist is written to `place` for root to copy."""
    key = limit_key(machine.macos)
    installed = plist_path(folder)
    target = str(installed)
    bootout = Command((SUDO, LAUNCHCTL, "bootout", f"system/{LABEL}"), may_fail=True)
    unload = [bootout] if installed.exists() else []
    if how == "undo":
        removal = [*unload, Command((SUDO, REMOVE, target))] if unload else []
        return [*removal, set_command(key, 0)]
    if how == "apply":
        return [set_command(key, mib)]
    written = plist_path(place)
    written.write_bytes(plist(key, mib))
    return [
        Command((PLUTIL, "-lint", "-s", str(written))),
        set_command(key, mib),
        Command((SUDO, INSTALL, "-o", "root", "-g", "wheel", "-m", "644", str(written), target)),
        *unload,
        Command((SUDO, LAUNCHCTL, "bootstrap", "system", target)),
    ]


def execute(commands: Sequence[Command], runner: Runner) -> None:
    """Run the commands in order; raise KimiError, naming it, at the first that fails."""
    for command in commands:
        status = runner(command.argv)
        if status and not command.may_fail:
            raise KimiError(
                f"{command} failed with status {status}.", f"try it yourself: {command}"
            )


def run_command(argv: Sequence[str]) -> int:
    """The real runner; what the program prints goes to stderr, since stdout is for data."""
    if sys.platform != MAC.lower():
        raise KimiError(f"{argv[0]} is not run on {sys.platform}: this is for macOS.")
    return subprocess.run(argv, stdout=2, check=False).returncode
