"""Files that are either whole or absent: written under another name, synced, renamed, synced.

Input: a header and blocks with their offsets. Output: a shard and its SHA-256. A shard that is not
finished is called `*.partial`, which no loader's glob matches.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import sys
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from kimi_k3_mlx.errors import CheckpointError

PARTIAL = ".partial"
FLUSH_BYTES = 8 << 20
RING_BYTES, RING_BUFFERS = 1 << 20, 8


class ShardWriter:
    """Writes a shard to `path` + `.partial` in a thread, and hashes there what comes in file order.

    Blocks are copied into a ring of buffers, so that the caller can go on reading at once. With
    `n_kept`, continues the partial file after that many bytes, which are hashed again. An exception
    inside the context removes the file, unless it was continued or has a checkpoint.
    """

    def __init__(self, path: Path, header: bytes, n_kept: int = 0) -> None:
        self.path = path
        self._header = header
        self._n_kept = n_kept
        self._has_checkpoint = n_kept > 0
        self._file = -1
        self._n_bytes = 0
        self._n_flushed = 0
        self._in_order = True
        self._digest = hashlib.sha256()
        self._thread = ThreadPoolExecutor(1, "writer")
        self._ring: deque[tuple[Future[None], memoryview]] = deque()

    @property
    def n_bytes(self) -> int:
        """Bytes taken so far, the header and the kept ones included."""
        return self._n_bytes

    def __enter__(self) -> ShardWriter:
        flags = os.O_RDWR if self._n_kept else os.O_RDWR | os.O_CREAT | os.O_TRUNC
        self._file = os.open(partial_path(self.path), flags, 0o644)
        try:
            if self._n_kept:
                self._keep()
            else:
                self.write_at(0, self._header)
        except BaseException:
            self._close(failed=True)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close(failed=kind is not None)

    def write_at(self, offset: int, block: bytes | memoryview) -> None:
        """Write a block at a file offset. Errors of earlier blocks surface here or later."""
        self._in_order = self._in_order and offset == self._n_bytes
        view = memoryview(block)
        for begin in range(0, len(view), RING_BYTES):
            piece = view[begin : begin + RING_BYTES]
            buffer = self._free_buffer()
            buffer[: len(piece)] = piece
            writing = self._thread.submit(self._write, offset + begin, buffer[: len(piece)])
            self._ring.append((writing, buffer))
            self._n_bytes += len(piece)

    def checkpoint(self) -> int:
        """Bring the bytes to the disk; return how many of them can be kept by another writer.

        None can once a block has come out of order.
        """
        self._settle()
        sync(self._file)
        self._has_checkpoint = True
        return self._n_bytes if self._in_order else 0

    def finish(self) -> str:
        """Bring the bytes to the disk; return their SHA-256. The file keeps its partial name."""
        self._settle()
        if not self._in_order:
            self._digest = self._hash_file()
        sync(self._file)
        os.close(self._file)
        self._file = -1
        return self._digest.hexdigest()

    def _keep(self) -> None:
        """Continue an earlier file: check it, cut it, hash it."""
        name, n_found = partial_path(self.path).name, os.fstat(self._file).st_size
        if n_found < self._n_kept:
            raise CheckpointError(
                f"{name} became shorter: {self._n_kept:,} bytes expected, {n_found:,} found."
            )
        if os.pread(self._file, min(len(self._header), self._n_kept), 0) != self._header:
            raise CheckpointError(f"{name} begins with another header than this build's.")
        os.ftruncate(self._file, self._n_kept)
        self._digest = self._hash_file()
        self._n_bytes = self._n_flushed = self._n_kept

    def _free_buffer(self) -> memoryview:
        """The oldest buffer of the ring, once it is written."""
        if len(self._ring) < RING_BUFFERS:
            return memoryview(bytearray(RING_BYTES))
        writing, buffer = self._ring.popleft()
        writing.result()
        return buffer

    def _settle(self) -> None:
        """Wait until all is written."""
        for writing, _ in self._ring:
            writing.result()

    def _write(self, offset: int, block: memoryview) -> None:
        """In the thread: hash the block and write it. All before it is written already."""
        if self._in_order:
            self._digest.update(block)
        while block:
            try:
                n_written = os.pwrite(self._file, block, offset)
            except OSError as error:  # a full disk names no file
                error.filename = str(partial_path(self.path))
                raise
            offset += n_written
            block = block[n_written:]
        if self._in_order and offset - self._n_flushed >= FLUSH_BYTES:
            start_flush(self._file, self._n_flushed, offset)
            self._n_flushed = offset

    def _hash_file(self) -> hashlib._Hash:
        with open(self._file, "rb", closefd=False) as file:
            file.seek(0)
            return hashlib.file_digest(file, "sha256")

    def _close(self, *, failed: bool) -> None:
        self._thread.shutdown()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if failed and not self._has_checkpoint:
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


def start_flush(file: int, begin: int, end: int) -> None:
    """Have Linux write a range now and not keep it, so that the last sync has little to do."""
    if sys.platform == "linux":
        os.posix_fadvise(file, begin, end - begin, os.POSIX_FADV_DONTNEED)


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
