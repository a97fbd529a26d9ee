"""The nested config.json of a tiny source checkpoint: the keys of K3's own, with other sizes.

Input: the fields of `tests.tiny_k3.TinyConfig` as a dict. Output: a JSON object.
"""

from __future__ import annotations

from typing import Any

from tests.tiny_tokenizer import control_ids


def source_config(sizes: dict[str, Any]) -> dict[str, Any]:
    """The whole config: ids at the top, text and vision nested, quantization in the text part."""
    ids = control_ids(sizes["vocab"])
    special = {
        "bos_token_id": ids["[BOS]"],
        "eos_token_id": ids["<|end_of_msg|>"],
        "pad_token_id": ids["[PAD]"],
    }
    config = {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "auto_map": {
            "AutoConfig": "configuration_kimi_k3.KimiK3Config",
            "AutoModel": "modeling_kimi_k3.KimiK3ForConditionalGeneration",
            "AutoModelForCausalLM": "modeling_kimi_k3.KimiK3ForConditionalGeneration",
        },
        "dtype": "bfloat16",
        "ignore_index": -100,
        "image_placeholder": "<|kimi_image_placeholder|>",
        "media_placeholder_token_id": ids["<|media_pad|>"],
        "model_type": "kimi_k3",
        "tie_word_embeddings": False,
        **special,
        "text_config": text_config(sizes) | special,
    }
    if sizes["vision"]:
        config["vision_config"] = vision_config(sizes)
    return config


def text_config(sizes: dict[str, Any]) -> dict[str, Any]:
    """The language model. Layer lists in `linear_attn_config` are 1-based, as published."""
    heads = sizes["mla_heads"] or sizes["heads"]
    return {
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "architectures": ["KimiLinearForCausalLM"],
        "attn_res_block_size": sizes["block_size"],
        "dtype": "bfloat16",
        "first_k_dense_replace": sizes["dense_layers"],
        "hidden_act": "situ",
        "hidden_size": sizes["hidden"],
        "intermediate_size": sizes["intermediate"],
        "kv_lora_rank": sizes["kv_lora"],
        "latent_moe_use_norm": True,
        "linear_attn_config": linear_attention_config(sizes),
        "max_position_embeddings": 1048576,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "model_type": "kimi_linear",
        "moe_intermediate_size": sizes["moe_intermediate"],
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_attention_heads": heads,
        "num_expert_group": 1,
        "num_experts": sizes["experts"],
        "num_experts_per_token": sizes["top_k"],
        "num_hidden_layers": sizes["layers"],
        "num_key_value_heads": heads,
        "num_nextn_predict_layers": 0,
        "num_shared_experts": sizes["shared_experts"],
        "q_lora_rank": sizes["q_lora"],
        "qk_nope_head_dim": sizes["qk_nope"],
        "qk_rope_head_dim": sizes["qk_rope"],
        "quantization_config": quantization_config(),
        "rms_norm_eps": 1e-05,
        "routed_expert_hidden_size": sizes["latent"],
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "use_cache": True,
        "use_grouped_topk": True,
        "v_head_dim": sizes["v_head_dim"],
        "vocab_size": sizes["vocab"],
    }


def linear_attention_config(sizes: dict[str, Any]) -> dict[str, Any]:
    """Which layers are KDA, and their sizes."""
    full = {layer + 1 for layer in sizes["mla_layers"]}
    return {
        "full_attn_layers": sorted(full),
        "gate_lower_bound": -5.0,
        "head_dim": sizes["head_dim"],
        "kda_layers": [n for n in range(1, sizes["layers"] + 1) if n not in full],
        "num_heads": sizes["heads"],
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
    }


def quantization_config() -> dict[str, Any]:
    """K3's own block. Its ignore list is incomplete: `routed_expert_*_proj` is dense and absent."""
    weights = {
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
    }
    group = {
        "format": "mxfp4-pack-quantized",
        "input_activations": None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": weights,
    }
    ignore = [
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head.*",
        "re:.*vision_tower.*",
        "re:.*mm_projector.*",
    ]
    return {
        "config_groups": {"group_0": group},
        "format": "mxfp4-pack-quantized",
        "global_compression_ratio": None,
        "ignore": ignore,
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def vision_config(sizes: dict[str, Any]) -> dict[str, Any]:
    """The MoonViT tower and its projector."""
    return {
        "activation_func": "gelu_pytorch_tanh",
        "attn_bias": False,
        "init_pos_emb_height": sizes["vision_grid"],
        "init_pos_emb_time": 4,
        "init_pos_emb_width": sizes["vision_grid"],
        "linear_bias": False,
        "merge_kernel_size": [2, 2],
        "merge_type": "sd2_tpool",
        "mlp_type": "mlp2",
        "mm_hidden_size": sizes["vision_hidden"],
        "mm_projector_type": "patchmergerv2",
        "norm_type": "rmsnorm",
        "patch_embed_proj_bias": False,
        "patch_size": 14,
        "pos_emb_interpolation_mode": "bilinear",
        "pos_emb_type": "divided_fixed",
        "projector_hidden_act": "gelu",
        "projector_ln_eps": 1e-05,
        "qkv_hidden_size": sizes["vision_qkv"],
        "text_hidden_size": sizes["hidden"],
        "vt_hidden_size": sizes["vision_hidden"],
        "vt_intermediate_size": sizes["vision_intermediate"],
        "vt_num_attention_heads": sizes["vision_heads"],
        "vt_num_hidden_layers": sizes["vision_layers"],
    }
