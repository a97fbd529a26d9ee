"""Everything in this folder carries the marker `metal` and needs Linux with g++."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests, and skip them with the reason where they cannot run."""
    reason = ""
    if sys.platform != "linux":
        reason = "the Metal emulator runs on Linux"
    elif shutil.which("g++") is None:
        reason = "the Metal emulator needs g++"
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.metal)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
