"""The speed of a disk is measured on headers alone, and not at all when they are too small."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kimi_k3_mlx.convert import disk
from kimi_k3_mlx.tensors.local import open_source


def test_small_headers_tell_nothing(tiny_source: Path) -> None:
    assert disk.read_rate(open_source(tiny_source)) is None


def test_headers_are_read_and_no_tensor(tiny_source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(tiny_source)
    first = {shard: n_bytes for shard, n_bytes in source.shards.items()}
    for tensor in source.tensors.values():
        shard = source.weight_map[tensor.name]
        first[shard] = min(first[shard], tensor.begin)
    ends: list[int] = []
    real = os.preadv

    def preadv(file: int, buffers: list[memoryview], position: int) -> int:
        ends.append(position + sum(map(len, buffers)))
        return real(file, buffers, position)

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(disk, "ENOUGH_BYTES", 1)
    rate = disk.read_rate(source)
    assert rate is not None
    assert rate > 0
    assert ends == [first[shard] for shard in source.shards]


def test_it_stops_when_it_has_seen_enough(
    tiny_source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "ENOUGH_BYTES", 1)
    monkeypatch.setattr(disk, "PLENTY_BYTES", 2)
    read: list[Path] = []
    real = disk._read_header
    monkeypatch.setattr(
        disk, "_read_header", lambda path, buffer: read.append(path) or real(path, buffer)
    )
    disk.read_rate(open_source(tiny_source))
    assert len(read) == 1
