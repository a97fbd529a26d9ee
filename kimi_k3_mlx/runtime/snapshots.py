"""Prompt caches to come back to: a conversation that is sent again prefills only what is new.

Input: token ids and the caches after them, at places of the caller's choice (message boundaries).
Output: for other token ids, a copy of the caches of the longest prefix that was kept. Snapshots lie
in RAM and, if a folder is given, on disk, where they outlive the process; in both places within
bounds of bytes and number, the least recently used going first. A key is a hash of the tokens and
of what the model is, so that a file of another model never matches; a file that can't be read is
removed. In Kimi-K3 a snapshot takes 434 MB, and 27,648 bytes for every token.
"""

from __future__ import annotations

import copy
import hashlib
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

from kimi_k3_mlx import __version__
from kimi_k3_mlx.errors import KimiError
from kimi_k3_mlx.runtime.cache import snapshot
from kimi_k3_mlx.tensors.source import CONFIG, INDEX
from kimi_k3_mlx.tensors.writer import sync, sync_folder
from kimi_k3_mlx.units import format_bytes

NAME = re.compile(r"k3-(?P<n_tokens>\d+)-(?P<key>[0-9a-f]{64})\.safetensors")
PARTIAL = ".k3-partial-"
UNREADABLE = (OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError)
"""What mlx and mlx-lm raise for a file that holds no prompt cache."""


class Bounds(NamedTuple):
    """The most that may be kept in one place."""

    n_bytes: int
    snapshots: int = 64


class Entry(NamedTuple):
    """A snapshot in RAM."""

    n_tokens: int
    n_bytes: int
    caches: list[Any]


def fingerprint(build: Path, *options: object) -> str:
    """What the caches of a build depend on: its files, by size and time, this package's version,
    and options that the caller names (the bits of the cache, say)."""
    digest = hashlib.sha256(repr((__version__, options)).encode())
    for path in sorted([build / CONFIG, build / INDEX, *build.glob("model*.safetensors")]):
        if path.is_file():
            status = path.stat()
            digest.update(repr((path.name, status.st_size, status.st_mtime_ns)).encode())
    return digest.hexdigest()


class Snapshots:
    """The snapshots of one model. `on_note` is told what went wrong with files."""

    def __init__(
        self,
        model: Any,
        model_fingerprint: str,
        ram: Bounds,
        folder: Path | None = None,
        disk: Bounds | None = None,
        on_note: Callable[[str], object] = str,
    ) -> None:
        if (folder is None) != (disk is None):
            raise KimiError("a folder of snapshots and its bounds come together.")
        self.model, self.fingerprint = model, model_fingerprint
        self.ram, self.folder, self.disk = ram, folder, disk
        self.on_note = on_note
        self.entries: OrderedDict[str, Entry] = OrderedDict()
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            for partial in folder.glob(f"{PARTIAL}*"):
                partial.unlink(missing_ok=True)

    @property
    def n_bytes(self) -> int:
        """Bytes in RAM."""
        return sum(entry.n_bytes for entry in self.entries.values())

    def put(self, tokens: Sequence[int], caches: list[Any]) -> None:
        """Keep a copy of the caches after exactly these tokens.

        Raises KimiError when the caches hold another number of tokens.
        """
        held = {c.offset for c in caches if hasattr(c, "offset")}
        if held - {len(tokens)}:
            raise KimiError(f"the caches hold {max(held)} tokens, not {len(tokens)}.")
        (key,) = (key for _, key in self.prefixes(tokens, [len(tokens)]))
        if key in self.entries or (self.folder and self.path(len(tokens), key).exists()):
            return
        kept = snapshot(self.model, caches)
        mx.eval([c.state for c in kept])
        self.keep(key, len(tokens), kept)
        self.write(key, len(tokens), kept)

    def nearest(self, tokens: Sequence[int]) -> tuple[list[Any] | None, int]:
        """A copy of the caches of the longest prefix that was kept, and its length; (None, 0) if
        there is none. At least one token is left, for the model to answer."""
        lengths = {entry.n_tokens for entry in self.entries.values()}
        lengths |= {int(name["n_tokens"]) for _, name in self.files()}
        shorter = [n for n in lengths if n < len(tokens)]
        for n, key in reversed(list(self.prefixes(tokens, shorter))):
            if key in self.entries:
                self.entries.move_to_end(key)
                return copy.deepcopy(self.entries[key].caches), n
            if (caches := self.read(key, n)) is not None:
                self.keep(key, n, copy.deepcopy(caches))
                return caches, n
        return None, 0

    def prefixes(self, tokens: Sequence[int], lengths: Iterable[int]) -> Iterator[tuple[int, str]]:
        """The keys of prefixes, shortest first."""
        ids = np.asarray(tokens, dtype="<u4")
        digest, done = hashlib.sha256(self.fingerprint.encode()), 0
        for n in sorted(lengths):
            digest.update(ids[done:n].tobytes())
            done = n
            yield n, digest.copy().hexdigest()

    def keep(self, key: str, n_tokens: int, caches: list[Any]) -> None:
        """Keep in RAM what fits."""
        n_bytes = sum(c.nbytes for c in caches)
        if n_bytes > self.ram.n_bytes:
            return
        self.entries[key] = Entry(n_tokens, n_bytes, caches)
        while self.n_bytes > self.ram.n_bytes or len(self.entries) > self.ram.snapshots:
            self.entries.popitem(last=False)

    def files(self) -> list[tuple[Path, re.Match[str]]]:
        """Snapshots on disk, of any model, the least recently used first."""
        if self.folder is None:
            return []
        found = [(path, NAME.fullmatch(path.name)) for path in self.folder.glob("k3-*")]
        named = [(path, name) for path, name in found if name]
        return sorted(named, key=lambda item: modified(item[0]))

    def path(self, n_tokens: int, key: str) -> Path:
        """Where a snapshot lies on disk."""
        return (self.folder or Path()) / f"k3-{n_tokens}-{key}.safetensors"

    def write(self, key: str, n_tokens: int, caches: list[Any]) -> None:
        """Keep on disk what fits: whole or not at all, even if the machine fails."""
        n_bytes = sum(c.nbytes for c in caches)
        if self.folder is None or self.disk is None or n_bytes > self.disk.n_bytes:
            return
        partial = self.folder / f"{PARTIAL}{key}.safetensors"
        try:
            self.make_room(n_bytes)
            save_prompt_cache(str(partial), caches, {"key": key})
            with partial.open("r+b") as file:
                sync(file.fileno())
            os.replace(partial, self.path(n_tokens, key))
            sync_folder(self.folder)
        except (OSError, RuntimeError) as error:
            partial.unlink(missing_ok=True)
            self.on_note(f"a snapshot of {format_bytes(n_bytes)} was not written: {error}")

    def make_room(self, n_bytes: int) -> None:
        """Remove the least recently used files until one more fits."""
        sizes = {path: path.stat().st_size for path, _ in self.files()}
        n_left, bound = sum(sizes.values()), self.disk or Bounds(0)
        for path in list(sizes):
            if n_left + n_bytes <= bound.n_bytes and len(sizes) < bound.snapshots:
                return
            path.unlink(missing_ok=True)
            n_left -= sizes.pop(path)

    def read(self, key: str, n_tokens: int) -> list[Any] | None:
        """The caches of a file, which is removed if it holds anything else."""
        path = self.path(n_tokens, key)
        if self.folder is None or not path.exists():
            return None
        try:
            caches, metadata = load_prompt_cache(str(path), return_metadata=True)
            mx.eval([c.state for c in caches])
            if metadata["key"] != key or len(caches) != len(self.model.layers):
                raise ValueError("it is of another text or model")
            os.utime(path)
        except UNREADABLE as error:
            path.unlink(missing_ok=True)
            self.on_note(f"{path} is no snapshot and was removed: {error}")
            return None
        return list(caches)


def modified(path: Path) -> float:
    """When a file was last used; 0 if another process has just removed it."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
