"""Finds the text model: the file `kimi_k3.py` beside this package.

Installed, both have their plain names. A copy in a build runs under another name, and then loads
the build's file under a name of its own, because what is installed may be another version.
"""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load_text_model() -> ModuleType:
    if __package__ == "kimi_k3_vl":
        return importlib.import_module("kimi_k3")
    name, path = f"{__package__}.kimi_k3", Path(__file__).parents[1] / "kimi_k3.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


kimi_k3 = load_text_model()
