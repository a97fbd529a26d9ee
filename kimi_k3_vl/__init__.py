"""Kimi-K3 with pictures: a model for mlx-vlm, over the root files `kimi_k3` and `kimi_k3_vision`.

mlx-vlm reaches it through `kimi_k3.py`, in a build or installed. `processing` (numpy and Pillow)
and `prompt` (mlx) need no mlx-vlm: the classes that do are imported when they are asked for.
"""

import importlib

MODULES = {
    "ModelConfig": "config",
    "TextConfig": "config",
    "VisionConfig": "config",
    "LanguageModel": "language",
    "Model": "model",
}


def __getattr__(name: str):
    if name in MODULES:
        return getattr(importlib.import_module(f".{MODULES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
