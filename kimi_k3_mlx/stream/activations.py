"""What runs between layers: the prefix and the block stack of every micro-batch and lane.

`Held` keeps them in memory. `Spilled` keeps them in files of a folder, and one micro-batch in
memory: a prefix is written after every layer, the blocks only when there is a new one.
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

import kimi_k3

FIELDS = ("prefix", "raw", "inv_rms")


class State(NamedTuple):
    """The prefix [B, T, H] and the finished blocks (a `kimi_k3.BlockStack`) of a micro-batch."""

    prefix: mx.array
    blocks: Any

    def arrays(self) -> dict[str, mx.array]:
        """By name; without blocks, the prefix alone."""
        arrays = {"prefix": self.prefix}
        if self.blocks.raw is not None:
            arrays |= {"raw": self.blocks.raw, "inv_rms": self.blocks.inv_rms}
        return arrays


def make_state(arrays: dict[str, mx.array], eps: float) -> State:
    """The state that `State.arrays` describes."""
    blocks = kimi_k3.BlockStack(eps)
    blocks.raw, blocks.inv_rms = arrays.get("raw"), arrays.get("inv_rms")
    return State(arrays["prefix"], blocks)


class Activations(ABC):
    """States by micro-batch of the group, and lane."""

    @abstractmethod
    def get(self, batch: int, lane: int) -> State:
        """The state as it was put last; the caller may change its block stack and put it again."""

    @abstractmethod
    def put(self, batch: int, lane: int, state: State) -> None:
        """Keep a state whose arrays are evaluated."""

    @abstractmethod
    def clear(self) -> None:
        """Forget all states."""

    def close(self) -> None:
        """Leave nothing behind."""
        self.clear()


class Held(Activations):
    """In memory."""

    def __init__(self) -> None:
        self._states: dict[tuple[int, int], State] = {}

    def get(self, batch: int, lane: int) -> State:
        """The state as it was put last."""
        return self._states[batch, lane]

    def put(self, batch: int, lane: int, state: State) -> None:
        """Keep a state."""
        self._states[batch, lane] = state

    def clear(self) -> None:
        """Forget all states."""
        self._states.clear()


class Spilled(Activations):
    """In files. What a killed run leaves there is worthless, and removed by the next one."""

    def __init__(self, folder: Path, eps: float) -> None:
        self._folder = folder
        self._eps = eps
        self._n_blocks: dict[tuple[int, int], int] = {}
        self.clear()

    def get(self, batch: int, lane: int) -> State:
        """The state as it was put last."""
        arrays: Any = mx.load(self._path(batch, lane, "prefix"))
        if self._n_blocks[batch, lane]:
            arrays.update(mx.load(self._path(batch, lane, "blocks")))
        mx.eval(arrays)
        return make_state(arrays, self._eps)

    def put(self, batch: int, lane: int, state: State) -> None:
        """Write what changed."""
        arrays = state.arrays()
        mx.save_safetensors(
            self._path(batch, lane, "prefix"), {"prefix": mx.contiguous(arrays.pop("prefix"))}
        )
        n_blocks = 0 if state.blocks.raw is None else len(state.blocks.raw)
        if n_blocks and self._n_blocks.get((batch, lane)) != n_blocks:
            mx.save_safetensors(self._path(batch, lane, "blocks"), arrays)
        self._n_blocks[batch, lane] = n_blocks

    def clear(self) -> None:
        """Remove all files."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        self._n_blocks.clear()

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, batch: int, lane: int, what: str) -> str:
        return str(self._folder / f"{batch}-{lane}-{what}.safetensors")
