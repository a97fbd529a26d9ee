"""tools/venv.sh says what is wrong where it can't make an environment, and keeps one that exists.

That it makes one is tried by every run of `make test` on a new machine.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.house.checks import ROOT

OLD_PYTHON = """#!/bin/sh
case "$1" in --version) echo "Python 3.9.6" ;; *) exit 1 ;; esac
"""
NEW_PYTHON = """#!/bin/sh
echo "$@" >> "$LOG"
"""
UV = """#!/bin/sh
echo "uv $@" >> "$LOG"
"""


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A PATH on which nothing is but what a test puts there."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("head", "sh"):
        (folder / name).symlink_to(str(shutil.which(name)))
    return folder


def set_up(tools: Path, *arguments: str) -> tuple[int, str, list[str]]:
    """Run the script; return its exit code, what it said, and what it called."""
    log = tools.parent / "log"
    done = subprocess.run(
        ["/bin/sh", str(ROOT / "tools" / "venv.sh"), str(tools.parent / "venv"), *arguments],
        env={"PATH": str(tools), "LOG": str(log)},
        cwd=tools.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    calls = log.read_text().splitlines() if log.exists() else []
    return done.returncode, done.stderr, calls


@pytest.mark.parametrize("named", [(), ("python3",)])
def test_an_old_python_is_named_with_its_version(named: tuple[str, ...], tools: Path) -> None:
    executable(tools / "python3", OLD_PYTHON)
    code, said, _ = set_up(tools, *named)
    assert code == 1
    assert "kimi-k3: error: needs Python 3.11 or newer; python3 is Python 3.9.6.\n" in said
    assert "hint: install a newer Python and run make PYTHON=python3.12 ..., or install uv" in said


def test_no_python_at_all(tools: Path) -> None:
    code, said, _ = set_up(tools)
    assert code == 1
    assert "needs Python 3.11 or newer; python3 is" in said


def test_a_newer_python_beside_an_old_one_is_found(tools: Path) -> None:
    executable(tools / "python3", OLD_PYTHON)
    executable(tools / "python3.12", NEW_PYTHON)
    _, _, calls = set_up(tools)
    assert f"-m venv {tools.parent / 'venv'}" in calls


def test_an_environment_with_an_old_python_is_refused(tools: Path) -> None:
    executable(tools.parent / "venv" / "bin" / "python", OLD_PYTHON)
    code, said, _ = set_up(tools)
    assert code == 1
    assert "venv holds a Python older than 3.11." in said


def test_an_environment_that_exists_is_kept(tools: Path) -> None:
    executable(tools.parent / "venv" / "bin" / "python", NEW_PYTHON)
    code, _, calls = set_up(tools)
    assert code == 0
    assert calls[-1] == "-m pip install -qq --disable-pip-version-check --editable .[dev]"
    assert not any("-m venv" in call for call in calls)


def test_uv_is_used_where_it_is_installed(tools: Path) -> None:
    executable(tools / "uv", UV)
    executable(tools.parent / "venv" / "bin" / "python", NEW_PYTHON)
    code, _, calls = set_up(tools)
    assert code == 0
    assert calls[-1].startswith("uv pip install --quiet --python ")
