"""Opening a checkpoint: every disagreement of index, shards and files is found from headers."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from kimi_k3_mlx.errors import CheckpointError, UsageError
from kimi_k3_mlx.schema import Span
from kimi_k3_mlx.tensors.local import open_source
from kimi_k3_mlx.tensors.source import INDEX, MANIFEST, Source

SHARD = "model-00002-of-000008.safetensors"
ROUTER = "language_model.model.layers.1.block_sparse_moe.gate.weight"


@pytest.fixture
def copied(tiny_source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_source, tmp_path / "copy"))


def change_index(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    index = json.loads((path / INDEX).read_text())
    change(index)
    (path / INDEX).write_text(json.dumps(index))


def whole(source: Source, name: str) -> Span:
    return Span(name, 0, source.tensors[name].n_bytes)


def test_it_knows_every_tensor_and_its_bytes(tiny_source: Path) -> None:
    source = open_source(tiny_source)
    with source.reader() as reader, safe_open(tiny_source / SHARD, "np") as reference:
        for name in ("A_log", "dt_bias", "o_norm.weight"):
            full = f"language_model.model.layers.1.self_attn.{name}"
            expected = reference.get_tensor(full)
            assert source.tensors[full].shape == expected.shape
            assert reader.read(whole(source, full)) == expected.tobytes()
        assert reader.read(Span(full, 4, expected.nbytes)) == expected.tobytes()[4:]


def test_opening_reads_no_tensor_byte(tiny_source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "preadv", None)
    assert len(open_source(tiny_source).tensors) > 300


def test_a_missing_folder_and_missing_files(copied: Path) -> None:
    with pytest.raises(UsageError, match="nowhere is not a folder"):
        open_source(copied / "nowhere")
    (copied / SHARD).unlink()
    with pytest.raises(CheckpointError, match=f"shard {SHARD} is named by .* but missing") as error:
        open_source(copied)
    assert error.value.hint == "re-download it: kimi-k3 download --include model-00002*"
    (copied / INDEX).unlink()
    with pytest.raises(CheckpointError, match=f"{INDEX} is missing in"):
        open_source(copied)
    (copied / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json is missing in"):
        open_source(copied)


def test_several_missing_shards_are_counted(copied: Path) -> None:
    for number in (2, 3, 4):
        (copied / f"model-{number:05d}-of-000008.safetensors").unlink()
    with pytest.raises(CheckpointError, match=f"shard {SHARD} and 2 more is named"):
        open_source(copied)


def test_a_truncated_shard(copied: Path) -> None:
    size = (copied / SHARD).stat().st_size
    os.truncate(copied / SHARD, size - 7)
    with pytest.raises(
        CheckpointError, match=f"{SHARD} is truncated: {size:,} bytes expected, {size - 7:,} found"
    ) as error:
        open_source(copied)
    assert "--include model-00002*" in error.value.hint


def test_a_tensor_that_only_the_index_knows(copied: Path) -> None:
    change_index(copied, lambda index: index["weight_map"].update({"ghost": SHARD}))
    with pytest.raises(CheckpointError, match=f"tensor ghost is named by .* absent from {SHARD}"):
        open_source(copied)


def test_a_tensor_that_the_index_does_not_know(copied: Path) -> None:
    change_index(copied, lambda index: index["weight_map"].pop(ROUTER))
    with pytest.raises(CheckpointError, match=f"tensor {ROUTER} is in {SHARD} but"):
        open_source(copied)


@pytest.mark.parametrize("shard", [None, 5, ["x"], {"x": 1}])
def test_a_shard_that_is_no_name(copied: Path, shard: object) -> None:
    change_index(copied, lambda index: index["weight_map"].update({ROUTER: shard}))
    with pytest.raises(CheckpointError, match=f"puts tensor {re.escape(ROUTER)} into .* no file"):
        open_source(copied)


def test_half_a_million_names_are_kept_once(tiny_source: Path) -> None:
    source = open_source(tiny_source)
    names = {id(name) for name in source.weight_map}
    assert names == {id(name) for name in source.tensors}
    assert names == {id(tensor.name) for tensor in source.tensors.values()}
    shards = {id(shard) for shard in source.weight_map.values()}
    assert len(shards) == len(source.shards)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_it_was_also_after_an_error(copied: Path, enabled: bool) -> None:
    was_enabled = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        open_source(copied)
        assert gc.isenabled() == enabled
        os.truncate(copied / SHARD, 100)
        with pytest.raises(CheckpointError):
            open_source(copied)
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()


def test_the_total_size_is_that_of_all_tensors(tiny_source: Path) -> None:
    source = open_source(tiny_source)
    assert source.total_size == sum(tensor.n_bytes for tensor in source.tensors.values())
    index = json.loads((tiny_source / INDEX).read_text())
    assert source.total_size == index["metadata"]["total_size"]


def test_a_wrong_total_size(copied: Path) -> None:
    change_index(copied, lambda index: index["metadata"].update(total_size=5))
    with pytest.raises(CheckpointError, match=r"states a total_size of 5 bytes, the tensors have"):
        open_source(copied)


@pytest.mark.parametrize("total", ["5", 5.5, None, [1], True])
def test_a_total_size_that_is_no_number(copied: Path, total: object) -> None:
    change_index(copied, lambda index: index["metadata"].update(total_size=total))
    with pytest.raises(CheckpointError, match=r"total_size of .*, which is not a whole number"):
        open_source(copied)


@pytest.mark.parametrize("metadata", ["x", [1], 5])
def test_index_metadata_that_is_no_object(copied: Path, metadata: object) -> None:
    change_index(copied, lambda index: index.update(metadata=metadata))
    with pytest.raises(CheckpointError, match="has metadata that is not a JSON object"):
        open_source(copied)


def test_a_build_is_not_downloaded_again(copied: Path) -> None:
    os.truncate(copied / SHARD, 100)
    for name, hint in (("notes", "re-download it"), (MANIFEST, "run the kimi-k3 convert that")):
        (copied / name).write_text("{}")
        with pytest.raises(CheckpointError, match="is truncated") as error:
            open_source(copied)
        assert error.value.hint.startswith(hint)


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "is not JSON"), ("[]", "is not a JSON object"), ("{}", "has no weight_map")],
)
def test_a_damaged_index(copied: Path, content: str, message: str) -> None:
    (copied / INDEX).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        open_source(copied)


def test_an_index_that_leads_out_of_the_folder(copied: Path) -> None:
    change_index(copied, lambda index: index["weight_map"].update({ROUTER: "../evil.safetensors"}))
    with pytest.raises(CheckpointError, match="which is no file name"):
        open_source(copied)


def test_the_hash_follows_headers_and_the_state_follows_files(copied: Path) -> None:
    before = open_source(copied)
    os.utime(copied / SHARD, ns=(1, 1))
    after = open_source(copied)
    assert before.id == after.id
    assert before.state() == after.state() == open_source(copied).state()
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"bos_token_id": 1}))
    assert open_source(copied).id.headers_sha256 != before.id.headers_sha256


def test_the_state_changes_with_a_file(copied: Path) -> None:
    source = open_source(copied)
    before = source.state()
    os.utime(copied / SHARD, ns=(1, 1))
    assert source.state() != before


def test_the_commit_of_a_cache_snapshot_and_of_a_download(copied: Path, tmp_path: Path) -> None:
    assert open_source(copied).id.commit is None
    note = copied / ".cache/huggingface/download/config.json.metadata"
    note.parent.mkdir(parents=True)
    note.write_text("c0ffee\netag\n1.0\n")
    assert open_source(copied).id.commit == "c0ffee"
    snapshot = tmp_path / "snapshots" / "abad1dea"
    snapshot.parent.mkdir()
    copied.rename(snapshot)
    assert open_source(snapshot).id.commit == "abad1dea"


def test_reading_does_not_copy_more_than_asked(tiny_source: Path) -> None:
    source = open_source(tiny_source)
    with source.reader() as reader:
        values = np.frombuffer(reader.read(whole(source, ROUTER)), np.uint16)
    assert values.size == 8 * 64
