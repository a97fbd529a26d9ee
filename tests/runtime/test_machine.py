"""What is read of a machine, and how a disk is measured."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_k3_mlx.runtime import machine
from kimi_k3_mlx.runtime.machine import (
    BLOCK_BYTES,
    MIB,
    Machine,
    Probes,
    limit_key,
    numbers,
    read_rate,
    spread,
)
from tests.runtime.fake_mac import GIB, FakeMac


def test_a_mac() -> None:
    read = FakeMac(macos="26.1", limit=450_000).machine()
    assert (read.chip, read.ram_gib, read.macos) == ("Apple M3 Ultra", 512, (26, 1))
    assert (read.wired_limit, read.working_set) == (450_000 * MIB, 384 * GIB)
    assert read.limit == 450_000 * MIB
    assert str(read) == "Apple M3 Ultra, 512 GB, macOS 26.1"
    assert not read.translated


def test_macos_13_counts_bytes_under_another_name() -> None:
    read = FakeMac(macos="13.6", limit=400 * GIB).machine()
    assert read.wired_limit == 400 * GIB
    assert limit_key((13, 6)).setting(1024) == f"debug.iogpu.wired_limit={GIB}"
    for version in ((14, 0), (15, 3), (26, 1)):
        assert limit_key(version).setting(1024) == "iogpu.wired_limit_mb=1024"


@pytest.mark.parametrize(
    ("limit", "ceiling", "expected"),
    [(0, 0.81, int(0.81 * 512 * GIB)), (0, None, 384 * GIB), (9000, 0.81, 9000 * MIB)],
)
def test_the_limit_is_what_was_set_or_what_metal_says_or_75_percent(
    limit: int, ceiling: float | None, expected: int
) -> None:
    assert FakeMac(limit=limit, ceiling=ceiling).machine().limit == expected


def test_an_intel_python_on_apple_silicon_is_translated() -> None:
    assert FakeMac(arch="x86_64").machine().translated
    assert not FakeMac(arch="x86_64", chip="Intel(R) Core(TM) i9").machine().translated


def test_the_real_probes_answer_anywhere(tmp_path: Path) -> None:
    read = Machine.read(tmp_path / "not there yet", Probes())
    assert read.ram > GIB
    assert read.disk_free > 0
    assert read.open_files > 0
    assert read.versions["mlx"]
    if sys.platform == "linux":
        assert (read.is_mac, read.wired_limit, read.working_set, read.macos) == (
            False,
            None,
            None,
            (),
        )


def test_without_mlx_there_is_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    assert Probes().device() == {}


def test_a_package_that_is_not_installed_has_no_version() -> None:
    assert Probes().version("no-such-package-at-all") is None


@given(st.lists(st.integers(0, 999), min_size=1, max_size=4), st.sampled_from(("", ".dev3", "rc1")))
def test_versions_compare_as_numbers(parts: list[int], rest: str) -> None:
    assert numbers(".".join(map(str, parts)) + rest) == tuple(parts)


def test_no_version_is_no_numbers() -> None:
    assert numbers("") == numbers("unknown") == ()


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    """Three sparse files of 40 MiB and a bit."""
    paths = [tmp_path / f"{name}.safetensors" for name in "abc"]
    for path in paths:
        path.touch()
        os.truncate(path, 5 * BLOCK_BYTES + 17)
    return paths


def test_a_disk_is_measured(shards: list[Path]) -> None:
    rate = read_rate(shards)
    assert rate is not None
    assert rate > 1e6


def test_too_little_tells_nothing(shards: list[Path]) -> None:
    assert read_rate(shards[:1]) is None
    assert read_rate([]) is None


def test_reading_ends_at_the_deadline(shards: list[Path]) -> None:
    assert read_rate(shards, most_seconds=-1.0) is None


def test_every_byte_is_read_when_allowed(
    shards: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    real = machine.fill
    monkeypatch.setattr(machine, "fill", lambda *a: read.append(real(*a)) or read[-1])
    read_rate(shards)
    assert sum(read) == sum(path.stat().st_size for path in shards)


def test_reading_is_bounded_and_spread_over_all_files(shards: list[Path]) -> None:
    files = [os.open(path, os.O_RDONLY) for path in shards]
    try:
        for most in (BLOCK_BYTES, 3 * BLOCK_BYTES, 7 * BLOCK_BYTES, 100 * BLOCK_BYTES):
            blocks = spread(files, most)
            assert len(blocks) * BLOCK_BYTES <= max(most, BLOCK_BYTES)
            assert len(set(blocks)) == len(blocks)
        assert {file for file, _ in spread(files, 6 * BLOCK_BYTES)} == set(files)
    finally:
        for file in files:
            os.close(file)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="macOS has F_NOCACHE")
def test_pages_are_dropped_before_and_after(
    shards: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *a: log.append(f"advise {a[3]}"))
    real = machine.fill
    monkeypatch.setattr(machine, "fill", lambda *a: log.append("read") or real(*a))
    read_rate(shards)
    dropped = f"advise {os.POSIX_FADV_DONTNEED}"
    assert log[:3] == log[-3:] == [dropped] * 3
    assert "read" in log
