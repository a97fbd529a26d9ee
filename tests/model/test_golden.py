"""The model against Moonshot's own numbers, in float32 against float64."""

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, BatchKVCache

import kimi_k3
from tests.model.golden import TEXT, TOLERANCE, Golden, error, float32_model, read_golden

pytestmark = pytest.mark.parametrize("name", TEXT)


def run_tapped(name: str) -> tuple[mx.array, dict[tuple[str, int], mx.array], list]:
    model, seen = float32_model(name), {}
    cache = model.make_cache()
    logits = model(
        read_golden(name).vectors["input_ids"],
        cache,
        tap=lambda layer, what, array: seen.__setitem__((what, layer), array),
    )
    return logits, seen, cache


def chunks(ids: mx.array, sizes: list[int]) -> Iterator[mx.array]:
    first = 0
    for size in sizes:
        yield ids[:, first : first + size]
        first += size
    assert first == ids.shape[1]


def run_in_chunks(name: str, sizes: list[int]) -> mx.array:
    model = float32_model(name)
    cache = model.make_cache()
    return mx.concatenate(
        [model(part, cache) for part in chunks(read_golden(name).vectors["input_ids"], sizes)], 1
    )


def test_prefill(name):
    golden, model = read_golden(name), float32_model(name)
    assert error(model(golden.vectors["input_ids"]), golden.vectors["logits_prefill"]) < TOLERANCE


def test_prefill_then_decode(name):
    golden = read_golden(name)
    split = golden.meta["decode_split"]
    sizes = [split] + [1] * (golden.meta["T"] - split)
    assert error(run_in_chunks(name, sizes), golden.vectors["logits_prefill"]) < TOLERANCE


def test_every_token_alone(name):
    golden = read_golden(name)
    logits = run_in_chunks(name, [1] * golden.meta["T"])
    assert error(logits, golden.vectors["logits_prefill"]) < TOLERANCE


def test_prefill_in_odd_chunks(name):
    golden = read_golden(name)
    sizes = [1, 2, 3, 1, 5]
    logits = run_in_chunks(name, [*sizes, golden.meta["T"] - sum(sizes)])
    assert error(logits, golden.vectors["logits_prefill"]) < TOLERANCE


def test_hidden_states_and_blocks(name):
    golden, (_, seen, _) = read_golden(name), run_tapped(name)
    for layer in range(golden.n_layers):
        assert error(seen["hidden", layer], golden.vectors[f"hidden.{layer}"]) < TOLERANCE, layer
    pushed = [array for (what, _), array in sorted(seen.items()) if what == "block"]
    if "block_residual" in golden.vectors:
        stack = mx.stack([block[0] for block in pushed], axis=1)
        assert error(stack, golden.vectors["block_residual"]) < TOLERANCE
    else:
        assert not pushed


def test_final_norm(name):
    golden, model = read_golden(name), float32_model(name)
    final = model.model(golden.vectors["input_ids"])
    assert error(final, golden.vectors["final_norm"]) < TOLERANCE


def test_router_and_experts(name):
    """Logits do not see the routing weights' common factor (the latent norm cancels it)."""
    golden, (_, seen, _) = read_golden(name), run_tapped(name)
    layers = golden.layers_with("router_w")
    assert layers
    for layer in layers:
        experts, weights, norms, by_expert = routing(golden, seen, layer)
        want = {k: np.array(golden.vectors[f"{k}.{layer}"]) for k in ("router_idx", "router_w")}
        assert np.array_equal(experts, want["router_idx"])
        np.testing.assert_allclose(weights, want["router_w"], rtol=2e-5)
        np.testing.assert_allclose(norms, golden.vectors[f"expert_norm.{layer}"], rtol=5e-5)
        np.testing.assert_allclose(by_expert, golden.vectors[f"reap_sum.{layer}"], rtol=5e-5)
        scores = seen["router_scores", layer][0]
        assert error(scores, golden.vectors[f"router_scores.{layer}"]) < TOLERANCE


def routing(golden: Golden, seen, layer: int):
    """Experts, weights and output norms [T, k] by falling weight, and Σ weight·norm by expert."""
    experts, weights = (np.array(seen[k, layer][0]) for k in ("experts", "router_weights"))
    norms = np.linalg.norm(np.array(seen["expert_output", layer][0]), axis=-1)
    sums = np.bincount(
        experts.ravel(),
        (weights.astype(np.float64) * norms).ravel(),
        minlength=golden.config["text_config"]["num_experts"],
    )
    order = np.argsort(-weights, axis=-1)
    return *(np.take_along_axis(x, order, -1) for x in (experts, weights, norms)), sums


def test_caches(name):
    golden, (_, _, cache) = read_golden(name), run_tapped(name)
    vectors = golden.vectors
    for layer in golden.layers_with("kda_state"):
        conv, state = cache[layer]
        assert error(state, vectors[f"kda_state.{layer}"]) < TOLERANCE
        for part, got in zip("qkv", mx.split(conv, 3, axis=-1), strict=True):
            want = vectors[f"conv_state_{part}.{layer}"][..., 1:].swapaxes(1, 2)
            assert error(got, want) < TOLERANCE
    for layer in golden.layers_with("mla_latent"):
        latent, pe = cache[layer].keys_and_values()
        assert error(latent.squeeze(), vectors[f"mla_latent.{layer}"].squeeze()) < TOLERANCE
        assert error(pe.squeeze(), vectors[f"mla_kpe.{layer}"].squeeze()) < TOLERANCE


def batch_cache(model, padding: list[int]) -> list:
    return [
        ArraysCache(2, left_padding=padding) if layer.is_linear else BatchKVCache(padding)
        for layer in model.layers
    ]


def decode(model, cache, ids: mx.array) -> mx.array:
    return mx.concatenate([model(ids[:, i : i + 1], cache) for i in range(ids.shape[1])], 1)


@pytest.mark.parametrize("sizes", [[11], [4, 7], [1, 9, 1]])
def test_left_padded_batch(name, sizes):
    golden, model = read_golden(name), float32_model(name)
    mask = golden.vectors["batch_attention_mask"]
    cache = batch_cache(model, (mask.shape[1] - mask.sum(1)).tolist())
    parts = chunks(golden.vectors["batch_input_ids"], sizes)
    logits = mx.concatenate([model(part, cache) for part in parts], 1)
    assert error(logits * mask[..., None], golden.vectors["batch_logits"]) < TOLERANCE
    steps = decode(model, cache, golden.vectors["batch_next_ids"])
    assert error(steps, golden.vectors["batch_decode_logits"]) < TOLERANCE


@pytest.mark.parametrize("sizes", [[11], [4, 7], [1, 9, 1]])
def test_right_padded_batch(name, sizes):
    golden, model = read_golden(name), float32_model(name)
    mask = golden.vectors["batch_attention_mask"]
    padding = (mask.shape[1] - mask.sum(1)).tolist()
    rows = golden.vectors["batch_input_ids"]
    rolled = [mx.roll(row, -n) for row, n in zip(rows, padding, strict=True)]
    cache = batch_cache(model, [0] * len(padding))
    for layer_cache in cache:
        layer_cache.prepare(lengths=mask.sum(1).tolist(), right_padding=padding)
    parts = chunks(mx.stack(rolled), sizes)
    logits = mx.concatenate([model(part, cache) for part in parts], 1)
    for layer_cache in cache:
        layer_cache.finalize()
    back = mx.stack([mx.roll(x, n, axis=0) for x, n in zip(logits, padding, strict=True)])
    assert error(back * mask[..., None], golden.vectors["batch_logits"]) < TOLERANCE
    steps = decode(model, cache, golden.vectors["batch_next_ids"])
    assert error(steps, golden.vectors["batch_decode_logits"]) < TOLERANCE


@pytest.mark.parametrize("block", [1, 7])
def test_any_query_block_gives_the_same_attention(name, block, monkeypatch):
    monkeypatch.setattr(kimi_k3, "QUERY_BLOCK", block)
    test_prefill(name)
    test_left_padded_batch(name, [4, 7])
