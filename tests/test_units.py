"""Bytes, rates and durations as text and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_k3_mlx.errors import UsageError
from kimi_k3_mlx.units import (
    format_bytes,
    format_duration,
    format_gib,
    format_rate,
    parse_bytes,
)


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


@given(st.integers(1000, 10**15))
def test_text_is_within_half_a_percent(n_bytes: int) -> None:
    assert parse_bytes(format_bytes(n_bytes)) == pytest.approx(n_bytes, rel=5.1e-3)


def test_other_formats() -> None:
    assert format_rate(1.9e9) == "1.90 GB/s"
    assert format_gib(512 << 30) == "512 GiB"
    assert format_gib(23.04 * 2**30) == "23.0 GiB"
    assert format_duration(604.6) == "0:10:05"
    assert format_duration(90061) == "25:01:01"


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [("450GB", 450 * 10**9), (" 1.5 tb ", 15 * 10**11), ("512GiB", 512 << 30), ("7", 7)],
)
def test_parse_bytes(text: str, n_bytes: int) -> None:
    assert parse_bytes(text) == n_bytes


@pytest.mark.parametrize("text", ["", "GB", "4 furlongs", "-1GB", "1e9"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a number with a unit"):
        parse_bytes(text)
