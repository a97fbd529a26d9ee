"""Outputs, memory and budgets are checked before anything is read, and only our files go."""

from __future__ import annotations

import os
from argparse import ArgumentTypeError, Namespace
from pathlib import Path

import pytest

from kimi_k3_mlx.cli._options import budgets, memory_size
from kimi_k3_mlx.cli._runs import checked_out, files_of, memory_of, run_folder
from kimi_k3_mlx.errors import UsageError
from kimi_k3_mlx.stream.journal import FolderTotals, discard
from tests.cli.conftest import Run

TINY_K3 = Path(__file__).parents[2] / "kimi_k3_mlx" / "assets" / "tiny-k3"


def test_an_output_is_never_an_input(tmp_path: Path) -> None:
    store, link = tmp_path / "s.safetensors", tmp_path / "link"
    store.touch()
    link.symlink_to(store)
    for out in (store, link, tmp_path / "." / "s.safetensors"):
        with pytest.raises(UsageError, match="is read as well"):
            checked_out(str(out), ["missing", store])
    assert checked_out(str(tmp_path / "new"), [store]) == tmp_path / "new"
    assert checked_out(str(store), [tmp_path / "other"]) == store


def test_an_output_that_can_t_be_written_is_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for out in (str(tmp_path), ".", "..", "new/", ""):
        with pytest.raises(UsageError, match="is a folder, not a file"):
            checked_out(out, [])
    with pytest.raises(UsageError, match="there is no folder") as caught:
        checked_out(str(tmp_path / "a" / "x.json"), [])
    assert caught.value.hint == f"mkdir -p {tmp_path / 'a'}"
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(UsageError, match="is not writable"):
        checked_out(str(tmp_path / "x.json"), [])


@pytest.mark.parametrize("argv", [
    ["calibrate", "--hf-path", "nowhere", "--corpus", "IN", "--out", "OUT"],
    ["compare", "--hf-path", "nowhere", "--plans", "p", "--text", "IN", "--out", "OUT"],
    ["probe", "--model", "nowhere", "--text", "IN", "--out", "OUT"],
    ["plan", "--stats", "IN", "--keep", "4", "--out", "OUT"],
    ["stats", "merge", "IN", "other", "--out", "OUT"],
])  # fmt: skip
def test_every_verb_checks_its_output(kimi: Run, argv: list[str], tmp_path: Path) -> None:
    source = tmp_path / "in.txt"
    source.write_text("mine")
    for out, message in ((tmp_path, "is a folder"), (source, "is read as well")):
        names = {"IN": source, "OUT": out}
        refused = kimi(*(names.get(word, word) for word in argv))
        assert refused.code == 2
        assert message in refused.err
    assert source.read_text() == "mine"


def test_specs_name_files_and_data_sets() -> None:
    assert files_of("a.txt=x,org/data(train):20=web,b.jsonl") == [Path("a.txt"), Path("b.jsonl")]


def test_a_folder_of_others_is_not_taken_for_a_run(tmp_path: Path) -> None:
    out, folder = tmp_path / "s.safetensors", tmp_path / "s.safetensors.run"
    assert run_folder(out) == folder
    folder.mkdir()
    assert run_folder(out) == folder
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="holds other files"):
        run_folder(out)
    (folder / "notes.txt").rename(tmp_path / "notes.txt")
    folder.rmdir()
    folder.touch()
    with pytest.raises(UsageError, match="holds other files"):
        run_folder(out)


@pytest.mark.parametrize(
    "argv", [["calibrate", "--corpus"], ["compare", "--plans", "p.json", "--text"]]
)
def test_a_run_does_not_delete_a_folder_that_only_has_its_name(
    kimi: Run, argv: list[str], tmp_path: Path
) -> None:
    (tmp_path / "e.run").mkdir()
    (tmp_path / "e.run" / "notes.txt").write_text("mine")
    refused = kimi(*argv, "no.txt", "--hf-path", TINY_K3, "--out", tmp_path / "e")
    assert refused.code == 2
    assert "e.run, where the run would be kept, holds other files" in refused.err
    assert (tmp_path / "e.run" / "notes.txt").read_text() == "mine"


def test_the_end_of_a_run_removes_only_its_own_files(tmp_path: Path) -> None:
    for others in ([], ["notes.txt", "delta-9-9.safetensors"]):
        folder = tmp_path / "run"
        folder.mkdir()
        FolderTotals(folder, {"a": 1}).add(0, 0, {})
        for name in others:
            (folder / name).touch()
        discard(folder)
        found = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
        assert found == sorted(others)


def test_a_changed_corpus_is_named_when_a_run_can_t_continue(tmp_path: Path) -> None:
    before = {"fingerprint": "0" * 64, "groups": [[1, 2]], "version": "1"}
    FolderTotals(tmp_path, before)
    with pytest.raises(UsageError, match="another corpus: its texts") as caught:
        FolderTotals(tmp_path, before | {"fingerprint": "f" * 64, "groups": [[3]]})
    assert "ffff" not in caught.value.message
    with pytest.raises(UsageError, match="grouping of the text: --memory or --spill"):
        FolderTotals(tmp_path, before | {"groups": [[3]]})
    with pytest.raises(UsageError, match="another version: 1 before, 2 now"):
        FolderTotals(tmp_path, before | {"version": "2"})


def test_no_memory_is_not_the_default() -> None:
    for text in ("0", "0GB"):
        with pytest.raises(ArgumentTypeError, match="no memory to run in"):
            memory_size(text)
    assert memory_of(Namespace(memory=memory_size("1kB"))) == 1000
    assert memory_of(Namespace(memory=None)) > 1 << 28


def test_budgets_are_of_all_sources_or_of_some() -> None:
    assert budgets("500") == 500
    assert budgets("code=50000,zh=20000") == {"code": 50_000, "zh": 20_000}
    for wrong in ("0", "x", "code=0", "code=", "=5", "a=1,a=2", "a=1,"):
        with pytest.raises(ArgumentTypeError):
            budgets(wrong)


def test_an_empty_corpus_is_not_measured(kimi: Run, tmp_path: Path) -> None:
    (tmp_path / "no.txt").touch()
    args = ["--hf-path", TINY_K3, "--corpus", tmp_path / "no.txt", "--out", tmp_path / "s"]
    refused = kimi("calibrate", *args)
    assert refused.code == 2
    assert "the corpus has no tokens" in refused.err
    assert [path.name for path in tmp_path.iterdir()] == ["no.txt"]


def test_a_build_that_is_not_there_is_not_told_of_options_it_lacks(kimi: Run) -> None:
    refused = kimi("probe", "--model", "nope", "--text", "none.txt")
    assert refused.code == 2
    assert "nope is not a build" in refused.err
    assert "--tokenizer" not in refused.err
