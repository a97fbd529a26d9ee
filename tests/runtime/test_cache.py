"""Going back: after a trim, the model answers as if it had never seen the tokens."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import (
    ArraysCache,
    KVCache,
    can_trim_prompt_cache,
    load_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)

from kimi_k3_mlx.errors import KimiError, UsageError
from kimi_k3_mlx.runtime.cache import RewindableCache, rewindable, snapshot
from kimi_k3_mlx.runtime.load import load
from tests.runtime.one_layer import MODEL, TEXT, OneLayer, check, naive, run
from tests.tiny_k3 import TinyConfig, write_source


@pytest.fixture
def model() -> OneLayer:
    return MODEL


@pytest.fixture(scope="module")
def whole(tiny_float_source: Path) -> Any:
    return load(tiny_float_source).model


def test_the_tolerance_can_fail(model: Any) -> None:
    with pytest.raises(AssertionError):
        check(naive(model, TEXT[:1, :40]), naive(model, TEXT[:1, :39], TEXT[:1, 40:41]))


SIZES = {
    "prefill longer than the records": [70],
    "prefill in steps": [40, 30],
    "decoding": [1] * 70,
    "prefill, then decoding": [50, *[1] * 20],
    "drafts": [30, 5, 1, 9, 3, 8, 1, 1, 4, 8],
    "just full": [32, *[1] * 38],
}


@pytest.mark.parametrize("n", [1, 7, 16])
@pytest.mark.parametrize("kind", SIZES)
def test_trimmed_tokens_were_never_seen(kind: str, n: int, model: Any) -> None:
    for rows in (TEXT[:1], TEXT):
        caches = rewindable(model.make_cache(), 16)
        run(model, caches, rows[:, :70], SIZES[kind])
        assert can_trim_prompt_cache(caches)
        assert trim_prompt_cache(caches, n) == n
        tail = rows[:, 90:103]
        for sizes in ([13], [1] * 13):
            branch = copy.deepcopy(caches)
            check(run(model, branch, tail, sizes), naive(model, rows[:, : 70 - n], tail))


steps = st.lists(st.tuples(st.integers(1, 25), st.integers(0, 24)), min_size=1, max_size=6)


@settings(max_examples=25, deadline=None)
@given(steps=steps, window=st.integers(1, 20), seed=st.integers(0, 99))
def test_any_mix_of_running_and_going_back(
    steps: list[tuple[int, int]], window: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    caches, seen = rewindable(MODEL.make_cache(), window), np.zeros((2, 0), int)
    for n, back in steps:
        new = rng.integers(0, 512, (2, n))
        run(MODEL, caches, new)
        seen = np.concatenate([seen, new], axis=1)
        back = min(back, caches[0].room, n - 1)
        trim_prompt_cache(caches, back)
        seen = seen[:, : seen.shape[1] - back]
    check(run(MODEL, caches, TEXT[:2, :3]), naive(MODEL, seen, TEXT[:2, :3]))


@pytest.mark.parametrize("n", [0, 5])
def test_the_whole_model_goes_back(n: int, whole: Any) -> None:
    caches = rewindable(whole.make_cache())
    run(whole, caches, TEXT[:1, :40], [24, 1, 1, 9, 5])
    assert trim_prompt_cache(caches, n) == n
    tail = TEXT[:1, 90:95]
    check(run(whole, caches, tail), naive(whole, TEXT[:1, : 40 - n], tail))


def test_a_whole_window_can_always_be_taken_back(model: Any) -> None:
    caches = rewindable(model.make_cache(), 4)
    for i in range(40):
        run(model, caches, TEXT[:1, i : i + 1])
        assert min(4, i + 1) <= caches[0].room <= 8
        assert caches[0].kept <= 8


def test_going_back_too_far_is_refused_and_changes_nothing(model: Any) -> None:
    caches = rewindable(model.make_cache(), 4)
    run(model, caches, TEXT[:1, :30])
    with pytest.raises(KimiError, match="can take back 4 tokens, not 5"):
        trim_prompt_cache(caches, 5)
    check(run(model, caches, TEXT[:1, 30:31]), naive(model, TEXT[:1, :31]))


def test_a_window_is_one_token_at_least() -> None:
    with pytest.raises(UsageError, match="window of 0 tokens"):
        rewindable([ArraysCache(2)], 0)


def test_a_prefill_step_is_not_kept_alive(model: Any) -> None:
    """The records are copies of the last tokens' inputs, not views of all of them."""
    caches = rewindable(model.make_cache(), 2)
    mx.eval(model(mx.array(TEXT[:1].repeat(40, axis=1)), caches), [c.state for c in caches])
    mx.clear_cache()
    before = mx.get_active_memory()
    n_bytes = sum(c.nbytes for c in caches)
    caches.clear()
    assert before - mx.get_active_memory() < 1.1 * n_bytes + 2**20


def test_without_it_nothing_changes(whole: Any) -> None:
    assert {type(c) for c in whole.make_cache()} == {ArraysCache, KVCache}


# Files and copies.


@pytest.mark.parametrize("n", [0, 3])
@pytest.mark.parametrize("sizes", [[30], [20, *[1] * 10]])
def test_a_file_holds_the_past_too(sizes: list[int], n: int, model: Any, tmp_path: Path) -> None:
    caches = rewindable(model.make_cache())
    run(model, caches, TEXT[:1, :30], sizes)
    trim_prompt_cache(caches, n)
    save_prompt_cache(str(tmp_path / "cache.safetensors"), caches)
    loaded = load_prompt_cache(str(tmp_path / "cache.safetensors"))
    assert [type(c) for c in loaded] == [type(c) for c in caches]
    trim_prompt_cache(loaded, 5)
    tail = TEXT[:1, 100:103]
    check(run(model, loaded, tail), naive(model, TEXT[:1, : 25 - n], tail))


def test_an_empty_cache_can_be_saved(model: Any, tmp_path: Path) -> None:
    caches = [c for c in rewindable(model.make_cache()) if type(c) is RewindableCache]
    save_prompt_cache(str(tmp_path / "cache.safetensors"), caches)
    assert all(c.empty() for c in load_prompt_cache(str(tmp_path / "cache.safetensors")))


@pytest.mark.parametrize("n", [0, 3])
def test_a_snapshot_is_plain_and_can_go_on(n: int, whole: Any) -> None:
    caches = rewindable(whole.make_cache())
    run(whole, caches, TEXT[:1, :30])
    trim_prompt_cache(caches, n)
    kept = snapshot(whole, caches)
    assert {type(c) for c in kept} == {ArraysCache, KVCache}
    run(whole, caches, TEXT[:1, 50:60])
    tail = TEXT[:1, 100:103]
    want = naive(whole, TEXT[:1, : 30 - n], tail)
    check(run(whole, copy.deepcopy(kept), tail), want)
    again = rewindable(kept)
    with pytest.raises(KimiError, match="can take back 0 tokens"):
        trim_prompt_cache(again, 1)
    run(whole, again, TEXT[:1, 60:64])
    trim_prompt_cache(again, 4)
    check(run(whole, again, tail), want)


# Quantized latents.


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model whose latent and position-free keys divide into groups of 32."""
    path = tmp_path_factory.mktemp("grouped") / "source"
    return load(write_source(path, TinyConfig(vision=False, trunk_dtype="F32", qk_rope=32))).model


def quantized(grouped: Any, bits: int, group_size: int = 32) -> tuple[mx.array, list[Any]]:
    """Logits after 160 tokens in two chunks and four more, C18's input."""
    rows = np.tile(TEXT[:1], 2)[:, :164]
    caches = rewindable(grouped.make_cache())
    for piece in np.split(rows, [100, 160, 161, 162, 163], axis=1):
        logits = grouped(mx.array(piece), caches)
        maybe_quantize_kv_cache(caches, 0, group_size, bits)
    return logits[:, -1], caches


@pytest.mark.parametrize(("bits", "least"), [(8, 0.9999), (4, 0.99)])
def test_quantized_latents_answer_alike(bits: int, least: float, grouped: Any) -> None:
    want = naive(grouped, np.tile(TEXT[:1], 2)[:, :164])
    got, caches = quantized(grouped, bits)
    cosine = (got * want).sum() / mx.sqrt((got * got).sum() * (want * want).sum())
    assert cosine > least
    assert not mx.array_equal(got, want)
    if bits == 8:
        assert mx.array_equal(got.argmax(-1), want.argmax(-1))
    assert {c.bits for c in caches if hasattr(c, "bits")} == {bits}


def test_quantized_latents_go_back(grouped: Any) -> None:
    want, caches = quantized(grouped, 8)
    run(grouped, caches, TEXT[:1, 50:55])
    trim_prompt_cache(caches, 6)
    check(run(grouped, caches, np.tile(TEXT[:1], 2)[:, 163:164]), want)
