"""Ways to damage a checkpoint on disk, one tensor at a time, and to compare folders."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kimi_k3_mlx.schema import TensorInfo
from kimi_k3_mlx.tensors.header import encode_header, read_header
from kimi_k3_mlx.tensors.source import CONFIG, INDEX

LAYER = "language_model.model.layers."
Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]
"""Dtype, shape and bytes by name."""

WORDS = {"BF16": np.uint16, "F32": np.float32, "U8": np.uint8, "U32": np.uint32}


def shard_of(folder: Path, name: str) -> Path:
    """The shard in which the index places a tensor."""
    index = json.loads((folder / INDEX).read_text("utf-8"))
    return folder / str(index["weight_map"][name])


@contextmanager
def editing(folder: Path, name: str) -> Iterator[Tensors]:
    """All tensors of the shard that holds `name`; changes are written, and the index follows."""
    path = shard_of(folder, name)
    header = read_header(path)
    data = path.read_bytes()[header.n_bytes :]
    tensors: Tensors = {t.name: (t.dtype, t.shape, data[t.begin : t.end]) for t in header.tensors}
    before = set(tensors)
    yield tensors
    infos, begin = [], 0
    for tensor, (dtype, shape, content) in tensors.items():
        infos.append(TensorInfo(tensor, dtype, shape, begin, begin + len(content)))
        begin += len(content)
    body = b"".join(content for *_, content in tensors.values())
    replaced(path, encode_header(infos, header.metadata) + body)
    with changing_json(folder / INDEX) as index:
        for gone in before - set(tensors):
            del index["weight_map"][gone]
        index["weight_map"] |= dict.fromkeys(tensors, path.name)
        index["metadata"]["total_size"] += begin - len(data)


@contextmanager
def values_of(folder: Path, name: str) -> Iterator[np.ndarray]:
    """One tensor as a writable array (bf16 as uint16); changes are written in place."""
    path = shard_of(folder, name)
    header = read_header(path)
    info = next(tensor for tensor in header.tensors if tensor.name == name)
    begin = header.n_bytes + info.begin
    content = bytearray(path.read_bytes())
    window = memoryview(content)[begin : begin + info.n_bytes]
    yield np.frombuffer(window, WORDS[info.dtype]).reshape(info.shape)
    window.release()
    replaced(path, bytes(content))


def replaced(path: Path, content: bytes) -> None:
    """Write a file anew: another name of the old one, if it is a link, keeps what it had."""
    path.unlink()
    path.write_bytes(content)


def stored_parts(folder: Path, module: str) -> list[str]:
    """The tensors of a module, quantized or not."""
    weight_map = json.loads((folder / INDEX).read_text("utf-8"))["weight_map"]
    names = [f"{module}{part}" for part in ("", ".weight", ".scales", ".biases")]
    return [name for name in names if name in weight_map]


@contextmanager
def changing_json(path: Path) -> Iterator[dict[str, Any]]:
    """A JSON file as an object; changes are written."""
    value = json.loads(path.read_text("utf-8"))
    yield value
    replaced(path, json.dumps(value).encode())


@contextmanager
def changing_config(folder: Path) -> Iterator[dict[str, Any]]:
    """config.json as an object; changes are written."""
    with changing_json(folder / CONFIG) as config:
        yield config


def tree(folder: Path) -> dict[str, str]:
    """Hash of every file by name."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }
