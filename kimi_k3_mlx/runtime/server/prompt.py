"""Makes the prompt of a request: token ids, the places worth keeping, the pictures.

Input: `Asked`. Output: `Prompt`, or RequestError. Every message is encoded piece by piece, so that
no text of a client becomes a control token. Runs in the threads of clients, with a tokenizer of
its own: the one that generates must not be used by two threads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from kimi_k3_mlx.chat import Picture, Piece, PieceEncoder, chat_pieces
from kimi_k3_mlx.chat.pieces import END
from kimi_k3_mlx.errors import KimiError, UsageError
from kimi_k3_mlx.runtime.server.request import Asked, RequestError
from kimi_k3_mlx.vision.images import open_image

if TYPE_CHECKING:
    from PIL.Image import Image

    from kimi_k3_mlx.runtime.vision import Eyes

NO_EYES = "images are not served by this build"
ASIDE = ("none", "system")


@dataclass(frozen=True)
class Prompt:
    """What the model is given."""

    ids: list[int]
    key: list[int]
    """The ids, with numbers made of the picture where it stands: two pictures are two prompts."""
    marks: list[int]
    """How many tokens end with a message that other requests will begin with, too."""
    pictures: list[tuple[int, Image]]
    """Pictures, and the index of the first token of each."""


class Prompter:
    """A tokenizer for requests."""

    def __init__(self, tokenizer: Any, eyes: Eyes | None) -> None:
        self.encoder = PieceEncoder(tokenizer)
        self.end = self.encoder.control(END)
        self.eyes = eyes
        self.lock = Lock()

    def prompt(self, asked: Asked) -> Prompt:
        """The prompt of a request; raises RequestError for what K3 can't be told."""
        try:
            if asked.messages is None:
                ids = self.encode([Piece(asked.prompt, "user")])
                return Prompt(ids, ids, [], [])
            return self.conversation(asked, asked.messages)
        except UsageError as error:
            raise RequestError(f"{error.message} {error.hint}".strip(), "messages") from error

    def conversation(self, asked: Asked, messages: Sequence[Any]) -> Prompt:
        """The prompt of a chat."""
        images = [self.open(url) for url in image_urls(messages)]
        pieces = chat_pieces(
            messages,
            tools=asked.tools,
            thinking=asked.thinking,
            effort=asked.effort,
            tool_choice=asked.tool_choice,
            response_format=asked.response_format,
            images=[Picture(*image.size) for image in images],
        )
        ids = self.encode(pieces)
        if self.eyes is not None and images:
            ids = self.eyes.expanded(ids, images)
        ends = [i + 1 for i, token in enumerate(ids) if token == self.end]
        marks = [ends[n] for n in lasting(pieces)]
        starts = self.starts(ids) if images else []
        key = self.key(ids, starts, images)
        return Prompt(ids, key, marks, list(zip(starts, images, strict=True)))

    def encode(self, pieces: Iterable[Piece]) -> list[int]:
        """Token ids; one request at a time."""
        with self.lock:
            return self.encoder.encode_pieces(pieces)

    def spell(self, token: int) -> str:
        """The text of a token."""
        with self.lock:
            return str(self.encoder.tokenizer.decode([token]))

    def open(self, url: Any) -> Image:
        """The picture of an image part."""
        if self.eyes is None:
            raise RequestError(f"{NO_EYES}.", "messages", code="images_not_served")
        if not isinstance(url, str) or not url.lower().startswith("data:"):
            raise RequestError(
                "an image must be a data: URL with base64; addresses are not fetched.", "messages"
            )
        try:
            return open_image(url)
        except KimiError as error:
            raise RequestError(f"{error.message} {error.hint}".strip(), "messages") from error

    def starts(self, ids: Sequence[int]) -> list[int]:
        """Where pictures begin: something always stands between two."""
        place = None if self.eyes is None else self.eyes.placeholder
        return [i for i, t in enumerate(ids) if t == place and (i == 0 or ids[i - 1] != place)]

    def key(self, ids: list[int], starts: Sequence[int], images: Sequence[Image]) -> list[int]:
        """The ids, with a picture's hash, again and again, in the place of its tokens."""
        key = list(ids)
        for start, image in zip(starts, images, strict=True):
            digest = hashlib.sha256(repr((image.size, image.mode)).encode() + image.tobytes())
            words = np.frombuffer(digest.digest(), "<u4").tolist()
            i = start
            while i < len(ids) and ids[i] == ids[start]:
                key[i] = words[(i - start) % len(words)]
                i += 1
        return key


def image_urls(messages: Sequence[Any]) -> Iterator[Any]:
    """The addresses of image parts, in order."""
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else []:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind in ("image_url", "image"):
                url = part.get("image_url", part.get("image"))
                yield url.get("url") if isinstance(url, dict) else url


def lasting(pieces: Iterable[Piece]) -> list[int]:
    """Which messages, by number, end a part that other requests share.

    The last before anybody but the system speaks: tools and system prompt. And the last of the
    conversation, since what K3's format says after it (`tool_choice`, …) is not in the next prompt.
    """
    n = -1
    system, last, speaking = -1, -1, False
    for piece in pieces:
        if piece.control and piece.text == END:
            n += 1
            if speaking:
                last, speaking = n, False
            elif last < 0:
                system = n
        elif piece.role not in ASIDE:
            speaking = True
    return sorted({system, last} - {-1})
