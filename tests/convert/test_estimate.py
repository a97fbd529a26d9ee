"""Estimates add up and refuse with the exact sentence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kimi_k3_mlx.convert import estimate as estimate_module
from kimi_k3_mlx.convert.estimate import Estimate, check_fits, estimate, mount_point
from kimi_k3_mlx.convert.run import run
from kimi_k3_mlx.errors import DoesNotFitError, InterruptedBuildError
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


def interrupted(planned: Planned, out: Path) -> Path:
    """A build that was killed in its third shard."""
    plan, source = planned

    def stop(done: int, total: int, what: str) -> None:
        if done > plan.shards[0].n_bytes + plan.shards[1].n_bytes + 50000:
            torn.append((out / f"{plan.shards[2].name}.partial").read_bytes())
            raise KeyboardInterrupt

    torn: list[bytes] = []
    with pytest.raises(InterruptedBuildError):
        run(plan, source, out, stop)
    # A kill would have left the partial file.
    (out / f"{plan.shards[2].name}.partial").write_bytes(torn[0])
    return out


def test_finished_shards_and_a_torn_one_are_credited(tiny_plan: Planned, tmp_path: Path) -> None:
    plan, _ = tiny_plan
    out = interrupted(tiny_plan, tmp_path / "out")
    first, second, third = plan.shards[:3]
    partial = out / f"{third.name}.partial"
    sizes = estimate(plan, out)
    assert sizes.n_done == first.n_bytes + second.n_bytes
    assert sizes.n_freed == partial.stat().st_size > 0
    # Killed between journal and renaming: the shard is finished all the same.
    (out / second.name).rename(out / f"{second.name}.partial")
    assert replace(estimate(plan, out), n_free=sizes.n_free) == sizes
    whole = estimate(plan, out, overwrite=True)
    assert whole.n_done == 0
    assert whole.n_freed == sum(path.stat().st_size for path in out.iterdir())


def test_a_killed_run_resumes_on_a_disk_with_just_enough_room(
    tiny_plan: Planned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, source = tiny_plan
    out = interrupted(tiny_plan, tmp_path / "out")
    sizes = estimate(plan, out)
    free = sizes.n_write - sizes.n_freed
    for room in (free - 1, free):
        usage = type("Usage", (), {"free": room})
        monkeypatch.setattr(estimate_module.shutil, "disk_usage", lambda path, usage=usage: usage)
        if room < free:
            with pytest.raises(DoesNotFitError):
                run(plan, source, out)
        else:
            assert run(plan, source, out).n_reused == 2


def test_a_finished_build_needs_nothing(tiny_plan: Planned, tiny_build: Path) -> None:
    sizes = estimate(tiny_plan[0], tiny_build)
    assert (sizes.n_write, sizes.n_freed) == (0, 0)


def test_what_is_finished_needs_no_room() -> None:
    check_fits(replace(SIZES, n_done=139 * 10**9))
    assert replace(SIZES, n_done=139 * 10**9).to_json()["n_write"] == 312 * 10**9
