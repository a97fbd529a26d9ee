"""The tiny K3 on disk, in Moonshot's layout: one shard per layer, MXFP4 experts, BF16 trunk.

Input: a trained TinyK3. Output: shards, index, config, tokenizer files. `load_artifact` reads
the shards back with a table decoder of its own, so that what is measured is what was written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny_corpus import BOS_ID, CONTROL_NAMES, EOS_ID, N_TEXT_IDS, PAD_ID
from tiny_kda import DeltaAttention
from tiny_layers import FeedForward
from tiny_model import LatentMoE, Layer, TinyK3, text_config
from tiny_mxfp4 import E2M1, mxfp4_pack
from tokenizers import Tokenizer
from torch import Tensor

PREFIX = "language_model.model."
F32_NAMES = ("conv1d.weight", "A_log", "dt_bias", "o_norm.weight", "e_score_correction_bias")

QUANTIZATION_CONFIG = {
    "config_groups": {
        "group_0": {
            "format": "mxfp4-pack-quantized",
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": 32,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "scale_dtype": "torch.uint8",
                "strategy": "group",
                "symmetric": True,
                "type": "float",
                "zp_dtype": None,
            },
        }
    },
    "format": "mxfp4-pack-quantized",
    "global_compression_ratio": None,
    "ignore": [
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head.*",
        "re:.*vision_tower.*",
        "re:.*mm_projector.*",
    ],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}


def checkpoint_config() -> dict:
    """The nested config.json; K3's own fields, no vision tower."""
    ids = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    text = text_config() | ids
    text |= {
        "architectures": ["KimiLinearForCausalLM"],
        "dtype": "bfloat16",
        "latent_moe_use_norm": True,
        "max_position_embeddings": 1048576,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "model_type": "kimi_linear",
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_expert_group": 1,
        "num_nextn_predict_layers": 0,
        "quantization_config": QUANTIZATION_CONFIG,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "use_cache": True,
        "use_grouped_topk": True,
    }
    top = {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "dtype": "bfloat16",
        "media_placeholder_token_id": N_TEXT_IDS + 21,
        "model_type": "kimi_k3",
        "text_config": dict(sorted(text.items())),
        "tie_word_embeddings": False,
    }
    return dict(sorted((top | ids).items()))


def _delta_attention(attention: DeltaAttention) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in attention.named_parameters():
        if name == "conv":
            for part, taps in zip("qkv", tensor.chunk(3), strict=True):
                yield f"{part}_conv1d.weight", taps.unsqueeze(1)
        elif name == "A_log":
            yield name, torch.cat([tensor, tensor.new_zeros(attention.dim - attention.heads)])
        else:
            yield name, tensor


def _experts(moe: LatentMoE) -> Iterator[tuple[str, Tensor]]:
    w1, w3 = moe.w13.chunk(2, 1)
    for name, stacked in (("w1", w1), ("w2", moe.w2), ("w3", w3)):
        packed, scales = mxfp4_pack(stacked)
        for expert in range(moe.experts):
            yield f"experts.{expert}.{name}.weight_packed", packed[expert]
            yield f"experts.{expert}.{name}.weight_scale", scales[expert]


def _moe(moe: LatentMoE) -> Iterator[tuple[str, Tensor]]:
    yield "gate.weight", moe.gate.weight
    yield "gate.e_score_correction_bias", moe.e_score_correction_bias
    yield "routed_expert_down_proj.weight", moe.down.weight
    yield "routed_expert_up_proj.weight", moe.up.weight
    yield "routed_expert_norm.weight", moe.norm.weight
    for name, tensor in moe.shared.named_parameters():
        yield f"shared_experts.{name}", tensor
    yield from _experts(moe)


def _layer(layer: Layer) -> Iterator[tuple[str, Tensor]]:
    yield "input_layernorm.weight", layer.input_norm.weight
    yield "post_attention_layernorm.weight", layer.post_norm.weight
    for name, residual in (
        ("self_attention", layer.attention_residual),
        ("mlp", layer.mlp_residual),
    ):
        yield f"{name}_res_proj.weight", residual.proj.unsqueeze(0)
        yield f"{name}_res_norm.weight", residual.norm
    is_delta = isinstance(layer.attention, DeltaAttention)
    attention = (
        _delta_attention(layer.attention) if is_delta else layer.attention.named_parameters()
    )
    yield from ((f"self_attn.{name}", tensor) for name, tensor in attention)
    if isinstance(layer.mlp, FeedForward):
        yield from ((f"mlp.{name}", tensor) for name, tensor in layer.mlp.named_parameters())
    else:
        yield from ((f"block_sparse_moe.{name}", tensor) for name, tensor in _moe(layer.mlp))


def _globals(model: TinyK3) -> Iterator[tuple[str, Tensor]]:
    yield PREFIX + "embed_tokens.weight", model.embed.weight
    yield PREFIX + "norm.weight", model.norm.weight
    yield PREFIX + "output_attn_res_proj.weight", model.residual.proj.unsqueeze(0)
    yield PREFIX + "output_attn_res_norm.weight", model.residual.norm
    yield "language_model.lm_head.weight", model.head.weight


def _as_stored(name: str, tensor: Tensor) -> Tensor:
    tensor = tensor.detach().clone().contiguous()
    if tensor.dtype == torch.uint8 or name.endswith(F32_NAMES):
        return tensor
    return tensor.bfloat16()


def checkpoint_shards(model: TinyK3) -> list[dict[str, Tensor]]:
    """One dict per shard: the layers in order, then the tensors outside the layers."""
    shards = [
        {f"{PREFIX}layers.{i}.{name}": _as_stored(name, tensor) for name, tensor in _layer(layer)}
        for i, layer in enumerate(model.layers)
    ]
    return [*shards, {name: _as_stored(name, tensor) for name, tensor in _globals(model)}]


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_weights(model: TinyK3, folder: Path) -> None:
    shards, weight_map, total = checkpoint_shards(model), {}, 0
    for old in folder.glob("model-*.safetensors"):
        old.unlink()
    for number, shard in enumerate(shards, 1):
        file_name = f"model-{number:05d}-of-{len(shards):06d}.safetensors"
        save_file(shard, folder / file_name, metadata={"format": "pt"})
        (folder / file_name).chmod(0o644)
        weight_map |= dict.fromkeys(shard, file_name)
        total += sum(t.numel() * t.element_size() for t in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(folder / "model.safetensors.index.json", index)
    _write_json(folder / "config.json", checkpoint_config())


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": 0, "eos_token": 1, "unk_token": 30, "pad_token": 31}
    settings = {key: CONTROL_NAMES[offset] for key, offset in names.items()}
    settings |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1048576,
    }
    _write_json(folder / "tokenizer_config.json", settings)
    ids = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    _write_json(folder / "generation_config.json", {"max_length": 1048576, **ids})


def unpack_mxfp4(packed: Tensor, scales: Tensor) -> Tensor:
    """A table decoder, independent of the packer."""
    table = torch.tensor([*E2M1, *(-v for v in E2M1)])
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()
    groups = table[codes].unflatten(-1, (scales.shape[-1], -1))
    return (groups * torch.exp2(scales.float() - 127).unsqueeze(-1)).flatten(-2)


def _read_expert_stacks(model: TinyK3, stored: dict[str, Tensor]) -> None:
    for index, layer in enumerate(model.layers):
        if not isinstance(layer.mlp, LatentMoE):
            continue
        base = f"{PREFIX}layers.{index}.block_sparse_moe.experts."
        for expert in range(layer.mlp.experts):
            w1, w2, w3 = (
                unpack_mxfp4(
                    stored[f"{base}{expert}.{name}.weight_packed"],
                    stored[f"{base}{expert}.{name}.weight_scale"],
                )
                for name in ("w1", "w2", "w3")
            )
            layer.mlp.w13.data[expert] = torch.cat([w1, w3])
            layer.mlp.w2.data[expert] = w2


def _read_parameter(parameter: Tensor, stored: Tensor) -> None:
    parameter.copy_(stored.float().flatten()[: parameter.numel()].view_as(parameter))


@torch.no_grad()
def load_artifact(folder: Path) -> TinyK3:
    """The model that the files hold, in float32."""
    stored: dict[str, Tensor] = {}
    for path in sorted(folder.glob("model-*.safetensors")):
        stored |= load_file(path)
    model = TinyK3(text_config())
    for index, layer in enumerate(model.layers):
        for name, parameter in _layer_trunk(layer):
            _read_parameter(parameter, stored[f"{PREFIX}layers.{index}.{name}"])
    for name, parameter in _globals(model):
        _read_parameter(parameter, stored[name])
    _read_expert_stacks(model, stored)
    return model.eval()


def _layer_trunk(layer: Layer) -> Iterator[tuple[str, Tensor]]:
    """Views on the layer's own storage, by the names on disk; A_log without its padding."""
    for name, tensor in _layer(layer):
        if name == "self_attn.A_log":
            yield name, layer.attention.A_log
        elif ".experts." not in name:
            yield name, tensor
