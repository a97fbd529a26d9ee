"""Root files work under the three names that mlx-lm gives them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.house.checks import ROOT

ROOT_FILES = sorted(path.name for path in ROOT.glob("kimi_k3*.py"))


def run_as(name: str, path: Path) -> ModuleType:
    """Execute a file as mlx-lm executes a build's `model_file`: never put into sys.modules."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["custom_model", "mlx_lm.models.kimi_k3"])
@pytest.mark.parametrize("file", ROOT_FILES)
def test_root_file_runs_outside_sys_modules(file: str, name: str) -> None:
    before = sys.modules.get(name)
    module = run_as(name, ROOT / file)
    assert sys.modules.get(name) is before
    assert module.__doc__


def test_the_text_model_exports_what_mlx_lm_asks_for() -> None:
    module = run_as("custom_model", ROOT / "kimi_k3.py")
    assert module.Model.__module__ == "custom_model"
    assert hasattr(module.ModelArgs, "from_dict")
    assert {"sanitize", "make_cache", "layers"} <= set(dir(module.Model))


BAD_FILES = {
    "deferred annotations beside a dataclass": (
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "@dataclass\nclass ModelArgs:\n    hidden: int = 1\n"
    ),
    "a relative import": "from .cache import KVCache\n",
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_the_check_can_fail(case: str, tmp_path: Path) -> None:
    """Both are reported as crashes of real model files; neither shows when imported normally."""
    path = tmp_path / "kimi_k3.py"
    path.write_text(BAD_FILES[case])
    with pytest.raises((AttributeError, ImportError)):
        run_as("custom_model", path)
