"""What the server says: stop words for every cut, prompts' places worth keeping."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kimi_k3_mlx.chat import chat_pieces
from kimi_k3_mlx.chat.pieces import END
from kimi_k3_mlx.runtime.server.prompt import lasting
from kimi_k3_mlx.runtime.server.reply import StopWords, joined
from tests.runtime.serving import call, tool

LETTERS = st.text("ab", max_size=12)
WORDS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


@given(st.lists(LETTERS, max_size=6), WORDS)
def test_stop_words_are_found_however_the_text_is_cut(parts: list[str], words: list[str]) -> None:
    """The slow twin looks through the whole text after every letter."""
    text, shown = "".join(parts), ""
    stop = StopWords(words)
    for part in parts:
        shown += stop.feed(part)
    shown += stop.flush()
    ends = [n for n in range(len(text) + 1) if any(w in text[:n] for w in words)]
    assert stop.hit is bool(ends)
    if not ends:
        assert shown == text
    else:
        assert not any(word in shown for word in words)
        first = min(text.find(word) for word in words if word in text)
        assert shown == text[: len(shown)]
        assert len(shown) >= first


def test_pieces_add_up_to_a_message() -> None:
    one, two = ({"index": i, "id": str(i)} for i in range(2))
    pieces = [
        {"reasoning_content": "a"}, {"reasoning_content": "b"}, {"content": "c"},
        {"tool_calls": [one]}, {"tool_calls": [two]},
    ]  # fmt: skip
    assert joined(pieces) == {
        "role": "assistant",
        "reasoning_content": "ab",
        "content": "c",
        "tool_calls": [{"id": "0"}, {"id": "1"}],
    }
    assert joined([]) == {"role": "assistant", "content": None}


def test_prompts_are_kept_where_other_requests_begin() -> None:
    """After tools, effort and system prompt; and before what only this request says."""
    user, system = {"role": "user", "content": "x"}, {"role": "system", "content": "s"}
    answer = {"role": "assistant", "content": "", "tool_calls": [call("f") | {"id": "1"}]}
    result = {"role": "tool", "tool_call_id": "1", "content": "5"}
    for messages, options, expected in [
        ([user], {}, [0]),
        ([system, user], {}, [0, 1]),
        ([system, user, answer, result], {}, [0, 3]),
        ([system, user], {"tools": [tool("f")], "effort": "low", "tool_choice": "none"}, [2, 3]),
        ([system, user, system], {"response_format": {"type": "json_object"}}, [0, 1]),
        ([system], {}, [0]),
    ]:
        pieces = chat_pieces(messages, **options)
        assert lasting(pieces) == expected
        assert max(expected) < sum(piece.control and piece.text == END for piece in pieces)
