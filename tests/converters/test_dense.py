"""Trunk conversions against a numpy twin that says the same with arrays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from converters.config import Dims, read_dims
from converters.dense import (
    DROP_ZERO_TAIL,
    a_log,
    absorbed,
    apply_transform,
    copied,
    joined,
    joined_conv,
)
from kimi_k3_mlx.errors import CheckpointError
from kimi_k3_mlx.schema import BuildTensor, TensorInfo
from kimi_k3_mlx.tensors.local import open_source

RNG = np.random.default_rng(0)
Arrays = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def dims(tiny_source: Path) -> Dims:
    return read_dims(open_source(tiny_source).config)


def tensor(arrays: Arrays, name: str, *shape: int, dtype: str = "BF16") -> TensorInfo:
    """Describe a new random tensor and keep its values."""
    words = {"BF16": np.uint16, "F32": np.float32}[dtype]
    arrays[name] = RNG.integers(0, 30000, shape).astype(words)
    return TensorInfo(name, dtype, shape, 0, arrays[name].nbytes)


def execute(tensor: BuildTensor, arrays: Arrays) -> np.ndarray:
    """What `convert.run` does, in memory."""
    data = b"".join(arrays[span.tensor].tobytes()[span.begin : span.end] for span in tensor.spans)
    words = {"BF16": np.uint16, "F32": np.float32}[tensor.dtype]
    return np.frombuffer(apply_transform(tensor, data), words).reshape(tensor.shape)


def test_copied() -> None:
    arrays: Arrays = {}
    built = copied("b", "norm", tensor(arrays, "a", 3, 5))
    assert np.array_equal(execute(built, arrays), arrays["a"])


def test_query_key_and_value_are_fused_in_order() -> None:
    arrays: Arrays = {}
    parts = [tensor(arrays, name, 4, 6) for name in "qkv"]
    built = joined("qkv", "attention", parts)
    assert np.array_equal(execute(built, arrays), np.concatenate([arrays[n] for n in "qkv"]))


def test_kernels_swap_their_last_axes() -> None:
    arrays: Arrays = {}
    parts = [tensor(arrays, name, 6, 1, 4, dtype="F32") for name in "qkv"]
    built = joined_conv("conv", "attention", parts)
    expected = np.concatenate([np.moveaxis(arrays[name], 2, 1) for name in "qkv"])
    assert built.shape == (18, 4, 1)
    assert np.array_equal(execute(built, arrays), expected)


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_kv_b_splits_by_head(dims: Dims, dtype: str) -> None:
    arrays: Arrays = {}
    dims = replace(dims, heads=3, nope=8, value=5)
    source = tensor(arrays, "kv_b", 3 * 13, 7, dtype=dtype)
    embed_q, unembed_out = absorbed(["q", "o"], "attention", source, dims)
    by_head = arrays["kv_b"].reshape(3, 13, 7)
    assert np.array_equal(execute(embed_q, arrays), by_head[:, :8].transpose(0, 2, 1))
    assert np.array_equal(execute(unembed_out, arrays), by_head[:, 8:])


def test_a_log_loses_its_zero_tail(dims: Dims) -> None:
    arrays: Arrays = {}
    source = tensor(arrays, "A_log", 32, dtype="F32")
    arrays["A_log"][2:] = 0
    built = a_log("A_log", "attention", source, dims)
    assert built.transform == DROP_ZERO_TAIL
    assert np.array_equal(execute(built, arrays), arrays["A_log"][:2])


def test_a_log_of_the_heads_alone_is_copied(dims: Dims) -> None:
    arrays: Arrays = {}
    built = a_log("A_log", "attention", tensor(arrays, "A_log", 2, dtype="F32"), dims)
    assert np.array_equal(execute(built, arrays), arrays["A_log"])


@pytest.mark.parametrize("value", [0.5, np.nan])
def test_a_log_with_a_tail_is_refused(dims: Dims, value: float) -> None:
    arrays: Arrays = {}
    source = tensor(arrays, "A_log", 32, dtype="F32")
    arrays["A_log"][2:] = 0
    arrays["A_log"][7] = value
    built = a_log("A_log", "attention", source, dims)
    with pytest.raises(CheckpointError, match=f"A_log: element 7 is {value}, expected 0 after the"):
        execute(built, arrays)
