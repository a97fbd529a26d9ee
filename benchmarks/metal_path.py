"""Send models down their Metal code path on a machine that has no Metal.

`metal_path` makes MLX say that it runs on a GPU and takes a stand-in for `mx.fast.metal_kernel`;
`fresh_import` executes a module file again while that holds, because model files may build their
kernels at import. Everything is put back at the end of the block. No model is changed.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import mlx.core as mx
from mlx_lm.models import gated_delta

PRIVATE_SUFFIX = "_on_metal_path"


@contextmanager
def metal_path(metal_kernel: Callable[..., Any]) -> Iterator[None]:
    """MLX says that Metal is there and is the default device; kernels come from `metal_kernel`.

    Inside, `mlx_lm.models.gated_delta` is a fresh copy whose kernels exist.
    """
    with (
        mock.patch.object(mx.metal, "is_available", return_value=True),
        mock.patch.object(mx, "default_device", return_value=mx.gpu),
        mock.patch.object(mx.fast, "metal_kernel", metal_kernel),
        replaced(fresh_import(gated_delta), gated_delta),
    ):
        yield


@contextmanager
def replaced(new: ModuleType, old: ModuleType) -> Iterator[None]:
    """`import` finds `new` under the name of `old`."""
    package, _, name = old.__name__.rpartition(".")
    with (
        module_entry(old.__name__, new),
        mock.patch.object(sys.modules[package], name, new),
    ):
        yield


@contextmanager
def module_entry(name: str, module: ModuleType) -> Iterator[None]:
    """One entry of `sys.modules`; unlike `mock.patch.dict`, it forgets no other import."""
    old = sys.modules.get(name)
    sys.modules[name] = module
    try:
        yield
    finally:
        del sys.modules[name]
        if old is not None:
            sys.modules[name] = old


def fresh_import(module: ModuleType) -> ModuleType:
    """The module's file executed once more, under a private name in the same package."""
    if not module.__file__:
        raise ValueError(f"module {module.__name__} has no file")
    return import_file(Path(module.__file__), module.__name__ + PRIVATE_SUFFIX)


def import_file(path: Path, name: str) -> ModuleType:
    """Execute a Python file as a module that stays out of `sys.modules`."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up while it executes.
    with module_entry(name, module):
        spec.loader.exec_module(module)
    return module


def compile_is_enabled() -> bool:
    """Whether `mx.compile` traces: MLX can be told, but not asked."""
    calls = []

    def probe(x: mx.array) -> mx.array:
        calls.append(x)
        return x + 1

    compiled = mx.compile(probe)
    for _ in range(3):
        compiled(mx.ones(2))
    return len(calls) < 3


@contextmanager
def compile_mode(*, enabled: bool) -> Iterator[None]:
    """`mx.compile` on or off inside the block, and as before after it."""
    before = compile_is_enabled()
    set_compile(enabled)
    try:
        yield
    finally:
        set_compile(before)


def set_compile(enabled: bool) -> None:
    """MLX has two functions for it."""
    if enabled:
        mx.enable_compile()
    else:
        mx.disable_compile()
