"""Builds of prune plans compute what the whole model computes when the others are never chosen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.utils import load_model
from safetensors import safe_open

from kimi_k3_mlx.convert.plan import plan_build
from kimi_k3_mlx.convert.profiles import load_profile
from kimi_k3_mlx.convert.run import run
from kimi_k3_mlx.errors import UsageError
from kimi_k3_mlx.prune_plan import LayerPlan, PrunePlan
from kimi_k3_mlx.runtime.load import load_weights
from kimi_k3_mlx.schema import Quantization
from kimi_k3_mlx.tensors.local import LocalSource, open_source
from tests.convert.damage import tree
from tests.tiny_k3 import TinyConfig, write_source

TOKENS = mx.array([[1, 7, 300, 42, 11, 200, 5, 9, 77, 402]])
UNIFORM = PrunePlan(8, {n: LayerPlan(((n + 1) % 2, 3, 4, 6 + n % 2)) for n in range(1, 5)})
UNEVEN = PrunePlan(8, {
    1: LayerPlan((0, 2, 3, 5)), 2: LayerPlan((1, 2, 3, 4, 5, 7)),
    3: LayerPlan((0, 7)), 4: LayerPlan(tuple(range(8))),
})  # fmt: skip
PADDED = replace(UNEVEN, pad_uniform=True)
EXPERTS = "language_model.model.layers.{}.block_sparse_moe.experts.{}.{}"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> LocalSource:
    """Float32 throughout: what was computed alike is equal to a few roundings."""
    sizes = TinyConfig(trunk_dtype="F32", vision_layers=1)
    return open_source(write_source(tmp_path_factory.mktemp("pruned") / "source", sizes))


@pytest.fixture(scope="module")
def whole(source: LocalSource, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pruned") / "whole"
    run(plan_build(source, load_profile("mxfp4")), source, out)
    return out


def logits(path: Path) -> np.ndarray:
    model, _ = load_weights(path, lazy=False)
    return np.array(model(TOKENS))


def masked_logits(whole: Path, plan: PrunePlan) -> np.ndarray:
    """The whole model with a bias that never lets the dropped experts win."""
    model, _ = load_weights(whole, lazy=False)
    for layer, kept in plan.layers.items():
        dropped = np.full(8, -1e30, np.float32)
        dropped[list(kept.keep)] = 0
        mlp = model.layers[layer].mlp
        mlp.e_score_correction_bias = mlp.e_score_correction_bias + mx.array(dropped)
    return np.array(model(TOKENS))


@pytest.mark.parametrize("plan", [UNIFORM, UNEVEN, PADDED], ids=["uniform", "uneven", "padded"])
def test_pruned_is_masked(
    plan: PrunePlan, source: LocalSource, whole: Path, tmp_path: Path
) -> None:
    run(plan_build(source, load_profile("mxfp4"), plan), source, tmp_path / "out")
    expected, found = masked_logits(whole, plan), logits(tmp_path / "out")
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()
    assert np.abs(found - logits(whole)).max() > 0.01 * np.abs(expected).max(), "nothing pruned?"


@pytest.mark.parametrize("plan", [UNIFORM, PADDED], ids=["uniform", "padded"])
def test_stock_mlx_lm_loads_uniform_and_padded_builds(
    plan: PrunePlan, source: LocalSource, whole: Path, tmp_path: Path
) -> None:
    """Padding experts can't be chosen, so the padded build has the uneven plan's logits."""
    run(plan_build(source, load_profile("mxfp4"), plan), source, tmp_path / "out")
    model, config = load_model(tmp_path / "out")
    assert "model_file" not in config
    assert not (tmp_path / "out" / "kimi_k3.py").exists()
    expected = masked_logits(whole, plan)
    assert np.abs(np.array(model(TOKENS)) - expected).max() < 1e-4 * np.abs(expected).max()


def test_stock_mlx_lm_loads_an_uneven_build_by_its_own_model_file(
    source: LocalSource, whole: Path, tmp_path: Path
) -> None:
    run(plan_build(source, load_profile("mxfp4"), UNEVEN), source, tmp_path / "out")
    model, config = load_model(tmp_path / "out", trust_remote_code=True)
    assert config["model_file"] == "kimi_k3.py"
    assert config["text_config"]["expert_counts"] == [0, 4, 6, 2, 8]
    assert (tmp_path / "out" / "kimi_k3_vl" / "__init__.py").is_file(), "mlx-vlm needs it"
    expected = masked_logits(whole, UNEVEN)
    assert np.abs(np.array(model(TOKENS)) - expected).max() < 1e-5 * np.abs(expected).max()


def test_a_padded_layer_reads_nothing_for_its_padding(source: LocalSource) -> None:
    plan = plan_build(source, load_profile("mxfp4"), PADDED)
    assert plan.n_read == plan_build(source, load_profile("mxfp4"), UNEVEN).n_read
    assert plan.config["text_config"]["num_experts"] == 8


def test_a_pruned_checkpoint_has_the_sources_bytes_under_new_numbers(
    source: LocalSource, tmp_path: Path
) -> None:
    """What vLLM and SGLang load: names without gaps, router rows in the same order."""
    out = tmp_path / "out"
    run(plan_build(source, load_profile("moonshot"), UNIFORM), source, out)
    pruned = open_source(out)
    assert pruned.config["text_config"]["num_experts"] == 4
    quantization = pruned.config["text_config"]["quantization_config"]
    assert quantization == source.config["text_config"]["quantization_config"]
    dropped = 4 * 4 * 6
    assert len(pruned.tensors) == len(source.tensors) - dropped
    with source.reader() as old, pruned.reader() as new:
        for name in pruned.tensors:
            found, original, rows = name, name, None
            parts = name.split(".")
            keep = UNIFORM.layers[int(parts[3])].keep if "block_sparse_moe" in name else ()
            if "experts" in parts:
                original = EXPERTS.format(parts[3], keep[int(parts[6])], ".".join(parts[7:]))
            elif "gate" in parts:
                rows = list(keep)
            wanted, got = values(source, old, original), values(pruned, new, found)
            assert np.array_equal(wanted if rows is None else wanted[rows], got), name


def values(source: LocalSource, reader: object, name: str) -> np.ndarray:
    with safe_open(source.path / source.weight_map[name], "np") as file:
        return file.get_tensor(name)


def test_the_pruned_checkpoint_is_a_source_again(
    source: LocalSource, whole: Path, tmp_path: Path
) -> None:
    """Pruning, then converting: the same build as converting with the plan."""
    run(plan_build(source, load_profile("moonshot"), UNIFORM), source, tmp_path / "pruned")
    pruned = open_source(tmp_path / "pruned")
    run(plan_build(pruned, load_profile("mxfp4")), pruned, tmp_path / "two")
    run(plan_build(source, load_profile("mxfp4"), UNIFORM), source, tmp_path / "one")
    one, two = tree(tmp_path / "one"), tree(tmp_path / "two")
    for name in one.keys() - {"kimi_k3_mlx.json", "prune_plan.json", "config.json"}:
        assert one[name] == two[name]
    configs = (json.loads((tmp_path / part / "config.json").read_text()) for part in ("one", "two"))
    assert next(configs) == next(configs)


def test_keeping_everything_copies_every_shard(source: LocalSource, tmp_path: Path) -> None:
    everything = PrunePlan(8, {n: LayerPlan(tuple(range(8))) for n in range(1, 5)})
    run(plan_build(source, load_profile("moonshot"), everything), source, tmp_path / "out")
    for name in source.shards:
        assert (tmp_path / "out" / name).read_bytes() == (source.path / name).read_bytes()


@settings(max_examples=15, deadline=None)
@given(st.lists(st.sets(st.integers(0, 7), min_size=2), min_size=4, max_size=4))
def test_any_plan_reads_what_it_keeps_and_nothing_else(
    source: LocalSource, keeps: list[set[int]]
) -> None:
    layers = {n: LayerPlan(tuple(sorted(keep))) for n, keep in enumerate(keeps, 1)}
    plan = plan_build(source, load_profile("mxfp4"), PrunePlan(8, layers))
    read = {span.tensor for tensor in plan.tensors for span in tensor.spans}
    for name in source.tensors:
        parts = name.split(".")
        if "experts" in parts:
            assert (name in read) == (int(parts[6]) in layers[int(parts[3])].keep)
        else:
            assert name in read


def test_moonshots_layout_has_one_number_of_experts(source: LocalSource) -> None:
    for plan in (UNEVEN, PADDED):
        with pytest.raises(UsageError, match="which Moonshot's layout can't say"):
            plan_build(source, load_profile("moonshot"), plan)


def test_a_second_bank_must_be_the_smaller_one(source: LocalSource) -> None:
    plan = PrunePlan(8, UNIFORM.layers, low=Quantization("affine", 4, 64))
    with pytest.raises(UsageError, match="second banks have 4 bits, the profile's experts have 4"):
        plan_build(source, load_profile("mxfp4"), plan)
