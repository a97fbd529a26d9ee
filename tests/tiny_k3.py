"""Builds random Kimi-K3 source checkpoints of any size in Moonshot's exact layout.

Input: a `TinyConfig`. Output: a folder with one shard per decoder layer, then one shard each for
the global tensors, the projector and the vision tower; index, nested config, tokenizer and licence.
The same config gives the same bytes. Needs numpy only: no mlx, no torch, no network.

    path = write_source(tmp_path / "source", TinyConfig(layers=5, experts=8))
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path

import numpy as np

from tests.tiny_config import source_config
from tests.tiny_tokenizer import write_tokenizer

LAYER = "language_model.model.layers."
GROUP = 32


@dataclass(frozen=True)
class TinyConfig:
    """Sizes of a source checkpoint. Layer indices are 0-based, as in tensor names."""

    layers: int = 5
    mla_layers: tuple[int, ...] | None = None
    """MLA layers; None: every 4th and the last one, as in K3."""
    dense_layers: int = 1
    hidden: int = 64
    intermediate: int = 128
    heads: int = 2
    head_dim: int = 32
    mla_heads: int | None = None
    """Heads of the MLA layers; None: as many as KDA has."""
    q_lora: int = 32
    kv_lora: int = 64
    qk_nope: int = 32
    qk_rope: int = 16
    v_head_dim: int = 32
    experts: int = 8
    top_k: int = 2
    latent: int = 64
    moe_intermediate: int = 64
    shared_experts: int = 2
    block_size: int = 2
    vocab: int = 512
    vision: bool = True
    vision_layers: int = 2
    vision_hidden: int = 32
    vision_qkv: int = 48
    vision_heads: int = 2
    vision_intermediate: int = 64
    vision_grid: int = 8
    tokenizer: bool = True
    """Off: no tokenizer files, so that the vocabulary may be smaller than 288."""
    trunk_dtype: str = "BF16"
    """BF16 as published, or F32 for exact comparisons."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("latent", "moe_intermediate"):
            if getattr(self, name) % GROUP:
                raise ValueError(f"{name} must be a multiple of {GROUP}")
        if self.head_dim < self.heads:
            raise ValueError("head_dim must be at least heads: A_log is padded to head_dim")

    @property
    def mla(self) -> tuple[int, ...]:
        """The MLA layers, resolved."""
        if self.mla_layers is not None:
            return self.mla_layers
        return tuple(sorted({*range(3, self.layers, 4), self.layers - 1}))

    @property
    def attention_heads(self) -> int:
        """Heads of the MLA layers, resolved."""
        return self.mla_heads or self.heads


REAL_EXPERT_COUNT = TinyConfig(
    layers=4, hidden=32, experts=896, top_k=16, latent=32, moe_intermediate=32, vision=False
)
"""896 experts of which 16 are chosen, as in K3, with everything else tiny."""

Tensor = tuple[str, str, tuple[int, ...], np.ndarray]
"""Name, safetensors dtype, shape, and an array that holds the bytes."""


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Round float32 to the nearest bfloat16, ties to even; the result holds the bits as uint16."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


class Weights:
    """Random tensors of one shard, from a stream of its own: no shard depends on another."""

    def __init__(self, config: TinyConfig, shard: int) -> None:
        self.rng = np.random.default_rng((config.seed, shard))
        self.trunk_dtype = config.trunk_dtype

    def matrix(self, name: str, *shape: int, scale: float | None = None) -> Tensor:
        """A trunk matrix with rows of about unit gain."""
        fan_in = prod(shape[1:])
        values = self.rng.standard_normal(shape, np.float32) * (scale or fan_in**-0.5)
        return self._trunk(name, values)

    def norm(self, name: str, n: int) -> Tensor:
        """A trunk norm weight around one."""
        return self._trunk(name, 1 + 0.1 * self.rng.standard_normal(n, np.float32))

    def float32(self, name: str, *shape: int, scale: float, mean: float = 0.0) -> Tensor:
        """A tensor that the published checkpoint keeps in F32."""
        values = self.rng.standard_normal(shape, np.float32) * np.float32(scale) + np.float32(mean)
        return name, "F32", shape, values

    def _trunk(self, name: str, values: np.ndarray) -> Tensor:
        bits = to_bf16(values) if self.trunk_dtype == "BF16" else values.astype(np.float32)
        return name, self.trunk_dtype, values.shape, bits

    def mxfp4(self, experts: int, out: int, fan_in: int) -> tuple[np.ndarray, np.ndarray]:
        """Packed codes and scales of one matrix of every expert: all codes, −0 too, sane scales."""
        packed = np.frombuffer(self.rng.bytes(experts * out * fan_in // 2), np.uint8)
        # Uniform E2M1 codes have an rms of 2.93.
        middle = 127 + round(float(np.log2(fan_in**-0.5 / 2.93)))
        shape = (experts, out, fan_in // GROUP)
        scales = self.rng.integers(middle - 1, middle + 2, shape, np.uint8)
        return packed.reshape(experts, out * fan_in // 2), scales.reshape(experts, -1)


def kda_tensors(weights: Weights, config: TinyConfig, prefix: str) -> Iterator[Tensor]:
    """One Kimi Delta Attention block. A_log is padded with zeros from heads to head_dim."""
    width, hidden = config.heads * config.head_dim, config.hidden
    yield weights.matrix(f"{prefix}g_proj.weight", width, hidden)
    yield weights.float32(f"{prefix}dt_bias", width, scale=0.5)
    yield weights.matrix(f"{prefix}f_b_proj.weight", width, config.head_dim)
    yield weights.matrix(f"{prefix}f_a_proj.weight", config.head_dim, hidden)
    a_log = np.zeros(config.head_dim, np.float32)
    a_log[: config.heads] = np.log(weights.rng.uniform(1, 16, config.heads))
    yield f"{prefix}A_log", "F32", a_log.shape, a_log
    yield weights.matrix(f"{prefix}o_proj.weight", hidden, width)
    yield weights.float32(f"{prefix}o_norm.weight", config.head_dim, scale=0.1, mean=1.0)
    yield weights.matrix(f"{prefix}b_proj.weight", config.heads, hidden)
    for part in "vkq":
        yield weights.float32(f"{prefix}{part}_conv1d.weight", width, 1, 4, scale=0.5)
    for part in "vkq":
        yield weights.matrix(f"{prefix}{part}_proj.weight", width, hidden)


def mla_tensors(weights: Weights, config: TinyConfig, prefix: str) -> Iterator[Tensor]:
    """One gated NoPE MLA block."""
    heads, hidden = config.attention_heads, config.hidden
    query = heads * (config.qk_nope + config.qk_rope)
    key_value = heads * (config.qk_nope + config.v_head_dim)
    value = heads * config.v_head_dim
    yield weights.matrix(f"{prefix}kv_b_proj.weight", key_value, config.kv_lora)
    latent = config.kv_lora + config.qk_rope
    yield weights.matrix(f"{prefix}kv_a_proj_with_mqa.weight", latent, hidden)
    yield weights.matrix(f"{prefix}q_b_proj.weight", query, config.q_lora)
    yield weights.matrix(f"{prefix}g_proj.weight", value, hidden)
    yield weights.matrix(f"{prefix}o_proj.weight", hidden, value)
    yield weights.norm(f"{prefix}kv_a_layernorm.weight", config.kv_lora)
    yield weights.norm(f"{prefix}q_a_layernorm.weight", config.q_lora)
    yield weights.matrix(f"{prefix}q_a_proj.weight", config.q_lora, hidden)


def expert_tensors(weights: Weights, config: TinyConfig, prefix: str) -> Iterator[Tensor]:
    """All routed experts of a layer, last expert first, scale before packed, as in the index."""
    inner, latent = config.moe_intermediate, config.latent
    sizes = {"w3": (inner, latent), "w2": (latent, inner), "w1": (inner, latent)}
    parts = {name: weights.mxfp4(config.experts, *size) for name, size in sizes.items()}
    for expert in reversed(range(config.experts)):
        for name, (out, fan_in) in sizes.items():
            base = f"{prefix}experts.{expert}.{name}."
            packed, scales = parts[name]
            yield f"{base}weight_scale", "U8", (out, fan_in // GROUP), scales[expert]
            yield f"{base}weight_packed", "U8", (out, fan_in // 2), packed[expert]


def moe_tensors(weights: Weights, config: TinyConfig, prefix: str) -> Iterator[Tensor]:
    """One LatentMoE block: routed experts, latent projections, shared experts, router."""
    yield from expert_tensors(weights, config, prefix)
    hidden, latent = config.hidden, config.latent
    shared = config.moe_intermediate * config.shared_experts
    yield weights.norm(f"{prefix}routed_expert_norm.weight", latent)
    yield weights.matrix(f"{prefix}routed_expert_up_proj.weight", hidden, latent)
    yield weights.matrix(f"{prefix}routed_expert_down_proj.weight", latent, hidden)
    yield weights.matrix(f"{prefix}shared_experts.up_proj.weight", shared, hidden)
    yield weights.matrix(f"{prefix}shared_experts.down_proj.weight", hidden, shared)
    yield weights.matrix(f"{prefix}shared_experts.gate_proj.weight", shared, hidden)
    yield weights.float32(f"{prefix}gate.e_score_correction_bias", config.experts, scale=0.01)
    yield weights.matrix(f"{prefix}gate.weight", config.experts, hidden)


def layer_tensors(weights: Weights, config: TinyConfig, layer: int) -> Iterator[Tensor]:
    """One decoder layer, in the order in which K3's index lists it."""
    prefix, hidden = f"{LAYER}{layer}.", config.hidden
    if layer < config.dense_layers:
        yield weights.matrix(f"{prefix}mlp.up_proj.weight", config.intermediate, hidden)
        yield weights.matrix(f"{prefix}mlp.down_proj.weight", hidden, config.intermediate)
        yield weights.matrix(f"{prefix}mlp.gate_proj.weight", config.intermediate, hidden)
    else:
        yield from moe_tensors(weights, config, f"{prefix}block_sparse_moe.")
    yield weights.norm(f"{prefix}mlp_res_norm.weight", hidden)
    yield weights.norm(f"{prefix}self_attention_res_norm.weight", hidden)
    yield weights.matrix(f"{prefix}mlp_res_proj.weight", 1, hidden)
    yield weights.matrix(f"{prefix}self_attention_res_proj.weight", 1, hidden)
    yield weights.norm(f"{prefix}post_attention_layernorm.weight", hidden)
    yield weights.norm(f"{prefix}input_layernorm.weight", hidden)
    attention = mla_tensors if layer in config.mla else kda_tensors
    yield from attention(weights, config, f"{prefix}self_attn.")


def global_tensors(weights: Weights, config: TinyConfig) -> Iterator[Tensor]:
    """Embedding, head and the final norms."""
    hidden, model = config.hidden, "language_model.model."
    yield weights.matrix(f"{model}output_attn_res_proj.weight", 1, hidden)
    yield weights.norm(f"{model}output_attn_res_norm.weight", hidden)
    yield weights.matrix("language_model.lm_head.weight", config.vocab, hidden)
    yield weights.norm(f"{model}norm.weight", hidden)
    yield weights.matrix(f"{model}embed_tokens.weight", config.vocab, hidden, scale=0.5)


def projector_tensors(weights: Weights, config: TinyConfig) -> Iterator[Tensor]:
    """The projector from merged patches to the text model."""
    merged = config.vision_hidden * 4
    yield weights.norm("mm_projector.post_norm.weight", config.hidden)
    yield weights.matrix("mm_projector.proj.2.weight", config.hidden, merged)
    yield weights.matrix("mm_projector.proj.0.weight", merged, merged)


def vision_tensors(weights: Weights, config: TinyConfig) -> Iterator[Tensor]:
    """The vision tower."""
    width, inner, grid = config.vision_hidden, config.vision_intermediate, config.vision_grid
    yield weights.norm("vision_tower.encoder.final_layernorm.weight", width)
    for block in reversed(range(config.vision_layers)):
        base = f"vision_tower.encoder.blocks.{block}."
        yield weights.matrix(f"{base}wo.weight", width, config.vision_qkv)
        yield weights.matrix(f"{base}wqkv.weight", 3 * config.vision_qkv, width)
        yield weights.matrix(f"{base}mlp.fc1.weight", width, inner)
        yield weights.matrix(f"{base}mlp.fc0.weight", inner, width)
        yield weights.norm(f"{base}norm1.weight", width)
        yield weights.norm(f"{base}norm0.weight", width)
    yield weights.matrix("vision_tower.patch_embed.proj.weight", width, 3, 14, 14)
    yield weights.matrix("vision_tower.patch_embed.pos_emb.weight", grid, grid, width, scale=0.02)


def shards(config: TinyConfig) -> Iterator[Iterator[Tensor]]:
    """Every shard in order: layers, globals, projector, vision tower."""
    for layer in range(config.layers):
        yield layer_tensors(Weights(config, layer), config, layer)
    yield global_tensors(Weights(config, 1001), config)
    if config.vision:
        yield projector_tensors(Weights(config, 1002), config)
        yield vision_tensors(Weights(config, 1003), config)


def write_shard(path: Path, tensors: list[Tensor]) -> int:
    """Write a safetensors file in the given order; return the number of tensor bytes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dtype, shape, array in tensors:
        end = offset + array.nbytes
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (offset, end)}
        offset = end
    blob = json.dumps(header, separators=(",", ":")).encode()
    blob += b" " * (-len(blob) % 8)
    body = b"".join(array.tobytes() for *_, array in tensors)
    path.write_bytes(struct.pack("<Q", len(blob)) + blob + body)
    return offset


def write_source(path: Path, config: TinyConfig | None = None) -> Path:
    """Write a whole source checkpoint into the folder `path` and return the folder."""
    config = config or TinyConfig()
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    every = [list(shard) for shard in shards(config)]
    weight_map: dict[str, str] = {}
    total = 0
    for number, tensors in enumerate(every, 1):
        name = f"model-{number:05d}-of-{len(every):06d}.safetensors"
        total += write_shard(path / name, tensors)
        weight_map |= {tensor[0]: name for tensor in tensors}
    index = {"metadata": {"total_size": total}, "weight_map": shuffled_shards(weight_map)}
    write_json(path / "model.safetensors.index.json", index)
    write_sidecars(path, config)
    return path


def shuffled_shards(weight_map: dict[str, str]) -> dict[str, str]:
    """Shards in arbitrary order, as in the published index: nobody may rely on it."""
    files = sorted(set(weight_map.values()))
    order = {files[i]: at for at, i in enumerate(np.random.default_rng(7).permutation(len(files)))}
    return dict(sorted(weight_map.items(), key=lambda entry: order[entry[1]]))


def write_sidecars(path: Path, config: TinyConfig) -> None:
    """Config, generation config, licence and tokenizer."""
    nested = source_config(asdict(config) | {"mla_layers": config.mla})
    write_json(path / "config.json", nested)
    generation = {"max_length": 1048576, "eos_token_id": nested["eos_token_id"]}
    write_json(path / "generation_config.json", generation)
    (path / "LICENSE").write_text("Kimi K3 License\n\nRandom weights for tests.\n", "utf-8")
    if config.tokenizer:
        write_tokenizer(path, config.vocab)


def write_json(path: Path, value: object) -> None:
    """Write indented JSON."""
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")
