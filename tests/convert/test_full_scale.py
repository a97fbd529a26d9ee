"""The plan of the real Kimi-K3, from its config.json and header-only tensors: 1.56 TB, no disk."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest

from converters.config import Dims, read_dims
from converters.names import TABLE, TRUNK, Entry
from kimi_k3_mlx.convert.estimate import estimate
from kimi_k3_mlx.convert.plan import plan_build
from kimi_k3_mlx.convert.profiles import load_profile
from kimi_k3_mlx.schema import DTYPE_BYTES, BuildPlan, SourceId, TensorInfo
from kimi_k3_mlx.tensors.source import Source
from tests.convert.test_stock import stock_parameters

PAGE = 16 * 1024
PACKED, SCALES = 336 * PAGE, 21 * PAGE

pytestmark = pytest.mark.slow


def occurrences(entry: Entry, dims: Dims) -> Iterator[tuple[int, ...]]:
    """The numbers under which a row of the table occurs."""
    every = set(range(dims.n_layers))
    layers = {
        "layer": every,
        "kda": every - dims.mla_layers,
        "mla": dims.mla_layers,
        "dense": every - dims.moe_layers,
        "moe": dims.moe_layers,
        "expert": dims.moe_layers,
    }
    if entry.scope == "block":
        yield from ((block,) for block in range(dims.n_blocks))
    elif entry.scope not in layers:
        yield ()
    elif entry.scope == "expert":
        yield from ((la, ex) for la in layers["expert"] for ex in range(dims.n_experts))
    else:
        yield from ((layer,) for layer in layers[entry.scope])


def header_only_source(config: dict[str, Any]) -> Source:
    """A source that has every tensor's description and no file."""
    dims = read_dims(config)
    tensors = {}
    for entry in TABLE:
        shape = dims.shapes(entry.shape)[0]
        dtype = "BF16" if entry.dtype == TRUNK else entry.dtype
        n_bytes = prod(shape) * DTYPE_BYTES[dtype]
        for numbers in occurrences(entry, dims):
            name = entry.source.format(*numbers)
            tensors[name] = TensorInfo(name, dtype, shape, 0, n_bytes)
    return Source(Path("K3"), SourceId(None, ""), config, {}, {}, tensors)


@pytest.fixture(scope="module")
def source() -> Source:
    path = Path(__file__).parents[1] / "golden/k3_config.json"
    return header_only_source(json.loads(path.read_text("utf-8")))


@pytest.fixture(scope="module")
def plan(source: Source) -> BuildPlan:
    return plan_build(source, load_profile("mxfp4"))


def test_the_table_is_k3_to_the_byte(source: Source) -> None:
    """Counts and total_size as published in the index of moonshotai/Kimi-K3."""
    assert len(source.tensors) == 497_220
    assert source.total_size == 1_560_860_324_864


def test_the_build_is_k3_without_the_zeros_of_a_log(plan: BuildPlan) -> None:
    assert plan.total_size == 1_560_860_324_864 - 69 * 32 * 4
    roles = Counter({tensor.role: 0 for tensor in plan.tensors})
    for tensor in plan.tensors:
        roles[tensor.role] += tensor.n_bytes
    assert roles["expert"] == 1_446_456_066_048
    assert len(plan.shards) == 96
    assert plan.shards[-1].name == "model-00096-of-000096.safetensors"


def test_the_memory_needed_is_that_of_names_not_of_weights(plan: BuildPlan, tmp_path: Path) -> None:
    assert 400_000_000 < estimate(plan, tmp_path).n_memory < 600_000_000


def test_each_single_expert_begins_on_16_kib(plan: BuildPlan) -> None:
    """So that any expert of any layer can be read with aligned, uncached reads."""
    n_stacks = 0
    for shard in plan.shards:
        assert shard.header_n_bytes % PAGE == 0
        for tensor, info in zip(shard.tensors, shard.infos(), strict=True):
            if tensor.role == "expert":
                assert (shard.header_n_bytes + info.begin) % PAGE == 0
                assert {span.n_bytes for span in tensor.spans} <= {PACKED, SCALES}
                n_stacks += 1
    assert n_stacks == 92 * 6


def test_every_name_and_shape_is_that_of_the_stock_model_at_full_size(
    plan: BuildPlan, source: Source
) -> None:
    expected = stock_parameters(source.config)
    for tensor in plan.tensors:
        if tensor.role in ("vision", "projector") or tensor.name.endswith(".scales"):
            continue
        *outer, last = tensor.shape
        shape = (*outer, last * 8) if tensor.dtype == "U32" else tensor.shape
        assert expected.pop(tensor.name) == shape
    assert expected == {}
