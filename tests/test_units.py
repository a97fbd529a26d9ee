"""Bytes, rates and durations as text."""

from __future__ import annotations

import pytest

from kimi_k3_mlx.units import format_bytes, format_duration, format_rate


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (1_189_080, "1.19 MB"),
        (9_996_000, "10.0 MB"),
        (99_960_000, "100 MB"),
        (999_600_000, "1.00 GB"),
        (451_000_000_000, "451 GB"),
        (999_600_000_000, "1.000 TB"),
        (1_560_860_324_864, "1.561 TB"),
    ],
)
def test_format_bytes(n_bytes: int, text: str) -> None:
    assert format_bytes(n_bytes) == text


def test_other_formats() -> None:
    assert format_rate(1.9e9) == "1.90 GB/s"
    assert format_duration(604.6) == "0:10:05"
    assert format_duration(90061) == "25:01:01"
