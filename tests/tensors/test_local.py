"""Reading a folder: blocks in the order asked for, two buffers, defects that appear under way."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from kimi_k3_mlx.errors import CheckpointError
from kimi_k3_mlx.schema import Span
from kimi_k3_mlx.tensors import local
from kimi_k3_mlx.tensors.local import LocalSource, open_source

SHARD = "model-00002-of-000008.safetensors"
LAYER = "language_model.model.layers.1."
ROUTER = f"{LAYER}block_sparse_moe.gate.weight"
NORM = f"{LAYER}input_layernorm.weight"


@pytest.fixture
def source(tiny_source: Path) -> LocalSource:
    return open_source(tiny_source)


def bytes_of(source: LocalSource, span: Span) -> bytes:
    """What the file has there, read by other means."""
    content = (source.path / source.weight_map[span.tensor]).read_bytes()
    begin = source.tensors[span.tensor].begin
    return content[begin + span.begin : begin + span.end]


def test_long_spans_come_in_full_blocks(
    source: LocalSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "BUFFER_BYTES", 100)
    with source.reader() as reader:
        lengths = [len(block) for block in reader.blocks([Span(ROUTER, 10, 960)])]
    assert lengths == [100] * 9 + [50]


def test_spans_come_in_the_order_asked_for(source: LocalSource) -> None:
    spans = [Span(ROUTER, 0, 10), Span(NORM, 4, 8), Span(ROUTER, 10, 20), Span(ROUTER, 7, 7)]
    with source.reader() as reader:
        blocks = [bytes(block) for block in reader.blocks(spans)]
    assert blocks == [bytes_of(source, span) for span in spans[:3]]


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="macOS has F_NOCACHE")
def test_linux_is_told_what_comes_and_what_is_done_with(
    source: LocalSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, int, int]] = []
    monkeypatch.setattr(local, "BUFFER_BYTES", 64)
    monkeypatch.setattr(os, "posix_fadvise", lambda file, *told_: told.append(told_))
    spans = [Span(ROUTER, 0, 100), Span(ROUTER, 5, 5), Span(ROUTER, 200, 300)]
    start = source.tensors[ROUTER].begin
    with source.reader() as reader:
        for _ in reader.blocks(spans):
            told.append((0, 0, 0))
    block = (0, 0, 0)
    assert told == [
        block,
        block,
        (start, 100, os.POSIX_FADV_DONTNEED),
        (start + 200, 64, os.POSIX_FADV_WILLNEED),
        block,
        block,
        (start + 200, 100, os.POSIX_FADV_DONTNEED),
    ]


def test_a_shard_that_shrinks_while_it_is_read(tiny_source: Path, tmp_path: Path) -> None:
    source = open_source(Path(shutil.copytree(tiny_source, tmp_path / "copy")))
    in_shard = (t for t in source.tensors.values() if source.weight_map[t.name] == SHARD)
    last = max(in_shard, key=lambda tensor: tensor.end)
    with source.reader() as reader:
        os.truncate(source.path / SHARD, last.end - 1)
        with pytest.raises(CheckpointError, match=f"became shorter .* tensor {last.name}"):
            reader.read(Span(last.name, 0, last.n_bytes))


def test_files_and_their_content(source: LocalSource) -> None:
    assert {"config.json", "LICENSE", SHARD} <= set(source.files())
    assert source.files() == sorted(source.files())
    assert source.read_file("LICENSE") == (source.path / "LICENSE").read_bytes()
    assert source.name == source.path.name
