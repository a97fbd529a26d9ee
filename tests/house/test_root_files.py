"""Root files work under the three names that mlx-lm gives them."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

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


def test_mlx_vlms_classes_come_from_the_package_beside_the_file(tmp_path: Path) -> None:
    """A build's copy finds the build's package, not the installed one, and no other name."""
    before = set(sys.modules)
    shutil.copy(ROOT / "kimi_k3.py", tmp_path)
    package = tmp_path / "kimi_k3_vl"
    package.mkdir()
    (package / "__init__.py").write_text("from .config import ModelConfig\n")
    (package / "config.py").write_text("ModelConfig = 'of the build'\n")
    module = run_as("custom_model", tmp_path / "kimi_k3.py")
    assert module.ModelConfig == "of the build"
    with pytest.raises(AttributeError, match="has no attribute 'VisionModel'"):
        _ = module.VisionModel
    assert not hasattr(module, "AudioConfig")
    assert not {"kimi_k3_vl", "kimi_k3_vl.config"} & (set(sys.modules) - before)


def test_a_config_with_vision_asks_the_package_for_its_model(tmp_path: Path) -> None:
    shutil.copy(ROOT / "kimi_k3.py", tmp_path)
    (tmp_path / "kimi_k3_vl").mkdir()
    (tmp_path / "kimi_k3_vl" / "__init__.py").write_text("Model = lambda config: (config,)\n")
    module = run_as("custom_model", tmp_path / "kimi_k3.py")
    config = SimpleNamespace(vision_config={})
    assert module.Model(config) == (config,)


def test_mlx_vlm_is_imported_only_when_it_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text needs mlx-lm alone; without mlx-vlm, its names fail with its own ImportError."""
    for name in ["mlx_vlm", *(name for name in sys.modules if name.startswith("mlx_vlm."))]:
        monkeypatch.setitem(sys.modules, name, None)
    module = run_as("custom_model", ROOT / "kimi_k3.py")
    assert module.TextArgs
    with pytest.raises(ImportError, match="mlx_vlm"):
        _ = module.TextConfig


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
