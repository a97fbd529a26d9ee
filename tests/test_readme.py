"""The README's commands run, on the trained tiny K3 in place of the real one."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.checks import ROOT

README = (ROOT / "README.md").read_text("utf-8")
TINY = ROOT / "kimi_k3_mlx" / "assets" / "tiny-k3"
TEXTS = (
    ("calibration", "code", "code"),
    ("calibration", "chinese", "zh"),
    ("held_out", "code", "held-out"),
)
ELSEWHERE = ("make ", "pip ")
"""Tried in a fresh environment, not here: they set one up."""


def commands() -> list[str]:
    """Every line of every shell block."""
    blocks = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line]


def as_modules(command: str) -> list[str]:
    """The command without depending on installed scripts."""
    words = shlex.split(command)
    modules = {"kimi-k3": ["kimi_k3_mlx"], "mlx_lm.generate": ["mlx_lm", "generate"]}
    return [sys.executable, "-m", *modules[words[0]], *words[1:]]


@pytest.mark.slow
def test_commands_run_in_order(tmp_path: Path) -> None:
    (tmp_path / "Kimi-K3").symlink_to(TINY, target_is_directory=True)
    for part, domain, name in TEXTS:
        text = (TINY / part / f"{domain}.txt").read_text("utf-8")
        (tmp_path / f"{name}.txt").write_text(text[:2000], "utf-8")
    here = [command for command in commands() if not command.startswith(ELSEWHERE)]
    assert len(here) == 12
    for command in here:
        argv = [*as_modules(command), *(["-m", "4"] if "generate" in command else [])]
        done = subprocess.run(
            argv,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stderr}"


def test_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_it_says_that_no_mac_has_run_it() -> None:
    assert "**Not yet run on a Mac.**" in README


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 145
