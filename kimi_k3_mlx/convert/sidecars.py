"""The small files of a build: copies from the source, our model file, tokenizer, index, manifest.

Input: the source and the plan. Output: file names and bytes. The source's code (`*.py`) goes only
into its own layout; ours only into builds that stock mlx-lm can't load.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Container, Iterator
from fnmatch import fnmatch
from importlib import metadata, resources
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from converters.config import MODEL_FILE
from kimi_k3_mlx import __version__
from kimi_k3_mlx.convert.tokenizer import (
    TIKTOKEN,
    TOKENIZER,
    TOKENIZER_CONFIG,
    tokenizer_files,
)
from kimi_k3_mlx.errors import CheckpointError
from kimi_k3_mlx.schema import LOST, BuildPlan, Json, Manifest, ShardRecord
from kimi_k3_mlx.tensors.header import file_size
from kimi_k3_mlx.tensors.journal import JOURNAL
from kimi_k3_mlx.tensors.local import read_json
from kimi_k3_mlx.tensors.source import CONFIG, DOWNLOAD, INDEX, MANIFEST, Source

PRUNE_PLAN = "prune_plan.json"
TEMPLATE = "chat_template.jinja"
ROOT_FILES = ("kimi_k3", "kimi_k3_vision", "kimi_k3_vl")
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


def sidecar_names(plan: BuildPlan, source: Source) -> list[str]:
    """The small files beside the shards, sorted: copies from the source, and what we add."""
    added = [PRUNE_PLAN] if plan.prune else []
    if MODEL_FILE in plan.config.values():
        added += [name for name, _ in _root_files()]
    return sorted({*copied_names(plan, source), *made_names(plan, source), *added})


def copied_names(plan: BuildPlan, source: Source) -> list[str]:
    """The source's small files that a build carries as they are, sorted."""
    wanted = is_verbatim if plan.profile.layout == "moonshot" else is_sidecar
    made = made_names(plan, source)
    return [name for name in source.files() if wanted(name) and name not in made]


def made_names(plan: BuildPlan, source: Source) -> list[str]:
    """What stock programs need to talk to an MLX build, and the source lacks."""
    if plan.profile.layout == "moonshot":
        return []
    files = source.files()
    lacks_template = not any(name.startswith("chat_template") for name in files)
    made = [TOKENIZER, TOKENIZER_CONFIG] if needs_tokenizer(files) else []
    return [*made, TEMPLATE] if lacks_template and {TOKENIZER, *made} & {*files, *made} else made


def needs_tokenizer(files: Container[str]) -> bool:
    """Whether a source's tokenizer is only in K3's own form, which takes remote code to read."""
    return TIKTOKEN in files and TOKENIZER not in files


def made_tokenizer(source: Source) -> dict[str, bytes]:
    """The tokenizer files of a source that has only `tiktoken.model`."""
    if TOKENIZER_CONFIG not in source.files():
        raise CheckpointError(
            f"{source.where} has {TIKTOKEN}, but no {TOKENIZER_CONFIG}.", DOWNLOAD
        )
    vocab_size = source.config["text_config"]["vocab_size"]
    model, config = source.read_file(TIKTOKEN), source.read_file(TOKENIZER_CONFIG)
    return tokenizer_files(model, config, vocab_size)


def read_sidecars(plan: BuildPlan, source: Source) -> dict[str, bytes]:
    """Name and content of every small file; raises OSError or HubError for an unreadable one."""
    files = {name: source.read_file(name) for name in copied_names(plan, source)}
    made = made_names(plan, source)
    if TOKENIZER in made:
        files |= made_tokenizer(source)
    if TEMPLATE in made:
        files[TEMPLATE] = resources.files("kimi_k3_mlx.chat").joinpath(TEMPLATE).read_bytes()
    if plan.prune:
        files[PRUNE_PLAN] = plan.prune.to_text().encode()
    if MODEL_FILE in plan.config.values():
        files |= {name: path.read_bytes() for name, path in _root_files()}
    return dict(sorted(files.items()))


def is_sidecar(name: str) -> bool:
    """Whether an MLX build carries a source's file of this name."""
    return not name.endswith(".py") and any(fnmatch(name, pattern) for pattern in PATTERNS)


def is_verbatim(name: str) -> bool:
    """Whether a pruned checkpoint carries it: all but weights, their records and the model card."""
    records = (CONFIG, INDEX, MANIFEST, JOURNAL, PRUNE_PLAN, "README.md")
    return not name.startswith(".") and not name.endswith(".safetensors") and name not in records


def _root_files() -> Iterator[tuple[str, Path]]:
    """Our model files, under the names that they have in a build."""
    for name in ROOT_FILES:
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            continue
        path = Path(spec.origin)
        if path.name == "__init__.py":
            yield from ((f"{name}/{file.name}", file) for file in sorted(path.parent.glob("*.py")))
        else:
            yield path.name, path


def index_bytes(plan: BuildPlan) -> bytes:
    """`model.safetensors.index.json` of the build."""
    weight_map = {tensor.name: shard.name for shard in plan.shards for tensor in shard.tensors}
    return json_bytes({"metadata": {"total_size": plan.total_size}, "weight_map": weight_map})


def manifest_bytes(
    plan: BuildPlan, records: dict[str, ShardRecord], sidecars: dict[str, bytes]
) -> bytes:
    """`kimi_k3_mlx.json`: no dates, so that equal builds have equal manifests."""
    tools = {"numpy": np.__version__, "python": platform.python_version()}
    if any(tensor.quantization for tensor in plan.tensors):
        tools["mlx"] = metadata.version("mlx")
    manifest = Manifest(
        plan_sha256=plan.sha256,
        profile=plan.profile.to_json(),
        prune_sha256=plan.prune.sha256 if plan.prune else None,
        source=plan.source,
        shards=tuple(records[shard.name] for shard in plan.shards),
        sidecars={name: hashlib.sha256(content).hexdigest() for name, content in sidecars.items()},
        tools={"kimi_k3_mlx": __version__, **tools},
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
