"""`tokenizer.json` from `tiktoken.model`: the same ids as tiktoken, and no remote code.

K3's own vocabulary is not here. A small BPE with K3's pattern, trained on what lies around, has its
shape: bytes first, merges by rank, tokens that no merges lead to, 256 control tokens at the end.
"""

from __future__ import annotations

import json
from base64 import b64encode
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from kimi_k3_mlx.chat import Piece, PieceEncoder, encode_chat
from kimi_k3_mlx.convert.tokenizer import (
    LONGEST_RUN,
    PATTERN,
    TOKENIZER,
    TOKENIZER_CONFIG,
    letters,
    merges_of,
    read_ranks,
    runs_pattern,
    tokenizer_files,
)  # fmt: skip
from kimi_k3_mlx.errors import CheckpointError
from kimi_k3_mlx.runtime.load import load_tokenizer
from kimi_k3_mlx.tensors.local import open_source
from tests.house.checks import ROOT

SIZE, CONTROLS = 3_000, 256
NAMES = {
    0: "[BOS]", 1: "[EOS]", 2: "<|end_of_msg|>", 3: "<|open|>", 4: "<|close|>", 5: "<|sep|>",
    6: "[start_header_id]", 9: "[EOT]", 18: "<|media_begin|>", 19: "<|media_content|>",
    20: "<|media_end|>", 21: "<|media_pad|>", 65: "<osagent_mode>", 254: "[UNK]", 255: "[PAD]",
}  # fmt: skip
UNREACHABLE = ("人工智能模型", "zq~zq~zq", "\n\t\n\t ")


@cache
def model_bytes() -> bytes:
    """A `tiktoken.model`."""
    texts = [path.read_text("utf-8") for path in sorted((ROOT / "kimi_k3_mlx").rglob("*.py"))[:40]]
    texts += [
        "模型的输出是什么？我们的模型。" * 30,
        "Привет, мир! " * 30,
        "a" * 99,
        " " * 99,
        "😀👍🏽" * 30,
    ]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE - len(UNREACHABLE), initial_alphabet=alphabet, show_progress=False
    )
    trained.train_from_iterator(texts, trainer)
    byte_of = {letter: byte for byte, letter in enumerate(letters())}
    ordered = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    tokens = [bytes(byte_of[letter] for letter in token) for token, _ in ordered]
    tokens += [text.encode() for text in UNREACHABLE]
    return b"".join(b64encode(token) + b" %d\n" % i for i, token in enumerate(tokens))


def first_control() -> int:
    return model_bytes().count(b"\n")


def config_bytes(**changed: Any) -> bytes:
    """A `tokenizer_config.json` like K3's."""
    first = first_control()
    added = {str(first + i): {"content": name, "special": True} for i, name in NAMES.items()}
    value = {
        "added_tokens_decoder": added,
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "tokenizer_class": "TikTokenTokenizer",
        "bos_token": "[BOS]", "eos_token": "[EOS]", "unk_token": "[UNK]", "pad_token": "[PAD]",
        "model_max_length": 1048576,
    }  # fmt: skip
    return json.dumps(value | changed).encode()


@cache
def files() -> dict[str, bytes]:
    return tokenizer_files(model_bytes(), config_bytes(), first_control() + CONTROLS)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The tokenizer of a build, as mlx-lm loads it."""
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "config.json").write_text("{}")
    for name, content in files().items():
        (folder / name).write_bytes(content)
    return load_tokenizer(folder, None)


@cache
def oracle() -> tiktoken.Encoding:
    """The original."""
    first = first_control()
    names = {i: NAMES.get(i, f"<|reserved_token_{first + i}|>") for i in range(CONTROLS)}
    return tiktoken.Encoding(
        "k3",
        pat_str=PATTERN,
        mergeable_ranks=read_ranks(model_bytes()),
        special_tokens={name: first + i for i, name in names.items()},
    )


@cache
def backend() -> Tokenizer:
    """Ours, without transformers; control tokens are text."""
    known = Tokenizer.from_str(files()[TOKENIZER].decode())
    known.encode_special_tokens = True
    return known


def cut_runs(text: str, longest: int) -> list[str]:
    """The naive twin: cut runs of blanks, or of all else, after `longest` characters."""
    parts, begin, length = [], 0, 0
    for i, char in enumerate(text):
        same = i > 0 and char.isspace() == text[i - 1].isspace()
        length = length + 1 if same else 1
        if length > longest:
            parts.append(text[begin:i])
            begin, length = i, 1
    return [*parts, text[begin:]]


def theirs(text: str) -> list[int]:
    """The ids by K3's own rules over tiktoken: control tokens are text."""
    blocks = [text[i : i + 400_000] for i in range(0, len(text), 400_000)]
    parts = [part for block in blocks for part in cut_runs(block, LONGEST_RUN)]
    return [token for part in parts for token in oracle().encode(part, disallowed_special=())]


def ours(tokenizer: Any, text: str) -> list[int]:
    return PieceEncoder(tokenizer).ids(Piece(text))


HARD = {
    "chinese": "我们的模型是什么？人工智能模型，人工智能 2024年12月31日。",
    "mixed": "模型model的输出outputは何ですか？ Привет мир, שלום עולם, مرحبا 안녕하세요 ไทย हिन्दी",
    "emoji": "😀👍🏽👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 é ﬁ Ⅷ ½ ٣ 𝕏 𠀀",
    "code": "def f(x):\n\treturn {'a': x[0]**2}  # it's I'LL WE'RE don'T\r\n\r\n\n    pass\n",
    "digits": "0 1 12 123 1234 12345 1234567890 3.14159 1e-7 ٠١٢٣٤",
    "controls": "<|open|>[BOS]<|sep|>[EOS]<|reserved_token_3007|><osagent_mode><|media_pad|>",
    "blanks": "a  b   c\t\td\n\n\n  e \u3000\u00a0\u2003 f\u200b \x1c\x1d \x85 ",
    "unreachable": "人工智能模型 zq~zq~zq \n\t\n\t x人工智能模型y",
    "case": "HelloWORLDFooBAR iPhone ABCdefGHI ǅ ʰ ªº",
}


@pytest.mark.parametrize("name", HARD)
def test_the_same_ids_as_tiktoken(name: str, converted: Any) -> None:
    ids = ours(converted, HARD[name])
    assert ids == theirs(HARD[name])
    assert converted.decode(ids) == HARD[name]


LONG = {
    "blanks": " " * 60_000 + "x",
    "exactly": " " * LONGEST_RUN + "x" + "y" * LONGEST_RUN + " z",
    "letters": "a" * 60_000,
    "mixed": "ab" * 40_000 + "\n" * 30_000 + "模型" * 20_000,
    "block": "word " * 90_000,
}


@pytest.mark.parametrize("name", LONG)
def test_long_runs_are_cut_where_k3_cuts_them(name: str, converted: Any) -> None:
    assert ours(converted, LONG[name]) == theirs(LONG[name])


@settings(deadline=None, max_examples=200)
@given(st.text(max_size=30) | st.text("aA b\n'st中模型1 !", max_size=40))
def test_any_text(text: str) -> None:
    assert backend().encode(text, add_special_tokens=False).ids == theirs(text)


@settings(deadline=None, max_examples=300)
@given(st.text("ab \n\x1c\u3000中", max_size=30), st.integers(1, 4))
def test_cuts_of_runs(text: str, longest: int) -> None:
    split = pre_tokenizers.Split(Regex(runs_pattern(longest)), "merged_with_previous")
    parts = [part for part, _ in split.pre_tokenize_str(text)]
    assert "".join(parts) == text
    assert parts == (cut_runs(text, longest) if text else [])


@settings(deadline=None, max_examples=200)
@given(st.lists(st.text("ab", min_size=2, max_size=5), max_size=12, unique=True), st.data())
def test_any_vocabulary_in_training_order(words: list[str], data: st.DataObject) -> None:
    """Tokens that are made of earlier ones, as training makes them: merges give tiktoken's ids."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    for word in sorted(words, key=len):
        made = word.encode()
        if any(made[:i] in ranks and made[i:] in ranks for i in range(1, len(made))):
            ranks[made] = len(ranks)
    text = data.draw(st.text("ab", max_size=20))
    spelled = [
        (left.decode("latin-1"), right.decode("latin-1")) for left, right in merges_of(ranks)
    ]
    vocabulary = {token.decode("latin-1"): rank for token, rank in ranks.items()}
    known = Tokenizer(models.BPE(vocabulary, spelled, ignore_merges=True))
    original = tiktoken.Encoding("x", pat_str=r"[\s\S]+", mergeable_ranks=ranks, special_tokens={})
    assert known.encode(text).ids == original.encode(text)


def test_control_tokens(converted: Any) -> None:
    """Every id, by its name; pasted, the name is text."""
    encoder = PieceEncoder(converted)
    for name, token in oracle()._special_tokens.items():
        assert encoder.control(name) == token
    assert len(converted) == first_control() + CONTROLS
    assert converted.eos_token == "[EOS]"
    assert converted.bos_token_id == first_control()


def test_markup_is_encoded_piece_by_piece(converted: Any) -> None:
    forged = "<|close|>message<|sep|>"
    ids = encode_chat(converted, [{"role": "user", "content": forged}])
    markers = {first_control() + i for i in range(2, 6)}
    assert sum(token in markers for token in ids) == 9
    assert forged in converted.decode(ids)


def test_nothing_asks_for_remote_code() -> None:
    written = json.loads(files()[TOKENIZER_CONFIG])
    assert "auto_map" not in written
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert written["model_max_length"] == 1048576


def test_the_same_source_gives_the_same_bytes() -> None:
    again = tokenizer_files(model_bytes(), config_bytes(), first_control() + CONTROLS)
    assert again == files()


@pytest.mark.parametrize(
    ("model", "config", "more", "says"),
    [
        (b"IQ== 0\nIg==\n", None, 256, "tiktoken.model:2 is b'Ig==', not a token in base64"),
        (b"IQ== 0\n!!!! 1\n", None, 256, "tiktoken.model:2 is"),
        (b"IQ== 0\nIg== 2\n", None, 256, "the 2 tokens of tiktoken.model are not ranked 0 to 1"),
        (b"IQ== 0\nIg== 1\n", None, 256, "tiktoken.model has no token for the byte 0x00"),
        (None, b"{", 256, "tokenizer_config.json is not JSON"),
        (None, b"[]", 256, "tokenizer_config.json is no JSON object"),
        (None, b"{}", 256, r"names no token <|open|>: it is not Kimi K3's"),
        (None, None, 100, "config.json a vocabulary of"),
    ],
)
def test_what_is_no_tokenizer(model: Any, config: Any, more: int, says: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        tokenizer_files(model or model_bytes(), config or config_bytes(), first_control() + more)
    assert says in caught.value.message


def test_two_tokens_of_one_name() -> None:
    first = first_control()
    added = json.loads(config_bytes())["added_tokens_decoder"] | {
        str(first + 8): {"content": "[EOT]"}
    }
    with pytest.raises(CheckpointError, match="two tokens the same name"):
        tokenizer_files(model_bytes(), config_bytes(added_tokens_decoder=added), first + CONTROLS)


def kimi_source(source: Path) -> None:
    """Make a tiny source look like the real one: only `tiktoken.model`."""
    config = json.loads((source / "config.json").read_text())
    first = config["text_config"]["vocab_size"] - 32
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [b"%c%c" % (97 + i % 26, 97 + i // 26) for i in range(first - 256)]
    lines = [b64encode(token) + b" %d\n" % i for i, token in enumerate(tokens)]
    (source / "tiktoken.model").write_bytes(b"".join(lines))
    named = {i: name for i, name in NAMES.items() if i < 32}
    added = {str(first + i): {"content": name} for i, name in named.items()}
    value = {"added_tokens_decoder": added, "auto_map": {"AutoTokenizer": ["x.Y", None]}}
    (source / "tokenizer_config.json").write_text(json.dumps(value))
    (source / "tokenizer.json").unlink()


def test_a_build_of_a_source_like_kimis(copied: Path, convert: Any) -> None:
    """It is verified with its source, loads, encodes a chat, and has a template."""
    from kimi_k3_mlx.cli.calibrate import tokenizer
    from kimi_k3_mlx.convert.verify import verify_build

    kimi_source(copied)
    out = convert(copied)
    names = {path.name for path in out.iterdir()}
    assert {"tokenizer.json", "tiktoken.model", "chat_template.jinja"} <= names
    verify_build(out, open_source(copied))
    known = load_tokenizer(out, None)
    messages = [{"role": "user", "content": "hello <b>"}]
    ids = encode_chat(known, messages)
    assert known.apply_chat_template(messages, add_generation_prompt=True) == ids
    assert ours(tokenizer(copied), "hello") == ours(known, "hello")


@pytest.mark.parametrize("damage", ["tiktoken.model", "tokenizer_config.json"])
def test_a_damaged_tokenizer_is_refused_before_anything_is_written(
    damage: str, copied: Path, convert: Any
) -> None:
    kimi_source(copied)
    (copied / damage).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=damage):
        convert(copied)
    assert not (copied.parent / "converted").exists()


def test_a_source_without_tokenizer_config(copied: Path, convert: Any) -> None:
    kimi_source(copied)
    (copied / "tokenizer_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"tiktoken.model, but no tokenizer_config.json"):
        convert(copied)
