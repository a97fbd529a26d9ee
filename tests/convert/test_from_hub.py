"""Builds from the Hub: the bytes of a local build, only what is kept is fetched, and resumed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kimi_k3_mlx.cli import main
from kimi_k3_mlx.convert import run as run_module
from kimi_k3_mlx.convert.plan import plan_build
from kimi_k3_mlx.convert.profiles import load_profile
from kimi_k3_mlx.convert.run import run
from kimi_k3_mlx.convert.sidecars import read_manifest
from kimi_k3_mlx.convert.verify import verify_build
from kimi_k3_mlx.errors import InterruptedBuildError, UsageError
from kimi_k3_mlx.prune_plan import LayerPlan, PrunePlan
from kimi_k3_mlx.tensors.hub import open_repository
from kimi_k3_mlx.tensors.journal import read_journal
from kimi_k3_mlx.tensors.local import open_source
from tests.convert.damage import tree
from tests.fake_hub import FakeHub, use_hub

pytestmark = pytest.mark.hub
NAME = "moonshotai/Tiny-K3"
PLAN = PrunePlan(8, {n: LayerPlan((1, 4, 6)) for n in range(1, 5)})


@pytest.fixture
def hub(tiny_source: Path, tmp_path: Path) -> Iterator[FakeHub]:
    with FakeHub() as hub, use_hub(hub, tmp_path / "home"):
        hub.add(NAME, tiny_source)
        yield hub


@pytest.mark.parametrize("profile", ["mxfp4", "mxfp4-q8", "moonshot"])
def test_the_build_is_that_of_the_folder(
    profile: str, hub: FakeHub, tiny_source: Path, tmp_path: Path
) -> None:
    for source, name in ((open_source(tiny_source), "local"), (open_repository(NAME), "hub")):
        run(plan_build(source, load_profile(profile), PLAN), source, tmp_path / name)
    local, remote = tree(tmp_path / "local"), tree(tmp_path / "hub")
    manifests = (tree_.pop("kimi_k3_mlx.json") for tree_ in (local, remote))
    assert len(set(manifests)) == 2, "the Hub's says the commit"
    assert local == remote
    verify_build(tmp_path / "hub", open_repository(NAME))


def test_only_what_the_plan_keeps_is_fetched(hub: FakeHub, tmp_path: Path) -> None:
    source = open_repository(NAME)
    already = len(hub.ranges())
    plan = plan_build(source, load_profile("mxfp4"), PLAN)
    run(plan, source, tmp_path / "out")
    fetched = sum(end - begin for begin, end in hub.ranges()[already:])
    a_logs = 4 * 32 * 4  # looked at before anything is written
    assert plan.n_read <= fetched <= plan.n_read + a_logs
    assert fetched < 0.9 * source.total_size


def test_a_dry_run_on_the_command_line_fetches_headers_only(
    hub: FakeHub,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["convert", "--hf-path", NAME, "--dry-run"]) == 0
    shown = capsys.readouterr()
    assert f"source   {NAME}@" in shown.out
    assert "output   Tiny-K3-mlx-mxfp4" in shown.out
    assert sum(end - begin for begin, end in hub.ranges()) < 120_000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home"]


def test_a_killed_download_continues_inside_a_shard(
    hub: FakeHub, tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """huggingface_hub 2.4 begins a broken file anew; a K3 shard has 17 GB."""
    monkeypatch.setattr(run_module, "CHECKPOINT_BYTES", 30_000)
    out = tmp_path / "out"

    def stop(done: int, total: int, what: str) -> None:
        journal = read_journal(out)
        partial = journal.partial if journal else None
        third = partial is not None and partial.name == plan.shards[2].name
        if third and partial.n_bytes > 60_000:
            raise KeyboardInterrupt

    source = open_repository(NAME)
    plan = plan_build(source, load_profile("mxfp4"))
    with pytest.raises(InterruptedBuildError):
        run(plan, source, out, stop)
    journal = read_journal(out)
    assert journal is not None
    assert journal.partial is not None
    already = len(hub.ranges())
    again = open_repository(NAME)
    run(plan_build(again, load_profile("mxfp4")), again, out)
    fetched = sum(end - begin for begin, end in hub.ranges()[already:])
    done = sum(shard.n_bytes - shard.header_n_bytes for shard in plan.shards[:2])
    done += journal.partial.n_bytes - plan.shards[2].header_n_bytes
    assert fetched <= plan.n_read - done + 2 * 5 * 32 * 4
    run(plan, source, tmp_path / "whole")
    assert tree(out) == tree(tmp_path / "whole")


def test_a_commit_that_moved_is_another_source(
    hub: FakeHub, tiny_text_source: Path, tmp_path: Path
) -> None:
    """The branch may move on while a build stands still: it is continued from its commit."""
    source = open_repository(NAME)
    out = tmp_path / "out"

    def stop(done: int, total: int, what: str) -> None:
        if what == "layer 3/5":
            raise KeyboardInterrupt

    with pytest.raises(InterruptedBuildError):
        run(plan_build(source, load_profile("mxfp4")), source, out, stop)
    hub.add(NAME, tiny_text_source)
    moved = open_repository(NAME)
    with pytest.raises(UsageError, match=r"with other options \(source_sha256 "):
        run(plan_build(moved, load_profile("mxfp4")), moved, out)


def test_the_same_command_continues_at_the_commit_it_began_with(
    hub: FakeHub, tiny_source: Path, tmp_path: Path
) -> None:
    """The branch moved by a word in the licence, and 400 GB were refused."""
    out = tmp_path / "out"

    def stop(done: int, total: int, what: str) -> None:
        if what == "layer 3/5":
            raise KeyboardInterrupt

    source = open_repository(NAME)
    with pytest.raises(InterruptedBuildError):
        run(plan_build(source, load_profile("mxfp4")), source, out, stop)
    other = Path(shutil.copytree(tiny_source, tmp_path / "other"))
    (other / "LICENSE").write_text("other words")
    hub.add(NAME, other)
    assert main(["convert", "--hf-path", NAME, "--mlx-path", str(out), "-q"]) == 0
    manifest = read_manifest(out)
    assert manifest is not None
    assert manifest.source.commit == source.commit
    assert (out / "LICENSE").read_bytes() == (tiny_source / "LICENSE").read_bytes()
