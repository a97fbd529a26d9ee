"""Files that are either whole or absent: written under another name, synced, renamed, synced.

Input: a header and blocks of bytes in order. Output: a shard and its SHA-256. A shard that is not
finished is called `*.partial`, which no loader's glob matches.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import sys
from pathlib import Path
from types import TracebackType

PARTIAL = ".partial"


class ShardWriter:
    """Writes a shard to `path` + `.partial`; an exception inside the context removes that file."""

    def __init__(self, path: Path, header: bytes) -> None:
        self.path = path
        self.n_bytes = 0
        self._header = header
        self._digest = hashlib.sha256()
        self._file = -1

    def __enter__(self) -> ShardWriter:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        self._file = os.open(partial_path(self.path), flags, 0o644)
        try:
            self.write(self._header)
        except BaseException:
            self._drop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._drop()
        elif self._file >= 0:
            os.close(self._file)

    def write(self, block: bytes | memoryview) -> None:
        """Append a block."""
        rest = memoryview(block)
        self._digest.update(rest)
        while rest:
            n_written = os.pwrite(self._file, rest, self.n_bytes)
            self.n_bytes += n_written
            rest = rest[n_written:]

    def finish(self) -> str:
        """Bring the bytes to the disk; return their SHA-256. The file keeps its partial name."""
        sync(self._file)
        os.close(self._file)
        self._file = -1
        return self._digest.hexdigest()

    def _drop(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        partial_path(self.path).unlink(missing_ok=True)


def partial_path(path: Path) -> Path:
    """Where a file is while it is being written."""
    return path.with_name(path.name + PARTIAL)


def publish(path: Path) -> None:
    """Give a finished partial file its name, and make the renaming itself durable."""
    os.replace(partial_path(path), path)
    sync_folder(path.parent)


def write_file(path: Path, content: bytes) -> str:
    """Write a small file whole or not at all; return its SHA-256."""
    with ShardWriter(path, content) as writer:
        sha256 = writer.finish()
    publish(path)
    return sha256


def sync(file: int) -> None:
    """Flush a file to the medium; macOS needs more than fsync for that."""
    if sys.platform == "darwin":
        try:
            fcntl.fcntl(file, fcntl.F_FULLFSYNC)
        except OSError:  # network and some external disks refuse it
            os.fsync(file)
    else:
        os.fsync(file)


def sync_folder(path: Path) -> None:
    """Flush a folder's entries: renamed and removed names."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
