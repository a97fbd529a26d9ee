"""What a folder says before a weight is read: whether it is a finished build that loads.

Input: a folder. Output: its headers, or an error that names the file. The index decides which
shards exist: mlx-lm itself loads every `model*.safetensors` it finds, so a stale one would silently
replace weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from converters.config import read_dims
from kimi_k3_mlx.errors import CheckpointError
from kimi_k3_mlx.schema import Json
from kimi_k3_mlx.tensors.local import LocalSource, open_source, read_json
from kimi_k3_mlx.tensors.source import CONFIG

TOKENIZER = "tokenizer.json"
OTHER_JSON = (TOKENIZER, "tokenizer_config.json", "generation_config.json")
FINISH = (
    "give the folder of a whole checkpoint; to finish a build, run the same kimi-k3 convert again."
)
MAKE_AGAIN = "make it again by the same kimi-k3 convert with --overwrite, or download it again."


def check_build(path: Path) -> LocalSource:
    """Refuse a folder that headers and JSON show to be damaged, before any weight is read."""
    with explained(path):
        build = open_source(path)
        check_config(path, build.config)
        for name in OTHER_JSON:
            if (path / name).is_file():
                read_json(path / name)
    check_extra_shards(path, build.shards)
    if not (path / TOKENIZER).is_file():
        raise CheckpointError(
            f"{path} has no {TOKENIZER}.",
            "put one there: K3's own tiktoken.model needs remote code, which is never run.",
        )
    return build


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Give errors about a build the hint that mends a build: other readers think of sources."""
    try:
        yield
    except CheckpointError as error:
        if not (path / CONFIG).is_file():
            error.hint = FINISH
        elif not is_source(path):
            error.hint = MAKE_AGAIN
        raise


def is_source(path: Path) -> bool:
    """Whether the folder is a checkpoint in Moonshot's layout, as far as its config tells."""
    try:
        return "quantization" not in read_json(path / CONFIG)
    except CheckpointError:
        return False


def check_config(path: Path, config: Json) -> None:
    """Refuse a config that is not a Kimi-K3's, or asks for what the model doesn't do."""
    read_dims(config)
    from kimi_k3 import ModelArgs

    try:
        ModelArgs.from_dict(config)
    except ValueError as error:
        raise CheckpointError(f"{path / CONFIG}: {summary(error)}.") from error


def check_extra_shards(path: Path, named: Iterable[str]) -> None:
    """Refuse shards that mlx-lm would find though the index does not name them."""
    extra = sorted({shard.name for shard in path.glob("model*.safetensors")} - set(named))
    if extra:
        count = extra[0] if len(extra) == 1 else f"{len(extra)} shards ({extra[0]}, …)"
        raise CheckpointError(
            f"{path} holds {count} that the index does not name; "
            "mlx-lm would load it over the build's own weights.",
            f"move it away: {path / extra[0]}",
        )


def summary(error: Exception) -> str:
    """The beginning of another library's message, which may list thousands of tensors."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    return " ".join(lines[:2]).rstrip(" ,.:")
