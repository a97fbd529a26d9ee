"""A run that is killed anywhere and run again ends with the arrays of one that was not."""

from __future__ import annotations

import multiprocessing
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from kimi_k3_mlx.errors import CheckpointError, UsageError
from kimi_k3_mlx.stream import journal
from kimi_k3_mlx.stream.budget import make_batches
from kimi_k3_mlx.stream.engine import Lane, run_stream
from kimi_k3_mlx.stream.journal import FolderTotals, locked, merge, opened
from kimi_k3_mlx.stream.layers import Layers, open_layers
from kimi_k3_mlx.tensors.journal import JOURNAL, read_journal
from kimi_k3_mlx.tensors.local import open_source
from tests.stream import killed
from tests.stream.conftest import CHOOSE, PLENTY, with_blocks
from tests.stream.recorder import Adder

Outcome = tuple[int, int, str]

# Forked by a server that has imported everything but used no MLX, whose threads don't survive it.
PROCESSES = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")


def run(build: Path, folder: Path, die_at: int, mode: str) -> Outcome | None:
    """What a process sent: calls, arrays, hash. None: it was killed."""
    PROCESSES.set_forkserver_preload([killed.__name__])
    outcome, sender = PROCESSES.Pipe(duplex=False)
    arguments = (build, folder, die_at, mode, sender)
    process = PROCESSES.Process(target=killed.main, args=arguments)
    process.start()
    sender.close()
    process.join()
    if process.exitcode == -signal.SIGKILL:
        return None
    assert process.exitcode == 0
    return outcome.recv()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["held", "spill", "blocks"])
def test_killed_and_run_again_is_the_same(mode: str, build: Path, tmp_path: Path) -> None:
    """Killed twice in a row, at moments spread over the whole run."""
    whole = run(build, tmp_path / "whole", 0, mode)
    assert whole is not None
    calls, arrays, digest = whole
    assert arrays == 4 * 2 * 3 + 2
    assert calls > 20
    for first in range(7, calls, calls // 3):
        folder = tmp_path / f"killed-{first}"
        assert run(build, folder, first, mode) is None
        run(build, folder, 4, mode)
        again = run(build, folder, 0, mode)
        assert again is not None
        assert again[1:] == (arrays, digest), first
        assert again[0] < calls
        assert sorted(p.name for p in folder.iterdir()) == sorted(
            p.name for p in (tmp_path / "whole").iterdir()
        )


class Stopped(Exception):
    """A crash without a process."""


class Mortal(Adder):
    """Fails at the n-th call of `state`, and counts what it was shown."""

    def __init__(self, stop_at: int = 0) -> None:
        super().__init__(8)
        self.n_calls, self.stop_at, self.shown = 0, stop_at, 0

    def moe(self, *arguments) -> None:
        self.shown += 1
        super().moe(*arguments)

    def state(self):
        self.n_calls += 1
        if self.n_calls == self.stop_at:
            raise Stopped
        return super().state()


def stream(layers: Layers, folder: Path | None, stop_at: int = 0, n_groups: int = 2, **options):
    choose = with_blocks(0)
    budget = choose(layers, make_batches(killed.sequences(), killed.MICRO), 2)
    memory = budget.fixed + budget.per_token * 2 * killed.MICRO if n_groups == 2 else PLENTY
    observer = Mortal(stop_at)
    options = {"lanes": killed.LANES, "sequences": killed.sequences()} | options
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CHOOSE, choose)
        run_stream(
            layers, options.pop("sequences"), options.pop("lanes"), observer,
            memory=memory, folder=folder, micro_tokens=killed.MICRO, **options,
        )  # fmt: skip
    return observer


@pytest.fixture
def layers(build: Path) -> Layers:
    return open_layers(open_source(build))


def equal(a: Adder, b: Adder) -> bool:
    return a.sums.keys() == b.sums.keys() and all(
        np.array_equal(a.sums[key], b.sums[key]) for key in a.sums
    )


@pytest.mark.parametrize("spill", [False, True])
def test_an_exception_and_again_is_the_same(spill: bool, layers: Layers, tmp_path: Path) -> None:
    n_groups = 1 if spill else 2
    expected = stream(layers, None, n_groups=n_groups)
    assert expected.n_calls == n_groups * 6
    for stop_at in range(1, expected.n_calls + 1, 1 if spill else 3):
        folder = tmp_path / str(stop_at)
        with pytest.raises(Stopped):
            stream(layers, folder, stop_at, spill=spill)
        again = stream(layers, folder, spill=spill)
        assert equal(again, expected), stop_at
        assert again.n_calls == n_groups * 6 - stop_at + 1
        assert again.shown <= expected.shown


def test_a_finished_run_gives_its_sums_without_reading_a_layer(
    layers: Layers, tmp_path: Path
) -> None:
    first = stream(layers, tmp_path / "run")
    layers.tensors[0].clear()
    again = stream(layers, tmp_path / "run", spill=False)
    assert equal(first, again)
    assert again.shown == 0
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "kimi_k3_mlx.journal.jsonl", "totals-2.safetensors",
    ]  # fmt: skip


def test_activations_are_kept_where_a_block_starts(
    layers: Layers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most attn_res_block_size layers are computed twice."""
    with pytest.raises(Stopped):
        stream(layers, tmp_path / "run", 4)
    assert [p.name for p in tmp_path.glob("run/kept*")] == ["kept-0-2.safetensors"]
    seen: list[str] = []
    stream(layers, tmp_path / "run", progress=lambda done, total, what: seen.append(what))
    assert seen[0] == "group 1/2, layer 3/5"
    assert len(seen) == 3 + 5


@pytest.mark.parametrize(
    ("field", "said", "options"),
    [
        ("fingerprint", "corpus", {"fingerprint": "other"}),
        ("sequences", "corpus", {"sequences": [np.array([1, 2])]}),
        ("lanes", "set of plans", {"lanes": [Lane("parent")]}),
        ("groups", "grouping of the text", {"n_groups": 1}),
    ],
)
def test_another_run_in_the_folder_is_refused(
    field: str, said: str, options, layers: Layers, tmp_path: Path
) -> None:
    """`groups` stands for other memory."""
    stream(layers, tmp_path / "run")
    identity = read_journal(tmp_path / "run").identity
    with pytest.raises(UsageError, match="another"):
        stream(layers, tmp_path / "run", **options)
    (tmp_path / "run" / JOURNAL).unlink()
    stream(layers, tmp_path / "run", **options)
    other = read_journal(tmp_path / "run").identity
    assert identity[field] != other[field]
    with pytest.raises(UsageError, match=f"another {said}"):
        opened(tmp_path / "run", other | {field: identity[field]})


def test_another_checkpoint_is_refused(
    layers: Layers, tiny_text_source: Path, tmp_path: Path
) -> None:
    stream(layers, tmp_path / "run")
    with pytest.raises(UsageError, match="another checkpoint"):
        stream(open_layers(open_source(tiny_text_source)), tmp_path / "run")


@pytest.mark.parametrize("damage", ["flip", "remove"])
def test_damaged_files_are_noticed(damage: str, layers: Layers, tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        stream(layers, tmp_path / "run", 4)
    for kind in ("kept", "delta-0-1"):
        path = next(tmp_path.glob(f"run/{kind}*"))
        content = path.read_bytes()
        path.unlink()
        if damage == "flip":
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(CheckpointError, match=path.name):
            stream(layers, tmp_path / "run")
        path.write_bytes(content)
    assert equal(stream(layers, tmp_path / "run"), stream(layers, None))


def test_every_dtype_comes_back(tmp_path: Path) -> None:
    arrays = {name: np.arange(6).reshape(2, 3).astype(name) for name in journal.NAMES}
    arrays |= {"scalar": np.array(2.5), "empty": np.zeros((0, 3))}
    FolderTotals(tmp_path, {"a": 1}).add(0, 0, arrays)
    found = FolderTotals(tmp_path, {"a": 1}).arrays
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        assert np.array_equal(found[name], array), name
        assert found[name].shape == array.shape
    with pytest.raises(UsageError, match="complex"):
        FolderTotals(tmp_path, {"a": 1}).add(0, 1, {"x": np.zeros(2, np.complex64)})


def test_merge_adds_and_takes_maxima() -> None:
    totals: journal.Arrays = {}
    for values in ([1, 5], [3, 2]):
        merge(totals, {"n": np.array(values), "max_n": np.array(values)})
    assert totals["n"].tolist() == [4, 7]
    assert totals["max_n"].tolist() == [3, 5]


def test_others_files_in_the_folder_stay(layers: Layers, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for name in ("model.safetensors", "notes.txt", "delta-9-9.safetensors.partial"):
        (tmp_path / "run" / name).write_text("mine")
    stream(layers, tmp_path / "run")
    assert (tmp_path / "run" / "model.safetensors").read_text() == "mine"
    assert (tmp_path / "run" / "notes.txt").exists()
    assert not (tmp_path / "run" / "delta-9-9.safetensors.partial").exists()


def test_two_runs_at_once_in_a_folder_are_refused(layers: Layers, tmp_path: Path) -> None:
    with locked(tmp_path / "run"), pytest.raises(UsageError, match="another process"):
        stream(layers, tmp_path / "run")
    stream(layers, tmp_path / "run")
