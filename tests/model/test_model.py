"""Parity with stock mlx-lm, dtypes, per-layer expert counts, names, and what is refused."""

import copy
import json
import math
import shutil
from dataclasses import replace

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import kimi_k3 as stock
from mlx_lm.models.cache import KVCache, QuantizedKVCache
from mlx_lm.utils import load_model

import kimi_k3
from tests.model.golden import FOLDER, TEXT, build, error, float32_model, read_golden


def relative_rms(a: mx.array, b: mx.array) -> float:
    difference = a.astype(mx.float32) - b
    return (mx.sqrt(difference.square().mean()) / mx.sqrt(b.square().mean())).item()


@pytest.mark.parametrize("name", TEXT)
def test_same_logits_as_stock(name):
    ids = read_golden(name).vectors["input_ids"]
    assert error(float32_model(name)(ids), float32_model(name, stock)(ids)) < 3e-5


def k3_config() -> dict:
    return json.loads((FOLDER / "k3_config.json").read_text())


def test_every_parameter_of_the_real_model_has_stocks_name_and_shape():
    """Built lazily: 2.78 T parameters of which none is ever evaluated."""

    def shapes(module):
        model = module.Model(module.ModelArgs.from_dict(k3_config()))
        return {name: p.shape for name, p in tree_flatten(model.parameters())}

    ours = shapes(kimi_k3)
    assert ours == shapes(stock)
    assert sum(math.prod(shape) for shape in ours.values()) > 2.7e12


def test_bf16_logits_on_the_cpu(monkeypatch):
    monkeypatch.setattr(kimi_k3, "on_gpu", lambda: False)
    golden = read_golden("text_calm")
    logits = build(golden.config, golden.weights)(golden.vectors["input_ids"])
    assert logits.dtype == mx.bfloat16
    assert relative_rms(logits, golden.vectors["logits_prefill"]) < 1.2e-2


@pytest.mark.parametrize("split", [24, 12, 1])
def test_bf16_logits_with_the_dtypes_of_the_gpu(gpu_path, split):
    """The torch reference is at 2.34e-2, and stock mlx-lm, narrowed to bf16, above 2.9e-2."""
    golden = read_golden("text_calm")
    model = build(golden.config, golden.weights)
    ids, cache = golden.vectors["input_ids"], model.make_cache()
    parts = [ids[:, :split], *(ids[:, i : i + 1] for i in range(split, ids.shape[1]))]
    logits = mx.concatenate([model(part, cache) for part in parts], 1)
    assert relative_rms(logits, golden.vectors["logits_prefill"]) <= 2.6e-2


@pytest.mark.parametrize("path", ["cpu", "gpu"])
def test_float32_weights_do_not_promote_the_stream(path, request, monkeypatch):
    monkeypatch.setattr(kimi_k3, "on_gpu", lambda: False)
    if path == "gpu":
        request.getfixturevalue("gpu_path")
    golden = read_golden("text_calm")
    model, seen = build(golden.config, golden.weights), {}
    assert model.layers[0].self_attn.qkv_conv.conv.weight.dtype == mx.float32
    cache = model.make_cache()
    for ids in (golden.vectors["input_ids"], mx.array([[3]])):
        logits = model(ids, cache, tap=lambda i, what, x: seen.__setitem__((what, i), x.dtype))
        assert logits.dtype == mx.bfloat16
    assert {dtype for (what, _), dtype in seen.items() if what == "hidden"} == {mx.bfloat16}
    if path == "gpu":
        assert cache[0][0].dtype == mx.bfloat16
        assert cache[3].keys.dtype == mx.bfloat16
    assert cache[0][1].dtype == mx.float32


def test_gpu_path_in_float32_is_exact(gpu_path):
    for name in TEXT:
        golden = read_golden(name)
        logits = float32_model(name)(golden.vectors["input_ids"])
        assert error(logits, golden.vectors["logits_prefill"]) < 3e-5


@pytest.mark.parametrize("tail", [32, 4, 0])
def test_a_log_of_either_length(tail):
    """Padded to head_dim, as published, or narrowed to the heads, as in a build."""
    golden = read_golden("mm_a")
    heads = golden.config["text_config"]["linear_attn_config"]["num_heads"]
    weights = {
        k: mx.concatenate([v[:heads], mx.zeros(tail)]) if k.endswith("A_log") else v
        for k, v in golden.weights.items()
    }
    logits = build(golden.config, weights)(golden.vectors["input_ids"])
    assert error(logits, golden.vectors["logits_prefill"]) < 3e-5


def pruned(kept: dict[int, list[int]]):
    """mm_a with only the `kept` experts of each MoE layer, renumbered, and its counts."""
    golden = read_golden("mm_a")
    weights = dict(golden.weights)
    for layer, experts in kept.items():
        prefix = f"language_model.model.layers.{layer}.block_sparse_moe."
        for name in list(weights):
            if name.startswith(f"{prefix}experts."):
                del weights[name]
        for new, old in enumerate(experts):
            for name, w in golden.weights.items():
                if name.startswith(f"{prefix}experts.{old}."):
                    part = name.removeprefix(f"{prefix}experts.{old}.")
                    weights[f"{prefix}experts.{new}.{part}"] = w
        for name in ("gate.weight", "gate.e_score_correction_bias"):
            weights[prefix + name] = golden.weights[prefix + name][mx.array(experts)]
    counts = [len(kept.get(i, [])) for i in range(golden.n_layers)]
    text = golden.config["text_config"] | {"expert_counts": counts}
    return golden.config | {"text_config": text}, weights


def test_another_number_of_experts_in_every_layer():
    """Equals the whole model whose dropped experts can't be selected."""
    kept = {1: [0, 2, 3, 5, 7, 11, 13], 2: [1, 4, 6, 9, 15]}
    golden, model = read_golden("mm_a"), build(*pruned(kept))
    whole = build(golden.config, golden.weights)
    for layer, experts in kept.items():
        moe = whole.layers[layer].mlp
        kept_mask = mx.array([i in experts for i in range(16)])
        moe.e_score_correction_bias = mx.where(kept_mask, moe.e_score_correction_bias, -mx.inf)
        assert model.layers[layer].mlp.gate.weight.shape[0] == len(experts)
    ids = golden.vectors["input_ids"]
    assert error(model(ids), whole(ids)) < 1e-5
    assert error(model(ids), golden.vectors["logits_prefill"]) > 1e-2


def test_mlx_lm_runs_the_copy_in_a_build(tmp_path):
    """`model_file` with uneven counts: plain mlx-lm executes the copy as `custom_model`."""
    config, weights = pruned({1: list(range(12)), 2: list(range(2, 9))})
    model = build(config, weights)
    shutil.copy(kimi_k3.__file__, tmp_path)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), dict(tree_flatten(model.parameters())))
    build_config = {
        **{k: v for k, v in config.items() if k != "text_config"},
        "text_config": {k: v for k, v in config["text_config"].items() if "quant" not in k},
        "quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
        "model_file": "kimi_k3.py",
    }
    (tmp_path / "config.json").write_text(json.dumps(build_config))
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_model(tmp_path)
    loaded, _ = load_model(tmp_path, trust_remote_code=True)
    assert type(loaded).__module__ == "custom_model"
    ids = read_golden("mm_a").vectors["input_ids"]
    assert mx.array_equal(loaded(ids), model(ids))


def text_args(**changes) -> kimi_k3.TextArgs:
    config = read_golden("mm_a").config["text_config"]
    return replace(kimi_k3.TextArgs.from_dict(config), **changes)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_act": "silu"}, "hidden_act is 'silu'"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func is 'softmax'"),
        ({"mla_use_nope": False}, "mla_use_nope is False"),
        ({"linear_attn_config": None}, "linear_attn_config is missing"),
        ({"expert_counts": [4, 4]}, "expert_counts has 2 entries for 3 layers"),
        ({"expert_counts": [0, 4, 3]}, "keeps 3 experts in layer 2, but the router selects 4"),
    ],
)
def test_what_the_model_is_not_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        text_args(**change)


def test_quantized_kv_b_is_refused():
    golden = read_golden("mm_a")
    name = "language_model.model.layers.2.self_attn.kv_b_proj"
    weights = golden.weights | {f"{name}.scales": mx.zeros((1,))}
    with pytest.raises(ValueError, match=r"layers\.2\.self_attn\.kv_b_proj is quantized"):
        build(golden.config, weights)


def test_a_wrong_eps_shows():
    """text_eps can fail: most configurations would not notice this one."""
    golden = read_golden("text_eps")
    model = build(golden.config, golden.weights)
    for layer in model.layers:
        if not layer.is_linear:
            layer.self_attn.kv_a_layernorm.eps = 1e-5
    ids = golden.vectors["input_ids"]
    assert error(model(ids), golden.vectors["logits_prefill"]) > 1e-2


@pytest.mark.parametrize("bound", [-5.0, -8.0, -11.0])
def test_a_stronger_decay_than_chunks_can_take_is_run_token_by_token(bound, monkeypatch):
    """exp of half a chunk at -11 a step is beyond float32: it was NaN without a word."""
    golden = read_golden("mm_a")
    linear = golden.config["text_config"]["linear_attn_config"] | {"gate_lower_bound": bound}
    text = golden.config["text_config"] | {"linear_attn_config": linear}
    weights = {k: v * 0 + 40 if k.endswith("dt_bias") else v for k, v in golden.weights.items()}
    model = build(golden.config | {"text_config": text}, weights)
    ids = golden.vectors["input_ids"]
    logits, cache = model(ids), model.make_cache()
    steps = [model(ids[:, i : i + 1], cache) for i in range(ids.shape[1])]
    assert error(logits, mx.concatenate(steps, 1)) < 3e-5


def test_attention_reads_a_quantized_cache():
    """As if the latents had been rounded before they were cached; stock crashes."""

    class Rounding(KVCache):
        def update_and_fetch(self, *latents):
            packed = [mx.quantize(x, group_size=32, bits=4) for x in latents]
            rounded = (mx.dequantize(*p, group_size=32, bits=4) for p in packed)
            return super().update_and_fetch(*rounded)

    args = kimi_k3.TextArgs(
        hidden_size=64, num_attention_heads=2, kv_lora_rank=64, linear_attn_config={}
    )
    attention = kimi_k3.LatentAttention(args)
    quantized, rounding = QuantizedKVCache(group_size=32, bits=4), Rounding()
    for n in (5, 1, 3):
        x = mx.random.normal((1, n, 64))
        mask = rounding.make_mask(n, return_array=True, window_size=None)
        got, want = (attention(x, mask, cache) for cache in (quantized, rounding))
        assert mx.abs(got - want).max() < 1e-5
    assert quantized.offset == 9


def test_sanitize_leaves_build_names_alone():
    model = float32_model("mm_a")
    weights = dict(tree_flatten(model.parameters()))
    again = model.sanitize(weights)
    assert again.keys() == weights.keys()
    assert all(mx.array_equal(again[name], weights[name]) for name in weights)


def test_sanitize_drops_what_is_not_text():
    extra = {"vision_tower.patch_embed.proj.weight": mx.zeros(1), "mm_projector.x": mx.zeros(1)}
    model = float32_model("mm_a")
    assert model.sanitize(extra) == {}


def test_tied_embeddings_need_no_head():
    golden = read_golden("mm_a")
    text = golden.config["text_config"] | {"tie_word_embeddings": True}
    model = build(golden.config | {"text_config": text}, golden.weights)
    names = dict(tree_flatten(model.parameters()))
    assert not [name for name in names if "lm_head" in name]
    ids = golden.vectors["input_ids"]
    head = model.model.embed_tokens.weight
    assert error(model(ids), model.model(ids) @ head.T) < 1e-5


def test_embeddings_in_the_place_of_ids():
    """mlx-lm and mlx-vlm hand them over for prompts that are more than text."""
    model, ids = float32_model("mm_a"), read_golden("mm_a").vectors["input_ids"]
    embeddings = model.model.embed_tokens(ids)
    assert mx.array_equal(model(ids * 0, input_embeddings=embeddings), model(ids))


def test_a_model_can_be_copied():
    """Python copies through __new__, without arguments."""
    model, ids = float32_model("mm_a"), read_golden("mm_a").vectors["input_ids"]
    assert mx.array_equal(copy.deepcopy(model)(ids), model(ids))


def test_predicates():
    model = float32_model("mm_a")
    cast, quantize = model.cast_predicate, model.quant_predicate
    assert cast("language_model.model.layers.1.mlp.gate.weight")
    for name in ("A_log", "dt_bias", "qkv_conv.conv.weight", "o_norm.weight"):
        assert not cast(f"language_model.model.layers.0.self_attn.{name}")
    assert not cast("language_model.model.layers.1.mlp.e_score_correction_bias")
    assert quantize("language_model.model.layers.1.mlp.gate", None)["bits"] == 8
    assert quantize("language_model.model.layers.1.mlp_res_proj", None) is False
    assert quantize("language_model.lm_head", None) is True


def test_sorted_gather_equals_the_unsorted_one(monkeypatch):
    ids = read_golden("mm_a").vectors["input_ids"]
    want = float32_model("mm_a")(ids)
    monkeypatch.setattr(kimi_k3, "SORT_THRESHOLD", 10**9)
    kimi_k3.row_indices.cache_clear()
    assert error(float32_model("mm_a")(ids), want) < 1e-5


def test_compiled_functions_agree_with_eager_ones(mlx_compile):
    golden, model = read_golden("mm_a"), float32_model("mm_a")
    cache = model.make_cache()
    ids = golden.vectors["input_ids"]
    parts = [ids[:, :5], ids[:, 5:6], ids[:, 6:]]
    logits = mx.concatenate([model(part, cache) for part in parts], 1)
    assert error(logits, golden.vectors["logits_prefill"]) < 3e-5
