"""The journal survives a torn last line and nothing worse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kimi_k3_mlx.errors import CheckpointError
from kimi_k3_mlx.schema import ShardRecord
from kimi_k3_mlx.tensors.journal import JOURNAL, read_journal, start_journal

ONE, TWO = ShardRecord("one", 1, "aa", 0), ShardRecord("two", 2, "bb", 3)


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    journal = start_journal(tmp_path, {"plan_sha256": "p"})
    journal.record(ONE)
    journal.record(TWO)
    return tmp_path


def test_records_are_read_back(journal: Path) -> None:
    read = read_journal(journal)
    assert read is not None
    assert (read.identity, read.records) == ({"plan_sha256": "p"}, {"one": ONE, "two": TWO})


def test_no_journal(tmp_path: Path) -> None:
    assert read_journal(tmp_path) is None


def test_a_record_can_be_taken_back(journal: Path) -> None:
    read = read_journal(journal)
    assert read is not None
    read.forget("one")
    again = read_journal(journal)
    assert again is not None
    assert again.records == read.records == {"two": TWO}


def test_a_line_torn_anywhere_is_dropped_and_written_over(journal: Path) -> None:
    content = (journal / JOURNAL).read_bytes()
    begin = content.rindex(b"\n", 0, -1) + 1
    for end in range(begin, len(content)):
        (journal / JOURNAL).write_bytes(content[:end])
        read = read_journal(journal)
        assert read is not None
        assert read.records == {"one": ONE}
        read.record(TWO)
        assert (journal / JOURNAL).read_bytes() == content


def test_reading_changes_nothing(journal: Path) -> None:
    torn = (journal / JOURNAL).read_bytes()[:-3]
    (journal / JOURNAL).write_bytes(torn)
    read_journal(journal)
    assert (journal / JOURNAL).read_bytes() == torn


WRONG = [
    {"n_bytes": "a"}, {"n_bytes": -5}, {"n_bytes": 1.5}, {"losses": [1]}, {"losses": {"x": [1]}},
    {"nan_scales": "x"}, {"name": 5}, {"sha256": None},
]  # fmt: skip


@pytest.mark.parametrize("change", WRONG, ids=str)
@pytest.mark.parametrize("partial", [True, False])
def test_records_of_the_wrong_type_are_damage(
    journal: Path, change: dict[str, object], partial: bool
) -> None:
    """They ended as a damaged manifest, or as an unexpected error once the build was written."""
    record = TWO.to_json() | change
    line = json.dumps({"partial": record} if partial else record).encode()
    lines = (journal / JOURNAL).read_bytes().splitlines(keepends=True)
    (journal / JOURNAL).write_bytes(b"".join([lines[0], line + b"\n", lines[2]]))
    with pytest.raises(CheckpointError, match=r"damaged in line 2"):
        read_journal(journal)


@pytest.mark.parametrize("line", [b"nonsense", b"[]", b"{}", b"\xff"])
def test_damage_before_the_end_is_named(journal: Path, line: bytes) -> None:
    lines = (journal / JOURNAL).read_bytes().splitlines(keepends=True)
    (journal / JOURNAL).write_bytes(b"".join([lines[0], line + b"\n", lines[2]]))
    with pytest.raises(CheckpointError, match=r"damaged in line 2"):
        read_journal(journal)


def test_an_empty_journal_is_damaged(tmp_path: Path) -> None:
    (tmp_path / JOURNAL).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"damaged in line 1"):
        read_journal(tmp_path)
