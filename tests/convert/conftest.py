"""A source to damage, its plan, and a finished build."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kimi_k3_mlx.convert.plan import plan_build
from kimi_k3_mlx.convert.profiles import load_profile
from kimi_k3_mlx.convert.run import run
from kimi_k3_mlx.schema import BuildPlan
from kimi_k3_mlx.tensors.local import open_source
from kimi_k3_mlx.tensors.source import Source

Planned = tuple[BuildPlan, Source]


def planned(path: Path) -> Planned:
    """Open a source and plan its mxfp4 build."""
    source = open_source(path)
    return plan_build(source, load_profile("mxfp4")), source


@pytest.fixture
def copied(tiny_source: Path, tmp_path: Path) -> Path:
    """A copy of the tiny source, to damage."""
    return Path(shutil.copytree(tiny_source, tmp_path / "source"))


@pytest.fixture(scope="session")
def tiny_plan(tiny_source: Path) -> Planned:
    """The tiny source's plan, and the source."""
    return planned(tiny_source)


@pytest.fixture(scope="session")
def tiny_build(tiny_plan: Planned, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished build of the tiny source. Read only."""
    out = tmp_path_factory.mktemp("build") / "out"
    run(*tiny_plan, out)
    return out


@pytest.fixture
def build(tiny_build: Path, tmp_path: Path) -> Path:
    """A copy of the finished build, to damage."""
    return Path(shutil.copytree(tiny_build, tmp_path / "build"))


@pytest.fixture
def convert(tmp_path: Path) -> Callable[[Path], Path]:
    """Convert a source into a new folder."""

    def convert_into(path: Path) -> Path:
        out = tmp_path / "converted"
        run(*planned(path), out)
        return out

    return convert_into
