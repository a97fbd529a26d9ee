"""The small files of a build: copies from the source, the index, the manifest.

Input: the source's folder and the plan. Output: file names and bytes. Code (`*.py`) is never
copied: a uniform build runs without any.
"""

from __future__ import annotations

import hashlib
import json
import platform
from fnmatch import fnmatch
from pathlib import Path

import numpy as np

from kimi_k3_mlx import __version__
from kimi_k3_mlx.schema import LOST, BuildPlan, Json, Manifest, ShardRecord
from kimi_k3_mlx.tensors.header import file_size
from kimi_k3_mlx.tensors.source import CONFIG, MANIFEST, read_json

PATTERNS = (
    "tokenizer*",
    "*tiktoken*",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
    "*processor_config.json",
    "LICENSE*",
    "THIRD_PARTY_NOTICES*",
)


def sidecar_names(folder: Path) -> list[str]:
    """Files of the source that a build carries, sorted; a folder counts if it is named like one."""
    entries = (entry for entry in folder.iterdir() if entry.suffix or not entry.is_dir())
    return sorted(entry.name for entry in entries if is_sidecar(entry.name))


def check_readable(folder: Path) -> None:
    """Raise OSError for a sidecar that can't be read, or is a folder or a dangling link."""
    for name in sidecar_names(folder):
        with (folder / name).open("rb") as file:
            file.read(1)


def is_sidecar(name: str) -> bool:
    """Whether a build carries a source's file of this name."""
    return not name.endswith(".py") and any(fnmatch(name, pattern) for pattern in PATTERNS)


def index_bytes(plan: BuildPlan) -> bytes:
    """`model.safetensors.index.json` of the build."""
    weight_map = {tensor.name: shard.name for shard in plan.shards for tensor in shard.tensors}
    return json_bytes({"metadata": {"total_size": plan.total_size}, "weight_map": weight_map})


def manifest_bytes(
    plan: BuildPlan, records: dict[str, ShardRecord], sidecars: dict[str, bytes]
) -> bytes:
    """`kimi_k3_mlx.json`: no dates, so that equal builds have equal manifests."""
    manifest = Manifest(
        plan_sha256=plan.sha256,
        profile=plan.profile.to_json(),
        source=plan.source,
        shards=tuple(records[shard.name] for shard in plan.shards),
        sidecars={name: hashlib.sha256(content).hexdigest() for name, content in sidecars.items()},
        tools={
            "kimi_k3_mlx": __version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
    )
    return json_bytes(manifest.to_json())


def json_bytes(value: Json) -> bytes:
    """Indented JSON with a final newline."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a finished build, or None when the folder is none."""
    if file_size(folder / MANIFEST) is None or file_size(folder / CONFIG) is None:
        return None
    return Manifest.from_json(read_json(folder / MANIFEST, LOST))
