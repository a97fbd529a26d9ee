"""A checkpoint in a folder: opened by its headers, read in uncached blocks.

Input: a folder. Output: `LocalSource`. Builds have the same form and open the same way.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from kimi_k3_mlx.errors import CheckpointError, UsageError
from kimi_k3_mlx.schema import Json, Span, canonical
from kimi_k3_mlx.tensors.header import Header, read_header
from kimi_k3_mlx.tensors.source import (
    CONFIG,
    DOWNLOAD,
    INDEX,
    MANIFEST,
    Reader,
    Source,
    assemble,
    checked_weight_map,
    download_hint,
    parse_json,
    paused_collector,
)

BUFFER_BYTES = 1 << 20  # bigger buffers and more readers were slower on the disks measured


@dataclass(frozen=True)
class LocalSource(Source):
    """A checkpoint in the folder `where`."""

    @property
    def path(self) -> Path:
        """The folder."""
        return Path(self.where)

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.resolve().name

    def reader(self) -> LocalReader:
        """A context manager that reads tensor bytes."""
        return LocalReader(self)

    def files(self) -> list[str]:
        """Names of all entries but subfolders that have no extension, sorted."""
        entries = self.path.iterdir()
        return sorted(entry.name for entry in entries if entry.suffix or not entry.is_dir())

    def read_file(self, name: str) -> bytes:
        """A small file's content."""
        return (self.path / name).read_bytes()

    def state(self) -> str:
        """Hash of all shards' sizes and modification times: has a file changed since?"""
        stats = {name: (self.path / name).stat() for name in self.shards}
        times = {name: (stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}
        return hashlib.sha256(canonical(times)).hexdigest()


class LocalReader(Reader):
    """Reads through one reused buffer; keeps shards open until exit."""

    def __init__(self, source: LocalSource) -> None:
        self._source = source
        self._files: dict[str, int] = {}
        self._buffer = memoryview(bytearray(BUFFER_BYTES))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def blocks(self, spans: Iterable[Span]) -> Iterator[memoryview]:
        """Blocks of 1 MiB, the last one of a span shorter."""
        places = map(self._place, spans)
        following = next(places, None)
        while (place := following) is not None:
            if (following := next(places, None)) is not None:
                following.announce()
            yield from self._blocks(place)
            place.forget()

    def _place(self, span: Span) -> _Place:
        shard = self._source.weight_map[span.tensor]
        file = self._files.get(shard)
        if file is None:
            file = self._files[shard] = open_uncached(self._source.path / shard)
        start = self._source.tensors[span.tensor].begin
        return _Place(file, shard, span.tensor, start + span.begin, start + span.end)

    def _blocks(self, place: _Place) -> Iterator[memoryview]:
        position = place.begin
        while position < place.end:
            block = self._buffer[: place.end - position]
            if (n_read := fill(place.file, block, position)) < len(block):
                raise CheckpointError(
                    f"{place.shard} became shorter while it was read: tensor {place.tensor} "
                    f"ends at byte {place.end:,}, the file at {position + n_read:,}.",
                    _hint(self._source.path, download_hint(place.shard)),
                )
            yield block
            position += n_read


class _Place(NamedTuple):
    """A range of an open file. Linux is told of it, as macOS has F_NOCACHE instead."""

    file: int
    shard: str
    tensor: str
    begin: int
    end: int

    def announce(self) -> None:
        """Have the first block read while the range before is being worked on."""
        if sys.platform == "linux" and self.begin < self.end:
            n_bytes = min(BUFFER_BYTES, self.end - self.begin)
            os.posix_fadvise(self.file, self.begin, n_bytes, os.POSIX_FADV_WILLNEED)

    def forget(self) -> None:
        """Free the pages: they are faster used again than new ones found."""
        if sys.platform == "linux" and self.begin < self.end:
            n_bytes = self.end - self.begin
            os.posix_fadvise(self.file, self.begin, n_bytes, os.POSIX_FADV_DONTNEED)


def fill(file: int, block: memoryview, position: int) -> int:
    """Read into the whole block; return its length, or less where the file ends."""
    n_done = 0
    while n_done < len(block):
        n_read = os.preadv(file, [block[n_done:]], position + n_done)
        if n_read == 0:
            break
        n_done += n_read
    return n_done


def open_uncached(path: Path) -> int:
    """Open a file for reading; on macOS without filling the page cache, which holds the model."""
    file = os.open(path, os.O_RDONLY)
    if sys.platform == "darwin":
        fcntl.fcntl(file, fcntl.F_NOCACHE, 1)
    return file


def open_source(path: Path) -> LocalSource:
    """Open a checkpoint folder and check everything that headers tell.

    Raises CheckpointError for a missing or truncated shard, a tensor that index and shard disagree
    about, or a wrong total_size; UsageError when the folder doesn't exist.
    """
    path = Path(path)
    if not path.is_dir():
        raise UsageError(f"{path} is not a folder.", "give the folder that holds config.json.")
    try:
        with paused_collector():
            config, index = read_json(path / CONFIG), read_json(path / INDEX)
            _check_shards_exist(path, sorted(set(checked_weight_map(index).values())))
            contents = assemble(config, index, lambda name: _header(path / name), _commit(path))
    except CheckpointError as error:
        error.hint = _hint(path, error.hint)
        raise
    return LocalSource(str(path), *contents)


def read_json(path: Path, hint: str = "") -> Json:
    """Read a JSON object; raise CheckpointError when it is missing or damaged."""
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path.name} is missing in {path.parent}.",
            "give the folder of a whole checkpoint; an unfinished build has no config.json yet.",
        ) from error
    return parse_json(content, str(path), hint or download_hint(path.name))


def _hint(path: Path, hint: str) -> str:
    """What a build of ours lacks is not on the Hub: it is converted again."""
    if hint.startswith(DOWNLOAD) and (path / MANIFEST).is_file():
        return "run the kimi-k3 convert that made it again, with --overwrite."
    return hint


def _check_shards_exist(path: Path, names: list[str]) -> None:
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        count = f" and {len(missing) - 1} more" if missing[1:] else ""
        raise CheckpointError(
            f"shard {missing[0]}{count} is named by {INDEX} but missing in {path}.",
            download_hint(missing[0]),
        )


def _header(path: Path) -> tuple[Header, int]:
    try:
        return read_header(path), path.stat().st_size
    except CheckpointError as error:
        error.hint = download_hint(path.name)
        raise


def _commit(path: Path) -> str | None:
    """The Hub commit of a cache snapshot or of a `--local-dir` download."""
    if path.resolve().parent.name == "snapshots":
        return path.resolve().name
    note = path / ".cache" / "huggingface" / "download" / f"{CONFIG}.metadata"
    lines = note.read_text("utf-8").splitlines() if note.is_file() else []
    return lines[0] if lines else None
