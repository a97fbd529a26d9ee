"""Count the MLX primitives of one decode step of a 93-layer model: work per token, without a GPU.

Input: a model module (stock's or ours) and a path. Output: `Counts`. Every primitive except a view
is about one kernel launch on a GPU, and launches are what decoding one sequence pays for besides
bytes. The layout is K3's (69 KDA and 24 MLA layers, AttnRes blocks of 12, 92 MoE layers); the sizes
are tiny, for the count does not depend on them.

On the path "metal" MLX believes that it has a GPU. Every custom kernel and `mx.fast.rms_norm` is
one opaque node; `mx.fast.scaled_dot_product_attention` stays decomposed, as it is on Metal for the
head dimension 512 of K3's absorbed MLA.

The count does not know the bytes moved, the copies that non-contiguous inputs cost, or that a large
reduction and a concatenation are more than one launch.

Our model is counted twice: as it is, and with some experts of every layer in a second bank.

    python -m benchmarks.primitives [--json] [--float32] [--layers N] [MODULE ...]
"""

from __future__ import annotations

import argparse
import functools
import importlib
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from types import ModuleType
from typing import Any, Literal
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path

from benchmarks.metal_path import compile_mode, fresh_import, metal_path

CodePath = Literal["cpu", "metal"]
PATHS: tuple[CodePath, ...] = ("cpu", "metal")
MODULES = ("mlx_lm.models.kimi_k3", "kimi_k3")
K3_LAYERS = 93
N_EXPERTS = 16
N_LOW = 5
"""The routed experts of a layer, and how many of them a graded build has in its low bank."""
OPAQUE = "Depends"
"""The primitive that stands for a kernel: any inputs, any outputs, one node, never fused."""
VIEWS = {
    *("AsStrided", "Broadcast", "BroadcastAxes", "Copy", "ExpandDims", "Flatten", "View"),
    *("NumberOfElements", "Reshape", "Slice", "Split", "Squeeze", "StopGradient", "Transpose"),
    "Unflatten",
}
"""They share or only describe memory."""


FLOAT32_TENSORS = ("A_log", "dt_bias", "conv.weight", "o_norm.weight", "correction_bias")
"""What K3's checkpoint keeps in float32. mlx-lm's converter casts it down, ours does not."""


@dataclass(frozen=True)
class Counts:
    """The primitives of one decode step: all but views in `by_name`, the kernels in `opaque`."""

    module: str
    path: CodePath
    layers: int
    n_low: int
    total: int
    views: int
    by_name: dict[str, int]
    opaque: dict[str, int]


def model_config(layers: int = K3_LAYERS, n_low: int = 0) -> dict[str, Any]:
    """K3's layer layout with tiny sizes, and `n_low` experts of every layer in the low bank."""
    full = [i for i in range(1, layers + 1) if i % 4 == 0 or i == layers]
    kda = [i for i in range(1, layers + 1) if i not in full]
    text = {
        "model_type": "kimi_linear",
        "vocab_size": 64,
        "hidden_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "rms_norm_eps": 1e-5,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "attn_res_block_size": 12,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 32,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "num_experts": N_EXPERTS,
        "num_experts_per_token": 4,
        "num_shared_experts": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "routed_expert_hidden_size": 32,
        "latent_moe_use_norm": True,
        "linear_attn_config": {
            "full_attn_layers": full,
            "kda_layers": kda,
            "head_dim": 32,
            "num_heads": 2,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "use_full_rank_gate": True,
        },
    }
    if n_low:
        text["expert_counts"], text["low_expert_counts"] = [N_EXPERTS] * layers, [n_low] * layers
    return {"model_type": "kimi_k3", "text_config": text}


def expert_format(path: str, module: nn.Module) -> bool | dict[str, Any]:
    """MXFP4 for experts, two bits for those of the low bank."""
    if not hasattr(module, "to_quantized") or "switch_mlp" not in path:
        return False
    low = "switch_mlp_low" in path
    return {"group_size": 32, "bits": 2 if low else 4, "mode": "affine" if low else "mxfp4"}


def build_model(
    module: ModuleType, layers: int, float32_tensors: bool, n_low: int = 0
) -> nn.Module:
    """A random bf16 model with quantized experts, ready to run."""
    model = module.Model(module.ModelArgs.from_dict(model_config(layers, n_low)))

    def cast(path: str, x: mx.array) -> mx.array:
        wide = float32_tensors and path.endswith(FLOAT32_TENSORS)
        return x.astype(mx.float32 if wide else mx.bfloat16)

    model.update(tree_map_with_path(cast, model.parameters()))
    nn.quantize(model, class_predicate=expert_format)
    model.eval()
    mx.eval(model)
    return model


@functools.cache
def placeholder(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """An evaluated array, which adds no node to a graph."""
    zeros = mx.zeros(shape, dtype)
    mx.eval(zeros)
    return zeros


def opaque(inputs: Sequence[Any], shapes: Sequence[Any], dtypes: Sequence[Any]) -> list[mx.array]:
    """One node that reads the inputs and has outputs of these shapes."""
    outputs = [placeholder(tuple(s), d) for s, d in zip(shapes, dtypes, strict=True)]
    return mx.depends(outputs, [x for x in inputs if isinstance(x, mx.array)])


@contextmanager
def opaque_kernels() -> Iterator[Counter[str]]:
    """The Metal path with stand-ins for kernels; yields how often Python called each."""
    calls: Counter[str] = Counter()

    def metal_kernel(name: str, *_: Any, **__: Any) -> Callable[..., list[mx.array]]:
        def launch(
            *, inputs: Any, output_shapes: Any, output_dtypes: Any, **_: Any
        ) -> list[mx.array]:
            calls[name] += 1
            return opaque(inputs, output_shapes, output_dtypes)

        return launch

    def rms_norm(x: mx.array, weight: mx.array | None, eps: float, **_: Any) -> mx.array:
        calls["fast.rms_norm"] += 1
        return opaque([x, weight], [x.shape], [x.dtype])[0]

    with metal_path(metal_kernel), mock.patch.object(mx.fast, "rms_norm", rms_norm):
        yield calls


def cache_arrays(cache: Sequence[Any]) -> list[mx.array]:
    """What a step leaves behind for the next one."""
    leaves = (leaf for _, leaf in tree_flatten([entry.state for entry in cache]))
    return [leaf for leaf in leaves if isinstance(leaf, mx.array)]


def warm_cache(model: nn.Module) -> list[Any]:
    """A cache after a prompt and a token, so that every lazy value of the model exists."""
    cache = model.make_cache()
    for tokens in ([1, 2, 3], [4]):
        mx.eval(model(mx.array([tokens]), cache), cache_arrays(cache), model)
    return cache


def decode_step(model: nn.Module, cache: list[Any]) -> list[mx.array]:
    """The unevaluated outputs of one greedy step: the next token and the whole new state."""
    token = placeholder((1, 1), mx.int32)
    return [mx.argmax(model(token, cache)[:, -1], -1), *cache_arrays(cache)]


def graph_nodes(outputs: Sequence[mx.array]) -> Counter[str]:
    """Primitives by name. The graph has a line per instance; its ids repeat under mx.compile."""
    graph = io.StringIO()
    mx.export_to_dot(graph, *outputs)
    labels = re.findall(r'\[label ="([^"]+)"', graph.getvalue())
    return Counter(re.sub(r"^(Compiled|View).*", r"\1", label) for label in labels)


def count_primitives(
    model_module: ModuleType,
    path: CodePath,
    layers: int = K3_LAYERS,
    *,
    float32_tensors: bool = False,
    n_low: int = 0,
) -> Counts:
    """Count one decode step of the module's model, with `mx.compile` on.

    On the Metal path the module's file is executed again, under a private name, because its kernels
    may be made at import. Nothing stays patched.
    """
    metal = path == "metal"
    with opaque_kernels() if metal else nullcontext(Counter()) as calls:
        module = fresh_import(model_module) if metal else model_module
        model = build_model(module, layers, float32_tensors, n_low)
        nodes = step_nodes(model)
        # A compiled function calls Python once for all layers: only without it are calls nodes.
        with compile_mode(enabled=False):
            cache = warm_cache(model)
            calls.clear()
            decode_step(model, cache)
    return summarize(Counts(model_module.__name__, path, layers, n_low, 0, 0, {}, {}), nodes, calls)


def step_nodes(model: nn.Module) -> Counter[str]:
    """The nodes of a decode step. Only graphs are made of compiled code: MLX's CPU back end would
    run g++ for every fused kernel."""
    with compile_mode(enabled=False):
        cache = warm_cache(model)
    with compile_mode(enabled=True):
        return graph_nodes(decode_step(model, cache))


def summarize(of: Counts, nodes: Counter[str], calls: Counter[str]) -> Counts:
    """Separate views from work, and give the opaque nodes their names."""
    by_name = {k: n for k, n in nodes.most_common() if k not in VIEWS}
    if nodes[OPAQUE] != calls.total():
        raise ValueError(f"{nodes[OPAQUE]} opaque nodes, but {calls.total()} kernel calls")
    if OPAQUE in by_name:
        by_name["(kernels)"] = by_name.pop(OPAQUE)
    total = sum(by_name.values())
    views = nodes.total() - total
    kernels = dict(calls.most_common())
    return replace(of, total=total, views=views, by_name=by_name, opaque=kernels)


def table(counts: Sequence[Counts]) -> str:
    """All counts side by side, the largest rows first."""
    names = Counter[str]()
    for c in counts:
        names.update(c.by_name)
    heads = [f"{c.module.partition('.')[0]} {c.path}{' banks' * bool(c.n_low)}" for c in counts]
    rows = [("all but views", [c.total for c in counts])]
    rows.append(("per layer", [round(c.total / c.layers, 1) for c in counts]))
    rows += [(name, [c.by_name.get(name, 0) for c in counts]) for name, _ in names.most_common()]
    kernels = sorted({name for c in counts for name in c.opaque})
    rows += [(f"  {name}", [c.opaque.get(name, 0) for c in counts]) for name in kernels]
    rows.append(("(views)", [c.views for c in counts]))
    lines = ["".join([f"{'':24}", *(f"{head:>22}" for head in heads)])]
    lines += ["".join([f"{name:24}", *(f"{n:>22,}" for n in ns)]) for name, ns in rows]
    return "\n".join(lines)


def main() -> None:
    """Count for every module and path, and print a table or JSON."""
    parser = argparse.ArgumentParser(description="MLX primitives of one decode step.")
    parser.add_argument("modules", nargs="*", default=MODULES, metavar="MODULE")
    parser.add_argument("--path", choices=PATHS, action="append", help="default: both")
    parser.add_argument("--layers", type=int, default=K3_LAYERS)
    parser.add_argument("--float32", action="store_true", help="keep K3's float32 tensors")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    modules = [importlib.import_module(name) for name in args.modules]
    paths = args.path or PATHS
    counts = [
        count_primitives(m, path, args.layers, float32_tensors=args.float32, n_low=n_low)
        for path in paths
        for m in modules
        for n_low in ((0, N_LOW) if m.__name__ == MODULES[1] else (0,))
    ]
    print(json.dumps([asdict(c) for c in counts], indent=1) if args.json else table(counts))


if __name__ == "__main__":
    main()
