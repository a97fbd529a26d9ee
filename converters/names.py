"""The table of every Kimi-K3 tensor: source and build name, shape, dtype, role, how it converts.

Names carry `{}` for the numbers of layer, expert and vision block. Shapes are symbols of
`converters.config.Dims.sizes`, with `|` between alternatives. Row order is the order of fusing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from kimi_k3_mlx.errors import CheckpointError

LAYER = "language_model.model.layers.{}."
MOE = LAYER + "block_sparse_moe."
EXPERT = MOE + "experts.{}."
BLOCK = "vision_tower.encoder.blocks.{}."

TRUNK, F32, U8 = "trunk", "F32", "U8"
"""Dtypes: `trunk` is BF16 as published, or F32 in a checkpoint that is F32 throughout."""

QUANTIZABLE = (
    "attention", "dense_mlp", "embedding", "head", "latent", "router", "shared_expert"
)  # fmt: skip
"""Roles with matrices that may be quantized; norms, AttnRes and vision never are."""

BANKS = ("switch_mlp", "switch_mlp_low")
"""A layer's banks of experts; the second one has fewer bits, in builds of graded plans."""

PROJECTIONS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


class Entry(NamedTuple):
    """One row: a source tensor and what becomes of it."""

    source: str
    scope: str
    """Where it occurs: global, layer, kda, mla, dense, moe, expert, projector, vision, block."""
    shape: str
    dtype: str
    role: str
    how: str
    """copy, join (axis 0), conv, a_log, kv_b, rows (of the router), stack (of experts)."""
    build: tuple[str, ...]

    @property
    def quantizable(self) -> bool:
        """Whether it is a matrix of the trunk that a profile may quantize."""
        is_matrix = self.dtype == TRUNK and len(self.shape.split()) == 2
        return is_matrix and self.role in QUANTIZABLE


@dataclass(frozen=True)
class Parsed:
    """A name taken apart; `projection` is `gate_proj`, `up_proj` or `down_proj` of an expert."""

    role: str
    layer: int | None = None
    expert: int | None = None
    projection: str | None = None


def _copies(prefix: str, scope: str, role: str, shapes: dict[str, str]) -> list[Entry]:
    names = {name: f"{prefix}{name}" for name in shapes}
    return [
        Entry(name, scope, shapes[short], TRUNK, role, "copy", (build_name(name),))
        for short, name in names.items()
    ]


def build_name(name: str) -> str:
    """A source name under the build's module names, numbers or `{}` included."""
    return name.replace(".block_sparse_moe.", ".mlp.")


def _experts() -> list[Entry]:
    out, fan_in = (
        {"w1": "moe", "w3": "moe", "w2": "latent"},
        {"w1": "latent", "w3": "latent", "w2": "moe"},
    )
    return [
        Entry(
            f"{EXPERT}{matrix}.{part}", "expert", f"{out[matrix]} {fan_in[matrix]}/{n}", U8,
            "expert", "stack", (f"{LAYER}mlp.switch_mlp.{projection}.{suffix}",),
        )
        for part, suffix, n in (("weight_packed", "weight", 2), ("weight_scale", "scales", 32))
        for matrix, projection in PROJECTIONS.items()
    ]  # fmt: skip


def _kda() -> list[Entry]:
    at, role = f"{LAYER}self_attn.", "attention"
    joined, conv = (f"{at}qkv_proj.weight",), (f"{at}qkv_conv.conv.weight",)
    names = [f"{at}{part}_" for part in "qkv"]
    return [
        *(
            Entry(f"{name}proj.weight", "kda", "kda hidden", TRUNK, role, "join", joined)
            for name in names
        ),
        *(
            Entry(f"{name}conv1d.weight", "kda", "kda 1 conv", F32, role, "conv", conv)
            for name in names
        ),
        Entry(f"{at}A_log", "kda", "head_dim|kda_heads", F32, role, "a_log", (f"{at}A_log",)),
        Entry(f"{at}dt_bias", "kda", "kda", F32, role, "copy", (f"{at}dt_bias",)),
        Entry(f"{at}o_norm.weight", "kda", "head_dim", F32, role, "copy", (f"{at}o_norm.weight",)),
        *_copies(at, "kda", role, {
            "f_a_proj.weight": "head_dim hidden",
            "f_b_proj.weight": "kda head_dim",
            "b_proj.weight": "kda_heads hidden",
            "g_proj.weight": "kda hidden",
            "o_proj.weight": "hidden kda",
        }),
    ]  # fmt: skip


def _mla() -> list[Entry]:
    at, role = f"{LAYER}self_attn.", "attention"
    absorbed = (f"{at}embed_q.weight", f"{at}unembed_out.weight")
    return [
        *_copies(at, "mla", role, {
            "q_a_proj.weight": "q_lora hidden",
            "q_a_layernorm.weight": "q_lora",
            "q_b_proj.weight": "mla_q q_lora",
            "kv_a_proj_with_mqa.weight": "mla_kv_a hidden",
            "kv_a_layernorm.weight": "kv_lora",
        }),
        Entry(f"{at}kv_b_proj.weight", "mla", "mla_kv_b kv_lora", TRUNK, role, "kv_b", absorbed),
        *_copies(at, "mla", role, {
            "g_proj.weight": "mla_v hidden",
            "o_proj.weight": "hidden mla_v",
        }),
    ]  # fmt: skip


def _moe() -> list[Entry]:
    bias = "gate.e_score_correction_bias"
    bias_out = f"{LAYER}mlp.e_score_correction_bias"
    return [
        Entry(f"{MOE}gate.weight", "moe", "experts hidden", TRUNK, "router", "rows",
              (f"{LAYER}mlp.gate.weight",)),
        Entry(f"{MOE}{bias}", "moe", "experts", F32, "router", "rows", (bias_out,)),
        *_copies(MOE, "moe", "latent", {
            "routed_expert_down_proj.weight": "latent hidden",
            "routed_expert_up_proj.weight": "hidden latent",
            "routed_expert_norm.weight": "latent",
        }),
        *_copies(f"{MOE}shared_experts.", "moe", "shared_expert", {
            "gate_proj.weight": "shared hidden",
            "up_proj.weight": "shared hidden",
            "down_proj.weight": "hidden shared",
        }),
    ]  # fmt: skip


def _layer() -> list[Entry]:
    norms = {"input_layernorm.weight": "hidden", "post_attention_layernorm.weight": "hidden"}
    return [
        *_copies(LAYER, "layer", "norm", norms),
        *_copies(LAYER, "layer", "attn_res", {
            "self_attention_res_norm.weight": "hidden",
            "self_attention_res_proj.weight": "1 hidden",
            "mlp_res_norm.weight": "hidden",
            "mlp_res_proj.weight": "1 hidden",
        }),
        *_copies(f"{LAYER}mlp.", "dense", "dense_mlp", {
            "gate_proj.weight": "intermediate hidden",
            "up_proj.weight": "intermediate hidden",
            "down_proj.weight": "hidden intermediate",
        }),
    ]  # fmt: skip


def _globals() -> list[Entry]:
    model = "language_model.model."
    return [
        *_copies(model, "global", "embedding", {"embed_tokens.weight": "vocab hidden"}),
        *_copies("language_model.", "global", "head", {"lm_head.weight": "vocab hidden"}),
        *_copies(model, "global", "norm", {"norm.weight": "hidden"}),
        *_copies(model, "global", "attn_res", {
            "output_attn_res_norm.weight": "hidden",
            "output_attn_res_proj.weight": "1 hidden",
        }),
    ]  # fmt: skip


def _vision() -> list[Entry]:
    return [
        *_copies("mm_projector.", "projector", "projector", {
            "proj.0.weight": "merged merged",
            "proj.2.weight": "hidden merged",
            "post_norm.weight": "hidden",
        }),
        *_copies("vision_tower.", "vision", "vision", {
            "patch_embed.proj.weight": "vision 3 patch patch",
            "patch_embed.pos_emb.weight": "grid_height grid_width vision",
            "encoder.final_layernorm.weight": "vision",
        }),
        *_copies(BLOCK, "block", "vision", {
            "wqkv.weight": "vision_3qkv vision",
            "wo.weight": "vision vision_qkv",
            "mlp.fc0.weight": "vision_mlp vision",
            "mlp.fc1.weight": "vision vision_mlp",
            "norm0.weight": "vision",
            "norm1.weight": "vision",
        }),
    ]  # fmt: skip


TABLE = (*_layer(), *_kda(), *_mla(), *_moe(), *_experts(), *_globals(), *_vision())

_NUMBERED = re.compile(r"\b(layers|experts|blocks)\.(0|[1-9]\d*)\.")
_QUANTIZED = re.compile(r"\.(scales|biases)$")
_ROLES = {name: entry.role for entry in TABLE for name in (entry.source, *entry.build)}


def parse_name(name: str) -> Parsed:
    """Take a source's or a build's tensor name apart.

    Raises CheckpointError for a name that is not in the table.
    """
    numbers: dict[str, int] = {}

    def note(match: re.Match[str]) -> str:
        numbers[match[1]] = int(match[2])
        return f"{match[1]}.{{}}."

    key = _NUMBERED.sub(note, name)
    key = key.replace(f".{BANKS[1]}.", f".{BANKS[0]}.")
    role = _ROLES.get(key) or _ROLES.get(_QUANTIZED.sub(".weight", key))
    if role is None:
        raise CheckpointError(
            f"tensor {name} is not one of Kimi-K3's.",
            "check that the checkpoint is moonshotai/Kimi-K3, or one pruned from it.",
        )
    projection = None
    if role == "expert":
        module = key.rsplit(".", 2)[1]
        projection = PROJECTIONS.get(module, module)
    return Parsed(role, numbers.get("layers"), numbers.get("experts"), projection)


def role_of(name: str) -> str:
    """Role of a source's or a build's tensor; raises as `parse_name` does."""
    return parse_name(name).role
