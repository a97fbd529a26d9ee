"""The header of a safetensors file: read and checked in whole, or encoded with padding.

Input: a path, or tensor descriptions. Output: `Header`, or bytes. Tensor bytes are never touched.
Every defect has its own sentence, and tests/tensors/test_header.py one test for each.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from kimi_k3_mlx.errors import CheckpointError
from kimi_k3_mlx.schema import DTYPE_BYTES, TensorInfo

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
METADATA = "__metadata__"


@dataclass(frozen=True)
class Header:
    """A checked header: tensors in file order, `n_bytes` up to the data section, the raw JSON."""

    tensors: tuple[TensorInfo, ...]
    metadata: dict[str, str]
    n_bytes: int
    raw: bytes = field(repr=False)


def read_header(path: Path) -> Header:
    """Read and check a file's header and size; raise CheckpointError naming the defect."""
    n_file = path.stat().st_size
    with path.open("rb") as file:
        length = file.read(LENGTH_BYTES)
        n_header = header_length(length, path.name)
        if LENGTH_BYTES + n_header > n_file:
            raise _truncated(path.name, LENGTH_BYTES + n_header, n_file, " in its header")
        header = parse_header(file.read(n_header), path.name)
    n_expected = header.n_bytes + (header.tensors[-1].end if header.tensors else 0)
    if n_file < n_expected:
        raise _truncated(path.name, n_expected, n_file)
    if n_file > n_expected:
        raise CheckpointError(
            f"{path.name} has {n_file - n_expected:,} bytes after its last tensor "
            f"({n_expected:,} bytes expected, {n_file:,} found)."
        )
    return header


def header_length(length: bytes, where: str) -> int:
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
    return n_header


def parse_header(raw: bytes, where: str) -> Header:
    """Check the JSON of a header, without the 8 length bytes; `where` names the file in errors."""
    try:
        entries = json.loads(raw)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{where} has a header that is not JSON: {error}.") from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{where} has a header that is not a JSON object.")
    metadata = entries.pop(METADATA, None)
    if metadata is None:  # MLX writes null
        metadata = {}
    if not isinstance(metadata, dict):
        raise CheckpointError(f"{where} has a {METADATA} that is not a JSON object.")
    tensors = sorted(
        (_tensor(name, entry, where) for name, entry in entries.items()),
        key=lambda tensor: (tensor.begin, tensor.end),
    )
    _check_contiguous(tensors, where)
    return Header(tuple(tensors), metadata, LENGTH_BYTES + len(raw), raw)


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


def _tensor(name: str, entry: Any, where: str) -> TensorInfo:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"tensor {name} has no dtype, shape and offsets in {where}."
        ) from error
    numbers = (*shape, begin, end)
    if set(map(type, numbers)) != {int} or min(numbers) < 0:
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
    return TensorInfo(name, dtype, shape, begin, end)


def _check_contiguous(tensors: list[TensorInfo], where: str) -> None:
    position, previous = 0, "the start"
    for tensor in tensors:
        if tensor.begin < position:
            raise CheckpointError(
                f"tensor {tensor.name} overlaps {previous} by "
                f"{position - tensor.begin} bytes in {where}."
            )
        if tensor.begin > position:
            raise CheckpointError(
                f"{where} has a gap of {tensor.begin - position} bytes "
                f"between {previous} and tensor {tensor.name}."
            )
        position, previous = tensor.end, f"tensor {tensor.name}"


def _truncated(name: str, n_expected: int, n_found: int, place: str = "") -> CheckpointError:
    return CheckpointError(
        f"{name} is truncated{place}: {n_expected:,} bytes expected, {n_found:,} found."
    )


def file_size(path: Path) -> int | None:
    """Bytes of a regular file, or None when there is none."""
    return os.path.getsize(path) if path.is_file() else None
