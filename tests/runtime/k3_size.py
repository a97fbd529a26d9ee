"""Kimi-K3 in its real size and without a weight: every array of it is still to be computed."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.nn as nn

from kimi_k3 import Model, ModelArgs
from kimi_k3_mlx.convert.plan import plan_build
from kimi_k3_mlx.convert.profiles import load_profile
from kimi_k3_mlx.runtime.roofline import k3_config, nominal_source
from kimi_k3_mlx.schema import Json


class Rank:
    """A group of which only rank and size are asked."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = lambda: rank, lambda: size


@cache
def plan(profile: str) -> tuple[Json, frozenset[str]]:
    """The config of a build, and the names of its tensors: the same for any number of experts."""
    built = plan_build(nominal_source(k3_config()), load_profile(profile))
    return built.config, frozenset(tensor.name for tensor in built.tensors)


def k3_model(profile: str, n_experts: int) -> tuple[Any, Json]:
    """The model as mlx-lm makes it for a build under this profile, and the build's config."""
    config, names = plan(profile)
    config = config | {"text_config": config["text_config"] | {"num_experts": n_experts}}
    model = Model(ModelArgs.from_dict(config))
    own = config["quantization"]
    default = {key: own[key] for key in ("group_size", "bits", "mode")}

    def choose(path: str, module: Any) -> Any:
        return own.get(path, hasattr(module, "to_quantized") and f"{path}.scales" in names)

    nn.quantize(model, **default, class_predicate=choose)
    return model, config
