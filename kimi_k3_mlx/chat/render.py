"""Renders a conversation in K3's own chat format, as pieces that are encoded one by one.

Input: messages as chat APIs write them (role, content, reasoning_content, tool_calls, …) and the
options of a request. Output: `Piece`s, each with the role of whoever it speaks for. Only pieces
that this module made itself are control tokens. What K3 would not understand is a UsageError that
names the message, counted from 0.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from kimi_k3_mlx.chat.pieces import (
    MEDIA_BEGIN,
    MEDIA_CONTENT,
    MEDIA_END,
    MEDIA_PAD,
    Piece,
    element,
    marker,
    opening,
)
from kimi_k3_mlx.chat.request import declaration, effort_message, last_messages
from kimi_k3_mlx.errors import UsageError
from kimi_k3_mlx.schema import Json

EFFORTS = ("low", "high", "max")
"""The thinking efforts that K3 takes; its prompt names `medium` too, but its encoder refuses it."""
SEE_FORMAT = 'write messages as [{"role": "user", "content": "…"}, …].'
IMAGES = ("image", "image_url")


class Picture(NamedTuple):
    """An image's size in the file, and for how many placeholder tokens it stands in the prompt."""

    width: int
    height: int
    n_tokens: int = 1
    """K3 itself expands one placeholder; mlx-vlm wants one for each row of features."""


def render(
    messages: Sequence[Json], *, tools: Sequence[Json] = (), thinking: bool = True
) -> tuple[Piece, ...]:
    """A whole conversation, without a generation prompt; `thinking` keeps the reasoning."""
    return chat_pieces(messages, tools=tools, thinking=thinking, add_generation_prompt=False)


def chat_pieces(
    messages: Sequence[Json],
    *,
    tools: Sequence[Json] = (),
    thinking: bool = True,
    effort: str | None = None,
    tool_choice: Any = None,
    response_format: Any = None,
    images: Sequence[Picture] = (),
    add_generation_prompt: bool = True,
) -> tuple[Piece, ...]:
    """A request. `tool_choice` and `response_format` are those of OpenAI's API; None: no mention.

    `images` are the pictures of the messages' image parts, in order. `effort` counts only when
    thinking. The generation prompt opens the assistant's message and, in it, `think` or `response`.
    """
    if effort not in (None, *EFFORTS):
        raise UsageError(
            f"a thinking effort of {effort!r} is none of {', '.join(EFFORTS)}.",
            "leave it out: K3 then decides.",
        )
    pieces = [*declaration(tools)] if tools else []
    if effort and thinking:
        pieces += effort_message(effort)
    pieces += Conversation(messages, thinking, images).pieces()
    pieces += last_messages(tool_choice, response_format)
    if add_generation_prompt:
        pieces += opening("message", {"role": "assistant"})
        pieces += opening("think" if thinking else "response", {})
    return tuple(piece for piece in pieces if piece.text)


class Conversation:
    """The state that messages leave for later ones: calls that wait for results, images."""

    def __init__(self, messages: Sequence[Json], thinking: bool, images: Sequence[Picture]) -> None:
        if not isinstance(messages, list | tuple):
            raise UsageError(f"messages are a {type(messages).__name__}, no list.", SEE_FORMAT)
        self.messages, self.thinking, self.images = messages, thinking, images
        self.n_images = 0
        self.calls: list[Json] = []
        self.n_results = 0

    def pieces(self) -> list[Piece]:
        """The pieces of all messages, in order."""
        found: list[Piece] = []
        results: list[int] = []
        for index, message in enumerate(self.messages):
            with located(index):
                role = role_of(message)
            if role == "tool":
                results.append(index)
                continue
            found += self.answers(results)
            results = []
            with located(index):
                found += checked(self.message(role, message))
        found += self.answers(results)
        if self.n_images < len(self.images):
            raise UsageError(
                f"there are {len(self.images)} images, but only {self.n_images} in messages."
            )
        return found

    def message(self, role: str, message: Json) -> Iterator[Piece]:
        """A message that is no tool's result."""
        if role == "assistant":
            self.calls, self.n_results = objects(message, "tool_calls"), 0
            yield from self.assistant(message)
            return
        tools = objects(message, "tools") if role == "system" else []
        if message.get("content") or not tools:
            body = self.content(message, role)
            yield from element("message", {"role": role} | name_of(message), body, end=True)
        if tools:
            yield from declaration(tools, later=True)

    def assistant(self, message: Json) -> Iterator[Piece]:
        """An assistant's message: its thoughts, its response, its calls."""
        body: list[Piece] = []
        if self.thinking:
            key = "reasoning" if message.get("reasoning_content") is None else "reasoning_content"
            reasoning = text_of(message.get(key), key)
            thoughts = Piece(reasoning if reasoning.strip() else "", "thinking")
            body += element("think", {}, [thoughts])
        body += element("response", {}, self.content(message, "assistant"))
        if self.calls:
            inner = [piece for i, call in enumerate(self.calls, 1) for piece in tool_call(call, i)]
            body += element("tools", {}, inner)
        yield from element("message", {"role": "assistant"} | name_of(message), body, end=True)

    def answers(self, results: Sequence[int]) -> Iterator[Piece]:
        """Consecutive tool results, in the order of their calls if each answers one."""
        places: dict[str, int] = {}
        for place, call in enumerate(self.calls):
            if call.get("id") is not None:
                places.setdefault(str(call["id"]), place)
        found = [places.get(str(self.messages[i].get("tool_call_id"))) for i in results]
        matched = [place for place in found if place is not None]
        if len(matched) == len(results):
            order = sorted(zip(matched, results, strict=True))
        else:
            order = [(-1, index) for index in results]
        for place, index in order:
            with located(index):
                yield from checked(self.answer(self.messages[index], place))

    def answer(self, message: Json, place: int) -> Iterator[Piece]:
        """One result: of the call in a place, or (-1) with a name of its own or by its number."""
        name = message.get("tool") or message.get("name")
        if place < 0 and not name and self.n_results < len(self.calls):
            place = self.n_results
        name = tool_name(self.calls[place]) if place >= 0 else name
        if not isinstance(name, str) or not name:
            raise UsageError("a tool message answers no call and has no name.", SEE_FORMAT)
        self.n_results += 1
        attributes = {"role": "tool", "tool": name, "index": str(self.n_results)}
        yield from element("message", attributes, self.content(message, "tool"), end=True)

    def content(self, message: Json, role: str) -> list[Piece]:
        """What a message says: a string, or a list of parts."""
        value = message.get("content")
        if not isinstance(value, list):
            return [Piece(text_of(value, "content"), role)]
        return [piece for part in value for piece in self.part(part, role)]

    def part(self, part: Any, role: str) -> Iterator[Piece]:
        """Text, or the placeholder of an image."""
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text":
            yield Piece(text_of(part.get("text"), "text"), role)
        elif kind in IMAGES and self.n_images < len(self.images):
            yield from picture(self.images[self.n_images], role)
            self.n_images += 1
        elif kind in IMAGES and self.images:
            raise UsageError(f"its {kind!r} is one more than the {self.n_images} images given.")
        else:
            raise UsageError(
                f"it has a part of type {kind!r}: only text can be read here.",
                "leave out conversations about images.",
            )


@contextmanager
def located(index: int) -> Iterator[None]:
    """Let errors say in which message they are."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"messages[{index}]: {error.message}", error.hint) from error


def checked(pieces: Iterator[Piece]) -> list[Piece]:
    """Pieces that can be encoded: JSON may carry half a surrogate pair, UTF-8 can't."""
    found = list(pieces)
    for piece in found:
        try:
            piece.text.encode()
        except UnicodeEncodeError as error:
            raise UsageError("it has half a surrogate pair: it is not text.") from error
    return found


def role_of(message: Json) -> str:
    """The role of a message."""
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("system", "user", "assistant", "tool"):
        raise UsageError(f"a message has the role {role!r}, which K3 does not know.", SEE_FORMAT)
    return str(role)


def name_of(message: Json) -> dict[str, str]:
    """The attribute that names who speaks, if anybody does."""
    name = text_of(message.get("name"), "name")
    return {"name": name} if name else {}


def objects(owner: Json, key: str) -> list[Json]:
    """The list of objects under a key; missing or null: empty."""
    value = owner.get(key) or []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise UsageError(f"`{key}` is no list of objects.", SEE_FORMAT)
    return value


def tool_call(call: Json, index: int) -> Iterator[Piece]:
    """One call, with one element per argument."""
    arguments = arguments_of(call)
    if isinstance(arguments, str):
        body = list(element("json", {"type": "object"}, [Piece(arguments, "assistant")]))
    else:
        body = [piece for item in arguments.items() for piece in argument(*item)]
    yield from element("call", {"tool": tool_name(call), "index": str(index)}, body)


def arguments_of(call: Json) -> Json | str:
    """The arguments as an object, or as they are when they are no JSON."""
    value = function_of(call).get("arguments")
    if value is None or (isinstance(value, str) and not value.strip()):
        return {}
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return str(value)
    if not isinstance(parsed, dict):
        raise UsageError(f"the arguments of a call are a {json_type(parsed)}, not an object.")
    return parsed


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


def picture(image: Picture, role: str) -> Iterator[Piece]:
    """The placeholder of an image."""
    yield marker(MEDIA_BEGIN)
    yield Piece(f"image {image.width}x{image.height}", role, markup=True)
    yield marker(MEDIA_CONTENT)
    for _ in range(image.n_tokens):
        yield marker(MEDIA_PAD)
    yield marker(MEDIA_END)


def text_of(value: Any, key: str) -> str:
    """A string; null is empty."""
    if value is not None and not isinstance(value, str):
        raise UsageError(f"`{key}` is a {type(value).__name__}, not text.", SEE_FORMAT)
    return value or ""
