"""Kimi Delta Attention in PyTorch, in chunks of 16 as matrix products.

Fast on one CPU thread: a hand-written short convolution and no loop over tokens. The naive
twin, one token after another, is in tests/tools/test_train_tiny.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tiny_layers import RMSNorm, linear
from torch import Tensor, nn

CHUNK = 16
Chunks = tuple[Tensor, ...]


def invert_unit_lower(strict: Tensor) -> Tensor:
    """(I + strict)^-1 for a strictly lower triangular matrix, by halves."""
    size = strict.shape[-1]
    if size <= 4:
        eye = torch.eye(size)
        return (eye - strict) @ (eye + strict @ strict)
    half = size // 2
    corners = torch.stack([strict[..., :half, :half], strict[..., half:, half:]])
    first, second = invert_unit_lower(corners)
    lower = -(second @ strict[..., half:, :half]) @ first
    top = F.pad(first, (0, half))
    return torch.cat([top, torch.cat([lower, second], -1)], -2)


def kda_chunked(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule for [B, H, T, D] in chunks of 16 (T a multiple of 16).

    Exponents are taken relative to the chunk's middle: with a log decay of at least -5 a step
    they stay within +-40.
    """
    q, k, v, log_decay, beta = (
        x.unflatten(2, (-1, CHUNK)) for x in (q, k, v, log_decay, beta.unsqueeze(-1))
    )
    total = log_decay.cumsum(-2)
    middle = total[..., CHUNK // 2 - 1 : CHUNK // 2, :]
    ahead, behind = (total - middle).exp(), (middle - total).exp()
    k_ahead, q_ahead, k_behind = k * ahead, q * ahead, (k * behind).transpose(-1, -2)
    from_middle = middle.exp()
    strict = (beta * (k_ahead @ k_behind)).tril(-1)
    scores = (q_ahead @ k_behind).tril()
    both = invert_unit_lower(strict) @ torch.cat([beta * v, beta * (k_ahead * from_middle)], -1)
    u, w = both.split(v.shape[-1], -1)
    last = total[..., -1:, :]
    to_end = (k * (last - total).exp()).transpose(-1, -2)
    parts = (u, w, q_ahead * from_middle, scores, to_end, last.exp().transpose(-1, -2))
    return _scan_chunks(*(x.unbind(2) for x in parts))


def _scan_chunks(
    u: Chunks, w: Chunks, q: Chunks, scores: Chunks, to_end: Chunks, decay: Chunks
) -> Tensor:
    state, outputs = None, []
    for i in range(len(u)):
        delta = u[i] if state is None else u[i] - w[i] @ state
        out = scores[i] @ delta
        outputs.append(out if state is None else out + q[i] @ state)
        update = to_end[i] @ delta
        state = update if state is None else decay[i] * state + update
    return torch.cat(outputs, 2)


def l2_normalise(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


class _ShortConvolution(torch.autograd.Function):
    """Causal depthwise convolution of [B, T, C] with weight [C, 4]; tap 3 meets the newest."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        taps = weight.t().contiguous()
        out = x * taps[3]
        for back in (1, 2, 3):
            out[:, back:].addcmul_(x[:, :-back], taps[3 - back])
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        taps = weight.t().contiguous()
        grad_x, grad_taps = grad * taps[3], torch.empty_like(taps)
        grad_taps[3] = (grad * x).sum((0, 1))
        for back in (1, 2, 3):
            grad_x[:, :-back].addcmul_(grad[:, back:], taps[3 - back])
            grad_taps[3 - back] = (grad[:, back:] * x[:, :-back]).sum((0, 1))
        return grad_x, grad_taps.t()


class DeltaAttention(nn.Module):
    """Kimi Delta Attention with a full-rank sigmoid gate."""

    def __init__(self, config: dict) -> None:
        super().__init__()
        linear_config, hidden = config["linear_attn_config"], config["hidden_size"]
        self.heads, self.dim = linear_config["num_heads"], linear_config["head_dim"]
        self.lower_bound = linear_config["gate_lower_bound"]
        width = self.heads * self.dim
        for name in ("q_proj", "k_proj", "v_proj", "g_proj"):
            setattr(self, name, linear(hidden, width))
        self.conv = nn.Parameter(torch.randn(3 * width, 4) * 0.3)
        self.f_a_proj, self.f_b_proj = linear(hidden, self.dim), linear(self.dim, width)
        self.b_proj, self.o_proj = linear(hidden, self.heads), linear(width, hidden)
        self.A_log = nn.Parameter(torch.empty(self.heads).uniform_(1, 16).log() * 0.3)
        self.dt_bias = nn.Parameter(torch.empty(width).uniform_(-4, -1))
        self.o_norm = RMSNorm(self.dim, config["rms_norm_eps"])

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, self.dim)).transpose(1, 2)

    def _convolved(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weight = torch.cat([self.q_proj.weight, self.k_proj.weight, self.v_proj.weight])
        q, k, v = F.silu(_ShortConvolution.apply(F.linear(x, weight), self.conv)).chunk(3, -1)
        return self._heads(q), self._heads(k), self._heads(v)

    def log_decay(self, x: Tensor) -> Tensor:
        pre = self.f_b_proj(self.f_a_proj(x)) + self.dt_bias
        return self.lower_bound * torch.sigmoid(self.A_log.exp()[:, None, None] * self._heads(pre))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self._convolved(x)
        beta = torch.sigmoid(self.b_proj(x)).transpose(1, 2)
        q = l2_normalise(q) * self.dim**-0.5
        out = kda_chunked(q, l2_normalise(k), v, self.log_decay(x), beta)
        out = self.o_norm(out).transpose(1, 2).flatten(2)
        return self.o_proj(out * torch.sigmoid(self.g_proj(x)))
