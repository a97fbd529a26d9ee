"""A float32 source, its build, sequences of several lengths, and the memory for one group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kimi_k3_mlx.convert.plan import plan_build
from kimi_k3_mlx.convert.profiles import load_profile
from kimi_k3_mlx.convert.run import run
from kimi_k3_mlx.prune_plan import LayerPlan, PrunePlan
from kimi_k3_mlx.stream.budget import Batch, Budget, in_blocks, make_budget
from kimi_k3_mlx.stream.layers import Layers
from kimi_k3_mlx.tensors.local import open_source

PLENTY = 1 << 40
CHOOSE = "kimi_k3_mlx.stream.engine.choose_budget"
PLAN = PrunePlan(8, {
    1: LayerPlan((0, 2, 3, 5)), 2: LayerPlan((1, 2, 3, 4, 5, 7)),
    3: LayerPlan((0, 7)), 4: LayerPlan((2, 3, 6)),
})  # fmt: skip


def convert(source: Path, out: Path, profile: str = "mxfp4", plan: PrunePlan | None = None) -> Path:
    """Make a build."""
    opened = open_source(source)
    run(plan_build(opened, load_profile(profile), plan), opened, out)
    return out


def with_blocks(n_block: int) -> Callable[..., Budget]:
    """In the place of `choose_budget`: blocks of so many experts, or whole layers for 0."""

    def choose(layers: Layers, batches: Sequence[Batch], n_lanes: int, *_: Any) -> Budget:
        whole = make_budget(layers, batches, n_lanes)
        return in_blocks(whole, layers, n_lanes, n_block) if n_block else whole

    return choose


@pytest.fixture(scope="session")
def float_build(tiny_float_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(tiny_float_source, tmp_path_factory.mktemp("stream") / "float")


@pytest.fixture(scope="session")
def build(tiny_text_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(tiny_text_source, tmp_path_factory.mktemp("stream") / "bf16")


@pytest.fixture(scope="session")
def sequences() -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    lengths = (5, 33, 1, 20, 32, 9, 18)
    return [rng.integers(0, 512, length).astype(np.int32) for length in lengths]
