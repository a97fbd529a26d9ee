"""Kimi-K3's text model for mlx-lm, in one file that a build can carry.

- Attention Residuals instead of a residual stream, Kimi Delta Attention (KDA) in three layers
  of four, gated MLA without positions in the fourth, LatentMoE with a sigmoid router.
- Modules and parameters have the names of `mlx_lm.models.kimi_k3`: a build with one number of
  experts loads there too. `expert_counts` in the text config gives every layer its own, and
  `low_expert_counts` puts the last of them in a second bank, which may have fewer bits.
- Activations keep the embedding's dtype. Router, decay, KDA state, convolution, softmax and the
  sums over experts and blocks are float32, and float32 weights never promote the stream.
- The GPU runs mlx-lm's gated delta kernels and two kernels of this file, each with a twin in
  plain operations. The CPU computes inside a layer in float32 and runs KDA chunk by chunk.

It imports only mlx, mlx_lm, numpy and the standard library, by absolute names: mlx-lm and mlx-vlm
execute the copy in a build as a module called `custom_model`. `kimi_k3_vl` is what mlx-vlm needs.
"""

import importlib.util
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.nn.layers.distributed import shard_inplace, shard_linear, sum_gradients
from mlx_lm.models.base import BaseModelArgs, create_attention_mask, create_ssm_mask
from mlx_lm.models.cache import ArraysCache, KVCache
from mlx_lm.models.gated_delta import gated_delta_kernel, gated_delta_ops
from mlx_lm.models.mla import MultiLinear
from mlx_lm.models.pipeline import PipelineMixin
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

L2_EPS = 1e-6
MLA_NORM_EPS = 1e-6
# Fields of the text config with one value that this file computes.
SUPPORTED = {"hidden_act": "situ", "moe_router_activation_func": "sigmoid", "mla_use_nope": True}
# From this many rows on, gathers are sorted by expert, as in mlx_lm's SwitchGLU.
SORT_THRESHOLD = 64


@dataclass
class TextArgs(BaseModelArgs):
    """The `text_config` of a K3 config.json. Layer lists in it count from 1."""

    model_type: str = "kimi_linear"
    vocab_size: int = 163840
    hidden_size: int = 7168
    num_hidden_layers: int = 93
    num_attention_heads: int = 96
    intermediate_size: int = 33792
    rms_norm_eps: float = 1e-5
    linear_attn_config: dict[str, Any] | None = None
    hidden_act: str = "situ"
    activation_situ_beta: float | None = None
    activation_situ_linear_beta: float | None = None
    attn_res_block_size: int | None = None
    q_lora_rank: int | None = None
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    mla_use_nope: bool = True
    mla_use_output_gate: bool = False
    num_experts: int | None = None
    num_experts_per_token: int = 16
    num_shared_experts: int = 0
    moe_intermediate_size: int = 3072
    moe_router_activation_func: str = "sigmoid"
    moe_renormalize: bool = True
    routed_scaling_factor: float = 1.0
    first_k_dense_replace: int = 0
    moe_layer_freq: int = 1
    num_expert_group: int = 1
    topk_group: int = 1
    routed_expert_hidden_size: int | None = None
    latent_moe_use_norm: bool = False
    tie_word_embeddings: bool = False
    expert_counts: list[int] | None = None
    low_expert_counts: list[int] | None = None

    def __post_init__(self):
        for field, value in SUPPORTED.items():
            if (found := getattr(self, field)) != value:
                raise ValueError(f"text_config.{field} is {found!r}; only {value!r} is supported.")
        if self.linear_attn_config is None:
            raise ValueError("text_config.linear_attn_config is missing.")
        if self.expert_counts is not None:
            self.check_expert_counts(self.expert_counts, self.low_expert_counts)
        elif self.low_expert_counts is not None:
            raise ValueError("text_config.low_expert_counts needs text_config.expert_counts.")

    def check_expert_counts(self, counts: list[int], low_counts: list[int] | None):
        low_counts = [0] * len(counts) if low_counts is None else low_counts
        for field, entries in (("expert_counts", counts), ("low_expert_counts", low_counts)):
            if (n := self.num_hidden_layers) != len(entries):
                raise ValueError(f"text_config.{field} has {len(entries)} entries for {n} layers.")
        for layer in filter(self.is_moe, range(n)):
            n, low, top_k = counts[layer], low_counts[layer], self.num_experts_per_token
            if n < top_k:
                raise ValueError(
                    f"text_config.expert_counts keeps {n} experts in layer {layer}, "
                    f"but the router selects {top_k} per token."
                )
            if not 0 <= low < n:
                raise ValueError(
                    f"text_config.low_expert_counts is {low} in layer {layer}, not 0 to {n - 1}."
                )

    def is_kda(self, layer: int) -> bool:
        return layer + 1 in self.linear_attn_config["kda_layers"]

    def is_moe(self, layer: int) -> bool:
        return (
            bool(self.num_experts)
            and layer >= self.first_k_dense_replace
            and layer % self.moe_layer_freq == 0
        )

    def experts_in(self, layer: int) -> int:
        """Routed experts of an MoE layer."""
        return self.expert_counts[layer] if self.expert_counts else self.num_experts

    def low_experts_in(self, layer: int) -> int:
        """How many of them, the last ones, lie in the bank `switch_mlp_low`."""
        return self.low_expert_counts[layer] if self.low_expert_counts else 0


@dataclass
class ModelArgs(BaseModelArgs):
    """A whole config.json, or a bare text config."""

    text_config: TextArgs | dict
    model_type: str = "kimi_k3"

    @classmethod
    def from_dict(cls, params):
        return super().from_dict(params if "text_config" in params else {"text_config": params})

    def __post_init__(self):
        if isinstance(self.text_config, dict):
            self.text_config = TextArgs.from_dict(self.text_config)


def on_gpu() -> bool:
    return mx.metal.is_available() and mx.default_device() == mx.gpu


def working_dtype(x: mx.array) -> mx.Dtype:
    """What a sub-layer computes in: float32 on the CPU, where BLAS and quantized products are 7
    to 60 times faster than in bfloat16. The stream keeps its own dtype."""
    return x.dtype if on_gpu() else mx.float32


@partial(mx.compile, shapeless=True)
def situ(gate: mx.array, up: mx.array, beta: float, linear_beta: float | None) -> mx.array:
    """SiTU-GLU: β tanh(gate/β) σ(gate) · β' tanh(up/β'), float32 inside."""
    g, u = gate.astype(mx.float32), up.astype(mx.float32)
    if linear_beta is not None:
        u = linear_beta * mx.tanh(u / linear_beta)
    return (beta * mx.tanh(g / beta) * mx.sigmoid(g) * u).astype(gate.dtype)


@partial(mx.compile, shapeless=True)
def gated(x: mx.array, gate: mx.array) -> mx.array:
    """x · σ(gate), float32 inside, in the dtype of the gate."""
    return (x.astype(mx.float32) * mx.sigmoid(gate.astype(mx.float32))).astype(gate.dtype)


class MLP(nn.Module):
    def __init__(self, args: TextArgs, width: int):
        super().__init__()
        self.gate_proj = nn.Linear(args.hidden_size, width, bias=False)
        self.up_proj = nn.Linear(args.hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, args.hidden_size, bias=False)
        self.betas = (args.activation_situ_beta or 1.0, args.activation_situ_linear_beta)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(situ(self.gate_proj(x), self.up_proj(x), *self.betas))

    def shard(self, group):
        self.gate_proj = shard_linear(self.gate_proj, "all-to-sharded", group=group)
        self.up_proj = shard_linear(self.up_proj, "all-to-sharded", group=group)
        self.down_proj = shard_linear(self.down_proj, "sharded-to-all", group=group)


# Attention Residuals


class BlockStack:
    """The finished residual blocks of every token: `raw` [K, B, T, H] with 1/rms [K, B, T]."""

    def __init__(self, eps: float):
        self.eps = eps
        self.raw = None
        self.inv_rms = None

    def push(self, prefix: mx.array):
        raw = prefix[None]
        inv_rms = mx.rsqrt(raw.astype(mx.float32).square().mean(-1) + self.eps)
        if self.raw is not None:
            raw = mx.concatenate([self.raw, raw])
            inv_rms = mx.concatenate([self.inv_rms, inv_rms])
        self.raw, self.inv_rms = raw, inv_rms


ATTN_RES_THREADS = 512
# A thread keeps one sum per block in registers; K3 has at most eight.
ATTN_RES_MAX_BLOCKS = 16

# One threadgroup per token: score the K blocks and the prefix, mix them, normalise the mix.
ATTN_RES_SOURCE = """
    constexpr int SIMDS = THREADS / 32;
    constexpr int SUMS = K + 2;
    constexpr int HELD = (D + THREADS - 1) / THREADS;

    uint n = threadgroup_position_in_grid.y;
    uint tid = thread_position_in_threadgroup.x;
    uint lane = thread_index_in_simdgroup;
    uint simd = simdgroup_index_in_threadgroup;
    // 64 bits: eight blocks of a long prefill chunk pass 2^32 numbers.
    size_t stride = static_cast<size_t>(N) * D;
    size_t first = static_cast<size_t>(n) * D;

    float sums[SUMS] = {0.0f};
    for (uint d = tid; d < D; d += THREADS) {
      float direction = static_cast<float>(res_norm[d]) * static_cast<float>(res_proj[d]);
      for (int k = 0; k < K; ++k) {
        sums[k] += static_cast<float>(raw[k * stride + first + d]) * direction;
      }
      float p = static_cast<float>(prefix[first + d]);
      sums[K] += p * direction;
      sums[K + 1] += p * p;
    }

    threadgroup float partial[SUMS * SIMDS];
    for (int i = 0; i < SUMS; ++i) {
      float s = simd_sum(sums[i]);
      if (lane == 0) {
        partial[i * SIMDS + simd] = s;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = 0; i < SUMS; ++i) {
      sums[i] = simd_sum(lane < SIMDS ? partial[i * SIMDS + lane] : 0.0f);
    }

    float weights[K + 1];
    weights[K] = sums[K] * metal::rsqrt(sums[K + 1] / D + eps[0]);
    float top = weights[K];
    for (int k = 0; k < K; ++k) {
      weights[k] = sums[k] * inv_rms[k * N + n];
      top = metal::max(top, weights[k]);
    }
    float total = 0.0f;
    for (int k = 0; k <= K; ++k) {
      weights[k] = metal::exp(weights[k] - top);
      total += weights[k];
    }

    float held[HELD];
    float square = 0.0f;
    for (int i = 0; i < HELD; ++i) {
      uint d = tid + i * THREADS;
      if (d < D) {
        float mixed = weights[K] * static_cast<float>(prefix[first + d]);
        for (int k = 0; k < K; ++k) {
          mixed += weights[k] * static_cast<float>(raw[k * stride + first + d]);
        }
        held[i] = static_cast<float>(static_cast<InT>(mixed / total));
        square += held[i] * held[i];
      }
    }
    threadgroup float squares[SIMDS];
    square = simd_sum(square);
    if (lane == 0) {
      squares[simd] = square;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    square = simd_sum(lane < SIMDS ? squares[lane] : 0.0f);

    float scale = metal::rsqrt(square / D + eps[0]);
    for (int i = 0; i < HELD; ++i) {
      uint d = tid + i * THREADS;
      if (d < D) {
        float unit = static_cast<float>(static_cast<InT>(held[i] * scale));
        out[first + d] = static_cast<InT>(unit * static_cast<float>(norm[d]));
      }
    }
"""


@cache
def metal_kernel(name: str, inputs: str, output: str, source: str):
    names = {"input_names": inputs.split(), "output_names": [output]}
    return mx.fast.metal_kernel(name=name, source=source, **names)


@cache
def constant(value: float, n: int = 1, dtype=np.float32) -> mx.array:
    """A vector of `n` equal values, made once."""
    return mx.array(np.full(n, value, dtype))


def attn_res_metal(blocks: BlockStack, prefix, res_norm, res_proj, norm) -> mx.array:
    size = prefix.shape[-1]
    rows, n_blocks, threads = prefix.size // size, len(blocks.raw), ATTN_RES_THREADS
    inputs = "raw inv_rms prefix res_norm res_proj norm eps N"
    kernel = metal_kernel("k3_attn_res_norm", inputs, "out", ATTN_RES_SOURCE)
    weights = (res_norm, res_proj, norm)
    return kernel(
        inputs=[blocks.raw, blocks.inv_rms, prefix, *weights, constant(blocks.eps), rows],
        template=[("InT", prefix.dtype), ("K", n_blocks), ("D", size), ("THREADS", threads)],
        grid=(threads, rows, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[prefix.shape],
        output_dtypes=[prefix.dtype],
    )[0]


def attn_res_ops(blocks: BlockStack, prefix, res_norm, res_proj, norm, dtype) -> mx.array:
    direction = res_norm.astype(mx.float32) * res_proj.astype(mx.float32).reshape(-1)
    p = prefix.astype(mx.float32)
    score = (p @ direction) * mx.rsqrt(p.square().mean(-1) + blocks.eps)
    scores = (blocks.raw.astype(mx.float32) @ direction) * blocks.inv_rms
    weights = mx.softmax(mx.concatenate([scores, score[None]]), axis=0)
    mixed = (weights[:-1, ..., None] * blocks.raw).sum(0) + weights[-1, ..., None] * p
    return mx.fast.rms_norm(mixed.astype(dtype), norm, blocks.eps)


def attn_res(blocks: BlockStack | None, prefix: mx.array, res_proj, res_norm, norm) -> mx.array:
    """RMSNorm of the softmax mix of the blocks and the running prefix [B, T, H].

    A candidate's score is its product, normalised, with the direction `res_norm ⊙ res_proj`; what
    is mixed are the raw candidates. Without blocks, the mix is the prefix. In `working_dtype`.
    """
    dtype = working_dtype(prefix)
    if blocks is None or blocks.raw is None:
        return norm(prefix.astype(dtype))
    weights = (res_norm.weight, res_proj.weight, norm.weight)
    if on_gpu() and len(blocks.raw) <= ATTN_RES_MAX_BLOCKS:
        return attn_res_metal(blocks, prefix, *weights)
    return attn_res_ops(blocks, prefix, *weights, dtype)


# Kimi Delta Attention


@partial(mx.compile, shapeless=True)
def conv_silu(taps: list[mx.array], weights: list[mx.array]) -> mx.array:
    """SiLU of a causal depthwise convolution; taps[i] [B, T, C] goes with weights[i] [C]."""
    first, *rest = (tap.astype(mx.float32) * w for tap, w in zip(taps, weights, strict=True))
    y = sum(rest, first)
    return (y * mx.sigmoid(y)).astype(taps[0].dtype)


class ShortConv(nn.Module):
    def __init__(self, channels: int, kernel_size: int):
        super().__init__()
        self.conv = nn.Conv1d(channels, channels, kernel_size, groups=channels, bias=False)

    def __call__(
        self, x: mx.array, state: mx.array | None, lengths: mx.array | None
    ) -> tuple[mx.array, mx.array]:
        """x [B, T, C], the last inputs [B, taps - 1, C] → output and new last inputs."""
        B, T, C = x.shape
        history = self.conv.weight.shape[1] - 1
        if state is None:
            state = mx.zeros((B, history, C), x.dtype)
        padded = mx.concatenate([state, x], axis=1)
        weights = [self.conv.weight[:, i, 0] for i in range(history + 1)]
        y = conv_silu([padded[:, i : i + T] for i in range(history + 1)], weights)
        if lengths is not None:
            ends = mx.clip(lengths, 0, T)[:, None] + mx.arange(history)
            return y, mx.take_along_axis(padded, ends[..., None], axis=1)
        state = padded[:, -history:]
        return y, mx.contiguous(state) if T > 1 else state


@partial(mx.compile, shapeless=True)
def decay(a, A_log, dt_bias, lower_bound: float | None, log: bool) -> mx.array:
    """KDA's decay g [B, T, H, D], or λ = log g, in float32.

    From a [B, T, H, D], A_log [H, 1] and dt_bias [H, D].
    """
    rate, x = mx.exp(A_log.astype(mx.float32)), a.astype(mx.float32) + dt_bias
    log_g = -rate * nn.softplus(x) if lower_bound is None else lower_bound * mx.sigmoid(rate * x)
    return log_g if log else mx.exp(log_g)


@partial(mx.compile, shapeless=True)
def sigmoid32(x: mx.array) -> mx.array:
    return mx.sigmoid(x.astype(mx.float32))


@mx.compile
def kda_step(q, k, v, g, beta, state) -> tuple[mx.array, mx.array]:
    """One token of the gated delta rule: shapes as in `kda_chunks` with T = 1, g = exp(log_g)."""
    q, k, g = (x.swapaxes(1, 2) for x in (q, k, g))
    v, beta = v.swapaxes(1, 2).swapaxes(2, 3), beta.swapaxes(1, 2)[..., None]
    state = state * g
    error = beta * (v - (state * k).sum(-1, keepdims=True))
    state = state + error * k
    return (state * q).sum(-1)[:, None], state


CHUNK = 16
# Beyond this decay a step, exp of half a chunk leaves the range of float32.
CHUNK_BOUND = -5.0
# Inputs that neither decay a state nor write to it. σ and softplus are 0 long before infinity.
PADDING = (0.0, -1e30, -1e30)


def kda_chunks(q, k, v, log_g, beta, state) -> tuple[mx.array, mx.array]:
    """The gated delta rule of KDA over chunks of 16 tokens, in matrix products.

    q, k, log_g [B, T, H, K], v [B, T, H, V], beta [B, T, H], state [B, H, V, K], all float32;
    log_g ≥ CHUNK_BOUND. Returns y [B, T, H, V] and the state. WY form of the delta rule as in
    Kimi Linear (arXiv 2510.26692, §3); exponents refer to the middle of the chunk, so that they
    stay within ±40.
    """
    B, T, H, _ = q.shape
    n = -(-T // CHUNK)

    def split(x):
        x = mx.pad(x, [(0, 0), (0, n * CHUNK - T)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(B, n, CHUNK, H, -1).transpose(0, 3, 1, 2, 4)

    q, k, v, log_g, beta = (split(x) for x in (q, k, v, log_g, beta[..., None]))
    total = mx.cumsum(log_g, axis=-2)
    middle, last = total[..., CHUNK // 2 - 1 : CHUNK // 2, :], total[..., -1:, :]
    grow = mx.exp(total - middle)
    start, end = mx.exp(middle), mx.exp(last - middle)

    k_in, k_out, q_in = k * grow, k / grow, q * grow
    keys = k_out.swapaxes(-1, -2)
    lower = mx.tri(CHUNK, CHUNK, -1) * (beta * (k_in @ keys))
    solve = mx.linalg.tri_inv(mx.eye(CHUNK) + lower)
    values, erase = solve @ (beta * v), solve @ (beta * k_in * start)
    scores = mx.tri(CHUNK) * (q_in @ keys)
    q_in, keys = q_in * start, (k_out * end).swapaxes(-1, -2)
    keep = mx.exp(last).swapaxes(-1, -2)

    ys, s = [], state.swapaxes(-1, -2)
    for i in range(n):
        written = values[:, :, i] - erase[:, :, i] @ s
        ys.append(q_in[:, :, i] @ s + scores[:, :, i] @ written)
        s = keep[:, :, i] * s + keys[:, :, i] @ written
    y = mx.stack(ys, axis=2).reshape(B, H, n * CHUNK, -1)[:, :, :T]
    return y.swapaxes(1, 2), s.swapaxes(-1, -2)


class DeltaAttention(nn.Module):
    def __init__(self, args: TextArgs):
        super().__init__()
        config = args.linear_attn_config
        self.num_heads, self.head_dim = config["num_heads"], config["head_dim"]
        self.lower_bound = config.get("gate_lower_bound")
        self.chunks = self.lower_bound is not None and self.lower_bound >= CHUNK_BOUND
        self.eps = args.rms_norm_eps
        hidden, width = args.hidden_size, self.num_heads * self.head_dim

        self.qkv_proj = nn.Linear(hidden, 3 * width, bias=False)
        self.qkv_conv = ShortConv(3 * width, config["short_conv_kernel_size"])
        self.f_a_proj = nn.Linear(hidden, self.head_dim, bias=False)
        self.f_b_proj = nn.Linear(self.head_dim, width, bias=False)
        self.b_proj = nn.Linear(hidden, self.num_heads, bias=False)
        if config.get("use_full_rank_gate", False):
            self.g_proj = nn.Linear(hidden, width, bias=False)
        else:
            self.g_a_proj = nn.Linear(hidden, self.head_dim, bias=False)
            self.g_b_proj = nn.Linear(self.head_dim, width, bias=False)
        self.A_log = mx.zeros((self.num_heads,))
        self.dt_bias = mx.zeros((width,))
        self.o_norm = nn.RMSNorm(self.head_dim, eps=args.rms_norm_eps)
        self.o_proj = nn.Linear(width, hidden, bias=False)

    def __call__(self, x: mx.array, mask=None, cache=None) -> mx.array:
        """x [B, T, hidden]; mask [B, T] is false at padding."""
        qkv, a, b = self.qkv_proj(x), self.f_b_proj(self.f_a_proj(x)), self.b_proj(x)
        if mask is not None:
            filled = zip((qkv, a, b), PADDING, strict=True)
            qkv, a, b = (mx.where(mask[..., None], z, padding) for z, padding in filled)
        if hasattr(cache, "run"):
            # A cache that can go back keeps the inputs, and may run them again.
            y = cache.run(self.recur, qkv, a, b)
        elif cache is None:
            y, *_ = self.recur(qkv, a, b)
        else:
            y, cache[0], cache[1] = self.recur(qkv, a, b, *cache, cache.lengths)
            cache.advance(x.shape[1])
        # The readout scale D^-½ that q lacks only acts through this eps: see recur.
        y = mx.fast.rms_norm(y, self.o_norm.weight, self.eps * self.head_dim)
        gate = self.g_proj(x) if "g_proj" in self else self.g_b_proj(self.g_a_proj(x))
        return self.o_proj(gated(y.flatten(2), gate))

    def recur(self, qkv, a, b, conv_state=None, state=None, lengths=None) -> tuple[mx.array, ...]:
        """√D times KDA's output [B, T, H, D] in float32, the convolution's new last inputs, and the
        new state [B, H, D, D], from the projections of q, k and v, of the decay and of beta."""
        qkv, conv_state = self.qkv_conv(qkv, conv_state, lengths)
        heads = (*a.shape[:2], self.num_heads, self.head_dim)
        qkv = qkv.reshape(*heads[:2], 3, *heads[2:])
        # x/‖x‖ = rms_norm(x)·D^-½, whose eps is on the mean of squares, not on their sum.
        unit = constant(self.head_dim**-0.5, self.head_dim)
        qk = mx.fast.rms_norm(qkv[:, :, :2], unit, L2_EPS / self.head_dim)
        q, k, v = qk[:, :, 0], qk[:, :, 1], qkv[:, :, 2]
        rule = kda_step if heads[1] == 1 else gated_delta_ops
        if on_gpu() and self.head_dim % 32 == 0:
            rule = gated_delta_kernel
        elif self.chunks and heads[1] > 1 and not on_gpu():
            rule = kda_chunks
        decay_args = (a.reshape(heads), self.A_log[:, None], self.dt_bias.reshape(heads[2:]))
        g = decay(*decay_args, self.lower_bound, rule is kda_chunks)
        if state is None:
            state = mx.zeros((heads[0], *heads[2:], heads[3]), mx.float32)
        y, state = rule(q, k, v, g, sigmoid32(b), state)
        return y, conv_state, state

    def shard(self, group):
        self.qkv_proj = shard_linear(self.qkv_proj, "all-to-sharded", segments=3, group=group)
        for name in ("f_b_proj", "b_proj", "g_proj" if "g_proj" in self else "g_b_proj"):
            self[name] = shard_linear(self[name], "all-to-sharded", group=group)
        self.o_proj = shard_linear(self.o_proj, "sharded-to-all", group=group)
        axes = {"qkv_conv.conv.weight": (0, 3), "A_log": 0, "dt_bias": 0}
        shard_inplace(self, lambda path, _: axes.get(path), group=group)
        self.num_heads //= group.size()


# Multi-head latent attention

QUERY_BLOCK = 256


class LatentAttention(nn.Module):
    def __init__(self, args: TextArgs):
        super().__init__()
        self.num_heads = args.num_attention_heads
        self.nope_dim = args.qk_nope_head_dim
        self.kv_rank = args.kv_lora_rank
        head_dim = args.qk_nope_head_dim + args.qk_rope_head_dim
        self.scale = head_dim**-0.5
        hidden, rank = args.hidden_size, args.q_lora_rank
        width = self.num_heads * args.v_head_dim

        if rank is None:
            self.q_proj = nn.Linear(hidden, self.num_heads * head_dim, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden, rank, bias=False)
            self.q_a_layernorm = nn.RMSNorm(rank, eps=MLA_NORM_EPS)
            self.q_b_proj = nn.Linear(rank, self.num_heads * head_dim, bias=False)
        latent = self.kv_rank + args.qk_rope_head_dim
        self.kv_a_proj_with_mqa = nn.Linear(hidden, latent, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(self.kv_rank, eps=MLA_NORM_EPS)
        self.embed_q = MultiLinear(self.nope_dim, self.kv_rank, self.num_heads)
        self.unembed_out = MultiLinear(self.kv_rank, args.v_head_dim, self.num_heads)
        self.o_proj = nn.Linear(width, hidden, bias=False)
        if args.mla_use_output_gate:
            self.g_proj = nn.Linear(hidden, width, bias=False)

    def __call__(self, x: mx.array, mask=None, cache=None) -> mx.array:
        """x [B, T, hidden]; mask is boolean, broadcast to [B, 1, T, tokens in the cache]."""
        B, T, _ = x.shape
        q_nope, q_pe = mx.split(self.queries(x), [self.nope_dim], axis=-1)
        latent, k_pe = mx.split(self.kv_a_proj_with_mqa(x)[:, None], [self.kv_rank], axis=-1)
        latent = self.kv_a_layernorm(latent)
        if cache is not None:
            latent, k_pe = cache.update_and_fetch(latent, k_pe)
        if hasattr(cache, "bits"):
            packing = {"group_size": cache.group_size, "bits": cache.bits}
            latent, k_pe = (mx.dequantize(*packed, **packing) for packed in (latent, k_pe))

        # One query attends in the latent space; many are cheaper with keys and values per head.
        if T == 1:
            y = self.attend(self.embed_q(q_nope), q_pe, latent, k_pe, latent, mask)
            y = self.unembed_out(y)
        else:
            keys, values = self.embed_q(latent, transpose=False), self.unembed_out(latent)
            y = self.attend_in_blocks(q_nope, q_pe, keys, k_pe, values, mask)
        y = y.swapaxes(1, 2).reshape(B, T, -1)
        return self.o_proj(gated(y, self.g_proj(x)) if "g_proj" in self else y)

    def attend(self, q, q_pe, keys, k_pe, values, mask) -> mx.array:
        bias = (q_pe * self.scale) @ k_pe.swapaxes(-1, -2)
        if mask is not None:
            bias = mx.where(mask, bias, mx.finfo(bias.dtype).min)
        return mx.fast.scaled_dot_product_attention(q, keys, values, scale=self.scale, mask=bias)

    def attend_in_blocks(self, q, q_pe, keys, k_pe, values, mask) -> mx.array:
        """A block of queries at a time, with no key behind its last query: the scores of all
        heads for a whole prefill step would take gigabytes."""
        T, end = q.shape[2], keys.shape[2]
        outputs = []
        for first in range(0, T, QUERY_BLOCK):
            last = min(first + QUERY_BLOCK, T)
            rows, seen = slice(first, last), slice(0, end - T + last)
            allowed = mask[..., rows, seen] if mask is not None else None
            part = (keys[:, :, seen], k_pe[:, :, seen], values[:, :, seen], allowed)
            outputs.append(self.attend(q[:, :, rows], q_pe[:, :, rows], *part))
        return mx.concatenate(outputs, axis=2)

    def queries(self, x: mx.array) -> mx.array:
        """[B, heads, T, nope + pe]"""
        low_rank = "q_a_proj" in self
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) if low_rank else self.q_proj(x)
        return q.reshape(*x.shape[:2], self.num_heads, -1).swapaxes(1, 2)

    def shard(self, group):
        self.num_heads //= group.size()
        for name in ("q_proj", "q_b_proj", "g_proj"):
            if name in self:
                self[name] = shard_linear(self[name], "all-to-sharded", group=group)
        self.o_proj = shard_linear(self.o_proj, "sharded-to-all", group=group)
        for bank in (self.embed_q, self.unembed_out):
            shard_inplace(bank, lambda *_: 0, group=group)


# LatentMoE

ROUTER_MAX_ROWS = 8

# One simdgroup per expert and token: σ of a dot product, accumulated and written in float32.
ROUTER_SOURCE = """
    uint lane = thread_position_in_grid.x;
    uint expert = thread_position_in_grid.y;
    uint n = thread_position_in_grid.z;

    float sum = 0.0f;
    for (uint d = lane; d < D; d += 32) {
      sum += static_cast<float>(x[n * D + d]) * static_cast<float>(weight[expert * D + d]);
    }
    sum = simd_sum(sum);
    if (lane == 0) {
      scores[n * E + expert] = 1.0f / (1.0f + metal::exp(-sum));
    }
"""


def router_scores_metal(x: mx.array, weight: mx.array) -> mx.array:
    experts, size = weight.shape
    rows = x.size // size
    return metal_kernel("k3_router_scores", "x weight", "scores", ROUTER_SOURCE)(
        inputs=[x, weight],
        template=[("D", size), ("E", experts)],
        grid=(32, experts, rows),
        threadgroup=(32, 8, 1),
        output_shapes=[(*x.shape[:-1], experts)],
        output_dtypes=[mx.float32],
    )[0]


def router_scores(gate: nn.Module, x: mx.array) -> mx.array:
    """σ(x W^T) [B, T, experts] in float32: both operands are widened before the product."""
    plain = isinstance(gate, nn.Linear)
    if plain and on_gpu() and x.size // x.shape[-1] <= ROUTER_MAX_ROWS:
        return router_scores_metal(x, gate.weight)
    x = x.astype(mx.float32)
    return mx.sigmoid(x @ gate.weight.astype(mx.float32).T if plain else gate(x))


@mx.compile
def select_experts(scores, bias, top_k, groups, top_groups, renormalize, scaling):
    """Indices and weights [..., top_k] in no order, from scores [..., E]. The bias only chooses.

    With expert groups, the `top_groups` with the largest sums of their two best stay.
    """
    choice = scores + bias
    if groups > top_groups:
        grouped = choice.reshape(*choice.shape[:-1], groups, -1)
        best = mx.topk(grouped, 2, axis=-1).sum(-1)
        out = mx.argpartition(best, kth=groups - top_groups - 1, axis=-1)
        out = mx.expand_dims(out[..., : groups - top_groups], -1)
        grouped = mx.put_along_axis(grouped, out, mx.array(-mx.inf), axis=-2)
        choice = grouped.reshape(choice.shape)
    indices = mx.argpartition(-choice, kth=top_k - 1, axis=-1)[..., :top_k]
    weights = mx.take_along_axis(scores, indices, axis=-1)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return indices, weights * scaling


def gather(bank: nn.Module, x: mx.array, experts: mx.array, rows=None, ordered=False) -> mx.array:
    """x[rows] @ bank[experts]^T for x [n, 1, in]; `ordered` says that `experts` ascend. Without
    `rows`, mlx pairs x and `experts` by broadcasting and builds the row indices anew."""
    pairs = {"lhs_indices": rows, "rhs_indices": experts, "sorted_indices": ordered}
    if not isinstance(bank, QuantizedSwitchLinear):
        return mx.gather_mm(x, bank.weight.swapaxes(-1, -2), **pairs)
    packed = (bank.weight, bank.scales, bank.get("biases"))
    quantization = {"group_size": bank.group_size, "bits": bank.bits, "mode": bank.mode}
    return mx.gather_qmm(x, *packed, **pairs, **quantization)


@lru_cache(maxsize=SORT_THRESHOLD)
def row_indices(rows: int, top_k: int) -> tuple[mx.array, mx.array]:
    """For a [rows, top_k] gather: the input row of every slot, and the slot's own number."""
    slots = np.arange(rows * top_k, dtype=np.uint32).reshape(rows, top_k)
    return mx.array(slots // top_k), mx.array(slots)


class Experts(nn.Module):
    """A bank of routed experts; every expert is down(SiTU(gate(z), up(z)))."""

    def __init__(self, args: TextArgs, size: int, num_experts: int):
        super().__init__()
        width = args.moe_intermediate_size
        self.gate_proj = SwitchLinear(size, width, num_experts, bias=False)
        self.up_proj = SwitchLinear(size, width, num_experts, bias=False)
        self.down_proj = SwitchLinear(width, size, num_experts, bias=False)
        self.betas = (args.activation_situ_beta or 1.0, args.activation_situ_linear_beta)

    def __call__(self, rows, chosen, inputs=None, slots=None, ordered=False) -> mx.array:
        """Expert `chosen` of every slot, for rows [n, 1, size]; see `gather` and `row_indices`."""
        gate = gather(self.gate_proj, rows, chosen, inputs, ordered)
        up = gather(self.up_proj, rows, chosen, inputs, ordered)
        h = situ(gate, up, *self.betas)
        return gather(self.down_proj, h.reshape(-1, 1, h.shape[-1]), chosen, slots, ordered)


@partial(mx.compile, shapeless=True)
def split_banks(chosen, n, ordered: bool) -> tuple[mx.array, mx.array]:
    """Every slot's expert in the first bank, of n experts, and in the low bank behind it.

    Where the slot's own expert lies in the other bank, it is one that its row reads anyway, which
    costs no bytes, or for `ordered` slots the one at the border: they still ascend.
    """
    least = n if ordered else chosen.min(-1, keepdims=True)
    most = n if ordered else chosen.max(-1, keepdims=True)
    first = mx.where(chosen < n, chosen, mx.minimum(least, n - 1))
    low = mx.where(chosen >= n, chosen, mx.maximum(most, n)) - n
    return first, low


@partial(mx.compile, shapeless=True)
def join_banks(chosen, n, first, low) -> mx.array:
    return mx.where(chosen < n, first, low)


@partial(mx.compile, shapeless=True)
def scaled32(y: mx.array, weights: mx.array) -> mx.array:
    return y.astype(mx.float32) * weights[..., None]


class SparseMoE(nn.Module):
    """LatentMoE: routed experts work in a latent space, shared experts on the hidden state."""

    def __init__(self, args: TextArgs, layer: int):
        super().__init__()
        num_experts, n_low = args.experts_in(layer), args.low_experts_in(layer)
        hidden, latent = args.hidden_size, args.routed_expert_hidden_size
        self.routing = (
            args.num_experts_per_token,
            args.num_expert_group,
            args.topk_group,
            args.moe_renormalize,
            args.routed_scaling_factor,
        )
        self.gate = nn.Linear(hidden, num_experts, bias=False)
        self.e_score_correction_bias = mx.zeros((num_experts,))
        self.n_first = num_experts - n_low
        self.switch_mlp = Experts(args, latent or hidden, self.n_first)
        if n_low:
            self.switch_mlp_low = Experts(args, latent or hidden, n_low)
        if latent is not None:
            self.routed_expert_down_proj = nn.Linear(hidden, latent, bias=False)
            self.routed_expert_up_proj = nn.Linear(latent, hidden, bias=False)
            if args.latent_moe_use_norm:
                self.routed_expert_norm = nn.RMSNorm(latent, eps=args.rms_norm_eps)
        if args.num_shared_experts:
            self.shared_experts = MLP(args, args.moe_intermediate_size * args.num_shared_experts)
        self.sharding_group = None

    def __call__(self, x: mx.array, tap=None) -> mx.array:
        """Taps: `router_scores` [B, T, E]; `experts`, `router_weights` [B, T, k]; and, before it
        is weighted, `expert_output` [B, T, k, latent]."""
        if self.sharding_group is not None:
            x = sum_gradients(self.sharding_group)(x)
        scores = router_scores(self.gate, x)
        indices, weights = select_experts(scores, self.e_score_correction_bias, *self.routing)
        z = self.routed_expert_down_proj(x) if "routed_expert_down_proj" in self else x
        outputs = self.run_experts(z, indices)
        if tap is not None:
            tap("router_scores", scores)
            tap("experts", indices)
            tap("router_weights", weights)
            tap("expert_output", outputs)
        y = scaled32(outputs, weights).sum(-2).astype(x.dtype)
        shared = self.shared_experts(x) if "shared_experts" in self else None
        if self.sharding_group is not None:
            y, shared = self.all_sum(y, shared)
        if "routed_expert_norm" in self:
            y = self.routed_expert_norm(y)
        if "routed_expert_up_proj" in self:
            y = self.routed_expert_up_proj(y)
        return y if shared is None else y + shared

    def run_experts(self, z: mx.array, indices: mx.array) -> mx.array:
        """z [B, T, size], indices [B, T, top_k] → outputs [B, T, top_k, size]"""
        top_k = indices.shape[-1]
        rows = z.reshape(-1, 1, z.shape[-1])
        if indices.size < SORT_THRESHOLD:
            y = self.run_banks(rows, indices.reshape(-1, top_k), *row_indices(len(rows), top_k))
        else:
            order = mx.argsort(indices.flatten())
            chosen = indices.flatten()[order]
            y = self.run_banks(rows[order // top_k], chosen, ordered=True)[mx.argsort(order)]
        return y.reshape(*indices.shape, -1)

    def run_banks(self, rows, chosen, inputs=None, slots=None, ordered=False) -> mx.array:
        """With a low bank, both compute every slot, and a slot keeps what its own bank says."""
        if "switch_mlp_low" not in self:
            return self.switch_mlp(rows, chosen, inputs, slots, ordered)
        n = constant(self.n_first, dtype=np.uint32)
        first, low = split_banks(chosen, n, ordered)
        first = self.switch_mlp(rows, first, inputs, slots, ordered)
        low = self.switch_mlp_low(rows, low, inputs, slots, ordered)
        return join_banks(chosen[..., None, None], n, first, low)

    def all_sum(self, y, shared):
        """Adds the ranks' partial sums, in one exchange for both."""
        if shared is None:
            return mx.distributed.all_sum(y, group=self.sharding_group), None
        both = mx.concatenate([y, shared], axis=-1)
        both = mx.distributed.all_sum(both, group=self.sharding_group)
        return mx.split(both, [y.shape[-1]], axis=-1)

    def shard(self, group):
        self.sharding_group = group
        for name in ("switch_mlp", "switch_mlp_low", "shared_experts"):
            if (mlp := self.get(name)) is not None:
                shard_inplace(mlp.gate_proj, "all-to-sharded", group=group)
                shard_inplace(mlp.up_proj, "all-to-sharded", group=group)
                shard_inplace(mlp.down_proj, "sharded-to-all", group=group)


# The model


class DecoderLayer(nn.Module):
    def __init__(self, args: TextArgs, layer: int):
        super().__init__()
        self.is_linear = args.is_kda(layer)
        self.self_attn = DeltaAttention(args) if self.is_linear else LatentAttention(args)
        moe, width = args.is_moe(layer), args.intermediate_size
        self.mlp = SparseMoE(args, layer) if moe else MLP(args, width)
        hidden, eps = args.hidden_size, args.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.starts_block = False
        if args.attn_res_block_size is not None:
            self.starts_block = layer % args.attn_res_block_size == 0
            self.self_attention_res_proj = nn.Linear(hidden, 1, bias=False)
            self.self_attention_res_norm = nn.RMSNorm(hidden, eps=eps)
            self.mlp_res_proj = nn.Linear(hidden, 1, bias=False)
            self.mlp_res_norm = nn.RMSNorm(hidden, eps=eps)

    def __call__(self, prefix: mx.array, blocks=None, mask=None, cache=None, tap=None) -> mx.array:
        """The prefix [B, T, H] after this layer (tap `hidden`). A layer that starts a block pushes
        the prefix before it (tap `block`). Without Attention Residuals `blocks` is None."""
        x = self.mix(blocks, prefix, "self_attention", self.input_layernorm)
        y = self.self_attn(x, mask, cache)
        if self.starts_block:
            blocks.push(prefix)
            if tap is not None:
                tap("block", prefix)
            prefix = y.astype(prefix.dtype)
        else:
            prefix = prefix + y.astype(prefix.dtype)
        x = self.mix(blocks, prefix, "mlp", self.post_attention_layernorm)
        y = self.mlp(x, tap) if "gate" in self.mlp else self.mlp(x)
        prefix = prefix + y.astype(prefix.dtype)
        if tap is not None:
            tap("hidden", prefix)
        return prefix

    def mix(self, blocks: BlockStack | None, prefix: mx.array, which: str, norm) -> mx.array:
        res = (self.get(f"{which}_res_proj"), self.get(f"{which}_res_norm"))
        return attn_res(blocks, prefix, *res, norm)


class TextModel(PipelineMixin, nn.Module):
    def __init__(self, args: TextArgs):
        super().__init__()
        self.args = args
        hidden, eps = args.hidden_size, args.rms_norm_eps
        self.embed_tokens = nn.Embedding(args.vocab_size, hidden)
        self.layers = [DecoderLayer(args, i) for i in range(args.num_hidden_layers)]
        self.norm = nn.RMSNorm(hidden, eps=eps)
        if args.attn_res_block_size is not None:
            self.output_attn_res_proj = nn.Linear(hidden, 1, bias=False)
            self.output_attn_res_norm = nn.RMSNorm(hidden, eps=eps)

    def __call__(self, inputs: mx.array, cache=None, tap=None, input_embeddings=None) -> mx.array:
        h = self.embed_tokens(inputs) if input_embeddings is None else input_embeddings
        blocks = BlockStack(self.args.rms_norm_eps) if self.args.attn_res_block_size else None
        if self.pipeline_rank < self.pipeline_size - 1:
            h = self.receive(h, blocks)
        layers = self.pipeline_layers
        caches = cache or [None] * len(layers)
        masks = self.make_masks(h, caches)
        for i, layer in enumerate(layers):
            layer_tap = partial(tap, self.start_idx + i) if tap is not None else None
            h = layer(h, blocks, masks[layer.is_linear], caches[i], layer_tap)
        if self.pipeline_rank > 0:
            h = self.send(h, blocks, caches)
        else:
            res = (self.get("output_attn_res_proj"), self.get("output_attn_res_norm"))
            h = attn_res(blocks, h, *res, self.norm).astype(h.dtype)
        if self.pipeline_size > 1:
            h = mx.distributed.all_gather(h)[: h.shape[0]]
        return h

    def make_masks(self, h: mx.array, caches: list[Any]) -> dict[bool, mx.array | None]:
        """One mask for all KDA layers (key True) and one for all MLA layers (False)."""
        masks = {}
        for layer, layer_cache in zip(self.pipeline_layers, caches, strict=True):
            if layer.is_linear and True not in masks:
                masks[True] = create_ssm_mask(h, layer_cache)
            elif not layer.is_linear and False not in masks:
                masks[False] = create_attention_mask(h, layer_cache, return_array=True)
        return masks

    def receive(self, h: mx.array, blocks: BlockStack | None) -> mx.array:
        """The prefix from the rank with the layers before ours; the open blocks travel with it."""
        n_blocks = 0 if blocks is None else -(-self.start_idx // self.args.attn_res_block_size)
        packed = mx.distributed.recv((n_blocks + 1, *h.shape), h.dtype, self.pipeline_rank + 1)
        for block in range(n_blocks):
            blocks.push(packed[block])
        return packed[-1]

    def send(self, h: mx.array, blocks: BlockStack | None, caches: list[Any]) -> mx.array:
        packed = h[None] if blocks is None else mx.concatenate([blocks.raw, h[None]])
        h = mx.distributed.send(packed, self.pipeline_rank - 1)
        # Nothing else of this rank depends on the message: evaluating its cache must send it.
        last = caches[-1]
        if hasattr(last, "keys"):
            last.keys = mx.depends(last.keys, h)
        elif last is not None:
            last[0] = mx.depends(last[0], h)
        return h[-1]


class LanguageModel(nn.Module):
    def __init__(self, args: TextArgs):
        super().__init__()
        self.model = TextModel(args)
        if not args.tie_word_embeddings:
            self.lm_head = nn.Linear(args.hidden_size, args.vocab_size, bias=False)

    def __call__(self, inputs: mx.array, cache=None, tap=None, input_embeddings=None) -> mx.array:
        h = self.model(inputs, cache, tap, input_embeddings)
        head = self.lm_head if "lm_head" in self else self.model.embed_tokens.as_linear
        return head(h.astype(working_dtype(h))).astype(h.dtype)


class Model(nn.Module):
    def __new__(cls, args=None):
        """mlx-vlm brings a config of `kimi_k3_vl`, and gets the model that sees images."""
        sees = hasattr(args, "vision_config")
        return vision_package().Model(args) if sees else super().__new__(cls)

    def __init__(self, args: ModelArgs):
        super().__init__()
        self.args = args
        self.model_type = args.model_type
        self.language_model = LanguageModel(args.text_config)

    def __call__(self, inputs: mx.array, cache=None, tap=None, input_embeddings=None) -> mx.array:
        """Logits [B, T, vocabulary] of token ids [B, T], which embeddings [B, T, H] may replace.

        `tap(layer, name, array)` sees what DecoderLayer and SparseMoE name in their docstrings.
        """
        return self.language_model(inputs, cache, tap, input_embeddings)

    @property
    def model(self) -> TextModel:
        return self.language_model.model

    @property
    def layers(self) -> list[DecoderLayer]:
        return self.model.pipeline_layers

    def make_cache(self) -> list[Any]:
        return [ArraysCache(size=2) if layer.is_linear else KVCache() for layer in self.layers]

    def shard(self, group: mx.distributed.Group | None = None):
        """Splits heads, experts' widths and dense widths over the ranks of the group."""
        group = group or mx.distributed.init()
        if group.size() == 1:
            return
        for layer in self.layers:
            layer.self_attn.shard(group)
            layer.mlp.shard(group)

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Weights under build names, from a build or from a source checkpoint."""
        return sanitize(self.args.text_config, weights)

    @property
    def cast_predicate(self) -> Callable[[str], bool]:
        """What a change of dtype may touch: all but the tensors that K3 ships in float32."""
        fixed = ("A_log", "dt_bias", "e_score_correction_bias", "conv.weight", "o_norm.weight")
        return lambda path: not path.endswith(fixed)

    @property
    def quant_predicate(self) -> Callable[[str, nn.Module], bool | dict]:
        """For mlx_lm.convert -q: a precise router, and exact residual mixing."""
        router = {"group_size": 64, "bits": 8}
        return lambda path, _: router if path.endswith("mlp.gate") else "res_proj" not in path


@cache
def vision_package():
    """`kimi_k3_vl` beside this file, else the installed one. A build's copy gets a name of its own,
    for what is installed may be another version."""
    folder = Path(__file__).with_name("kimi_k3_vl")
    if __name__ == "kimi_k3" or not folder.is_dir():
        return importlib.import_module("kimi_k3_vl")
    name = f"kimi_k3_vl_{hash(folder) % 2**32:x}"
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def __getattr__(name: str):
    """What mlx-vlm asks of a model file besides Model."""
    if name in ("ModelConfig", "TextConfig", "VisionConfig"):
        return getattr(vision_package(), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# Names of a source checkpoint or another port, and what stands for them in a build.
RENAMES = [
    (re.compile(r"\.block_sparse_moe\.(gate\.)?e_score"), ".mlp.e_score"),
    (re.compile(r"\.block_sparse_moe\."), ".mlp."),
    (re.compile(r"\.([qkv])_conv1d\.weight$"), r".\1_conv.conv.weight"),
    (re.compile(r"_res\.(proj|norm)_weight$"), r"_res_\1.weight"),
]
EXPERT = re.compile(r"(.*\.mlp)\.experts\.(\d+)\.(w[123])\.(weight_packed|weight_scale|weight)$")
PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
PARTS = {"weight_packed": "weight", "weight_scale": "scales", "weight": "weight"}
OUTSIDE = ("vision_tower", "vision_model", "mm_projector", "multi_modal_projector")


def sanitize(args: TextArgs, weights: dict[str, mx.array]) -> dict[str, mx.array]:
    renamed, banks = {}, {}
    for name, w in weights.items():
        name = name.removeprefix("language_model.")
        if name.startswith((*OUTSIDE, "mtp", "model.mtp")):
            continue
        for pattern, replacement in RENAMES:
            name = pattern.sub(replacement, name)
        if match := EXPERT.match(name):
            prefix, expert, matrix, part = match.groups()
            bank = f"{prefix}.switch_mlp.{PROJECTIONS[matrix]}.{PARTS[part]}"
            banks.setdefault(bank, {})[int(expert)] = w
        else:
            renamed[name] = w
    for bank, experts in banks.items():
        stacked = mx.stack([experts[i] for i in sorted(experts)])
        packed = stacked.dtype == mx.uint8 and bank.endswith("weight")
        renamed[bank] = stacked.view(mx.uint32) if packed else stacked
    for layer in range(args.num_hidden_layers):
        reshape = sanitize_kda if args.is_kda(layer) else sanitize_mla
        reshape(args, f"model.layers.{layer}.self_attn", renamed)
    if args.tie_word_embeddings:
        renamed.pop("lm_head.weight", None)
    return {f"language_model.{name}": w for name, w in renamed.items()}


def sanitize_kda(args: TextArgs, prefix: str, weights: dict[str, mx.array]):
    """Fuses q, k and v, orders the convolution for MLX, and drops A_log's padding."""
    for part in ("proj.weight", "proj.scales", "proj.biases", "conv.conv.weight"):
        fuse(weights, f"{prefix}.{{}}_{part}")
    name = f"{prefix}.qkv_conv.conv.weight"
    if name in weights and weights[name].shape[1] == 1:
        weights[name] = weights[name].swapaxes(1, 2)
    if (name := f"{prefix}.A_log") in weights:
        weights[name] = weights[name].flatten()[: args.linear_attn_config["num_heads"]]
    if (name := f"{prefix}.dt_bias") in weights:
        weights[name] = weights[name].flatten()


def fuse(weights: dict[str, mx.array], template: str):
    parts = [template.format(letter) for letter in "qkv"]
    if all(part in weights for part in parts):
        weights[template.format("qkv")] = mx.concatenate([weights.pop(part) for part in parts])


def sanitize_mla(args: TextArgs, prefix: str, weights: dict[str, mx.array]):
    """Splits kv_b_proj into the key half, absorbed into the queries, and the value half."""
    if f"{prefix}.kv_b_proj.scales" in weights:
        raise ValueError(f"{prefix}.kv_b_proj is quantized: convert the model from its source.")
    if (w := weights.pop(f"{prefix}.kv_b_proj.weight", None)) is not None:
        w = w.reshape(args.num_attention_heads, -1, w.shape[-1])
        keys, values = mx.split(w, [args.qk_nope_head_dim], axis=1)
        weights[f"{prefix}.embed_q.weight"] = mx.contiguous(keys.swapaxes(1, 2))
        weights[f"{prefix}.unembed_out.weight"] = mx.contiguous(values)
