"""Finished builds of every kind, from one tiny source: what tests of verification damage."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from kimi_k3_mlx.convert.plan import plan_build
from kimi_k3_mlx.convert.profiles import load_profile, parse_profile
from kimi_k3_mlx.convert.run import run
from kimi_k3_mlx.profile import Profile
from kimi_k3_mlx.prune_plan import LayerPlan, PrunePlan
from kimi_k3_mlx.schema import Quantization
from kimi_k3_mlx.tensors.local import open_source

RAGGED = {
    1: LayerPlan((0, 2, 3, 5)),
    2: LayerPlan((1, 2, 3, 4, 5, 7)),
    3: LayerPlan((0, 7)),
    4: LayerPlan(tuple(range(8))),
}
GRADED = {
    1: LayerPlan((0, 2, 3, 5), (2, 3)),
    2: LayerPlan((1, 2, 3, 4, 5, 7), (1, 5, 7)),
    3: LayerPlan((0, 7)),
    4: LayerPlan(tuple(range(8)), (0, 1, 2, 3)),
}
UNIFORM = PrunePlan(8, dict.fromkeys(range(1, 5), LayerPlan((1, 3, 4, 6))))
LOW = Quantization("affine", 2, 64)
MIXED = """
version = 1
name = "mixed"
summary = "a bit of everything"
experts = { bits = 3, group_size = 32 }
trunk = { bits = 5, group_size = 32 }
narrow = ["o_norm"]
[roles]
head = "mxfp8"
latent = "source"
[overrides]
"*.self_attn.o_proj" = { bits = 6, group_size = 64 }
"*.layers.4.*" = "source"
"""

KINDS: dict[str, tuple[str, PrunePlan | None]] = {
    "mxfp4": ("mxfp4", None),
    "narrowed": ("mxfp4-bf16", None),
    "mxfp8": ("mxfp4-mxfp8", None),
    "q4": ("mxfp4-q4", None),
    "q3 experts": ("q3-q8", None),
    "uniform": ("mxfp4-q6", UNIFORM),
    "ragged": ("mxfp4", PrunePlan(8, RAGGED)),
    "padded": ("mxfp4-q8", PrunePlan(8, RAGGED, pad_uniform=True)),
    "padded q2 experts": ("q2-q8", PrunePlan(8, RAGGED, pad_uniform=True)),
    "graded": ("mxfp4-q8", PrunePlan(8, GRADED, low=LOW)),
    "graded q3": ("q3-q8", PrunePlan(8, GRADED, low=LOW)),
    "mixed": (MIXED, PrunePlan(8, GRADED, low=LOW)),
    "moonshot": ("moonshot", UNIFORM),
    "moonshot whole": ("moonshot", None),
}
"""Profile, by name or in TOML, and plan of each kind."""


def profile_of(kind: str) -> Profile:
    """The profile of a kind."""
    name = KINDS[kind][0]
    return parse_profile(name, kind) if "\n" in name else load_profile(name)


def built(kind: str, source: Path) -> Path:
    """The build of a kind, made once. Read only."""
    out = source.parent / "builds" / kind
    if not out.exists():
        opened = open_source(source)
        run(plan_build(opened, profile_of(kind), KINDS[kind][1]), opened, out)
    return out


def linked(build: Path, to: Path) -> Path:
    """A copy to damage with `tests.convert.damage`, which never writes into the linked files."""
    return Path(shutil.copytree(build, to, copy_function=os.link))
