"""The plan of the real Kimi-K3, from its config.json and header-only tensors: 1.56 TB, no disk."""

from __future__ import annotations

import json
import re
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
from kimi_k3_mlx.convert.profiles import load_profile, profile_names
from kimi_k3_mlx.prune_plan import keep_first
from kimi_k3_mlx.schema import DTYPE_BYTES, BuildPlan, SourceId, TensorInfo
from kimi_k3_mlx.tensors.local import LocalSource
from kimi_k3_mlx.tensors.source import Source
from kimi_k3_mlx.units import format_bytes
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


def header_only_source(config: dict[str, Any]) -> LocalSource:
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
    return LocalSource("K3", SourceId(None, ""), config, {}, dict.fromkeys(tensors, "K3"), tensors)


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


# Published builds: experts kept, profile, tensor bytes, and gigabytes as published.
BUILDS = [
    (320, "moonshot", 630_235_805_696, "630.24"),
    (448, "moonshot", 837_041_254_400, "837.04"),
    (384, "moonshot", 733_638_530_048, "733.64"),
    (224, "moonshot", 475_131_719_168, "475.13"),
    (242, "mxfp4-q8", 451_435_437_920, "451.44"),
    (242, "mxfp4", 504_213_726_560, "504.21"),
    (179, "mxfp4-q8", 349_687_330_256, "349.69"),
]


def sized(keep: int, profile: str) -> int:
    """Bytes of a pruned build, worked out anew: experts, trunk, bits."""
    router, bias, experts = 92 * keep * 7168 * 2, 92 * keep * 4, 92 * keep * 17_547_264
    others = 114_404_258_816 - 92 * 896 * (7168 * 2 + 4)
    if profile == "moonshot":
        return experts + router + bias + others
    others -= 69 * 32 * 4  # zeros of A_log
    if profile == "mxfp4-q8":  # all 2-D trunk matrices but AttnRes: 16 bits become 8.5
        norms = 93 * 4 * 7168 * 2 + 92 * 3584 * 2 + 24 * (1536 + 512) * 2 + 2 * 7168 * 2
        res_proj = (93 * 2 + 1) * 7168 * 2
        f32 = 69 * (3 * 12288 * 4 + 12288 + 128 + 96) * 4
        matrices = others - norms - res_proj - f32 - 92_289_024 - 802_428_928 + router
        return experts + router + bias + others - matrices * 15 // 32
    return experts + router + bias + others


@pytest.mark.parametrize(("keep", "profile", "n_bytes", "published"), BUILDS)
def test_published_builds_to_the_byte(
    source: Source, keep: int, profile: str, n_bytes: int, published: str
) -> None:
    """PRUNING.md §3; of the four in Moonshot's layout, two are planned name by name."""
    assert sized(keep, profile) == n_bytes
    assert f"{n_bytes / 1e9:.2f}" == published
    if profile != "moonshot" or keep in (224, 320):
        plan = keep_first(keep, 896, read_dims(source.config).moe_layers)
        assert plan_build(source, load_profile(profile), plan).total_size == n_bytes


def test_the_sizes_in_the_docs(source: Source) -> None:
    text = (Path(__file__).parents[2] / "docs/convert.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\S+)` \|.*\| (\S+ \wB) \| (\S+ \wB) \|$", text, re.MULTILINE)
    assert {name for name, *_ in rows} == set(profile_names())
    plan = keep_first(242, 896, read_dims(source.config).moe_layers)
    for name, whole, pruned in rows:
        if name == "moonshot":
            assert [whole, pruned] == [format_bytes(sized(keep, name)) for keep in (896, 242)]
            continue
        built = plan_build(source, load_profile(name), plan)
        by_expert = sum(t.n_bytes for t in built.tensors if t.role in ("expert", "router"))
        all_experts = built.total_size + by_expert * (896 - 242) // 242
        assert [whole, pruned] == [format_bytes(all_experts), format_bytes(built.total_size)], name


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


def test_opening_and_planning_needs_seconds_and_megabytes(tmp_path: Path) -> None:
    """All 96 headers as real files of full size without content, in an interpreter of its own.

    The bar is 15 s and 600 MB; other machines may take twice the time.
    """
    from benchmarks import convert as benchmark

    assert benchmark.write_k3_headers(tmp_path / "k3") == 497_220
    cost = benchmark.child(benchmark.OPEN + benchmark.PLAN, tmp_path / "k3")
    assert cost.cpu < 30
    assert cost.peak < 600e6
