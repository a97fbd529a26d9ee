"""Files are whole or absent."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from kimi_k3_mlx.tensors.writer import ShardWriter, partial_path, publish, write_file


def test_a_shard_appears_only_when_published(tmp_path: Path) -> None:
    path = tmp_path / "model-1.safetensors"
    with ShardWriter(path, b"head") as writer:
        writer.write(b"one")
        writer.write(memoryview(b"two"))
        sha256 = writer.finish()
    assert writer.n_bytes == 10
    assert not path.exists()
    assert list(tmp_path.glob("model*.safetensors")) == []
    publish(path)
    assert path.read_bytes() == b"headonetwo"
    assert sha256 == hashlib.sha256(b"headonetwo").hexdigest()
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_an_exception_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyError), ShardWriter(tmp_path / "a", b"head"):
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_a_stale_partial_file_is_overwritten(tmp_path: Path) -> None:
    partial_path(tmp_path / "a").write_bytes(b"a long rest of an earlier run")
    assert write_file(tmp_path / "a", b"new") == hashlib.sha256(b"new").hexdigest()
    assert (tmp_path / "a").read_bytes() == b"new"


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: real(file, bytes(data)[:3], at))
    write_file(tmp_path / "a", b"abcdefgh")
    assert (tmp_path / "a").read_bytes() == b"abcdefgh"
