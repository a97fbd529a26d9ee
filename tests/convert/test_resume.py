"""Inside a shard: what a checkpoint made safe is kept, and no reused buffer is hashed."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kimi_k3_mlx.convert import run as run_module
from kimi_k3_mlx.convert.plan import plan_build
from kimi_k3_mlx.convert.profiles import load_profile
from kimi_k3_mlx.convert.run import run
from kimi_k3_mlx.convert.sidecars import read_manifest
from kimi_k3_mlx.errors import InterruptedBuildError
from kimi_k3_mlx.schema import Span
from kimi_k3_mlx.tensors import local
from kimi_k3_mlx.tensors.journal import read_journal
from kimi_k3_mlx.tensors.local import LocalReader, LocalSource
from kimi_k3_mlx.tensors.writer import partial_path
from tests.convert.conftest import Planned, planned
from tests.convert.damage import LAYER, tree, values_of

SCALES = f"{LAYER}1.block_sparse_moe.experts.0.w1.weight_scale"
Count = Callable[[], int]


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny shard has 150 kB: several checkpoints and many blocks."""
    monkeypatch.setattr(run_module, "CHECKPOINT_BYTES", 30_000)
    monkeypatch.setattr(local, "BUFFER_BYTES", 1000)


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> Count:
    """How many tensor bytes the source was asked for."""
    counted = [0]
    real = LocalReader.blocks

    def blocks(self: LocalReader, spans: Iterable[Span]) -> Iterator[memoryview]:
        for block in real(self, spans):
            counted[0] += len(block)
            yield block

    monkeypatch.setattr(LocalReader, "blocks", blocks)
    return lambda: counted[0]


def interrupt_in(shard: str, out: Path) -> Callable[[int, int, str], None]:
    """A progress that interrupts soon after the second checkpoint of a shard."""

    def progress(done: int, total: int, what: str) -> None:
        journal = read_journal(out)
        partial = journal.partial if journal else None
        if partial is not None and partial.name == shard and partial.n_bytes > 60_000:
            raise KeyboardInterrupt

    return progress


def interrupted(plan_and_source: Planned, out: Path) -> Path:
    """A build that stopped inside its second shard, and that shard."""
    name = plan_and_source[0].shards[1].name
    with pytest.raises(InterruptedBuildError):
        run(*plan_and_source, out, interrupt_in(name, out))
    return out / name


def test_what_a_checkpoint_made_safe_is_not_read_again(
    tiny_plan: Planned, tiny_build: Path, tmp_path: Path, bytes_read: Count
) -> None:
    shard = interrupted(tiny_plan, tmp_path / "out")
    journal = read_journal(tmp_path / "out")
    assert journal is not None
    assert journal.partial is not None
    assert partial_path(shard).stat().st_size >= journal.partial.n_bytes > 60_000
    already = bytes_read()
    run(*tiny_plan, tmp_path / "out")
    assert tree(tmp_path / "out") == tree(tiny_build)
    plan = tiny_plan[0]
    small = 5 * 32 * 4  # A_log is looked at before each run
    first_layer = plan.shards[0].n_bytes - plan.shards[0].header_n_bytes
    kept = journal.partial.n_bytes - plan.shards[1].header_n_bytes
    assert bytes_read() - already < plan.n_read - first_layer - kept + small


@pytest.mark.parametrize("damage", ["shorter", "gone"])
def test_a_partial_file_that_lost_its_bytes_is_begun_anew(
    damage: str, tiny_plan: Planned, tiny_build: Path, tmp_path: Path
) -> None:
    partial = partial_path(interrupted(tiny_plan, tmp_path / "out"))
    partial.write_bytes(partial.read_bytes()[:50_000])
    if damage == "gone":
        partial.unlink()
    run(*tiny_plan, tmp_path / "out")
    assert tree(tmp_path / "out") == tree(tiny_build)


def test_what_was_noticed_before_a_checkpoint_is_not_forgotten(
    copied: Path, tmp_path: Path
) -> None:
    """turboquant-mlx#71: scales of 255 are reported, in a continued run as well."""
    with values_of(copied, SCALES) as scales:
        scales[0, :] = 255
    pair = planned(copied)
    interrupted(pair, tmp_path / "out")
    assert run(*pair, tmp_path / "out").nan_scales == run(*pair, tmp_path / "whole").nan_scales == 2


@pytest.mark.parametrize("profile", ["mxfp4-bf16", "mxfp4-q8"])
def test_what_rounding_cost_is_counted_once(
    profile: str, tiny_source: Path, tmp_path: Path
) -> None:
    """Before a checkpoint or after; a quantized shard is written out of order and begun anew."""
    source = local.open_source(tiny_source)
    plan = plan_build(source, load_profile(profile))
    whole = run(plan, source, tmp_path / "whole")
    with pytest.raises(InterruptedBuildError):
        run(plan, source, tmp_path / "out", interrupt_after(plan.n_bytes // 3))
    assert run(plan, source, tmp_path / "out").changed == whole.changed
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def interrupt_after(n_bytes: int) -> Callable[[int, int, str], None]:
    def progress(done: int, total: int, what: str) -> None:
        if done > n_bytes:
            raise KeyboardInterrupt

    return progress


@pytest.mark.parametrize("profile", ["mxfp4", "mxfp4-q8"])
def test_no_block_is_hashed_after_its_buffer_was_reused(
    profile: str, tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest once had the hash of bytes that were never in the file: a race, made wide."""
    real = hashlib.sha256

    class Slow:
        def __init__(self, data: bytes = b"") -> None:
            self._digest = real(data)

        def update(self, data: Any) -> None:
            time.sleep(0.0005)
            self._digest.update(data)

        def hexdigest(self) -> str:
            return self._digest.hexdigest()

    monkeypatch.setattr("kimi_k3_mlx.tensors.writer.hashlib.sha256", Slow)
    source: LocalSource = local.open_source(tiny_source)
    run(plan_build(source, load_profile(profile)), source, tmp_path / "out")
    monkeypatch.undo()
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    for shard in manifest.shards:
        content = (tmp_path / "out" / shard.name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == shard.sha256, shard.name
