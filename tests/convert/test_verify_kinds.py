"""Every kind of build passes, and each kind of damage is caught in every kind, alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kimi_k3_mlx.convert.alone import verify_alone
from kimi_k3_mlx.convert.plan import plan_build
from kimi_k3_mlx.convert.profiles import load_profile
from kimi_k3_mlx.convert.run import run
from kimi_k3_mlx.convert.verify import verify_build
from kimi_k3_mlx.errors import MismatchError
from kimi_k3_mlx.tensors.local import open_source
from kimi_k3_mlx.tensors.source import INDEX
from tests.convert.damage import LAYER, stored_parts, values_of
from tests.convert.verify_kinds import KINDS, built, linked, profile_of

OURS = ("ragged", "graded", "graded q3", "mixed")
"""Kinds that carry our model file."""
DAMAGED = ("mxfp4", "mxfp8", "q3 experts", "ragged", "padded", "graded", "moonshot")
MLX = tuple(kind for kind in DAMAGED if kind != "moonshot")
Verify = Callable[..., str]


@pytest.fixture
def damaged(tiny_source: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A build of a kind, to damage."""
    return lambda kind: linked(built(kind, tiny_source), tmp_path / "build")


@pytest.fixture
def caught(tiny_source: Path) -> Verify:
    """Verify a build that must fail; return the message."""

    def check(build: Path, **options: int) -> str:
        with pytest.raises(MismatchError) as error:
            verify_build(build, open_source(tiny_source), **options)
        return error.value.message

    return check


def module_of(kind: str, name: str) -> str:
    """A module of layer 2's MoE block under its name in that kind of build."""
    if kind == "moonshot":
        return f"{LAYER}2.block_sparse_moe.{name}"
    return f"{LAYER}2.mlp.{name.removeprefix('gate.e')}"


def swap(build: Path, name: str) -> None:
    """Exchange the first two of what a tensor lists."""
    with values_of(build, name) as values:
        values[[0, 1]] = values[[1, 0]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_good_build_passes(kind: str, tiny_source: Path) -> None:
    source, prune = open_source(tiny_source), KINDS[kind][1]
    report = verify_build(built(kind, tiny_source), source, prune=prune)
    kept = 4 * 8 if prune is None else sum(len(layer.keep) for layer in prune.layers.values())
    assert report.n_expert_tensors == 6 * kept
    assert report.n_tensors == 6 * kept + 146
    assert report.model_file == ("installed" if kind in OURS else None)
    assert (report.hashed, report.sample) == (True, None)
    assert report.to_json()["build"] == str(built(kind, tiny_source))
    told = verify_alone(built(kind, tiny_source), prune=prune)
    assert told.profile == profile_of(kind).name
    assert told.prune_sha256 == (prune.sha256 if prune else None)


@pytest.mark.parametrize("kind", ["narrowed", "q4", "mxfp8", "padded q2 experts", "mixed"])
def test_what_was_rounded_is_what_the_run_said(
    kind: str, tiny_source: Path, tmp_path: Path
) -> None:
    source = open_source(tiny_source)
    summary = run(plan_build(source, profile_of(kind), KINDS[kind][1]), source, tmp_path / "out")
    report = verify_build(tmp_path / "out", source)
    said = {tensor.name: tensor for tensor in summary.changed}
    assert set(said) == {tensor.name for tensor in report.rounded} | set(report.narrowed)
    for tensor in report.rounded:
        assert tensor.n_tensors == said[tensor.name].n_tensors
        assert tensor.stored_as == said[tensor.name].stored_as
        assert tensor.error == pytest.approx(said[tensor.name].error, rel=1e-3)
        assert 1 - tensor.error**2 < tensor.cosine < 1


@pytest.mark.parametrize("kind", DAMAGED)
@pytest.mark.parametrize("name", ["gate", "gate.e_score_correction_bias"])
def test_permuted_router_rows_are_caught(
    kind: str, name: str, damaged: Callable[[str], Path], caught: Verify
) -> None:
    build = damaged(kind)
    module = module_of(kind, name) if name == "gate" or kind == "moonshot" else ""
    module = module or f"{LAYER}2.mlp.e_score_correction_bias"
    for part in stored_parts(build, module):
        swap(build, part)
    message = caught(build)
    assert message.startswith(f"tensor {module}")
    assert f"(source tensor {LAYER}2.block_sparse_moe.{name}" in message


@pytest.mark.parametrize("kind", MLX)
@pytest.mark.parametrize("parts", [("weight", "scales", "biases"), ("weight",), ("scales",)])
def test_permuted_experts_are_caught(
    kind: str, parts: tuple[str, ...], damaged: Callable[[str], Path], caught: Verify
) -> None:
    build = damaged(kind)
    module = f"{LAYER}2.mlp.switch_mlp.up_proj"
    for name in stored_parts(build, module):
        if name.endswith(parts):
            swap(build, name)
    assert caught(build).startswith(f"tensor {module}.")


@pytest.mark.parametrize("part", ["weight", "scales", "biases"])
def test_permuted_experts_of_a_second_bank_are_caught(
    part: str, damaged: Callable[[str], Path], caught: Verify
) -> None:
    build = damaged("graded")
    module = f"{LAYER}2.mlp.switch_mlp_low.down_proj"
    swap(build, f"{module}.{part}")
    message = caught(build)
    assert message.startswith(f"tensor {module}.weight: element [0, ")
    assert "block_sparse_moe.experts.1.w2.weight_packed)" in message


def test_permuted_experts_of_a_pruned_checkpoint_are_caught(
    damaged: Callable[[str], Path], caught: Verify
) -> None:
    build = damaged("moonshot")
    first, second = (f"{LAYER}2.block_sparse_moe.experts.{n}.w1.weight_packed" for n in (0, 1))
    with values_of(build, first) as ours, values_of(build, second) as theirs:
        kept = ours.copy()
        ours[:] = theirs
    with values_of(build, second) as theirs:
        theirs[:] = kept
    message = caught(build)
    assert message.startswith(f"tensor {LAYER}2.block_sparse_moe.experts.")
    assert "experts.1.w1.weight_packed)" in message or "experts.3.w1.weight_packed)" in message


@pytest.mark.parametrize("kind", DAMAGED)
@pytest.mark.parametrize(
    ("part", "options"),
    [("3.self_attn.", {"sample": 1}), ("router", {"sample": 1}), ("0.self_attn.A_log", {})],
)
def test_a_zeroed_attention_or_router_is_caught(
    kind: str,
    part: str,
    options: dict[str, int],
    damaged: Callable[[str], Path],
    caught: Verify,
) -> None:
    """A verifier that samples experts must not sample the rest."""
    build = damaged(kind)
    prefix = module_of(kind, "gate.") if part == "router" else f"{LAYER}{part}"
    names = json.loads((build / INDEX).read_text("utf-8"))["weight_map"]
    for name in names:
        if name.startswith(prefix):
            with values_of(build, name) as values:
                values[...] = 0
    assert caught(build, **options).startswith(f"tensor {prefix}")


@pytest.mark.parametrize("kind", ["padded", "padded q2 experts"])
def test_padding_that_could_be_chosen_is_caught(
    kind: str, damaged: Callable[[str], Path], caught: Verify
) -> None:
    build = damaged(kind)
    name = f"{LAYER}3.mlp.e_score_correction_bias"
    with values_of(build, name) as bias:
        assert (bias[2:] <= -1e29).all()
        bias[6] = -5.0
    assert caught(build) == (
        f"tensor {name}: element [6] is -5.0, expected -1e+29 or less: "
        "it belongs to an expert that doesn't exist, which no token may choose."
    )


def test_any_bias_that_is_low_enough_may_pad(
    damaged: Callable[[str], Path], caught: Verify
) -> None:
    build = damaged("padded")
    with values_of(build, f"{LAYER}3.mlp.e_score_correction_bias") as bias:
        bias[7] = -2e29
    assert "SHA-256 is" in caught(build)


@pytest.mark.parametrize("kind", ["padded", "padded q2 experts"])
@pytest.mark.parametrize("module", ["gate", "switch_mlp.gate_proj"])
def test_padding_that_is_not_zero_is_caught(
    kind: str, module: str, damaged: Callable[[str], Path], caught: Verify
) -> None:
    build = damaged(kind)
    for name in stored_parts(build, f"{LAYER}3.mlp.{module}"):
        with values_of(build, name) as values:
            values[5:] = np.uint32(0x3C3C3C3C).astype(values.dtype)
    message = caught(build)
    assert message.startswith(f"tensor {LAYER}3.mlp.{module}.")
    assert message.endswith("(padding: no expert of the source's).")


def test_a_narrowed_value_must_be_the_nearest(
    damaged: Callable[[str], Path], caught: Verify
) -> None:
    build = damaged("narrowed")
    name = f"{LAYER}0.self_attn.qkv_conv.conv.weight"
    with values_of(build, name) as words:
        words[3, 1, 0] += 1
    message = caught(build)
    assert message.startswith(f"tensor {name}: element [3, 1, 0] is ")
    assert message.endswith(f"(source tensor {LAYER}0.self_attn.q_conv1d.weight).")


@pytest.mark.parametrize("kind", ["mxfp8", "q4", "padded", "q3 experts"])
@pytest.mark.parametrize("damage", ["scales", "codes", "both"])
def test_values_that_rounding_does_not_explain_are_caught(
    kind: str, damage: str, damaged: Callable[[str], Path], caught: Verify
) -> None:
    """Also huge scales over codes of zero, which explain any value by their own measure."""
    build = damaged(kind)
    module = f"{LAYER}0.mlp.down_proj"
    if damage != "codes":
        with values_of(build, f"{module}.scales") as scales:
            scales[5, 1] = 200 if kind == "mxfp8" else 0x4480
    if damage != "scales":
        with values_of(build, f"{module}.weight") as words:
            words[5, words.shape[1] // 2 :] = 0
    message = caught(build)
    assert message.startswith(f"tensor {module}.weight: element [5, ")
    assert " decodes to " in message
    assert f"(source tensor {module}.weight)" in message


def test_a_scale_that_is_no_number_is_caught(
    damaged: Callable[[str], Path], caught: Verify
) -> None:
    build = damaged("mxfp8")
    with values_of(build, "language_model.lm_head.scales") as scales:
        scales[300, 0] = 255
    assert "lm_head.weight: element [300, 0] decodes to nan, expected " in caught(build)


def test_a_matrix_that_lost_its_direction_is_caught(tiny_source: Path, tmp_path: Path) -> None:
    """Two values of 64 are so big that in 2 bits the others vanish: honest, and of no use."""
    source = linked(tiny_source, tmp_path / "source")
    for expert in range(8):
        name = f"{LAYER}2.block_sparse_moe.experts.{expert}.w1.weight_"
        with values_of(source, f"{name}packed") as codes:
            codes[...] = 0x33
            codes[:, 0] = 0xF7
        with values_of(source, f"{name}scale") as scales:
            scales[...] = 127
    opened = open_source(source)
    run(plan_build(opened, load_profile("q2-q8")), opened, tmp_path / "out")
    with pytest.raises(MismatchError) as error:
        verify_build(tmp_path / "out", opened)
    assert error.value.message == (
        f"tensor {LAYER}2.mlp.switch_mlp.gate_proj.weight: its cosine with the source is 0.5535, "
        "at least 0.8 expected of 2 bits, groups of 64."
    )
