"""What K3's output consists of, as the parser tells it piece by piece, and all of it together.

Input and output: events. Joining neighbouring pieces of text changes nothing for their reader.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Reasoning(NamedTuple):
    """More of what the model thinks."""

    text: str


class Content(NamedTuple):
    """More of what the model says."""

    text: str


class ToolCall(NamedTuple):
    """A whole call."""

    id: str
    name: str
    arguments: str
    """A JSON object."""
    number: int
    """Calls are counted from 0."""


class BrokenCall(NamedTuple):
    """A call that can't be made: what the model wrote, and what is wrong with it."""

    text: str
    reason: str


Event = Reasoning | Content | ToolCall | BrokenCall


def merged(events: Iterable[Event]) -> list[Event]:
    """Events with neighbouring pieces of text joined."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, Reasoning) and isinstance(last, Reasoning):
            found[-1] = Reasoning(last.text + event.text)
        elif isinstance(event, Content) and isinstance(last, Content):
            found[-1] = Content(last.text + event.text)
        else:
            found.append(event)
    return found


class Answer(NamedTuple):
    """A whole message."""

    reasoning: str
    content: str
    tool_calls: tuple[ToolCall, ...]
    broken: tuple[BrokenCall, ...]


def answer_of(events: Iterable[Event]) -> Answer:
    """All events of a message together."""
    found = list(events)
    return Answer(
        "".join(event.text for event in found if isinstance(event, Reasoning)),
        "".join(event.text for event in found if isinstance(event, Content)),
        tuple(event for event in found if isinstance(event, ToolCall)),
        tuple(event for event in found if isinstance(event, BrokenCall)),
    )
