"""The journal of a build under way: who it is, and which shards are finished. One JSON a line.

The first line is the build's identity (hashes of plan, profile and source) and lists the files that
it will have; each later line records a shard, how much of a partial one is safe, or takes a record
back. A last line that a crash tore is dropped.
"""

from __future__ import annotations

import json
from pathlib import Path

from kimi_k3_mlx.errors import CheckpointError
from kimi_k3_mlx.schema import LOST, Json, ShardRecord, canonical
from kimi_k3_mlx.tensors.writer import sync, write_file

JOURNAL = "kimi_k3_mlx.journal.jsonl"


class Journal:
    """An open journal; `identity`, `records` and `partial` mirror the file."""

    def __init__(
        self,
        path: Path,
        identity: Json,
        records: dict[str, ShardRecord],
        n_bytes: int,
        partial: ShardRecord | None = None,
    ) -> None:
        self.path = path
        self.identity = identity
        self.records = records
        self.partial = partial
        """The shard under way, as far as it is on the disk."""
        self._n_bytes = n_bytes

    def record(self, shard: ShardRecord) -> None:
        """Note a shard whose bytes are on the disk."""
        self._append(shard.to_json())
        self.records[shard.name] = shard

    def checkpoint(self, shard: ShardRecord) -> None:
        """Note how many bytes of a shard's partial file are on the disk, without gaps."""
        self._append({"partial": shard.to_json()})
        self.partial = shard

    def forget(self, name: str) -> None:
        """Take a shard's record back before its bytes are written again."""
        self._append({"forget": name})
        del self.records[name]

    def _append(self, value: Json) -> None:
        line = canonical(value) + b"\n"
        with self.path.open("r+b") as file:
            file.truncate(self._n_bytes)  # drops a torn line
            file.seek(self._n_bytes)
            file.write(line)
            file.flush()
            sync(file.fileno())
        self._n_bytes += len(line)


def start_journal(folder: Path, identity: Json) -> Journal:
    """Begin a journal; the file appears with its first line complete."""
    path = folder / JOURNAL
    line = canonical(identity) + b"\n"
    write_file(path, line)
    return Journal(path, identity, {}, len(line))


def journal_files(folder: Path) -> tuple[str, ...]:
    """The files that a folder's journal lists, damaged or not; none without a journal."""
    path = folder / JOURNAL
    if not path.is_file():
        return ()
    with path.open("rb") as file:
        files = _line(path, 1, file.readline()).get("files", [])
    if not isinstance(files, list):
        raise _damaged(path, 1)
    return tuple(map(str, files))


def read_journal(folder: Path) -> Journal | None:
    """A folder's journal, or None; raise CheckpointError when more than the last line is bad."""
    path = folder / JOURNAL
    if not path.is_file():
        return None
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    identity: Json | None = None
    records: dict[str, ShardRecord] = {}
    partial: ShardRecord | None = None
    for number, line in enumerate(whole.splitlines(), 1):
        value = _line(path, number, line)
        if identity is None:
            identity = value
        elif "forget" in value:
            records.pop(str(value["forget"]), None)
        elif "partial" in value:
            partial = _record(path, number, value["partial"])
        else:
            shard = _record(path, number, value)
            records[shard.name] = shard
    if identity is None:
        raise _damaged(path, 1)
    return Journal(path, identity, records, len(whole), partial)


def _line(path: Path, number: int, line: bytes) -> Json:
    try:
        value = json.loads(line)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise _damaged(path, number) from error
    if not isinstance(value, dict):
        raise _damaged(path, number)
    return value


def _record(path: Path, number: int, value: Json) -> ShardRecord:
    try:
        return ShardRecord.from_json(value)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _damaged(path, number) from error


def _damaged(path: Path, number: int) -> CheckpointError:
    again = "pass --overwrite to begin the build again."
    return CheckpointError(f"{path} is damaged in line {number}.", LOST if number == 1 else again)
