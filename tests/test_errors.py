"""The exit code of each kind of error, and the version that two files state."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import kimi_k3_mlx
from kimi_k3_mlx import errors

CODES = {
    "KimiError": 1,
    "CheckpointError": 1,
    "UsageError": 2,
    "MismatchError": 3,
    "DoesNotFitError": 4,
    "HubError": 5,
    "InterruptedBuildError": 130,
}


@pytest.mark.parametrize(("name", "code"), CODES.items())
def test_exit_codes(name: str, code: int) -> None:
    error = getattr(errors, name)("a fact.", "a command")
    assert (error.exit_code, error.message, error.hint) == (code, "a fact.", "a command")
    assert str(error) == "a fact."


def test_the_version_is_that_of_the_distribution() -> None:
    pyproject = Path(__file__).parents[1] / "pyproject.toml"
    stated = tomllib.loads(pyproject.read_text("utf-8"))["project"]["version"]
    assert kimi_k3_mlx.__version__ == stated
