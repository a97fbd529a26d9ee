"""The size solver against the converter: to the byte, on tiny sources and at K3's size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from converters.config import read_dims
from kimi_k3_mlx.convert.memory import running
from kimi_k3_mlx.convert.plan import plan_build
from kimi_k3_mlx.convert.profiles import load_profile
from kimi_k3_mlx.convert.run import run
from kimi_k3_mlx.errors import DoesNotFitError
from kimi_k3_mlx.prune_plan import LayerPlan, PrunePlan, keep_first
from kimi_k3_mlx.reap.planner import Planner, Recipe
from kimi_k3_mlx.reap.saliency import Saliency, state_shapes
from kimi_k3_mlx.reap.sizes import Limit, largest, measured
from kimi_k3_mlx.schema import Quantization
from kimi_k3_mlx.tensors.local import open_source
from kimi_k3_mlx.tensors.source import Source
from tests.convert.test_full_scale import header_only_source

TWO_BITS = Quantization("affine", 2, 32)
PROFILES = ["mxfp4", "mxfp4-q8", "moonshot"]


def store_for(source: Source, n_sources: int = 2) -> Saliency:
    """Random statistics of a source's own shape."""
    dims, rng = read_dims(source.config), np.random.default_rng(0)
    shapes = state_shapes(n_sources, len(dims.moe_layers), dims.n_experts, 2)
    arrays = {
        name: 1 + rng.gamma(0.5, size=shape) if len(shape) > 2 else np.full(shape, 1e5)
        for name, shape in shapes.items()
    }
    names = tuple(f"source-{s}" for s in range(n_sources))
    layers = tuple(sorted(dims.moe_layers))
    return Saliency(source.id.headers_sha256, names, layers, dims.n_experts, dims.top_k, arrays)


def planner(source: Source, **recipe: Any) -> Planner:
    return Planner(store_for(source), Recipe(**{"floor": read_dims(source.config).top_k} | recipe))


@pytest.fixture(scope="module")
def source(tiny_source: Path) -> Source:
    return open_source(tiny_source)


@pytest.fixture(scope="module")
def k3() -> Source:
    path = Path(__file__).parents[1] / "golden/k3_config.json"
    return header_only_source(json.loads(path.read_text("utf-8")))


@pytest.mark.parametrize("profile", PROFILES)
def test_the_formula_is_the_converter_s_for_every_count(source: Source, profile: str) -> None:
    dims = read_dims(source.config)
    sizes = measured(source, load_profile(profile))
    for keep in range(dims.top_k, dims.n_experts + 1):
        build = plan_build(
            source, load_profile(profile), keep_first(keep, dims.n_experts, dims.moe_layers)
        )
        assert sizes.total(len(dims.moe_layers) * keep) == build.total_size


def test_the_formula_knows_second_banks_and_uneven_layers(source: Source) -> None:
    dims, profile = read_dims(source.config), load_profile("mxfp4-q8")
    sizes = measured(source, profile, TWO_BITS)
    layers = dict.fromkeys(dims.moe_layers, LayerPlan((0, 1, 2, 5, 6), (1, 5, 6)))
    layers[min(layers)] = LayerPlan((0, 3, 7))
    plan = PrunePlan(dims.n_experts, layers, low=TWO_BITS)
    n_low = 3 * (len(layers) - 1)
    total = sizes.total(2 * (len(layers) - 1) + 3, n_low)
    assert total == plan_build(source, profile, plan).total_size


@pytest.mark.parametrize("mode", ["uniform", "per-layer"])
@pytest.mark.parametrize("profile", ["mxfp4", "mxfp4-q8"])
@pytest.mark.parametrize("keep", [2, 5, 8])
def test_the_largest_that_fits_and_not_one_byte_less(
    source: Source, profile: str, keep: int, mode: str
) -> None:
    made, format_ = planner(source, mode=mode), load_profile(profile)
    n_bytes = plan_build(source, format_, made.cut(keep)).n_bytes
    plan, build = largest(made, source, format_, Limit(n_bytes=n_bytes))
    assert build.n_bytes == n_bytes == plan.chosen_by["size"]["n_bytes"]
    assert plan.chosen_by["keep"] == keep
    assert plan.sha256 == made.cut(keep).sha256
    if keep > 2:
        less, _ = largest(made, source, format_, Limit(n_bytes=n_bytes - 1))
        assert less.chosen_by["keep"] == keep - 1


def test_moonshot_s_layout_has_sizes_too(source: Source) -> None:
    made, profile = planner(source), load_profile("moonshot")
    n_bytes = plan_build(source, profile, made.cut(4)).n_bytes
    assert largest(made, source, profile, Limit(n_bytes=n_bytes))[0].chosen_by["keep"] == 4


def test_the_size_is_that_of_the_files(source: Source, tmp_path: Path) -> None:
    limit = Limit(n_bytes=planner_bytes(source, 4))
    plan, build = largest(planner(source), source, load_profile("mxfp4-q8"), limit)
    run(build, source, tmp_path / "out")
    shards = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))
    assert shards == plan.chosen_by["size"]["n_bytes"] == limit.n_bytes


def planner_bytes(source: Source, keep: int) -> int:
    return plan_build(source, load_profile("mxfp4-q8"), planner(source).cut(keep)).n_bytes


def test_graded_fills_the_first_bank(source: Source) -> None:
    made, profile = planner(source, mode="graded", low=TWO_BITS), load_profile("mxfp4-q8")
    wanted = made.cut(8, 5)
    limit = Limit(n_bytes=plan_build(source, profile, wanted).n_bytes)
    plan, build = largest(made, source, profile, limit)
    assert plan.sha256 == wanted.sha256
    assert build.n_bytes == limit.n_bytes
    plan, _ = largest(made, source, profile, limit, keep=6)
    assert {len(layer.keep) for layer in plan.layers.values()} == {6}


def test_what_fits_nowhere(source: Source) -> None:
    with pytest.raises(
        DoesNotFitError, match=r"2 experts a layer, the fewest .* more than 1\.00 kB"
    ):
        largest(planner(source), source, load_profile("mxfp4"), Limit(n_bytes=1000))


@pytest.mark.slow
def test_the_published_build_at_full_scale(k3: Source) -> None:
    """PRUNING §3 row 4: 242 experts and a trunk of 8 bits are 451.44 GB."""
    made, profile = planner(k3), load_profile("mxfp4-q8")
    sizes = measured(k3, profile)
    assert sizes.total(92 * 242) == 451_435_437_920
    assert sizes.total(92 * 179) == 349_687_330_256
    plan, build = largest(made, k3, profile, Limit(n_bytes=451_437_027_168))
    assert (plan.chosen_by["keep"], build.total_size) == (242, 451_435_437_920)
    assert build.n_bytes == 451_437_027_168
    less, _ = largest(made, k3, profile, Limit(n_bytes=451_437_027_167))
    assert less.chosen_by["keep"] == 241


@pytest.mark.slow
def test_the_largest_that_a_mac_runs(k3: Source) -> None:
    made, profile, dims = planner(k3), load_profile("mxfp4-q8"), read_dims(k3.config)
    plan, build = largest(made, k3, profile, Limit(ram_gib=512, context=32_768))
    keep, sizes = plan.chosen_by["keep"], measured(k3, profile)
    assert running(dims, build.total_size, 32_768).on(512).verdict == "raise"
    one_more = sizes.total(92 * (keep + 1))
    assert running(dims, one_more, 32_768).on(512).verdict == "tight"
    assert plan.chosen_by["size"]["limit"] == {"n_bytes": None, "ram_gib": 512, "context": 32_768}
