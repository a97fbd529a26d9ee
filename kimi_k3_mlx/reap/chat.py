"""Renders a conversation in K3's own chat format, as pieces that are encoded one by one.

Input: messages as chat APIs write them (role, content, reasoning_content, tool_calls, …). Output:
`Piece`s, each with the role of whoever it speaks for. Only pieces that this module made itself are
control tokens: markup that somebody pasted into a message stays ordinary text. Nothing here knows
a tokenizer, and joining the pieces before encoding gives other token ids than K3 was trained on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from kimi_k3_mlx.errors import UsageError
from kimi_k3_mlx.schema import Json

OPEN, CLOSE, SEP, END = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"

ROLES = ("none", "system", "user", "assistant", "thinking", "tool")
"""Who speaks. `none`: text outside of a conversation, and the markup between messages."""

TOOLS_FIRST = "# Tools\nHere are the available tools, described in JSONSchema.\n\n"
TOOLS_LATER = (
    "## New Tools Available\n"
    "The system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.\n\n"
)
SEE_FORMAT = 'write messages as [{"role": "user", "content": "…"}, …].'


class Piece(NamedTuple):
    """Text that is encoded by itself."""

    text: str
    role: str = "none"
    control: bool = False
    """Whether the text is the name of one control token."""
    markup: bool = False
    """Whether the renderer put it there: control tokens, tag names and attributes."""


class Result(NamedTuple):
    """A tool's message, with the call that it answers."""

    tool: str
    place: int
    message: Json


def render(
    messages: Sequence[Json], *, tools: Sequence[Json] = (), thinking: bool = True
) -> tuple[Piece, ...]:
    """A whole conversation, without a generation prompt; `thinking` keeps the reasoning."""
    return tuple(piece for piece in conversation(messages, tools, thinking) if piece.text)


def conversation(
    messages: Sequence[Json], tools: Sequence[Json], thinking: bool
) -> Iterator[Piece]:
    """The pieces of all messages, in order."""
    if tools:
        yield from declaration(tools, TOOLS_FIRST)
    calls: list[Json] = []
    results: list[Json] = []
    for message in messages:
        if role_of(message) == "tool":
            results.append(message)
            continue
        yield from answers(results, calls)
        results = []
        if message["role"] == "assistant":
            calls = objects(message, "tool_calls")
            yield from assistant(message, calls, thinking)
        else:
            yield from plain(message)
    yield from answers(results, calls)


def role_of(message: Json) -> str:
    """The role of a message."""
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("system", "user", "assistant", "tool"):
        raise UsageError(f"a message has the role {role!r}, which K3 does not know.", SEE_FORMAT)
    return str(role)


def objects(owner: Json, key: str) -> list[Json]:
    """The list of objects under a key; missing or null: empty."""
    value = owner.get(key) or []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise UsageError(f"`{key}` is no list of objects.", SEE_FORMAT)
    return value


def plain(message: Json) -> Iterator[Piece]:
    """A system or user message."""
    role = str(message["role"])
    tools = objects(message, "tools") if role == "system" else []
    if message.get("content") or not tools:
        name = {"name": str(message["name"])} if message.get("name") else {}
        yield from element("message", {"role": role, **name}, content(message, role), end=True)
    if tools:
        yield from declaration(tools, TOOLS_LATER)


def declaration(tools: Sequence[Json], sentence: str) -> Iterator[Piece]:
    """The system message that declares tools."""
    listed = json.dumps(list(tools), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    body = [Piece(f"{sentence}```json\n{listed}\n```", "system")]
    yield from element("message", {"role": "system", "type": "tool-declare"}, body, end=True)


def assistant(message: Json, calls: Sequence[Json], thinking: bool) -> Iterator[Piece]:
    """An assistant's message: its thoughts, its response, its calls."""
    body: list[Piece] = []
    if thinking:
        reasoning = text_of(message.get("reasoning_content"), "reasoning_content")
        body += element("think", {}, [Piece(reasoning, "thinking")])
    body += element("response", {}, content(message, "assistant"))
    if calls:
        inner = [piece for i, call in enumerate(calls, 1) for piece in tool_call(call, i)]
        body += element("tools", {}, inner)
    yield from element("message", {"role": "assistant"}, body, end=True)


def tool_call(call: Json, index: int) -> Iterator[Piece]:
    """One call, with one element per argument."""
    arguments = arguments_of(call)
    if isinstance(arguments, str):
        body = list(element("json", {"type": "object"}, [Piece(arguments, "assistant")]))
    else:
        body = [piece for item in arguments.items() for piece in argument(*item)]
    yield from element("call", {"tool": tool_name(call), "index": str(index)}, body)


def arguments_of(call: Json) -> Json | str:
    """The arguments as an object, or as they are when they are not one."""
    value = function_of(call).get("arguments")
    if value is None or isinstance(value, dict):
        return value or {}
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return str(value)
    if isinstance(parsed, dict):
        return parsed
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def argument(key: str, value: Any) -> Iterator[Piece]:
    """One argument: strings as they are, everything else as JSON."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    attributes = {"key": key, "type": json_type(value)}
    yield from element("argument", attributes, [Piece(text, "assistant")])


def json_type(value: Any) -> str:
    """What JSON calls the type of a value."""
    if value is None:
        return "null"
    for kinds, name in ((bool, "boolean"), (str, "string"), (dict, "object"), (list, "array")):
        if isinstance(value, kinds):
            return name
    return "number"


def function_of(call: Json) -> Json:
    """The function that a call names."""
    function = call.get("function", call)
    return function if isinstance(function, dict) else {}


def tool_name(call: Json) -> str:
    """The name of the tool that a call is for."""
    name = function_of(call).get("name")
    if not isinstance(name, str) or not name:
        raise UsageError("a tool call has no function name.", SEE_FORMAT)
    return name


def answers(results: Sequence[Json], calls: Sequence[Json]) -> Iterator[Piece]:
    """Consecutive tool results, in the order of their calls if every one can be matched."""
    for tool, place, message in matched(results, calls) or unmatched(results, calls):
        attributes = {"role": "tool", "tool": tool, "index": str(place)}
        yield from element("message", attributes, content(message, "tool"), end=True)


def matched(results: Sequence[Json], calls: Sequence[Json]) -> list[Result]:
    """The results sorted by call; empty if any of them answers none, or two the same one."""
    places = {call["id"]: i for i, call in enumerate(calls, 1) if isinstance(call.get("id"), str)}
    found = [places.get(str(message.get("tool_call_id"))) for message in results]
    indices = [index for index in found if index is not None]
    if len(indices) < len(results) or len(set(indices)) < len(indices):
        return []
    order = sorted(zip(indices, results, strict=True), key=lambda pair: pair[0])
    return [Result(tool_name(calls[index - 1]), index, message) for index, message in order]


def unmatched(results: Sequence[Json], calls: Sequence[Json]) -> Iterator[Result]:
    """The results as they come, each with a name of its own or that of the call in its place."""
    for index, message in enumerate(results, 1):
        name = message.get("name") or message.get("tool")
        if not name and index <= len(calls):
            name = tool_name(calls[index - 1])
        if not isinstance(name, str) or not name:
            raise UsageError("a tool message answers no call and has no name.", SEE_FORMAT)
        yield Result(name, index, message)


def content(message: Json, role: str) -> list[Piece]:
    """The text of a message: a string, or a list of text parts."""
    value = message.get("content")
    if not isinstance(value, list):
        return [Piece(text_of(value, "content"), role)]
    kinds = [part.get("type") if isinstance(part, dict) else None for part in value]
    if other := [kind for kind in kinds if kind != "text"]:
        raise UsageError(
            f"a message has a part of type {other[0]!r}: only text can be measured.",
            "leave out conversations about images.",
        )
    return [Piece(text_of(part.get("text"), "text"), role) for part in value]


def text_of(value: Any, key: str) -> str:
    """A string; null is empty."""
    if value is not None and not isinstance(value, str):
        raise UsageError(f"`{key}` is a {type(value).__name__}, not text.", SEE_FORMAT)
    return value or ""


def element(
    name: str, attributes: dict[str, str], body: Sequence[Piece], *, end: bool = False
) -> Iterator[Piece]:
    """`<|open|>NAME key="value"<|sep|> … <|close|>NAME<|sep|>`, and `<|end_of_msg|>` if asked."""
    yield marker(OPEN)
    yield Piece(name, markup=True)
    for key, value in attributes.items():
        escaped = value.replace("&", "&amp;").replace('"', "&quot;")
        for text in (f" {key}", '="', escaped, '"'):
            yield Piece(text, markup=True)
    yield marker(SEP)
    yield from body
    yield marker(CLOSE)
    yield Piece(name, markup=True)
    yield marker(SEP)
    if end:
        yield marker(END)


def marker(name: str) -> Piece:
    """A control token."""
    return Piece(name, control=True, markup=True)
