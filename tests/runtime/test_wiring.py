"""The switch against wiring: mlx-lm's own code wires, or leaves the limit alone."""

from __future__ import annotations

import platform
from importlib import import_module
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from kimi_k3_mlx.runtime.wiring import weights_are_wired, wiring


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The limits that MLX is told, on a machine that recommends 1,000 bytes."""
    told: list[int] = []
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 1000})
    monkeypatch.setattr(mx, "set_wired_limit", lambda n_bytes: told.append(n_bytes) or 0)
    return told


def generate() -> None:
    """What mlx-lm does around a generation."""
    module: Any = import_module("mlx_lm.generate")
    with module.wired_limit(nn.Linear(2, 2)):
        pass


def test_on_by_default_as_mlx_lm_does(limits: list[int]) -> None:
    with wiring(True):
        generate()
    assert limits == [1000, 0]


def test_off_is_off_and_only_inside(limits: list[int]) -> None:
    with wiring(False):
        generate()
    assert limits == []
    with pytest.raises(KeyError), wiring(False):
        raise KeyError
    generate()
    assert limits == [1000, 0]


def test_the_server_wires_by_itself(limits: list[int]) -> None:
    server: Any = import_module("mlx_lm.server")
    with wiring(False):
        server.maybe_set_recommended_wired_limit()
    assert limits == [1000]
    with wiring(False, "mlx_lm.server"):
        server.maybe_set_recommended_wired_limit()
    assert limits == [1000]


@pytest.mark.parametrize(
    ("macos", "limit", "wired"),
    [("15.0", 16, True), ("26.1", 16, True), ("15.0", 15, False), ("14.7", 16, False)],
)
def test_wired_needs_room_and_macos_15(
    macos: str, limit: int, wired: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": limit})
    monkeypatch.setattr(platform, "mac_ver", lambda: (macos, ("", "", ""), "arm64"))
    assert weights_are_wired(nn.Linear(2, 2, bias=False)) is wired
    with wiring(False):
        assert not weights_are_wired(nn.Linear(2, 2, bias=False))


def test_a_cpu_wires_nothing() -> None:
    if mx.metal.is_available():
        pytest.skip("this machine has a GPU")
    assert not weights_are_wired(nn.Linear(2, 2, bias=False))
