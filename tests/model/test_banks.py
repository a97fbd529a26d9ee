"""Two banks of routed experts in one layer, against loops over tokens and experts."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, BatchKVCache
from mlx_lm.utils import load_model

import kimi_k3
from tests.model import graded
from tests.model.golden import TOLERANCE, build, error, float32_model, read_golden

FIRST = graded.MXFP4
LOW = [
    {"group_size": 64, "bits": 2, "mode": "affine"},
    {"group_size": 32, "bits": 2, "mode": "affine"},
    {"group_size": 64, "bits": 3, "mode": "affine"},
    {"group_size": 32, "bits": 4, "mode": "mxfp4"},
]


def text_args(counts: list[int], low: list[int] | None, **changes) -> kimi_k3.TextArgs:
    """mm_a's sizes, with these experts."""
    args = kimi_k3.TextArgs.from_dict(read_golden("mm_a").config["text_config"])
    return replace(args, expert_counts=counts, low_expert_counts=low, **changes)


def random_moe(n_first: int, n_low: int, top_k: int, seed: int = 0) -> nn.Module:
    """An MoE layer whose router favours nobody."""
    total = n_first + n_low
    args = text_args([total] * 3, [n_low] * 3, num_experts_per_token=top_k)
    moe, rng = kimi_k3.SparseMoE(args, 1), np.random.default_rng(seed)

    def random(old: mx.array) -> mx.array:
        x = rng.standard_normal(old.shape).astype(np.float32)
        return mx.array(x / old.shape[-1] ** 0.5)

    moe.load_weights([(name, random(old)) for name, old in tree_flatten(moe.parameters())])
    return moe


def quantized(moe: nn.Module, low: dict) -> nn.Module:
    """The first bank in mxfp4, the low one as given."""

    def predicate(path: str, _: nn.Module) -> bool | dict:
        bank = path.partition(".")[0]
        return {"switch_mlp": FIRST, "switch_mlp_low": low}.get(bank, False)

    nn.quantize(moe, class_predicate=predicate)
    return moe


def check(moe: nn.Module, n_tokens: int, seed: int = 1) -> None:
    """The outputs of the experts, and the layer's, equal the naive ones."""
    rng, seen = np.random.default_rng(seed), {}
    x = mx.array(rng.standard_normal((1, n_tokens, 128)).astype(np.float32))
    y = moe(x, seen.__setitem__)
    z = np.array(moe.routed_expert_down_proj(x))[0].astype(np.float64)
    indices, weights = (np.array(seen[k])[0] for k in ("experts", "router_weights"))
    outputs = graded.naive_experts(moe, z, indices)
    assert np.abs(np.array(seen["expert_output"])[0] - outputs).max() < 1e-5 * np.abs(outputs).max()
    total = mx.array((outputs * weights[..., None]).sum(1).astype(np.float32))
    expected = moe.routed_expert_up_proj(moe.routed_expert_norm(total)) + moe.shared_experts(x[0])
    assert error(y[0], expected) < 1e-5


@pytest.mark.parametrize("n_tokens", [1, 3, 15, 16, 40])
def test_both_paths_equal_the_loop(n_tokens):
    """With 4 experts a token, 16 tokens are the first to be sorted."""
    check(random_moe(7, 5, top_k=4), n_tokens)


@pytest.mark.slow
def test_compiled_for_one_shape_they_serve_another(mlx_compile):
    moe = quantized(random_moe(9, 7, top_k=4), LOW[1])
    for n_tokens in (1, 3, 20, 30):
        check(moe, n_tokens)


@pytest.mark.parametrize("n_tokens", [1, 3, 40])
@pytest.mark.parametrize("low", LOW)
def test_banks_of_different_bits(low, n_tokens):
    check(quantized(random_moe(9, 7, top_k=4), low), n_tokens)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_split_equals_the_loop(data):
    n_first, n_low = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 12))
    top_k = data.draw(st.integers(1, min(8, n_first + n_low)))
    n_tokens, seed = data.draw(st.integers(1, 30)), data.draw(st.integers(0, 99))
    check(random_moe(n_first, n_low, top_k, seed), n_tokens, seed)


@pytest.mark.parametrize("n_tokens", [1, 40])
@pytest.mark.parametrize("bank", ["first", "low"])
def test_all_slots_in_one_bank(bank, n_tokens):
    moe = random_moe(6, 6, top_k=4)
    favour = (mx.arange(12) < 6) if bank == "first" else (mx.arange(12) >= 6)
    moe.e_score_correction_bias = favour * 10.0
    check(moe, n_tokens)


def test_a_wrong_border_is_noticed():
    moe = random_moe(6, 6, top_k=4)
    moe.n_first -= 1
    with pytest.raises(AssertionError):
        check(moe, 40)


indices = st.lists(st.integers(0, 19), min_size=1, max_size=40)


@given(indices, st.integers(1, 19))
def test_what_every_bank_is_asked(chosen, n):
    """Own slots keep their expert; the others name one that this bank computes anyway."""
    banks = kimi_k3.split_banks(mx.array([chosen], mx.uint32), mx.array([n], mx.uint32), False)
    first, low = (bank[0].tolist() for bank in banks)
    used = {i for i in chosen if i < n}, {i - n for i in chosen if i >= n}
    for i, a, b in zip(chosen, first, low, strict=True):
        assert (a if i < n else b + n) == i
    assert set(first) == used[0] or (not used[0] and set(first) == {n - 1})
    assert set(low) == used[1] or (not used[1] and set(low) == {0})


@given(indices, st.integers(1, 19))
def test_sorted_slots_stay_sorted(chosen, n):
    slots = mx.array(sorted(chosen), mx.uint32)
    first, low = kimi_k3.split_banks(slots, mx.array([n], mx.uint32), True)
    assert first.tolist() == sorted(min(i, n - 1) for i in chosen)
    assert low.tolist() == sorted(max(i, n) - n for i in chosen)


def test_nothing_is_evaluated_on_the_way(mlx_compile):
    """Reading an index in Python inside a traced function raises."""
    moe = random_moe(7, 5, top_k=4)
    for n_tokens in (2, 40):
        x = mx.random.normal((1, n_tokens, 128))
        outputs = mx.compile(lambda x: moe(x))(x)
        assert outputs.shape == x.shape

    def reading(x: mx.array) -> mx.array:
        return x[: int(x.max().item())]

    with pytest.raises(ValueError, match="compile"):
        mx.compile(reading)(x)


NAMES = ["mm_a", "text_eps", "variant_nonk3"]


@pytest.mark.parametrize("part", [0.25, 0.9])
@pytest.mark.parametrize("name", NAMES)
def test_a_split_model_has_the_logits_of_the_whole_one(name, part):
    golden, model = read_golden(name), graded.split_model(name, part)
    ids, cache = golden.vectors["input_ids"], model.make_cache()
    parts = [ids[:, :20], *(ids[:, i : i + 1] for i in range(20, ids.shape[1]))]
    steps = mx.concatenate([model(part, cache) for part in parts], 1)
    for logits in (model(ids), steps):
        assert error(logits, golden.vectors["logits_prefill"]) < TOLERANCE


def test_taps_number_experts_through_both_banks():
    ids, seen = read_golden("mm_a").vectors["input_ids"], [{}, {}]
    for model, dump in zip(
        (float32_model("mm_a"), graded.split_model("mm_a", 0.5)), seen, strict=True
    ):
        model(ids, tap=lambda layer, name, x, dump=dump: dump.__setitem__((layer, name), x))
    assert seen[1].keys() == seen[0].keys()
    assert max(seen[1][1, "experts"].flatten().tolist()) >= 8
    for key in seen[0]:
        assert error(seen[1][key], seen[0][key]) < 1e-5, key


def test_left_padded_batch_of_a_split_model():
    golden, model = read_golden("mm_a"), graded.split_model("mm_a", 0.5)
    mask = golden.vectors["batch_attention_mask"]
    padding = (mask.shape[1] - mask.sum(1)).tolist()
    cache = [
        ArraysCache(2, left_padding=padding) if layer.is_linear else BatchKVCache(padding)
        for layer in model.layers
    ]
    logits = model(golden.vectors["batch_input_ids"], cache)
    assert error(logits * mask[..., None], golden.vectors["batch_logits"]) < TOLERANCE


def write_build(path: Path, low: dict | None) -> nn.Module:
    """A graded mm_a with another split in each layer, and the model it should load as."""
    golden = read_golden("mm_a")
    whole = build(golden.config, golden.weights)
    low_counts = [0, 0, 15]
    weights = graded.split_stacks(dict(tree_flatten(whole.parameters())), low_counts)
    overrides = {}
    if low is not None:
        weights = graded.requantized(weights, low)
        paths = {name.rpartition(".")[0] for name in weights if "switch_mlp_low" in name}
        overrides = dict.fromkeys(sorted(paths), low)
    text = {k: v for k, v in golden.config["text_config"].items() if "quant" not in k}
    config = golden.config | {"text_config": text, "quantization": FIRST | overrides}
    config = graded.with_counts(config, [16] * 3, low_counts) | {"model_file": "kimi_k3.py"}
    mx.save_safetensors(str(path / "model.safetensors"), weights)
    (path / "config.json").write_text(json.dumps(config))
    return graded.load(config, weights, overrides)


@pytest.mark.parametrize("low", [None, LOW[0], LOW[2]])
def test_mlx_lm_loads_a_build_with_two_banks(low, tmp_path):
    model = write_build(tmp_path, low)
    shutil.copy(kimi_k3.__file__, tmp_path)
    loaded, _ = load_model(tmp_path, trust_remote_code=True)
    assert type(loaded).__module__ == "custom_model"
    bank = loaded.layers[2].mlp.switch_mlp_low.gate_proj
    assert (bank.bits, bank.mode) == ((low or FIRST)["bits"], (low or FIRST)["mode"])
    assert "switch_mlp_low" not in loaded.layers[1].mlp
    ids = read_golden("mm_a").vectors["input_ids"]
    assert mx.array_equal(loaded(ids), model(ids))


def sharded_moe(low: dict, rank: int) -> nn.Module:
    """One of two ranks' half of the same layer."""
    moe = quantized(random_moe(7, 5, top_k=4), low)
    moe.shard(SimpleNamespace(rank=lambda: rank, size=lambda: 2))
    return moe


@pytest.mark.parametrize("n_tokens", [1, 40])
@pytest.mark.parametrize("low", [LOW[1], LOW[3]])
def test_shards_of_both_banks_add_up(low, n_tokens):
    rng = np.random.default_rng(1)
    z = mx.array(rng.standard_normal((1, n_tokens, 64)).astype(np.float32))
    chosen = mx.array(rng.integers(0, 12, (1, n_tokens, 4)), mx.uint32)
    whole = quantized(random_moe(7, 5, top_k=4), low).run_experts(z, chosen)
    halves = [sharded_moe(low, rank).run_experts(z, chosen) for rank in (0, 1)]
    assert error(sum(halves[1:], halves[0]), whole) < 1e-5


def test_sanitize_leaves_two_banks_alone():
    model = graded.split_model("mm_a", 0.5)
    weights = dict(tree_flatten(model.parameters()))
    assert any("switch_mlp_low" in name for name in weights)
    again = model.sanitize(weights)
    assert again.keys() == weights.keys()
    assert all(mx.array_equal(again[name], weights[name]) for name in weights)


def test_mlx_lms_quantizer_takes_both_banks():
    moe = random_moe(7, 5, top_k=4)
    predicate = float32_model("mm_a").quant_predicate
    nn.quantize(
        moe, 32, 4, class_predicate=lambda p, m: hasattr(m, "to_quantized") and predicate(p, m)
    )
    assert "scales" in moe.switch_mlp.up_proj
    assert "scales" in moe.switch_mlp_low.up_proj
    check(moe, 3)


@pytest.mark.parametrize(
    ("low", "words"),
    [
        ([0, 4], "low_expert_counts has 2 entries for 3 layers"),
        ([], "low_expert_counts has 0 entries for 3 layers"),
        ([0, 16, 4], "low_expert_counts is 16 in layer 1, not 0 to 15"),
        ([0, 4, -1], "low_expert_counts is -1 in layer 2, not 0 to 15"),
    ],
)
def test_impossible_splits_are_refused(low, words):
    with pytest.raises(ValueError, match=words):
        text_args([16] * 3, low)


def test_low_counts_without_counts_are_refused():
    with pytest.raises(ValueError, match=r"low_expert_counts needs text_config\.expert_counts"):
        text_args(None, [0, 4, 4])


def test_entries_of_dense_layers_do_not_count():
    assert text_args([0, 16, 16], [99, 4, 0]).low_experts_in(1) == 4
