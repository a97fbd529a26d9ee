"""Loads a build through mlx-lm's own loader, with the installed `kimi_k3` as its model.

Input: a folder. Output: model, tokenizer and config. The index decides which shards exist: mlx-lm
itself loads every `model*.safetensors` it finds, so a stale one would silently replace weights.
Code that lies in the build is never executed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from kimi_k3_mlx.errors import CheckpointError, UsageError

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
MODEL_TYPE = "kimi_k3"


class Loaded(NamedTuple):
    """A build in memory."""

    model: Any
    tokenizer: Any
    config: dict[str, Any]


def load(path: str | Path, *, lazy: bool = False) -> Loaded:
    """Load a finished build; with `lazy`, weights are read when they are first used."""
    path = Path(path)
    check_build(path)
    check_tokenizer(path)
    from mlx_lm.utils import load_model, load_tokenizer

    model, config = load_model(
        path, lazy=lazy, model_config={"model_file": None}, get_model_classes=installed_classes
    )
    tokenizer = load_tokenizer(
        path, {"trust_remote_code": False}, eos_token_ids=config.get("eos_token_id")
    )
    return Loaded(model, tokenizer, config)


def installed_classes(config: dict[str, Any]) -> tuple[type, type]:
    """The model and its arguments: always the installed module, whatever the build carries."""
    from kimi_k3 import Model, ModelArgs

    return Model, ModelArgs


def check_build(path: Path) -> None:
    """Refuse a folder that is no finished K3 build, or whose shards are not those of its index."""
    if not path.is_dir():
        raise UsageError(f"{path} is not a folder.", "give the folder of a build: --model DIR")
    config = read_object(path / CONFIG)
    if config.get("model_type") != MODEL_TYPE:
        raise CheckpointError(
            f"{path / CONFIG} has model_type {config.get('model_type')!r}, expected {MODEL_TYPE!r}."
        )
    check_shards(path)


def check_shards(path: Path) -> None:
    """Compare the folder's shards with the index."""
    weight_map = read_object(path / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path / INDEX} names no shards.")
    named = set(weight_map.values())
    found = {shard.name for shard in path.glob("model*.safetensors")}
    if missing := sorted(named - found):
        raise CheckpointError(
            f"{path} lacks {count(missing)} of the {len(named)} in its index.",
            "run the kimi-k3 convert that made it again.",
        )
    if extra := sorted(found - named):
        raise CheckpointError(
            f"{path} holds {count(extra)} that the index does not name; "
            "mlx-lm would load it over the build's own weights.",
            f"move it away: {path / extra[0]}",
        )


def count(names: list[str]) -> str:
    """`model-00002.safetensors`, or `5 shards (model-00002.safetensors, …)`."""
    return names[0] if len(names) == 1 else f"{len(names)} shards ({names[0]}, …)"


def check_tokenizer(path: Path) -> None:
    """Refuse a folder without a tokenizer that loads without remote code."""
    if not (path / "tokenizer.json").is_file():
        raise CheckpointError(
            f"{path} has no tokenizer.json.",
            "put one there: K3's own tiktoken.model needs remote code, which is never run.",
        )


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object of a build."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path.parent} has no {path.name}: it is not a finished build.",
            f"finish it by the same kimi-k3 convert, or make one: --mlx-path {path.parent}",
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object.")
    return value
