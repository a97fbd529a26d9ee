"""What config.json says: the sizes of every tensor, the packed format, and the build's own config.

Input: the config as JSON. Output: `Dims`, or the config of a build. Reads no tensor.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kimi_k3_mlx.errors import CheckpointError
from kimi_k3_mlx.prune_plan import LayerPlan, PrunePlan
from kimi_k3_mlx.schema import Json, Quantization

GROUP = 32
PACKED_FORMAT = "mxfp4-pack-quantized"
QUANTIZED = "quantization_config"
MODEL_FILE = "kimi_k3.py"
ORIGINAL = "convert the original moonshotai/Kimi-K3; other packed formats are not read."
HINT = "use the config.json of moonshotai/Kimi-K3, or of a checkpoint pruned from it."


@dataclass(frozen=True)
class Dims:
    """Sizes of one Kimi-K3. Layers count from 0, as in tensor names."""

    sizes: dict[str, int]
    """Every symbol of the shapes in `converters.names.TABLE`."""
    n_layers: int
    n_blocks: int
    """Blocks of the vision tower; 0 when the checkpoint has none."""
    mla_layers: frozenset[int]
    moe_layers: frozenset[int]
    n_experts: int
    top_k: int
    heads: int
    """Heads of the MLA layers."""
    nope: int
    value: int

    def shapes(self, symbols: str) -> list[tuple[int, ...]]:
        """The shapes that a table row allows, the usual one first."""
        return [tuple(map(self._size, shape.split())) for shape in symbols.split("|")]

    def _size(self, symbol: str) -> int:
        if symbol.isdigit():
            return int(symbol)
        name, _, divisor = symbol.partition("/")
        return self.sizes[name] // int(divisor or 1)


def read_dims(config: Json) -> Dims:
    """Sizes from a source's or a build's config.

    Raises CheckpointError naming a field that is missing, or that makes it another architecture.
    """
    if config.get("model_type") != "kimi_k3":
        raise CheckpointError(
            f"config.json has model_type {config.get('model_type')!r}, expected 'kimi_k3'.", HINT
        )
    text = _Fields(_Fields(config, "").section("text_config"), "text_config.")
    linear = _Fields(text.section("linear_attn_config"), "text_config.linear_attn_config.")
    _check_switches(config, text, linear)
    vision = config.get("vision_config")
    blocks = _Fields(vision, "vision_config.") if isinstance(vision, dict) else None
    n_layers, first = text.number("num_hidden_layers"), text.number("first_k_dense_replace", 0)
    step = text.number("moe_layer_freq")
    dims = Dims(
        sizes=_text_sizes(text, linear) | (_vision_sizes(blocks) if blocks else {}),
        n_layers=n_layers,
        n_blocks=blocks.number("vt_num_hidden_layers") if blocks else 0,
        mla_layers=_mla_layers(linear, n_layers),
        moe_layers=frozenset(i for i in range(first, n_layers) if i % step == 0),
        n_experts=text.number("num_experts"),
        top_k=text.number("num_experts_per_token"),
        heads=text.number("num_attention_heads"),
        nope=text.number("qk_nope_head_dim"),
        value=text.number("v_head_dim"),
    )
    _check(dims)
    return dims


class _Fields:
    """A JSON object whose fields must be there; errors name them with their path."""

    def __init__(self, values: Json, path: str) -> None:
        self.values = values
        self.path = path

    def number(self, name: str, least: int = 1) -> int:
        value = self.values.get(name)
        if type(value) is not int or value < least:
            raise self._wrong(name, value, f"a whole number from {least} on")
        return value

    def section(self, name: str) -> Json:
        value = self.values.get(name)
        if not isinstance(value, dict):
            raise self._wrong(name, value, "an object")
        return value

    def numbers(self, name: str, n_items: int | None = None) -> list[int]:
        value = self.values.get(name)
        if (
            not isinstance(value, list)
            or not all(type(item) is int for item in value)
            or len(value) != (len(value) if n_items is None else n_items)
        ):
            count = "a list of" if n_items is None else f"{n_items}"
            raise self._wrong(name, value, f"{count} whole numbers")
        return value

    def _wrong(self, name: str, value: Any, expected: str) -> CheckpointError:
        found = "is missing" if value is None else f"is {str(value)[:40]}"
        return CheckpointError(
            f"config.json: {self.path}{name} {found}, expected {expected}.", HINT
        )


def _check_switches(config: Json, text: _Fields, linear: _Fields) -> None:
    """The table of tensors describes one architecture: refuse what would be another."""
    text.number("attn_res_block_size")
    for holder, name, default, required in (
        (linear, "use_full_rank_gate", False, True),
        (text, "hidden_act", "situ", "situ"),
        (text, "latent_moe_use_norm", False, True),
        (text, "mla_use_output_gate", False, True),
        (text, "mla_use_nope", True, True),
        (text, "tie_word_embeddings", False, False),
        (_Fields(config, ""), "tie_word_embeddings", False, False),
    ):
        value = holder.values.get(name, default)
        if value != required:
            raise CheckpointError(
                f"config.json: {holder.path}{name} is {repr(value)[:40]}; "
                f"only {required!r} is supported.",
                HINT,
            )


def _text_sizes(text: _Fields, linear: _Fields) -> dict[str, int]:
    heads, nope, value = (
        text.number(name) for name in ("num_attention_heads", "qk_nope_head_dim", "v_head_dim")
    )
    rope, kv_lora = text.number("qk_rope_head_dim"), text.number("kv_lora_rank")
    head_dim, kda_heads = linear.number("head_dim"), linear.number("num_heads")
    moe = text.number("moe_intermediate_size")
    return {
        "hidden": text.number("hidden_size"),
        "vocab": text.number("vocab_size"),
        "intermediate": text.number("intermediate_size"),
        "experts": text.number("num_experts"),
        "latent": text.number("routed_expert_hidden_size"),
        "moe": moe,
        "shared": moe * text.number("num_shared_experts"),
        "kda": kda_heads * head_dim,
        "kda_heads": kda_heads,
        "head_dim": head_dim,
        "conv": linear.number("short_conv_kernel_size"),
        "q_lora": text.number("q_lora_rank"),
        "kv_lora": kv_lora,
        "mla_q": heads * (nope + rope),
        "mla_kv_a": kv_lora + rope,
        "mla_kv_b": heads * (nope + value),
        "mla_v": heads * value,
    }


def _vision_sizes(vision: _Fields) -> dict[str, int]:
    kernel = vision.numbers("merge_kernel_size", 2)
    qkv = vision.number("qkv_hidden_size")
    return {
        "vision": vision.number("vt_hidden_size"),
        "vision_mlp": vision.number("vt_intermediate_size"),
        "vision_qkv": qkv,
        "vision_3qkv": 3 * qkv,
        "patch": vision.number("patch_size"),
        "grid_height": vision.number("init_pos_emb_height"),
        "grid_width": vision.number("init_pos_emb_width"),
        "merged": vision.number("mm_hidden_size") * kernel[0] * kernel[1],
    }


def _mla_layers(linear: _Fields, n_layers: int) -> frozenset[int]:
    full, kda = linear.numbers("full_attn_layers"), linear.numbers("kda_layers")
    if sorted(full + kda) != list(range(1, n_layers + 1)):
        raise CheckpointError(
            "config.json: kda_layers and full_attn_layers of text_config.linear_attn_config "
            f"do not name each of the layers 1 to {n_layers} once.",
            HINT,
        )
    return frozenset(layer - 1 for layer in full)


def _check(dims: Dims) -> None:
    if dims.moe_layers and dims.n_experts < dims.top_k:
        raise CheckpointError(
            f"config.json: num_experts is {dims.n_experts}, "
            f"but the router selects {dims.top_k} per token.",
            HINT,
        )
    for name in ("latent", "moe"):
        if dims.sizes[name] % GROUP:
            raise CheckpointError(
                f"config.json: the expert width {dims.sizes[name]} is not a multiple of {GROUP}.",
                HINT,
            )


def check_source(config: Json) -> None:
    """Accept a source's config, which states `mxfp4-pack-quantized` and nothing else.

    Raises CheckpointError for a build's config, and for another format, by its place.
    """
    if config.get("quantization") is not None:
        raise CheckpointError(
            "config.json has MLX's quantization block: it is a build, not a source.", ORIGINAL
        )
    text = config["text_config"]
    if text.get("expert_counts") is not None:
        raise CheckpointError(
            "config.json: text_config.expert_counts is set, which only builds have.", ORIGINAL
        )
    holders = (_Fields(config, ""), _Fields(text, "text_config."))
    stated = [holder for holder in holders if holder.values.get(QUANTIZED) is not None]
    if not stated:
        raise CheckpointError(
            f"config.json has no quantization_config with a format, expected {PACKED_FORMAT!r}.",
            HINT,
        )
    for holder in stated:
        block = _Fields(holder.section(QUANTIZED), f"{holder.path}{QUANTIZED}.")
        _check_formats(block, dict(_formats(block)))


def _check_formats(block: _Fields, formats: dict[str, object]) -> None:
    for place, name in formats.items():
        if name != PACKED_FORMAT:
            raise CheckpointError(
                f"config.json: {block.path}{place} is {name!r}, expected {PACKED_FORMAT!r}.",
                ORIGINAL,
            )
    if not formats:
        raise CheckpointError(
            f"config.json: {block.path}format is missing, expected {PACKED_FORMAT!r}.", ORIGINAL
        )


def _formats(block: _Fields) -> Iterator[tuple[str, object]]:
    if block.values.get("format") is not None:
        yield "format", block.values["format"]
    if block.values.get("config_groups") is None:
        return
    groups = _Fields(block.section("config_groups"), f"{block.path}config_groups.")
    for name in groups.values:
        value = groups.section(name).get("format")
        if value is not None:
            yield f"config_groups.{name}.format", value


def build_config(
    config: Json,
    dims: Dims,
    experts: Quantization,
    modules: dict[str, Quantization],
    prune: PrunePlan | None,
) -> Json:
    """A build's config.json: the source's, with MLX's quantization block and the expert counts.

    `modules` are the quantized ones; those unlike `experts` get an entry of their own. `auto_map`
    goes because it names code that a build doesn't carry.
    """
    result = copy.deepcopy(config)
    for holder in (result, result["text_config"]):
        for field in (QUANTIZED, "auto_map", "model_file"):
            holder.pop(field, None)
    others = {path: value.to_json() for path, value in modules.items() if value != experts}
    result["quantization"] = experts.to_json() | others
    if prune:
        result["text_config"] |= _counts(prune, dims)
        if not prune.is_uniform:
            result["model_file"] = MODEL_FILE
    return result


def pruned_config(config: Json, prune: PrunePlan | None) -> Json:
    """The config.json of a pruned checkpoint in Moonshot's layout."""
    result = copy.deepcopy(config)
    if prune:
        result["text_config"]["num_experts"] = prune.largest
    return result


def _counts(prune: PrunePlan, dims: Dims) -> Json:
    counts: Json = {"num_experts": prune.largest}
    if prune.is_uniform:
        return counts
    layers = [prune.layers.get(layer, LayerPlan(())) for layer in range(dims.n_layers)]
    counts["expert_counts"] = [len(layer.keep) for layer in layers]
    if any(layer.low for layer in layers):
        counts["low_expert_counts"] = [len(layer.low) for layer in layers]
    return counts
