"""The parser of K3's output for anything: each cut gives the same, the encoder's words come back.

The naive twin is a handful of regular expressions over a whole, well-formed answer.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_k3_mlx.chat.pieces import CLOSE, MARKERS, OPEN, SEP, Piece
from kimi_k3_mlx.runtime.parser import parse
from tests.runtime.answers import (
    JSON_BLOCK,
    MARKUP,
    TEXT,
    answer_pieces,
    answer_text,
    call,
    read_cut,
    read_tokens,
    same_id,
    shown,
    theirs,
)  # fmt: skip

LETTERS = st.lists(
    st.sampled_from(["<", "|", ">", '"', "&", " ", "\n", "a", "é", "open", *MARKERS]), max_size=6
).map("".join) | st.sampled_from([MARKUP, JSON_BLOCK, "think", "NaN"])
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | LETTERS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(LETTERS, inner, max_size=2),
    max_leaves=4,
)  # fmt: skip
NAMES = LETTERS.filter(bool)
MESSAGES = st.fixed_dictionaries(
    {
        "reasoning_content": LETTERS.filter(lambda text: not text or text.strip()),
        "content": LETTERS,
        "tool_calls": st.lists(
            st.builds(call, NAMES, st.dictionaries(NAMES, VALUES, max_size=3)), max_size=3
        ),
    }
)


@settings(deadline=None)
@given(MESSAGES)
def test_what_the_encoder_writes_the_parser_reads(message: dict[str, Any]) -> None:
    """With tokens: any text, any names, any values."""
    answer = read_tokens(answer_pieces(message))
    calls = [(it["function"]["name"], it["function"]["arguments"]) for it in message["tool_calls"]]
    assert shown(answer) == (message["reasoning_content"], message["content"], calls, 0)


TAGS = ["think", "response", "tools", "call", "argument", "json", "message"]
WORDS = ["x", "<|", '"', "{", "NaN", "&amp;", "12", "{}", " ", "\n"]
ATTRIBUTES = [' tool="f"', ' key="k"', ' type="number"']
SOUP = st.lists(st.sampled_from([*MARKERS, *TAGS, *WORDS, *ATTRIBUTES]), max_size=40).map("".join)
CUT = st.integers(0, len(TEXT))


@settings(deadline=None, max_examples=300)
@given(
    SOUP | st.builds(lambda i, soup, j: TEXT[:i] + soup + TEXT[j:], CUT, SOUP, CUT),
    st.lists(st.integers(1, 9), min_size=1),
    st.booleans(),
)
def test_any_cut_of_anything(text: str, sizes: list[int], thinking: bool) -> None:
    cuts = (size for _ in iter(int, 1) for size in sizes)
    answer = read_cut(text, cuts, thinking=thinking)
    assert answer == parse(text, thinking=thinking, new_id=same_id)
    for found in answer.tool_calls:
        assert isinstance(json.loads(found.arguments, parse_constant=pytest.fail), dict)


@settings(deadline=None)
@given(st.lists(st.sampled_from([*MARKERS, "call", ' tool="f"', "argument", ' key="k"', "a"])))
def test_any_tokens(texts: list[str]) -> None:
    """Markers in any order do no harm, and no call has markup for a value."""
    pieces = [Piece(text, control=text in MARKERS) for text in texts]
    start = [Piece(OPEN, control=True), Piece("tools"), Piece(SEP, control=True)]
    for found in read_tokens([*start, *pieces]).tool_calls:
        assert "<|" not in found.arguments


PLAIN = st.text("abc é,.\n{}[]\"'&1", max_size=8)


def naive(text: str) -> tuple[str, str, list[tuple[str, Any]], int]:
    """The twin: regular expressions over a well-formed answer without markup in its texts."""

    def inside(tag: str, within: str) -> list[tuple[str, str]]:
        shape = rf"<\|open\|>{tag}([^|]*)<\|sep\|>(.*?)<\|close\|>{tag}<\|sep\|>"
        return re.findall(shape, within, re.DOTALL)

    calls = []
    for header, body in inside("call", text):
        arguments = {}
        for attributes, written in inside("argument", body):
            key, kind = re.findall(r'key="(.*)" type="(.*)"', attributes, re.DOTALL)[0]
            key = key.replace("&quot;", '"').replace("&amp;", "&")
            arguments[key] = written if kind == "string" else json.loads(written)
        calls.append((re.findall(r'tool="(.*)" index', header)[0], arguments))
    return text.split(f"{CLOSE}think")[0], inside("response", text)[0][1], calls, 0


WELL_FORMED = st.fixed_dictionaries(
    {
        "reasoning_content": PLAIN.filter(lambda text: not text or text.strip()),
        "content": PLAIN,
        "tool_calls": st.lists(
            st.builds(
                call,
                st.sampled_from(["f", "get_weather"]),
                st.dictionaries(PLAIN.filter(bool), PLAIN | st.integers(), max_size=2),
            ),
            max_size=2,
        ),
    }
)


@settings(deadline=None, max_examples=50)
@given(WELL_FORMED)
def test_the_naive_twin(message: dict[str, Any]) -> None:
    text = answer_text(message)
    assert shown(parse(text)) == naive(text)


@settings(deadline=None, max_examples=50)
@given(WELL_FORMED.filter(lambda message: message["tool_calls"]))
def test_the_same_calls_as_mlx_lm(message: dict[str, Any]) -> None:
    text = answer_text(message)
    assert shown(parse(text))[2] == theirs(text)
