"""Conversations: the cache never lies about what was said, whatever is stopped, undone or saved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from kimi_k3_mlx.chat import encode_chat
from kimi_k3_mlx.errors import KimiError, UsageError
from kimi_k3_mlx.runtime.cache import snapshot
from kimi_k3_mlx.runtime.chat import Chat, Settings
from kimi_k3_mlx.runtime.events import Answer, answer_of
from kimi_k3_mlx.runtime.generate import Sampling
from kimi_k3_mlx.runtime.load import Loaded, load
from kimi_k3_mlx.runtime.saved_chat import read_saved
from tests.runtime.scripted import answer, scripted

FIRST, SECOND = answer("let me see", "Hello."), answer("again", "Second.")
NO_THOUGHTS = "Hello.{/}response{>}{/}message{>}{!}"
SETTINGS = Settings(Sampling(120))
BEFORE = 2
"""How often a chat asks whether to stop before the first token of an answer, in one pass."""


@pytest.fixture(scope="module")
def build(tiny_float_source: Path) -> Loaded:
    return load(tiny_float_source)


@pytest.fixture
def new(build: Loaded, tiny_float_source: Path) -> Callable[..., Chat]:
    """A chat with a model that says these texts, or what comes to its own mind."""

    def chat(*texts: str, settings: Settings = SETTINGS) -> Chat:
        empty = Chat(build, tiny_float_source, settings)
        if not texts:
            return empty
        return Chat(scripted(build, empty.opening, *texts), tiny_float_source, settings)

    return chat


def ask(chat: Chat, text: str, *args: Any, n_tokens: int | None = None) -> Answer:
    """The answer; stopped after so many tokens."""
    asked = 0

    def stopped() -> bool:
        nonlocal asked
        asked += 1
        return n_tokens is not None and asked >= n_tokens + BEFORE

    return answer_of(chat.ask(text, *args, stopped=stopped))


def whole(chat: Chat) -> list[int]:
    """The conversation as the encoder says it."""
    values = [message.value for message in chat.messages]
    options = {"thinking": chat.settings.thinking, "effort": chat.settings.effort}
    return encode_chat(chat.build.tokenizer, values, **options, add_generation_prompt=False)


def following(chat: Chat) -> mx.array:
    """Logits after one more token, of the plain model."""
    model = getattr(chat.build.model, "real", chat.build.model)
    return model(mx.array([[5]]), snapshot(model, chat.caches))[0, -1]


def cold(chat: Chat) -> mx.array:
    """The same by one pass over what the cache should hold."""
    model = getattr(chat.build.model, "real", chat.build.model)
    return model(mx.array([[*chat.tokens(chat.keys), 5]]))[0, -1]


def near(one: mx.array, other: mx.array) -> bool:
    return bool(mx.abs(one - other).max() <= 1e-5 * mx.abs(other).max())


@pytest.mark.parametrize(("lookup", "effort"), [(False, None), (True, "low")])
def test_a_turn_computes_only_what_is_new(
    new: Callable[..., Chat], lookup: bool, effort: str | None
) -> None:
    chat = new(FIRST, SECOND, settings=replace(SETTINGS, lookup=lookup, effort=effort))
    chat.set_system("Be brief.")
    assert ask(chat, "Hi")[:2] == ("let me see", "Hello.")
    held, n_before = len(chat.keys), sum(chat.build.model.computed)
    assert ask(chat, "More <|sep|>, please")[:2] == ("again", "Second.")
    assert chat.turn is not None
    assert (chat.turn.n_cached, chat.turn.finish) == (held, "stop")
    assert chat.keys == chat.all_keys == whole(chat)
    prompt = len(chat.keys) - chat.turn.n_generated
    assert chat.turn.n_new == prompt - held
    if not lookup:  # one token more than is asked for is computed ahead, as mlx-lm does
        n_computed = sum(chat.build.model.computed) - n_before
        assert n_computed == chat.turn.n_new + chat.turn.n_generated


@pytest.mark.parametrize("lookup", [False, True])
@pytest.mark.parametrize("texts", [(), (FIRST, SECOND)])
def test_the_cache_holds_what_the_keys_say(
    new: Callable[..., Chat], lookup: bool, texts: tuple[str, ...]
) -> None:
    """Three answers that are cut off, of a script and of a model that writes anything."""
    chat = new(*texts, settings=Settings(Sampling(9), lookup=lookup))
    for text in ("Hi", "What?", "Why?"):
        ask(chat, text)
        assert chat.turn is not None
        assert chat.turn.finish == "length"
        assert near(following(chat), cold(chat))


PLACES = {
    "thoughts": 8, "tag begun": 11, "between": 17, "opening": 19, "response": 29, "closed": -2,
    "all but the end": -1,
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_stopped_anywhere_the_conversation_goes_on(new: Callable[..., Chat], place: str) -> None:
    """What was written is encoded as a whole message, and what was computed is used."""
    chat = new(FIRST, SECOND, settings=replace(SETTINGS, lookup=len(place) % 2 == 0))
    n_tokens = PLACES[place]
    n_tokens += 0 if n_tokens > 0 else len(chat.build.model.answers[0])
    ask(chat, "Hi", n_tokens=n_tokens)
    assert chat.turn is not None
    assert (chat.turn.finish, chat.turn.n_generated) == ("interrupted", n_tokens)
    assert chat.all_keys == whole(chat)
    held = chat.keys
    extends = chat.all_keys[: len(held)] == held
    assert extends or place in ("tag begun", "between", "opening", "closed")
    assert ask(chat, "More").content == "Second."
    assert chat.turn.n_cached == (len(held) if extends else 0)
    assert near(following(chat), cold(chat))


def test_stopped_before_the_answer_the_question_is_taken_back(new: Callable[..., Chat]) -> None:
    chat = new(FIRST, SECOND)
    ask(chat, "Hi")
    keys = chat.all_keys
    assert answer_of(chat.ask("No", stopped=lambda: True)).content == ""
    assert chat.turn is None
    assert chat.all_keys == keys
    assert ask(chat, "More").content == "Second."
    assert chat.turn.n_cached == len(keys), "the snapshot after the first answer"


def test_what_raises_leaves_the_conversation_as_it_was(new: Callable[..., Chat]) -> None:
    chat = new(FIRST, SECOND)
    ask(chat, "Hi")
    keys, stream = chat.all_keys, chat.ask("More")
    next(stream)
    with pytest.raises(KeyboardInterrupt):
        stream.throw(KeyboardInterrupt)
    assert chat.all_keys == keys
    with pytest.raises(KimiError, match="No such file"):
        ask(chat, "Look", [Path("/nowhere.png")])
    assert chat.all_keys == keys
    assert ask(chat, "More").content == "Second."
    assert near(following(chat), cold(chat))


def test_an_undone_question_leaves_no_trace(new: Callable[..., Chat]) -> None:
    chat = new(FIRST, SECOND)
    ask(chat, "Hi")
    n_first = len(chat.keys)
    ask(chat, "Something else")
    assert chat.undo()
    ask(chat, "More")
    assert chat.turn is not None
    assert chat.turn.n_cached == n_first
    assert chat.all_keys == chat.keys == whole(chat)
    assert near(following(chat), cold(chat))
    assert [chat.undo() for _ in range(3)] == [True, True, False]


def test_beginning_anew_keeps_the_system_prompt(new: Callable[..., Chat]) -> None:
    chat = new(FIRST, SECOND)
    chat.set_system("Be brief.")
    ask(chat, "Hi")
    chat.reset()
    assert [message.value["role"] for message in chat.messages] == ["system"]
    assert ask(chat, "Hi").content == "Hello."
    chat.set_system("")
    assert chat.messages == []
    assert ask(chat, "Hi").content == "Hello."


def test_without_thoughts(new: Callable[..., Chat]) -> None:
    chat = new(NO_THOUGHTS, NO_THOUGHTS, settings=replace(SETTINGS, thinking=False))
    assert [ask(chat, text)[:2] for text in ("Hi", "More")] == [("", "Hello.")] * 2
    assert chat.keys == chat.all_keys == whole(chat)


@pytest.mark.parametrize("end", ["{!}", "and goes on"])
def test_a_call_of_a_tool_that_nobody_offered(new: Callable[..., Chat], end: str) -> None:
    """It is shown, and the conversation goes on, whether or not the message was closed."""
    call = '{<}tools{>}{<}call tool="rm" index="1"{>}{/}call{>}{/}tools{>}{/}message{>}'
    chat = new(f"x{{/}}think{{>}}{call}{end}", SECOND)
    found = ask(chat, "Hi")
    assert [broken.reason for broken in found.broken] == ["the tool 'rm' was not offered"]
    assert ask(chat, "More").content == "Second."


def test_a_seed_is_for_the_first_answer(new: Callable[..., Chat]) -> None:
    texts = []
    for seed in (1, 1, 2):
        chat = new(settings=Settings(Sampling(8, temperature=1.0, seed=seed)))
        ask(chat, "Hi")
        texts.append(chat.keys[-8:])
        assert chat.settings.sampling.seed is None
    assert texts[0] == texts[1] != texts[2]


def test_no_speed_for_weights_that_are_not_wired(new: Callable[..., Chat]) -> None:
    chat = new(FIRST, settings=replace(SETTINGS, wire=False))
    ask(chat, "Hi")
    assert chat.turn is not None
    assert chat.turn.tokens_per_second is None


# Files.


@pytest.mark.parametrize(("lookup", "stopped"), [(False, None), (True, 4)])
def test_a_resumed_conversation_is_the_uninterrupted_one(
    new: Callable[..., Chat],
    tiny_float_source: Path,
    tmp_path: Path,
    lookup: bool,
    stopped: int | None,
) -> None:
    file, settings = tmp_path / "talk.safetensors", replace(SETTINGS, lookup=lookup)
    chat = new(FIRST, SECOND, settings=settings)
    ask(chat, "Hi", n_tokens=stopped)
    chat.save(file)
    assert [path.name for path in tmp_path.iterdir()] == ["talk.safetensors"]
    other = new(SECOND, settings=settings)
    other.resume(read_saved(file, tiny_float_source))
    held = len(chat.keys)
    for it in (chat, other):
        assert ask(it, "More").content == "Second."
        assert it.turn is not None
        assert it.turn.n_cached == held
    assert other.keys == chat.keys
    assert other.messages == chat.messages
    assert near(following(other), following(chat))


def test_resumed_without_thoughts_it_is_encoded_anew(
    new: Callable[..., Chat], tiny_float_source: Path, tmp_path: Path
) -> None:
    chat = new(FIRST)
    ask(chat, "Hi")
    chat.save(tmp_path / "talk.safetensors")
    other = new(NO_THOUGHTS, settings=replace(SETTINGS, thinking=False))
    other.resume(read_saved(tmp_path / "talk.safetensors", tiny_float_source))
    assert ask(other, "More").content == "Hello."
    assert other.turn is not None
    assert other.turn.n_cached == 0
    assert other.keys == whole(other)


def test_a_file_is_refused_before_weights_are_read(
    new: Callable[..., Chat], tiny_float_source: Path, tiny_source: Path, tmp_path: Path
) -> None:
    file = tmp_path / "talk.safetensors"
    with pytest.raises(UsageError, match="nothing has been said"):
        new().save(file)
    with pytest.raises(UsageError, match="is no file"):
        read_saved(file, tiny_float_source)
    chat = new(FIRST)
    ask(chat, "Hi")
    chat.save(file)
    with pytest.raises(UsageError, match="was saved with another build than"):
        read_saved(file, tiny_source)
    for content in (b"", b"x" * 99, file.read_bytes()[:200]):
        (tmp_path / "bad.safetensors").write_bytes(content)
        with pytest.raises(UsageError, match="is no saved conversation"):
            read_saved(tmp_path / "bad.safetensors", tiny_float_source)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"x": mx.zeros(2)})
    with pytest.raises(UsageError, match="is no saved conversation"):
        read_saved(tmp_path / "model.safetensors", tiny_float_source)
