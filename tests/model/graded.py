"""Moves experts of golden models into a second bank, and computes an MoE layer the naive way."""

import re
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

import kimi_k3
from tests.model.golden import Golden, build, read_golden, widen

MXFP4 = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def with_counts(config: dict, counts: list[int], low: list[int] | None = None) -> dict:
    """A config with these `expert_counts` and `low_expert_counts`."""
    fields = {"expert_counts": counts} | ({} if low is None else {"low_expert_counts": low})
    return config | {"text_config": config["text_config"] | fields}


def low_counts(golden: Golden, part: float) -> list[int]:
    """`part` of every MoE layer's experts; 0 for dense layers."""
    text = golden.config["text_config"]
    n, dense = text["num_experts"], text["first_k_dense_replace"]
    return [0] * dense + [int(n * part)] * (golden.n_layers - dense)


def layer_of(name: str) -> int | None:
    """The decoder layer to which a tensor of a routed expert or of the router belongs."""
    match = re.search(r"model\.layers\.(\d+)\.mlp\.(switch_mlp\.|gate\.weight|e_score)", name)
    return int(match[1]) if match else None


def pruned_stacks(weights: dict[str, mx.array], counts: list[int]) -> dict[str, mx.array]:
    """Build weights with the first `counts[layer]` experts of every layer."""
    layers = {name: layer_of(name) for name in weights}
    return {n: w if layers[n] is None else w[: counts[layers[n]]] for n, w in weights.items()}


def split_stacks(weights: dict[str, mx.array], low: list[int]) -> dict[str, mx.array]:
    """Build weights whose last experts of each layer lie in `switch_mlp_low`."""
    result = dict(weights)
    for name, w in weights.items():
        if ".switch_mlp." in name and (n_low := low[layer_of(name)]):
            low_name = name.replace("switch_mlp", "switch_mlp_low")
            result[name], result[low_name] = mx.split(w, [len(w) - n_low])
    return result


def requantized(weights: dict[str, mx.array], quantization: dict) -> dict[str, mx.array]:
    """The low bank in other bits."""
    result = dict(weights)
    for name in [n for n in weights if "switch_mlp_low" in n and n.endswith(".weight")]:
        path = name.removesuffix(".weight")
        scales = result.pop(f"{path}.scales")
        dense = mx.dequantize(result.pop(name), scales, **MXFP4).astype(mx.float32)
        parts = mx.quantize(dense, **quantization)
        names = ("weight", "scales", "biases")
        result |= {f"{path}.{part}": w for part, w in zip(names, parts, strict=False)}
    return result


def load(config: dict, weights: dict[str, mx.array], quantization: dict[str, Any]) -> nn.Module:
    """A model, quantized by path as mlx_lm.utils.load_model does."""
    model = kimi_k3.Model(kimi_k3.ModelArgs.from_dict(config))
    weights = model.sanitize(weights)

    def predicate(path: str, module: nn.Module) -> bool | dict:
        if path in quantization:
            return quantization[path]
        return hasattr(module, "to_quantized") and f"{path}.scales" in weights and MXFP4

    nn.quantize(model, class_predicate=predicate)
    model.eval()
    model.load_weights(list(weights.items()))
    return model


def split_model(name: str, part: float) -> nn.Module:
    """A golden float32 model with `part` of every layer's experts, unchanged, in the low bank."""
    golden = read_golden(name)
    low = low_counts(golden, part)
    counts = [golden.config["text_config"]["num_experts"]] * golden.n_layers
    whole = build(golden.config, {k: widen(v) for k, v in golden.weights.items()})
    weights = split_stacks(dict(tree_flatten(whole.parameters())), low)
    return load(with_counts(golden.config, counts, low), weights, {})


def quantize_trunk(model: nn.Module, quantization: dict) -> None:
    """Every matrix but the routed experts' and the residual mixing's, where whole groups allow it
    even after a split over two ranks."""

    def predicate(path: str, module: nn.Module) -> bool | dict:
        takes = hasattr(module, "to_quantized") and "switch_mlp" not in path
        whole = takes and module.weight.shape[-1] % (2 * quantization["group_size"]) == 0
        return whole and "res_proj" not in path and quantization

    nn.quantize(model, class_predicate=predicate)


def dense_weight(bank: nn.Module) -> np.ndarray:
    """The experts of a bank [experts, out, in] in float64, dequantized."""
    w = bank.weight
    if "scales" in bank:
        settings = {"group_size": bank.group_size, "bits": bank.bits, "mode": bank.mode}
        w = mx.dequantize(w, bank.scales, bank.get("biases"), **settings)
    return np.array(w.astype(mx.float32)).astype(np.float64)


def naive_situ(gate: np.ndarray, up: np.ndarray, beta: float, linear_beta: float) -> np.ndarray:
    """β tanh(g/β) σ(g) · β' tanh(u/β')"""
    return (
        beta * np.tanh(gate / beta) / (1 + np.exp(-gate)) * linear_beta * np.tanh(up / linear_beta)
    )


def naive_experts(moe: nn.Module, z: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Outputs [tokens, k, size] of the chosen experts, one token and one expert at a time."""
    banks = [moe.switch_mlp] + [moe.switch_mlp_low] * ("switch_mlp_low" in moe)
    dense = [{p: dense_weight(bank[p]) for p in PROJECTIONS} for bank in banks]
    n_first = len(dense[0]["gate_proj"])
    outputs = np.zeros((*indices.shape, z.shape[-1]))
    for token, slot in np.ndindex(*indices.shape):
        expert = int(indices[token, slot])
        bank, i = (dense[0], expert) if expert < n_first else (dense[1], expert - n_first)
        gate, up = (bank[p][i] @ z[token] for p in ("gate_proj", "up_proj"))
        outputs[token, slot] = bank["down_proj"][i] @ naive_situ(gate, up, *moe.switch_mlp.betas)
    return outputs
