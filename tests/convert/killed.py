"""Kills conversions at many moments and continues them: a program of its own, as it forks.

    python -m tests.convert.killed SOURCE OTHER_SOURCE SCRATCH

Counts the calls that change the disk in one whole run. Then, for a choice of them, a forked child
converts and kills itself with SIGKILL there (in mid-write for a write); the parent looks at what is
left, runs the same conversion again and compares trees. Then the same, at fewer moments, with a
quantized trunk, and with runs that overwrite a build of OTHER_SOURCE. Prints JSON: one object for
each kill.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from kimi_k3_mlx.convert import run as run_module
from kimi_k3_mlx.convert.plan import plan_build
from kimi_k3_mlx.convert.profiles import load_profile
from kimi_k3_mlx.convert.run import run
from kimi_k3_mlx.schema import BuildPlan
from kimi_k3_mlx.tensors.journal import read_journal
from kimi_k3_mlx.tensors.local import open_source
from kimi_k3_mlx.tensors.source import Source
from kimi_k3_mlx.tensors.writer import partial_path
from tests.convert.damage import tree

CALLS = ("pwrite", "fsync", "replace", "unlink", "mkdir", "truncate")
WRITES_BETWEEN_KILLS = 30
COMPUTED_BETWEEN_KILLS = 12


@contextmanager
def watched(stop_at: int | None) -> Iterator[list[str]]:
    """Record the calls that change the disk; die at number `stop_at`, a write half done."""
    made: list[str] = []
    real = {name: getattr(os, name) for name in CALLS}

    def watch(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            made.append(name)
            if len(made) - 1 == stop_at:
                if name == "pwrite":
                    file, data, position = arguments
                    real[name](file, bytes(data)[: len(data) // 2], position)
                os.kill(os.getpid(), signal.SIGKILL)
            # Nobody pulls the plug in this test: real syncing would only cost time.
            return None if name == "fsync" else real[name](*arguments, **options)

        return call

    for name in CALLS:
        setattr(os, name, watch(name))
    try:
        yield made
    finally:
        for name, function in real.items():
            setattr(os, name, function)


def chosen(made: list[str]) -> list[int]:
    """Every call but writes, and some of those: most are alike."""
    writes = [number for number, name in enumerate(made) if name == "pwrite"]
    skipped = set(writes) - set(writes[7::WRITES_BETWEEN_KILLS])
    return [number for number in range(len(made)) if number not in skipped]


def written_at(path: Path) -> int:
    """When a journalled shard was written; it may still have its partial name."""
    found = path if path.exists() else partial_path(path)
    return found.stat().st_mtime_ns


def kill_and_continue(plan: BuildPlan, source: Source, out: Path, number: int) -> dict[str, Any]:
    """One kill: what was left, and what became of it."""
    child = os.fork()
    if not child:
        with watched(number):
            run(plan, source, out)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    journal = read_journal(out) if out.is_dir() else None
    times = {name: written_at(out / name) for name in (journal.records if journal else {})}
    loads = (out / "config.json").is_file()
    left = tree(out) if loads else {}
    with watched(None):
        run(plan, source, out)
    after = tree(out)
    return {
        "killed": os.WIFSIGNALED(status),
        "loads": loads,
        "finished": list(times),
        "rewritten": [name for name, time in times.items() if written_at(out / name) != time],
        "changed_though_loadable": [
            name for name, sha256 in left.items() if after.get(name, sha256) != sha256
        ],
        "tree": after,
    }


def kill_and_overwrite(plan: BuildPlan, source: Source, out: Path, number: int) -> dict[str, Any]:
    """One kill of an overwriting run, and what became of it after a second one."""
    child = os.fork()
    if not child:
        with watched(number):
            run(plan, source, out, overwrite=True)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    with watched(None):
        run(plan, source, out, overwrite=True)
    return {"killed": os.WIFSIGNALED(status), "tree": tree(out)}


def folder_to_overwrite(old: Path, out: Path) -> Path:
    """A finished build with files and folders of the user's beside it."""
    shutil.copytree(old, out)
    (out / "tokenizer_notes.md").write_text("mine")
    (out / "tokenizer_old").mkdir()
    (out / "tokenizer_old" / "tokenizer.json").write_text("mine too")
    return out


def overwritten(plan: BuildPlan, source: Source, old: Path, scratch: Path) -> dict[str, Any]:
    """Die at each chosen moment of an overwriting run."""
    whole = folder_to_overwrite(old, scratch / "overwritten")
    with watched(None) as made:
        run(plan, source, whole, overwrite=True)
    outcomes = {}
    for number in chosen(made):
        out = folder_to_overwrite(old, scratch / f"overwritten-{number}")
        outcomes[f"{number} {made[number]}"] = kill_and_overwrite(plan, source, out, number)
        shutil.rmtree(out)
    return outcomes


def quantized(source: Source, scratch: Path) -> dict[str, Any]:
    """Die at a few moments of a conversion that computes and writes out of order.

    MLX's threads don't survive a fork: every run has a child of its own.
    """
    plan = plan_build(source, load_profile("mxfp4-q8"))
    whole, calls = scratch / "quantized", scratch / "calls.json"

    def count() -> None:
        with watched(None) as made:
            run(plan, source, whole)
        calls.write_text(json.dumps(made))

    in_child(count)
    made = json.loads(calls.read_text())
    outcomes = {}
    for number in chosen(made)[3::COMPUTED_BETWEEN_KILLS]:
        out = scratch / f"quantized-{number}"
        killed = in_child(partial(run_watched, plan, source, out, number))
        in_child(partial(run_watched, plan, source, out, None))
        outcomes[f"{number} {made[number]}"] = {"killed": killed, "tree": tree(out)}
    return {"whole": tree(whole), "kills": outcomes}


def run_watched(plan: BuildPlan, source: Source, out: Path, stop_at: int | None) -> None:
    """A run that dies at call number `stop_at`."""
    with watched(stop_at):
        run(plan, source, out)


def in_child(work: Callable[[], None]) -> bool:
    """Do it in a forked process; return whether that was killed."""
    child = os.fork()
    if not child:
        work()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def main(source_path: Path, other_path: Path, scratch: Path) -> None:
    """Convert once in peace, then die at each chosen moment."""
    run_module.CHECKPOINT_BYTES = 40_000  # three in a shard of these sizes
    source, other = open_source(source_path), open_source(other_path)
    plan = plan_build(source, load_profile("mxfp4"))
    run(plan_build(other, load_profile("mxfp4")), other, scratch / "old")
    with watched(None) as made:
        run(plan, source, scratch / "whole")
    kills = {}
    for number in chosen(made):
        out = scratch / f"killed-{number}"
        kills[f"{number} {made[number]}"] = kill_and_continue(plan, source, out, number)
        shutil.rmtree(out)
    whole = tree(scratch / "whole")
    again = overwritten(plan, source, scratch / "old", scratch)
    computed = quantized(source, scratch)
    outcome = {"whole": whole, "kills": kills, "overwritten": again, "quantized": computed}
    sys.stdout.write(json.dumps(outcome))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
