"""Loading: only finished builds, only the index's shards, only our own code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from kimi_k3_mlx.errors import CheckpointError, KimiError, UsageError
from kimi_k3_mlx.runtime.load import check_build, load
from tests.tiny_k3 import write_json


@pytest.fixture
def copy(tiny_source: Path, tmp_path: Path) -> Path:
    """A checkpoint to damage; our model reads source names as well."""
    return shutil.copytree(tiny_source, tmp_path / "copy")


def edit(path: Path, **fields: object) -> None:
    write_json(path, json.loads(path.read_text()) | fields)


def test_loads_with_the_installed_model(tiny_source: Path) -> None:
    import kimi_k3

    loaded = load(tiny_source, lazy=True)
    assert type(loaded.model) is kimi_k3.Model
    assert loaded.tokenizer.eos_token_ids == {loaded.config["eos_token_id"]}


def test_code_in_the_folder_is_never_executed(copy: Path) -> None:
    edit(copy / "config.json", model_file="evil.py")
    (copy / "evil.py").write_text("raise RuntimeError('executed')")
    load(copy, lazy=True)


DAMAGE = {
    "nothing there": (lambda p: shutil.rmtree(p), UsageError, "is not a folder"),
    "unfinished": (
        lambda p: (p / "config.json").unlink(),
        CheckpointError,
        "has no config.json: it is not a finished build",
    ),
    "another model": (
        lambda p: edit(p / "config.json", model_type="llama"),
        CheckpointError,
        "has model_type 'llama', expected 'kimi_k3'",
    ),
    "no index": (
        lambda p: (p / "model.safetensors.index.json").unlink(),
        CheckpointError,
        "has no model.safetensors.index.json",
    ),
    "index cut off": (
        lambda p: (p / "model.safetensors.index.json").write_text('{"weight_map"'),
        CheckpointError,
        "is not JSON",
    ),
    "index is a list": (
        lambda p: (p / "model.safetensors.index.json").write_text("[]"),
        CheckpointError,
        "is not a JSON object",
    ),
    "empty index": (
        lambda p: write_json(p / "model.safetensors.index.json", {}),
        CheckpointError,
        "names no shards",
    ),
    "one shard missing": (
        lambda p: (p / "model-00002-of-000008.safetensors").unlink(),
        CheckpointError,
        "lacks model-00002-of-000008.safetensors of the 8 in its index",
    ),
    "two shards missing": (
        lambda p: [(p / f"model-0000{i}-of-000008.safetensors").unlink() for i in (3, 2)],
        CheckpointError,
        r"lacks 2 shards \(model-00002-of-000008.safetensors, …\) of the 8",
    ),
    "a stale shard": (
        lambda p: shutil.copy(p / "model-00001-of-000008.safetensors", p / "model.safetensors"),
        CheckpointError,
        "holds model.safetensors that the index does not name",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_one_sentence(case: str, copy: Path) -> None:
    damage, kind, fact = DAMAGE[case]
    damage(copy)
    with pytest.raises(kind, match=fact) as caught:
        check_build(copy)
    assert isinstance(caught.value, KimiError)


def test_no_tokenizer_is_found_before_the_weights_are_read(copy: Path) -> None:
    (copy / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        load(copy)
