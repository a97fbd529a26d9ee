"""The folder of a report is replaced as a whole, and nothing that is not a report's goes."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from kimi_k3_mlx.errors import UsageError
from kimi_k3_mlx.reap.report_files import check_folder, write_folder


def test_only_an_earlier_report_is_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    check_folder(out)
    out.mkdir()
    check_folder(out)
    said = {"kind": "kimi_k3_mlx.report", "files": ["report.json", "old.svg"]}
    files = {"report.json": json.dumps(said).encode(), "old.svg": b"old"}
    write_folder(out, files)
    check_folder(out)
    new = {"report.json": json.dumps(said | {"files": ["report.json"]}).encode()}
    write_folder(out, new)
    assert [path.name for path in out.iterdir()] == ["report.json"]
    write_folder(out, files)
    (out / "thesis.tex").touch()
    with pytest.raises(UsageError, match=r"holds thesis\.tex, which is not of an earlier report"):
        check_folder(out)
    (out / "thesis.tex").unlink()
    for foreign in (b"{}", b"[", b"[]", b'{"kind": "another", "files": ["report.json"]}'):
        (out / "report.json").write_bytes(foreign)
        with pytest.raises(UsageError, match="which is not of an earlier report"):
            check_folder(out)


def test_a_folder_that_is_called_partial_stays(tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "mine.txt").write_text("mine")
    write_folder(tmp_path / "out", {"report.md": b"new"})
    assert (tmp_path / "out.partial" / "mine.txt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.partial"]


def test_what_came_into_the_folder_while_it_was_drawn_stays(tmp_path: Path) -> None:
    out = tmp_path / "out"
    check_folder(out)
    out.mkdir()
    (out / "mine.txt").touch()
    with pytest.raises(UsageError, match=r"holds mine\.txt"):
        write_folder(out, {"report.md": b"new"})
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine.txt"]


def test_a_link_and_nameless_folders_are_refused_before_drawing(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "there")
    for out in (tmp_path / "link", Path("."), Path("..")):
        with pytest.raises(UsageError, match="can't be replaced as a whole"):
            check_folder(out)


def test_a_full_disk_names_the_file_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left") as caught:
        write_folder(tmp_path / "out", {"report.md": b"new"})
    assert caught.value.filename == str(tmp_path / "out" / "report.md")
    assert list(tmp_path.iterdir()) == []
