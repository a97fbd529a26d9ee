"""Says in OpenAI's words what came out of the model.

Input: `Asked`, then mlx-lm's `Response`s. Output: JSON objects: pieces of the answer, the same
whether they are streamed or joined to a message. Nothing here knows HTTP or a model.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kimi_k3_mlx.runtime.events import BrokenCall, Content, Event, Reasoning, ToolCall
from kimi_k3_mlx.runtime.parser import Parser
from kimi_k3_mlx.runtime.server.request import Asked
from kimi_k3_mlx.schema import Json

MOST_AFTER = 32
"""Tokens that may follow the last call or word: the message's close and end, and some patience.
Prompt caches need the end; a model that goes on has lost the format."""


class StopWords:
    """Lets text through until one of the words; what may become one is held back."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = words
        self.held = ""
        self.hit = False

    def feed(self, text: str) -> str:
        """The text that is safe to show."""
        if self.hit or not self.words:
            return "" if self.hit else text
        text, self.held = self.held + text, ""
        places = [place for word in self.words if (place := text.find(word)) >= 0]
        if places:
            self.hit = True
            return text[: min(places)]
        n = max(overlap(text, word) for word in self.words)
        self.held = text[len(text) - n :]
        return text[: len(text) - n]

    def flush(self) -> str:
        """What was held back; nothing follows that could make it a word."""
        text, self.held = self.held, ""
        return text


def overlap(text: str, word: str) -> int:
    """How many letters at the end of a text begin a word."""
    longest = min(len(text), len(word) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(word[:n])), 0)


@dataclass
class Usage:
    """Numbers of tokens."""

    prompt: int
    cached: int = 0
    completion: int = 0
    reasoning: int = 0

    def to_json(self) -> Json:
        """OpenAI's object."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        }


@dataclass
class Reply:
    """The answer while it comes. `pieces` are deltas as a stream shows them."""

    asked: Asked
    usage: Usage
    markers: Mapping[int, str]
    spell: Callable[[int], str]
    """The text of one token, for logprobs."""
    finish_reason: str | None = None
    n_calls: int = 0
    n_after: int = 0
    """Tokens after the end of the message."""
    logprobs: list[Json] = field(default_factory=list)
    """Of content that no piece has shown yet."""

    def __post_init__(self) -> None:
        asked = self.asked
        self.stop = StopWords(asked.stop)
        self.parser: Parser | None = None
        if asked.messages is not None:
            self.parser = Parser(thinking=asked.thinking, tools=asked.offered, markers=self.markers)

    def feed(self, response: Any) -> list[Json]:
        """The pieces of one token. `finish_reason` is set when it was the last."""
        self.usage.completion += 1
        self.usage.reasoning += self.place == "think"
        self.n_after += self.place == "done"
        if self.asked.logprobs and self.place == "response" and response.token not in self.markers:
            self.logprobs.append(self.scored(response))
        pieces = list(self.pieces(self.events(response)))
        if response.finish_reason is not None:
            pieces += self.finish(response.finish_reason)
        elif self.stop.hit or self.n_after > MOST_AFTER:
            pieces += self.finish("stop")
        return pieces

    @property
    def place(self) -> str:
        """In which element of K3's format the model writes."""
        return "response" if self.parser is None else self.parser.place

    def events(self, response: Any) -> Iterable[Event]:
        """What a token means."""
        if self.parser is None:
            return [Content(response.text)]
        return self.parser.feed(response.text, response.token)

    def finish(self, reason: str) -> Iterator[Json]:
        """The last pieces."""
        if self.parser is not None:
            yield from self.pieces(self.parser.finish())
        if text := self.stop.flush():
            yield {"content": text}
        calls = self.n_calls and reason == "stop" and not self.stop.hit
        self.finish_reason = "tool_calls" if calls else reason

    def pieces(self, events: Iterable[Event]) -> Iterator[Json]:
        """Deltas of events; nothing comes after a stop word."""
        for event in events:
            if isinstance(event, Content):
                if text := self.stop.feed(event.text):
                    yield {"content": text}
                continue
            if text := self.stop.flush():
                yield {"content": text}
            if self.stop.hit:
                continue
            if isinstance(event, Reasoning):
                yield {"reasoning_content": event.text}
            elif isinstance(event, ToolCall):
                self.n_calls += 1
                yield {"tool_calls": [call_piece(event)]}
            else:
                yield broken_piece(event)

    def scored(self, response: Any) -> Json:
        """The logprob of a token of the content."""
        top = [self.score(it["id"], it["logprob"]) for it in response.top_tokens]
        return self.score(response.token, response.logprob) | {"top_logprobs": top}

    def score(self, token: int, logprob: float) -> Json:
        """A token and its logprob; a part of a character has no text, so its bytes are unknown."""
        text = self.spell(token)
        octets = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": octets}

    def take_logprobs(self) -> Json | None:
        """The logprobs that were not shown yet."""
        taken, self.logprobs = self.logprobs, []
        return {"content": taken, "refusal": None} if taken else None


def call_piece(call: ToolCall) -> Json:
    """A call, which is always whole."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.number, "id": call.id, "type": "function", "function": function}


def broken_piece(call: BrokenCall) -> Json:
    """A call that can't be made, in a field that is not OpenAI's: it must not get lost."""
    logging.warning("the model wrote a call that can't be made: %s", call.reason)
    return {"broken_tool_calls": [{"text": call.text, "reason": call.reason}]}


def joined(pieces: Iterable[Json]) -> Json:
    """The message that pieces add up to."""
    message: Json = {"role": "assistant", "content": None}
    for piece in pieces:
        for key, value in piece.items():
            message[key] = value if message.get(key) is None else message[key] + value
    for call in message.get("tool_calls", ()):
        del call["index"]
    return message


class Envelope:
    """What is around all parts of one answer."""

    def __init__(self, asked: Asked, model: str, fingerprint: str) -> None:
        self.asked, self.is_chat = asked, asked.messages is not None
        prefix = "chatcmpl" if self.is_chat else "cmpl"
        self.outer: Json = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    def whole(self, pieces: Iterable[Json], reply: Reply) -> Json:
        """The answer at once."""
        message = joined(pieces)
        inner = {"message": message} if self.is_chat else {"text": message["content"] or ""}
        choice = inner | {
            "index": 0,
            "finish_reason": reply.finish_reason,
            "logprobs": reply.take_logprobs(),
        }
        kind = "chat.completion" if self.is_chat else "text_completion"
        return {**self.outer, "object": kind, "choices": [choice], "usage": reply.usage.to_json()}

    def chunk(self, piece: Json, logprobs: Json | None = None, reason: str | None = None) -> Json:
        """A part of a stream."""
        inner = {"delta": piece} if self.is_chat else {"text": piece.get("content", "")}
        choice = inner | {"index": 0, "finish_reason": reason, "logprobs": logprobs}
        return self.part([choice], None)

    def part(self, choices: list[Json], usage: Usage | None) -> Json:
        """A part of a stream with these choices; with `include_usage`, each has a `usage`."""
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        part = {**self.outer, "object": kind, "choices": choices}
        if self.asked.include_usage:
            part["usage"] = usage and usage.to_json()
        return part
