"""Conversations: the cache never lies about what was said, whatever is stopped, undone or saved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from PIL import Image

from kimi_k3_mlx.chat import chat_pieces, encode_chat
from kimi_k3_mlx.errors import KimiError, UsageError
from kimi_k3_mlx.runtime.cache import snapshot
from kimi_k3_mlx.runtime.chat import PICTURE, Chat, Settings
from kimi_k3_mlx.runtime.events import Answer, answer_of
from kimi_k3_mlx.runtime.generate import Sampling, responses
from kimi_k3_mlx.runtime.load import Loaded, load
from kimi_k3_mlx.runtime.saved_chat import read_saved
from tests.runtime.scripted import answer, scripted

FIRST, SECOND = answer("let me see", "Hello there."), answer("again", "Second, and longer.")
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


def near(one: mx.array, other: mx.array) -> bool:
    return bool(mx.abs(one - other).max() <= 1e-5 * mx.abs(other).max())


@pytest.mark.parametrize("lookup", [False, True])
@pytest.mark.parametrize("effort", [None, "low"])
def test_a_turn_computes_only_what_is_new(
    new: Callable[..., Chat], lookup: bool, effort: str | None
) -> None:
    chat = new(FIRST, SECOND, settings=replace(SETTINGS, lookup=lookup, effort=effort))
    chat.set_system("Be brief.")
    assert ask(chat, "Hi")[:2] == ("let me see", "Hello there.")
    held, n_before = len(chat.keys), sum(chat.build.model.computed)
    assert ask(chat, "More <|sep|>, please")[:2] == ("again", "Second, and longer.")
    assert chat.turn is not None
    assert (chat.turn.n_cached, chat.turn.finish) == (held, "stop")
    assert chat.keys == chat.all_keys == whole(chat)
    prompt = len(chat.keys) - chat.turn.n_generated
    assert chat.turn.n_new == prompt - held
    if not lookup:  # one token more than is asked for is computed ahead, as mlx-lm does
        n_computed = sum(chat.build.model.computed) - n_before
        assert n_computed == chat.turn.n_new + chat.turn.n_generated


@pytest.mark.parametrize("lookup", [False, True])
def test_the_model_itself_answers_as_if_cold(
    build: Loaded, new: Callable[..., Chat], lookup: bool
) -> None:
    """Greedy tokens of the third turn, after two that were cut off."""
    chat = new(settings=Settings(Sampling(12), lookup=lookup))
    for text in ("Hi", "What?", "Why?"):
        ask(chat, text)
        assert chat.turn is not None
        assert chat.turn.finish == "length"
    prompt, written = chat.keys[:-12], chat.keys[-12:]
    cold = responses(build, prompt, Sampling(12), {})
    assert [response.token for response in cold] == written
    assert chat.turn.n_cached > 100


@pytest.mark.parametrize("lookup", [False, True])
def test_stopped_anywhere_the_conversation_goes_on(new: Callable[..., Chat], lookup: bool) -> None:
    """Within thoughts, tags and response; what was written is encoded as a whole message."""
    settings = replace(SETTINGS, lookup=lookup)
    length = new(FIRST).build.model.answers[0]
    for n_tokens in range(1, len(length)):
        chat = new(FIRST, SECOND, settings=settings)
        ask(chat, "Hi", n_tokens=n_tokens)
        assert chat.turn is not None
        assert (chat.turn.finish, chat.turn.n_generated) == ("interrupted", n_tokens)
        assert chat.all_keys == whole(chat)
        if n_tokens % 5 == 0 or n_tokens > len(length) - 4:
            held = chat.keys
            assert ask(chat, "More").content == "Second, and longer."
            extends = chat.all_keys[: len(held)] == held
            assert chat.turn.n_cached == (len(held) if extends else 0)
            cold = new(SECOND, settings=settings)
            cold.messages = chat.messages[:-2]
            ask(cold, "More")
            assert near(following(chat), following(cold))


def test_stopped_before_the_answer_the_question_is_taken_back(new: Callable[..., Chat]) -> None:
    chat = new(FIRST, SECOND)
    ask(chat, "Hi")
    keys = chat.all_keys
    assert answer_of(chat.ask("No", stopped=lambda: True)).content == ""
    assert chat.turn is None
    assert chat.all_keys == keys
    assert ask(chat, "More").content == "Second, and longer."
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
    assert ask(chat, "More").content == "Second, and longer."
    assert near(following(chat), following(told(new(FIRST, SECOND))))


def told(chat: Chat) -> Chat:
    ask(chat, "Hi")
    ask(chat, "More")
    return chat


def test_an_undone_question_leaves_no_trace(new: Callable[..., Chat]) -> None:
    chat = new(FIRST, SECOND)
    ask(chat, "Hi")
    n_first = len(chat.keys)
    ask(chat, "Something else")
    assert chat.undo()
    ask(chat, "More")
    assert chat.turn is not None
    assert chat.turn.n_cached == n_first
    assert chat.all_keys == chat.keys == told(new(FIRST, SECOND)).keys
    assert near(following(chat), following(told(new(FIRST, SECOND))))
    assert [chat.undo() for _ in range(3)] == [True, True, False]


def test_beginning_anew_keeps_the_system_prompt(new: Callable[..., Chat]) -> None:
    chat = new(FIRST, SECOND)
    chat.set_system("Be brief.")
    ask(chat, "Hi")
    chat.reset()
    assert [message.value["role"] for message in chat.messages] == ["system"]
    assert ask(chat, "Hi").content == "Hello there."
    chat.set_system("")
    assert chat.messages == []
    assert ask(chat, "Hi").content == "Hello there."


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
    assert ask(chat, "More").content == "Second, and longer."


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


@pytest.mark.parametrize("lookup", [False, True])
@pytest.mark.parametrize("stopped", [None, 4])
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
    other = new(FIRST, SECOND, settings=settings)
    other.resume(read_saved(file, tiny_float_source))
    held = len(chat.keys)
    for it in (chat, other):
        assert ask(it, "More").content == "Second, and longer."
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


# Pictures.


@pytest.fixture(scope="module")
def seeing(tiny_source: Path) -> Loaded:
    return load(tiny_source)


def picture(path: Path, seed: int) -> Path:
    pixels = np.random.default_rng(seed).integers(0, 256, (56, 84, 3), np.uint8)
    Image.fromarray(pixels).save(path)
    return path


@pytest.mark.parametrize("lookup", [False, True])
def test_a_picture_is_seen_once_and_taken_for_no_other(
    seeing: Loaded, tiny_source: Path, tmp_path: Path, lookup: bool
) -> None:
    one, other = picture(tmp_path / "a.png", 1), picture(tmp_path / "b.png", 2)
    opening = Chat(seeing, tiny_source, SETTINGS).opening
    build = scripted(seeing, opening, FIRST, SECOND)

    def chat() -> Chat:
        return Chat(build, tiny_source, replace(SETTINGS, lookup=lookup))

    first = chat()
    assert ask(first, "Look", [one]).content == "Hello there."
    assert sum(key >= PICTURE for key in first.keys) == 6
    n_pictured = len(first.keys)
    ask(first, "More")
    assert first.turn is not None
    assert first.turn.n_cached == n_pictured
    first.undo()
    first.undo()
    ask(first, "Look", [other])
    assert first.turn.n_cached < 20, "nothing of the first picture is used"
    cold = chat()
    ask(cold, "Look", [other])
    assert near(following(first), following(cold))
    assert not near(following(first), following(one_picture(chat(), one)))
    with_text = encode_chat(build.tokenizer, [{"role": "user", "content": "Look"}])
    assert len(first.keys) - 6 > len(with_text)


def one_picture(chat: Chat, path: Path) -> Chat:
    ask(chat, "Look", [path])
    return chat


def test_a_picture_in_a_resumed_conversation(
    seeing: Loaded, tiny_source: Path, tmp_path: Path
) -> None:
    """The cache knows it; the file is needed again only when the cache is not."""
    path, file = picture(tmp_path / "a.png", 1), tmp_path / "talk.safetensors"
    opening = Chat(seeing, tiny_source, SETTINGS).opening
    build = scripted(seeing, opening, FIRST, SECOND)
    chat = one_picture(Chat(build, tiny_source, SETTINGS), path)
    chat.save(file)
    other = Chat(build, tiny_source, SETTINGS)
    other.resume(read_saved(file, tiny_source))
    path.unlink()
    assert ask(other, "More").content == "Second, and longer."
    other.hold(None, [])
    other.kept.entries.clear()
    with pytest.raises(KimiError, match="No such file"):
        ask(other, "More")
    picture(path, 2)
    with pytest.raises(KimiError, match="not the picture any more that was shown"):
        ask(other, "More")
    picture(path, 1)
    ask(chat, "More")
    assert ask(other, "More").content == "Second, and longer."


def test_the_opening_is_the_generation_prompt(new: Callable[..., Chat]) -> None:
    chat = new()
    assert chat.opening == chat.encoder.encode_pieces(chat_pieces([]))
