"""Writes K3's tokenizer as a standard `tokenizer.json`, from `tiktoken.model` and its config.

Input: the bytes of both files and the size of the vocabulary. Output: the bytes of `tokenizer.json`
and of a `tokenizer_config.json` that asks for no remote code. Token ids are those of tiktoken: the
same bytes, merges, cuts and control tokens. Nothing of the source is executed.
"""

from __future__ import annotations

import json
from base64 import b64decode
from typing import Any

from kimi_k3_mlx.chat.pieces import MARKERS, MEDIA_PAD
from kimi_k3_mlx.errors import CheckpointError
from kimi_k3_mlx.schema import Json
from kimi_k3_mlx.tensors.source import DOWNLOAD

TIKTOKEN, TOKENIZER, TOKENIZER_CONFIG = "tiktoken.model", "tokenizer.json", "tokenizer_config.json"

UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
BEFORE, AFTER = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"{BEFORE}[{UPPER}&&[^\p{{Han}}]]*[{LOWER}&&[^\p{{Han}}]]+{AFTER}",
        rf"{BEFORE}[{UPPER}&&[^\p{{Han}}]]+[{LOWER}&&[^\p{{Han}}]]*{AFTER}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""How text is split before merging; tiktoken and Hugging Face's tokenizers both understand it."""

MOST_CHARS, LONGEST_RUN = 400_000, 25_000
"""K3 cuts text into pieces of so many characters, and in them runs of blanks or of all else."""


KINDS = (r"[\s\x1c-\x1f]", r"[^\s\x1c-\x1f]")
"""Blanks as Python's `isspace` has them, and all else."""


def runs_pattern(longest: int) -> str:
    """Matches `longest` characters of a run that has more of them.

    A run is looked at only from its beginning or where the last match ended: trying each of its
    characters takes a minute for a line of 100,000.
    """
    sides = (rf"(?:\G|(?<!{kind})){kind}{{{longest}}}(?={kind})" for kind in KINDS)
    return "|".join(sides)


def tokenizer_files(model: bytes, config: bytes, vocab_size: int) -> dict[str, bytes]:
    """Both files; CheckpointError when the two do not agree, or are no tokenizer of K3's."""
    ranks = read_ranks(model)
    settings = read_config(config)
    controls = control_names(settings, len(ranks), vocab_size)
    written = settings | {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name in ("auto_map", "added_tokens_decoder"):
        written.pop(name, None)
    # The separators matter: millions of blanks would be written otherwise.
    text = json.dumps(tokenizer_json(ranks, controls), ensure_ascii=False, separators=(",", ":"))
    return {
        TOKENIZER: text.encode(),
        TOKENIZER_CONFIG: (json.dumps(written, indent=2, ensure_ascii=False) + "\n").encode(),
    }


def read_ranks(model: bytes) -> dict[bytes, int]:
    """Bytes of each token and its rank, from lines of base64 and number."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(model.splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise CheckpointError(
                f"{TIKTOKEN}:{number} is {line[:40]!r}, not a token in base64 and its rank.",
                DOWNLOAD,
            ) from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise CheckpointError(
            f"the {len(ranks):,} tokens of {TIKTOKEN} are not ranked 0 to {len(ranks) - 1:,}.",
            DOWNLOAD,
        )
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise CheckpointError(f"{TIKTOKEN} has no token for the byte 0x{missing[0]:02x}.", DOWNLOAD)
    return ranks


def read_config(config: bytes) -> Json:
    """The JSON object in `tokenizer_config.json`."""
    try:
        value = json.loads(config)
    except ValueError as error:
        raise CheckpointError(f"{TOKENIZER_CONFIG} is not JSON: {error}.", DOWNLOAD) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{TOKENIZER_CONFIG} is no JSON object.", DOWNLOAD)
    return value


def control_names(settings: Json, first: int, vocab_size: int) -> dict[str, int]:
    """Name and id of each control token: all ids from `first` on, unnamed ones are reserved."""
    added = settings.get("added_tokens_decoder")
    added = added if isinstance(added, dict) else {}
    names = {token: name_of(item) for token, item in added.items()}
    listed = {int(token): name for token, name in names.items() if token.isdecimal()}
    if strangers := [token for token in listed if not first <= token < vocab_size]:
        raise CheckpointError(
            f"{TOKENIZER_CONFIG} names the token {strangers[0]} ({listed[strangers[0]]}), but the "
            f"control tokens are {first:,} to {vocab_size - 1:,}: {TIKTOKEN} has {first:,} tokens, "
            f"config.json a vocabulary of {vocab_size:,}.",
            DOWNLOAD,
        )
    places = range(first, vocab_size)
    controls = {listed.get(i, f"<|reserved_token_{i}|>"): i for i in places}
    if len(controls) < len(places):
        raise CheckpointError(f"{TOKENIZER_CONFIG} gives two tokens the same name.", DOWNLOAD)
    for name in (*MARKERS, MEDIA_PAD):
        if name not in controls:
            raise CheckpointError(
                f"{TOKENIZER_CONFIG} names no token {name}: it is not Kimi K3's.", DOWNLOAD
            )
    return controls


def name_of(item: Any) -> str:
    """The text of an added token."""
    return str(item.get("content")) if isinstance(item, dict) else str(item)


def letters() -> list[str]:
    """The printable stand-in of each byte value, as in every byte-level BPE since GPT-2."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def merges_of(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Every pair of tokens that makes a token, by the rank of what it makes.

    tiktoken joins any two neighbours whose bytes together are a token, the lowest rank first.
    """
    found = []
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = ((token[:i], token[i:]) for i in range(1, len(token)))
        known = [(left, right) for left, right in pairs if left in ranks and right in ranks]
        found += sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return found


def tokenizer_json(ranks: dict[bytes, int], controls: dict[str, int]) -> Json:
    """The file of Hugging Face's tokenizers."""
    alphabet = letters()
    # Latin-1 has one character for each byte: translating those is quicker than byte by byte.
    table = {byte: alphabet[byte] for byte in range(256)}
    spelled = {token: token.decode("latin-1").translate(table) for token in ranks}
    vocabulary = {
        spelled[token]: rank for token, rank in sorted(ranks.items(), key=lambda it: it[1])
    }
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    byte_level["use_regex"] = False
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": token, "content": name, **flags, "special": True}
            for name, token in controls.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "FixedLength", "length": MOST_CHARS},
                split(runs_pattern(LONGEST_RUN), "MergedWithPrevious"),
                split(PATTERN, "Isolated"),
                byte_level,
            ],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            # A piece that is a token stays one, even when no merges lead to it.
            "ignore_merges": True,
            "vocab": vocabulary,
            "merges": [[spelled[left], spelled[right]] for left, right in merges_of(ranks)],
        },
    }


def split(pattern: str, behavior: str) -> Json:
    """A pre-tokenizer that cuts where a regular expression matches."""
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": False}
