"""The golden tower, and random small ones."""

from functools import cache

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

import kimi_k3_vision
from tests.model.golden import read_golden

CASES = ["native", "resized", "larger", "video", "packed"]
SMALL = kimi_k3_vision.VisionArgs(
    init_pos_emb_height=5,
    init_pos_emb_width=7,
    vt_hidden_size=16,
    vt_intermediate_size=24,
    vt_num_attention_heads=2,
    vt_num_hidden_layers=2,
    qkv_hidden_size=24,
    mm_hidden_size=16,
    text_hidden_size=12,
    patch_size=2,
)


@cache
def golden_vision(dtype: mx.Dtype = mx.float32) -> kimi_k3_vision.Vision:
    golden = read_golden("mm_a")
    args = kimi_k3_vision.VisionArgs.from_dict(golden.config["vision_config"])
    vision = kimi_k3_vision.Vision(args)
    weights = kimi_k3_vision.sanitize(args, golden.weights)
    vision.load_weights([(name, w.astype(dtype)) for name, w in weights.items()])
    return vision


@cache
def small_vision() -> kimi_k3_vision.Vision:
    vision, rng = kimi_k3_vision.Vision(SMALL), np.random.default_rng(0)

    def random(name: str, old: mx.array) -> tuple[str, mx.array]:
        x = rng.standard_normal(old.shape) * (0.1 if "norm" in name else old[0].size ** -0.5)
        return name, mx.array((x + ("norm" in name)).astype(np.float32))

    vision.load_weights([random(*item) for item in tree_flatten(vision.parameters())])
    return vision


def weights(vision: kimi_k3_vision.Vision) -> dict[str, mx.array]:
    return dict(tree_flatten(vision.parameters()))


def case(name: str) -> tuple[mx.array, list[list[int]]]:
    """Patches and grids of a golden case."""
    vectors = read_golden("mm_a").vectors
    return vectors[f"{name}.pixel_values"], vectors[f"{name}.grid_thws"].tolist()
