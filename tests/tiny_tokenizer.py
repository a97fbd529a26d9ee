"""Writes a byte-level tokenizer with K3's control tokens: 256 bytes first, control ids at the end.

Input: a folder and a vocabulary size. Output: `tokenizer.json` and `tokenizer_config.json`, which
`transformers` reads with no code of ours. The control tokens keep their K3 distance from `[BOS]`.
"""

from __future__ import annotations

import json
from pathlib import Path

BYTES = 256
CONTROL_NAMES = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|end_of_msg|>",
    3: "<|open|>",
    4: "<|close|>",
    5: "<|sep|>",
    6: "[start_header_id]",
    7: "[end_header_id]",
    9: "[EOT]",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    65: "<osagent_mode>",
    -2: "[UNK]",
    -1: "[PAD]",
}
SMALLEST_BLOCK, K3_BLOCK = 32, 256


def control_block(vocab_size: int) -> int:
    """First control id: K3 reserves its last 256 ids, small vocabularies the last 32."""
    block = K3_BLOCK if vocab_size >= BYTES + K3_BLOCK else SMALLEST_BLOCK
    if vocab_size < block:
        raise ValueError(f"vocabulary of {vocab_size} has no room for {block} control tokens")
    return vocab_size - block


def control_ids(vocab_size: int) -> dict[str, int]:
    """Control token text -> id, K3's offsets from the start (or the end) of the block."""
    first = control_block(vocab_size)
    places = {first + k if k >= 0 else vocab_size + k: v for k, v in CONTROL_NAMES.items()}
    names = {i: places.get(i, f"<|reserved_token_{i}|>") for i in range(first, vocab_size)}
    return {name: i for i, name in names.items()}


def byte_alphabet() -> list[str]:
    """The printable stand-in of each byte value, as in every byte-level BPE since GPT-2."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(b) if b in printable else chr(next(spare)) for b in range(BYTES)]


def tokenizer_json(vocab_size: int) -> dict[str, object]:
    """A `tokenizers` file: BPE with no merges, so that one byte is one token."""
    vocab = {char: i for i, char in enumerate(byte_alphabet())}
    controls = control_ids(vocab_size)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    byte_level["use_regex"] = False
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": name, **flags, "special": True} for name, i in controls.items()
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
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
            "vocab": vocab | controls,
            "merges": [],
        },
    }


def write_tokenizer(path: Path, vocab_size: int) -> None:
    """Write the two tokenizer files into the folder `path`."""
    if control_block(vocab_size) < BYTES:
        raise ValueError(f"vocabulary of {vocab_size} has no room for {BYTES} bytes and controls")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "[BOS]",
        "eos_token": "<|end_of_msg|>",
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1048576,
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer_json(vocab_size)), "utf-8")
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=2), "utf-8")
