"""Whether weights are wired, so that macOS can't page them out, and the switch against it.

mlx-lm wires while it generates, up to what Metal recommends, and has no option not to. Input: the
switch, or a model. No limit of the system is changed: that is `wired`.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from kimi_k3_mlx.runtime.load import parameters
from kimi_k3_mlx.runtime.machine import numbers

WIRING_MACOS = 15
WIRES = "maybe_set_recommended_wired_limit"
"""mlx-lm's function that sets MLX's limit; where it returns None, mlx-lm leaves the limit alone."""
GENERATE = "mlx_lm.generate"


def leave_alone() -> None:
    """Stands for mlx-lm's function while wiring is off."""


@contextmanager
def wiring(on: bool, *users: str) -> Iterator[None]:
    """Let mlx-lm wire or not, in `mlx_lm.generate` and in the modules of it named in `users`.

    MLX's own limit is 0 unless something sets it, and weights that nothing wires can be paged out.
    Applies to the whole process: begin it before threads that generate, end it after them.
    """
    modules = [] if on else [import_module(name) for name in (GENERATE, *users)]
    originals = [getattr(module, WIRES) for module in modules]
    try:
        for module in modules:
            setattr(module, WIRES, leave_alone)
        yield
    finally:
        for module, original in zip(modules, originals, strict=True):
            setattr(module, WIRES, original)


def weights_are_wired(model: Any) -> bool:
    """Whether mlx-lm wires the whole model on this machine, when it generates now."""
    import mlx.core as mx

    macos = numbers(platform.mac_ver()[0])
    if getattr(import_module(GENERATE), WIRES) is leave_alone:
        return False
    if not mx.metal.is_available() or (0,) < macos < (WIRING_MACOS,):
        return False
    n_bytes = sum(array.nbytes for _, array in parameters(model))
    return bool(n_bytes <= mx.device_info().get("max_recommended_working_set_size", 0))
