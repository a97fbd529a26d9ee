"""Corpus specs, and reading what they name: every malformed thing is refused by file and line."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_k3_mlx.chat import Piece, render
from kimi_k3_mlx.errors import HubError, UsageError
from kimi_k3_mlx.reap.corpus_files import (
    Origin,
    Raw,
    Spec,
    parse_specs,
    read_spec,
    split_text,
)
from kimi_k3_mlx.reap.pictures import Album

NO_PICTURES = Album(None, 512)
HI = [{"role": "user", "content": "hi"}]


def read(path: Path, tag: str = "", n_chars: int = 1000) -> Origin:
    """The documents of a file."""
    (spec,) = parse_specs(f"{path}={tag}" if tag else str(path))
    return read_spec(spec, n_chars, thinking=True, album=NO_PICTURES)


def texts(origin: Origin) -> list[str]:
    return ["".join(piece.text for piece in raw.pieces) for raw in origin.documents]


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("a.txt", Spec("a.txt", "txt", "a.txt")),
        ("d/a.b.txt=zh", Spec("d/a.b.txt=zh", "txt", "d/a.b.txt", tag="zh")),
        ("my file [1].jsonl", Spec("my file [1].jsonl", "jsonl", "my file [1].jsonl")),
        ("x=1.txt=t", Spec("x=1.txt=t", "txt", "x=1.txt", tag="t")),
        ("o/c4[zh](test):20", Spec("o/c4[zh](test):20", "dataset", "o/c4", "zh", "test", 20)),
        ("c4:7=web", Spec("c4:7=web", "dataset", "c4", rows=7, tag="web")),
        ("c4(train[:10%]):7", Spec("c4(train[:10%]):7", "dataset", "c4", None, "train[:10%]", 7)),
    ],
)
def test_specs(text: str, spec: Spec) -> None:
    assert parse_specs(text) == (spec,)
    assert parse_specs(f" {text} , b.txt") == (spec, Spec("b.txt", "txt", "b.txt"))


def test_sources_of_specs() -> None:
    specs = parse_specs("d/a.b.txt, d/a.txt=zh, o/c4:1, o/c4[zh]:1, o/c4[zh]:1=web")
    assert [spec.source for spec in specs] == ["a.b", "zh", "o/c4", "o/c4[zh]", "web"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "corpus 1 (character 1) is ''"),
        ("a.txt,", "corpus 2 (character 7) is ''"),
        ("a.txt,  c4", "corpus 2 (character 9) is 'c4'"),
        ("c4:0", "corpus 1 (character 1) is 'c4:0'"),
        ("c4:-1", "is 'c4:-1'"),
        ("c4[]:1", "is 'c4[]:1'"),
        ("c4[zh:1", "is 'c4[zh:1'"),
        ("c4(train)[zh]:1", "is 'c4(train)[zh]:1'"),
        ("a.txt=", "is 'a.txt='"),
        (".txt", "is '.txt'"),
        ("a.csv", "is 'a.csv': neither a file nor rows of a data set"),
    ],
)
def test_what_is_no_spec(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=re.escape(says)) as caught:
        parse_specs(text)
    assert "name[subset](split):rows" in caught.value.hint


def test_a_text_file_is_a_document(tmp_path: Path) -> None:
    data = "﻿One\r\n\r\ntwo <|sep|>\x0c\n".encode()
    (tmp_path / "a.txt").write_bytes(data)
    origin = read(tmp_path / "a.txt", "t")
    assert origin.documents == (Raw("t", "a.txt#1", (Piece("One\r\n\r\ntwo <|sep|>\x0c\n"),)),)
    assert origin.record["sha256"] == hashlib.sha256(data).hexdigest()
    assert origin.record["n_bytes"] == len(data)
    json.dumps(origin.record)


def test_files_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shell leaves the `~` of a quoted list alone."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_text("x")
    assert texts(read(Path("~/a.txt"))) == ["x"]


def test_lines_with_a_form_feed_separate_documents(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\f\ntwo\nx\fy\n\f\n\f\nthree")
    origin = read(tmp_path / "a.txt")
    assert texts(origin) == ["one\n", "two\nx\fy\n", "three"]
    assert [raw.id for raw in origin.documents] == ["a.txt#1", "a.txt#2", "a.txt#3"]


def test_long_texts_are_cut_at_blank_lines() -> None:
    text = "aaa\nbbb\n\n    ccc\n \t\nddd\n\n\neee"
    assert split_text(text, 1000) == [text]
    assert split_text(text, 20) == ["aaa\nbbb\n\n    ccc\n \t\n"[:20], "ddd\n\n\neee"]
    assert split_text(text, 1) == ["aaa\nbbb\n\n", "    ccc\n \t\n", "ddd\n\n", "\neee"]
    assert split_text("", 10) == []


@given(st.text(st.sampled_from("ab \t\r\n\n\n")), st.integers(1, 12))
def test_splitting_loses_nothing(text: str, n_chars: int) -> None:
    blocks = split_text(text, n_chars)
    assert "".join(blocks) == text
    assert all(blocks)
    for block in blocks:
        assert len(block) <= n_chars or len(re.findall(r"\n[ \t\r]*\n", block[:-1])) <= 1


def test_documents_of_jsonl(tmp_path: Path) -> None:
    lines = [
        '{"text": "a\u2028b", "source": "web", "id": 7}',
        "",
        json.dumps({"messages": HI, "id": "chat"}),
        '{"tokens": [1, 2], "text": null}\r',
        '{"text": ""}',
    ]
    (tmp_path / "c.jsonl").write_text("\n".join(lines), "utf-8")
    untagged, tagged = read(tmp_path / "c.jsonl"), read(tmp_path / "c.jsonl", "t")
    assert untagged.documents == (
        Raw("web", "7", (Piece("a\u2028b"),)),
        Raw("c", "chat", render(HI), is_chat=True),
        Raw("c", "c.jsonl:4", tokens=(1, 2)),
        Raw("c", "c.jsonl:5", (Piece(""),)),
    )
    assert {raw.source for raw in tagged.documents} == {"t"}


def test_tools_and_thinking_reach_the_renderer(tmp_path: Path) -> None:
    asked = [*HI, {"role": "assistant", "reasoning_content": "hm", "content": "yes"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": asked, "tools": tools}))
    (spec,) = parse_specs(str(tmp_path / "c.jsonl"))
    for thinking in (True, False):
        (raw,) = read_spec(spec, 1, thinking=thinking, album=NO_PICTURES).documents
        assert raw.pieces == render(asked, tools=tools, thinking=thinking)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "is not JSON: Expecting property name enclosed in double quotes: column 2"),
        ('{"text": "a"} x', "is not JSON: Extra data: column 15"),
        ("[" * 100_000, "is not JSON"),
        ("9" * 5000, "is not JSON"),
        ("[1]", "is a list, not an object"),
        ('"text"', "is a str, not an object"),
        ("{}", "has none of text, messages and tokens (its fields: none)"),
        (
            '{"content": "x", "n": 1}',
            "has none of text, messages and tokens (its fields: content, n)",
        ),
        ('{"text": "x", "tokens": [1]}', "has text and tokens"),
        ('{"text": 3}', "`text` is a int"),
        ('{"tokens": "abc"}', "`tokens` is a str, not a list"),
        ('{"tokens": [1, "2"]}', "`tokens` has '2', which is no token id"),
        ('{"tokens": [true]}', "`tokens` has True"),
        ('{"tokens": [1.0]}', "`tokens` has 1.0"),
        ('{"tokens": [-1]}', "`tokens` has -1"),
        ('{"messages": {}}', "`messages` is a dict, not a list"),
        ('{"messages": [{"role": "bot"}]}', "a message has the role 'bot'"),
        ('{"messages": [], "tools": "f"}', "`tools` is no list of objects"),
        ('{"text": "x", "source": ["a"]}', "`source` is a list, not text"),
        ('{"text": "x", "id": true}', "`id` is a bool, not text"),
        ('{"text": "\\ud800"}', "has half a surrogate pair"),
    ],
)
def test_malformed_lines_are_named(line: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('{"text": "fine"}\n\n' + line + "\n")
    with pytest.raises(UsageError) as caught:
        read(path)
    assert caught.value.message.startswith(f"{path}:3")
    assert says in caught.value.message


@pytest.mark.parametrize("name", ["c.jsonl", "c.txt"])
def test_text_that_is_not_utf8(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes('{"text": "a"}\n{"text": "é"}'.encode("latin-1"))
    with pytest.raises(UsageError, match=rf"{name}:2 is not UTF-8: byte 0xe9") as caught:
        read(tmp_path / name)
    assert "iconv" in caught.value.hint


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.txt can't be read: No such file"):
        read(tmp_path / "none.txt")
    (tmp_path / "d.txt").mkdir()
    with pytest.raises(UsageError, match=r"d\.txt can't be read: Is a directory"):
        read(tmp_path / "d.txt")


@pytest.mark.parametrize("name", ["c.jsonl", "c.txt"])
@pytest.mark.parametrize("data", [b"", b"\xef\xbb\xbf"])
def test_empty_files_have_no_documents(name: str, data: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    assert read(tmp_path / name).documents == ()


class FakeDatasets(SimpleNamespace):
    """Stands for the package `datasets`."""

    class DatasetsError(Exception):
        """As in `datasets.exceptions`."""

    exceptions = SimpleNamespace(DatasetsError=DatasetsError)

    def load_dataset(self, *args: Any, **options: Any) -> Iterator[dict[str, Any]]:
        self.asked = (args, options)
        if isinstance(self.rows, Exception):
            raise self.rows
        return iter(self.rows)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDatasets:
    """A `datasets` with rows to set, and a Hub that knows one revision of everything."""
    module = FakeDatasets(rows=[{"text": f"t{i}", "source": f"http://{i}"} for i in range(9)])
    monkeypatch.setitem(sys.modules, "datasets", module)
    info = SimpleNamespace(sha="c0ffee")
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda self, name: info)
    return module


def read_rows(text: str) -> Origin:
    (spec,) = parse_specs(text)
    return read_spec(spec, 1000, thinking=True, album=NO_PICTURES)


def test_rows_of_a_dataset(fake: FakeDatasets) -> None:
    origin = read_rows("o/c4[zh](test):3")
    assert texts(origin) == ["t0", "t1", "t2"]
    assert [raw.id for raw in origin.documents] == ["o/c4:0", "o/c4:1", "o/c4:2"]
    assert {raw.source for raw in origin.documents} == {"o/c4[zh]"}
    options = {"split": "test", "revision": "c0ffee", "streaming": True}
    assert fake.asked == (("o/c4", "zh"), options)
    assert (origin.record["revision"], origin.record["n_rows"]) == ("c0ffee", 3)


def test_a_dataset_with_chats_and_a_tag(fake: FakeDatasets) -> None:
    fake.rows = [{"messages": HI, "id": 5, "text": None, "source": {"url": "x"}}]
    origin = read_rows("c4:4=chat")
    assert origin.documents == (Raw("chat", "5", render(HI), is_chat=True),)
    assert (origin.record["rows"], origin.record["n_rows"]) == (4, 1)


def test_a_folder_has_no_revision(fake: FakeDatasets, tmp_path: Path) -> None:
    assert read_rows(f"{tmp_path}:1").record["revision"] is None
    assert fake.asked[1]["revision"] is None


def test_a_row_without_text_is_named(fake: FakeDatasets) -> None:
    fake.rows = [{"text": "x"}, {"question": "x"}]
    with pytest.raises(UsageError, match=r"c4:2, row 1 has none of .*its fields: question"):
        read_rows("c4:2")


@pytest.mark.parametrize(
    "error", [ValueError("Unknown split\n 'x'."), OSError("gone"), FakeDatasets.DatasetsError("no")]
)
def test_a_dataset_that_fails(fake: FakeDatasets, error: Exception) -> None:
    fake.rows = error
    said = " ".join(str(error).split()).rstrip(".")
    with pytest.raises(HubError, match=re.escape(f"'c4(x):2' can't be read: {said}.")):
        read_rows("c4(x):2")


def test_a_dataset_that_the_hub_does_not_know(
    fake: FakeDatasets, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: object, name: str) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", fail)
    with pytest.raises(HubError, match="the data set c4: the connection failed: no route"):
        read_rows("c4:1")


def test_datasets_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match="'c4:1' needs the package datasets") as caught:
        read_rows("c4:1")
    assert caught.value.hint == 'pip install "kimi-k3-mlx[calibrate]"'
