"""One folder serves resident and streamed use: single experts are read past the page cache."""

from __future__ import annotations

import json
import mmap
import os
import sys
from pathlib import Path

import pytest

from kimi_k3_mlx.convert.plan import plan_build
from kimi_k3_mlx.convert.profiles import load_profile
from kimi_k3_mlx.convert.run import run
from kimi_k3_mlx.prune_plan import LayerPlan, PrunePlan
from kimi_k3_mlx.schema import Span
from kimi_k3_mlx.tensors.header import read_header
from kimi_k3_mlx.tensors.local import LocalSource, open_source
from tests.tiny_k3 import TinyConfig, write_source

PAGE = 16 * 1024
REAL_EXPERTS = TinyConfig(
    layers=2, hidden=64, experts=4, top_k=2, latent=3584, moe_intermediate=3072, shared_experts=1,
    vision=False,
)  # fmt: skip
KEPT = (1, 3)
MATRICES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> LocalSource:
    return open_source(write_source(tmp_path_factory.mktemp("real") / "source", REAL_EXPERTS))


@pytest.fixture(scope="module")
def built(source: LocalSource, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("real") / "out"
    plan = PrunePlan(4, {1: LayerPlan(KEPT)})
    run(plan_build(source, load_profile("mxfp4-q8"), plan), source, out)
    return out


def read_direct(path: Path, offset: int, n_bytes: int) -> bytes:
    """Read past the page cache, which needs aligned offset, length and memory."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        pytest.skip(f"{path} lies on a file system without O_DIRECT")
    try:
        buffer = mmap.mmap(-1, n_bytes)
        assert os.preadv(file, [buffer], offset) == n_bytes
        return buffer[:]
    finally:
        os.close(file)


@pytest.mark.skipif(sys.platform != "linux", reason="O_DIRECT is Linux's; macOS has F_NOCACHE")
@pytest.mark.parametrize("projection", MATRICES)
@pytest.mark.parametrize(("part", "original"), [("weight", "packed"), ("scales", "scale")])
def test_single_experts_are_read_uncached(
    projection: str, part: str, original: str, source: LocalSource, built: Path
) -> None:
    name = f"language_model.model.layers.1.mlp.switch_mlp.{projection}.{part}"
    shard = json.loads((built / "model.safetensors.index.json").read_text())["weight_map"][name]
    header = read_header(built / shard)
    (tensor,) = (tensor for tensor in header.tensors if tensor.name == name)
    n_expert = tensor.n_bytes // len(KEPT)
    for place, expert in enumerate(KEPT):
        offset = header.n_bytes + tensor.begin + place * n_expert
        assert offset % PAGE == n_expert % PAGE == 0
        wanted = (
            f"language_model.model.layers.1.block_sparse_moe.experts.{expert}."
            f"{MATRICES[projection]}.weight_{original}"
        )
        with source.reader() as reader:
            expected = reader.read(Span(wanted, 0, source.tensors[wanted].n_bytes))
        assert read_direct(built / shard, offset, n_expert) == expected
