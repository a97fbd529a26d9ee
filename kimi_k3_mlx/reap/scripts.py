"""Encodes text to token ids and says in which script each token is written.

Input: a byte-level tokenizer and `Piece`s or token ids. Output: ids with, for each, its script, its
role and its number of bytes. A token that is part of a character has the script of the character;
the rows of a picture have one of their own.
Only pieces marked as control become control tokens; a tokenizer that can't keep them apart, or
whose tokens don't spell the text to the byte, is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kimi_k3_mlx.chat.encode import PieceEncoder
from kimi_k3_mlx.chat.pieces import MEDIA_PAD, ROLES, Piece
from kimi_k3_mlx.errors import CheckpointError, UsageError
from kimi_k3_mlx.reap.pictures import CorpusPicture
from kimi_k3_mlx.schema import Json, canonical

Ids = NDArray[np.int32]
Tags = NDArray[np.uint8]

SCRIPTS = (
    "symbols", "digits", "letters", "latin", "greek", "cyrillic", "hebrew", "arabic",
    "devanagari", "thai", "hangul", "kana", "han", "markup", "image",
)  # fmt: skip
"""Scripts by rank: a token with characters of several has the last one of them.

`symbols` are punctuation, blanks and all that is no letter, `letters` those of any other script,
`markup` control tokens and what the chat renderer writes around the text, `image` placeholders that
features of a picture take the place of."""

SYMBOLS, DIGITS, LETTERS, LATIN, GREEK, CYRILLIC, HEBREW, ARABIC = range(8)
DEVANAGARI, THAI, HANGUL, KANA, HAN, MARKUP, IMAGE = range(8, 15)

BLOCKS = (
    (0x0000, SYMBOLS), (0x0030, DIGITS), (0x003A, SYMBOLS), (0x0041, LATIN), (0x005B, SYMBOLS),
    (0x0061, LATIN), (0x007B, SYMBOLS), (0x00AA, LATIN), (0x00AB, SYMBOLS), (0x00BA, LATIN),
    (0x00BB, SYMBOLS), (0x00C0, LATIN), (0x00D7, SYMBOLS), (0x00D8, LATIN), (0x00F7, SYMBOLS),
    (0x00F8, LATIN), (0x02B0, SYMBOLS), (0x0370, GREEK), (0x0400, CYRILLIC), (0x0530, LETTERS),
    (0x0590, HEBREW), (0x0600, ARABIC), (0x0660, DIGITS), (0x066A, ARABIC), (0x06F0, DIGITS),
    (0x06FA, ARABIC), (0x0700, LETTERS), (0x0750, ARABIC), (0x0780, LETTERS), (0x0870, ARABIC),
    (0x0900, DEVANAGARI), (0x0964, SYMBOLS), (0x0966, DIGITS), (0x0970, DEVANAGARI),
    (0x0980, LETTERS), (0x0E00, THAI), (0x0E50, DIGITS), (0x0E5A, THAI), (0x0E80, LETTERS),
    (0x1100, HANGUL), (0x1200, LETTERS), (0x1C80, CYRILLIC), (0x1C90, LETTERS), (0x1D00, LATIN),
    (0x1D26, GREEK), (0x1D2B, CYRILLIC), (0x1D2C, LATIN), (0x1DC0, SYMBOLS), (0x1E00, LATIN),
    (0x1F00, GREEK), (0x2000, SYMBOLS), (0x2183, LATIN), (0x2185, SYMBOLS), (0x2C00, LETTERS),
    (0x2C60, LATIN), (0x2C80, LETTERS), (0x2DE0, CYRILLIC), (0x2E00, SYMBOLS), (0x2E80, HAN),
    (0x2FF0, SYMBOLS), (0x3005, HAN), (0x3008, SYMBOLS), (0x3021, HAN), (0x302A, SYMBOLS),
    (0x3040, KANA), (0x3100, LETTERS), (0x3130, HANGUL), (0x3190, LETTERS), (0x31C0, HAN),
    (0x31F0, KANA), (0x3200, SYMBOLS), (0x3400, HAN), (0x4DC0, SYMBOLS), (0x4E00, HAN),
    (0xA000, LETTERS), (0xA640, CYRILLIC), (0xA6A0, LETTERS), (0xA720, LATIN), (0xA800, LETTERS),
    (0xA8E0, DEVANAGARI), (0xA900, LETTERS), (0xA960, HANGUL), (0xA980, LETTERS), (0xAB30, LATIN),
    (0xAB65, GREEK), (0xAB66, LATIN), (0xAB70, LETTERS), (0xAC00, HANGUL), (0xD800, SYMBOLS),
    (0xF900, HAN), (0xFB00, LATIN), (0xFB13, LETTERS), (0xFB1D, HEBREW), (0xFB50, ARABIC),
    (0xFE00, SYMBOLS), (0xFE70, ARABIC), (0xFEFF, SYMBOLS), (0xFF10, DIGITS), (0xFF1A, SYMBOLS),
    (0xFF21, LATIN), (0xFF3B, SYMBOLS), (0xFF41, LATIN), (0xFF5B, SYMBOLS), (0xFF66, KANA),
    (0xFFA0, HANGUL), (0xFFE0, SYMBOLS), (0x10000, LETTERS), (0x1AFF0, KANA), (0x1B170, LETTERS),
    (0x1CC00, SYMBOLS), (0x1DF00, LATIN), (0x1E000, LETTERS), (0x1EE00, ARABIC), (0x1EF00, LETTERS),
    (0x1F000, SYMBOLS), (0x20000, HAN), (0x323B0, SYMBOLS),
)  # fmt: skip
"""First code point of each run of Unicode blocks, and its script."""

STARTS = np.array([start for start, _ in BLOCKS], np.uint32)
SCRIPT_OF_BLOCK = np.array([script for _, script in BLOCKS], np.uint8)


@dataclass(frozen=True, eq=False)
class Tagged:
    """Token ids with what is known about each of them."""

    tokens: Ids
    scripts: Tags
    roles: Tags
    n_bytes: Ids
    pictures: tuple[CorpusPicture, ...] = ()
    """Those whose rows are the tokens of the script `image`, in order."""

    def __len__(self) -> int:
        return len(self.tokens)

    def places(self) -> list[tuple[int, int]]:
        """Begin and end of each picture's rows."""
        rows = np.flatnonzero(self.scripts == IMAGE)
        ends = accumulate(picture.n_rows for picture in self.pictures)
        return [
            (int(rows[end - picture.n_rows]), int(rows[end - 1]) + 1)
            for picture, end in zip(self.pictures, ends, strict=True)
        ]

    def head(self, n_tokens: int) -> Tagged:
        """The first tokens, fewer if a picture would be cut."""
        cut = [first for first, last in self.places() if first < n_tokens < last]
        return self.part(0, cut[0] if cut else n_tokens)

    def tail(self, n_tokens: int) -> Tagged:
        """The last tokens, fewer if a picture would be cut."""
        begin = len(self) - n_tokens
        cut = [last for first, last in self.places() if first < begin < last]
        return self.part(cut[0] if cut else begin, len(self))

    def part(self, begin: int, end: int) -> Tagged:
        """The tokens from `begin` to `end`, neither of which is inside a picture."""
        span = slice(begin, end)
        pairs = zip(self.pictures, self.places(), strict=True)
        return Tagged(
            self.tokens[span],
            self.scripts[span],
            self.roles[span],
            self.n_bytes[span],
            tuple(it for it, (first, last) in pairs if begin <= first and last <= end),
        )


def byte_scripts(data: bytes) -> Tags:
    """The script of the character that each byte belongs to; stray bytes are symbols."""
    text = data.decode("utf-8", "surrogateescape")
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    stray = (points >= 0xDC80) & (points <= 0xDCFF)
    widths = 1 + (points >= 0x80) + (points >= 0x800) + (points >= 0x10000)
    widths[stray] = 1
    scripts = SCRIPT_OF_BLOCK[np.searchsorted(STARTS, points, side="right") - 1]
    return np.repeat(scripts, widths)


def byte_values() -> dict[str, int]:
    """The byte that each letter stands for in the tokens of a byte-level tokenizer."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(0x100)) - set(printable))
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


BYTE_VALUES = byte_values()


class Encoder(PieceEncoder):
    """A tokenizer of transformers, or one that mlx-lm wraps, as calibration uses it."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self.spelled: dict[int, bytes] = {}

    @cached_property
    def controls(self) -> frozenset[int]:
        """Ids that stand for no text."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        return frozenset(added) | frozenset(self.tokenizer.all_special_ids)

    @cached_property
    def sha256(self) -> str:
        """Identity of the vocabulary."""
        return hashlib.sha256(canonical(self.tokenizer.get_vocab())).hexdigest()

    def to_json(self) -> Json:
        """Which tokenizer it is: its name, and the SHA-256 of its vocabulary."""
        return {"name": str(self.tokenizer.name_or_path), "sha256": self.sha256}

    def beginning(self) -> Piece:
        """The token before a document."""
        name = self.tokenizer.bos_token
        if not isinstance(name, str):
            raise CheckpointError("the tokenizer has no token for the beginning of a document.")
        return Piece(name, control=True, markup=True)

    def encode(self, pieces: Sequence[Piece]) -> Tagged:
        """The pieces one by one, each with its own ids."""
        parts = [self.ids(piece) for piece in pieces]
        tagged = self.tag([token for part in parts for token in part])
        lengths = [len(part) for part in parts]
        roles = np.array([ROLES.index(piece.role) for piece in pieces], np.uint8)
        markup = np.array([piece.markup for piece in pieces], bool)
        scripts = np.where(np.repeat(markup, lengths), np.uint8(MARKUP), tagged.scripts)
        rows = [piece.control and piece.text == MEDIA_PAD for piece in pieces]
        scripts[np.repeat(np.array(rows, bool), lengths)] = IMAGE
        self.check_spelling(pieces, lengths, tagged)
        return replace(tagged, scripts=scripts, roles=np.repeat(roles, lengths))

    def check_spelling(
        self, pieces: Sequence[Piece], lengths: Iterable[int], tagged: Tagged
    ) -> None:
        """Refuse a tokenizer that loses or changes text."""
        ends = list(accumulate(lengths, initial=0))
        for piece, begin, end in zip(pieces, ends, ends[1:], strict=False):
            tokens = tagged.tokens[begin:end].tolist()
            if not piece.control and self.spell(tokens) != piece.text.encode():
                raise CheckpointError(
                    f"the tokenizer's {len(tokens)} tokens do not spell a text of "
                    f"{len(piece.text.encode())} bytes that begins with {piece.text[:30]!r}.",
                    "use the tokenizer of the checkpoint.",
                )

    def tag(self, tokens: Sequence[int]) -> Tagged:
        """Ids that are given: their scripts from their bytes, no role."""
        spelled = [self.bytes_of(token) for token in tokens]
        n_bytes = np.array([len(data) for data in spelled], np.int32)
        starts = np.cumsum(n_bytes) - n_bytes
        # The byte more at the end: control tokens are empty, also the last one.
        of_bytes = np.append(byte_scripts(b"".join(spelled)), np.uint8(SYMBOLS))
        scripts = np.maximum.reduceat(of_bytes, starts) if spelled else of_bytes[:0]
        scripts[n_bytes == 0] = MARKUP
        roles = np.zeros(len(spelled), np.uint8)
        return Tagged(np.array(tokens, np.int32), scripts, roles, n_bytes)

    def spell(self, tokens: Iterable[int]) -> bytes:
        """The bytes that ids stand for."""
        return b"".join(self.bytes_of(token) for token in tokens)

    def bytes_of(self, token: int) -> bytes:
        """The bytes of one id; none for a control token."""
        if token not in self.spelled:
            self.spelled[token] = b"" if token in self.controls else self.look_up(token)
        return self.spelled[token]

    def look_up(self, token: int) -> bytes:
        """The bytes of an ordinary token."""
        name = self.tokenizer.convert_ids_to_tokens(token) if 0 <= token < 2**31 else None
        if name is None:
            raise UsageError(
                f"token {token} is not in the tokenizer's vocabulary.",
                "encode the corpus with the tokenizer of the checkpoint, or give text.",
            )
        if not set(name) <= BYTE_VALUES.keys():
            raise CheckpointError(
                f"token {token} of the tokenizer is {name!r}, which stands for no bytes.",
                "use Kimi K3's tokenizer, which is byte-level.",
            )
        return bytes(BYTE_VALUES[letter] for letter in name)
