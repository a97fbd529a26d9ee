"""The options of a request: images, tool choice, formats, efforts; and another K3 encoder's word.

mlx-vlm carries an adaptation of Moonshot's encoder: for any messages that both take, the segments
are the same. Where they differ on purpose, a test says so.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_k3_mlx.chat import Picture, PieceEncoder, chat_pieces, chat_text, encode_chat, marker_ids
from kimi_k3_mlx.chat.pieces import MARKERS, MEDIA_PAD, Piece
from kimi_k3_mlx.errors import CheckpointError, UsageError
from tests.reap.test_corpus_scripts import LikeKimis, bundled, one_byte_each

USER = [{"role": "user", "content": "x"}]


@cache
def theirs() -> Any:
    """mlx-vlm's encoder, without importing mlx-vlm, which takes seconds."""
    found = importlib.util.find_spec("mlx_vlm")
    if found is None or not found.submodule_search_locations:
        pytest.skip("mlx-vlm is not installed")
    path = f"{found.submodule_search_locations[0]}/models/kimi_k3/encoding_k3.py"
    spec = importlib.util.spec_from_file_location("their_encoding", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def segments(messages: Any, **options: Any) -> list[tuple[str, bool]]:
    """Their segments in our form."""
    if "effort" in options:
        options["thinking_effort"] = options.pop("effort")
    return [(it.text, it.allow_special) for it in theirs().build_chat_segments(messages, **options)]


TEXT = st.text(max_size=6) | st.sampled_from(["<|sep|>", '"&', "[EOS]", " ", "\n"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-1, 1) | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)
NAME = st.sampled_from(["f", "get_weather", 'a"b&c'])
ARGUMENTS = st.dictionaries(TEXT, JSON, max_size=3)
CALL = st.fixed_dictionaries(
    {
        "function": st.fixed_dictionaries(
            {
                "name": NAME,
                "arguments": ARGUMENTS | ARGUMENTS.map(json.dumps) | st.sampled_from(["{no", " "]),
            }
        )
    },
    optional={"id": st.sampled_from("abc")},
)
TOOLS = st.lists(st.fixed_dictionaries({"function": ARGUMENTS}), min_size=1, max_size=2)
PARTS = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXT}), max_size=2)
CONTENT = TEXT | PARTS | st.none()
MESSAGE = st.one_of(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system"]), "content": CONTENT}, optional={"name": NAME}
    ),
    st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": CONTENT},
        optional={
            "reasoning_content": TEXT | st.none(),
            "tool_calls": st.lists(CALL, max_size=3),
            "name": NAME,
        },
    ),
    st.fixed_dictionaries(
        {"role": st.just("tool"), "content": CONTENT, "name": NAME},
        optional={"tool_call_id": st.sampled_from("abcd")},
    ),
    st.fixed_dictionaries({"role": st.just("system"), "tools": TOOLS}),
)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "tools": TOOLS,
        "thinking": st.booleans(),
        "effort": st.sampled_from(["low", "high", "max"]),
        "tool_choice": st.sampled_from(["auto", "none", "required"]),
        "response_format": st.sampled_from(["text", "json_object"])
        | ARGUMENTS.map(lambda it: {"type": "json_schema", "json_schema": {"schema": it}}),
        "add_generation_prompt": st.booleans(),
    },
)


@settings(deadline=None)
@given(st.lists(MESSAGE, max_size=6), OPTIONS)
def test_the_same_segments_as_mlx_vlm(messages: Any, options: dict[str, Any]) -> None:
    ours = [(it.text, it.control) for it in chat_pieces(messages, **options)]
    assert ours == segments(messages, **options)


def test_a_declaration_does_not_swallow_the_text_beside_it() -> None:
    """mlx-vlm drops the content of a system message that has tools."""
    messages = [{"role": "system", "content": "Be brief.", "tools": [{"function": {}}]}]
    assert "Be brief." in chat_text(messages)
    assert "Be brief." not in "".join(text for text, _ in segments(messages))


SEE = [{"type": "text", "text": "see "}, {"type": "image_url", "image_url": {"url": "x"}}]


def test_images_with_rows() -> None:
    """As many placeholders as the image has rows; a pasted one is text."""
    messages = [{"role": "user", "content": [*SEE, {"type": "text", "text": MEDIA_PAD}]}]
    known = one_byte_each()
    ids = encode_chat(known, messages, images=[Picture(30, 45, n_tokens=3)])
    assert ids.count(known.convert_tokens_to_ids(MEDIA_PAD)) == 3
    assert "see <|media_begin|>image 30x45<|media_content|>" in known.decode(ids)


RESERVED = [
    "<|kimi_image_placeholder|>", "<|open|>", "<|sep|>", "<|media_pad|>", "<|end_of_msg|>",
    "[BOS]", "[EOS]", "[PAD]", "<|reserved_token_300|>", "<osagent_mode>",
]  # fmt: skip


@pytest.mark.parametrize("text", RESERVED)
@pytest.mark.parametrize("tokenizer", [bundled, one_byte_each, LikeKimis])
def test_reserved_strings_are_text(text: str, tokenizer: Any) -> None:
    """With an image in the request as well: the placeholder's name asks for none."""
    messages = [{"role": "user", "content": [{"type": "text", "text": text}, SEE[1]]}]
    known = tokenizer()
    ids = encode_chat(known, messages, images=[Picture(2, 2)])
    plain = encode_chat(known, [{"role": "user", "content": [SEE[1]]}], images=[Picture(2, 2)])
    controls = set(known.added_tokens_decoder)
    kept = [token for token in ids if token in controls]
    assert kept == [token for token in plain if token in controls]
    if tokenizer is not LikeKimis:
        assert text in known.decode(ids)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"effort": "medium"}, "effort of 'medium' is none of low, high, max"),
        ({"tool_choice": {"type": "function"}}, "the tool choice {'type': 'function'} is none"),
        ({"tool_choice": "any"}, "the tool choice 'any' is none of auto, required and none"),
        ({"response_format": "xml"}, "the response format 'xml' is none of"),
        ({"response_format": {"type": "grammar"}}, "the response format 'grammar' is none of"),
        ({"response_format": {"type": "json_schema"}}, "json_schema has no schema"),
        ({"response_format": "json_schema"}, "json_schema has no schema"),
        ({"tools": ["f"]}, "`tools` is no list of objects"),
        ({"tools": {"f": 1}}, "`tools` is no list of objects"),
        ({"images": [Picture(1, 1)]}, "there are 1 images, but only 0 in messages"),
    ],
)
def test_options_that_mean_nothing(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=re.escape(says)):
        chat_pieces(USER, **options)


def test_more_image_parts_than_images() -> None:
    messages = [*USER, {"role": "user", "content": [*SEE, SEE[1]]}]
    with pytest.raises(UsageError, match=r"messages\[1\]: its 'image_url' is one more than the 1"):
        chat_pieces(messages, images=[Picture(1, 1)])


@pytest.mark.parametrize("messages", [None, "hi", {"role": "user"}])
def test_messages_that_are_no_list(messages: Any) -> None:
    with pytest.raises(UsageError, match="no list"):
        chat_pieces(messages)


def test_a_result_names_its_own_message() -> None:
    """Results are rendered late and in another order: the index is still that of the message."""
    call = {"id": "a", "function": {"name": "f"}}
    messages = [
        {"role": "assistant", "tool_calls": [call, {**call, "id": "b"}]},
        {"role": "tool", "tool_call_id": "b", "content": 5},
        {"role": "tool", "tool_call_id": "a", "content": "ok"},
    ]
    with pytest.raises(UsageError, match=r"messages\[1\]: `content` is a int"):
        chat_pieces(messages)


def test_a_result_without_an_id_does_not_answer_a_call_without_one() -> None:
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("one", "two")]
    messages = [
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "seen", "name": "two"},
    ]
    assert 'message role="tool" tool="two"' in chat_text(messages)


def test_names_of_clients_do_not_pile_up() -> None:
    """A server kept the ids of every tool's name and argument that it had ever seen."""
    encoder = PieceEncoder(one_byte_each())
    for name in (*map(str, range(3000)), "x" * 10_000):
        assert encoder.ids(Piece(name, markup=True)) == encoder.ids(Piece(name))
    assert len(encoder.words) < 2000
    assert max(map(len, encoder.words)) < 100


def test_marker_ids() -> None:
    known = bundled()
    assert marker_ids(known) == {known.convert_tokens_to_ids(name): name for name in MARKERS}


class Credulous(LikeKimis):
    """A tokenizer that takes pasted control tokens for real ones."""

    def encode(self, text: str, allow_special_tokens: bool = True) -> list[int]:
        return super().encode(text, allow_special_tokens=True)


def test_a_credulous_tokenizer_is_refused() -> None:
    with pytest.raises(CheckpointError, match="pasted markup could forge messages"):
        encode_chat(Credulous(), USER)


def test_a_tokenizer_without_markers_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"no token <\|nothing\|>: it is not Kimi K3's"):
        PieceEncoder(bundled()).control("<|nothing|>")
