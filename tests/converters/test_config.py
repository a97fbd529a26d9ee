"""Sizes, the packed format and the build's config, from config.json alone."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from converters.config import QUANTIZATION, build_config, check_packed_format, read_dims
from kimi_k3_mlx.errors import CheckpointError

K3: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "golden/k3_config.json").read_text("utf-8")
)


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
    check_packed_format(config)


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
        check_packed_format(config)


def test_one_foreign_group_among_good_ones_is_refused(config: dict[str, Any]) -> None:
    groups = config["text_config"]["quantization_config"]["config_groups"]
    groups["group_1"] = {"format": "int-quantized"}
    with pytest.raises(CheckpointError, match=r"config_groups\.group_1\.format is 'int-quantized'"):
        check_packed_format(config)


@pytest.mark.parametrize("block", [None, {}, {"quant_method": "fp8"}, "mxfp4"])
def test_no_format_at_all_is_refused(config: dict[str, Any], block: object) -> None:
    config["text_config"]["quantization_config"] = block
    with pytest.raises(CheckpointError, match="has no quantization_config with a format"):
        check_packed_format(config)


def test_the_config_of_a_build(config: dict[str, Any]) -> None:
    built = build_config(config)
    assert config == K3
    assert (
        built.pop("quantization")
        == QUANTIZATION
        == {
            "group_size": 32,
            "bits": 4,
            "mode": "mxfp4",
        }
    )
    assert "auto_map" not in built
    for holder in (config, config["text_config"]):
        holder.pop("quantization_config", None)
        holder.pop("auto_map", None)
    assert built == config
