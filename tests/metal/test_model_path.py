"""kimi_k3.py down its Metal path: its kernels against their twins, and the whole tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.models import kimi_k3 as stock
from mlx_lm.models.cache import ArraysCache, BatchKVCache

from benchmarks.metal_path import fresh_import
from benchmarks.primitives import model_config
from tests.metal.emulator import Emulation, EmulatorError, emulated_metal

kimi_k3 = pytest.importorskip("kimi_k3")
RNG = np.random.default_rng()
SEED = np.random.default_rng(5).bit_generator.state
FLOATS = [mx.float32, mx.bfloat16]
K3_MIX = (8, (1, 1, 7168))
K3_ROUTER = (1, 896, 7168)


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """Every test gets the same random numbers, whichever tests run before it."""
    RNG.bit_generator.state = SEED


@pytest.fixture
def metal() -> Iterator[tuple[ModuleType, Emulation]]:
    """The model file, executed where Metal is there, and the record of its launches."""
    with emulated_metal(check_races=True) as emulation:
        yield fresh_import(kimi_k3), emulation


def normal(*shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    """Random numbers that do not depend on MLX's generator."""
    return mx.array(RNG.standard_normal(shape).astype(np.float32)).astype(dtype)


def assert_twins(out: mx.array, expected: mx.array) -> None:
    """Equal to a few units in the last place, and in bfloat16 nearly everywhere to the bit."""
    assert out.dtype == expected.dtype
    assert out.shape == expected.shape
    rtol, atol = {mx.float32: (4e-6, 4e-6), mx.bfloat16: (2**-6, 2**-12)}[out.dtype]
    a, b = (np.array(x.astype(mx.float32)) for x in (out, expected))
    np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)
    if out.dtype == mx.bfloat16:
        assert (a != b).mean() < 0.02


def mix_inputs(
    module: ModuleType, n_blocks: int, shape: tuple[int, ...], stream: mx.Dtype, weights: mx.Dtype
) -> list[Any]:
    """Blocks of different sizes, prefix, and the three weight vectors of an AttnRes mix."""
    blocks = module.BlockStack(1e-5)
    for i in range(n_blocks):
        blocks.push((2.0**i * normal(*shape)).astype(stream))
    size = shape[-1]
    res_norm, norm = (1 + 0.3 * normal(size, dtype=weights) for _ in "ab")
    res_proj = (2 * normal(1, size) / size**0.5).astype(weights)
    return [blocks, normal(*shape, dtype=stream), res_norm.astype(weights), res_proj, norm]


def twin(module: ModuleType, inputs: list[Any]) -> mx.array:
    """What the kernel computes, in plain operations."""
    return module.attn_res_ops(*inputs, inputs[1].dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("n_blocks", "shape"),
    [(1, (1, 1, 64)), (3, (2, 3, 640)), (8, (1, 2, 512)), (16, (1, 1, 1056)), K3_MIX],
)
def test_attention_residual_kernel(
    metal: tuple[ModuleType, Emulation], n_blocks: int, shape: tuple[int, ...], dtype: mx.Dtype
) -> None:
    module, emulation = metal
    inputs = mix_inputs(module, n_blocks, shape, dtype, dtype)
    assert_twins(module.attn_res_metal(*inputs), twin(module, inputs))
    assert emulation.launches == {"k3_attn_res_norm": 1}


def test_float32_weights_do_not_change_the_dtype_of_a_mix(
    metal: tuple[ModuleType, Emulation],
) -> None:
    module, _ = metal
    inputs = mix_inputs(module, 2, (1, 3, 96), mx.bfloat16, mx.float32)
    out, expected = module.attn_res_metal(*inputs), twin(module, inputs)
    assert out.dtype == mx.bfloat16
    a, b = (np.array(x.astype(mx.float32)) for x in (out, expected))
    np.testing.assert_allclose(a, b, rtol=2**-6, atol=2**-12)


MUTATIONS = {
    "mean becomes sum": ("sums[K + 1] / D", "sums[K + 1]"),
    "one block too few": ("k < K; ++k) {\n          mixed", "k < K - 1; ++k) {\n          mixed"),
    "norm's weight": (" * static_cast<float>(norm[d])", ""),
    "blocks of another token": ("inv_rms[k * N + n]", "inv_rms[k * N]"),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_wrong_kernel_is_noticed(
    metal: tuple[ModuleType, Emulation], monkeypatch: pytest.MonkeyPatch, mutation: str
) -> None:
    module, _ = metal
    old, new = MUTATIONS[mutation]
    assert old in module.ATTN_RES_SOURCE
    monkeypatch.setattr(module, "ATTN_RES_SOURCE", module.ATTN_RES_SOURCE.replace(old, new))
    inputs = mix_inputs(module, 3, (2, 3, 96), mx.float32, mx.float32)
    out, expected = module.attn_res_metal(*inputs), twin(module, inputs)
    with pytest.raises(AssertionError):
        assert_twins(out, expected)


@pytest.mark.parametrize("which", [0, 1])
def test_every_barrier_is_needed(
    metal: tuple[ModuleType, Emulation], monkeypatch: pytest.MonkeyPatch, which: int
) -> None:
    module, _ = metal
    barrier = "threadgroup_barrier(mem_flags::mem_threadgroup);"
    parts = module.ATTN_RES_SOURCE.split(barrier)
    assert len(parts) == 3
    parts[which] += parts.pop(which + 1)
    monkeypatch.setattr(module, "ATTN_RES_SOURCE", barrier.join(parts))
    inputs = mix_inputs(module, 2, (1, 1, 96), mx.float32, mx.float32)
    expected = twin(module, inputs)
    # Threadgroup memory that nobody has written yet reads as NaN.
    with pytest.raises((EmulatorError, AssertionError), match=r"order of threads|nan"):
        assert_twins(module.attn_res_metal(*inputs), expected)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("rows", "experts", "size"), [(1, 12, 96), (8, 16, 40), (3, 5, 128), K3_ROUTER]
)
def test_router_kernel(
    metal: tuple[ModuleType, Emulation], rows: int, experts: int, size: int, dtype: mx.Dtype
) -> None:
    module, emulation = metal
    x, weight = normal(1, rows, size, dtype=dtype), normal(experts, size, dtype=dtype) * 2
    weight = (weight / size**0.5).astype(dtype)
    out = module.router_scores_metal(x, weight)
    expected = mx.sigmoid(x.astype(mx.float32) @ weight.astype(mx.float32).T)
    assert out.dtype == mx.float32
    np.testing.assert_allclose(np.array(out), np.array(expected), rtol=4e-6)
    assert emulation.launches == {"k3_router_scores": 1}


def tiny_config(**changes: object) -> dict[str, Any]:
    """Six layers, two of them MLA, in three residual blocks."""
    config = model_config(layers=6)
    config["text_config"] |= {"attn_res_block_size": 2} | changes
    return config


def random_parameter(rng: np.random.Generator, path: str, old: mx.array) -> mx.array:
    """Unit gain for matrices, around 1 for norms, around 0 for biases: nothing is neutral."""
    x = mx.array(rng.standard_normal(old.shape).astype(np.float32))
    if old.ndim == 1:
        return 0.2 * x + (0 if path.endswith(("A_log", "bias")) else 1)
    fan_in = old.shape[1] if "conv" in path else old.shape[-1]
    return x / fan_in**0.5


def tiny_model(module: ModuleType, **changes: object) -> nn.Module:
    """The same random float32 model for every module, with MXFP4 experts."""
    model = module.Model(module.ModelArgs.from_dict(tiny_config(**changes)))
    rng = np.random.default_rng(11)
    parameters = sorted(tree_flatten(model.parameters()))
    model.load_weights([(path, random_parameter(rng, path, old)) for path, old in parameters])
    experts = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    nn.quantize(
        model,
        **experts,
        class_predicate=lambda path, m: "switch_mlp" in path and hasattr(m, "to_quantized"),
    )
    return model.eval()


def run(model: nn.Module, prompt: mx.array, left_padding: list[int] | None = None) -> mx.array:
    """Logits [B, T + 4, V] of a prompt and of four decode steps with fixed tokens."""
    cache = model.make_cache()
    if left_padding is not None:
        cache = [
            ArraysCache(2, left_padding)
            if isinstance(c, ArraysCache)
            else BatchKVCache(left_padding)
            for c in cache
        ]
    steps = [prompt, *(mx.full((len(prompt), 1), 20 + i) for i in range(4))]
    logits = mx.concatenate([model(tokens, cache) for tokens in steps], axis=1)
    mx.eval(logits)
    return logits


def assert_paths_agree(out: mx.array, expected: mx.array) -> None:
    """Within 1e-4 of the logits' scale."""
    assert out.dtype == expected.dtype == mx.float32
    scale = mx.abs(expected).max().item()
    assert scale > 1, "logits near zero would prove nothing"
    assert mx.abs(out - expected).max().item() <= 1e-4 * scale


CALM = {"num_experts_per_token": 16}
"""All experts: rounding cannot change the choice, which would hide every other error."""
PROMPT = mx.array([[7, 8, 9, 10, 11, 12, 13]])


def test_model_on_both_paths() -> None:
    expected = run(tiny_model(kimi_k3), PROMPT)
    with emulated_metal() as emulation:
        out = run(tiny_model(fresh_import(kimi_k3)), PROMPT)
    assert_paths_agree(out, expected)
    # Five forward passes: two mixes a layer and one at the end, but none before the first block.
    assert emulation.launches == {
        "k3_attn_res_norm": 5 * (2 * 6 + 1 - 1),
        "gated_delta_step_vec": 5 * 4,
        "k3_router_scores": 5 * 5,
    }


def two_banks(module: ModuleType) -> nn.Module:
    """Six layers of which all but the first have three experts in a second bank."""
    counts = {"expert_counts": [16] * 6, "low_expert_counts": [0, *[3] * 5]}
    return tiny_model(module, **counts)


def test_two_banks_on_both_paths() -> None:
    expected = run(two_banks(kimi_k3), PROMPT)
    with emulated_metal() as emulation:
        out = run(two_banks(fresh_import(kimi_k3)), PROMPT)
    assert_paths_agree(out, expected)
    assert emulation.launches["k3_router_scores"] == 5 * 5


def test_decoding_one_sequence_copies_no_kernel_input() -> None:
    with emulated_metal() as emulation:
        model = tiny_model(fresh_import(kimi_k3))
        cache = model.make_cache()
        mx.eval(model(PROMPT, cache))
        emulation.strided_inputs.clear()
        mx.eval(model(mx.array([[5]]), cache))
    assert emulation.strided_inputs == {}


def test_padded_batch_on_both_paths() -> None:
    prompts, padding = mx.array([[0, 0, 5, 6, 7], [9, 10, 11, 12, 13]]), [2, 0]
    expected = run(tiny_model(kimi_k3), prompts, padding)
    with emulated_metal() as emulation:
        out = run(tiny_model(fresh_import(kimi_k3)), prompts, padding)
    valid = mx.arange(9) >= mx.array(padding)[:, None]
    assert_paths_agree(*(mx.where(valid[..., None], x, 0) for x in (out, expected)))
    assert emulation.launches["gated_delta_step_vec"] == 5 * 4
    assert emulation.launches["k3_router_scores"] == 4 * 5, "ten rows take the matrix product"


def rounding_error(module: ModuleType, expected: mx.array) -> float:
    """Root mean square error of the bfloat16 model, relative to float32 logits."""
    model = tiny_model(module, **CALM)
    model.set_dtype(mx.bfloat16)
    out = run(model, PROMPT)
    assert out.dtype == mx.bfloat16
    difference = out.astype(mx.float32) - expected
    return (difference.square().mean() / expected.square().mean()).sqrt().item()


def test_bfloat16_model_rounds_like_stock_on_the_metal_path() -> None:
    """The CPU path is no twin here, for it widens inside a layer."""
    exact = tiny_model(kimi_k3, **CALM)
    for dtype in (mx.bfloat16, mx.float32):
        exact.set_dtype(dtype)
    expected = run(exact, PROMPT)
    with emulated_metal() as emulation:
        ours = rounding_error(fresh_import(kimi_k3), expected)
        theirs = rounding_error(fresh_import(stock), expected)
    assert 0.01 < ours < 1.25 * theirs < 0.2
    assert emulation.launches["k3_attn_res_norm"] == emulation.launches["attnres_mix"] == 60


FLOAT32_TENSORS = ("A_log", "dt_bias", "conv.weight", "o_norm.weight", "correction_bias")


def test_float32_tensors_do_not_promote_the_stream_on_the_metal_path() -> None:
    def cast(path: str, x: mx.array) -> mx.array:
        wide = x.dtype != mx.float32 or path.endswith(FLOAT32_TENSORS)
        return x if wide else x.astype(mx.bfloat16)

    with emulated_metal():
        model = tiny_model(fresh_import(kimi_k3))
        model.update(tree_map_with_path(cast, model.parameters()))
        cache = model.make_cache()
        for tokens in (PROMPT, PROMPT[:, :1]):
            assert model(tokens, cache).dtype == mx.bfloat16
    for entry in cache:
        if isinstance(entry, ArraysCache):
            assert [x.dtype for x in entry.cache] == [mx.bfloat16, mx.float32]
        else:
            assert entry.keys.dtype == entry.values.dtype == mx.bfloat16


def test_stock_on_both_paths_and_ours() -> None:
    """The emulator does not favour us: stock's own kernels give the same logits."""
    expected = run(tiny_model(kimi_k3), PROMPT)
    with emulated_metal() as emulation:
        out = run(tiny_model(fresh_import(stock)), PROMPT)
    assert emulation.launches["attnres_mix"] == 60
    assert_paths_agree(out, expected)
