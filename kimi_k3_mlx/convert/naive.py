"""Where each source tensor must be found in a build, said a second time and without `converters`.

Input: a source tensor and the config. Output: `Place`s: build tensor, its whole shape and dtype,
first byte, and how the source's values lie there. Slow and plain: the oracle of `verify`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kimi_k3_mlx.errors import CheckpointError
from kimi_k3_mlx.schema import Json, TensorInfo

Array = NDArray[Any]
WORDS = {"BF16": np.uint16, "F32": np.float32, "U8": np.uint8, "U32": np.uint32}

_EXPERT = re.compile(r"(.*\.)block_sparse_moe\.experts\.(\d+)\.(w[123])\.weight_(packed|scale)")
_ATTENTION = re.compile(r"(.*\.self_attn\.)([qkv])_(proj|conv1d)\.weight")


class Place(NamedTuple):
    """Part of a build tensor that one source tensor must fill."""

    build: str
    dtype: str
    shape: tuple[int, ...]
    """Shape of the whole build tensor."""
    begin: int
    """First byte inside the build tensor."""
    values: Callable[[Array], Array] | None = None
    """The expected values from the source's; None: the same bytes."""


def places(tensor: TensorInfo, config: Json) -> Iterator[Place]:
    """Every place of a source tensor in a uniform build."""
    name, text = tensor.name, config["text_config"]
    if expert := _EXPERT.fullmatch(name):
        yield _expert(tensor, expert, text["num_experts"])
    elif part := _ATTENTION.fullmatch(name):
        yield _query_key_value(tensor, part)
    elif name.endswith(".self_attn.A_log"):
        heads = text["linear_attn_config"]["num_heads"]
        yield Place(name, tensor.dtype, (heads,), 0, partial(_heads, name, heads))
    elif name.endswith(".kv_b_proj.weight"):
        yield from _absorbed(tensor, text)
    else:
        build = name.replace(".gate.e_score_correction_bias", ".e_score_correction_bias")
        build = build.replace(".block_sparse_moe.", ".mlp.")
        yield Place(build, tensor.dtype, tensor.shape, 0)


def _heads(name: str, heads: int, values: Array) -> Array:
    for index in range(heads, len(values)):
        if values[index] != 0:
            raise CheckpointError(
                f"tensor {name}: element {index} is {values[index]}, "
                f"expected 0 after the {heads} heads.",
                "the checkpoint is not a Kimi-K3 that this version knows.",
            )
    return values[:heads]


def _expert(tensor: TensorInfo, match: re.Match[str], n_experts: int) -> Place:
    layer, number, matrix, part = match.groups()
    projection = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}[matrix]
    out, width = tensor.shape
    build = f"{layer}mlp.switch_mlp.{projection}."
    begin = int(number) * tensor.n_bytes
    if part == "scale":
        return Place(f"{build}scales", "U8", (n_experts, out, width), begin)
    return Place(f"{build}weight", "U32", (n_experts, out, width // 4), begin)


def _query_key_value(tensor: TensorInfo, match: re.Match[str]) -> Place:
    attention, letter, kind = match.groups()
    begin = "qkv".index(letter) * tensor.n_bytes
    rows = 3 * tensor.shape[0]
    if kind == "proj":
        build = f"{attention}qkv_proj.weight"
        return Place(build, tensor.dtype, (rows, tensor.shape[1]), begin)
    build, kernel = f"{attention}qkv_conv.conv.weight", (rows, tensor.shape[2], 1)
    return Place(build, tensor.dtype, kernel, begin, lambda values: np.moveaxis(values, 2, 1))


def _absorbed(tensor: TensorInfo, text: Json) -> Iterator[Place]:
    heads, nope = text["num_attention_heads"], text["qk_nope_head_dim"]
    value, lora = text["v_head_dim"], tensor.shape[1]
    attention = tensor.name.removesuffix("kv_b_proj.weight")

    def by_head(values: Array) -> Array:
        return values.reshape(heads, nope + value, lora)

    yield Place(
        f"{attention}embed_q.weight",
        tensor.dtype,
        (heads, lora, nope),
        0,
        lambda values: np.transpose(by_head(values)[:, :nope, :], (0, 2, 1)),
    )
    yield Place(
        f"{attention}unembed_out.weight",
        tensor.dtype,
        (heads, value, lora),
        0,
        lambda values: by_head(values)[:, nope:, :],
    )


def element(dtype: str, shape: tuple[int, ...], data: bytes, at: int) -> tuple[str, float]:
    """Position and value of one element: `data` is the element, `at` its number."""
    words = np.frombuffer(data, WORDS[dtype])
    if dtype == "BF16":
        words = (words.astype(np.uint32) << 16).view(np.float32)
    position = tuple(map(int, np.unravel_index(at, shape))) if prod(shape) else ()
    return str(list(position)), words[0].item()
