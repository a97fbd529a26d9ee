"""What a run has added up so far, in memory or in a folder from which a killed run continues.

After every layer of a group the observer's deltas become a file, every few layers the activations
do; both are synced, hashed, renamed, and then noted in the journal of `tensors.journal`. The end of
a group folds its deltas into one file of totals. Deltas are always added in the same order, so
that a run that was killed ends with the very numbers of one that was not.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from kimi_k3_mlx.errors import CheckpointError, UsageError
from kimi_k3_mlx.schema import Json, ShardRecord, TensorInfo
from kimi_k3_mlx.stream.activations import FIELDS, Activations, State, make_state
from kimi_k3_mlx.tensors.header import encode_header, read_header
from kimi_k3_mlx.tensors.journal import JOURNAL, Journal, read_journal, start_journal
from kimi_k3_mlx.tensors.writer import ShardWriter, publish

Arrays = dict[str, NDArray[np.generic]]

MAXIMUM = "max_"
"""Arrays with this at the beginning of their names are merged by the larger value, not the sum."""

NAMES = {
    "float64": "F64", "float32": "F32", "int64": "I64", "int32": "I32", "uint64": "U64",
    "uint32": "U32", "uint16": "U16", "uint8": "U8", "int8": "I8", "bool": "BOOL",
}  # fmt: skip
DTYPES = {name: np.dtype(dtype) for dtype, name in NAMES.items()}
BF16 = "BF16"
KINDS = ("delta", "kept", "totals")
CORPUS = "corpus: its texts, pictures, tokenizer, --seq-len, budgets, --seed or --bos differ"
OF_BEFORE = {
    "checkpoint": "checkpoint",
    "fingerprint": CORPUS,
    "sequences": CORPUS,
    "lanes": "set of plans",
    "groups": "grouping of the text: --memory or --spill differ",
}
"""What a field of the identity stands for, causes before their consequences."""


def merge(totals: Arrays, delta: Arrays) -> None:
    """Add a delta to the totals."""
    for name, array in delta.items():
        if name not in totals:
            totals[name] = array.copy()
        elif name.startswith(MAXIMUM):
            totals[name] = np.maximum(totals[name], array)
        else:
            totals[name] = np.asarray(np.add(totals[name], array))


class Totals:
    """Sums in memory: a run without a folder begins at the beginning."""

    def __init__(self) -> None:
        self.arrays: Arrays = {}

    def n_finished(self) -> int:
        """Groups that are done with."""
        return 0

    def n_observed(self, group: int) -> int:
        """Layers of the group that are added up already; the head counts as one."""
        return 0

    def add(self, group: int, layer: int, delta: Arrays) -> None:
        """Add what was observed in one layer."""
        merge(self.arrays, delta)

    def keep(self, group: int, layer: int, states: Activations, n_batches: int, lanes: int) -> None:
        """Keep what goes into the layer."""

    def resume(self, group: int, states: Activations, eps: float) -> int:
        """Put back what was kept last; return the layer that it goes into, 0 for none."""
        return 0

    def finish(self, group: int) -> None:
        """Note that a group is done with."""


class FolderTotals(Totals):
    """Sums that a folder keeps. File names say what they hold: group and layer, groups finished."""

    def __init__(self, folder: Path, identity: Json) -> None:
        super().__init__()
        self._folder = folder
        self._journal = opened(folder, identity)
        self._remove_unnoted()
        self._finished = max((numbers[0] for numbers in self._named("totals")), default=0)
        if self._finished:
            self.arrays = self._read(_name("totals", self._finished))
        for group, layer in self._named("delta"):
            if group >= self._finished:
                merge(self.arrays, self._read(_name("delta", group, layer)))
        self._tidy()

    def n_finished(self) -> int:
        """Groups that are done with."""
        return self._finished

    def n_observed(self, group: int) -> int:
        """Layers of the group that are added up already."""
        return sum(numbers[0] == group for numbers in self._named("delta"))

    def add(self, group: int, layer: int, delta: Arrays) -> None:
        """Add what was observed in one layer, once it is on the disk."""
        self._write(_name("delta", group, layer), delta)
        super().add(group, layer, delta)

    def keep(self, group: int, layer: int, states: Activations, n_batches: int, lanes: int) -> None:
        """Keep what goes into the layer, instead of what was kept before."""
        places = [(batch, lane) for batch in range(n_batches) for lane in range(lanes)]
        infos = [info for place in places for info in _infos(place, states.get(*place))]
        chunks = (chunk for place in places for chunk in _bytes(states.get(*place)))
        self._write_chunks(_name("kept", group, layer), infos, chunks)
        for numbers in self._named("kept")[:-1]:
            self._forget(_name("kept", *numbers))

    def resume(self, group: int, states: Activations, eps: float) -> int:
        """Put back what was kept last; return the layer that it goes into, 0 for none."""
        kept = [layer for of_group, layer in self._named("kept") if of_group == group]
        if not kept:
            return 0
        path = self._checked(_name("kept", group, kept[-1]))
        arrays: dict[tuple[int, int], dict[str, mx.array]] = {}
        for info, array in _read_arrays(path):
            batch, lane, field = info.name.split("-")
            value = mx.array(array).view(mx.bfloat16) if info.dtype == BF16 else mx.array(array)
            mx.eval(value)
            of_place = arrays.setdefault((int(batch), int(lane)), {})
            of_place[field] = value
            if field == FIELDS[0]:  # the last of a place
                states.put(int(batch), int(lane), make_state(of_place, eps))
                arrays.clear()
        return kept[-1]

    def finish(self, group: int) -> None:
        """Fold the group's deltas into the totals."""
        self._finished = group + 1
        self._write(_name("totals", self._finished), self.arrays)
        self._tidy()

    def _named(self, kind: str) -> list[tuple[int, ...]]:
        """The numbers in the names of noted files of one kind, ascending."""
        parts = (name.partition(".")[0].split("-") for name in self._journal.records)
        return sorted(tuple(map(int, part[1:])) for part in parts if part[0] == kind)

    def _tidy(self) -> None:
        """Remove what finished groups no longer need."""
        for kind in ("delta", "kept"):
            for group, layer in self._named(kind):
                if group < self._finished:
                    self._forget(_name(kind, group, layer))
        for numbers in self._named("totals")[:-1]:
            self._forget(_name("totals", *numbers))

    def _remove_unnoted(self) -> None:
        """Remove files that a killed run had finished or unfinished, but not noted."""
        for path in self._folder.glob("*.safetensors*"):
            if path.name.split("-")[0] in KINDS and path.name not in self._journal.records:
                path.unlink()

    def _forget(self, name: str) -> None:
        self._journal.forget(name)
        (self._folder / name).unlink(missing_ok=True)

    def _write(self, name: str, arrays: Arrays) -> None:
        begin, infos = 0, []
        for key, array in arrays.items():
            if array.dtype.name not in NAMES:
                raise UsageError(f"the observer's array {key} has the dtype {array.dtype}.")
            end = begin + array.nbytes
            infos.append(TensorInfo(key, NAMES[array.dtype.name], array.shape, begin, end))
            begin = end
        chunks = (np.ascontiguousarray(array).tobytes() for array in arrays.values())
        self._write_chunks(name, infos, chunks)

    def _write_chunks(self, name: str, infos: list[TensorInfo], chunks: Iterable[bytes]) -> None:
        """One file, noted when it is there."""
        begin, placed = 0, []
        for info in infos:
            placed.append(info._replace(begin=begin, end=begin + info.n_bytes))
            begin += info.n_bytes
        with ShardWriter(self._folder / name, encode_header(placed)) as writer:
            for chunk in chunks:
                writer.write_at(writer.n_bytes, chunk)
            record = ShardRecord(name, writer.n_bytes, writer.finish())
        publish(self._folder / name)
        self._journal.record(record)

    def _read(self, name: str) -> Arrays:
        return {info.name: array for info, array in _read_arrays(self._checked(name))}

    def _checked(self, name: str) -> Path:
        """A noted file, or CheckpointError when its bytes are no longer those that were noted."""
        path = self._folder / name
        try:
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError:
            found = ""
        if found != self._journal.records[name].sha256:
            raise CheckpointError(
                f"{path} is {'not what was written' if found else 'missing'}.",
                f"delete {self._folder} and begin again.",
            )
        return path


@contextmanager
def locked(folder: Path | None) -> Iterator[None]:
    """Make the folder and keep a second run out; the lock leaves no file behind."""
    if folder is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    file = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(
                f"{folder} is being written by another process.", "wait until it has ended."
            ) from error
        yield
    finally:
        os.close(file)


def opened(folder: Path, identity: Json) -> Journal:
    """The folder's journal, new or continued; raise UsageError when it is of another run."""
    journal = read_journal(folder)
    if journal is None:
        return start_journal(folder, identity)
    fields = identity.keys() | journal.identity.keys()
    for field in (*OF_BEFORE, *sorted(fields - OF_BEFORE.keys())):
        before, now = journal.identity.get(field), identity.get(field)
        if before != now:
            what = OF_BEFORE.get(field, f"{field}: {before} before, {now} now")
            raise UsageError(
                f"{folder} holds a run with another {what}.",
                "give the options of before to continue it, or another folder.",
            )
    return journal


def discard(folder: Path) -> None:
    """Remove a run's own files, and the folder if nothing else is in it."""
    journal = read_journal(folder)
    if journal is None:
        return
    for name in (*journal.records, JOURNAL):
        (folder / name).unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()


def _name(kind: str, *numbers: int) -> str:
    return "-".join([kind, *map(str, numbers)]) + ".safetensors"


def _infos(place: tuple[int, int], state: State) -> Iterator[TensorInfo]:
    """What a state's arrays are called, the prefix last."""
    for field, array in reversed(state.arrays().items()):
        dtype = BF16 if array.dtype == mx.bfloat16 else "F32"
        yield TensorInfo(f"{place[0]}-{place[1]}-{field}", dtype, array.shape, 0, array.nbytes)


def _bytes(state: State) -> Iterator[bytes]:
    for array in reversed(state.arrays().values()):
        words = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
        yield np.array(words).tobytes()


def _read_arrays(path: Path) -> Iterator[tuple[TensorInfo, NDArray[np.generic]]]:
    """The arrays of a file in order, BF16 as 16-bit words."""
    header = read_header(path)
    with path.open("rb") as file:
        file.seek(header.n_bytes)
        for info in header.tensors:
            dtype = DTYPES["U16" if info.dtype == BF16 else info.dtype]
            data = np.frombuffer(file.read(info.n_bytes), dtype)
            yield info, data.reshape(info.shape)
