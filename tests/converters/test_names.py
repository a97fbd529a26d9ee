"""The table of names against K3's published totals and against a source's own names."""

from __future__ import annotations

from pathlib import Path

import pytest

from converters.names import TABLE, Parsed, parse_name, role_of
from kimi_k3_mlx.errors import CheckpointError
from kimi_k3_mlx.tensors.local import open_source

EXPERT = "language_model.model.layers.17.block_sparse_moe.experts.5."
STACK = "language_model.model.layers.17.mlp.switch_mlp."


@pytest.mark.parametrize(
    ("name", "parsed"),
    [
        (f"{EXPERT}w1.weight_packed", Parsed("expert", 17, 5, "gate_proj")),
        (f"{EXPERT}w3.weight_scale", Parsed("expert", 17, 5, "up_proj")),
        (f"{EXPERT}w2.weight_packed", Parsed("expert", 17, 5, "down_proj")),
        (f"{STACK}down_proj.scales", Parsed("expert", 17, None, "down_proj")),
        ("language_model.model.layers.0.mlp.gate_proj.weight", Parsed("dense_mlp", 0)),
        ("language_model.model.layers.9.mlp.gate.weight", Parsed("router", 9)),
        ("language_model.model.layers.9.self_attn.qkv_conv.conv.weight", Parsed("attention", 9)),
        ("language_model.lm_head.weight", Parsed("head")),
        ("mm_projector.proj.0.weight", Parsed("projector")),
        ("vision_tower.encoder.blocks.26.mlp.fc0.weight", Parsed("vision")),
    ],
)
def test_names_are_taken_apart(name: str, parsed: Parsed) -> None:
    assert parse_name(name) == parsed


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.input_layernorm.weight",
        "language_model.model.layers.01.input_layernorm.weight",
        "language_model.model.layers.x.input_layernorm.weight",
        "language_model.model.layers.3.self_attn.rotary_emb.inv_freq",
        "language_model.model.mtp.0.weight",
        f"{EXPERT}w4.weight_packed",
        "",
    ],
)
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match="is not one of Kimi-K3's") as error:
        parse_name(name)
    assert f"tensor {name} " in error.value.message


def test_every_name_of_a_source_is_in_the_table(tiny_source: Path) -> None:
    roles = {role_of(name) for name in open_source(tiny_source).tensors}
    assert roles == {entry.role for entry in TABLE}


def test_rows_of_one_build_tensor_agree() -> None:
    """Fused tensors must have one scope, role, dtype and way of converting."""
    for entry in TABLE:
        group = [row for row in TABLE if row.build == entry.build and row.scope == entry.scope]
        assert len({row[1:6] for row in group}) == 1 or entry.how == "stack"
    assert len({(row.source, row.scope) for row in TABLE}) == len(TABLE)
