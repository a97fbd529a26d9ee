"""A checkpoint opened by its headers, wherever it lies: config, index and headers, all checked.

Input: the JSON and headers of a folder (`local`) or a repository (`hub`). Output: `Source`, which
knows each tensor's dtype, shape and place, and hands out byte ranges. Opening reads no tensor byte.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import re
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from types import TracebackType
from typing import NamedTuple, Self

from kimi_k3_mlx.errors import CheckpointError
from kimi_k3_mlx.schema import Json, SourceId, Span, TensorInfo, canonical
from kimi_k3_mlx.tensors.header import Header

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
MANIFEST = "kimi_k3_mlx.json"
DOWNLOAD = "re-download it: kimi-k3 download"


class Contents(NamedTuple):
    """What config, index and headers say, once they agree."""

    id: SourceId
    config: Json
    shards: dict[str, int]
    weight_map: dict[str, str]
    tensors: dict[str, TensorInfo]


@dataclass(frozen=True)
class Source(ABC):
    """An opened checkpoint; `tensors` hold byte ranges from the start of their shard's file."""

    where: str
    """The folder, or the repository and its commit."""
    id: SourceId
    config: Json = field(repr=False)
    shards: dict[str, int] = field(repr=False)
    """File bytes per shard name, in order."""
    weight_map: dict[str, str] = field(repr=False)
    """Shard name per tensor name."""
    tensors: dict[str, TensorInfo] = field(repr=False)

    @cached_property
    def total_size(self) -> int:
        """Tensor bytes of the checkpoint."""
        return sum(tensor.n_bytes for tensor in self.tensors.values())

    @property
    @abstractmethod
    def name(self) -> str:
        """The checkpoint's own name, without where it lies."""

    @abstractmethod
    def reader(self) -> Reader:
        """A context manager that reads tensor bytes."""

    @abstractmethod
    def files(self) -> list[str]:
        """Names of the files beside each other at the top, sorted."""

    @abstractmethod
    def read_file(self, name: str) -> bytes:
        """A small file's content; raises OSError or HubError."""

    @abstractmethod
    def state(self) -> str:
        """Hash of what changes when a shard is replaced without its header changing."""


class Reader(ABC):
    """Reads tensor bytes inside a `with`; call `blocks` once at a time."""

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let go of files and connections."""

    @abstractmethod
    def blocks(self, spans: Iterable[Span]) -> Iterator[memoryview]:
        """The spans' bytes in order; a block never crosses from one span into the next.

        A block is valid until the next one is asked for. Raises CheckpointError for
        a file that is shorter than its header says, HubError when the Hub fails for good.
        """

    def read(self, span: Span) -> bytes:
        """All bytes of one span."""
        return b"".join(bytes(block) for block in self.blocks([span]))


def assemble(
    config: Json, index: Json, header_of: Callable[[str], tuple[Header, int]], commit: str | None
) -> Contents:
    """Check that index and headers agree; `header_of` gives a shard's header and file bytes.

    Raises CheckpointError for a tensor that index and shard disagree about, or a wrong total_size.
    """
    with paused_collector():
        return _assemble(config, index, header_of, commit)


@contextmanager
def paused_collector() -> Iterator[None]:
    """Without the search for cycles, which takes longer than making half a million tuples."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _assemble(
    config: Json, index: Json, header_of: Callable[[str], tuple[Header, int]], commit: str | None
) -> Contents:
    weight_map = checked_weight_map(index)
    expected = _names_by_shard(weight_map)
    tensors: dict[str, TensorInfo] = {}
    shards: dict[str, int] = {}
    total_size = 0
    digest = hashlib.sha256(canonical(config))
    for shard in sorted(expected):
        header, shards[shard] = header_of(shard)
        _place(shard, header, expected.pop(shard), tensors)
        total_size += header.n_data
        digest.update(canonical([shard, shards[shard]]))
        digest.update(header.raw)
    _check_total_size(index, total_size)
    return Contents(SourceId(commit, digest.hexdigest()), config, shards, weight_map, tensors)


def parse_json(content: bytes, where: str, hint: str) -> Json:
    """A JSON object; raise CheckpointError when it is damaged."""
    try:
        value = json.loads(content)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{where} is not JSON: {error}.", hint) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} is not a JSON object.", hint)
    return value


def download_hint(name: str) -> str:
    """How to fetch one file again; a shard's name is cut after its number."""
    shard = re.match(r"model-\d+", name)
    pattern = f"{shard[0]}*" if shard else name
    return f"{DOWNLOAD} --include {pattern}"


def checked_weight_map(index: Json) -> dict[str, str]:
    """Shard per tensor, equal names being one object from now on, for there are half a million.

    Raises CheckpointError when the index has none, or what it names are no file names.
    """
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{INDEX} has no weight_map.", download_hint(INDEX))
    shards: dict[str, str] = {}
    for tensor, shard in weight_map.items():
        is_name = isinstance(shard, str) and (shard in shards or os.path.basename(shard) == shard)
        if not is_name:
            raise CheckpointError(
                f"{INDEX} puts tensor {tensor} into {shard!r}, which is no file name.",
                download_hint(INDEX),
            )
        weight_map[tensor] = shards.setdefault(shard, shard)
    return weight_map


def _names_by_shard(weight_map: dict[str, str]) -> dict[str, dict[str, str]]:
    """The very names of the index, by shard and name, so that headers need not add their own."""
    names: dict[str, dict[str, str]] = defaultdict(dict)
    for tensor, shard in weight_map.items():
        names[shard][tensor] = tensor
    return names


def _place(
    shard: str, header: Header, names: dict[str, str], tensors: dict[str, TensorInfo]
) -> None:
    """Add a shard's tensors, with ranges from the start of the file; `names` lose theirs."""
    start = header.n_bytes
    for name, dtype, shape, begin, end in header.entries:
        own = names.pop(name, None)
        if own is None:
            raise CheckpointError(
                f"tensor {name} is in {shard} but {INDEX} does not place it there.",
                download_hint(INDEX),
            )
        tensors[own] = TensorInfo(own, dtype, shape, start + begin, start + end)
    for name in sorted(names):
        raise CheckpointError(
            f"tensor {name} is named by {INDEX} but absent from {shard}.", download_hint(shard)
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
