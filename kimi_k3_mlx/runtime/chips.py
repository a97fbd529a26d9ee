"""Apple's chips: how fast their memory is, and how much there can be. Sources: docs/mac.md.

Input: a name. Output: `Chip`. A chip whose numbers could not be confirmed is left out.
"""

from __future__ import annotations

from typing import NamedTuple


class Chip(NamedTuple):
    """Memory of a chip, in its largest variant: a Max with fewer GPU cores may be slower."""

    name: str
    bandwidth: float
    """Bytes a second, as Apple states it."""
    ram_gib: int
    """Most memory that a Mac with it has."""


def _chip(name: str, gigabytes: float, ram_gib: int) -> Chip:
    return Chip(name, gigabytes * 1e9, ram_gib)


CHIPS = (
    _chip("M1", 68.25, 16),
    _chip("M1 Pro", 200, 32),
    _chip("M1 Max", 400, 64),
    _chip("M1 Ultra", 800, 128),
    _chip("M2", 100, 24),
    _chip("M2 Pro", 200, 32),
    _chip("M2 Max", 400, 96),
    _chip("M2 Ultra", 800, 192),
    _chip("M3", 100, 24),
    _chip("M3 Pro", 150, 36),
    _chip("M3 Max", 400, 128),
    _chip("M3 Ultra", 819, 512),
    _chip("M4", 120, 32),
    _chip("M4 Pro", 273, 64),
    _chip("M4 Max", 546, 128),
    _chip("M5", 153, 32),
    _chip("M5 Pro", 307, 64),
    _chip("M5 Max", 614, 128),
)


def find_chip(name: str) -> Chip | None:
    """A chip by its name, with or without `Apple` before it."""
    wanted = " ".join(name.split()).lower().removeprefix("apple ")
    return next((chip for chip in CHIPS if chip.name.lower() == wanted), None)
