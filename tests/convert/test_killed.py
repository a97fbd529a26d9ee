"""kill −9 at any moment, then the same call: the tree is that of an uninterrupted run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_k3 import TinyConfig, write_source

Kill = dict[str, Any]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the program `tests.convert.killed` saw."""
    scratch = tmp_path_factory.mktemp("killed")
    source = write_source(scratch / "source", TinyConfig(layers=3, experts=4, vision=False))
    other = write_source(scratch / "other", TinyConfig(layers=4, experts=4, vision=False))
    (other / "THIRD_PARTY_NOTICES.md").write_text("only the old build has this")
    paths = map(str, (source, other, scratch))
    command = [sys.executable, "-m", "tests.convert.killed", *paths]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)
    assert done.returncode == 0, done.stderr
    value: dict[str, Any] = json.loads(done.stdout)
    return value


@pytest.fixture
def kills(outcome: dict[str, Any]) -> dict[str, Kill]:
    found: dict[str, Kill] = outcome["kills"]
    return found


def test_it_was_killed_at_every_kind_of_moment(kills: dict[str, Kill]) -> None:
    assert all(kill["killed"] for kill in kills.values())
    moments = [moment.split()[1] for moment in kills]
    assert {"pwrite", "fsync", "replace", "unlink"} <= set(moments)
    assert moments.count("replace") >= 10
    assert moments.count("pwrite") >= 1


def test_every_run_ends_as_if_nothing_had_happened(outcome: dict[str, Any]) -> None:
    for moment, kill in outcome["kills"].items():
        assert kill["tree"] == outcome["whole"], moment


def test_finished_shards_are_never_written_again(kills: dict[str, Kill]) -> None:
    assert {moment: kill["rewritten"] for moment, kill in kills.items() if kill["rewritten"]} == {}
    assert max(len(kill["finished"]) for kill in kills.values()) == 4


def test_a_quantized_build_ends_as_if_nothing_had_happened(outcome: dict[str, Any]) -> None:
    kills = outcome["quantized"]["kills"]
    assert len(kills) >= 5
    for moment, kill in kills.items():
        assert kill["killed"], moment
        assert kill["tree"] == outcome["quantized"]["whole"], moment


def test_what_loads_is_finished(kills: dict[str, Kill]) -> None:
    """config.json is there only when nothing else will change any more."""
    assert {m: k["changed_though_loadable"] for m, k in kills.items() if k["loads"]}
    for moment, kill in kills.items():
        assert kill["changed_though_loadable"] == [], moment


def test_overwriting_can_be_repeated_after_any_moment(outcome: dict[str, Any]) -> None:
    """The old build goes whole, the new one comes whole, and what is the user's stays."""
    kills: dict[str, Kill] = outcome["overwritten"]
    assert all(kill["killed"] for kill in kills.values())
    assert [moment.split()[1] for moment in kills].count("unlink") >= 8
    for moment, kill in kills.items():
        mine = {name for name in kill["tree"] if name not in outcome["whole"]}
        assert mine == {"tokenizer_notes.md", "tokenizer_old/tokenizer.json"}, moment
        assert outcome["whole"].items() <= kill["tree"].items(), moment
