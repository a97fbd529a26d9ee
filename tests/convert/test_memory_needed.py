"""What a running build needs, on the real K3's sizes: facts of mlx-lm and of published builds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from converters.config import read_dims
from kimi_k3_mlx.convert.memory import MACS, MIB, Running, running

CONFIG = json.loads((Path(__file__).parents[1] / "golden/k3_config.json").read_text("utf-8"))
DIMS = read_dims(CONFIG)


def test_cache_and_state_are_those_of_k3() -> None:
    """24 MLA layers: 27,648 bytes a token; 69 KDA layers: 434 MB of state and 15 MB of inputs."""
    one, two = running(DIMS, 0, 1), running(DIMS, 0, 2)
    assert two.n_cache - one.n_cache == 27_648
    assert one.n_state == 69 * 96 * 128 * 128 * 4 + 69 * 3 * 12288 * 3 * 2
    assert running(DIMS, 0, 32_768).n_cache == 905_969_664


@pytest.mark.parametrize(
    ("gigabytes", "ram", "verdict"),
    [
        (350, 512, "yes"),
        (451, 512, "raise"),
        (504, 512, "tight"),
        (560, 512, "no"),
        (350, 256, "no"),
        (200, 256, "raise"),
        (160, 256, "yes"),
    ],
)
def test_published_builds_on_macs(gigabytes: int, ram: int, verdict: str) -> None:
    """mlx-lm#1047: 350 GB fits by default, 451 after a sysctl, 504 can't meet the 0.9 rule."""
    assert running(DIMS, gigabytes * 10**9, 8192).on(ram).verdict == verdict


def test_the_limit_silences_mlx_lms_warning_and_leaves_the_system_its_share() -> None:
    fit = running(DIMS, 451 * 10**9, 8192).on(512)
    assert fit.wired_limit_mb == 477_897
    assert 0.9 * fit.wired_limit_mb * MIB >= 451 * 10**9
    for ram in MACS:
        other = running(DIMS, 451 * 10**9, 8192).on(ram)
        assert other.wired_limit_mb <= (ram - 16) * 1024


def test_long_contexts_count() -> None:
    """At a million tokens the cache alone takes 29 GB."""
    short, long = (running(DIMS, 480 * 10**9, context) for context in (8192, 1 << 20))
    assert long.n_bytes - short.n_bytes == ((1 << 20) - 8192) * 27_648
    assert [short.on(512).verdict, running(DIMS, 510 * 10**9, 1 << 20).on(512).verdict] == [
        "tight",
        "no",
    ]


def test_as_json_it_has_every_mac() -> None:
    value = Running(10, 100, 20, 30, 40).to_json()
    assert value["n_bytes"] == 190
    assert [mac["ram_gib"] for mac in value["macs"]] == list(MACS)
    assert {mac["verdict"] for mac in value["macs"]} == {"yes"}
