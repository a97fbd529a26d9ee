"""The disks that source and build lie on: where they are mounted, how fast they read.

Input: paths. Output: paths, and bytes a second. Only headers are read.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from kimi_k3_mlx.tensors.header import LENGTH_BYTES
from kimi_k3_mlx.tensors.local import BUFFER_BYTES, LocalSource, fill, open_uncached
from kimi_k3_mlx.tensors.source import Source

ENOUGH_BYTES = 8 << 20
PLENTY_BYTES = 32 << 20


def read_rate(source: Source) -> float | None:
    """Bytes a second of reading headers past the page cache; None when they are too few to tell,
    or on the Hub."""
    if not isinstance(source, LocalSource):
        return None
    buffer = memoryview(bytearray(BUFFER_BYTES))
    n_bytes, seconds = 0, 0.0
    for shard in source.shards:
        began = time.perf_counter()
        n_bytes += _read_header(source.path / shard, buffer)
        seconds += time.perf_counter() - began
        if n_bytes >= PLENTY_BYTES:
            break
    return n_bytes / seconds if n_bytes >= ENOUGH_BYTES else None


def _read_header(path: Path, buffer: memoryview) -> int:
    file = open_uncached(path)
    try:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        end = LENGTH_BYTES + int.from_bytes(os.pread(file, LENGTH_BYTES, 0), "little")
        for position in range(0, end, len(buffer)):
            fill(file, buffer[: end - position], position)
        return end
    finally:
        os.close(file)


def existing_parent(path: Path) -> Path:
    """The path, or its nearest parent that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def mount_point(path: Path) -> Path:
    """The root of the disk that an existing path is on."""
    path = path.resolve()
    while not os.path.ismount(path):
        path = path.parent
    return path
