"""Makes builds that need our code out of a build that does not."""

import json
import shutil
from pathlib import Path

import mlx.core as mx

import kimi_k3
from tests.model.graded import pruned_stacks, requantized, split_stacks

ROOT = Path(kimi_k3.__file__).parent


def read_weights(folder: Path) -> dict[str, mx.array]:
    weights: dict[str, mx.array] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        weights |= mx.load(str(file))
    return weights


def read_config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def add_code(folder: Path) -> None:
    """Our model files and package, and `model_file` in the config."""
    for file in ("kimi_k3.py", "kimi_k3_vision.py"):
        shutil.copy(ROOT / file, folder)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "kimi_k3_vl", folder / "kimi_k3_vl", ignore=ignore)
    config = read_config(folder) | {"model_file": "kimi_k3.py"}
    (folder / "config.json").write_text(json.dumps(config))


def with_code(uniform: Path, folder: Path) -> Path:
    """A uniform build that carries our code all the same."""
    shutil.copytree(uniform, folder)
    add_code(folder)
    return folder


def graded(
    uniform: Path, folder: Path, counts: list[int], low: list[int], bits: dict | None
) -> Path:
    """A build with `counts` experts by layer, `low` of them in a second bank with other bits."""
    shutil.copytree(uniform, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    weights = split_stacks(pruned_stacks(read_weights(uniform), counts), low)
    config, overrides = read_config(folder), {}
    if bits is not None:
        weights = requantized(weights, bits)
        paths = {name.rpartition(".")[0] for name in weights if "switch_mlp_low" in name}
        overrides = dict.fromkeys(sorted(paths), bits)
    config["text_config"] |= {"expert_counts": counts, "low_expert_counts": low}
    config["quantization"] |= overrides
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(config))
    add_code(folder)
    return folder
