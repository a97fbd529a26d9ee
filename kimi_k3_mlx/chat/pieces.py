"""The markup of K3's chat format (XTML): control tokens, elements, and the pieces they are made of.

Input: names, attributes, text. Output: `Piece`s, which are encoded one by one; joining them before
encoding gives other token ids than K3 was trained on. Nothing here knows a tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

OPEN, CLOSE, SEP, END = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
MARKERS = (OPEN, CLOSE, SEP, END)
MEDIA_BEGIN, MEDIA_CONTENT = "<|media_begin|>", "<|media_content|>"
MEDIA_PAD, MEDIA_END = "<|media_pad|>", "<|media_end|>"

ROLES = ("none", "system", "user", "assistant", "thinking", "tool")
"""Who speaks. `none`: text outside of a conversation, and the markup between messages."""


class Piece(NamedTuple):
    """Text that is encoded by itself."""

    text: str
    role: str = "none"
    control: bool = False
    """Whether the text is the name of one control token."""
    markup: bool = False
    """Whether the renderer put it there: control tokens, tag names and attributes."""


def element(
    name: str, attributes: dict[str, str], body: Sequence[Piece], *, end: bool = False
) -> Iterator[Piece]:
    """`<|open|>NAME key="value"<|sep|> … <|close|>NAME<|sep|>`, and `<|end_of_msg|>` if asked."""
    yield from opening(name, attributes)
    yield from body
    yield marker(CLOSE)
    yield Piece(name, markup=True)
    yield marker(SEP)
    if end:
        yield marker(END)


def opening(name: str, attributes: dict[str, str]) -> Iterator[Piece]:
    """`<|open|>NAME key="value"<|sep|>`; of the values only `&` and `"` are escaped."""
    yield marker(OPEN)
    yield Piece(name, markup=True)
    for key, value in attributes.items():
        escaped = value.replace("&", "&amp;").replace('"', "&quot;")
        for text in (f" {key}", '="', escaped, '"'):
            yield Piece(text, markup=True)
    yield marker(SEP)


def marker(name: str) -> Piece:
    """A control token."""
    return Piece(name, control=True, markup=True)
