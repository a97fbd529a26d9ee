"""Verification passes a good build and catches each kind of damage, alone."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kimi_k3_mlx.convert import naive, packing, wanted
from kimi_k3_mlx.convert.run import run
from kimi_k3_mlx.convert.verify import verify_build
from kimi_k3_mlx.errors import CheckpointError, MismatchError
from kimi_k3_mlx.tensors import local as source_module
from kimi_k3_mlx.tensors.local import open_source
from kimi_k3_mlx.tensors.source import INDEX, MANIFEST
from tests.convert.conftest import Planned, planned
from tests.convert.damage import LAYER, changing_config, changing_json, editing, shard_of, values_of
from tests.tiny_k3 import REAL_EXPERT_COUNT, write_source

MOE = f"{LAYER}2.mlp."
STACK = f"{MOE}switch_mlp.down_proj."
KDA, MLA = f"{LAYER}0.self_attn.", f"{LAYER}3.self_attn."
Check = Callable[[Path], str]


@pytest.fixture
def caught(tiny_plan: Planned) -> Check:
    """Verify a build that must fail; return the message."""

    def check(build: Path) -> str:
        with pytest.raises(MismatchError) as error:
            verify_build(build, tiny_plan[1])
        assert error.value.exit_code == 3
        return error.value.message

    return check


def test_a_good_build_passes(tiny_build: Path, tiny_plan: Planned) -> None:
    _, source = tiny_plan
    seen: list[int] = []
    report = verify_build(tiny_build, source, lambda done, total, what: seen.append(done))
    assert report.n_tensors == len(source.tensors)
    assert report.n_expert_tensors == 4 * 8 * 6
    assert report.n_bytes == source.total_size
    assert seen == sorted(seen)
    assert seen[-1] == tiny_plan[0].total_size
    assert report.to_json()["nan_scales"] == 0


def test_all_896_experts_are_compared(tmp_path: Path) -> None:
    one_moe_layer = replace(REAL_EXPERT_COUNT, layers=2)
    plan, source = planned(write_source(tmp_path / "source", one_moe_layer))
    run(plan, source, tmp_path / "out")
    assert verify_build(tmp_path / "out", source).n_expert_tensors == 896 * 6


@pytest.mark.parametrize(
    ("name", "source_name"),
    [
        (f"{MOE}gate.weight", f"{LAYER}2.block_sparse_moe.gate.weight"),
        (
            f"{MOE}e_score_correction_bias",
            f"{LAYER}2.block_sparse_moe.gate.e_score_correction_bias",
        ),
        (f"{STACK}weight", f"{LAYER}2.block_sparse_moe.experts.1.w2.weight_packed"),
        (f"{STACK}scales", f"{LAYER}2.block_sparse_moe.experts.1.w2.weight_scale"),
    ],
)
def test_two_swapped_experts_are_caught(
    build: Path, caught: Check, name: str, source_name: str
) -> None:
    """A permuted router row, bias or expert, each alone, misroutes without any other sign."""
    with values_of(build, name) as values:
        values[[1, 6]] = values[[6, 1]]
    message = caught(build)
    assert message.startswith(f"tensor {name}: element [")
    assert source_name in message


@pytest.mark.parametrize(
    "name",
    [
        f"{KDA}qkv_proj.weight",
        f"{KDA}qkv_conv.conv.weight",
        f"{KDA}A_log",
        f"{KDA}dt_bias",
        f"{MLA}embed_q.weight",
        f"{MLA}unembed_out.weight",
        f"{MLA}o_proj.weight",
        f"{LAYER}0.mlp.up_proj.weight",
        f"{LAYER}4.mlp_res_proj.weight",
        f"{MOE}shared_experts.gate_proj.weight",
        f"{MOE}routed_expert_norm.weight",
        "language_model.model.embed_tokens.weight",
        "language_model.lm_head.weight",
        "mm_projector.proj.2.weight",
        "vision_tower.patch_embed.pos_emb.weight",
    ],
)
@pytest.mark.parametrize("place", ["first", "last", "all"])
def test_a_wrong_element_is_caught_anywhere(
    build: Path, caught: Check, name: str, place: str
) -> None:
    with values_of(build, name) as values:
        flat = values.reshape(-1)
        if place == "all":
            flat[:] = 0
        else:
            flat[0 if place == "first" else -1] += 1
        position = np.unravel_index(flat.size - 1 if place == "last" else 0, values.shape)
    message = caught(build)
    assert message.startswith(f"tensor {name}: element [")
    if place != "all":
        assert f"element {[int(i) for i in position]} is " in message


def test_the_message_gives_both_values(build: Path, caught: Check) -> None:
    name = f"{LAYER}1.input_layernorm.weight"
    with values_of(build, name) as values:
        bits = np.array([int(values[5]) << 16], np.uint32)
        values[5] = 0xC040
    assert caught(build) == (
        f"tensor {name}: element [5] is -3.0, expected {bits.view(np.float32)[0]} "
        f"(source tensor {name})."
    )


def test_a_difference_in_a_later_block_is_placed_right(
    build: Path, caught: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, "BUFFER_BYTES", 256)
    with values_of(build, "language_model.lm_head.weight") as values:
        values[300, 33] ^= 1
    assert "element [300, 33] is" in caught(build)


def test_narrowed_f32_tensors_are_caught(build: Path, caught: Check) -> None:
    name = f"{KDA}o_norm.weight"
    with editing(build, name) as tensors:
        tensors[name] = ("BF16", (32,), bytes(64))
    assert caught(build) == f"tensor {name}: BF16 (32,), expected F32 (32,)."


def test_a_missing_and_a_surplus_tensor_are_caught(build: Path, caught: Check) -> None:
    name = f"{KDA}dt_bias"
    with editing(build, name) as tensors:
        kept = tensors.pop(name)
    assert caught(build).startswith(f"tensor {name} is missing in the build")
    with editing(build, f"{KDA}A_log") as tensors:
        tensors[name] = kept
        tensors["surplus"] = kept
    assert "tensor surplus: 256 of its 256 bytes have no counterpart" in caught(build)


def test_a_missing_and_a_truncated_shard_are_caught(build: Path, caught: Check) -> None:
    path = shard_of(build, f"{STACK}weight")
    os.truncate(path, path.stat().st_size - 1)
    assert f"{path.name} is truncated" in caught(build)
    path.unlink()
    assert f"shard {path.name} is named by {INDEX} but missing" in caught(build)


def test_a_zeroed_tail_is_caught(build: Path, caught: Check) -> None:
    path = shard_of(build, f"{STACK}weight")
    size = path.stat().st_size
    os.truncate(path, size - 4096)
    os.truncate(path, size)
    assert "tensor language_model.model.layers.2." in caught(build)


def test_a_stale_shard_is_caught(build: Path, caught: Check) -> None:
    shutil.copy(shard_of(build, f"{STACK}weight"), build / "model-old.safetensors")
    assert caught(build).startswith("model-old.safetensors is in ")


def test_a_wrong_total_size_is_caught(build: Path, caught: Check) -> None:
    with changing_json(build / INDEX) as index:
        index["metadata"]["total_size"] += 1
    assert "states a total_size" in caught(build)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_experts", 7, "text_config.num_experts is 7, expected 8"),
        ("num_hidden_layers", 4, "text_config.num_hidden_layers is 4, expected 5"),
        ("rms_norm_eps", 1e-6, "text_config.rms_norm_eps is 1e-06, expected 1e-05"),
        ("expert_counts", [8], r"text_config.expert_counts is [8], expected none"),
        ("quantization_config", {}, "text_config.quantization_config is {}, expected none"),
    ],
)
def test_a_changed_config_is_caught(
    build: Path, caught: Check, field: str, value: object, message: str
) -> None:
    with changing_config(build) as config:
        config["text_config"][field] = value
    assert caught(build) == f"config.json: {message}."


def test_a_wrong_quantization_block_is_caught(build: Path, caught: Check) -> None:
    with changing_config(build) as config:
        config["quantization"]["bits"] = 8
    assert caught(build) == "config.json: quantization.bits is 8, expected 4."


def test_a_missing_sidecar_is_caught(build: Path, caught: Check) -> None:
    (build / "tokenizer.json").unlink()
    assert caught(build).startswith("tokenizer.json is missing in")


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json", "LICENSE"])
def test_a_changed_sidecar_is_caught(build: Path, caught: Check, name: str) -> None:
    (build / name).write_bytes((build / name).read_bytes() + b" ")
    assert caught(build) == f"{name} in {build} differs from the source's."


@pytest.mark.parametrize("field", ["auto_map", "model_file"])
@pytest.mark.parametrize("part", [None, "text_config"])
def test_code_that_a_build_names_is_caught(
    build: Path, caught: Check, field: str, part: str | None
) -> None:
    with changing_config(build) as config:
        (config[part] if part else config)[field] = "model.py"
    path = f"{part}.{field}" if part else field
    assert caught(build) == f"config.json: {path} is model.py, expected none."


def test_a_changed_field_deep_inside_is_named(build: Path, caught: Check) -> None:
    with changing_config(build) as config:
        config["text_config"]["linear_attn_config"]["gate_lower_bound"] = -4.0
        del config["vision_config"]["patch_size"]
    assert caught(build) == (
        "config.json: text_config.linear_attn_config.gate_lower_bound is -4.0, expected -5.0."
    )


def test_a_missing_and_a_damaged_manifest_are_caught(build: Path, caught: Check) -> None:
    (build / MANIFEST).write_text("{}")
    assert caught(build).startswith(f"{MANIFEST} has version None, expected 1")
    (build / MANIFEST).unlink()
    assert caught(build) == f"{MANIFEST} is missing in {build}."


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda value: value.update(plan_sha256="0" * 64), "plan_sha256 is 0000"),
        (lambda value: value["source"].update(headers_sha256="0"), "source.headers_sha256 is 0, "),
        (lambda value: value["shards"][0].update(n_bytes=1), f"bytes, {MANIFEST} says 1 bytes."),
        (lambda value: value["shards"].pop(), f"bytes, {MANIFEST} says no bytes."),
        (lambda value: value["profile"].update(bits=4), "is damaged in its profile: "),
    ],
)
def test_a_manifest_of_another_build_is_caught(
    build: Path, caught: Check, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    with changing_json(build / MANIFEST) as value:
        change(value)
    assert message in caught(build)


def test_a_wrong_hash_in_the_manifest_is_caught(build: Path, caught: Check) -> None:
    with changing_json(build / MANIFEST) as value:
        value["shards"][3]["sha256"] = "0" * 64
    assert re.fullmatch(
        f"model-00004-of-000008.safetensors: SHA-256 is [0-9a-f]{{64}}, {MANIFEST} says 0+.",
        caught(build),
    )


def test_a_changed_header_is_caught_by_the_hash(build: Path, caught: Check) -> None:
    path = shard_of(build, f"{STACK}weight")
    path.write_bytes(path.read_bytes().replace(b'"format":"mlx"', b'"format":"xlm"', 1))
    assert caught(build).startswith(f"{path.name}: SHA-256 is ")


def test_a_padded_a_log_with_values_in_its_tail_is_the_sources_fault(
    build: Path, copied: Path
) -> None:
    with values_of(copied, f"{KDA}A_log") as values:
        values[-1] = 0.5
    with pytest.raises(CheckpointError, match=r"A_log: element 31 is 0\.5, expected 0 after the 2"):
        verify_build(build, open_source(copied))


def test_a_build_is_no_source(build: Path) -> None:
    with pytest.raises(CheckpointError, match="it is a build, not a source"):
        verify_build(build, open_source(build))


def test_a_source_without_packed_experts_is_refused(build: Path, copied: Path) -> None:
    expert = f"{LAYER}2.block_sparse_moe.experts.1.w1."
    with editing(copied, f"{expert}weight_packed") as tensors:
        del tensors[f"{expert}weight_packed"], tensors[f"{expert}weight_scale"]
    with pytest.raises(CheckpointError, match=f"tensor {expert}weight_packed is missing"):
        verify_build(build, open_source(copied))


def test_an_unfinished_build_is_caught(build: Path, caught: Check) -> None:
    (build / "config.json").unlink()
    assert caught(build).startswith("config.json is missing in")


def test_nan_scales_are_reported(copied: Path, convert: Callable[[Path], Path]) -> None:
    with values_of(copied, f"{LAYER}3.block_sparse_moe.experts.1.w2.weight_scale") as scales:
        scales[0, :] = 255
    assert verify_build(convert(copied), planned(copied)[1]).nan_scales == 2


@pytest.mark.parametrize("module", [naive, packing, wanted])
def test_the_oracle_shares_no_code_with_the_converter(module: ModuleType) -> None:
    lines = Path(str(module.__file__)).read_text("utf-8").splitlines()
    imports = [line for line in lines if line.startswith(("import ", "from "))]
    allowed = ("convert.naive", "convert.packing")
    others = [line for line in imports if not any(f"{name} import" in line for name in allowed)]
    assert [line for line in others if "converters" in line or "convert." in line] == []
