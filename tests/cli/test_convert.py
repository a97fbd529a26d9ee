"""`kimi-k3 convert`: plans, refuses, resumes; stdout is data and stderr is talk."""

from __future__ import annotations

import json
import re
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from kimi_k3_mlx.cli import _build
from tests.cli.conftest import Run, program
from tests.convert.damage import LAYER, values_of
from tests.tiny_k3 import TinyConfig, write_source

Usage = namedtuple("Usage", "total used free")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_converts_and_says_what_it_did(kimi: Run, tiny_source: Path, tmp_path: Path) -> None:
    result = kimi("convert", "--hf-path", tiny_source, "--mlx-path", tmp_path / "out")
    assert (result.code, result.out) == (0, "")
    lines = result.err.splitlines()
    assert [line.split("  ")[0] for line in lines[:-1]] == [
        *(f"layer {i}/5" for i in range(1, 6)),
        "embeddings and head",
        "projector",
        "vision tower",
    ]
    assert lines[-1].startswith(f"{tmp_path / 'out'}: 8 shards, 1.19 MB in ")
    assert lines[-1].endswith(", every tensor bit-equal to the source's")
    assert (tmp_path / "out" / "config.json").is_file()


def test_quiet_says_nothing(kimi: Run, tiny_source: Path, tmp_path: Path) -> None:
    args = ("convert", "--model", tiny_source, "--mlx-path", tmp_path / "out", "-q")
    assert kimi(*args) == (0, "", "")


def test_the_default_output_is_named_after_source_and_profile(
    kimi: Run, tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert kimi("convert", "--hf-path", tiny_source, "-q").code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["source-mlx-mxfp4"]


def test_json_is_one_object_on_stdout(kimi: Run, tiny_source: Path, tmp_path: Path) -> None:
    result = kimi("convert", "--hf-path", tiny_source, "--mlx-path", tmp_path / "out", "--json")
    told = json.loads(result.out)
    assert (told["version"], told["n_shards"], told["build"]["n_reused"]) == (1, 8, 0)
    assert told["plan_sha256"] == told["build"]["plan_sha256"]


def test_a_finished_build_is_left_alone(kimi: Run, tiny_source: Path, tmp_path: Path) -> None:
    args = ("convert", "--hf-path", tiny_source, "--mlx-path", tmp_path / "out")
    kimi(*args)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    result = kimi(*args)
    assert result == (0, "", f"{tmp_path / 'out'} was finished already: 8 shards.\n")
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}


def test_dry_run_reads_no_tensor_and_writes_nothing(
    kimi: Run, tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr("kimi_k3_mlx.tensors.local.LocalReader.blocks", refuse)
    out = tmp_path / "out"
    result = kimi("convert", "--hf-path", tiny_source, "--mlx-path", out, "--dry-run")
    assert (result.code, result.err) == (0, "")
    assert re.sub(r" +", " ", result.out).splitlines()[:3] == [
        f"source {tiny_source} 8 shards 338 tensors 1.06 MB",
        f"output {out} 8 shards 160 tensors 1.19 MB",
        "profile mxfp4: experts MXFP4 byte for byte, trunk in the source's bf16 and f32",
    ]
    assert result.out.splitlines()[-1].startswith("nothing was written.")
    assert list(tmp_path.iterdir()) == []


def test_dry_run_as_json(kimi: Run, tiny_source: Path, tmp_path: Path) -> None:
    args = ("convert", "--hf-path", tiny_source, "--mlx-path", tmp_path / "out", "--dry-run")
    told = json.loads(kimi(*args, "--json").out)
    assert told["estimate"]["n_write"] == told["n_bytes"]
    assert told["estimate"]["fits"] is True
    assert list(tmp_path.iterdir()) == []


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = Usage(10**12, 10**12 - 312_000, 312_000)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    monkeypatch.setattr("kimi_k3_mlx.convert.estimate.mount_point", lambda path: "/Volumes/m2")


NO_SPACE = (
    "kimi-k3: error: needs 1.19 MB on /Volumes/m2, 312 kB free.\n"
    "hint: point --mlx-path at another disk, or prune harder with --target-size; "
    "--force tries anyway.\n"
)


@pytest.mark.parametrize("extra", [(), ("--dry-run", "--json")])
def test_a_full_disk_is_refused_before_anything_is_written(
    extra: tuple[str, ...],
    kimi: Run,
    tiny_source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fill_disk(monkeypatch)
    result = kimi("convert", "--hf-path", tiny_source, "--mlx-path", tmp_path / "out", *extra)
    assert (result.code, result.err) == (4, NO_SPACE)
    assert not result.out or json.loads(result.out)["estimate"]["fits"] is False
    assert list(tmp_path.iterdir()) == []


def test_force_tries_on_a_full_disk(
    kimi: Run, tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_disk(monkeypatch)
    args = ("convert", "--hf-path", tiny_source, "--mlx-path", tmp_path / "out", "-q")
    assert kimi(*args, "--force") == (0, "", "")


def test_a_folder_that_is_not_ours_is_refused_and_kept(
    kimi: Run, tiny_source: Path, tmp_path: Path
) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    for extra in ((), ("--overwrite", "-y")):
        result = kimi("convert", "--hf-path", tiny_source, "--mlx-path", tmp_path, *extra)
        assert result.code == 2
        assert str(tmp_path) in result.err
        assert contents(tmp_path) == {"thesis.txt": b"years of work"}


@pytest.fixture
def other_source(tmp_path: Path) -> Path:
    return write_source(tmp_path / "other", TinyConfig(layers=2, seed=1))


def test_a_build_of_another_source_is_refused(
    kimi: Run, tiny_source: Path, other_source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    kimi("convert", "--hf-path", tiny_source, "--mlx-path", out, "-q")
    before = contents(out)
    result = kimi("convert", "--hf-path", other_source, "--mlx-path", out)
    fact, hint = result.err.splitlines()
    assert result.code == 2
    assert re.fullmatch(
        f"kimi-k3: error: {re.escape(str(out))} is a finished build of another plan "
        r"\(source_sha256 [0-9a-f]{4}… ≠ [0-9a-f]{4}…\)\.",
        fact,
    )
    assert hint == "hint: choose another --mlx-path, or pass --overwrite to delete it."
    assert contents(out) == before


def test_overwrite_asks_and_without_a_terminal_needs_yes(
    kimi: Run, tiny_source: Path, other_source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    kimi("convert", "--hf-path", tiny_source, "--mlx-path", out, "-q")
    before = contents(out)
    args = ("convert", "--hf-path", other_source, "--mlx-path", out, "--overwrite", "-q")
    assert program(*args) == (
        2,
        "",
        "kimi-k3: error: --overwrite deletes a build.\nhint: confirm it with -y.\n",
    )
    assert contents(out) == before
    assert kimi(*args, "--yes") == (0, "", "")
    fresh = tmp_path / "fresh"
    kimi("convert", "--hf-path", other_source, "--mlx-path", fresh, "-q")
    assert contents(out) == contents(fresh)


@pytest.mark.parametrize(("answer", "agreed"), [("y\n", True), ("n\n", False), ("", False)])
def test_the_question_takes_only_yes(
    answer: str, agreed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from io import StringIO

    from kimi_k3_mlx.errors import UsageError

    terminal = StringIO(answer)
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    if agreed:
        _build.confirm("delete?", yes=False)
    else:
        with pytest.raises(UsageError, match="nothing was deleted"):
            _build.confirm("delete?", yes=False)


def test_overwrite_of_a_new_folder_asks_nothing(
    kimi: Run, tiny_source: Path, tmp_path: Path
) -> None:
    args = ("convert", "--hf-path", tiny_source, "--mlx-path", tmp_path / "out", "-q")
    assert kimi(*args, "--overwrite") == (0, "", "")


SIGNAL_AT_THIRD_SHARD = """
import os, signal
from kimi_k3_mlx.convert import run
publish, seen = run.publish, []
def interrupted(path):
    publish(path)
    seen.append(path)
    if len(seen) == 3:
        os.kill(os.getpid(), signal.{signal})
run.publish = interrupted
"""


@pytest.mark.parametrize("signal", ["SIGINT", "SIGTERM"])
def test_an_interrupted_run_says_how_far_it_came_and_resumes(
    signal: str, kimi: Run, tiny_source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    args = ("convert", "--hf-path", tiny_source, "--mlx-path", out, "-q")
    result = program(*args, code=SIGNAL_AT_THIRD_SHARD.format(signal=signal))
    assert (result.code, result.out) == (130, "")
    fact, hint = result.err.splitlines()
    pattern = r"kimi-k3: interrupted after layer 3/5 \(\d+ kB written, all shards intact\)\."
    assert re.fullmatch(pattern, fact)
    assert hint == "hint: run the same command again to continue."
    assert not (out / "config.json").exists()
    assert kimi("generate", "--model", out, "-p", "x").code == 1

    resumed = kimi(*args[:-1])
    assert resumed.code == 0
    assert "8 shards, 3 of them from before" in resumed.err
    whole = tmp_path / "whole"
    kimi("convert", "--hf-path", tiny_source, "--mlx-path", whole, "-q")
    assert contents(out) == contents(whole)


def damaged(source: Path, folder: Path, rename: tuple[bytes, bytes]) -> Path:
    """A copy of a source in which one piece of a shard's header is replaced by as many bytes."""
    copy = shutil.copytree(source, folder)
    shard = copy / "model-00003-of-000008.safetensors"
    raw = shard.read_bytes()
    assert raw.count(rename[0]) == 1
    shard.write_bytes(raw.replace(*rename))
    return copy


def test_a_wrong_shape_is_named_with_the_shard_to_fetch(
    kimi: Run, tiny_source: Path, tmp_path: Path
) -> None:
    name = "language_model.model.layers.2.block_sparse_moe.experts.5.w2.weight_scale"
    old = f'"{name}":{{"dtype":"U8","shape":[64,2]'.encode()
    source = damaged(tiny_source, tmp_path / "bad", (old, old.replace(b"[64,2]", b"[32,4]")))
    result = kimi("convert", "--hf-path", source, "--mlx-path", tmp_path / "out")
    assert result == (
        1,
        "",
        f"kimi-k3: error: tensor {name}: shape (32, 4), expected (64, 2).\n"
        "hint: the source shard model-00003-of-000008.safetensors looks truncated; "
        "re-download it: kimi-k3 download --include model-00003*\n",
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("extra", [(), ("--dry-run",)])
def test_a_missing_tokenizer_is_said_even_when_quiet(
    extra: tuple[str, ...], kimi: Run, tiny_source: Path, tmp_path: Path
) -> None:
    source = shutil.copytree(tiny_source, tmp_path / "source")
    (source / "tokenizer.json").unlink()
    result = kimi("convert", "--hf-path", source, "--mlx-path", tmp_path / "out", "-q", *extra)
    assert (result.code, result.err) == (
        0,
        "warning: the source has neither tokenizer.json nor tiktoken.model: kimi-k3 generate and "
        "mlx_lm can't run this build\n",
    )


def test_scales_that_are_no_number_are_said_even_when_quiet_and_again(
    kimi: Run, tiny_source: Path, tmp_path: Path
) -> None:
    source = shutil.copytree(tiny_source, tmp_path / "source")
    name = f"{LAYER}3.block_sparse_moe.experts.1.w2.weight_scale"
    with values_of(source, name) as scales:
        scales[0, :] = 255
    paths = ("--hf-path", source, "--mlx-path", tmp_path / "out", "-q")
    warning = "warning: 2 expert scales are 255, which is no number\n"
    for _ in range(2):
        assert kimi("convert", *paths) == (0, "", warning)
    result = kimi("verify", *paths, "--json")
    assert (result.code, result.err) == (0, warning)
    assert json.loads(result.out)["nan_scales"] == 2


@pytest.mark.parametrize("dry_run", [(), ("--dry-run",)])
def test_a_dry_run_refuses_the_folders_that_a_run_refuses(
    dry_run: tuple[str, ...], kimi: Run, tiny_source: Path, other_source: Path, tmp_path: Path
) -> None:
    foreign, out = tmp_path / "foreign", tmp_path / "out"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("years of work")
    kimi("convert", "--hf-path", tiny_source, "--mlx-path", out, "-q")
    for folder, extra, message in (
        (foreign, (), "is not empty and not a build of kimi-k3-mlx"),
        (foreign, ("--overwrite", "-y"), "is not a build of kimi-k3-mlx; it is not deleted"),
        (other_source, (), "is the source itself"),
        (out, (), "is a finished build of another plan (source_sha256"),
    ):
        args = ("convert", "--hf-path", other_source, "--mlx-path", folder)
        result = kimi(*args, *extra, *dry_run)
        assert (result.code, result.out) == (2, "")
        assert message in result.err
    assert kimi(*args, "--dry-run", "--overwrite").code == 0


def test_overwrite_keeps_the_old_build_when_the_disk_is_too_small(
    kimi: Run,
    tiny_source: Path,
    other_source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"
    kimi("convert", "--hf-path", other_source, "--mlx-path", out, "-q")
    before = contents(out)
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(10**12, 10**12, 0))
    args = ("convert", "--hf-path", tiny_source, "--mlx-path", out, "--overwrite", "-y")
    for extra in ((), ("--dry-run",)):
        assert kimi(*args, *extra).code == 4
        assert contents(out) == before
