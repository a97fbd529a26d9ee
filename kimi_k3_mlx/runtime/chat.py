"""A conversation with a build that keeps its cache: a turn computes only what is new.

Input: a loaded build, what the user says, pictures. Output: the events of an answer as they come;
a file from which the same build goes on. The conversation is known by keys, one a token: the ids
that were computed or written, and in a picture's rows words of its hash, so that two pictures are
never taken for each other. What the cache holds is compared with them; where it differs (after
`undo`, say), the longest prefix that was kept is the next place to go on from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
import numpy as np

from kimi_k3_mlx.chat import Picture, PieceEncoder, chat_pieces, marker_ids
from kimi_k3_mlx.chat.pieces import (
    CLOSE,
    END,
    MARKERS,
    MEDIA_PAD,
    OPEN,
    SEP,
    Piece,
    marker,
)  # fmt: skip
from kimi_k3_mlx.errors import KimiError, UsageError
from kimi_k3_mlx.runtime.cache import rewindable, snapshot
from kimi_k3_mlx.runtime.events import Event, answer_of
from kimi_k3_mlx.runtime.generate import Decoding, Sampling, responses
from kimi_k3_mlx.runtime.load import Loaded
from kimi_k3_mlx.runtime.lookup import Lookahead
from kimi_k3_mlx.runtime.parser import Parser
from kimi_k3_mlx.runtime.saved_chat import Message, Saved, write_saved
from kimi_k3_mlx.runtime.snapshots import Bounds, Snapshots, fingerprint
from kimi_k3_mlx.runtime.vision import Eyes, Prompt, embed, load_vision
from kimi_k3_mlx.runtime.wiring import weights_are_wired
from kimi_k3_mlx.schema import Json
from kimi_k3_mlx.vision.images import open_image

if TYPE_CHECKING:
    from PIL.Image import Image

KEPT = Bounds(4 << 30, 4)
"""Snapshots after the last answers, for `undo`: of K3, 434 MB each and 27,648 bytes a token."""
PICTURE = 1 << 31
"""Keys from here on are rows of pictures; token ids are smaller."""

END_OF_MESSAGE = (CLOSE, "message", SEP, END)
END_OF_RESPONSE = (CLOSE, "response", SEP, *END_OF_MESSAGE)
ENDS = {
    "response": END_OF_RESPONSE,
    "think": (CLOSE, "think", SEP, OPEN, "response", SEP, *END_OF_RESPONSE),
}
"""What an answer lacks that was stopped in one of these places."""


@dataclass(frozen=True)
class Settings:
    """How to talk. `thinking` and `effort` are those of `chat.chat_pieces`."""

    sampling: Sampling
    thinking: bool = True
    effort: str | None = None
    lookup: bool = False
    wire: bool = True


class Turn(NamedTuple):
    """What an answer cost."""

    n_cached: int
    """Tokens of the prompt that the cache held already."""
    n_new: int
    """Tokens of the prompt that were computed."""
    n_generated: int
    finish: str
    """`stop`, `length` or `interrupted`."""
    tokens_per_second: float | None
    """Known only when the weights were wired."""


class Stopped(Exception):
    """The user wants no answer any more; the prompt is not computed to its end."""


class Chat:
    """A conversation. `folder` is the build's: pictures need its tower, files its fingerprint."""

    def __init__(self, build: Loaded, folder: Path, settings: Settings) -> None:
        self.build, self.folder, self.settings = build, folder, settings
        self.encoder = PieceEncoder(build.tokenizer)
        self.markers = marker_ids(build.tokenizer)
        self.wired = settings.wire and weights_are_wired(build.model)
        self.head = self.ids([], effort=settings.effort, add_generation_prompt=False)
        self.opening = self.ids([])
        self.kept = Snapshots(build.model, fingerprint(folder), KEPT)
        self.messages: list[Message] = []
        self.turn: Turn | None = None
        """The last answer's; None while there is none, or it was not completed."""
        self.hold(None, [])

    @cached_property
    def eyes(self) -> Eyes:
        """The build's vision; raises CheckpointError if it has none."""
        return load_vision(self.folder)

    @property
    def can_see(self) -> bool:
        """Whether the build has vision."""
        return bool(self.build.config.get("vision_config"))

    @property
    def all_keys(self) -> list[int]:
        """The keys of the conversation, without a generation prompt."""
        return [*self.head, *chain.from_iterable(message.keys for message in self.messages)]

    def hold(self, caches: list[Any] | None, keys: Sequence[int]) -> None:
        """Go on with caches that hold these keys; without, from the beginning."""
        self.caches = self.build.model.make_cache() if caches is None else caches
        self.keys = list(keys)
        self.model = self.build.model
        if self.settings.lookup:
            self.caches = rewindable(self.caches)
            self.model = Lookahead(self.build.model, tokens=self.tokens(self.keys))

    def tokens(self, keys: Sequence[int]) -> list[int]:
        """The ids for the model: a picture's rows are placeholders."""
        return [self.eyes.placeholder if key >= PICTURE else key for key in keys]

    def ids(self, messages: Sequence[Json], **options: Any) -> list[int]:
        """The ids of messages, and of the generation prompt unless told otherwise."""
        pieces = chat_pieces(messages, thinking=self.settings.thinking, **options)
        return self.encoder.encode_pieces(pieces)

    def message(self, value: Json) -> Message:
        """A message with its keys; raises KimiError for a picture that can't be seen."""
        images = [open_image(name) for name in picture_names(value)]
        sizes = [self.eyes.rules.n_tokens(*image.size) for image in images]
        pictures = [Picture(*image.size, n) for image, n in zip(images, sizes, strict=True)]
        keys = self.ids([value], images=pictures, add_generation_prompt=False)
        if images:
            rows = chain.from_iterable(map(picture_keys, images, sizes))
            pad = self.encoder.control(MEDIA_PAD)
            keys = [next(rows) if key == pad else key for key in keys]
        return Message(value, keys)

    def set_system(self, text: str) -> None:
        """Begin anew, with a system prompt unless it is empty."""
        system = [self.message({"role": "system", "content": text})] if text else []
        self.messages = system
        self.turn = None

    def reset(self) -> None:
        """Begin anew; the system prompt stays."""
        self.messages = [m for m in self.messages[:1] if m.value["role"] == "system"]
        self.turn = None

    def undo(self) -> bool:
        """Take back the last question and its answer; False if there is none."""
        if not self.messages or self.messages[-1].value["role"] != "assistant":
            return False
        del self.messages[-2:]
        self.turn = None
        return True

    def ask(
        self,
        text: str,
        images: Sequence[Path] = (),
        stopped: Callable[[], bool] = bool,
        on_prefill: Callable[[int, int], object] = max,
    ) -> Generator[Event, None, None]:
        """The events of the answer. When `stopped` says so, it ends where it is, and stays.

        Before the first token, or when anything raises, there is no answer: the question is taken
        back and `turn` is None. `on_prefill` gets tokens computed and to compute.
        """
        content: Any = [{"type": "image", "image": str(path.resolve())} for path in images]
        content = [*content, {"type": "text", "text": text}] if images else text
        question = self.message({"role": "user", "content": content})
        n_before, self.turn = len(self.messages), None
        self.messages.append(question)
        try:
            yield from self.answer(stopped, on_prefill)
        except Stopped:
            pass
        finally:
            if self.turn is None:
                del self.messages[n_before:]
                self.hold(None, [])

    def answer(
        self, stopped: Callable[[], bool], on_prefill: Callable[[int, int], object]
    ) -> Iterator[Event]:
        """Generate, then note what the cache holds and how the conversation goes on."""

        def watch(done: int, total: int) -> None:
            if done < total and stopped():
                raise Stopped
            on_prefill(done, total)

        prompt = [*self.all_keys, *self.opening]
        n_cached = self.rewind(prompt)
        new = self.uncached(prompt, n_cached)
        options = {
            "prompt_cache": self.caches,
            "prompt_progress_callback": watch,
            "prefill_step_size": Decoding.prefill_step_size,
        }
        parser = Parser(thinking=self.settings.thinking, tools=[], markers=self.markers)
        events: list[Event] = []
        written: list[int] = []
        build = self.build._replace(model=self.model)
        with closing(responses(build, new, self.settings.sampling, options)) as stream:
            for response in stream:
                over = parser.done
                written.append(response.token)
                found = parser.feed(response.text, response.token)
                events += found
                yield from found
                # Not every checkpoint names the end of a message among its end tokens.
                ended = over or self.markers.get(response.token) == END
                if ended or stopped():
                    break
        rest = parser.finish()
        yield from rest
        if isinstance(self.model, Lookahead):
            self.model.settle(self.caches)
        self.keys = [*prompt, *written]
        self.kept.put(self.keys, self.caches)
        self.messages.append(self.answered([*events, *rest], written, parser))
        # A seed is for the first answer: the next one would draw the same numbers.
        self.settings = replace(self.settings, sampling=replace(self.settings.sampling, seed=None))
        self.turn = Turn(
            n_cached,
            len(prompt) - n_cached,
            len(written),
            "stop" if ended else response.finish_reason or "interrupted",
            response.generation_tps if self.wired else None,
        )

    def rewind(self, prompt: list[int]) -> int:
        """Make the caches hold a prefix of the prompt, as long as can be; return its length."""
        n = len(self.keys)
        if not 0 < n < len(prompt) or prompt[:n] != self.keys:
            caches, n = self.kept.nearest(prompt)
            self.hold(caches, prompt[:n])
        return n

    def uncached(self, prompt: list[int], n_cached: int) -> list[int] | Prompt:
        """What is to be computed: ids, or with pictures among them embeddings."""
        ids = self.tokens(prompt[n_cached:])
        if not any(key >= PICTURE for key in prompt[n_cached:]):
            return ids
        ends = accumulate((len(it.keys) for it in self.messages), initial=len(self.head))
        next(ends)
        new = [it for it, end in zip(self.messages, ends, strict=True) if end > n_cached]
        for message in new:
            if picture_names(message.value) and self.message(message.value) != message:
                names = ", ".join(picture_names(message.value))
                raise KimiError(f"not the picture any more that was shown: {names}.")
        images = [open_image(name) for it in new for name in picture_names(it.value)]
        return embed(self.build.model, self.eyes, ids, images)

    def answered(self, events: list[Event], written: list[int], parser: Parser) -> Message:
        """The answer as a message. Its keys are what the model wrote, and what it lacks at its end.

        Encoding the text again might give other ids than the cache holds; that is done only where
        nothing else can be: for an answer that ends within a tag or a call, or in another token.
        """
        answer = answer_of(events)
        value: Json = {"role": "assistant", "content": answer.content}
        if self.settings.thinking:
            value["reasoning_content"] = answer.reasoning
        if self.markers.get(written[-1]) == END:
            return Message(value, [*self.opening, *written])
        ended = written[-1] in self.build.tokenizer.eos_token_ids
        if ended or parser.tag or parser.place not in ENDS:
            return self.message(value)
        words = ENDS[parser.place]
        pieces = (marker(it) if it in MARKERS else Piece(it, markup=True) for it in words)
        return Message(value, [*self.opening, *written, *self.encoder.encode_pieces(pieces)])

    def saved(self) -> Saved:
        """What a file needs to hold; raises UsageError if nothing was said."""
        if not self.messages:
            raise UsageError("nothing has been said yet.")
        self.rewind([*self.all_keys, *self.opening])
        caches = snapshot(self.build.model, self.caches)
        settings = self.settings
        return Saved(self.messages, settings.thinking, settings.effort, self.keys, caches)

    def save(self, path: Path) -> None:
        """Write the conversation into a file."""
        write_saved(path, self.saved(), self.kept.fingerprint)

    def resume(self, saved: Saved) -> None:
        """Go on where a conversation was saved. If one of the two thinks and the other doesn't,
        messages are encoded anew. Raises UsageError for a file that was cut off."""
        try:
            mx.eval([cache.state for cache in saved.caches])
        except RuntimeError as error:
            raise UsageError(f"the saved conversation is damaged: {error}.") from error
        self.messages = list(saved.messages)
        if saved.thinking != self.settings.thinking:
            self.messages = [self.message(message.value) for message in saved.messages]
        self.turn = None
        self.hold(saved.caches, saved.keys)


def picture_names(value: Json) -> list[str]:
    """The files of a message's pictures."""
    parts = value["content"] if isinstance(value["content"], list) else []
    return [part["image"] for part in parts if part["type"] == "image"]


def picture_keys(image: Image, n_rows: int) -> list[int]:
    """Keys that stand for a picture's rows and for no other's: words of its SHA-256."""
    digest = hashlib.sha256(f"{image.mode} {image.size}".encode() + image.tobytes()).digest()
    words = (np.frombuffer(digest, "<u4") | np.uint32(PICTURE)).tolist()
    return [words[row % len(words)] for row in range(n_rows)]
