"""A corpus with pictures: conversations, a pair, a picture as a data: URL, and plain text.

Input: a folder. Output: JSONL and pictures in it, and the corpus that a source with vision makes of
them. One byte is one token.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from kimi_k3_mlx.reap.corpus import Corpus, load_corpus, parse_specs
from kimi_k3_mlx.tensors.source import Source
from kimi_k3_mlx.vision.tower import read_rules
from tests.reap.test_corpus_scripts import one_byte_each


def paint(path: Path, width: int, height: int, seed: int = 0) -> Path:
    """A picture of noise."""
    path.parent.mkdir(exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def said(*parts: Any) -> dict[str, Any]:
    """A user's message; strings are text, everything else is a part."""
    texts = ({"type": "text", "text": part} if isinstance(part, str) else part for part in parts)
    return {"role": "user", "content": list(texts)}


def data_url(path: Path) -> str:
    """The picture's content in its name."""
    return f"data:image/png;base64,{b64encode(path.read_bytes()).decode()}"


def rows(folder: Path) -> list[dict[str, Any]]:
    """Documents with none, one and two pictures, of 6, 4 and 1 tokens."""
    wide = paint(folder / "pictures/wide.png", 84, 56, 1)
    paint(folder / "pictures/square.png", 50, 50, 2)
    dot = paint(folder / "dot.png", 9, 20, 3)
    part = {"type": "image", "image": "pictures/wide.png"}
    url = {"type": "image_url", "image_url": {"url": "pictures/square.png"}}
    inside = {"type": "image_url", "image_url": {"url": data_url(wide)}}
    answer = {"role": "assistant", "content": "noise"}
    return [
        {"id": "one", "messages": [said(part, "what?"), answer]},
        {"id": "two", "messages": [said("first", url, "then", inside), answer, said(part)]},
        {"id": "pair", "image": "pictures/square.png", "text": "a square of noise"},
        {"id": "dot", "image": str(dot), "text": ""},
        {"id": "text", "text": "no picture at all, only words, and a few more of them"},
        {"id": "short", "text": "word"},
    ]


def write(path: Path, documents: Sequence[Any]) -> str:
    """A JSONL file, and its spec."""
    path.write_text("".join(json.dumps(row) + "\n" for row in documents), "utf-8")
    return str(path)


def load(spec: str, source: Source, **options: Any) -> Corpus:
    """The corpus as the command line reads it."""
    options = {"seq_len": 512} | options
    return load_corpus(
        parse_specs(spec), one_byte_each(), rules=partial(read_rules, source), **options
    )


def corpus_in(folder: Path, source: Source, **options: Any) -> Corpus:
    """All of `rows`."""
    return load(write(folder / "seen.jsonl", rows(folder)), source, **options)
