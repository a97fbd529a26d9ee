"""Snapshots: the longest prefix comes back, gives the logits of a cold run, and stays in bounds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import trim_prompt_cache

from kimi_k3_mlx.errors import KimiError
from kimi_k3_mlx.runtime.cache import rewindable
from kimi_k3_mlx.runtime.load import load
from kimi_k3_mlx.runtime.snapshots import Bounds, Snapshots, fingerprint

PLENTY = Bounds(1 << 30)
TEXT = [7, 3, 11, 5, 2, 13, 8, 8, 1, 30, 4, 9]


@pytest.fixture(scope="module")
def model(tiny_float_source: Path) -> Any:
    return load(tiny_float_source).model


def caches_after(model: Any, tokens: list[int], caches: list[Any] | None = None) -> list[Any]:
    caches = model.make_cache() if caches is None else caches
    mx.eval(model(mx.array([tokens]), caches), [c.state for c in caches])
    return caches


def check_answer(model: Any, caches: list[Any] | None, n: int, tokens: list[int]) -> None:
    """What is left of the tokens gives the logits of a cold run."""
    caches = model.make_cache() if caches is None else caches
    warm, cold = (model(mx.array([x]), c) for x, c in ((tokens[n:], caches), (tokens, None)))
    assert mx.abs(warm[:, -1] - cold[:, -1]).max() <= 1e-5 * mx.abs(cold[:, -1]).max()


@pytest.mark.parametrize("where", ["ram", "disk"])
def test_c20(where: str, model: Any, tmp_path: Path) -> None:
    """A cache after 1…6, and everything one can ask of it."""
    places = {"ram": (PLENTY,), "disk": (Bounds(0), tmp_path, PLENTY)}[where]
    kept = Snapshots(model, "model", *places)
    kept.put([1, 2, 3, 4, 5, 6], caches_after(model, [1, 2, 3, 4, 5, 6]))
    asked = {(1, 2, 3, 4, 5, 6, 7, 8): 6, (1, 2, 3, 4, 5, 6): 0, (1, 2, 3, 4): 0}
    for tokens, reused in (asked | {(1, 2, 3, 9, 9, 9, 9): 0}).items():
        for _ in range(2):  # the copy that the first one used is not the snapshot
            caches, n = kept.nearest(tokens)
            assert n == reused
            check_answer(model, caches, n, list(tokens))


def test_the_longest_prefix_wins(model: Any, tmp_path: Path) -> None:
    kept = Snapshots(model, "model", PLENTY, tmp_path, PLENTY)
    for n in (4, 9, 6):
        kept.put(TEXT[:n], caches_after(model, TEXT[:n]))
    assert [kept.nearest(TEXT[:n])[1] for n in (12, 9, 7, 5, 4, 1)] == [9, 6, 6, 4, 0, 0]
    kept.entries.popitem()
    assert kept.nearest(TEXT[:8])[1] == 6, "from disk now"


def test_snapshots_outlive_the_process(model: Any, tmp_path: Path) -> None:
    Snapshots(model, "model", PLENTY, tmp_path, PLENTY).put(TEXT[:6], caches_after(model, TEXT[:6]))
    kept = Snapshots(model, "model", PLENTY, tmp_path, PLENTY)
    caches, n = kept.nearest(TEXT)
    assert n == 6
    check_answer(model, caches, n, TEXT)
    for path in tmp_path.iterdir():
        path.unlink()
    caches, n = kept.nearest(TEXT)
    assert n == 6, "a file that was read is in RAM too"
    check_answer(model, caches, n, TEXT)
    assert Snapshots(model, "another", PLENTY, tmp_path, PLENTY).nearest(TEXT) == (None, 0)


def test_a_cache_that_went_back_can_be_kept(model: Any) -> None:
    kept = Snapshots(model, "model", PLENTY)
    caches = caches_after(model, TEXT, rewindable(model.make_cache()))
    trim_prompt_cache(caches, 3)
    kept.put(TEXT[:9], caches)
    check_answer(model, *kept.nearest(TEXT), TEXT)


def test_a_wrong_number_of_tokens_is_refused(model: Any) -> None:
    kept = Snapshots(model, "model", PLENTY)
    with pytest.raises(KimiError, match="the caches hold 6 tokens, not 5"):
        kept.put(TEXT[:5], caches_after(model, TEXT[:6]))


def test_a_folder_needs_bounds(model: Any, tmp_path: Path) -> None:
    with pytest.raises(KimiError, match="come together"):
        Snapshots(model, "model", PLENTY, tmp_path)


# Bounds.

SIZE = 4


def filled(model: Any, ram: Bounds, folder: Path | None = None, disk: Any = None) -> Snapshots:
    """Snapshots of the first 1, 2, 3 and 4 tokens, the first one used last."""
    kept = Snapshots(model, "model", ram, folder, disk)
    for n in range(1, SIZE + 1):
        kept.put(TEXT[:n], caches_after(model, TEXT[:n]))
        for i, (path, _) in enumerate(kept.files()):
            os.utime(path, (i, i))
        kept.nearest(TEXT[:2])
    return kept


@pytest.fixture(scope="module")
def n_bytes(model: Any) -> int:
    """Of one snapshot: KV caches grow in steps of 256 tokens."""
    return sum(c.nbytes for c in caches_after(model, TEXT[:1]))


@pytest.mark.parametrize("by", ["bytes", "count"])
def test_ram_is_bounded_and_the_unused_goes_first(by: str, model: Any, n_bytes: int) -> None:
    bounds = Bounds(2 * n_bytes + 100) if by == "bytes" else Bounds(1 << 30, 2)
    kept = filled(model, bounds)
    assert [entry.n_tokens for entry in kept.entries.values()] == [SIZE, 1]
    assert kept.n_bytes <= bounds.n_bytes


@pytest.mark.parametrize("by", ["bytes", "count"])
def test_disk_is_bounded(by: str, model: Any, n_bytes: int, tmp_path: Path) -> None:
    bounds = Bounds(int(2.5 * n_bytes)) if by == "bytes" else Bounds(1 << 30, 2)
    kept = filled(model, Bounds(0), tmp_path, bounds)
    assert sorted(int(name["n_tokens"]) for _, name in kept.files()) == [1, SIZE]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= bounds.n_bytes


def test_what_is_too_large_is_not_kept(model: Any, n_bytes: int, tmp_path: Path) -> None:
    kept = filled(model, Bounds(n_bytes - 1), tmp_path, Bounds(n_bytes - 1))
    assert (len(kept.entries), list(tmp_path.iterdir())) == (0, [])


# Files.


@pytest.mark.parametrize("damage", ["cut off", "noise", "another text", "fewer layers", "empty"])
def test_a_bad_file_is_removed_with_a_note(damage: str, model: Any, tmp_path: Path) -> None:
    notes: list[str] = []
    first = Snapshots(model, "model", PLENTY, tmp_path, PLENTY)
    first.put(TEXT[:3], caches_after(model, TEXT[:3]))
    first.put(TEXT[:6], caches_after(model, TEXT[:6]))
    (bad,) = (path for path, name in first.files() if name["n_tokens"] == "6")
    (good,) = (path for path, name in first.files() if name["n_tokens"] == "3")
    content = bad.read_bytes()
    if damage == "cut off":
        bad.write_bytes(content[: len(content) // 2])
    elif damage == "noise":
        bad.write_bytes(os.urandom(500))
    elif damage == "empty":
        bad.write_bytes(b"")
    elif damage == "another text":
        bad.write_bytes(good.read_bytes())
    else:
        arrays, metadata = mx.load(str(bad), return_metadata=True)
        gone = [name for name in metadata if name.startswith("1.4")]
        assert gone
        for name in gone:
            del metadata[name]
        mx.save_safetensors(str(bad), arrays, metadata)
    kept = Snapshots(model, "model", PLENTY, tmp_path, PLENTY, notes.append)
    caches, n = kept.nearest(TEXT)
    assert n == 3
    check_answer(model, caches, n, TEXT)
    assert not bad.exists()
    assert len(notes) == 1
    assert f"{bad} is no snapshot and was removed" in notes[0]


def test_other_files_are_left_alone(model: Any, tmp_path: Path) -> None:
    for name in ("k3-notes.txt", "model.safetensors", "k3-4-abc.safetensors"):
        (tmp_path / name).write_text("mine")
    (tmp_path / ".k3-partial-x.safetensors").write_text("left by a crash")
    filled(model, Bounds(0), tmp_path, Bounds(1 << 30, 1))
    names = {path.name for path in tmp_path.iterdir()}
    assert {"k3-notes.txt", "model.safetensors", "k3-4-abc.safetensors"} < names
    assert len(names) == 4


def test_a_disk_that_fails_costs_a_note(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    notes: list[str] = []
    kept = Snapshots(model, "model", PLENTY, tmp_path, PLENTY, notes.append)
    monkeypatch.setattr("kimi_k3_mlx.runtime.snapshots.os.replace", full)
    kept.put(TEXT[:3], caches_after(model, TEXT[:3]))
    assert list(tmp_path.iterdir()) == []
    assert "was not written: [Errno 28] No space left on device" in notes[0]
    assert kept.nearest(TEXT)[1] == 3


def test_a_build_that_changes_has_another_fingerprint(tmp_path: Path) -> None:
    for name in ("config.json", "model-00001-of-000001.safetensors"):
        (tmp_path / name).write_text("x")
    first = fingerprint(tmp_path)
    assert fingerprint(tmp_path) == first
    (tmp_path / "README.md").write_text("y")
    assert fingerprint(tmp_path) == first
    assert fingerprint(tmp_path, 8) != first
    (tmp_path / "config.json").write_text("longer")
    assert fingerprint(tmp_path) != first


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=5), st.data())
def test_nearest_is_the_longest_proper_prefix(texts: list[list[int]], data: Any) -> None:
    class Nothing:
        layers = ()

    kept = Snapshots(Nothing(), "model", PLENTY)
    for text in texts:
        kept.put(text, [])
    asked = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=8))
    lengths = [len(t) for t in texts if len(t) < len(asked) and asked[: len(t)] == t]
    assert kept.nearest(np.array(asked))[1] == max(lengths, default=0)
