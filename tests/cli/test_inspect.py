"""`kimi-k3 inspect`: sources and builds, for people and as JSON."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from kimi_k3_mlx.convert.inventory import take_inventory
from kimi_k3_mlx.tensors.local import open_source
from tests.cli.conftest import Run, program
from tests.tiny_k3 import REAL_EXPERT_COUNT, write_source


def test_a_source_in_a_screenful(kimi: Run, tiny_source: Path) -> None:
    result = kimi("inspect", tiny_source)
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0] == f"checkpoint  {tiny_source}  (source in Moonshot's layout)"
    assert "layers      5: 3 KDA and 2 MLA, 1 dense and 4 MoE" in lines
    assert "experts     8 in each MoE layer, 2 chosen per token" in lines
    assert "tensors     338 in 8 shards" in lines


def test_json_of_a_source_and_of_its_build_agree(
    kimi: Run, tiny_source: Path, tiny_build: Path
) -> None:
    source, build = (
        json.loads(kimi("inspect", p, "--json").out) for p in (tiny_source, tiny_build)
    )
    assert (source["kind"], build["kind"]) == ("source", "build")
    for key in ("kda_layers", "mla_layers", "dense_layers", "moe_layers", "experts"):
        assert source[key] == build[key]
    roles = [{part["role"]: part["dtypes"] for part in told["parts"]} for told in (source, build)]
    assert roles[0].keys() == roles[1].keys()
    assert (roles[0]["expert"], roles[1]["expert"]) == (["U8"], ["U32", "U8"])
    assert build["profile"] == "mxfp4"
    assert source["parameters"] - build["parameters"] == 3 * (32 - 2)  # zeros that pad A_log
    assert sum(part["n_bytes"] for part in source["parts"]) == source["n_bytes"]


def test_tensors_by_pattern(kimi: Run, tiny_source: Path) -> None:
    result = kimi("inspect", tiny_source, "--tensors", "*.layers.1.*.gate.*")
    rows = [line.split() for line in result.out.splitlines()]
    assert rows[0] == ["name", "dtype", "shape", "n_bytes", "shard"]
    assert [row[1] for row in rows[1:]] == ["F32", "BF16"]
    listed = json.loads(kimi("inspect", tiny_source, "--tensors", "*.A_log", "--json").out)
    assert [tensor["shape"] for tensor in listed["tensors"]] == [[32]] * 3
    nothing = kimi("inspect", tiny_source, "--tensors", "nothing")
    assert nothing == (0, "no tensor matches nothing\n", "")


def test_offsets_point_at_the_bytes(kimi: Run, tiny_source: Path) -> None:
    args = ("inspect", tiny_source, "--tensors", "*layers.0.self_attn.A_log", "--json")
    (tensor,) = json.loads(kimi(*args).out)["tensors"]
    raw = (tiny_source / tensor["shard"]).read_bytes()[tensor["offset"] :][: tensor["n_bytes"]]
    assert raw[:8] != bytes(8)
    assert raw[8:] == bytes(30 * 4)


def test_parameters_of_real_expert_counts(tmp_path: Path) -> None:
    """Two codes a byte, scales not counted."""
    inventory = take_inventory(open_source(write_source(tmp_path, REAL_EXPERT_COUNT)))
    (expert,) = (part for part in inventory.parts if part.role == "expert")
    assert inventory.experts == (896, 896, 896)
    assert expert.parameters == 3 * 896 * 3 * 32 * 32
    assert expert.n_bytes == expert.parameters // 2 + expert.parameters // 32


def test_json_survives_a_terminal_without_the_character(tiny_source: Path, tmp_path: Path) -> None:
    path = shutil.copytree(tiny_source, tmp_path / "世界")
    result = program("inspect", path, "--json", PYTHONIOENCODING="ascii")
    assert json.loads(result.out)["path"] == str(path)


def test_parameters_of_quantized_builds_are_those_of_the_source(
    kimi: Run, tiny_source: Path, tmp_path: Path
) -> None:
    """Whatever the bits: codes count, scales and biases don't; A_log loses its padding."""
    out = tmp_path / "out"
    args = ("--profile", "q3-q8", "--q-bits", "5", "--q-group-size", "32", "--allow-requantize")
    assert kimi("convert", "--hf-path", tiny_source, "--mlx-path", out, *args, "-q").code == 0
    before, after = (
        json.loads(kimi("inspect", path, "--json").out)["parameters"] for path in (tiny_source, out)
    )
    assert after == before - 3 * 30


def test_a_damaged_build_is_made_again_a_source_downloaded(
    kimi: Run, tiny_source: Path, tiny_build: Path, tmp_path: Path
) -> None:
    hints = []
    for checkpoint in (tiny_source, tiny_build):
        copy = shutil.copytree(checkpoint, tmp_path / checkpoint.name)
        (copy / "model-00002-of-000008.safetensors").unlink()
        result = kimi("inspect", copy)
        assert result.code == 1
        hints.append(result.err.splitlines()[1])
    assert hints[0] == "hint: re-download it: kimi-k3 download --include model-00002*"
    assert hints[1].startswith("hint: make it again by the same kimi-k3 convert")
    (copy / "model.safetensors.index.json").write_text("{")
    assert kimi("inspect", copy).err.splitlines()[1] == hints[1]
