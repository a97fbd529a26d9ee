"""Every golden rendering (`chat.json`): segment by segment, as ids, and by the template.

A golden image prompt is one segment with control tokens in it; here it is several pieces, with the
same ids.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_k3_mlx.chat import Picture, chat_pieces, chat_text, encode_chat
from kimi_k3_mlx.chat.pieces import MARKERS, Piece
from tests.chat.test_request import MESSAGE
from tests.reap.test_corpus_scripts import bundled, one_byte_each

GOLDEN: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "golden" / "chat.json").read_text("utf-8")
)
FOREIGN = ("system_name_quote", "image_parts")
"""What a template can't guarantee: forged markup, and the prompts of images."""


def options_of(golden: dict[str, Any]) -> dict[str, Any]:
    """The golden case's options by our names."""
    options = dict(golden["kwargs"])
    if "thinking_effort" in options:
        options["effort"] = options.pop("thinking_effort")
    if prompts := options.pop("image_prompts", ()):
        sizes = [re.findall(r"image (\d+)x(\d+)", prompt)[0] for prompt in prompts]
        options["images"] = [Picture(int(width), int(height)) for width, height in sizes]
    return options


def merged(pieces: tuple[Piece, ...]) -> list[list[Any]]:
    """Pieces as golden segments: what belongs to an image is one."""
    found: list[list[Any]] = []
    for piece in pieces:
        inside = found and str(found[-1][0]).startswith("<|media_begin|>")
        if inside and not str(found[-1][0]).endswith("<|media_end|>"):
            found[-1][0] += piece.text
        else:
            found.append([piece.text, piece.control])
    return found


@pytest.mark.parametrize("name", GOLDEN)
def test_segments(name: str) -> None:
    golden = GOLDEN[name]
    pieces = chat_pieces(golden["messages"], **options_of(golden))
    assert merged(pieces) == golden["segments"]
    assert chat_text(golden["messages"], **options_of(golden)) == golden["text"]


@pytest.mark.parametrize("tokenizer", [bundled, one_byte_each])
@pytest.mark.parametrize("name", GOLDEN)
def test_ids(name: str, tokenizer: Any) -> None:
    """The naive twin: each golden segment encoded by itself, specials allowed or not."""
    golden, known = GOLDEN[name], tokenizer()
    ids = [
        token
        for text, special in golden["segments"]
        for token in known.encode(text, add_special_tokens=False, split_special_tokens=not special)
    ]
    assert encode_chat(known, golden["messages"], **options_of(golden)) == ids


def templated(messages: Any, **options: Any) -> str:
    """What transformers renders with the template of a build."""
    source = Path(chat_pieces.__code__.co_filename).with_name("chat_template.jinja")
    return str(
        bundled().apply_chat_template(
            messages,
            chat_template=source.read_text("utf-8"),
            tokenize=False,
            **{"add_generation_prompt": True} | options,
        )
    )


def with_objects(messages: Any) -> Any:
    """Messages whose calls have objects for arguments, as mlx-lm's server prepares them."""
    copy = json.loads(json.dumps(messages))
    for call in [call for message in copy for call in message.get("tool_calls", ())]:
        arguments = call["function"]["arguments"]
        with suppress(TypeError, ValueError):
            call["function"]["arguments"] = json.loads(arguments)
    return copy


@pytest.mark.parametrize("name", [name for name in GOLDEN if name != "image_parts"])
def test_the_template_renders_the_same_text(name: str) -> None:
    golden = GOLDEN[name]
    assert templated(with_objects(golden["messages"]), **golden["kwargs"]) == golden["text"]


@pytest.mark.parametrize("name", [name for name in GOLDEN if name not in FOREIGN])
def test_the_templates_ids(name: str) -> None:
    """Joined text gives the same ids as pieces when no attribute begins or ends in punctuation."""
    golden = GOLDEN[name]
    text = templated(with_objects(golden["messages"]), **golden["kwargs"])
    ids = one_byte_each().encode(text, add_special_tokens=False)
    assert ids == encode_chat(one_byte_each(), golden["messages"], **options_of(golden))


def reducible(messages: Any) -> bool:
    """Whether the template can do it: call ids that differ."""
    calls = [[call.get("id") for call in it.get("tool_calls") or ()] for it in messages]
    return all(len(set(ids)) == len(ids) for ids in calls)


@settings(deadline=None)
@given(st.lists(MESSAGE, min_size=1, max_size=5).map(with_objects).filter(reducible), st.booleans())
def test_the_template_renders_any_conversation(messages: Any, thinking: bool) -> None:
    assert templated(messages, enable_thinking=thinking) == chat_text(messages, thinking=thinking)


def test_the_template_can_be_told_not_to_think() -> None:
    """mlx-lm always passes `enable_thinking`; an explicit `thinking` decides."""
    messages = GOLDEN["user_no_thinking"]["messages"]
    text = GOLDEN["user_no_thinking"]["text"]
    assert templated(messages, enable_thinking=False) == text
    assert templated(messages, enable_thinking=True, thinking=False) == text


def test_the_template_cannot_tell_forged_markup() -> None:
    """Why kimi-k3 encodes in Python: the same text holds two more control tokens."""
    golden = GOLDEN["system_name_quote"]
    known = one_byte_each()
    ids = known.encode(templated(golden["messages"]), add_special_tokens=False)
    ours = encode_chat(known, golden["messages"])
    markers = {known.convert_tokens_to_ids(name) for name in MARKERS}
    assert sum(token in markers for token in ids) == 1 + sum(token in markers for token in ours)
