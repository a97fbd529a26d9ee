"""Ways to run the command line: inside this process, and as a program of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from kimi_k3_mlx.cli import main
from tests.house.checks import ROOT


class Result(NamedTuple):
    """What a run left behind."""

    code: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture
def kimi(capfd: pytest.CaptureFixture[str]) -> Run:
    """Run `main` in this process."""

    def run(*argv: object) -> Result:
        capfd.readouterr()
        code = main([str(arg) for arg in argv])
        return Result(code, *capfd.readouterr())

    return run


def program(*argv: object, code: str = "", stdin: str = "", **variables: str | None) -> Result:
    """Run `python -m kimi_k3_mlx`; with `code`, run that before `main` in the same process.

    `variables` are added to the environment, those that are None taken out of it.
    """
    environment = {k: v for k, v in (os.environ | variables).items() if v is not None}
    start = ["-m", "kimi_k3_mlx"]
    if code:
        start = ["-c", f"{code}\nimport sys\nfrom kimi_k3_mlx.cli import main\nsys.exit(main())"]
    done = subprocess.run(
        [sys.executable, *start, *map(str, argv)],
        cwd=ROOT,
        env=environment,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return Result(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="session")
def tiny_build(tiny_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished build of the default tiny source. Read only: copy it to damage it."""
    build = tmp_path_factory.mktemp("build") / "tiny-mlx"
    assert main(["convert", "--hf-path", str(tiny_source), "--mlx-path", str(build), "-q"]) == 0
    return build
