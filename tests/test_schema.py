"""The JSON of what crosses module borders."""

from __future__ import annotations

import json

import pytest

from kimi_k3_mlx.errors import CheckpointError
from kimi_k3_mlx.profile import Profile
from kimi_k3_mlx.schema import (
    BuildPlan,
    BuildTensor,
    Manifest,
    PlannedShard,
    Quantization,
    ShardRecord,
    SourceId,
    Span,
)

SOURCE = SourceId("c0ffee", "ab" * 32)
PROFILE = Profile("mxfp4", "everything as it is")
MANIFEST = Manifest(
    plan_sha256="cd" * 32,
    profile=PROFILE.to_json(),
    prune_sha256=None,
    source=SOURCE,
    shards=(ShardRecord("a", 9, "ef" * 32, 1, {"x.*.weight": [0.5, 2.0]}),),
    sidecars={"tokenizer.json": "01" * 32},
    tools={"numpy": "2"},
)


def plan(shape: tuple[int, ...] = (2, 3), source: SourceId = SOURCE) -> BuildPlan:
    tensors = (
        BuildTensor("a", "BF16", shape, "norm", (Span("x", 0, 6), Span("y", 4, 10))),
        BuildTensor("b", "F32", (1,), "attention", (Span("z", 0, 8),), "drop_zero_tail"),
    )
    return BuildPlan(source, PROFILE, {"a": 1}, 1, (PlannedShard("s", "layer 1/1", 64, tensors),))


def test_a_plan_adds_up() -> None:
    assert (plan().total_size, plan().n_bytes, plan().n_read) == (16, 80, 20)


def test_a_plan_as_json_says_where_every_byte_comes_from() -> None:
    value = json.loads(json.dumps(plan().to_json()))
    second = value["shards"][0]["tensors"][1]
    assert (second["offset"], second["n_bytes"], second["inputs"]) == (76, 4, [["z", 0, 8]])
    assert value["version"] == 1


def test_the_hash_knows_the_bytes_and_not_the_place() -> None:
    moved = SourceId(None, SOURCE.headers_sha256)
    assert plan().sha256 == plan(source=moved).sha256
    assert plan().sha256 != plan(shape=(3, 2)).sha256
    assert plan().sha256 != plan(source=SourceId(None, "ac" * 32)).sha256


def test_a_profile_survives_json() -> None:
    eight, three = Quantization("affine", 8, 64), Quantization("affine", 3, 64)
    profile = Profile(
        "p", "s", experts=three, trunk=eight, roles=(("router", None),),
        overrides=(("*.b_proj", None), ("*.3.*", three)), narrow=("o_norm",),
    )  # fmt: skip
    assert Profile.from_json(json.loads(json.dumps(profile.to_json()))) == profile
    assert Profile.from_json(PROFILE.to_json()) == PROFILE
    assert profile.format_of("layers.1.mlp.gate", "router") is None
    assert profile.format_of("layers.1.self_attn.b_proj", "attention") is None
    assert profile.format_of("layers.3.self_attn.b_proj", "attention") == three, "the last counts"
    assert profile.format_of("layers.1.self_attn.o_proj", "attention") == eight


def test_a_manifest_survives_json() -> None:
    assert Manifest.from_json(json.loads(json.dumps(MANIFEST.to_json()))) == MANIFEST
    assert MANIFEST.files == ("a", "tokenizer.json")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("version", 7, "version 7, expected 1"),
        ("shards", [{"name": "a"}], "damaged: 'n_bytes'"),
        ("sidecars", ["a"], "damaged: "),
        ("source", {"path": "/models/k3"}, "damaged: "),
    ],
)
def test_a_manifest_that_is_none_is_refused(field: str, value: object, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Manifest.from_json(MANIFEST.to_json() | {field: value})
