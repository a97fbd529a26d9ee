"""Streams in a process that kills itself just before a chosen journal call; see test_resume.

Input: a build, a folder, the number of the call to die at (0: never), then how. Sends the number of
calls, the number of arrays and a hash. Importing this uses no MLX, so that a server can fork.
"""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kimi_k3_mlx.stream import engine, journal
from kimi_k3_mlx.stream.budget import make_batches
from kimi_k3_mlx.stream.engine import Lane, run_stream
from kimi_k3_mlx.stream.layers import open_layers
from kimi_k3_mlx.tensors.journal import Journal
from kimi_k3_mlx.tensors.local import open_source
from tests.stream.conftest import PLAN, with_blocks
from tests.stream.recorder import Adder

LANES = (Lane("parent"), Lane("pruned", PLAN))
MICRO = 64
calls = 0


def sequences() -> list[np.ndarray]:
    """The same in every process."""
    rng = np.random.default_rng(3)
    return [rng.integers(0, 512, length).astype(np.int32) for length in (40, 21, 20, 33, 9)]


def dying(function: Callable[..., Any], die_at: int) -> Callable[..., Any]:
    """The function, with death before the call of that number."""

    def counted(*arguments: Any) -> Any:
        global calls
        calls += 1
        if calls == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments)

    return counted


def main(build: Path, folder: Path, die_at: int, mode: str, outcome: Any) -> None:
    """Two groups, or one in mode `spill`; in mode `blocks`, three experts at a time."""
    journal.publish = dying(journal.publish, die_at)
    for name in ("record", "forget"):
        setattr(Journal, name, dying(getattr(Journal, name), die_at))
    engine.choose_budget = with_blocks(3 if mode == "blocks" else 0)
    layers, adder = open_layers(open_source(build)), Adder(8)
    budget = engine.choose_budget(layers, make_batches(sequences(), MICRO), len(LANES))
    memory = budget.fixed + budget.per_token * 2 * MICRO
    options = {"folder": folder, "fingerprint": "one", "spill": mode == "spill"}
    run_stream(layers, sequences(), LANES, adder, memory=memory, micro_tokens=MICRO, **options)
    digest = hashlib.sha256()
    for name, array in sorted(adder.sums.items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    outcome.send((calls, len(adder.sums), digest.hexdigest()))
