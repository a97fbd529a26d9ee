"""The chunked and the one-step gated delta rule against a loop in float64."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kimi_k3

TOLERANCE = 1e-5


def naive(q, k, v, log_g, beta, state):
    """KDA token by token in float64: decay the key axis, correct towards v, read out."""
    q, k, v, log_g, beta, s = (np.asarray(x, np.float64) for x in (q, k, v, log_g, beta, state))
    s, ys = s.copy(), []
    for t in range(q.shape[1]):
        s = s * np.exp(log_g[:, t])[:, :, None, :]
        missing = v[:, t] - np.einsum("bhvk,bhk->bhv", s, k[:, t])
        s = s + (beta[:, t, :, None] * missing)[..., None] * k[:, t][:, :, None, :]
        ys.append(np.einsum("bhvk,bhk->bhv", s, q[:, t]))
    return np.stack(ys, 1), s


def inputs(
    T: int, decay: str, seed: int = 0, B: int = 1, H: int = 2, D: int = 32
) -> list[mx.array]:
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((B, T, H, D)) for _ in range(3))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    beta = 1 / (1 + np.exp(-rng.standard_normal((B, T, H))))
    if decay == "typical":
        log_g = -5 / (1 + np.exp(3 - 3 * rng.standard_normal((B, T, H, D))))
    elif decay == "strongest":
        log_g = np.full((B, T, H, D), -5.0)
    elif decay == "none":
        log_g = np.zeros((B, T, H, D))
    elif decay == "both extremes":
        log_g = np.where(rng.random((B, T, H, D)) < 0.5, -5.0, -1e-4)
    elif decay == "one key":
        log_g = -1e-3 * np.abs(rng.standard_normal((B, T, H, D)))
        k, beta = np.broadcast_to(k[:, :1], k.shape), np.full((B, T, H), 0.999)
    state = rng.standard_normal((B, H, D, D))
    return [mx.array(x.astype(np.float32)) for x in (q, k, v, log_g, beta, state)]


def check(arrays, result):
    for got, want in zip(result, naive(*arrays), strict=True):
        assert got.shape == want.shape
        assert np.abs(np.array(got) - want).max() <= TOLERANCE * np.abs(want).max()


DECAYS = ["typical", "strongest", "none", "both extremes", "one key"]


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("T", [1, 2, 15, 16, 17, 64, 75, 512])
def test_chunks_equal_the_loop(T, decay):
    arrays = inputs(T, decay)
    check(arrays, kimi_k3.kda_chunks(*arrays))


@pytest.mark.slow
@pytest.mark.parametrize("decay", DECAYS)
def test_chunks_equal_the_loop_over_4096_tokens(decay):
    arrays = inputs(4096, decay, H=1)
    check(arrays, kimi_k3.kda_chunks(*arrays))


@settings(max_examples=25, deadline=None)
@given(
    T=st.integers(1, 200),
    decay=st.sampled_from(DECAYS),
    seed=st.integers(0, 2**31),
    cut=st.integers(1, 199),
)
def test_any_cut_of_the_sequence_gives_the_same(T, decay, seed, cut):
    *arrays, state = inputs(T, decay, seed, H=1)
    if cut >= T:
        return check([*arrays, state], kimi_k3.kda_chunks(*arrays, state))
    head, middle = kimi_k3.kda_chunks(*(x[:, :cut] for x in arrays), state)
    tail, last = kimi_k3.kda_chunks(*(x[:, cut:] for x in arrays), middle)
    return check([*arrays, state], (mx.concatenate([head, tail], 1), last))


def test_a_masked_token_changes_nothing():
    """Padding: beta 0 and log decay 0 leave the state to the bit."""
    *arrays, state = inputs(33, "typical")
    arrays[3], arrays[4] = arrays[3] * 0, arrays[4] * 0
    _, last = kimi_k3.kda_chunks(*arrays, state)
    assert mx.array_equal(last, state)


@pytest.mark.parametrize("decay", DECAYS)
def test_one_step_equals_the_loop(decay):
    q, k, v, log_g, beta, state = arrays = inputs(1, decay, B=3)
    check(arrays, kimi_k3.kda_step(q, k, v, mx.exp(log_g), beta, state))
