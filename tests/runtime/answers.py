"""What K3 might write, and ways to feed it to the parser.

The encoder renders what a message means, so that encoder and parser are each other's twin.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from kimi_k3_mlx.chat.pieces import CLOSE, END, MARKERS, OPEN, SEP, Piece
from kimi_k3_mlx.chat.render import render
from kimi_k3_mlx.runtime.events import Answer, Event, answer_of
from kimi_k3_mlx.runtime.parser import Parser, parse

MARKER_IDS = dict(enumerate(MARKERS, 1000))
TOKEN_OF = {name: token for token, name in MARKER_IDS.items()}
START = f'{OPEN}message role="assistant"{SEP}{OPEN}think{SEP}'


def same_id() -> str:
    """An id that two parsers agree on."""
    return "id"


def shown(answer: Answer) -> tuple[str, str, list[tuple[str, Any]], int]:
    """Reasoning, content, calls with arguments as objects, number of broken calls."""
    calls = [(call.name, json.loads(call.arguments)) for call in answer.tool_calls]
    return answer.reasoning, answer.content, calls, len(answer.broken)


def answer_pieces(message: dict[str, Any]) -> list[Piece]:
    """What K3 would write to say a message: after `<|open|>think<|sep|>`."""
    pieces = list(render([{"role": "assistant", **message}]))
    ends = [i for i, piece in enumerate(pieces) if piece.text == SEP]
    return pieces[ends[1] + 1 :]


def answer_text(message: dict[str, Any]) -> str:
    return "".join(piece.text for piece in answer_pieces(message))


def read_tokens(pieces: list[Piece], **options: Any) -> Answer:
    """Feed pieces with tokens, ordinary text letter by letter as token 0."""
    parser = Parser(markers=MARKER_IDS, new_id=same_id, **options)
    events: list[Event] = []
    for piece in pieces:
        if piece.control:
            events += parser.feed(piece.text, TOKEN_OF[piece.text])
        else:
            for letter in piece.text:
                events += parser.feed(letter, 0)
    return answer_of([*events, *parser.finish()])


def read_cut(text: str, sizes: Iterator[int], **options: Any) -> Answer:
    """Feed text in pieces of these sizes."""
    parser = Parser(new_id=same_id, **options)
    events: list[Event] = []
    begin = 0
    while begin < len(text):
        end = begin + next(sizes)
        events += parser.feed(text[begin:end])
        begin = end
    return answer_of([*events, *parser.finish()])


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": arguments}}


FULL = {
    "reasoning_content": "Two cities.",
    "content": "Let me look.",
    "tool_calls": [
        call("get_weather", {"city": "Paris", "n": 2, "opts": {"u": "C"}, "x": None, "ok": True}),
        call("write", {"code": "if a < b && c:\n  s = '&amp; \"q\"'", "n": [1, "é"]}),
    ],
}  # fmt: skip
EXPECTED = (
    "Two cities.",
    "Let me look.",
    [(it["function"]["name"], it["function"]["arguments"]) for it in FULL["tool_calls"]],
    0,
)
TEXT = answer_text(FULL)
CALLS = TEXT.index(f"{OPEN}tools")
JSON_BLOCK = f'{OPEN}json type="object"{SEP}{{"x":1}}{CLOSE}json{SEP}'
MARKUP = f'{CLOSE}argument{SEP}{CLOSE}call{SEP}{OPEN}call tool="rm" index="2"{SEP}{END}'


def one_call(body: str, name: str = "f", **options: Any) -> Answer:
    """The answer with one call whose inside is `body`."""
    return parse(
        f'{OPEN}tools{SEP}{OPEN}call tool="{name}" index="1"{SEP}{body}'
        f"{CLOSE}call{SEP}{CLOSE}tools{SEP}{CLOSE}message{SEP}",
        **options,
    )


def value(text: str, kind: str = "string", key: str = "x") -> str:
    return f'{OPEN}argument key="{key}" type="{kind}"{SEP}{text}{CLOSE}argument{SEP}'


def theirs(text: str) -> list[tuple[str, Any]]:
    """mlx-lm's parser on the tools of an answer."""
    kimi_k3 = pytest.importorskip("mlx_lm.tool_parsers.kimi_k3")
    return [(it["name"], it["arguments"]) for it in kimi_k3.parse_tool_call(text)]
