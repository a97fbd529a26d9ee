"""The plan: complete, in order, aligned; refused when the source is not what config.json says."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

import pytest

from kimi_k3_mlx.convert.plan import plan_build, shard_header
from kimi_k3_mlx.convert.profiles import load_profile
from kimi_k3_mlx.errors import CheckpointError
from kimi_k3_mlx.tensors.local import open_source
from tests.convert.conftest import Planned, planned
from tests.convert.damage import LAYER, changing_config, editing
from tests.tiny_k3 import TinyConfig, write_source

EXPERT = f"{LAYER}2.block_sparse_moe.experts.5.w2.weight_scale"
ROUTER = f"{LAYER}2.block_sparse_moe.gate.weight"


def test_every_byte_of_the_source_is_used_once(tiny_plan: Planned) -> None:
    plan, source = tiny_plan
    ranges: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for tensor in plan.tensors:
        for name, begin, end in tensor.spans:
            ranges[name].append((begin, end))
    assert ranges.keys() == source.tensors.keys()
    for name, parts in ranges.items():
        ends = [0, *(end for _, end in sorted(parts))]
        assert [begin for begin, _ in sorted(parts)] == ends[:-1]
        assert ends[-1] == source.tensors[name].n_bytes


def test_one_shard_per_layer_then_the_rest(tiny_plan: Planned) -> None:
    plan, _ = tiny_plan
    assert [shard.what for shard in plan.shards] == [
        *(f"layer {number}/5" for number in range(1, 6)),
        "embeddings and head",
        "projector",
        "vision tower",
    ]
    assert plan.shards[0].name == "model-00001-of-000008.safetensors"
    for layer in range(5):
        prefixes = {t.name.startswith(f"{LAYER}{layer}.") for t in plan.shards[layer].tensors}
        assert prefixes == {True}


def test_experts_come_first_and_data_begins_on_16_kib(tiny_plan: Planned) -> None:
    plan, _ = tiny_plan
    for shard in plan.shards:
        is_expert = [tensor.role == "expert" for tensor in shard.tensors]
        assert is_expert == sorted(is_expert, reverse=True)
        assert shard.header_n_bytes % 16384 == 0
        assert len(shard_header(shard)) == shard.header_n_bytes


def test_planning_reads_no_tensor_byte_and_writes_nothing(
    tiny_source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "preadv", None)
    monkeypatch.setattr(os, "pwrite", None)
    before = sorted(tiny_source.parent.iterdir())
    planned(tiny_source)
    assert sorted(tiny_source.parent.iterdir()) == before


def test_the_same_source_elsewhere_gives_the_same_plan(copied: Path, tiny_plan: Planned) -> None:
    assert planned(copied)[0].sha256 == tiny_plan[0].sha256


def test_a_text_only_source_has_no_vision_shards(tiny_text_source: Path) -> None:
    plan, _ = planned(tiny_text_source)
    assert [shard.what for shard in plan.shards][-1] == "embeddings and head"
    assert {tensor.role for tensor in plan.tensors} & {"vision", "projector"} == set()


def test_an_f32_checkpoint_stays_f32(tmp_path: Path) -> None:
    plan, _ = planned(write_source(tmp_path / "f32", TinyConfig(layers=2, trunk_dtype="F32")))
    assert {tensor.dtype for tensor in plan.tensors} == {"F32", "U32", "U8"}


def test_f32_tensors_of_a_bf16_checkpoint_stay_f32(tiny_plan: Planned) -> None:
    names = {t.name.split(".self_attn.")[-1] for t in tiny_plan[0].tensors if t.dtype == "F32"}
    kinds = {name.rsplit(".", 1)[-1] if ".layers." in name else name for name in names}
    assert kinds == {"A_log", "dt_bias", "o_norm.weight", "qkv_conv.conv.weight"} | {
        "e_score_correction_bias"
    }


def test_a_wrong_shape_is_named_with_its_shard(copied: Path) -> None:
    with editing(copied, EXPERT) as tensors:
        tensors[EXPERT] = ("U8", (64, 1), bytes(64))
    with pytest.raises(CheckpointError) as error:
        planned(copied)
    assert error.value.message == f"tensor {EXPERT}: shape (64, 1), expected (64, 2)."
    assert error.value.hint == (
        "the source shard model-00003-of-000008.safetensors looks truncated; "
        "re-download it: kimi-k3 download --include model-00003*"
    )


def test_a_router_that_disagrees_with_the_config_is_not_called_truncated(copied: Path) -> None:
    with editing(copied, ROUTER) as tensors:
        tensors[ROUTER] = ("BF16", (7, 64), bytes(7 * 64 * 2))
    with pytest.raises(CheckpointError) as error:
        planned(copied)
    assert error.value.message == f"tensor {ROUTER}: shape (7, 64), expected (8, 64)."
    assert error.value.hint.startswith(
        "the source shard model-00003-of-000008.safetensors does not fit config.json; re-download"
    )


@pytest.mark.parametrize("text", [None, 5])
def test_a_missing_text_config_is_named(copied: Path, text: object) -> None:
    with changing_config(copied) as config:
        config["text_config"] = text
    with pytest.raises(CheckpointError, match=r"text_config is .*, expected an object"):
        planned(copied)


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        (ROUTER, "F16", "dtype F16, expected BF16"),
        (f"{LAYER}0.self_attn.dt_bias", "I32", "dtype I32, expected F32"),
        (f"{LAYER}0.self_attn.dt_bias", "BF16", "dtype BF16, expected F32"),
        (EXPERT, "I8", "dtype I8, expected U8"),
    ],
)
def test_a_wrong_dtype_is_named(copied: Path, name: str, dtype: str, expected: str) -> None:
    with editing(copied, name) as tensors:
        _, shape, content = tensors[name]
        n_bytes = len(content) // (2 if dtype == "BF16" else 1)
        tensors[name] = (dtype, shape, content[:n_bytes])
    with pytest.raises(CheckpointError, match=f"tensor {name}: {expected}"):
        planned(copied)


@pytest.mark.parametrize("name", [EXPERT, ROUTER, "vision_tower.encoder.blocks.1.wo.weight"])
def test_a_missing_tensor_is_named(copied: Path, name: str) -> None:
    with editing(copied, name) as tensors:
        del tensors[name]
    with pytest.raises(CheckpointError, match=f"tensor {name} is missing: no shard has it"):
        planned(copied)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"{LAYER}2.self_attn.rotary_emb.inv_freq", "is not one of Kimi-K3's"),
        (f"{LAYER}7.input_layernorm.weight", "does not occur in a model of 5 layers and 8 experts"),
        (f"{LAYER}2.block_sparse_moe.experts.8.w1.weight_scale", "does not occur in a model of"),
        (f"{LAYER}0.self_attn.q_a_proj.weight", "does not occur in a model of"),
    ],
)
def test_a_surplus_tensor_is_named(copied: Path, name: str, message: str) -> None:
    with editing(copied, ROUTER) as tensors:
        tensors[name] = ("U8", (2,), b"ab")
    with pytest.raises(CheckpointError, match=f"tensor {name} {message}"):
        planned(copied)


def test_vision_tensors_need_a_vision_config(copied: Path) -> None:
    with changing_config(copied) as config:
        del config["vision_config"]
    with pytest.raises(CheckpointError, match=r"no vision_config, but .* has mm_projector tensors"):
        planned(copied)


def test_an_unknown_packed_format_is_refused_before_anything_else(copied: Path) -> None:
    with changing_config(copied) as config:
        config["text_config"]["quantization_config"]["format"] = "float-quantized"
    with pytest.raises(CheckpointError, match=r"text_config.*format is 'float-quantized'"):
        plan_build(open_source(copied), load_profile("mxfp4"))


@pytest.mark.parametrize("length", [2, 32])
def test_a_log_may_be_padded_or_not(copied: Path, length: int) -> None:
    name = f"{LAYER}0.self_attn.A_log"
    with editing(copied, name) as tensors:
        tensors[name] = ("F32", (length,), tensors[name][2][: 4 * length])
    built = {tensor.name: tensor for tensor in planned(copied)[0].tensors}[name]
    assert built.shape == (2,)


def test_a_log_of_another_length_is_refused(copied: Path) -> None:
    name = f"{LAYER}0.self_attn.A_log"
    with editing(copied, name) as tensors:
        tensors[name] = ("F32", (3,), bytes(12))
    with pytest.raises(CheckpointError, match=r"A_log: shape \(3,\), expected \(32,\) or \(2,\)"):
        planned(copied)
