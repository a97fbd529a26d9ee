"""Bytes, rates and durations as text. Sizes are decimal: 1 GB = 10^9 bytes."""

from __future__ import annotations

DECIMAL = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def format_bytes(n_bytes: float) -> str:
    """Decimal text with three significant digits, four from a terabyte on: `451 GB`, `1.561 TB`."""
    if n_bytes < 1000:
        return f"{n_bytes:.0f} B"
    for unit in ("kB", "MB", "GB"):
        value = n_bytes / DECIMAL[unit]
        for decimals, bound in ((2, 9.995), (1, 99.95), (0, 999.5)):
            if value < bound:
                return f"{value:.{decimals}f} {unit}"
    return f"{n_bytes / DECIMAL['TB']:.3f} TB"


def format_rate(bytes_per_second: float) -> str:
    """A throughput: `1.90 GB/s`."""
    return f"{format_bytes(bytes_per_second)}/s"


def format_duration(seconds: float) -> str:
    """Hours, minutes and seconds: `0:10:05`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}"
