"""config.json and the tensors of a build describe the same model, also without a source."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kimi_k3_mlx.convert.alone import verify_alone
from kimi_k3_mlx.convert.consistent import check_shapes
from kimi_k3_mlx.convert.verify import verify_build
from kimi_k3_mlx.errors import MismatchError
from kimi_k3_mlx.tensors.local import open_source
from tests.convert.damage import LAYER, changing_config, editing
from tests.convert.verify_kinds import KINDS, built, linked
from tests.tiny_k3 import TinyConfig, write_source

HEAD = "language_model.lm_head"
Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def damaged(tiny_source: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A build of a kind, to damage."""
    return lambda kind: linked(built(kind, tiny_source), tmp_path / "build")


def caught(build: Path) -> str:
    """Check a build that must fail; return the message."""
    with pytest.raises(MismatchError) as error:
        verify_alone(build)
    return error.value.message


def counts(**fields: object) -> Change:
    return lambda config: config["text_config"].update(fields)


def entry(module: str, **fields: object) -> Change:
    return lambda config: config["quantization"].update({module: fields})


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "moonshot" not in kind])
def test_every_kind_agrees_with_its_config(kind: str, tiny_source: Path) -> None:
    check_shapes(open_source(built(kind, tiny_source)))


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("ragged", counts(expert_counts=[0, 4, 6, 2]), "expert_counts is [0, 4, 6, 2], expected 5"),
        ("ragged", counts(expert_counts="many"), "expert_counts is many, expected 5 numbers"),
        ("ragged", counts(expert_counts=[0, 4, 6, 2, -8]), "expected 5 numbers"),
        ("ragged", counts(expert_counts=[3, 4, 6, 2, 8]), "expert_counts[0] is 3, but the layer"),
        ("ragged", counts(expert_counts=[0, 4, 6, 2, 7]), "largest of expert_counts is 7"),
        ("ragged", counts(expert_counts=[0, 5, 6, 2, 8]), "layers.1.mlp.gate.weight: BF16 (4, 64)"),
        ("ragged", counts(expert_counts=None), "layers.1.mlp.gate.weight: BF16 (4, 64), but "),
        ("graded", counts(low_expert_counts=[0, 2, 2, 0, 4]), "layers.2.mlp.switch_mlp."),
        ("graded", counts(low_expert_counts=[0, 2, 3, 1, 4]), "layers.3.mlp.switch_mlp."),
        ("graded", counts(low_expert_counts=None), "layers.1.mlp.switch_mlp.gate_proj.weight: U32"),
        ("mxfp4", counts(expert_counts=[0, 4, 6, 2, 8]), "layers.1.mlp.gate.weight: BF16 (8, 64)"),
        ("mxfp4", counts(num_experts=1), "num_experts is 1, but the router selects 2 per token."),
        ("mxfp4", counts(vocab_size=500), "embed_tokens.weight: BF16 (512, 64), but config.json"),
        (
            "q4",
            counts(vocab_size=500),
            "embed_tokens.weight: U32 (512, 8), but config.json, 4 bits",
        ),
        ("mxfp4", counts(num_hidden_layers=4), "do not name each of the layers 1 to 4 once"),
        ("mxfp4", counts(kv_lora_rank=32), "kv_a_proj_with_mqa.weight: BF16 (80, 64), but "),
        ("moonshot", counts(num_experts=3), "gate.weight: shape (4, 64), expected (3, 64)"),
        ("moonshot", counts(num_experts=5), "experts.4.w1.weight_packed is missing"),
        ("mxfp4", lambda c: c.pop("vision_config"), "is in no model that config.json"),
        ("mxfp4", lambda c: c.pop("quantization"), "quantization is None, expected an object"),
        ("mxfp4", lambda c: c["quantization"].update(bits=8), "but config.json, mxfp4 describes"),
        ("mxfp4", lambda c: c["quantization"].update(mode="nvfp4"), "which MLX has not."),
        ("mxfp4", lambda c: c["quantization"].pop("mode"), "quantization of "),
    ],
)
def test_a_config_that_the_shapes_contradict_is_caught(
    kind: str, change: Change, message: str, damaged: Callable[[str], Path]
) -> None:
    build = damaged(kind)
    with changing_config(build) as config:
        change(config)
    assert message in caught(build)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (entry(HEAD, mode="affine", bits=8, group_size=64), f"tensor {HEAD}.weight: U32 (512, 8)"),
        # Twice the width both in words and in groups: only the true width tells.
        (entry(HEAD, mode="affine", bits=2, group_size=128), f"tensor {HEAD}.weight: U32 (512, 8)"),
        (entry(HEAD, mode="mxfp4", bits=4, group_size=32), f"tensor {HEAD}.scales: BF16 (512, 1)"),
        (entry(HEAD, mode="affine", bits=9, group_size=64), f"quantization of {HEAD} is "),
        (entry(HEAD, bits=4, group_size=64), f"quantization of {HEAD} is "),
        (entry(HEAD, mode="affine", bits=4, group_size=64, x=1), f"quantization of {HEAD} is "),
        (
            entry(f"{LAYER}9.mlp.gate", mode="affine", bits=8, group_size=64),
            f"quantization names {LAYER}9.mlp.gate, which is no quantized module of this build",
        ),
        (
            entry(f"{LAYER}0.input_layernorm", mode="affine", bits=8, group_size=64),
            f"quantization names {LAYER}0.input_layernorm, which is no quantized module",
        ),
        (lambda config: config["quantization"].pop(HEAD), f"tensor {HEAD}.scales: BF16 (512, 1)"),
    ],
)
def test_an_entry_that_the_shapes_contradict_is_caught(
    change: Change, message: str, damaged: Callable[[str], Path]
) -> None:
    """q4: the head has 4 bits in groups of 64, the default of the file is mxfp4."""
    build = damaged("q4")
    with changing_config(build) as config:
        change(config)
    assert message in caught(build)


@pytest.mark.parametrize("part", ["scales", "biases"])
def test_a_part_that_is_missing_is_caught(part: str, damaged: Callable[[str], Path]) -> None:
    build = damaged("q4")
    with editing(build, f"{HEAD}.{part}") as tensors:
        del tensors[f"{HEAD}.{part}"]
    with pytest.raises(MismatchError, match=rf"lm_head\.(weight: U32|{part} is missing)"):
        check_shapes(open_source(build))


def test_tensors_of_no_model_and_none_at_all_are_caught(damaged: Callable[[str], Path]) -> None:
    build = damaged("mxfp4")
    with editing(build, f"{HEAD}.weight") as tensors:
        tensors["surplus"] = tensors[f"{HEAD}.weight"]
    with pytest.raises(MismatchError, match="tensor surplus is in no model that config"):
        check_shapes(open_source(build))
    with editing(build, f"{HEAD}.weight") as tensors:
        del tensors["surplus"], tensors[f"{HEAD}.weight"]
    with pytest.raises(MismatchError, match=r"lm_head\.weight is missing; config\.json describes"):
        check_shapes(open_source(build))


@pytest.mark.parametrize(
    ("value", "shown"), [(8.0, "8.0"), (True, "True"), ("8", "8"), ([8], "[8]"), (None, "None")]
)
def test_a_field_of_another_type_is_caught(
    value: object, shown: str, damaged: Callable[[str], Path], tiny_source: Path
) -> None:
    build = damaged("mxfp4")
    with changing_config(build) as config:
        config["text_config"]["num_experts"] = value
    with pytest.raises(MismatchError) as error:
        verify_build(build, open_source(tiny_source))
    assert error.value.message == (f"config.json: text_config.num_experts is {shown}, expected 8.")


@pytest.mark.parametrize("value", ["none", None])
def test_a_surplus_field_is_caught_whatever_it_says(
    value: object, damaged: Callable[[str], Path], tiny_source: Path
) -> None:
    build = damaged("mxfp4")
    with changing_config(build) as config:
        config["surplus"] = value
    with pytest.raises(MismatchError, match=r"surplus is (none|None), expected none\."):
        verify_build(build, open_source(tiny_source))


@pytest.mark.parametrize("kind", ["ragged", "graded", "q4"])
@pytest.mark.parametrize(
    "field", ["num_experts", "expert_counts", "low_expert_counts", "model_file", "quantization"]
)
def test_each_field_that_we_add_is_compared_with_the_plan(
    kind: str, field: str, damaged: Callable[[str], Path], tiny_source: Path
) -> None:
    build = damaged(kind)
    with changing_config(build) as config:
        holder = config if field in ("model_file", "quantization") else config["text_config"]
        if field == "quantization":
            config[field]["bits"] = 5
        elif field in holder:
            del holder[field]
        else:
            holder[field] = [0, 8, 8, 8, 8]
    with pytest.raises(
        MismatchError, match=rf"config\.json: \S*{field}\S* is .*, (expected|which) "
    ):
        verify_build(build, open_source(tiny_source))


def test_a_build_without_vision_has_none(tmp_path: Path) -> None:
    from kimi_k3_mlx.convert.plan import plan_build
    from kimi_k3_mlx.convert.profiles import load_profile
    from kimi_k3_mlx.convert.run import run

    source = open_source(write_source(tmp_path / "source", TinyConfig(vision=False, layers=2)))
    run(plan_build(source, load_profile("mxfp4")), source, tmp_path / "out")
    assert verify_alone(tmp_path / "out").n_tensors > 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]["bits"] == 4
