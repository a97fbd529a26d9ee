"""Reads the reference vectors of tests/golden and builds models on their weights."""

import io
import json
import lzma
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

import mlx.core as mx
import mlx.nn as nn

import kimi_k3

FOLDER = Path(__file__).parents[1] / "golden"
TEXT = ["mm_a", "text_c", "text_calm", "text_eps", "variant_nonk3"]
# max|a-b| / max|b| of float32 logits against the float64 reference.
TOLERANCE = 3e-5


@dataclass(frozen=True)
class Golden:
    config: dict
    meta: dict
    weights: dict[str, mx.array]
    vectors: dict[str, mx.array]

    @property
    def n_layers(self) -> int:
        return self.config["text_config"]["num_hidden_layers"]

    def layers_with(self, vector: str) -> list[int]:
        return [i for i in range(self.n_layers) if f"{vector}.{i}" in self.vectors]


@cache
def read_golden(name: str) -> Golden:
    raw = lzma.decompress((FOLDER / f"{name}.safetensors.xz").read_bytes())
    tensors, metadata = mx.load(io.BytesIO(raw), format="safetensors", return_metadata=True)
    vectors = {k.removeprefix("golden/"): v for k, v in tensors.items() if k.startswith("golden/")}
    weights = {k: v for k, v in tensors.items() if not k.startswith("golden/")}
    return Golden(json.loads(metadata["config"]), json.loads(metadata["meta"]), weights, vectors)


def build(config: dict, weights: dict[str, mx.array], module: ModuleType = kimi_k3) -> nn.Module:
    """A model from source tensors, experts kept as mxfp4, as mlx-lm's loader would."""
    model = module.Model(module.ModelArgs.from_dict(config))
    weights = model.sanitize(dict(weights))
    nn.quantize(
        model,
        group_size=32,
        bits=4,
        mode="mxfp4",
        class_predicate=lambda p, m: hasattr(m, "to_quantized") and f"{p}.scales" in weights,
    )
    model.eval()
    model.load_weights(list(weights.items()))
    return model


@cache
def float32_model(name: str, module: ModuleType = kimi_k3) -> nn.Module:
    golden = read_golden(name)
    return build(golden.config, {k: widen(v) for k, v in golden.weights.items()}, module)


def widen(x: mx.array) -> mx.array:
    return x.astype(mx.float32) if x.dtype == mx.bfloat16 else x


def error(a: mx.array, b: mx.array) -> float:
    """max|a-b| / max|b|"""
    b = b.astype(mx.float32)
    return (mx.abs(a.astype(mx.float32) - b).max() / mx.abs(b).max()).item()
