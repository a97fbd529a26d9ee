"""Files are whole or absent, or continued where the disk has them for certain."""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_k3_mlx.errors import CheckpointError
from kimi_k3_mlx.tensors import writer as writer_module
from kimi_k3_mlx.tensors.writer import (
    RING_BUFFERS,
    RING_BYTES,
    ShardWriter,
    partial_path,
    publish,
    write_file,
)


def sha256_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def continued(path: Path, found: bytes, n_kept: int) -> ShardWriter:
    """A writer over what an earlier one has left."""
    partial_path(path).write_bytes(found)
    return ShardWriter(path, b"head", n_kept)


def test_a_shard_appears_only_when_published(tmp_path: Path) -> None:
    path = tmp_path / "model-1.safetensors"
    with ShardWriter(path, b"head") as writer:
        writer.write_at(4, b"one")
        writer.write_at(7, memoryview(b"two"))
        sha256 = writer.finish()
    assert writer.n_bytes == 10
    assert not path.exists()
    assert list(tmp_path.glob("model*.safetensors")) == []
    publish(path)
    assert path.read_bytes() == b"headonetwo"
    assert sha256 == sha256_of(b"headonetwo")
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_blocks_out_of_order_are_hashed_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with ShardWriter(path, b"head") as writer:
        for offset, block in ((4, b"one"), (10, b"three"), (7, b"two"), (15, b"four")):
            writer.write_at(offset, block)
        assert writer.n_bytes == 19
        assert writer.finish() == sha256_of(b"headonetwothreefour")
    assert partial_path(path).read_bytes() == b"headonetwothreefour"


def test_blocks_in_order_are_not_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashlib, "file_digest", None)
    with ShardWriter(tmp_path / "a", b"head") as writer:
        writer.write_at(4, b"one")
        assert writer.finish() == sha256_of(b"headone")


def test_a_block_is_hashed_before_the_next_call_returns(tmp_path: Path) -> None:
    """Readers promise a block for as long as the next one is read, and no longer."""
    buffers = [bytearray(1 << 20), bytearray(1 << 20)]
    expected = hashlib.sha256(b"head")
    with ShardWriter(tmp_path / "a", b"head") as writer:
        for number in range(20):
            buffers.reverse()
            buffers[0][:] = bytes([number]) * len(buffers[0])
            expected.update(buffers[0])
            writer.write_at(writer.n_bytes, memoryview(buffers[0]))
        assert writer.finish() == expected.hexdigest()


def test_blocks_go_to_the_disk_before_the_last_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each range once, and only what has been written already."""
    monkeypatch.setattr(writer_module, "FLUSH_BYTES", 6)
    monkeypatch.setattr(writer_module, "start_flush", flush := Mock())
    with continued(tmp_path / "a", b"headon", 6) as writer:
        for _ in range(5):
            writer.write_at(writer.n_bytes, b"four")
        writer.finish()
    assert [call.args[1:] for call in flush.call_args_list] == [(6, 14), (14, 22)]


def test_an_exception_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyError), ShardWriter(tmp_path / "a", b"head"):
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_an_exception_leaves_what_has_a_checkpoint(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "a", b"head")

    def write_and_stop() -> None:
        with writer:
            writer.write_at(4, b"one")
            assert writer.checkpoint() == 7
            writer.write_at(7, b"two")
            raise KeyError

    with pytest.raises(KeyError):
        write_and_stop()
    assert partial_path(tmp_path / "a").read_bytes() == b"headonetwo"


def test_a_checkpoint_syncs_and_counts_only_what_came_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ShardWriter(tmp_path / "a", b"head") as writer:
        monkeypatch.setattr(writer_module, "sync", synced := Mock())
        assert writer.checkpoint() == 4
        synced.assert_called_once()
        writer.write_at(7, b"two")
        assert writer.checkpoint() == 0
        writer.write_at(4, b"one")
        assert writer.checkpoint() == 0


@pytest.mark.parametrize("n_kept", [4, 7, 10])
def test_a_continued_file_ends_as_an_uninterrupted_one(tmp_path: Path, n_kept: int) -> None:
    whole = b"headonetwothree"
    with continued(tmp_path / "a", whole[:n_kept] + b"an unsynced and long rest", n_kept) as writer:
        assert writer.n_bytes == n_kept
        writer.write_at(n_kept, whole[n_kept:])
        assert writer.checkpoint() == len(whole)
        assert writer.finish() == sha256_of(whole)
    assert partial_path(tmp_path / "a").read_bytes() == whole


def test_a_continued_file_may_go_on_out_of_order(tmp_path: Path) -> None:
    with continued(tmp_path / "a", b"headone", 7) as writer:
        writer.write_at(10, b"three")
        writer.write_at(7, b"two")
        assert writer.n_bytes == 15
        assert writer.finish() == sha256_of(b"headonetwothree")


@pytest.mark.parametrize(
    ("found", "n_kept", "message"),
    [
        (b"headon", 7, r"a\.partial became shorter: 7 bytes expected, 6 found"),
        (b"hoodone", 7, r"a\.partial begins with another header"),
        (b"headone", 3, r"a\.partial begins with another header"),
    ],
)
def test_a_file_that_can_not_be_continued(
    tmp_path: Path, found: bytes, n_kept: int, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message), continued(tmp_path / "a", found, n_kept):
        pass
    assert partial_path(tmp_path / "a").read_bytes() == found


def test_a_file_that_is_gone_can_not_be_continued(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), ShardWriter(tmp_path / "a", b"head", 7):
        pass
    assert list(tmp_path.iterdir()) == []


def test_an_exception_leaves_a_continued_file(tmp_path: Path) -> None:
    with pytest.raises(KeyError), continued(tmp_path / "a", b"headonetwo", 7):
        raise KeyError
    assert partial_path(tmp_path / "a").read_bytes() == b"headone"


def test_an_error_while_hashing_surfaces_and_no_thread_stays(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "a", b"") as writer:
        writer._digest = Mock(update=Mock(side_effect=ValueError("hashing")))
        writer.write_at(0, b"one")
        with pytest.raises(ValueError, match="hashing"):
            writer.checkpoint()
        with pytest.raises(ValueError, match="hashing"):
            writer.finish()
    assert not [thread for thread in threading.enumerate() if "writer" in thread.name]


def test_a_full_disk_is_noticed_while_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No later than when the ring has gone round."""
    full = Mock(side_effect=OSError(errno.ENOSPC, "full"))
    with ShardWriter(tmp_path / "a", b"") as writer:
        monkeypatch.setattr(os, "pwrite", full)
        for number in range(RING_BUFFERS):
            writer.write_at(number, b"x")
        with pytest.raises(OSError, match="full") as caught:
            writer.write_at(RING_BUFFERS, b"x")
    assert caught.value.filename == str(tmp_path / "a.partial")


@settings(deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=20), max_size=30))
def test_the_callers_buffer_is_free_at_once(blocks: list[bytes]) -> None:
    """A manifest once had the hash of bytes that were overwritten before they were hashed."""
    with tempfile.TemporaryDirectory() as folder:
        buffer = bytearray(20)
        with ShardWriter(Path(folder, "a"), b"") as writer:
            for block in blocks:
                buffer[: len(block)] = block
                writer.write_at(writer.n_bytes, memoryview(buffer)[: len(block)])
                buffer[:] = bytes(20)
            assert writer.finish() == sha256_of(b"".join(blocks))
        assert partial_path(Path(folder, "a")).read_bytes() == b"".join(blocks)


def test_big_blocks_go_through_the_ring_in_pieces(tmp_path: Path) -> None:
    whole = os.urandom(RING_BYTES * (RING_BUFFERS + 2) + 5)
    with ShardWriter(tmp_path / "a", b"head") as writer:
        writer.write_at(4, whole)
        assert writer.finish() == sha256_of(b"head" + whole)
        assert writer.n_bytes == len(whole) + 4


def test_a_stale_partial_file_is_overwritten(tmp_path: Path) -> None:
    partial_path(tmp_path / "a").write_bytes(b"a long rest of an earlier run")
    assert write_file(tmp_path / "a", b"new") == sha256_of(b"new")
    assert (tmp_path / "a").read_bytes() == b"new"


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: real(file, bytes(data)[:3], at))
    write_file(tmp_path / "a", b"abcdefgh")
    assert (tmp_path / "a").read_bytes() == b"abcdefgh"
