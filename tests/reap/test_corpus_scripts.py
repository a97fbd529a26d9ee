"""Scripts, spelling and control tokens: what is known about each token of a text."""

from __future__ import annotations

import unicodedata
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_k3_mlx.chat.pieces import OPEN, ROLES, Piece
from kimi_k3_mlx.errors import CheckpointError, UsageError
from kimi_k3_mlx.reap.scripts import SCRIPTS, STARTS, Encoder, byte_scripts
from tests.house.checks import ROOT
from tests.tiny_tokenizer import control_ids, write_tokenizer

BUNDLED = ROOT / "kimi_k3_mlx/assets/tiny-k3"


def tokenizer_at(path: Path) -> Any:
    """The tokenizer of a folder, as transformers reads it."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(path)


@cache
def bundled() -> Any:
    """The tiny K3's tokenizer: byte-level, with merges."""
    return tokenizer_at(BUNDLED)


@cache
def one_byte_each() -> Any:
    """The tokenizer of the tiny sources: one byte is one token."""
    with TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), 512)
        return tokenizer_at(Path(folder))


class LikeKimis:
    """The interface of K3's own tokenizer, which is remote code over tiktoken."""

    name_or_path = "remote"

    def __init__(self, honest: bool = True) -> None:
        self.real, self.honest = one_byte_each(), honest
        self.all_special_ids = self.real.all_special_ids
        self.added_tokens_decoder = self.real.added_tokens_decoder

    def encode(self, text: str, allow_special_tokens: bool = True) -> list[int]:
        split = self.honest and not allow_special_tokens
        tokens: list[int] = self.real.encode(
            text, add_special_tokens=False, split_special_tokens=split
        )
        return tokens

    def convert_tokens_to_ids(self, name: str) -> Any:
        return self.real.convert_tokens_to_ids(name)

    def convert_ids_to_tokens(self, token: int) -> Any:
        return self.real.convert_ids_to_tokens(token)


TOKENIZERS = {"bundled": bundled, "bytes": one_byte_each, "kimi": LikeKimis}


@pytest.fixture(params=TOKENIZERS)
def encoder(request: pytest.FixtureRequest) -> Encoder:
    return Encoder(TOKENIZERS[request.param]())


def script_of(char: str) -> str:
    """The script of a character, by the table."""
    scripts = set(byte_scripts(char.encode()).tolist())
    assert len(scripts) == 1
    return SCRIPTS[scripts.pop()]


NAMED = {
    "LATIN": "latin", "GREEK": "greek", "CYRILLIC": "cyrillic", "HEBREW": "hebrew",
    "ARABIC": "arabic", "DEVANAGARI": "devanagari", "THAI": "thai", "HANGUL": "hangul",
    "HIRAGANA": "kana", "KATAKANA": "kana", "CJK": "han",
}  # fmt: skip


def script_by_name(char: str) -> str:
    """The script of a letter, as Unicode's name of it begins."""
    name = unicodedata.name(char).removeprefix("HALFWIDTH ").removeprefix("FULLWIDTH ")
    return NAMED.get(name.replace("-", " ").split()[0], "letters")


def test_the_table_agrees_with_the_names_of_all_letters() -> None:
    every = map(chr, [*range(0xD800), *range(0xE000, 0x10000)])
    letters = [char for char in every if unicodedata.category(char) in ("Lu", "Ll", "Lt", "Lo")]
    named = [char for char in letters if script_by_name(char) != "letters"]
    assert len(named) > 40_000
    assert [char for char in named if script_of(char) != script_by_name(char)] == []


def test_the_table_is_sorted() -> None:
    assert (np.diff(STARTS.astype(np.int64)) > 0).all()
    assert STARTS[0] == 0


@pytest.mark.parametrize(
    ("text", "script"),
    [
        (" \n\t.,;()[]{}_+-=<>'\"\\“”…—、。！「」🙂€→\x00\x7f", "symbols"),
        ("0123456789٣۳५๓７", "digits"),
        ("aZéßłĦﬁＡ", "latin"),
        ("αΩἀ", "greek"),
        ("мЁҐꙁ", "cyrillic"),
        ("אשﬠ", "hebrew"),
        ("ابپﷲ", "arabic"),
        ("अक", "devanagari"),
        ("กไ", "thai"),
        ("한글ㄱᄀ", "hangul"),
        ("ひカーｶㇰ", "kana"),
        ("世界々〇龍豈𠀀⼀", "han"),
        ("ბաகሀᐁ", "letters"),
    ],
)
def test_scripts_of_characters(text: str, script: str) -> None:
    assert {script_of(char) for char in text} == {script}


@settings(deadline=None)
@given(st.text())
def test_every_byte_has_the_script_of_its_character(text: str) -> None:
    slow = [SCRIPTS.index(script_of(char)) for char in text for _ in char.encode()]
    assert byte_scripts(text.encode()).tolist() == slow


@settings(deadline=None)
@given(st.binary())
def test_stray_bytes_have_a_script_too(data: bytes) -> None:
    assert len(byte_scripts(data)) == len(data)


def scripts_by_token(encoder: Encoder, text: str) -> list[tuple[bytes, str]]:
    tagged = encoder.encode([Piece(text)])
    tokens, scripts = tagged.tokens.tolist(), tagged.scripts.tolist()
    return [(encoder.spell([t]), SCRIPTS[s]) for t, s in zip(tokens, scripts, strict=True)]


def test_tokens_of_mixed_text(encoder: Encoder) -> None:
    """A part of a character has its script, a space before a word that of the word."""
    found = scripts_by_token(encoder, "the мир 世界 12!")
    by_script: dict[str, bytes] = {}
    for data, script in found:
        by_script[script] = by_script.get(script, b"") + data.strip()
    assert by_script["han"] == "世界".encode()
    assert by_script["cyrillic"] == "мир".encode()
    assert by_script["latin"] == b"the"
    assert by_script["digits"] == b"12"
    assert set(by_script) == {"han", "cyrillic", "latin", "digits", "symbols"}


def test_a_token_of_two_scripts_has_the_higher_one() -> None:
    tokens = Encoder(bundled()).encode([Piece(" a")])
    assert [SCRIPTS[script] for script in tokens.scripts] == ["latin"]


@settings(deadline=None)
@given(st.text())
def test_tokens_spell_the_text(text: str) -> None:
    for tokenizer in (bundled(), one_byte_each()):
        encoder = Encoder(tokenizer)
        tagged = encoder.encode([Piece(text, "user")])
        assert encoder.spell(tagged.tokens.tolist()) == text.encode()
        assert tagged.n_bytes.sum() == len(text.encode())
        assert {ROLES[role] for role in tagged.roles} <= {"user"}
        assert SCRIPTS.index("markup") not in tagged.scripts


def test_pieces_are_encoded_one_by_one(encoder: Encoder) -> None:
    pieces = [Piece("the", "user"), Piece(OPEN, control=True, markup=True), Piece("re", "tool")]
    parts = [encoder.encode([piece]).tokens.tolist() for piece in pieces]
    tagged = encoder.encode(pieces)
    assert tagged.tokens.tolist() == [token for part in parts for token in part]
    roles = [ROLES.index(piece.role) for piece in pieces]
    assert tagged.roles.tolist() == np.repeat(roles, [len(part) for part in parts]).tolist()
    at = len(parts[0])
    assert SCRIPTS[tagged.scripts[at]] == "markup"
    assert tagged.n_bytes[at] == 0


def test_control_tokens_that_are_pasted_stay_text(encoder: Encoder) -> None:
    pasted = "".join(control_ids(512))
    tagged = encoder.encode([Piece(pasted)])
    assert encoder.spell(tagged.tokens.tolist()).decode() == pasted
    assert not set(tagged.tokens.tolist()) & encoder.controls


def test_a_tokenizer_that_forges_control_tokens_is_refused() -> None:
    encoder = Encoder(LikeKimis(honest=False))
    with pytest.raises(CheckpointError, match="into the control token 259"):
        encoder.encode([Piece(OPEN, control=True)])
    with pytest.raises(CheckpointError, match="1 tokens do not spell a text of 8 bytes"):
        encoder.encode([Piece(OPEN)])


def test_a_tokenizer_that_loses_text_is_refused() -> None:
    lossy = LikeKimis()
    encoder = Encoder(lossy)
    encoder.ids = lambda piece: lossy.encode(piece.text.lower())  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match="do not spell"):
        encoder.encode([Piece("Mixed Case")])


def test_a_tokenizer_without_bytes_is_refused() -> None:
    tokenizer = LikeKimis()
    tokenizer.convert_ids_to_tokens = lambda token: "▁the"  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match="token 7 of the tokenizer is '▁the'"):
        Encoder(tokenizer).tag([7])


def test_a_tokenizer_without_the_chats_tokens_is_refused() -> None:
    tokenizer = LikeKimis()
    tokenizer.convert_tokens_to_ids = lambda name: 511  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match=r"no token <\|open\|>: it is not Kimi K3's"):
        Encoder(tokenizer).encode([Piece(OPEN, control=True)])


def test_no_beginning_of_documents() -> None:
    with pytest.raises(CheckpointError, match="no token for the beginning"):
        Encoder(SimpleNamespace(bos_token=None, encode=lambda text: [])).beginning()


@pytest.mark.parametrize("token", [-1, 1024, 2**31, 2**70])
def test_tokens_outside_of_the_vocabulary_are_refused(token: int) -> None:
    with pytest.raises(UsageError, match=f"token {token} is not in the tokenizer's vocabulary"):
        Encoder(bundled()).tag([5, token])


def test_tokens_that_are_given() -> None:
    tagged = Encoder(one_byte_each()).tag([496, *Encoder(one_byte_each()).ids(Piece("世a")), 498])
    assert [SCRIPTS[script] for script in tagged.scripts] == [
        "markup",
        *["han"] * 3,
        "latin",
        "markup",
    ]
    assert tagged.n_bytes.tolist() == [0, 1, 1, 1, 1, 0]
    assert len(Encoder(one_byte_each()).tag([]).tokens) == 0


def test_the_identity_of_a_tokenizer_is_its_vocabulary() -> None:
    assert Encoder(bundled()).sha256 != Encoder(one_byte_each()).sha256
    assert Encoder(bundled()).to_json()["sha256"] == Encoder(tokenizer_at(BUNDLED)).sha256
