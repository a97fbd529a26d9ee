"""Shared fixtures, and the two settings that make MLX on a Linux CPU fit for tests.

Both must come before the first `import mlx.core` of the process.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.tiny_k3 import TinyConfig, write_source


def preload_openblas() -> bool:
    """Put OpenBLAS before MLX's netlib in the symbol scope: f32 matmul is 30-60 times faster."""
    if sys.platform != "linux":
        return False
    # Two OpenBLAS threads spin and collapse as soon as anything else runs on the machine.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        ctypes.CDLL("libopenblas.so.0", mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return False
    return True


# Fused kernels cost 2 s of g++ each on a CPU and gain nothing in tests.
os.environ.setdefault("MLX_DISABLE_COMPILE", "1")
HAVE_OPENBLAS = preload_openblas()

# How long an example takes says more about the machine than about the code.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")


@pytest.fixture
def mlx_compile() -> Iterator[None]:
    """Let `mx.compile` fuse for one test whose subject is compilation."""
    import mlx.core as mx

    mx.enable_compile()
    yield
    if os.environ.get("MLX_DISABLE_COMPILE"):
        mx.disable_compile()


@pytest.fixture(scope="session")
def tiny_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default tiny source checkpoint. Read only: copy it to damage it."""
    return write_source(tmp_path_factory.mktemp("tiny") / "source")


@pytest.fixture(scope="session")
def tiny_float_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source that is F32 throughout, where two right implementations agree on greedy tokens."""
    path = tmp_path_factory.mktemp("tiny_float") / "source"
    return write_source(path, TinyConfig(vision=False, trunk_dtype="F32"))


@pytest.fixture(scope="session")
def tiny_text_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without vision tower and projector. Read only."""
    path = tmp_path_factory.mktemp("tiny_text") / "source"
    return write_source(path, TinyConfig(vision=False))
