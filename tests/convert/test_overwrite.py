"""Overwriting: refused before anything is deleted, and only what a build of ours wrote goes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kimi_k3_mlx.convert import estimate as estimate_module
from kimi_k3_mlx.convert.folder import locked, own_files
from kimi_k3_mlx.convert.run import run
from kimi_k3_mlx.errors import (
    CheckpointError,
    DoesNotFitError,
    InterruptedBuildError,
    KimiError,
    UsageError,
)
from kimi_k3_mlx.tensors.journal import JOURNAL
from kimi_k3_mlx.tensors.source import MANIFEST
from tests.convert.conftest import Planned, planned
from tests.convert.damage import LAYER, changing_json, tree, values_of
from tests.tiny_k3 import TinyConfig, write_source

SHARD = "model-00003-of-000008.safetensors"


@pytest.fixture
def other(tmp_path: Path) -> Planned:
    """A smaller source, without a tokenizer, and its plan."""
    config = TinyConfig(layers=2, vision=False, tokenizer=False)
    return planned(write_source(tmp_path / "other", config))


@pytest.fixture
def unfinished(other: Planned, tmp_path: Path) -> Path:
    """A build of the other source that was interrupted in its second shard."""

    def stop(done: int, total: int, what: str) -> None:
        if done > other[0].shards[0].n_bytes + 20000:
            raise KeyboardInterrupt

    with pytest.raises(InterruptedBuildError):
        run(*other, tmp_path / "unfinished", stop)
    return tmp_path / "unfinished"


def test_a_build_gives_way_and_the_users_files_stay(
    build: Path, tiny_build: Path, other: Planned, tiny_plan: Planned
) -> None:
    (build / f"{SHARD}.partial").write_bytes(b"torn")
    (build / "tokenizer_notes.md").write_text("mine")
    (build / "tokenizer_old").mkdir()
    (build / "LICENSE_of_mine").write_text("mine")
    run(*other, build, overwrite=True)
    mine = {"tokenizer_notes.md", "tokenizer_old", "LICENSE_of_mine"}
    written = {shard.name for shard in other[0].shards} | {"LICENSE", "generation_config.json"}
    kept = {"config.json", "model.safetensors.index.json", MANIFEST}
    assert set(os.listdir(build)) == mine | written | kept
    run(*tiny_plan, build, overwrite=True)
    assert tree(tiny_build).items() <= tree(build).items()


def test_an_unfinished_build_gives_way(
    unfinished: Path, tiny_build: Path, tiny_plan: Planned
) -> None:
    assert file_names(unfinished) == {JOURNAL, "model-00001-of-000003.safetensors"}
    run(*tiny_plan, unfinished, overwrite=True)
    assert tree(unfinished) == tree(tiny_build)


def file_names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_an_interrupted_overwrite_is_continued_without_overwriting(
    build: Path, other: Planned
) -> None:
    def stop(done: int, total: int, what: str) -> None:
        if done > other[0].shards[0].n_bytes + 20000:
            raise KeyboardInterrupt

    with pytest.raises(InterruptedBuildError):
        run(*other, build, stop, overwrite=True)
    assert file_names(build) == {JOURNAL, "model-00001-of-000003.safetensors"}
    assert run(*other, build).n_reused == 1


def test_a_journal_with_a_damaged_line_can_be_overwritten(
    unfinished: Path, tiny_build: Path, tiny_plan: Planned
) -> None:
    with (unfinished / JOURNAL).open("a") as file:
        file.write("{\n{}\n")
    with pytest.raises(CheckpointError, match=r"is damaged in line 3\.") as error:
        run(*tiny_plan, unfinished)
    assert error.value.hint == "pass --overwrite to begin the build again."
    run(*tiny_plan, unfinished, overwrite=True)
    assert tree(unfinished) == tree(tiny_build)


def test_without_its_records_nothing_is_deleted(
    build: Path, unfinished: Path, tiny_plan: Planned
) -> None:
    (unfinished / JOURNAL).write_text("[]\n")
    (build / MANIFEST).write_text("{")
    for out in (unfinished, build):
        before = tree(out)
        with pytest.raises(CheckpointError) as error:
            run(*tiny_plan, out, overwrite=True)
        assert error.value.hint.startswith("delete the folder yourself")
        assert tree(out) == before


def test_values_are_checked_before_the_old_build_is_deleted(build: Path, copied: Path) -> None:
    with values_of(copied, f"{LAYER}0.self_attn.A_log") as values:
        values[-1] = 1
    before = tree(build)
    with pytest.raises(CheckpointError, match="A_log: element 31 is"):
        run(*planned(copied), build, overwrite=True)
    assert tree(build) == before


def test_the_room_is_checked_before_and_the_old_build_counts(
    build: Path, tiny_plan: Planned, other: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tree(build)
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(estimate_module.shutil, "disk_usage", lambda path: usage)
    run(*other, build, overwrite=True)
    smaller = tree(build)
    assert smaller != before
    with pytest.raises(DoesNotFitError, match=r"needs 1.19 MB on .*, \d+ kB free"):
        run(*tiny_plan, build, overwrite=True)
    assert tree(build) == smaller


def test_what_is_not_ours_is_never_deleted(tmp_path: Path, tiny_plan: Planned) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("years")
    with pytest.raises(UsageError, match="is not a build of kimi-k3-mlx; it is not deleted"):
        run(*tiny_plan, out, overwrite=True)
    assert file_names(out) == {"thesis.tex"}


@pytest.mark.parametrize("name", ["../thesis.tex", "folder/thesis.tex", "..", ""])
def test_records_that_lead_out_of_the_folder_are_not_followed(
    build: Path, other: Planned, name: str
) -> None:
    (build.parent / "thesis.tex").write_text("years")
    (build / "folder").mkdir()
    (build / "folder" / "thesis.tex").write_text("years")
    with changing_json(build / MANIFEST) as manifest:
        manifest["sidecars"][name] = "0"
    run(*other, build, overwrite=True)
    assert (build.parent / "thesis.tex").exists()
    assert (build / "folder" / "thesis.tex").exists()


@pytest.mark.parametrize("is_folder", [True, False])
def test_a_file_of_the_users_in_the_way_is_refused(
    unfinished: Path, tiny_plan: Planned, is_folder: bool
) -> None:
    path = unfinished / "tokenizer.json"
    if is_folder:
        path.mkdir()
    else:
        path.write_text("mine")
    before = tree(unfinished)
    with pytest.raises(
        UsageError, match=r"holds tokenizer\.json, which the build .* did not write"
    ):
        run(*tiny_plan, unfinished, overwrite=True)
    assert tree(unfinished) == before


def test_a_strange_shard_is_refused(build: Path, tiny_plan: Planned) -> None:
    (build / "model-old.safetensors").write_bytes(b"")
    with pytest.raises(UsageError, match=r"holds model-old\.safetensors, which is no shard"):
        run(*tiny_plan, build, overwrite=True)
    assert (build / SHARD).exists()


def test_nothing_is_deleted_while_another_process_writes(build: Path, other: Planned) -> None:
    before = tree(build)
    with locked(build), pytest.raises(UsageError, match="is being written by another process"):
        run(*other, build, overwrite=True)
    assert tree(build) == before


def test_the_source_is_never_the_output(copied: Path) -> None:
    before = tree(copied)
    for overwrite in (False, True):
        with pytest.raises(UsageError, match="is the source itself"):
            run(*planned(copied), copied, overwrite=overwrite)
    assert tree(copied) == before


def test_own_files_are_those_on_record(build: Path) -> None:
    assert {path.name for path in own_files(build)} == file_names(build)
    (build / "tokenizer_config.json.bak").write_text("mine")
    assert build / "tokenizer_config.json.bak" not in own_files(build)


@pytest.mark.parametrize("kind", ["dangling", "folder"])
def test_sidecars_must_be_readable_before_anything_is_written(
    copied: Path, tmp_path: Path, build: Path, kind: str
) -> None:
    (copied / "tokenizer.json").unlink()
    if kind == "folder":
        (copied / "tokenizer.json").mkdir()
    else:
        (copied / "tokenizer.json").symlink_to("nowhere")
    message = "Is a directory" if kind == "folder" else "No such file or directory"
    before = tree(build)
    with pytest.raises(KimiError, match=rf"source/tokenizer\.json: {message}\."):
        run(*planned(copied), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(KimiError, match=rf"source/tokenizer\.json: {message}\."):
        run(*planned(copied), build, overwrite=True)
    assert tree(build) == before
