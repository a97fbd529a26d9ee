"""A checkpoint folder, opened by its headers: config, index and every shard's header, all checked.

Input: a folder. Output: `Source`, which knows every tensor's dtype, shape and place, and hands out
byte ranges. Opening reads no tensor byte. Builds have the same form and open the same way.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from kimi_k3_mlx.errors import CheckpointError, UsageError
from kimi_k3_mlx.schema import Json, SourceId, Span, TensorInfo, canonical
from kimi_k3_mlx.tensors.header import Header, read_header

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
MANIFEST = "kimi_k3_mlx.json"
DOWNLOAD = "re-download it: kimi-k3 download"
BUFFER_BYTES = 1 << 20  # bigger buffers and more readers were slower on the disks measured


@dataclass(frozen=True)
class Source:
    """An opened checkpoint; `tensors` hold byte ranges from the start of their shard's file."""

    path: Path
    id: SourceId
    config: Json = field(repr=False)
    shards: dict[str, int] = field(repr=False)
    """File bytes per shard name, in order."""
    weight_map: dict[str, str] = field(repr=False)
    """Shard name per tensor name."""
    tensors: dict[str, TensorInfo] = field(repr=False)

    @property
    def total_size(self) -> int:
        """Tensor bytes of the checkpoint."""
        return sum(tensor.n_bytes for tensor in self.tensors.values())

    def reader(self) -> Reader:
        """A context manager that reads tensor bytes."""
        return Reader(self)

    def state(self) -> str:
        """Hash of all shards' sizes and modification times: has a file changed since?"""
        stats = {name: (self.path / name).stat() for name in self.shards}
        times = {name: (stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}
        return hashlib.sha256(canonical(times)).hexdigest()


class Reader:
    """Reads ranges of tensors through one reused buffer; keeps shards open until exit."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._files: dict[str, int] = {}
        self._buffer = memoryview(bytearray(BUFFER_BYTES))

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def blocks(self, span: Span) -> Iterator[memoryview]:
        """The span's bytes in blocks of 1 MiB, the last one shorter.

        A block is valid until the next one is asked for.
        """
        shard = self._source.weight_map[span.tensor]
        file = self._files.get(shard)
        if file is None:
            file = self._files[shard] = open_uncached(self._source.path / shard)
        start = self._source.tensors[span.tensor].begin
        position, end = start + span.begin, start + span.end
        while position < end:
            block = self._buffer[: end - position]
            if (n_read := fill(file, block, position)) < len(block):
                raise CheckpointError(
                    f"{shard} became shorter while it was read: tensor {span.tensor} "
                    f"ends at byte {end:,}, the file at {position + n_read:,}.",
                    _hint(self._source.path, download_hint(shard)),
                )
            yield block
            position += n_read

    def read(self, name: str) -> bytes:
        """All bytes of one tensor."""
        span = Span(name, 0, self._source.tensors[name].n_bytes)
        return b"".join(bytes(block) for block in self.blocks(span))


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


def open_source(path: Path) -> Source:
    """Open a checkpoint folder and check everything that headers tell.

    Raises CheckpointError for a missing or truncated shard, a tensor that index and shard disagree
    about, or a wrong total_size; UsageError when the folder doesn't exist.
    """
    path = Path(path)
    if not path.is_dir():
        raise UsageError(f"{path} is not a folder.", "give the folder that holds config.json.")
    try:
        return _open(path)
    except CheckpointError as error:
        error.hint = _hint(path, error.hint)
        raise


def _open(path: Path) -> Source:
    config = read_json(path / CONFIG)
    index = read_json(path / INDEX)
    weight_map = _weight_map(index)
    expected = _names_by_shard(weight_map)
    _check_shards_exist(path, sorted(expected))
    tensors: dict[str, TensorInfo] = {}
    shards: dict[str, int] = {}
    digest = hashlib.sha256(canonical(config))
    for shard in sorted(expected):
        header = _header(path, shard)
        _check_names(shard, header, expected.pop(shard))
        tensors |= _placed(header)
        shards[shard] = (path / shard).stat().st_size
        digest.update(canonical([shard, shards[shard]]) + header.raw)
    identity = SourceId(_commit(path), digest.hexdigest())
    source = Source(path, identity, config, shards, weight_map, tensors)
    _check_total_size(index, source.total_size)
    return source


def read_json(path: Path, hint: str = "") -> Json:
    """Read a JSON object; raise CheckpointError when it is missing or damaged."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path.name} is missing in {path.parent}.",
            "give the folder of a whole checkpoint; an unfinished build has no config.json yet.",
        ) from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(
            f"{path} is not JSON: {error}.", hint or download_hint(path.name)
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object.", hint or download_hint(path.name))
    return value


def download_hint(name: str) -> str:
    """How to fetch one file again; a shard's name is cut after its number."""
    shard = re.match(r"model-\d+", name)
    pattern = f"{shard[0]}*" if shard else name
    return f"{DOWNLOAD} --include {pattern}"


def _hint(path: Path, hint: str) -> str:
    """What a build of ours lacks is not on the Hub: it is converted again."""
    if hint.startswith(DOWNLOAD) and (path / MANIFEST).is_file():
        return "run the kimi-k3 convert that made it again, with --overwrite."
    return hint


def _weight_map(index: Json) -> dict[str, str]:
    weight_map = index.pop("weight_map", None)
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{INDEX} has no weight_map.", download_hint(INDEX))
    shards = {str(shard): tensor for tensor, shard in weight_map.items()}
    for shard, tensor in shards.items():
        if os.path.basename(shard) != shard or shard != weight_map[tensor]:
            raise CheckpointError(
                f"{INDEX} puts tensor {tensor} into {shard!r}, which is no file name.",
                download_hint(INDEX),
            )
    # Half a million names and shard names are kept once, not once a place.
    return {sys.intern(tensor): sys.intern(shard) for tensor, shard in weight_map.items()}


def _names_by_shard(weight_map: dict[str, str]) -> dict[str, set[str]]:
    names: dict[str, set[str]] = defaultdict(set)
    for tensor, shard in weight_map.items():
        names[shard].add(tensor)
    return names


def _check_shards_exist(path: Path, names: list[str]) -> None:
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        count = f" and {len(missing) - 1} more" if missing[1:] else ""
        raise CheckpointError(
            f"shard {missing[0]}{count} is named by {INDEX} but missing in {path}.",
            download_hint(missing[0]),
        )


def _placed(header: Header) -> dict[str, TensorInfo]:
    """A shard's tensors by name, with ranges from the start of the file."""
    placed = {}
    for tensor in header.tensors:
        name = sys.intern(tensor.name)
        begin, end = header.n_bytes + tensor.begin, header.n_bytes + tensor.end
        placed[name] = TensorInfo(name, tensor.dtype, tensor.shape, begin, end)
    return placed


def _header(path: Path, name: str) -> Header:
    try:
        return read_header(path / name)
    except CheckpointError as error:
        error.hint = download_hint(name)
        raise


def _check_names(shard: str, header: Header, expected: set[str]) -> None:
    present = {tensor.name for tensor in header.tensors}
    for name in sorted(expected - present):
        raise CheckpointError(
            f"tensor {name} is named by {INDEX} but absent from {shard}.", download_hint(shard)
        )
    for name in sorted(present - expected):
        raise CheckpointError(
            f"tensor {name} is in {shard} but {INDEX} does not place it there.",
            download_hint(INDEX),
        )


def _check_total_size(index: Json, total_size: int) -> None:
    metadata = index.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise CheckpointError(
            f"{INDEX} has metadata that is not a JSON object.", download_hint(INDEX)
        )
    stated = metadata.get("total_size", total_size)
    if type(stated) is not int:
        raise CheckpointError(
            f"{INDEX} states a total_size of {str(stated)[:40]!r}, which is not a whole number.",
            download_hint(INDEX),
        )
    if stated != total_size:
        raise CheckpointError(
            f"{INDEX} states a total_size of {stated:,} bytes, the tensors have {total_size:,}.",
            download_hint(INDEX),
        )


def _commit(path: Path) -> str | None:
    """The Hub commit of a cache snapshot or of a `--local-dir` download."""
    if path.resolve().parent.name == "snapshots":
        return path.resolve().name
    note = path / ".cache" / "huggingface" / "download" / f"{CONFIG}.metadata"
    lines = note.read_text("utf-8").splitlines() if note.is_file() else []
    return lines[0] if lines else None
