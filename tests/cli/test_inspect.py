"""`kimi-k3 inspect`: sources and builds, for people and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

from kimi_k3_mlx.convert.inventory import take_inventory
from tests.cli.conftest import Run
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
    inventory = take_inventory(write_source(tmp_path, REAL_EXPERT_COUNT))
    (expert,) = (part for part in inventory.parts if part.role == "expert")
    assert inventory.experts == (896, 896, 896)
    assert expert.parameters == 3 * 896 * 3 * 32 * 32
    assert expert.n_bytes == expert.parameters // 2 + expert.parameters // 32
