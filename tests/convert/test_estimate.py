"""Estimates add up and refuse with the exact sentence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kimi_k3_mlx.convert.estimate import Estimate, check_fits, estimate, mount_point
from kimi_k3_mlx.errors import DoesNotFitError
from tests.convert.conftest import Planned

SIZES = Estimate("/Volumes/m2", 451 * 10**9, 0, 486 * 10**9, 312 * 10**9, 10**8)


def test_an_estimate_adds_up(tiny_plan: Planned, tiny_build: Path, tmp_path: Path) -> None:
    plan, source = tiny_plan
    sizes = estimate(plan, tmp_path / "not" / "there" / "yet")
    shards = [tiny_build / shard.name for shard in plan.shards]
    assert sizes.n_build == sizes.n_write == sum(path.stat().st_size for path in shards)
    assert sizes.n_read == source.total_size
    assert Path(sizes.volume) == mount_point(tmp_path)
    assert sizes.fits
    assert list(tmp_path.iterdir()) == []


def test_too_small_a_disk_is_refused() -> None:
    with pytest.raises(DoesNotFitError) as error:
        check_fits(SIZES)
    assert error.value.message == "needs 451 GB on /Volumes/m2, 312 GB free."
    assert error.value.hint == (
        "point --mlx-path at another disk, or prune harder with --target-size; "
        "--force tries anyway."
    )
    assert error.value.exit_code == 4


def test_what_is_finished_needs_no_room() -> None:
    check_fits(replace(SIZES, n_done=139 * 10**9))
    assert replace(SIZES, n_done=139 * 10**9).to_json()["n_write"] == 312 * 10**9
