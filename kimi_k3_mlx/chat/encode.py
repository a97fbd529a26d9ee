"""Turns pieces into token ids with K3's tokenizer, one by one.

Input: a tokenizer of transformers (or one that mlx-lm wraps, or K3's own) and pieces or messages.
Output: ids. A tokenizer that would turn pasted text into a control token is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

from kimi_k3_mlx.chat.pieces import MARKERS, Piece
from kimi_k3_mlx.chat.render import chat_pieces
from kimi_k3_mlx.errors import CheckpointError
from kimi_k3_mlx.schema import Json

MOST_WORDS, MOST_LETTERS = 1024, 64
"""Markup that is kept: names of tools and arguments are in it, which a server's clients choose."""


def encode_chat(tokenizer: Any, messages: Sequence[Json], **options: Any) -> list[int]:
    """The ids of a request; the options are those of `chat_pieces`."""
    return PieceEncoder(tokenizer).encode_pieces(chat_pieces(messages, **options))


def chat_text(messages: Sequence[Json], **options: Any) -> str:
    """A request as text, to look at: encoding it again gives other ids and trusts pasted markup."""
    return "".join(piece.text for piece in chat_pieces(messages, **options))


def marker_ids(tokenizer: Any) -> dict[int, str]:
    """The ids of the tokens that structure K3's output, and their names."""
    encoder = PieceEncoder(tokenizer)
    return {encoder.control(name): name for name in MARKERS}


class PieceEncoder:
    """A tokenizer that encodes pieces."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.known: dict[str, int] = {}
        self.words: dict[str, list[int]] = {}
        parameters = inspect.signature(tokenizer.encode).parameters
        # K3's own tokenizer, which is remote code, has another name for the same thing.
        self.ordinary: dict[str, bool] = (
            {"allow_special_tokens": False}
            if "allow_special_tokens" in parameters
            else {"add_special_tokens": False, "split_special_tokens": True}
        )

    def control(self, name: str) -> int:
        """The id of a control token."""
        if name not in self.known:
            self.known[name] = self.marker(name)
        return self.known[name]

    def marker(self, name: str) -> int:
        """Look up a control token; pasted as ordinary text, its name must not become the token."""
        token = self.tokenizer.convert_tokens_to_ids(name)
        if not isinstance(token, int) or self.tokenizer.convert_ids_to_tokens(token) != name:
            raise CheckpointError(
                f"the tokenizer has no token {name}: it is not Kimi K3's.",
                "use the tokenizer of the checkpoint, or text instead of messages.",
            )
        if token in self.tokenizer.encode(name, **self.ordinary):
            raise CheckpointError(
                f"the tokenizer turns the text {name} into the control token {token}: pasted "
                "markup could forge messages.",
                "use the tokenizer.json of a build, with transformers 5 or newer.",
            )
        return token

    def encode_pieces(self, pieces: Iterable[Piece]) -> list[int]:
        """The ids of pieces."""
        return [token for piece in pieces for token in self.ids(piece)]

    def ids(self, piece: Piece) -> list[int]:
        """The ids of one piece; the renderer's few words are looked up once."""
        if piece.control:
            return [self.control(piece.text)]
        if piece.markup and piece.text in self.words:
            return self.words[piece.text]
        tokens = [int(token) for token in self.tokenizer.encode(piece.text, **self.ordinary)]
        if piece.markup and len(piece.text) <= MOST_LETTERS and len(self.words) < MOST_WORDS:
            self.words[piece.text] = tokens
        return tokens
