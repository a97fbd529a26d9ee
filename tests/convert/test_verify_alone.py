"""A build is checked against itself: what changed since then is found without a source."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kimi_k3_mlx.convert import alone as alone_module
from kimi_k3_mlx.convert.alone import sha256_of, verify_alone
from kimi_k3_mlx.convert.verify import verify_build
from kimi_k3_mlx.errors import MismatchError, UsageError
from kimi_k3_mlx.prune_plan import PrunePlan
from kimi_k3_mlx.tensors.journal import JOURNAL
from kimi_k3_mlx.tensors.local import open_source
from kimi_k3_mlx.tensors.source import INDEX, MANIFEST
from tests.convert.damage import LAYER, changing_config, changing_json, replaced, shard_of
from tests.convert.verify_kinds import RAGGED, UNIFORM, built, linked

SHARD = "model-00003-of-000008.safetensors"


@pytest.fixture
def damaged(tiny_source: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A build of a kind, to damage."""
    return lambda kind: linked(built(kind, tiny_source), tmp_path / "build")


@pytest.fixture
def build(damaged: Callable[[str], Path]) -> Path:
    """The build of everything, to damage."""
    return damaged("mxfp4")


def caught(build: Path, prune: PrunePlan | None = None) -> str:
    """Check a build that must fail; return the message."""
    with pytest.raises(MismatchError) as error:
        verify_alone(build, prune=prune)
    assert error.value.exit_code == 3
    return error.value.message


@pytest.mark.parametrize("kind", ["graded", "mxfp4"])
def test_a_field_that_no_shape_depends_on_may_not_change_either(
    kind: str, damaged: Callable[[str], Path]
) -> None:
    """A scaling factor of 99 once was "as it was written"."""
    build = damaged(kind)
    with changing_config(build) as config:
        config["text_config"]["routed_scaling_factor"] = 99.0
    assert caught(build).startswith("config.json: SHA-256 is ")


def test_an_unfinished_build_is_to_be_finished_not_overwritten(build: Path) -> None:
    (build / "config.json").unlink()
    (build / JOURNAL).write_text("{}\n")
    with pytest.raises(MismatchError, match="is an unfinished build") as error:
        verify_alone(build)
    assert error.value.hint == "run the command that began it again to finish it."


def test_what_is_reported(tiny_source: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    build = built("graded", tiny_source)
    report = verify_alone(build, lambda *progress: seen.append(progress))
    shards = sorted(build.glob("*.safetensors"))
    n_bytes = sum(path.stat().st_size for path in shards)
    assert (report.n_shards, report.n_bytes) == (8, n_bytes)
    assert report.n_sidecars == len(json.loads((build / MANIFEST).read_text())["sidecars"])
    assert report.n_tensors == len(json.loads((build / INDEX).read_text())["weight_map"])
    assert list(dict.fromkeys(what for *_, what in seen)) == [path.name for path in shards]
    assert seen[-1][:2] == (n_bytes, n_bytes)
    assert report.to_json()["profile"] == "mxfp4-q8"


@pytest.mark.parametrize("n_bytes", [0, 1, 63, 64, 65, 128, 1000])
def test_the_hash_of_blocks_is_that_of_the_file(
    n_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alone_module, "BLOCK_BYTES", 64)
    content = os.urandom(n_bytes)
    (tmp_path / "file").write_bytes(content)
    seen: list[int] = []
    assert sha256_of(tmp_path / "file", seen.append) == hashlib.sha256(content).hexdigest()
    assert sum(seen) == n_bytes


@pytest.mark.parametrize("shard", range(1, 9))
@pytest.mark.parametrize("at", [9, -1])
def test_one_flipped_bit_is_caught(shard: int, at: int, build: Path) -> None:
    path = build / f"model-{shard:05d}-of-000008.safetensors"
    content = bytearray(path.read_bytes())
    if at > 0:
        at = content.index(b'"format"') + 12
    content[at] ^= 1
    replaced(path, bytes(content))
    assert f"{path.name}: SHA-256 is " in caught(build)


def test_a_zero_filled_tail_is_caught(build: Path) -> None:
    content = (build / SHARD).read_bytes()
    replaced(build / SHARD, content[:-4096] + bytes(4096))
    assert caught(build).startswith(f"{SHARD}: SHA-256 is ")


def test_a_truncated_a_longer_and_a_missing_shard_are_caught(build: Path) -> None:
    content = (build / SHARD).read_bytes()
    replaced(build / SHARD, content[:-1])
    assert f"{SHARD} is truncated" in caught(build)
    replaced(build / SHARD, content + b"\0")
    assert f"{SHARD} has 1 bytes after its last tensor" in caught(build)
    (build / SHARD).unlink()
    assert f"shard {SHARD} is named by {INDEX} but missing" in caught(build)


@pytest.mark.parametrize("name", ["model-old.safetensors", "consolidated.safetensors"])
def test_a_file_that_the_index_does_not_name_is_caught(name: str, build: Path) -> None:
    (build / name).write_bytes((build / SHARD).read_bytes())
    assert caught(build).startswith(f"{name} is in {build}, but the index does not name it")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index["metadata"].update(total_size=5), "states a total_size of 5 bytes"),
        (lambda index: index["weight_map"].popitem(), f"but {INDEX} does not place it there"),
        (lambda index: index["weight_map"].update(x=SHARD), f"x is named by {INDEX} but absent"),
    ],
)
def test_an_index_that_the_headers_contradict_is_caught(
    change: Callable[[dict[str, Any]], None], message: str, build: Path
) -> None:
    with changing_json(build / INDEX) as index:
        change(index)
    assert message in caught(build)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda value: value["shards"][2].update(n_bytes=5),
            f"{SHARD} has 188,968 bytes, {MANIFEST} says 5 bytes.",
        ),
        (lambda value: value["shards"].pop(2), f", {MANIFEST} says no bytes."),
        (lambda value: value["shards"][2].update(sha256="0"), f"{MANIFEST} says 0."),
        (lambda value: value["sidecars"].update(LICENSE="0"), "LICENSE: SHA-256 is "),
        (lambda value: value["sidecars"].update(more="0"), "more is missing in "),
        (lambda value: value.update(version=9), "kimi_k3_mlx.json has version 9"),
        (lambda value: value.update(profile={}), f"{MANIFEST} is damaged in its profile: "),
        (lambda value: value.update(prune_sha256="0"), "prune_plan.json is missing in "),
    ],
)
def test_a_manifest_that_the_files_contradict_is_caught(
    change: Callable[[dict[str, Any]], None], message: str, build: Path
) -> None:
    with changing_json(build / MANIFEST) as value:
        change(value)
    assert message in caught(build)


def test_a_missing_manifest_is_caught(build: Path) -> None:
    (build / MANIFEST).unlink()
    assert caught(build) == f"{MANIFEST} is missing in {build}."


@pytest.mark.parametrize("name", ["LICENSE", "tokenizer.json", "kimi_k3.py", "prune_plan.json"])
def test_a_changed_and_a_missing_small_file_are_caught(
    name: str, damaged: Callable[[str], Path]
) -> None:
    build = damaged("ragged")
    replaced(build / name, (build / name).read_bytes() + b"\n")
    assert caught(build).startswith(f"{name}: SHA-256 is ")
    (build / name).unlink()
    assert caught(build) == f"{name} is missing in {build}."


def test_a_changed_prune_plan_is_caught(damaged: Callable[[str], Path]) -> None:
    build = damaged("ragged")
    other = PrunePlan(8, RAGGED | {1: UNIFORM.layers[1]})
    replaced(build / "prune_plan.json", other.to_text().encode())
    assert caught(build).startswith(f"prune_plan.json: its SHA-256 is {other.sha256}, ")
    replaced(build / "prune_plan.json", b"{}")
    assert caught(build).startswith("prune_plan.json is not a prune plan")
    replaced(build / "prune_plan.json", b"\xff")
    assert "can't decode byte" in caught(build)


def test_a_prune_plan_of_nobody_s_is_caught(build: Path) -> None:
    (build / "prune_plan.json").write_text(UNIFORM.to_text())
    assert caught(build) == f"prune_plan.json is in {build}, but {MANIFEST} knows of no plan."


def test_a_build_of_another_plan_than_the_one_given_is_caught(tiny_source: Path) -> None:
    ragged = PrunePlan(8, RAGGED)
    assert caught(built("ragged", tiny_source), UNIFORM) == (
        f"{MANIFEST}: prune_sha256 is {ragged.sha256}, the plan given has {UNIFORM.sha256}."
    )
    assert "prune_sha256 is none, the plan given" in caught(built("mxfp4", tiny_source), UNIFORM)
    with pytest.raises(MismatchError, match="the plan given has"):
        verify_build(built("mxfp4", tiny_source), open_source(tiny_source), prune=UNIFORM)


def test_padding_is_no_other_plan(tiny_source: Path) -> None:
    """--pad-uniform is an option of convert: the file that was given to it doesn't have it."""
    build = built("padded", tiny_source)
    given = PrunePlan(8, RAGGED)
    assert verify_alone(build, prune=given).prune_sha256 != given.sha256
    other = replace(given, layers=RAGGED | {1: UNIFORM.layers[1]})
    assert "the plan given has" in caught(build, other)


def test_counts_other_than_the_plan_s_are_caught(damaged: Callable[[str], Path]) -> None:
    """All hashes are right, and config.json agrees with the shapes, but the plan is another one."""
    build = damaged("uniform")
    layers = dict.fromkeys(range(1, 5), replace(UNIFORM.layers[1], keep=(1, 3, 4)))
    other = PrunePlan(8, layers)
    text = other.to_text().encode()
    replaced(build / "prune_plan.json", text)
    with changing_json(build / MANIFEST) as manifest:
        manifest["prune_sha256"] = other.sha256
        manifest["sidecars"]["prune_plan.json"] = hashlib.sha256(text).hexdigest()
    assert caught(build) == (
        f"tensor {LAYER}1.mlp.e_score_correction_bias: (4,), "
        "but prune_plan.json has 3 experts in layer 1."
    )


def test_a_model_file_that_the_manifest_does_not_list_is_caught(build: Path) -> None:
    with changing_config(build) as config:
        config["model_file"] = "kimi_k3.py"
    (build / "kimi_k3.py").write_text("")
    assert caught(build) == (
        f"config.json: model_file is kimi_k3.py, which {MANIFEST} does not list."
    )


def test_our_model_file_of_another_version_is_reported(
    damaged: Callable[[str], Path], tiny_source: Path
) -> None:
    build = damaged("ragged")
    other = (build / "kimi_k3.py").read_bytes() + b"\n"
    replaced(build / "kimi_k3.py", other)
    with pytest.raises(MismatchError, match=r"kimi_k3\.py: SHA-256 is"):
        verify_build(build, open_source(tiny_source))
    with changing_json(build / MANIFEST) as manifest:
        manifest["sidecars"]["kimi_k3.py"] = hashlib.sha256(other).hexdigest()
    report = verify_build(build, open_source(tiny_source))
    assert report.model_file == "another version"


def test_a_shard_of_another_build_is_caught(damaged: Callable[[str], Path], tmp_path: Path) -> None:
    """Same names and sizes, other bytes: what a stale shard looks like."""
    build = damaged("mxfp4")
    path = shard_of(build, f"{LAYER}2.mlp.gate.weight")
    other = (build / "model-00004-of-000008.safetensors").read_bytes()
    replaced(path, other.replace(b"layers.3.", b"layers.2."))
    assert caught(build)


def test_a_folder_that_is_none_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a folder"):
        verify_alone(tmp_path / "none")


def test_a_source_is_no_build(tiny_source: Path) -> None:
    assert caught(tiny_source) == f"{MANIFEST} is missing in {tiny_source}."


@pytest.mark.parametrize("kind", ["q4", "ragged", "padded", "graded", "moonshot"])
def test_a_wrong_number_of_experts_is_caught(kind: str, damaged: Callable[[str], Path]) -> None:
    build = damaged(kind)
    with changing_config(build) as config:
        config["text_config"]["num_experts"] -= 1
    assert re.search("experts is [0-9]+, but|gate.weight: .*(describes|expected)", caught(build))
