"""`kimi-k3 demo`: verbs in a row, each shown; stops where something fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run, program


def test_shows_and_runs_the_four_steps(kimi: Run, tiny_source: Path, tmp_path: Path) -> None:
    args = ("demo", "--hf-path", tiny_source, "--out", tmp_path, "-m", 5)
    result = kimi(*args)
    assert result.code == 0
    shown = [line.split()[2] for line in result.err.splitlines() if line.startswith("$ kimi-k3 ")]
    assert shown == ["inspect", "convert", "verify", "generate"]
    assert "agrees with" in result.out
    assert (tmp_path / "build" / "config.json").is_file()
    repeated = kimi(*args)
    assert repeated.code == 0
    assert f"--mlx-path {tmp_path / 'build'} --overwrite -y\n" in repeated.err
    assert "vision tower  " in repeated.err


def test_without_a_folder_nothing_stays(
    kimi: Run, tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert kimi("demo", "--hf-path", tiny_source, "-m", 2).code == 0
    assert list(tmp_path.iterdir()) == []


def test_a_failing_step_ends_it(kimi: Run, tiny_source: Path, tmp_path: Path) -> None:
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "thesis.txt").write_text("years of work")
    result = kimi("demo", "--hf-path", tiny_source, "--out", tmp_path)
    assert result.code == 2
    assert "[3/4]" not in result.err
    assert (tmp_path / "build" / "thesis.txt").read_text() == "years of work"


@pytest.mark.slow
def test_the_bundled_model_writes_text_whole_and_pruned(tmp_path: Path) -> None:
    """What it has learnt is for the model's own tests; here it has to come out as text."""
    result = program("demo", "--out", tmp_path)
    assert result.code == 0, result.err
    assert "agrees with" in result.out
    assert "it writes what looks like Python, not what runs.\n$ kimi-k3 generate" in result.err
    whole, pruned = result.out.split("as the manifest says")[1:]
    text = whole.partition("\n")[2].partition("plan     ")[0]
    assert len(text.split()) > 10
    assert "reserved_token" not in text
    assert "def " in text
    assert "self." in text
    assert "reap = Σc/n" in whole
    assert len(pruned.split()) > 10
    assert result.out.endswith("red circle.\n")
    config = json.loads((tmp_path / "pruned" / "config.json").read_text())
    assert config["text_config"]["num_experts"] == 32


def test_a_package_without_the_model_says_so(kimi: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.resources.files", lambda package: Path("/nowhere"))
    assert kimi("demo") == (
        1,
        "",
        "kimi-k3: error: the tiny model is missing: /nowhere/assets/tiny-k3.\n"
        "hint: give another source: --hf-path DIR\n",
    )
