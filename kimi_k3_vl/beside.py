"""Finds the root files `kimi_k3.py` and `kimi_k3_vision.py` beside this package.

Installed, all have their plain names. A copy in a build runs under another name, and then loads the
build's files under names of its own, because what is installed may be another version.
"""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load(file: str) -> ModuleType:
    if __package__ == "kimi_k3_vl":
        return importlib.import_module(file)
    name, path = f"{__package__}.{file}", Path(__file__).parents[1] / f"{file}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


kimi_k3 = load("kimi_k3")
kimi_k3_vision = load("kimi_k3_vision")
