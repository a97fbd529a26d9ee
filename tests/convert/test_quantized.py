"""Quantized trunks and requantized experts: MLX's own bytes, stock's own names, honest losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import kimi_k3 as stock
from mlx_lm.utils import load_model

from converters.mxfp4 import decode
from kimi_k3_mlx.convert import shards
from kimi_k3_mlx.convert.plan import plan_build
from kimi_k3_mlx.convert.profiles import load_profile, parse_profile, with_trunk
from kimi_k3_mlx.convert.run import BuildSummary, run
from kimi_k3_mlx.convert.verify import verify_build
from kimi_k3_mlx.errors import CheckpointError, UsageError
from kimi_k3_mlx.profile import Profile
from kimi_k3_mlx.prune_plan import LayerPlan, PrunePlan
from kimi_k3_mlx.schema import Quantization
from kimi_k3_mlx.tensors.local import LocalSource, open_source
from tests.convert.damage import tree
from tests.tiny_k3 import TinyConfig, write_source

TOKENS = mx.array([[1, 7, 300, 42, 11, 200, 5, 9]])
SIZES = TinyConfig(
    hidden=128, latent=128, moe_intermediate=64, head_dim=64, qk_nope=64, v_head_dim=64, kv_lora=64,
    q_lora=64, vision_layers=1,
)  # fmt: skip
TRUNKS = [("affine", bits, group) for bits in (8, 6, 5, 4) for group in (64, 32)]
TRUNKS += [("mxfp8", 8, 32)]
SOURCE_F32 = ("A_log", "dt_bias", "o_norm.weight", "conv.weight", "e_score_correction_bias")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> LocalSource:
    return open_source(write_source(tmp_path_factory.mktemp("quantized") / "source", SIZES))


@pytest.fixture(scope="module")
def whole(source: LocalSource, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(source, load_profile("mxfp4"), tmp_path_factory.mktemp("quantized") / "whole")[0]


def build(source: LocalSource, profile: Profile, out: Path, prune: PrunePlan | None = None
          ) -> tuple[Path, BuildSummary]:  # fmt: skip
    return out, run(plan_build(source, profile, prune), source, out)


def weights(path: Path) -> dict[str, mx.array]:
    found: dict[str, mx.array] = {}
    for file in sorted(path.glob("model*.safetensors")):
        found |= mx.load(str(file))
    return found


@pytest.mark.parametrize("trunk", TRUNKS, ids=str)
def test_the_bytes_are_those_of_mlx(
    trunk: tuple[str, int, int], source: LocalSource, whole: Path, tmp_path: Path
) -> None:
    """`mx.quantize` of the whole matrix, whatever pieces we cut it into; the rest untouched."""
    profile = with_trunk(load_profile("mxfp4"), *trunk)
    out, _ = build(source, profile, tmp_path / "out")
    plain, found = weights(whole), weights(out)
    block = json.loads((out / "config.json").read_text())["quantization"]
    modules = [name for name, value in block.items() if isinstance(value, dict)]
    assert len(modules) > 40
    for module in modules:
        parts = mx.quantize(plain.pop(f"{module}.weight"), **block[module])
        for part, expected in zip(("weight", "scales", "biases"), parts, strict=False):
            value = found.pop(f"{module}.{part}")
            assert value.dtype == expected.dtype
            assert mx.array_equal(value, expected), f"{module}.{part}"
    assert found.keys() == plain.keys()
    for name, value in found.items():
        assert value.dtype == plain[name].dtype
        assert mx.array_equal(value.view(mx.uint8), plain[name].view(mx.uint8)), name


@pytest.mark.parametrize("name", ["mxfp4-q8", "mxfp4-q6", "mxfp4-q4", "mxfp4-mxfp8", "q3-q8"])
def test_stock_mlx_lm_loads_every_profile(name: str, source: LocalSource, tmp_path: Path) -> None:
    """Every override key is the path of a module that exists; strict loading checks the shapes."""
    out, _ = build(source, load_profile(name), tmp_path / "out")
    model, config = load_model(out)
    modules = dict(model.named_modules())
    overrides = {k: v for k, v in config["quantization"].items() if isinstance(v, dict)}
    assert overrides.keys() <= modules.keys()
    for path, expected in overrides.items():
        module = modules[path]
        assert (module.mode, module.bits, module.group_size) == (
            expected["mode"], expected["bits"], expected["group_size"],
        )  # fmt: skip
    assert np.isfinite(np.array(model(TOKENS).astype(mx.float32))).all()


def test_quantized_logits_come_close(source: LocalSource, whole: Path, tmp_path: Path) -> None:
    """Eight bits are closer than four: the parts are where they belong."""
    errors = {}
    expected = np.array(load_model(whole)[0](TOKENS).astype(mx.float32))
    for name in ("mxfp4-q8", "mxfp4-q4"):
        out, _ = build(source, load_profile(name), tmp_path / name)
        found = np.array(load_model(out)[0](TOKENS).astype(mx.float32))
        errors[name] = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert errors["mxfp4-q8"] < 0.3
    assert 2 * errors["mxfp4-q8"] < errors["mxfp4-q4"]


def test_norms_conv_and_f32_tensors_stay(source: LocalSource, whole: Path, tmp_path: Path) -> None:
    out, _ = build(source, load_profile("mxfp4-q4"), tmp_path / "out")
    plain, found = weights(whole), weights(out)
    for name, value in plain.items():
        stays = value.ndim == 1 or "res_proj" in name or "conv" in name
        if stays or name.endswith(SOURCE_F32) or name.startswith(("vision_tower", "mm_projector")):
            assert mx.array_equal(found[name], value), name


def test_narrowing_rounds_to_nearest_even_and_is_listed(
    source: LocalSource, whole: Path, tmp_path: Path
) -> None:
    out, summary = build(source, load_profile("mxfp4-bf16"), tmp_path / "out")
    plain, found = weights(whole), weights(out)
    assert [(c.name.split(".", 4)[-1], c.stored_as) for c in summary.changed] == [
        ("self_attn.o_norm.weight", "BF16"),
        ("self_attn.qkv_conv.conv.weight", "BF16"),
    ]
    for name, value in found.items():
        if value.dtype != plain[name].dtype:
            assert name.endswith(("o_norm.weight", "conv.weight"))
            assert mx.array_equal(value, plain[name].astype(mx.bfloat16))
    assert not [n for n, v in found.items() if v.dtype == mx.float32 and not n.endswith(SOURCE_F32)]
    load_model(out)


def test_a_lossless_build_says_so(source: LocalSource, whole: Path) -> None:
    plan = plan_build(source, load_profile("mxfp4"))
    assert run(plan, source, whole).changed == ()


@pytest.mark.parametrize(("bits", "group"), [(3, 64), (2, 64), (3, 32), (2, 128)])
def test_requantized_experts_have_that_many_bits_and_the_loss_is_measured(
    bits: int, group: int, source: LocalSource, whole: Path, tmp_path: Path
) -> None:
    sizes = TinyConfig(hidden=64, latent=128, moe_intermediate=128, vision=False, layers=2)
    source = open_source(write_source(tmp_path / "source", sizes))
    text = f'version = 1\nname = "x"\nsummary = "s"\ntrunk = "source"\nexperts = {{ bits = {bits}, '
    profile = parse_profile(f"{text}group_size = {group} }}", "x")
    out, summary = build(source, profile, tmp_path / "out")
    found = weights(out)
    module = "language_model.model.layers.1.mlp.switch_mlp.down_proj"
    weight, scales = found[f"{module}.weight"], found[f"{module}.scales"]
    assert weight.nbytes * 8 == 8 * 128 * 128 * bits
    assert scales.shape == (8, 128, 128 // group)
    exact = np.stack([experts(source, 1, "w2", expert) for expert in range(8)])
    biases = found[f"{module}.biases"]
    decoded = mx.dequantize(
        weight, scales.astype(mx.float32), biases.astype(mx.float32), group_size=group, bits=bits
    )
    error = np.linalg.norm(np.array(decoded) - exact) / np.linalg.norm(exact)
    stated = {change.name.split(".")[-2]: change for change in summary.changed}["down_proj"]
    assert stated.error == pytest.approx(error, rel=1e-4)
    assert stated.n_tensors == 1
    assert 0.05 < error < (0.7 if bits == 2 else 0.35)
    load_model(out)


def experts(source: LocalSource, layer: int, matrix: str, expert: int) -> np.ndarray:
    """An expert's exact values, by the naive decoder."""
    base = f"language_model.model.layers.{layer}.block_sparse_moe.experts.{expert}.{matrix}."
    with source.reader() as reader:
        parts = []
        for part in ("weight_packed", "weight_scale"):
            tensor = source.tensors[base + part]
            span = (tensor.name, 0, tensor.n_bytes)
            parts.append(np.frombuffer(reader.read(shards.Span(*span)), np.uint8))
            parts[-1] = parts[-1].reshape(tensor.shape)
    return decode(*parts)


def test_a_scale_that_is_no_number_can_not_be_requantized(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source", TinyConfig(layers=2, vision=False))
    name = "language_model.model.layers.1.block_sparse_moe.experts.5.w1.weight_scale"
    opened = open_source(source)
    with (source / opened.weight_map[name]).open("r+b") as file:
        file.seek(opened.tensors[name].begin + 3)
        file.write(b"\xff")
    opened = open_source(source)
    with pytest.raises(CheckpointError, match=r"experts\.5\.w1\.weight_scale has scales of 255"):
        run(plan_build(opened, load_profile("q2-q8")), opened, tmp_path / "out")


def test_rows_that_groups_do_not_divide_stay_as_they_are(tmp_path: Path) -> None:
    """As mlx_lm.convert does; K3's own all divide."""
    source = open_source(write_source(tmp_path / "source", TinyConfig(vision=False)))
    plan = plan_build(source, load_profile("mxfp4-q8"))
    stored = {tensor.name: tensor for tensor in plan.tensors}
    f_b = stored["language_model.model.layers.0.self_attn.f_b_proj.weight"]
    assert (f_b.shape[-1], f_b.quantization, f_b.dtype) == (32, None, "BF16")


@pytest.mark.parametrize("profile", ["mxfp4-q6", "q3-q8"])
def test_a_matrix_in_pieces_is_the_matrix(
    profile: str, source: LocalSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(source, load_profile(profile), tmp_path / "whole")
    monkeypatch.setattr(shards, "ROWS_BYTES", 1000)
    build(source, load_profile(profile), tmp_path / "pieces")
    pieces, whole = tree(tmp_path / "pieces"), tree(tmp_path / "whole")
    del pieces["kimi_k3_mlx.json"], whole["kimi_k3_mlx.json"]  # sums of errors round otherwise
    assert pieces == whole


def test_every_profile_names_modules_of_the_stock_model_at_full_size() -> None:
    """K3's own config: every key of the quantization block is a module, every group divides."""
    from tests.convert.test_full_scale import header_only_source

    config = json.loads((Path(__file__).parents[1] / "golden/k3_config.json").read_text("utf-8"))
    plan = plan_build(header_only_source(config), load_profile("mxfp4-q8"))
    model = stock.Model(stock.ModelArgs.from_dict(plan.config))
    modules = dict(model.named_modules())
    block = plan.config["quantization"]
    overrides = {name for name, value in block.items() if isinstance(value, dict)}
    assert overrides <= modules.keys()
    kept = [
        name for name, module in modules.items()
        if hasattr(module, "to_quantized") and name not in overrides and "switch_mlp" not in name
    ]  # fmt: skip
    assert all("res_proj" in name for name in kept)


def test_a_graded_layer_has_two_banks_of_its_own_bits(source: LocalSource, tmp_path: Path) -> None:
    low = Quantization("affine", 2, 64)
    layers = {n: LayerPlan(tuple(range(8)), (1, 5, 6)) for n in range(1, 5)}
    prune = PrunePlan(8, layers, low=low)
    out, summary = build(source, load_profile("mxfp4"), tmp_path / "out", prune)
    found = weights(out)
    config: dict[str, Any] = json.loads((out / "config.json").read_text())
    assert config["text_config"]["low_expert_counts"] == [0, 3, 3, 3, 3]
    base = "language_model.model.layers.2.mlp."
    assert found[f"{base}switch_mlp.gate_proj.weight"].shape == (5, 64, 128 * 4 // 32)
    assert found[f"{base}switch_mlp_low.gate_proj.weight"].shape == (3, 64, 128 * 2 // 32)
    assert config["quantization"][f"{base}switch_mlp_low.gate_proj"] == low.to_json()
    whole = weights(build(source, load_profile("mxfp4"), tmp_path / "whole")[0])
    order = mx.array([0, 2, 3, 4, 7, 1, 5, 6])
    for name in (f"{base}gate.weight", f"{base}e_score_correction_bias"):
        assert mx.array_equal(found[name], whole[name][order])
    assert {change.name.split(".")[-3] for change in summary.changed} == {"switch_mlp_low"}


def test_groups_that_do_not_divide_an_experts_rows_are_refused(source: LocalSource) -> None:
    """A dry run accepted it, and the run stopped after a layer: the sizes came out otherwise."""
    text = 'version = 1\nname = "x"\nsummary = "s"\ntrunk = "source"\n'
    profile = parse_profile(f"{text}experts = {{ bits = 2, group_size = 128 }}", "x")
    with pytest.raises(UsageError, match="rows of 64, which groups of 128 don't divide"):
        plan_build(source, profile)


def test_an_override_that_matches_nothing_is_refused(source: LocalSource) -> None:
    text = 'version = 1\nname = "x"\nsummary = "s"\ntrunk = "source"\nexperts = "mxfp4"\n'
    for pattern in ("*.self_attn.bprojj", "*norm*", "*_res_proj", "*.switch_mlp.*"):
        profile = parse_profile(f'{text}[overrides]\n"{pattern}" = "mxfp8"\n', "x")
        with pytest.raises(UsageError, match=r"override '.*' matches no matrix"):
            plan_build(source, profile)


def test_formats_that_differ_by_layer_are_told_apart(source: LocalSource, tmp_path: Path) -> None:
    """`g_proj` was once said to have 8 bits in five layers, and had 5 in one of them."""
    text = 'version = 1\nname = "x"\nsummary = "s"\nexperts = "mxfp4"\n'
    text += "trunk = { bits = 8, group_size = 64 }\n[overrides]\n"
    profile = parse_profile(f'{text}"*.layers.1.*" = {{ bits = 5, group_size = 32 }}\n', "x")
    out, summary = build(source, profile, tmp_path / "out")
    name = "language_model.model.layers.*.self_attn.g_proj.weight"
    told = [(c.stored_as, c.n_tensors) for c in summary.changed if c.name == name]
    assert told == [("5 bits, groups of 32", 1), ("8 bits, groups of 64", 4)]
    report = verify_build(out, source)
    verified = [(r.stored_as, r.n_tensors) for r in report.rounded if r.name == name]
    assert verified == told
