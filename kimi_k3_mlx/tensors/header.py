"""The header of a safetensors file: read and checked in whole, or encoded with padding.

Input: a path, or tensor descriptions. Output: `Header`, or bytes. Tensor bytes are never touched.
Every defect has its own sentence, and tests/tensors/test_header.py one test for each.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from operator import itemgetter
from pathlib import Path
from typing import Any

from kimi_k3_mlx.errors import CheckpointError
from kimi_k3_mlx.schema import DTYPE_BYTES, TensorInfo

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
METADATA = "__metadata__"
INTEGER = {int}


Shape = tuple[int, ...]
Entry = tuple[str, str, Shape, int, int]
"""The fields of a `TensorInfo`, without its cost: there are half a million."""


@dataclass(frozen=True)
class Header:
    """A checked header: entries in file order, `n_bytes` up to the data section, the raw JSON."""

    entries: tuple[Entry, ...]
    metadata: dict[str, str]
    n_bytes: int
    raw: bytes = field(repr=False)

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        """The entries with names."""
        return tuple(TensorInfo(*entry) for entry in self.entries)

    @property
    def n_data(self) -> int:
        """Bytes of the data section."""
        return self.entries[-1][-1] if self.entries else 0


def read_header(path: Path) -> Header:
    """Read and check a file's header and size; raise CheckpointError naming the defect."""
    n_file = path.stat().st_size
    with path.open("rb") as file:
        length = file.read(LENGTH_BYTES)
        n_header = header_length(length, n_file, path.name)
        header = parse_header(file.read(n_header), path.name)
    check_size(header, n_file, path.name)
    return header


def check_size(header: Header, n_file: int, where: str) -> None:
    """Raise CheckpointError unless a file has the bytes that its header says."""
    n_expected = header.n_bytes + header.n_data
    if n_file < n_expected:
        raise _truncated(where, n_expected, n_file)
    if n_file > n_expected:
        raise CheckpointError(
            f"{where} has {n_file - n_expected:,} bytes after its last tensor "
            f"({n_expected:,} bytes expected, {n_file:,} found)."
        )


def header_length(length: bytes, n_file: int, where: str) -> int:
    """Length of the JSON, from the file's first 8 bytes."""
    if len(length) < LENGTH_BYTES:
        raise CheckpointError(
            f"{where} is too short for a safetensors file: "
            f"{LENGTH_BYTES} bytes expected, {len(length)} found."
        )
    n_header = int.from_bytes(length, "little")
    if n_header > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{where} announces a header of {n_header:,} bytes, more than {MAX_HEADER_BYTES:,}: "
            "it is not a safetensors file."
        )
    if LENGTH_BYTES + n_header > n_file:
        raise _truncated(where, LENGTH_BYTES + n_header, n_file, " in its header")
    return n_header


def parse_header(raw: bytes, where: str) -> Header:
    """Check the JSON of a header, without the 8 length bytes; `where` names the file in errors."""
    try:
        values = json.loads(raw)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{where} has a header that is not JSON: {error}.") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{where} has a header that is not a JSON object.")
    metadata = values.pop(METADATA, None)
    if metadata is None:  # MLX writes null
        metadata = {}
    if not isinstance(metadata, dict):
        raise CheckpointError(f"{where} has a {METADATA} that is not a JSON object.")
    shapes: dict[Shape, Shape] = {}
    entries = [_entry(name, value, where, shapes) for name, value in values.items()]
    entries.sort(key=itemgetter(3, 4))
    _check_contiguous(entries, where)
    return Header(tuple(entries), metadata, LENGTH_BYTES + len(raw), raw)


def encode_header(
    tensors: Iterable[TensorInfo], metadata: dict[str, str] | None = None, align: int = 8
) -> bytes:
    """Length and JSON of a header, padded with blanks to a multiple of `align` bytes."""
    entries: dict[str, Any] = {METADATA: metadata} if metadata else {}
    for tensor in tensors:
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": (tensor.begin, tensor.end),
        }
    raw = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-(LENGTH_BYTES + len(raw)) % align)
    return len(raw).to_bytes(LENGTH_BYTES, "little") + raw


def _entry(name: str, value: Any, where: str, shapes: dict[Shape, Shape]) -> Entry:
    """A checked entry; equal shapes become one object."""
    try:
        dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"tensor {name} has no dtype, shape and offsets in {where}."
        ) from error
    numbers = (*shape, begin, end)
    if set(map(type, numbers)) != INTEGER or min(numbers) < 0:
        raise CheckpointError(
            f"tensor {name} has a shape or offset that is not a whole number in {where}."
        )
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise CheckpointError(f"tensor {name} has the unknown dtype {dtype} in {where}.")
    n_bytes = prod(shape) * DTYPE_BYTES[dtype]
    if end - begin != n_bytes:
        raise CheckpointError(
            f"tensor {name}: offsets {begin}:{end} hold {end - begin} bytes in {where}, "
            f"but {dtype} {list(shape)} takes {n_bytes}."
        )
    return name, sys.intern(dtype), shapes.setdefault(shape, shape), begin, end


def _check_contiguous(entries: list[Entry], where: str) -> None:
    position, previous = 0, ""
    for name, _, _, begin, end in entries:
        if begin != position:
            before = f"tensor {previous}" if previous else "the start"
            if begin < position:
                raise CheckpointError(
                    f"tensor {name} overlaps {before} by {position - begin} bytes in {where}."
                )
            raise CheckpointError(
                f"{where} has a gap of {begin - position} bytes between {before} and tensor {name}."
            )
        position, previous = end, name


def _truncated(name: str, n_expected: int, n_found: int, place: str = "") -> CheckpointError:
    return CheckpointError(
        f"{name} is truncated{place}: {n_expected:,} bytes expected, {n_found:,} found."
    )


def file_size(path: Path) -> int | None:
    """Bytes of a regular file, or None when there is none."""
    return os.path.getsize(path) if path.is_file() else None
