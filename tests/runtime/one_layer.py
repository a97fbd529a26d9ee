"""A KDA layer as a model, and how to ask whether a cache has gone back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.base import create_ssm_mask
from mlx_lm.models.cache import ArraysCache

from kimi_k3 import DeltaAttention, TextArgs

TOLERANCE = 1e-5
RNG = np.random.default_rng(7)
TEXT = RNG.integers(0, 512, (3, 120))


class OneLayer:
    """A KDA layer as a model: what a cache does to it, without the noise of the layers behind."""

    def __init__(self) -> None:
        mx.random.seed(7)
        linear = {"num_heads": 2, "head_dim": 32, "short_conv_kernel_size": 4}
        linear |= {"gate_lower_bound": -5.0, "kda_layers": [1]}
        args = TextArgs(hidden_size=48, linear_attn_config=linear)
        self.layers = [SimpleNamespace(self_attn=DeltaAttention(args))]
        self.embedding = mx.random.normal((512, 48))

    def __call__(self, ids: mx.array, caches: list[Any]) -> mx.array:
        x = self.embedding[ids]
        return self.layers[0].self_attn(x, create_ssm_mask(x, caches[0]), caches[0])

    def make_cache(self) -> list[Any]:
        return [ArraysCache(2)]


MODEL = OneLayer()


def run(model: Any, caches: list[Any], ids: np.ndarray, sizes: list[int] | None = None) -> mx.array:
    """Logits of the last token, the ids given in pieces of these sizes."""
    ends = np.cumsum(sizes or [ids.shape[1]])
    for piece in np.split(ids, ends[:-1], axis=1):
        logits = model(mx.array(piece), caches)
        mx.eval(logits, [c.state for c in caches])
    return logits[:, -1]


def naive(model: Any, *parts: np.ndarray) -> mx.array:
    """The same from mlx-lm's own caches, all tokens at once."""
    return run(model, model.make_cache(), np.concatenate(parts, axis=1))


def check(got: mx.array, want: mx.array) -> None:
    assert got.shape == want.shape
    assert mx.abs(got - want).max() <= TOLERANCE * mx.abs(want).max()
