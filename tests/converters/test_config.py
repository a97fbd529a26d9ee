"""Sizes, the packed format and the build's config, from config.json alone."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from converters.config import build_config, check_source, pruned_config, read_dims
from kimi_k3_mlx.errors import CheckpointError
from kimi_k3_mlx.prune_plan import LayerPlan, keep_first
from kimi_k3_mlx.schema import MXFP4, Quantization

K3: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "golden/k3_config.json").read_text("utf-8")
)
ABSENT = object()


@pytest.fixture
def config() -> dict[str, Any]:
    return copy.deepcopy(K3)


def test_the_sizes_of_k3() -> None:
    dims = read_dims(K3)
    assert (dims.n_layers, dims.n_blocks, dims.n_experts, dims.top_k) == (93, 27, 896, 16)
    assert len(dims.mla_layers) == 24
    assert {3, 91, 92} <= dims.mla_layers
    assert dims.moe_layers == set(range(1, 93))
    assert dims.shapes("kda 1 conv") == [(12288, 1, 4)]
    assert dims.shapes("latent moe/32") == [(3584, 96)]
    assert dims.shapes("head_dim|kda_heads") == [(128,), (96,)]
    assert dims.shapes("mla_kv_b kv_lora") == [(24576, 512)]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["model_type"], "kimi_linear", "model_type 'kimi_linear', expected 'kimi_k3'"),
        (["text_config"], None, "text_config is missing, expected an object"),
        (["text_config", "hidden_size"], None, "text_config.hidden_size is missing"),
        (["text_config", "num_experts"], "many", "text_config.num_experts is many, expected a wh"),
        (["text_config", "num_experts"], 12, "num_experts is 12, but the router selects 16"),
        (["text_config", "moe_layer_freq"], 0, "text_config.moe_layer_freq is 0"),
        (["text_config", "linear_attn_config", "num_heads"], None, "attn_config.num_heads is miss"),
        (["text_config", "linear_attn_config", "kda_layers"], [1], "do not name each of the layer"),
        (["text_config", "moe_intermediate_size"], 3000, "width 3000 is not a multiple of 32"),
        (["vision_config", "patch_size"], None, "vision_config.patch_size is missing"),
        (
            ["vision_config", "merge_kernel_size"],
            [2],
            "merge_kernel_size is \\[2\\], expected 2 whole",
        ),
    ],
)
def test_a_config_that_is_none_is_refused(
    config: dict[str, Any], path: list[str], value: Any, message: str
) -> None:
    holder = config
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    with pytest.raises(CheckpointError, match=message):
        read_dims(config)


def test_a_model_without_vision(config: dict[str, Any]) -> None:
    del config["vision_config"]
    assert read_dims(config).n_blocks == 0


def place(config: dict[str, Any], where: str, name: str) -> None:
    """Put a format into one of the places where checkpoints have been seen to state it."""
    text = config["text_config"]
    block = text.pop("quantization_config")
    groups = block["config_groups"]["group_0"]
    del block["format"], groups["format"]
    (config if where == "top" else text)["quantization_config"] = block
    (groups if where == "group" else block)["format"] = name


@pytest.mark.parametrize("where", ["top", "text", "group"])
def test_mxfp4_is_recognised_in_each_place(config: dict[str, Any], where: str) -> None:
    place(config, where, "mxfp4-pack-quantized")
    check_source(config)


@pytest.mark.parametrize(
    ("where", "named"),
    [
        ("top", r"config.json: quantization_config\.format is 'float-quantized'"),
        ("text", r"text_config\.quantization_config\.format is 'float-quantized'"),
        ("group", r"text_config\.quantization_config\.config_groups\.group_0\.format is"),
    ],
)
def test_another_format_is_refused_by_its_place(
    config: dict[str, Any], where: str, named: str
) -> None:
    """mlx-lm#1865: guessing 4-bit affine from an unknown container yields noise."""
    place(config, where, "float-quantized")
    with pytest.raises(CheckpointError, match=named):
        check_source(config)


def test_one_foreign_group_among_good_ones_is_refused(config: dict[str, Any]) -> None:
    groups = config["text_config"]["quantization_config"]["config_groups"]
    groups["group_1"] = {"format": "int-quantized"}
    with pytest.raises(
        CheckpointError,
        match=r"quantization_config\.config_groups\.group_1\.format is 'int-quantized'",
    ):
        check_source(config)


def test_no_format_at_all_is_refused(config: dict[str, Any]) -> None:
    config["text_config"]["quantization_config"] = None
    with pytest.raises(CheckpointError, match="has no quantization_config with a format"):
        check_source(config)


@pytest.mark.parametrize("where", ["", "text_config."])
@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({}, r"quantization_config\.format is missing, expected 'mxfp4-pack-quantized'"),
        ({"quant_method": "gptq", "bits": 4}, r"quantization_config\.format is missing"),
        ({"config_groups": {"a": {}}}, r"quantization_config\.format is missing"),
        ("mxfp4", "quantization_config is mxfp4, expected an object"),
        ([1], r"quantization_config is \[1\], expected an object"),
        ({"config_groups": []}, r"quantization_config\.config_groups is \[\], expected an object"),
        (
            {"config_groups": {"a": 1}},
            r"quantization_config\.config_groups\.a is 1, expected an object",
        ),
        ({"format": ["x"]}, r"quantization_config\.format is \['x'\], expected"),
    ],
)
def test_every_block_that_is_present_must_state_the_format(
    config: dict[str, Any], where: str, block: object, message: str
) -> None:
    """A good block in the other place does not help."""
    (config["text_config"] if where else config)["quantization_config"] = block
    with pytest.raises(CheckpointError, match=rf"config\.json: {re.escape(where)}{message}"):
        check_source(config)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ([], ("quantization", MXFP4.to_json()), "it is a build, not a source"),
        (["text_config"], ("expert_counts", [8]), "text_config.expert_counts is set, which only b"),
    ],
)
def test_the_config_of_a_build_is_no_sources(
    config: dict[str, Any], path: list[str], value: tuple[str, object], message: str
) -> None:
    (config[path[0]] if path else config)[value[0]] = value[1]
    with pytest.raises(CheckpointError, match=message):
        check_source(config)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("text_config.linear_attn_config.use_full_rank_gate", False, "only True is supported"),
        ("text_config.linear_attn_config.use_full_rank_gate", ABSENT, "only True is supported"),
        ("text_config.hidden_act", "silu", "only 'situ' is supported"),
        ("text_config.latent_moe_use_norm", False, "only True is supported"),
        ("text_config.mla_use_output_gate", False, "only True is supported"),
        ("text_config.mla_use_output_gate", ABSENT, "only True is supported"),
        ("text_config.mla_use_nope", False, "only True is supported"),
        ("text_config.tie_word_embeddings", True, "only False is supported"),
        ("tie_word_embeddings", True, "only False is supported"),
        ("text_config.attn_res_block_size", None, "expected a whole number from 1 on"),
        ("text_config.q_lora_rank", None, "expected a whole number from 1 on"),
    ],
)
def test_another_architecture_is_refused_by_its_switch(
    config: dict[str, Any], field: str, value: object, expected: str
) -> None:
    *path, name = field.split(".")
    holder = config
    for key in path:
        holder = holder[key]
    holder.pop(name, None)
    if value is not ABSENT:
        holder[name] = value
    with pytest.raises(
        CheckpointError, match=rf"config\.json: {re.escape(field)} is .*[;,] {expected}\."
    ):
        read_dims(config)


def test_switches_may_be_absent_where_that_means_the_same(config: dict[str, Any]) -> None:
    for name in ("hidden_act", "mla_use_nope", "tie_word_embeddings"):
        config["text_config"].pop(name, None)
        config.pop(name, None)
    assert read_dims(config) == read_dims(K3)


def test_the_config_of_a_build(config: dict[str, Any]) -> None:
    for holder in (config, config["text_config"]):
        holder["model_file"] = "evil.py"
    before = copy.deepcopy(config)
    built = build_config(config, read_dims(config), MXFP4, {}, None)
    assert config == before
    assert built.pop("quantization") == {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    for holder in (config, config["text_config"]):
        for field in ("quantization_config", "auto_map", "model_file"):
            holder.pop(field, None)
    assert built == config


def test_modules_unlike_the_experts_have_an_entry(config: dict[str, Any]) -> None:
    eight = Quantization("affine", 8, 64)
    built = build_config(config, read_dims(config), MXFP4, {"a.b": eight, "a.c": MXFP4}, None)
    assert built["quantization"] == {
        "group_size": 32, "bits": 4, "mode": "mxfp4",
        "a.b": {"group_size": 64, "bits": 8, "mode": "affine"},
    }  # fmt: skip


def test_expert_counts_of_a_plan(config: dict[str, Any]) -> None:
    """A uniform build needs no code of ours; others name our model file."""
    dims = read_dims(config)
    uniform = keep_first(242, 896, dims.moe_layers)
    built = build_config(config, dims, MXFP4, {}, uniform)
    assert built["text_config"]["num_experts"] == 242
    assert "model_file" not in built
    assert "expert_counts" not in built["text_config"]
    layers = uniform.layers | {5: LayerPlan(tuple(range(20)), (7, 9))}
    text = (built := build_config(config, dims, MXFP4, {}, replace(uniform, layers=layers)))[
        "text_config"
    ]
    assert built["model_file"] == "kimi_k3.py"
    assert text["expert_counts"] == [0, *[242] * 4, 20, *[242] * 87]
    assert text["low_expert_counts"] == [*[0] * 5, 2, *[0] * 87]
    assert pruned_config(config, uniform)["text_config"]["num_experts"] == 242
    assert pruned_config(config, None) == config
