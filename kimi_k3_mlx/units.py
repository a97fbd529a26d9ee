"""Bytes, rates and durations as text, and text as bytes.

Disk and tensor sizes are decimal (1 GB = 10^9 bytes), memory is binary (GiB), as macOS shows them.
"""

from __future__ import annotations

import re

from kimi_k3_mlx.errors import UsageError

DECIMAL = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
BINARY = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_FACTORS = {unit.lower(): n for unit, n in (DECIMAL | BINARY | {"K": 10**3}).items()} | {
    letter: DECIMAL[f"{letter.upper()}B"] for letter in "mgt"
}


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


def format_gib(n_bytes: float) -> str:
    """Binary text for memory: `512 GiB`, `0.4 GiB`."""
    value = n_bytes / BINARY["GiB"]
    return f"{value:.0f} GiB" if value >= 99.5 else f"{value:.1f} GiB"


def format_rate(bytes_per_second: float) -> str:
    """A throughput: `1.90 GB/s`."""
    return f"{format_bytes(bytes_per_second)}/s"


def format_duration(seconds: float) -> str:
    """Hours, minutes and seconds: `0:10:05`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}"


def parse_bytes(text: str) -> int:
    """Read `450GB`, `1.5 TB`, `512GiB` or `1048576` as bytes; raise UsageError on anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    factor = _FACTORS.get((match[2] or "B").lower()) if match else None
    if match is None or factor is None:
        raise UsageError(f"size {text!r} is not a number with a unit.", "write it like 450GB.")
    return round(float(match[1]) * factor)
