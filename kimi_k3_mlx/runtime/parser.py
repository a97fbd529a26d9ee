"""Reads K3's output while it arrives: what it thinks, what it says, which tools it calls.

Input: pieces of text, best with the token that each came with: then only real control tokens are
markup, and a model may write `<|close|>` in a file. Without tokens markup is known by its letters.
Output: events; joined, they are the same however the text was cut. A call is an event when its
close has arrived, never before; what can't be used is a `BrokenCall` with the model's own words.
Nothing that the model writes is an error.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kimi_k3_mlx.chat.pieces import CLOSE, END, MARKERS, OPEN, SEP
from kimi_k3_mlx.chat.render import function_of
from kimi_k3_mlx.runtime.events import (
    Answer,
    BrokenCall,
    Content,
    Event,
    Reasoning,
    ToolCall,
    answer_of,
    merged,
)  # fmt: skip
from kimi_k3_mlx.schema import Json

STRUCTURE = ("think", "response", "tools", "message")
BODY: dict[str, tuple[str, ...]] = {OPEN: STRUCTURE, CLOSE: STRUCTURE}
TAGS: dict[str, dict[str, tuple[str, ...]]] = {
    "think": BODY,
    "response": BODY,
    "between": BODY,
    "tools": {OPEN: ("call",), CLOSE: ("tools", "message")},
    "call": {OPEN: ("argument", "json", "call"), CLOSE: ("call", "tools", "message")},
    "argument": {OPEN: (), CLOSE: ("argument",)},
    "json": {OPEN: (), CLOSE: ("json",)},
}
"""The tags that mean something in each place; in an argument nothing but its own close does."""

LEAVES = ("argument", "json")
WITH_ATTRIBUTES = ("message", "call", "argument", "json")
ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')
ENTITY = {"&quot;": '"', "&amp;": "&"}


@dataclass
class Call:
    """A call while it is read."""

    name: str
    words: list[str]
    """All that the model wrote of it."""
    arguments: dict[str, str] = field(default_factory=dict)
    """Values as JSON, by key."""
    reason: str = ""
    """What is wrong with it."""


class Parser:
    """The state between two pieces.

    `thinking` says where the generation prompt left off. `tools` are the tools of the request as
    OpenAI's API writes them; calls of others are broken, None allows any. `markers` are the ids of
    the control tokens (`chat.marker_ids`): needed to feed tokens.
    """

    def __init__(
        self,
        *,
        thinking: bool = True,
        tools: Sequence[Json] | None = None,
        markers: Mapping[int, str] | None = None,
        new_id: Callable[[], str] = lambda: f"call_{uuid.uuid4().hex[:24]}",
    ) -> None:
        self.place = "think" if thinking else "response"
        self.offered = None if tools is None else {function_of(tool).get("name") for tool in tools}
        self.markers = markers or {}
        self.new_id = new_id
        self.exact = False
        """Whether markers are known by their ids."""
        self.held = ""
        """Letters that may become a marker."""
        self.tag = ""
        """The marker whose tag is being read, or nothing."""
        self.header = ""
        """The tag so far."""
        self.blank = ""
        """White space between elements: dropped unless text follows."""
        self.call: Call | None = None
        self.attributes: dict[str, str] = {}
        self.value: list[str] = []
        self.n_calls = 0

    @property
    def done(self) -> bool:
        """Whether the message is over; whatever follows is ignored."""
        return self.place == "done"

    def feed(self, text: str, token: int | None = None) -> list[Event]:
        """The events of a piece. With `token`, the text is markup if and only if the token is.

        Text that a detokenizer held back may come along, before the marker's own name.
        """
        if token is None or not self.markers:
            return merged(self.scan(text))
        self.exact = True
        name = self.markers.get(token)
        if name is None:
            return merged(self.text(text))
        return merged((*self.text(text.removesuffix(name)), *self.marker(name)))

    def finish(self) -> list[Event]:
        """The events of what was held back; the model stopped here."""
        held, self.held = self.held, ""
        events = [*self.text(held), *self.end()]
        return merged(events)

    def scan(self, text: str) -> Iterator[Event]:
        """Find markers by their letters; hold back what may be the beginning of one."""
        *parts, rest = MARKER.split(self.held + text)
        for i, part in enumerate(parts):
            yield from self.marker(part) if i % 2 else self.text(part)
        n_held = max(n for n in range(LONGEST) if n == 0 or begins_marker(rest[-n:], n))
        self.held = rest[len(rest) - n_held :]
        yield from self.text(rest[: len(rest) - n_held])

    def text(self, text: str) -> Iterator[Event]:
        """Ordinary letters: of a tag that is being read, or of what is said."""
        if self.done:
            return
        if not self.tag:
            yield from self.say(text)
            return
        self.header += text
        if not self.plausible():
            yield from self.release()

    def marker(self, name: str) -> Iterator[Event]:
        """A marker."""
        if self.done:
            return
        if name == END and (self.exact or self.place not in LEAVES):
            yield from self.end()
            return
        if self.tag and name == SEP and tag_name(self.header) in TAGS[self.place][self.tag]:
            kind, header, self.tag = self.tag, self.header.strip(), ""
            yield from self.element(kind, tag_name(header), header)
            return
        if self.tag:
            yield from self.release()
        if name in (OPEN, CLOSE):
            self.tag, self.header = name, ""
        if name not in (OPEN, CLOSE) or not self.plausible():
            self.tag = ""
            yield from self.stray(name)

    def plausible(self) -> bool:
        """Whether the tag so far can become one that means something here."""
        begun = self.header.lstrip()
        name, tags = tag_name(begun), TAGS[self.place][self.tag]
        if begun == name:
            return any(tag.startswith(name) for tag in tags)
        named = self.tag == OPEN and name in WITH_ATTRIBUTES
        return name in tags and (named or begun.strip() == name)

    def release(self) -> Iterator[Event]:
        """The tag was none: it is what the model wrote."""
        kind, header, self.tag = self.tag, self.header, ""
        yield from self.stray(kind)
        yield from self.text(header)

    def stray(self, name: str) -> Iterator[Event]:
        """A marker that means nothing here. A real one in an argument breaks the call."""
        if self.exact and self.place in LEAVES and self.call is not None:
            self.call.reason = self.call.reason or f"its {self.place} is not closed"
            self.place = "call"
            if name in (OPEN, CLOSE):
                self.tag, self.header = name, ""
                return
        yield from self.say(name)

    def say(self, text: str) -> Iterator[Event]:
        """Letters in the place where they are."""
        self.write(text)
        if not text:
            return
        if self.place in LEAVES:
            self.value.append(text)
        elif self.place == "think":
            yield Reasoning(text)
        elif self.place == "response":
            yield Content(text)
        elif self.place == "between":
            self.blank += text
            if self.blank.strip():
                self.place, text, self.blank = "response", self.blank, ""
                yield Content(text)

    def write(self, text: str) -> None:
        """Keep the words of a call, for the case that it breaks."""
        if self.call is not None:
            self.call.words.append(text)

    def element(self, kind: str, name: str, header: str) -> Iterator[Event]:
        """A whole tag that means something here."""
        if name in LEAVES or (name, kind) == ("call", CLOSE):
            self.write(kind + self.header + SEP)
        if self.place in LEAVES:
            self.keep()
        elif name == "call":
            yield from self.close(complete=kind == CLOSE)
            if kind == OPEN:
                self.begin(header)
        elif name in LEAVES:
            self.place, self.value, self.attributes = name, [], attributes_of(header)
        elif name == "message" or self.place in ("tools", "call"):
            yield from self.end()
        else:
            self.place, self.blank = (name if kind == OPEN else "between"), ""

    def begin(self, header: str) -> None:
        """A call opens."""
        name = attributes_of(header).get("tool", "")
        self.call, self.place = Call(name, [f"{OPEN}{header}{SEP}"]), "call"
        if not name:
            self.call.reason = "it names no tool"
        elif self.offered is not None and name not in self.offered:
            self.call.reason = f"the tool {name!r} was not offered"

    def keep(self) -> None:
        """An argument closes."""
        place, self.place, value = self.place, "call", "".join(self.value)
        if self.call is None:
            return
        if place == "json":
            found = strict(value)
            if not isinstance(found, dict):
                self.call.reason = self.call.reason or "its arguments are no JSON object"
                return
            self.call.arguments |= {key: dumped(item) for key, item in found.items()}
        elif key := self.attributes.get("key"):
            kind = self.attributes.get("type", "string")
            self.call.arguments[key] = dumped(value if kind == "string" else strict(value))
        else:
            self.call.reason = self.call.reason or "an argument has no key"

    def close(self, *, complete: bool) -> Iterator[Event]:
        """The call is over, if one is open."""
        call, self.call = self.call, None
        self.place = "tools"
        if call is None:
            return
        if not complete or call.reason:
            yield BrokenCall("".join(call.words), call.reason or "it is not closed")
            return
        items = (f"{dumped(key)}: {value}" for key, value in call.arguments.items())
        yield ToolCall(self.new_id(), call.name, f"{{{', '.join(items)}}}", self.n_calls)
        self.n_calls += 1

    def end(self) -> Iterator[Event]:
        """The message is over; a tag that was begun is dropped, a call that was is broken."""
        if self.tag:
            self.write(self.tag + self.header)
        self.tag = ""
        if self.call is not None:
            yield from self.close(complete=False)
        self.place = "done"


MARKER = re.compile("(" + "|".join(map(re.escape, MARKERS)) + ")")
LONGEST = max(map(len, MARKERS))


def begins_marker(text: str, n_chars: int) -> bool:
    """Whether `n_chars` letters are the beginning of a marker, but not the whole."""
    return len(text) == n_chars and any(name.startswith(text) and name != text for name in MARKERS)


def tag_name(header: str) -> str:
    """The first word of a tag."""
    return (header.split(maxsplit=1) or [""])[0]


def attributes_of(header: str) -> dict[str, str]:
    """The attributes of a tag, entities resolved."""
    found = ATTRIBUTE.findall(header)
    return {key: re.sub("&quot;|&amp;", lambda it: ENTITY[it[0]], text) for key, text in found}


def strict(text: str) -> Any:
    """A JSON value; text that is none (NaN, too large a number, too deep) stays text."""
    try:
        value = json.loads(text)
        dumped(value).encode()
    except (ValueError, RecursionError):
        return text
    return value


def dumped(value: Any) -> str:
    """JSON; ValueError for what JSON can't write."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def parse(text: str, **options: Any) -> Answer:
    """A whole text; the options are those of `Parser`."""
    parser = Parser(**options)
    return answer_of([*parser.feed(text), *parser.finish()])
