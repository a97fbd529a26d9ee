"""Every matrix of the trunk quantized, against a twin with the dequantized weights."""

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, BatchKVCache
from mlx_lm.utils import load_model

import kimi_k3
from tests.model.golden import error, read_golden, widen

MODES = [
    *({"group_size": g, "bits": b, "mode": "affine"} for b in (8, 6, 5, 4) for g in (64, 32)),
    {"group_size": 32, "bits": 8, "mode": "mxfp8"},
]
by_mode = pytest.mark.parametrize("mode", MODES, ids=lambda m: "-".join(map(str, m.values())))

KINDS = {
    *("qkv_proj", "f_a_proj", "f_b_proj", "b_proj", "g_proj", "o_proj"),
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "embed_q", "unembed_out"),
    *("gate_proj", "up_proj", "down_proj", "gate", "embed_tokens", "lm_head"),
    *("routed_expert_down_proj", "routed_expert_up_proj"),
}
"""What a trunk consists of, by the last part of the path."""

EXPERTS = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
PROMPT = mx.array([list(range(3, 40))])


def config(**changes) -> dict:
    """text_calm with all widths divisible by 64."""
    golden = read_golden("text_calm").config
    return golden | {"text_config": golden["text_config"] | {"q_lora_rank": 64} | changes}


def random_model(**changes) -> nn.Module:
    """Unit gain for matrices, around 1 for norms, around 0 for biases."""
    model = kimi_k3.Model(kimi_k3.ModelArgs.from_dict(config(**changes)))
    rng = np.random.default_rng(3)

    def random(name: str, old: mx.array) -> mx.array:
        x = mx.array(rng.standard_normal(old.shape).astype(np.float32))
        if old.ndim == 1:
            return 0.2 * x + (0 if name.endswith(("A_log", "bias")) else 1)
        return x / (old.shape[1] if "conv" in name else old.shape[-1]) ** 0.5

    parameters = sorted(tree_flatten(model.parameters()))
    model.load_weights([(name, random(name, old)) for name, old in parameters])
    return model.eval()


def quantize(model: nn.Module, mode: dict | None, keep: str = "res_proj") -> nn.Module:
    """Experts in mxfp4, and all the trunk as given but for residual mixing and `keep`."""

    def predicate(path: str, module: nn.Module) -> bool | dict:
        if not hasattr(module, "to_quantized") or keep in path or "res_proj" in path:
            return False
        return EXPERTS if "switch_mlp" in path else mode or False

    nn.quantize(model, class_predicate=predicate)
    return model


def quantized(mode: dict, keep: str = "res_proj", **changes) -> nn.Module:
    return quantize(random_model(**changes), mode, keep)


def twin(model: nn.Module, **changes) -> nn.Module:
    """The same model in float32, with plain matrices in the trunk."""
    weights = {name: widen(w) for name, w in tree_flatten(model.parameters())}
    for path, module in model.named_modules():
        if "scales" in module and "switch_mlp" not in path:
            parts = [weights.pop(f"{path}.{p}", None) for p in ("weight", "scales", "biases")]
            settings = {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}
            weights[f"{path}.weight"] = widen(mx.dequantize(*parts, **settings))
    plain = quantize(random_model(**changes), None)
    plain.load_weights(list(weights.items()))
    return plain


def run(model: nn.Module) -> list[mx.array]:
    """A prefill; a shorter one with 17 decode steps; and a left-padded batch."""
    cache = model.make_cache()
    parts = [PROMPT[:, :20], *(PROMPT[:, i : i + 1] for i in range(20, 37))]
    steps = mx.concatenate([model(part, cache) for part in parts], 1)
    padded = mx.concatenate([PROMPT[:, :8], mx.pad(PROMPT[:, 8:13], [(0, 0), (3, 0)])])
    cache = [
        ArraysCache(2, left_padding=[0, 3]) if layer.is_linear else BatchKVCache([0, 3])
        for layer in model.layers
    ]
    batch = mx.concatenate([model(padded, cache)[:, 3:], model(padded[:, :1], cache)], 1)
    return [model(PROMPT), steps, batch]


@by_mode
def test_every_matrix_of_the_trunk(mode):
    """mxfp8 embeddings are bfloat16 by themselves: they have a test of their own."""
    keep = "embed_tokens" if mode["mode"] == "mxfp8" else "res_proj"
    model = quantized(mode, keep)
    kinds = {p.rpartition(".")[2] for p, m in model.named_modules() if "scales" in m}
    assert kinds == KINDS - {keep}
    for logits, expected in zip(run(model), run(twin(model)), strict=True):
        assert logits.dtype == mx.float32
        assert error(logits, expected) < 5e-5


def test_mxfp8_embeddings_are_bfloat16():
    model = quantized(MODES[-1])
    assert model.model.embed_tokens(PROMPT).dtype == mx.bfloat16
    exact = twin(model).model.embed_tokens(PROMPT)
    assert error(model.model.embed_tokens(PROMPT), exact) == 0, "e4m3 times a power of two"
    assert model(PROMPT).dtype == mx.bfloat16


CALM = {"num_experts_per_token": 16}
"""All experts: rounding can't change the choice."""


def bfloat16_error(model: nn.Module, exact: mx.array) -> float:
    """Relative rms error of a bfloat16 model, in which nothing widens the stream."""
    seen, cache = {}, model.make_cache()

    def tap(layer: int, name: str, x: mx.array) -> None:
        seen.setdefault(name, x.dtype)

    parts = [PROMPT[:, :27], *(PROMPT[:, i : i + 1] for i in range(27, 37))]
    logits = mx.concatenate([model(part, cache, tap) for part in parts], 1)
    assert logits.dtype == seen["hidden"] == seen["expert_output"] == mx.bfloat16
    difference = logits.astype(mx.float32) - exact
    return mx.sqrt(difference.square().mean() / exact.square().mean()).item()


@by_mode
def test_rounding_on_the_gpu_path(mode, gpu_path, monkeypatch):
    """With sums in float32, as on a GPU: on the CPU mlx adds bfloat16 products in bfloat16.

    The embedding stays plain, for dequantizing a row in bfloat16 rounds it several times.
    """
    product = mx.quantized_matmul

    def wide_product(x, *args, **kwargs):
        return product(x.astype(mx.float32), *args, **kwargs).astype(x.dtype)

    monkeypatch.setattr(mx, "quantized_matmul", wide_product)
    model = quantized(mode, "embed_tokens", **CALM)
    model.set_dtype(mx.bfloat16)
    plain = twin(model, **CALM)
    exact = plain(PROMPT)
    plain.set_dtype(mx.bfloat16)
    assert 0.01 < bfloat16_error(model, exact) < 1.3 * bfloat16_error(plain, exact) < 0.2


@pytest.mark.parametrize("mode", [MODES[1], MODES[-1]])
def test_tied_embeddings(mode):
    model = quantized(mode, tie_word_embeddings=True)
    h = model.model(PROMPT)
    head = twin(model, tie_word_embeddings=True).model.embed_tokens.weight
    expected = h.astype(mx.float32) @ head.T
    assert error(model(PROMPT), expected) < (5e-5 if mode["mode"] == "affine" else 1e-2)


@by_mode
def test_mlx_lm_loads_a_quantized_trunk(mode, tmp_path: Path):
    """The experts are the default of the config, every matrix of the trunk is an override."""
    model = quantized(mode)
    paths = [p for p, m in model.named_modules() if "scales" in m and "switch_mlp" not in p]
    text = {k: v for k, v in config()["text_config"].items() if "quant" not in k}
    quantization = EXPERTS | dict.fromkeys(paths, mode)
    written = config() | {"text_config": text, "quantization": quantization}
    (tmp_path / "config.json").write_text(json.dumps(written))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), dict(tree_flatten(model.parameters())))
    classes = kimi_k3.Model, kimi_k3.ModelArgs
    loaded, _ = load_model(tmp_path, get_model_classes=lambda config: classes)
    assert mx.array_equal(loaded(PROMPT), model(PROMPT))
