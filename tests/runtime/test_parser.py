"""The parser of K3's output, case by case: nothing that a model writes is an error."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from kimi_k3_mlx.chat.pieces import CLOSE, END, OPEN, SEP
from kimi_k3_mlx.chat.render import render
from kimi_k3_mlx.runtime.events import Answer, Content, ToolCall
from kimi_k3_mlx.runtime.parser import Parser, parse
from tests.runtime.answers import (
    CALLS,
    EXPECTED,
    FULL,
    JSON_BLOCK,
    MARKER_IDS,
    MARKUP,
    START,
    TEXT,
    TOKEN_OF,
    answer_pieces,
    call,
    one_call,
    read_cut,
    read_tokens,
    same_id,
    shown,
    theirs,
    value,
)  # fmt: skip


def test_a_whole_answer() -> None:
    assert shown(parse(TEXT)) == EXPECTED
    assert shown(read_tokens(answer_pieces(FULL))) == EXPECTED
    assert [it.number for it in parse(TEXT).tool_calls] == [0, 1]
    assert len({it.id for it in parse(TEXT).tool_calls}) == 2


@pytest.mark.parametrize("size", range(1, 26))
@pytest.mark.parametrize(
    "missing", ["", f"{CLOSE}think{SEP}", f"{CLOSE}response{SEP}", f"{CLOSE}message{SEP}{END}"]
)
def test_any_size_of_piece(size: int, missing: str) -> None:
    """CASES C16: markers cut anywhere, and closes that the model forgot."""
    text = TEXT.replace(missing, "", 1)
    answer = read_cut(text, iter(lambda: size, 0))
    assert shown(answer) == EXPECTED
    assert answer == parse(text, new_id=same_id)


def test_tools_end_the_thinking() -> None:
    text = f"Hm.{TEXT[CALLS:]}"
    assert shown(parse(text)) == ("Hm.", "", EXPECTED[2], 0)


def test_without_thinking() -> None:
    pieces = list(render([{"role": "assistant", "content": "Hi"}], thinking=False))
    text = "".join(piece.text for piece in pieces).split(SEP, 2)[2]
    assert shown(parse(text, thinking=False)) == ("", "Hi", [], 0)


def test_truncation_anywhere() -> None:
    """CASES C15: a call is there if and only if its close is, and nothing raises."""
    closes = [found.end() for found in re.finditer(r"<\|close\|>call<\|sep\|>", TEXT)]
    opens = [found.end() for found in re.finditer(r"<\|open\|>call [^|]*<\|sep\|>", TEXT)]
    for end in range(len(TEXT) + 1):
        answer = parse(TEXT[:end])
        whole = sum(close <= end for close in closes)
        assert shown(answer)[2] == EXPECTED[2][:whole]
        assert EXPECTED[0].startswith(answer.reasoning.split("<")[0])
        assert EXPECTED[1].startswith(answer.content.split("<")[0])
        assert len(answer.broken) == sum(begin <= end for begin in opens) - whole


def test_truncation_between_tokens_leaves_no_markup() -> None:
    """With tokens a marker is never cut."""
    pieces = answer_pieces(FULL)
    for end in range(len(pieces) + 1):
        answer = read_tokens(pieces[:end])
        assert EXPECTED[0].startswith(answer.reasoning)
        assert EXPECTED[1].startswith(answer.content)
        assert EXPECTED[2][: len(answer.tool_calls)] == shown(answer)[2]


def test_calls_after_the_close_are_not_made() -> None:
    again = TEXT[CALLS:]
    for extra in (again, again.replace(f"{OPEN}tools{SEP}", ""), "text", START):
        assert shown(parse(TEXT.removesuffix(END) + extra)) == EXPECTED
    with_late_call = TEXT.replace(f"{CLOSE}message", f"{again}{CLOSE}message")
    assert shown(parse(with_late_call)) == EXPECTED


def test_tools_that_nobody_offered() -> None:
    offered = [{"type": "function", "function": {"name": "write"}}]
    answer = parse(TEXT, tools=offered)
    assert [it.name for it in answer.tool_calls] == ["write"]
    assert answer.tool_calls[0].number == 0
    assert answer.broken[0].reason == "the tool 'get_weather' was not offered"
    assert "Paris" in answer.broken[0].text
    assert len(parse(TEXT, tools=[]).broken) == 2


def test_a_json_block_inside_a_string() -> None:
    """CASES C13."""
    assert shown(one_call(value(JSON_BLOCK, key="code")))[2] == [("f", {"code": JSON_BLOCK})]
    assert shown(one_call(JSON_BLOCK))[2] == [("f", {"x": 1})]


def test_a_model_may_write_markup_as_text() -> None:
    """With tokens, every text survives, even one that would close its own element."""
    message = {
        "reasoning_content": MARKUP,
        "content": MARKUP,
        "tool_calls": [call("f", {"x": MARKUP})],
    }
    assert shown(read_tokens(answer_pieces(message))) == (MARKUP, MARKUP, [("f", {"x": MARKUP})], 0)


@pytest.mark.parametrize("space", [" ", "\n", "  "])
def test_spaced_closes(space: str) -> None:
    spaced = re.sub(re.escape(CLOSE) + r"(\w+)", rf"{CLOSE}{space}\1{space}", TEXT)
    assert spaced != TEXT
    assert shown(parse(spaced)) == EXPECTED


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("number", "2", 2),
        ("number", "2.50", 2.5),
        ("number", " 7 ", 7),
        ("number", "NaN", "NaN"),
        ("number", "-Infinity", "-Infinity"),
        ("number", "1e999", "1e999"),
        ("number", "seven", "seven"),
        ("number", "", ""),
        ("number", "9" * 5000, "9" * 5000),
        ("boolean", "True", "True"),
        ("boolean", "true", True),
        ("null", "null", None),
        ("object", '{"a": [NaN]}', '{"a": [NaN]}'),
        ("object", '{"a": "\\ud800"}', '{"a": "\\ud800"}'),
        ("array", "[" * 100_000, "[" * 100_000),
        ("object", '{"a": {"b": []}}', {"a": {"b": []}}),
        ("string", "12", "12"),
    ],
)
def test_values(kind: str, text: str, expected: Any) -> None:
    answer = one_call(value(text, kind))
    assert json.loads(answer.tool_calls[0].arguments, parse_constant=pytest.fail) == {"x": expected}
    answer.tool_calls[0].arguments.encode()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (f"{OPEN}json{SEP}[1]{CLOSE}json{SEP}", "its arguments are no JSON object"),
        (f"{OPEN}json{SEP}{{broken{CLOSE}json{SEP}", "its arguments are no JSON object"),
        (f'{OPEN}argument type="string"{SEP}a{CLOSE}argument{SEP}', "an argument has no key"),
        (f'{OPEN}call tool="g"{SEP}', "it is not closed"),
    ],
)
def test_broken_calls(body: str, reason: str) -> None:
    answer = one_call(body)
    assert [it.reason for it in answer.broken] == [reason]
    assert 'tool="f"' in answer.broken[0].text


def test_a_call_without_a_name() -> None:
    assert one_call(value("a"), name="").broken[0].reason == "it names no tool"


def test_entities() -> None:
    answer = one_call(value("&quot;", key="a&quot;b&amp;c&amp;quot;"), name="&quot;&lt;")
    assert shown(answer)[2] == [('"&lt;', {'a"b&c&quot;': "&quot;"})]


def test_a_forgotten_close_of_an_argument_breaks_the_call() -> None:
    """With tokens a marker in an argument is real: what follows must not become its text."""
    message = {"content": "", "tool_calls": [call("f", {"a": "1", "b": "2"}), call("g", {})]}
    pieces = answer_pieces(message)
    first = next(i for i, it in enumerate(pieces) if it.text == "argument" and i > 20)
    place = next(i for i in range(first + 1, len(pieces)) if pieces[i].text == "argument")
    answer = read_tokens([*pieces[: place - 1], *pieces[place + 2 :]])
    assert [it.name for it in answer.tool_calls] == ["g"]
    assert [it.reason for it in answer.broken] == ["its argument is not closed"]


def test_markup_that_means_nothing_is_shown() -> None:
    text = f"a {OPEN} b {CLOSE}x{SEP} {SEP} < <| {OPEN}thinking{SEP}"
    assert parse(text, thinking=False).content == text
    assert read_cut(text, iter(lambda: 1, 0), thinking=False).content == text


def test_text_outside_of_elements_is_shown() -> None:
    text = f"{CLOSE}think{SEP}\n Hello{OPEN}response{SEP} you"
    assert parse(text) == Answer("", "\n Hello you", (), ())
    assert parse(f"{CLOSE}think{SEP}\n {OPEN}response{SEP}you").content == "you"


def test_events_come_as_soon_as_they_can() -> None:
    parser = Parser(thinking=False)
    assert parser.feed("a <") == [Content("a ")]
    assert parser.feed("b") == [Content("<b")]
    events = [event for letter in TEXT[CALLS:] for event in parser.feed(letter)]
    assert [type(event) for event in events] == [ToolCall, ToolCall]
    assert parser.done
    assert parser.feed("more") == []
    assert parser.finish() == []


def test_the_detokenizers_leftovers_come_before_the_marker() -> None:
    parser = Parser(thinking=False, markers=MARKER_IDS)
    assert parser.feed(f"é{CLOSE}", TOKEN_OF[CLOSE]) == [Content("é")]
    assert parser.feed("response", 0) == []
    assert parser.feed("", TOKEN_OF[SEP]) == []
    assert parser.feed("", TOKEN_OF[END]) == []
    assert parser.done


def test_where_mlx_lm_is_wrong() -> None:
    """It loses an argument, replaces all of them, and lets through what JSON can't write."""
    wrap = f'{OPEN}call tool="f" index="1"{SEP}%s{CLOSE}call{SEP}'
    spaced = value("a").replace(f"{CLOSE}argument", f"{CLOSE} argument ")
    assert theirs(wrap % spaced) == [("f", {})]
    assert shown(one_call(spaced))[2] == [("f", {"x": "a"})]
    assert theirs(wrap % value(JSON_BLOCK)) == [("f", {"x": 1})]
    assert shown(one_call(value(JSON_BLOCK)))[2] == [("f", {"x": JSON_BLOCK})]
    assert "NaN" in json.dumps(theirs(wrap % value("[NaN]", "array")))
    assert shown(one_call(value("[NaN]", "array")))[2] == [("f", {"x": "[NaN]"})]
