"""A uniform build is stock mlx-lm's own: names, shapes, dtypes and logits, with no code of ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import kimi_k3 as stock
from mlx_lm.utils import load_model

from tests.convert.conftest import Planned, planned
from tests.tiny_k3 import TinyConfig, write_source

TOKENS = mx.array([[1, 7, 300, 42, 11, 200, 5, 9]])


def logits(path: Path) -> np.ndarray:
    model, config = load_model(path)
    assert "model_file" not in config
    return np.array(model(TOKENS).astype(mx.float32))


def test_the_build_has_the_logits_of_the_source(tiny_source: Path, tiny_build: Path) -> None:
    expected, found = logits(tiny_source), logits(tiny_build)
    assert np.isfinite(found).all()
    assert np.abs(found).max() > 1
    assert np.array_equal(found, expected)


def test_other_head_counts_and_a_single_mla_layer(tmp_path: Path) -> None:
    """MLA heads that differ from KDA's, nope that differs from value, several dense layers."""
    from kimi_k3_mlx.convert.run import run

    sizes = TinyConfig(
        layers=4, dense_layers=2, heads=3, head_dim=32, mla_heads=5, qk_nope=48, v_head_dim=16,
        kv_lora=96, trunk_dtype="F32", vision=False,
    )  # fmt: skip
    source = write_source(tmp_path / "source", sizes)
    run(*planned(source), tmp_path / "out")
    assert np.array_equal(logits(tmp_path / "out"), logits(source))


def stock_parameters(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the stock model; lazy, so that even K3's costs no memory."""
    model = stock.Model(stock.ModelArgs.from_dict(config))
    return {name: tuple(value.shape) for name, value in tree_flatten(model.parameters())}


def test_every_name_and_shape_is_that_of_the_stock_model(tiny_plan: Planned) -> None:
    plan, source = tiny_plan
    expected = stock_parameters(source.config)
    found = {}
    for tensor in plan.tensors:
        if tensor.role == "expert" and tensor.dtype == "U8":
            continue
        if tensor.role not in ("vision", "projector"):
            is_packed = tensor.dtype == "U32"
            *outer, last = tensor.shape
            found[tensor.name] = (*outer, last * 8) if is_packed else tensor.shape
    assert found == expected


def test_the_config_of_a_build_says_mxfp4(tiny_build: Path) -> None:
    config = json.loads((tiny_build / "config.json").read_text())
    assert config["quantization"] == {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    assert "quantization_config" not in config["text_config"]


@pytest.mark.parametrize("folder", ["source", "build"])
def test_vision_tensors_are_carried_along(folder: str, tiny_source: Path, tiny_build: Path) -> None:
    path = tiny_source if folder == "source" else tiny_build
    weights: dict[str, mx.array] = {}
    for file in path.glob("model*.safetensors"):
        weights |= mx.load(str(file))
    assert weights["vision_tower.patch_embed.proj.weight"].shape == (32, 3, 14, 14)
    assert weights["mm_projector.proj.0.weight"].shape == (128, 128)
