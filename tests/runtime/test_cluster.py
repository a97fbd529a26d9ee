"""A model shared by ranks: what can be split, who reads what, and the same tokens as one."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from kimi_k3_mlx.convert.plan import plan_build
from kimi_k3_mlx.convert.profiles import load_profile
from kimi_k3_mlx.convert.run import run
from kimi_k3_mlx.errors import CheckpointError, UsageError
from kimi_k3_mlx.prune_plan import LayerPlan, PrunePlan
from kimi_k3_mlx.runtime.cluster import (
    PIPELINE,
    TENSOR,
    check_split,
    group_of,
    obstacle,
    share,
    shared_seed,
)
from kimi_k3_mlx.runtime.load import (
    load,
    load_weights,
    memory_here,
    parameters,
    read_weights,
)
from kimi_k3_mlx.schema import Quantization
from kimi_k3_mlx.tensors.local import open_source
from tests.house.checks import ROOT
from tests.runtime.k3_size import Rank, k3_model
from tests.runtime.ranks import greedy, looked_up
from tests.tiny_k3 import TinyConfig, write_source

TINY = ROOT / "kimi_k3_mlx" / "assets" / "tiny-k3"
GRADED = PrunePlan(
    64,
    {n: LayerPlan(tuple(range(n, 30 + 2 * n)), tuple(range(n, n + 9))) for n in range(1, 6)},
    low=Quantization("affine", 2, 32),
)


@pytest.fixture(scope="module")
def graded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained tiny K3 with 31 to 35 experts a layer, nine of them in a second bank."""
    out = tmp_path_factory.mktemp("graded") / "build"
    source = open_source(TINY)
    run(plan_build(source, load_profile("mxfp4"), GRADED), source, out)
    return out


def held(path: Path, rank: int, size: int, split: str) -> Any:
    model, config = load_weights(path, lazy=True)
    share(model, Rank(rank, size), split)
    return model, config


def test_alone_there_is_no_group() -> None:
    assert group_of() is None
    with pytest.raises(UsageError, match="over several Macs"):
        group_of(pipeline=True)
    assert shared_seed(None, 7) == 7
    assert shared_seed(None, None) is None


@pytest.fixture(scope="module")
def k3() -> Any:
    """The largest published build, without its weights."""
    return k3_model("mxfp4-q8", 242)[0]


@pytest.mark.parametrize("size", [2, 3, 4, 6, 8, 12, 16])
def test_numbers_of_ranks_that_share_k3(size: int, k3: Any) -> None:
    check_split(k3, size, TENSOR)
    check_split(k3, size, PIPELINE)
    assert 3072 % (32 * size) == 0


@pytest.mark.parametrize(
    ("size", "split", "reason"),
    [
        (5, TENSOR, "5 ranks .*: layer 0 has 96 attention heads"),
        (7, TENSOR, "7 ranks .*: layer 0 has 96 attention heads"),
        (32, TENSOR, r"mlp\.down_proj of layer 0 has 33,792 inputs in groups of 64"),
        (94, PIPELINE, "it has only 93 layers"),
    ],
)
def test_others_are_refused_with_the_reason(size: int, split: str, reason: str, k3: Any) -> None:
    with pytest.raises(UsageError, match=reason) as caught:
        check_split(k3, size, split)
    assert caught.value.hint.startswith("use 2 or 3 or 4 or ")


def test_a_model_that_no_number_of_ranks_can_share(tmp_path: Path) -> None:
    model, _ = load_weights(write_source(tmp_path / "odd", TinyConfig(heads=1)), lazy=True)
    with pytest.raises(UsageError) as caught:
        check_split(model, 2, TENSOR)
    assert caught.value.hint == "use one Mac"


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("build", ["source", "graded"])
def test_refused_is_what_mlx_cannot_shard(build: str, size: int, graded: Path) -> None:
    model, _ = load_weights({"source": TINY, "graded": graded}[build], lazy=True)
    refused = bool(obstacle(model, size, TENSOR))
    try:
        share(model, Rank(0, size), TENSOR)
    except ValueError:
        assert refused
    else:
        assert not refused


@pytest.mark.parametrize("size", [2, 3, 6])
def test_pipeline_ranks_hold_every_layer_once(size: int) -> None:
    whole = {name: array.shape for name, array in parameters(load_weights(TINY, lazy=True)[0])}
    seen: list[str] = []
    for rank in range(size):
        names = [name for name, _ in parameters(held(TINY, rank, size, PIPELINE)[0])]
        outside = [name for name in names if ".layers." not in name]
        assert len(outside) == 5
        seen += [name for name in names if ".layers." in name] + (outside if rank == 0 else [])
    assert sorted(seen) == sorted(whole)


def test_a_pipeline_rank_reads_only_its_own_shards(tiny_source: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_source, tmp_path / "copy")
    last, first = held(copy, 0, 2, PIPELINE)[0], held(copy, 1, 2, PIPELINE)[0]
    shard = (
        copy / open_source(copy).weight_map["language_model.model.layers.0.input_layernorm.weight"]
    )
    os.truncate(shard, 4096)
    read_weights(copy, last)
    with pytest.raises(CheckpointError, match="can't be read"):
        read_weights(copy, first)


@pytest.mark.parametrize("split", [TENSOR, PIPELINE])
def test_a_rank_never_holds_the_whole_model(split: str, graded: Path) -> None:
    whole = sum(array.nbytes for _, array in parameters(load_weights(graded, lazy=True)[0]))
    model, _ = held(graded, 0, 2, split)
    share_bytes = sum(array.nbytes for _, array in parameters(model))
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    read_weights(graded, model, piece_bytes=1 << 16)
    peak = mx.get_peak_memory() - before
    largest = 1024 * 128 * 2
    assert share_bytes <= peak <= share_bytes + 2 * largest < whole


def test_memory_of_ranks_adds_up() -> None:
    whole, config = load_weights(TINY, lazy=True)
    one = memory_here(whole, config, 1000, None, "")
    for split in (TENSOR, PIPELINE):
        parts = [
            memory_here(*held(TINY, rank, 2, split), 1000, Rank(rank, 2), split)
            for rank in range(2)
        ]
        assert sum(part.n_state for part in parts) == one.n_state
        copies = 2 if split == TENSOR else 1
        assert sum(part.n_cache for part in parts) == copies * one.n_cache
        assert one.n_weights < sum(part.n_weights for part in parts) < 1.3 * one.n_weights


@pytest.mark.slow
def test_the_table_of_the_documentation() -> None:
    rows = re.findall(
        r"^\| `(\S+)`, (\d+) experts \| (\w+) \| ([\d.]+) GB \| ([\d.]+) GB \| ([\d,]+\d)(.*) \|$",
        (ROOT / "docs" / "cluster.md").read_text(),
        re.MULTILINE,
    )
    assert len(rows) >= 4
    for profile, n_experts, split, weights, memory, limit, note in rows:
        model, config = k3_model(profile, int(n_experts))
        share(model, Rank(0, 2), split)
        found = memory_here(model, config, 131_072, Rank(0, 2), split)
        fit = found.on(512)
        assert f"{found.n_weights / 1e9:.1f}" == weights
        assert f"{found.n_bytes / 1e9:.1f}" == memory
        assert f"{fit.wired_limit_mb:,}" == limit
        assert fit.verdict == ("tight" if note else "raise")


@pytest.fixture(scope="module")
def found(graded: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Any]:
    """What two ranks say, by case and rank, from one launch."""
    broken = shutil.copytree(graded, tmp_path_factory.mktemp("broken") / "build")
    next(broken.glob("*.safetensors")).unlink()
    builds = {"tiny": (TINY, TINY), "graded": (graded, graded)}
    cases = {f"{b}/{s}": (s, builds[b]) for b in builds for s in (TENSOR, PIPELINE)}
    cases |= {"different": (TENSOR, (TINY, graded)), "broken": (TENSOR, (graded, broken))}
    command = [
        *(str(Path(sys.executable).parent / "mlx.launch"), "-n", "2", "--backend", "ring", "--"),
        *(sys.executable, "-m", "tests.runtime.ranks", json.dumps(cases, default=str)),
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, timeout=600, check=False,
    )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 2 * len(cases), done.stdout[-3000:] + done.stderr[-3000:]
    return {(line["case"], line["rank"]): line for line in lines}


@pytest.mark.slow
@pytest.mark.parametrize("split", [TENSOR, PIPELINE])
@pytest.mark.parametrize("build", ["tiny", "graded"])
def test_two_ranks_write_what_one_writes(
    build: str, split: str, found: dict[tuple[str, int], Any], graded: Path
) -> None:
    alone = load({"tiny": TINY, "graded": graded}[build])
    said = {"tokens": greedy(alone), "text": looked_up(alone)}
    whole = sum(array.nbytes for _, array in parameters(alone.model))
    for rank in range(2):
        rank_said = found[f"{build}/{split}", rank]
        assert {key: rank_said[key] for key in said} == said
        assert rank_said["n_bytes"] < 0.65 * whole


@pytest.mark.slow
def test_ranks_with_different_builds_all_refuse(found: dict[tuple[str, int], Any]) -> None:
    for rank in range(2):
        assert found["different", rank]["error"] == "CheckpointError"
        assert "different builds" in found["different", rank]["message"]


@pytest.mark.slow
def test_what_fails_on_one_rank_fails_on_all(found: dict[tuple[str, int], Any]) -> None:
    assert found["broken", 0]["message"] == "1 of 2 ranks failed."
    assert "is named by" in found["broken", 1]["message"]


@pytest.mark.slow
def test_all_ranks_have_one_seed(found: dict[tuple[str, int], Any]) -> None:
    seeds = {case: said["seed"] for (case, rank), said in found.items() if rank == 0}
    assert all(said["seed"] == seeds[case] for (case, _), said in found.items())
    assert len(set(seeds.values())) > 1
