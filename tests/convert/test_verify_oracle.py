"""Defects of the converter itself are caught: what it and its plan agree on may still be wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from converters import affine, config, dense
from kimi_k3_mlx.convert import plan as plan_module
from kimi_k3_mlx.convert.plan import plan_build
from kimi_k3_mlx.convert.run import run
from kimi_k3_mlx.convert.verify import verify_build
from kimi_k3_mlx.errors import MismatchError
from kimi_k3_mlx.prune_plan import LayerPlan
from kimi_k3_mlx.schema import NARROW, BuildTensor, Json, Quantization
from kimi_k3_mlx.tensors.local import open_source
from tests.convert.damage import LAYER
from tests.convert.verify_kinds import KINDS, profile_of

Patch = pytest.MonkeyPatch


def fused_in_another_order(patch: Patch) -> None:
    joined = plan_module.joined
    patch.setattr(plan_module, "joined", lambda n, r, tensors: joined(n, r, tensors[::-1]))


def keys_not_transposed(patch: Patch) -> None:
    patch.setitem(dense._TRANSFORMS, dense.SWAP_LAST_AXES, lambda tensor, data: data)


def rounded_down(patch: Patch) -> None:
    def truncated(tensor: BuildTensor, data: bytes) -> bytes:
        return np.frombuffer(data, np.uint16)[1::2].tobytes()

    patch.setitem(dense._TRANSFORMS, NARROW, truncated)


def router_rows_as_they_come(patch: Patch) -> None:
    """All banks ascending together, where the second bank's rows must follow the first's."""
    patch.setattr(LayerPlan, "order", property(lambda self: self.keep))


def low_bank_descending(patch: Patch) -> None:
    requantized = plan_module.requantized

    def reversed_experts(
        module: str, packed: Any, scales: Any, keep: Sequence[int], *rest: Any
    ) -> list[BuildTensor]:
        return requantized(module, packed, scales, keep[::-1], *rest)

    patch.setattr(plan_module, "requantized", reversed_experts)


def padding_that_wins(patch: Patch) -> None:
    patch.setattr(dense, "NEVER_CHOSEN", 1.0)


def router_like_the_rest(patch: Patch) -> None:
    """The profile leaves the router alone."""
    patch.setattr(plan_module._Recipe, "_stored", lambda self, entry, tensor: (
        dense.quantized(tensor, self.profile.trunk) if entry.quantizable else [tensor]
    ))  # fmt: skip


def codes_of_more_bits_than_named(patch: Patch) -> None:
    """Codes are cut to half of their steps."""
    quantize = affine.quantize

    def coarse(data: bytes, dtype: str, width: int, stored: Quantization) -> affine.Quantized:
        result = quantize(data, dtype, width, stored)
        weight = (np.frombuffer(result.parts[0], np.uint32) & 0x88888888).tobytes()
        return result._replace(parts=(weight, *result.parts[1:]))

    patch.setattr(affine, "quantize", coarse)


def renumbered_by_another_expert(patch: Patch) -> None:
    renumbered = plan_module.renumbered
    patch.setattr(plan_module, "renumbered", lambda entry, layer, tensors, keep: (
        renumbered(entry, layer, tensors, [keep[1], keep[0], *keep[2:]])
    ))  # fmt: skip


def counts_without_the_dense_layer(patch: Patch) -> None:
    build_config = config.build_config

    def wrong(*args: Any) -> Json:
        result = build_config(*args)
        result["text_config"]["expert_counts"].pop(0)
        return result

    patch.setattr(plan_module, "build_config", wrong)


@pytest.mark.parametrize(
    ("kind", "defect", "message"),
    [
        ("mxfp4", fused_in_another_order, "self_attn.qkv_proj.weight: element [0, 0] is "),
        ("q4", fused_in_another_order, "self_attn.qkv_proj.weight: element [0, "),
        ("mxfp4", keys_not_transposed, f"{LAYER}3.self_attn.embed_q.weight: element [0, 0, 1]"),
        ("mxfp8", keys_not_transposed, f"{LAYER}3.self_attn.embed_q.weight: element [0, 0, "),
        ("narrowed", rounded_down, ".weight: element ["),
        ("graded", router_rows_as_they_come, "layers.1.mlp.gate.weight: element [1, "),
        ("graded", low_bank_descending, "switch_mlp_low.down_proj.weight: element [0, "),
        ("padded", padding_that_wins, "is 1.0, expected -1e+29 or less"),
        ("mxfp8", router_like_the_rest, "mlp.gate.weight: U32 (8, 16), expected BF16 (8, 64)"),
        ("q4", codes_of_more_bits_than_named, ".weight: element ["),
        ("moonshot", renumbered_by_another_expert, "experts.0.w3.weight_scale: element [0, "),
        ("ragged", counts_without_the_dense_layer, "expert_counts is [4, 6, 2, 8], expected [0, "),
    ],
)
def test_a_defect_is_caught(
    kind: str,
    defect: Callable[[Patch], None],
    message: str,
    tiny_source: Path,
    tmp_path: Path,
    monkeypatch: Patch,
) -> None:
    """The plan of `verify` has the same defect, so that all hashes agree."""
    source, profile = open_source(tiny_source), profile_of(kind)
    defect(monkeypatch)
    if defect is router_like_the_rest:
        assert dict(profile.roles)["router"] is None
    run(plan_build(source, replace(profile), KINDS[kind][1]), source, tmp_path / "out")
    with pytest.raises(MismatchError) as error:
        verify_build(tmp_path / "out", source)
    assert message in error.value.message
