"""A run writes what was planned, refuses before it writes, and stops so that it can go on."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from converters.mxfp4 import decode
from kimi_k3_mlx.convert import estimate as estimate_module
from kimi_k3_mlx.convert.folder import locked
from kimi_k3_mlx.convert.run import run
from kimi_k3_mlx.convert.sidecars import read_manifest
from kimi_k3_mlx.errors import (
    CheckpointError,
    DoesNotFitError,
    InterruptedBuildError,
    KimiError,
    UsageError,
)
from kimi_k3_mlx.schema import BuildPlan
from kimi_k3_mlx.tensors.journal import JOURNAL
from kimi_k3_mlx.tensors.source import INDEX
from tests.convert.conftest import Planned, planned
from tests.convert.damage import LAYER, changing_json, tree, values_of

HINT = "choose another --mlx-path, or pass --overwrite to delete it."
Convert = Callable[[Path], Path]


def stop_at(n_bytes: int, error: BaseException) -> Callable[[int, int, str], None]:
    """A progress that raises once so many bytes are done."""

    def progress(done: int, total: int, what: str) -> None:
        if done >= n_bytes:
            raise error

    return progress


def arrays(path: Path, part: str) -> dict[str, np.ndarray]:
    """The tensors of a shard whose names contain `part`, as MLX reads them."""
    loaded = mx.load(str(path))
    return {name: np.array(array) for name, array in loaded.items() if part in name}


def with_profile(plan: BuildPlan, name: str) -> BuildPlan:
    """The plan under another profile's name."""
    return replace(plan, profile=replace(plan.profile, name=name))


def test_the_files_of_a_build(tiny_build: Path, tiny_plan: Planned) -> None:
    plan, source = tiny_plan
    sidecars = {"LICENSE", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    expected = {shard.name for shard in plan.shards} | sidecars | {"chat_template.jinja"}
    assert set(os.listdir(tiny_build)) == expected | {"config.json", INDEX, "kimi_k3_mlx.json"}
    for name in sidecars:
        assert (tiny_build / name).read_bytes() == (source.path / name).read_bytes()
    index = json.loads((tiny_build / INDEX).read_text())
    assert index["metadata"]["total_size"] == plan.total_size
    assert set(index["weight_map"]) == {tensor.name for tensor in plan.tensors}


def test_the_manifest_knows_every_shard(tiny_build: Path, tiny_plan: Planned) -> None:
    plan, source = tiny_plan
    manifest = read_manifest(tiny_build)
    assert manifest is not None
    assert (manifest.plan_sha256, manifest.source) == (plan.sha256, source.id)
    assert str(source.path) not in (tiny_build / "kimi_k3_mlx.json").read_text("utf-8")
    for name, sha256 in manifest.sidecars.items():
        assert sha256 == hashlib.sha256((tiny_build / name).read_bytes()).hexdigest()
    for shard in manifest.shards:
        content = (tiny_build / shard.name).read_bytes()
        assert (shard.n_bytes, shard.nan_scales) == (len(content), 0)
        assert shard.sha256 == hashlib.sha256(content).hexdigest()


def test_mxfp4_bytes_pass_through_untouched(copied: Path, convert: Convert) -> None:
    """turboquant-mlx#71: every scale and every code, −0 too, arrives as it was."""
    base = f"{LAYER}3.block_sparse_moe.experts."
    for expert in range(8):
        with values_of(copied, f"{base}{expert}.w2.weight_packed") as packed:
            packed[:] = np.arange(packed.size, dtype=np.uint32).reshape(packed.shape) + expert
        with values_of(copied, f"{base}{expert}.w2.weight_scale") as scales:
            scales[:4, 0] = (0, 1, 127, 254)
    out = convert(copied)
    source = arrays(copied / "model-00004-of-000008.safetensors", ".experts.")
    built = arrays(out / "model-00004-of-000008.safetensors", ".switch_mlp.")
    stack = f"{LAYER}3.mlp.switch_mlp.down_proj."
    packed = np.stack([source[f"{base}{expert}.w2.weight_packed"] for expert in range(8)])
    assert np.array_equal(built[f"{stack}weight"].view(np.uint8), packed)
    scales = np.stack([source[f"{base}{expert}.w2.weight_scale"] for expert in range(8)])
    assert np.array_equal(built[f"{stack}scales"], scales)
    values = mx.dequantize(
        mx.array(built[f"{stack}weight"]),
        mx.array(scales),
        group_size=32,
        bits=4,
        mode="mxfp4",
        dtype=mx.float32,
    )
    exact = decode(packed, scales)
    finite = np.abs(exact) < np.finfo(np.float32).max
    assert np.array_equal(np.array(values)[finite], exact[finite])


def test_nan_scales_are_counted(copied: Path, tmp_path: Path) -> None:
    with values_of(copied, f"{LAYER}3.block_sparse_moe.experts.1.w2.weight_scale") as scales:
        scales[0, :] = 255
    plan, source = planned(copied)
    assert run(plan, source, tmp_path / "out").nan_scales == 2
    assert run(plan, source, tmp_path / "out").nan_scales == 2


def test_a_finished_build_is_left_alone(build: Path, tiny_plan: Planned) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in build.iterdir()}
    summary = run(*tiny_plan, build)
    assert summary.n_reused == summary.n_shards == 8
    assert {path.name: path.stat().st_mtime_ns for path in build.iterdir()} == before


def test_progress_counts_every_byte_once(tiny_plan: Planned, tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    run(*tiny_plan, tmp_path / "out", lambda *event: seen.append(event))
    done = [event[0] for event in seen]
    assert done == sorted(done)
    assert done[-1] == seen[0][1] == tiny_plan[0].n_bytes
    assert [*dict.fromkeys(event[2] for event in seen)][:2] == ["layer 1/5", "layer 2/5"]


@pytest.mark.parametrize("name", ["notes.txt", "config.json", "model-00001.safetensors"])
def test_a_folder_that_is_not_ours_is_refused(
    tiny_plan: Planned, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(UsageError, match=f"is not empty and not a build .* it holds {name}"):
        run(*tiny_plan, tmp_path)
    assert tree(tmp_path).keys() == {name}


def test_what_macos_leaves_in_a_folder_does_not_matter(tiny_plan: Planned, tmp_path: Path) -> None:
    (tmp_path / ".DS_Store").write_text("")
    run(*tiny_plan, tmp_path)


def test_a_file_in_place_of_the_folder_is_refused(tiny_plan: Planned, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(UsageError, match="out is not a folder"):
        run(*tiny_plan, tmp_path / "out")


def test_a_finished_build_of_another_plan_is_refused(build: Path, copied: Path) -> None:
    with changing_json(copied / "config.json") as config:
        config["text_config"]["rms_norm_eps"] = 1e-6
    before = tree(build)
    plan, source = planned(copied)
    with pytest.raises(UsageError) as error:
        run(plan, source, build)
    manifest = read_manifest(build)
    assert manifest is not None
    old, new = manifest.source.headers_sha256[:4], source.id.headers_sha256[:4]
    assert error.value.message == (
        f"{build} is a finished build of another plan (source_sha256 {old}… ≠ {new}…)."
    )
    assert error.value.hint == HINT
    assert tree(build) == before


def test_another_plan_of_the_same_source_is_named_by_its_hash(
    build: Path, tiny_plan: Planned
) -> None:
    plan, source = tiny_plan
    other = replace(plan, shards=plan.shards[:-1])
    with pytest.raises(UsageError) as error:
        run(other, source, build)
    difference = f"(plan_sha256 {plan.sha256[:4]}… ≠ {other.sha256[:4]}…)"
    assert difference in error.value.message


def test_a_finished_build_that_lost_a_shard_is_refused(build: Path, tiny_plan: Planned) -> None:
    (build / "model-00002-of-000008.safetensors").unlink()
    with pytest.raises(UsageError, match=r"but model-00002-of-000008\.safetensors is missing"):
        run(*tiny_plan, build)


@pytest.fixture
def unfinished(tiny_plan: Planned, tmp_path: Path) -> Path:
    """A build that was interrupted in its third shard."""
    plan, source = tiny_plan
    out = tmp_path / "unfinished"
    n_bytes = sum(shard.n_bytes for shard in plan.shards[:2]) + 20000
    with pytest.raises(InterruptedBuildError):
        run(plan, source, out, stop_at(n_bytes, KeyboardInterrupt()))
    return out


def test_an_interrupted_build_says_how_far_it_came(tiny_plan: Planned, tmp_path: Path) -> None:
    plan, source = tiny_plan
    n_bytes = sum(shard.n_bytes for shard in plan.shards[:2]) + 20000
    with pytest.raises(InterruptedBuildError) as error:
        run(plan, source, tmp_path / "out", stop_at(n_bytes, KeyboardInterrupt()))
    assert error.value.message == (
        "interrupted after layer 2/5 (308 kB written, all shards intact)."
    )
    assert error.value.hint == "run the same command again to continue."
    names = {shard.name for shard in plan.shards[:2]} | {JOURNAL}
    assert set(os.listdir(tmp_path / "out")) == names


def test_an_interrupted_build_is_continued(
    unfinished: Path, tiny_plan: Planned, tiny_build: Path
) -> None:
    plan, source = tiny_plan
    before = {shard.name: (unfinished / shard.name).stat() for shard in plan.shards[:2]}
    assert run(plan, source, unfinished).n_reused == 2
    assert tree(unfinished) == tree(tiny_build)
    for name, stat in before.items():
        assert (unfinished / name).stat().st_mtime_ns == stat.st_mtime_ns


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_leaves_a_folder_that_can_be_continued(
    tiny_plan: Planned, tiny_build: Path, tmp_path: Path, code: int
) -> None:
    plan, source = tiny_plan
    out = tmp_path / "out"
    n_bytes = sum(shard.n_bytes for shard in plan.shards[:4]) + 20000
    with pytest.raises(DoesNotFitError) as error:
        run(plan, source, out, stop_at(n_bytes, OSError(code, os.strerror(code))))
    volume = estimate_module.mount_point(tmp_path)
    assert error.value.message == (
        f"no space left on {volume} after layer 4/5 (687 kB written, all shards intact)."
    )
    assert error.value.hint == "make room for 502 kB and run the same command again to continue."
    assert not (out / "config.json").exists()
    assert list(out.glob("*.partial")) == []
    run(plan, source, out)
    assert tree(out) == tree(tiny_build)


def test_a_disk_that_takes_no_big_file_says_so(tiny_plan: Planned, tmp_path: Path) -> None:
    too_big = OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    with pytest.raises(DoesNotFitError) as error:
        run(*tiny_plan, tmp_path / "out", stop_at(100000, too_big))
    volume = estimate_module.mount_point(tmp_path)
    assert error.value.message == (f"{volume} takes no file as big as the build's, up to 190 kB.")
    assert error.value.hint.startswith("FAT32 ends at 4 GB: point --mlx-path at another disk; ")


def test_a_broken_disk_is_an_error_with_its_file(tiny_plan: Planned, tmp_path: Path) -> None:
    broken = OSError(errno.EIO, os.strerror(errno.EIO), "model-x")
    with pytest.raises(KimiError, match=r"model-x: Input/output error\."):
        run(*tiny_plan, tmp_path / "out", stop_at(100000, broken))


def test_other_options_on_an_unfinished_build_are_refused(
    unfinished: Path, tiny_plan: Planned
) -> None:
    plan, source = tiny_plan
    before = tree(unfinished)
    with pytest.raises(UsageError) as error:
        run(with_profile(plan, "mxfp4-q8"), source, unfinished)
    assert error.value.message == (
        f"{unfinished} is an unfinished build with other options (profile mxfp4 ≠ mxfp4-q8)."
    )
    assert error.value.hint == HINT
    assert tree(unfinished) == before


def test_a_source_that_changed_under_an_unfinished_build_is_refused(
    copied: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    plan, source = planned(copied)
    with pytest.raises(InterruptedBuildError):
        run(plan, source, out, stop_at(500000, KeyboardInterrupt()))
    with values_of(copied, f"{LAYER}0.self_attn.dt_bias") as values:
        values[0] += 1
    with pytest.raises(UsageError, match=r"other options \(source_files [0-9a-f]{4}… ≠ "):
        run(*planned(copied), out)


def test_a_strange_shard_in_an_unfinished_build_is_refused(
    unfinished: Path, tiny_plan: Planned
) -> None:
    (unfinished / "model-old.safetensors").write_bytes(b"")
    with pytest.raises(UsageError, match=r"holds model-old\.safetensors, which is no shard"):
        run(*tiny_plan, unfinished)


def test_a_full_disk_is_refused_before_the_folder_is_made(
    tiny_plan: Planned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(estimate_module.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(DoesNotFitError, match=r"needs 1.19 MB on .*, 1.00 kB free"):
        run(*tiny_plan, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    run(*tiny_plan, tmp_path / "out", force=True)
    assert (tmp_path / "out" / "config.json").exists()


def test_a_log_with_a_tail_is_refused_before_the_folder_is_made(
    copied: Path, tmp_path: Path
) -> None:
    with values_of(copied, f"{LAYER}2.self_attn.A_log") as values:
        values[30] = 0.5
    with pytest.raises(CheckpointError, match=r"layers.2.self_attn.A_log: element 30 is 0.5"):
        run(*planned(copied), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_second_writer_is_kept_out(tiny_plan: Planned, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with locked(out), pytest.raises(UsageError, match="is being written by another process"):
        run(*tiny_plan, out)
    assert os.listdir(out) == []
    run(*tiny_plan, out)


def test_a_folder_that_can_not_be_made(tiny_plan: Planned, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(KimiError, match="file/out: Not a directory"):
        run(*tiny_plan, tmp_path / "file" / "out")


@pytest.mark.parametrize("name", ["config.json", INDEX, "tokenizer.json", "LICENSE"])
@pytest.mark.parametrize("damage", ["changed", "gone"])
def test_a_finished_build_whose_small_files_changed_is_not_called_finished(
    name: str, damage: str, build: Path, tiny_plan: Planned
) -> None:
    (build / name).write_text("{")
    if damage == "gone" and name != "config.json":
        (build / name).unlink()
    with pytest.raises(UsageError, match=f"finished build, but {name} is missing or has changed"):
        run(*tiny_plan, build)
