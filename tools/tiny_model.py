"""The tiny Kimi-K3 in PyTorch: every architectural part, written for one CPU thread.

The formulas are those of K3: KDA, gated NoPE MLA, attention residuals, LatentMoE. Experts run as
one product sorted by expert, without padding; they can go through an MXFP4 straight-through
quantizer, whose codes tiny_layout.py writes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tiny_kda import DeltaAttention
from tiny_layers import FeedForward, RMSNorm, linear, situ
from tiny_mxfp4 import straight_through_mxfp4
from torch import Tensor, nn


class LatentAttention(nn.Module):
    """Gated MLA without positions: the `rope` dims are plain extra dims."""

    def __init__(self, config: dict) -> None:
        super().__init__()
        hidden, self.heads = config["hidden_size"], config["num_attention_heads"]
        self.nope, self.rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        self.v_dim, self.rank = config["v_head_dim"], config["kv_lora_rank"]
        q_rank, q_dim = config["q_lora_rank"], self.nope + self.rope
        self.q_a_proj, self.q_a_layernorm = linear(hidden, q_rank), RMSNorm(q_rank, 1e-6)
        self.q_b_proj = linear(q_rank, self.heads * q_dim)
        self.kv_a_proj_with_mqa = linear(hidden, self.rank + self.rope)
        self.kv_a_layernorm = RMSNorm(self.rank, 1e-6)
        self.kv_b_proj = linear(self.rank, self.heads * (self.nope + self.v_dim))
        self.g_proj = linear(hidden, self.heads * self.v_dim)
        self.o_proj = linear(self.heads * self.v_dim, hidden)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        latent, shared_key = self.kv_a_proj_with_mqa(x).split([self.rank, self.rope], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.heads, -1))
        k_nope, v = kv.transpose(1, 2).split([self.nope, self.v_dim], -1)
        k = torch.cat([k_nope, shared_key[:, None].expand(-1, self.heads, -1, -1)], -1)
        q = q.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        # torch's fused CPU attention wants one head size for q, k and v.
        v = F.pad(v, (0, q.shape[-1] - self.v_dim))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)[..., : self.v_dim]
        return self.o_proj(out.transpose(1, 2).flatten(2) * torch.sigmoid(self.g_proj(x)))


class _Permute(torch.autograd.Function):
    """Rows in another order; the gradient is a gather too, never a scatter."""

    @staticmethod
    def forward(ctx, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.inverse = inverse
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.inverse), None, None


class _GroupedMatmul(torch.autograd.Function):
    """rows[start_e:end_e] @ weight[e] for every expert e; the rows come sorted by expert."""

    @staticmethod
    def forward(ctx, rows: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.counts = counts
        out = rows.new_empty(rows.shape[0], weight.shape[2])
        for x, w, y in zip(rows.split(counts), weight.unbind(), out.split(counts), strict=True):
            torch.mm(x, w, out=y)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weight = ctx.saved_tensors
        grad_rows, grad_weight = torch.empty_like(rows), torch.empty_like(weight)
        pieces = (x.split(ctx.counts) for x in (rows, grad.contiguous(), grad_rows))
        for x, g, gx, w, gw in zip(*pieces, weight.unbind(), grad_weight.unbind(), strict=True):
            torch.mm(g, w.t(), out=gx)
            if ctx.needs_input_grad[1]:
                torch.mm(x.t(), g, out=gw)
        return grad_rows, grad_weight if ctx.needs_input_grad[1] else None, None


class LatentMoE(nn.Module):
    """Sigmoid router with a correction bias; experts work inside the latent."""

    def __init__(self, config: dict) -> None:
        super().__init__()
        hidden, latent = config["hidden_size"], config["routed_expert_hidden_size"]
        width, self.experts = config["moe_intermediate_size"], config["num_experts"]
        self.top_k = config["num_experts_per_token"]
        self.gate = linear(hidden, self.experts)
        self.register_buffer("e_score_correction_bias", torch.zeros(self.experts))
        self.down, self.up = linear(hidden, latent), linear(latent, hidden)
        self.norm = RMSNorm(latent, config["rms_norm_eps"])
        self.shared = FeedForward(hidden, width * config["num_shared_experts"])
        self.w13 = nn.Parameter(torch.randn(self.experts, 2 * width, latent) * latent**-0.5)
        self.w2 = nn.Parameter(torch.randn(self.experts, latent, width) * width**-0.5)
        self.quantize = False
        self.load = torch.zeros(self.experts)

    def expert_weights(self) -> tuple[Tensor, Tensor]:
        if not self.quantize:
            return self.w13, self.w2
        return straight_through_mxfp4(self.w13), straight_through_mxfp4(self.w2)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.sigmoid(self.gate(x))
        chosen = (scores.detach() + self.e_score_correction_bias).topk(self.top_k, -1).indices
        weights = scores.gather(-1, chosen)
        return chosen, weights / (weights.sum(-1, keepdim=True) + 1e-20)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        chosen, weights = self.route(rows)
        flat = chosen.flatten()
        counts = torch.bincount(flat, minlength=self.experts)
        self.load = counts.float()
        order = flat.argsort(stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order))
        latent = self.down(rows).unsqueeze(1).expand(-1, self.top_k, -1).flatten(0, 1)
        out = self.run_experts(_Permute.apply(latent, order, inverse), counts.tolist())
        out = _Permute.apply(out, inverse, order).unflatten(0, (-1, self.top_k))
        mixed = (weights.unsqueeze(1) @ out).squeeze(1)
        return (self.up(self.norm(mixed)) + self.shared(rows)).view_as(x)

    def run_experts(self, rows: Tensor, counts: list[int]) -> Tensor:
        w13, w2 = self.expert_weights()
        gate, up = _GroupedMatmul.apply(rows, w13.transpose(1, 2), counts).chunk(2, -1)
        return _GroupedMatmul.apply(situ(gate, up), w2.transpose(1, 2), counts)

    def balance(self, rate: float) -> None:
        """DeepSeek-V3's loss-free balancing: raise the bias of the experts with less load."""
        self.e_score_correction_bias += rate * torch.sign(self.load.mean() - self.load)


def mix_residuals(stack: list[Tensor], direction: Tensor, eps: float) -> Tensor:
    """Attention residuals: a softmax over the blocks and the running prefix."""
    scores = torch.stack([(c @ direction) * torch.rsqrt(c.square().mean(-1) + eps) for c in stack])
    shares = scores.softmax(0).unsqueeze(-1)
    mixed = shares[0] * stack[0]
    for share, c in zip(shares[1:], stack[1:], strict=True):
        mixed = torch.addcmul(mixed, share, c)
    return mixed


class Residual(nn.Module):
    """One mixing point: a norm weight and a direction, which only act as their product."""

    def __init__(self, hidden: int, eps: float) -> None:
        super().__init__()
        self.proj = nn.Parameter(torch.zeros(hidden))
        self.norm = nn.Parameter(torch.ones(hidden))
        self.eps = eps

    def forward(self, blocks: list[Tensor], prefix: Tensor | None) -> Tensor:
        stack = blocks if prefix is None else [*blocks, prefix]
        if len(stack) == 1:
            return stack[0]
        return mix_residuals(stack, self.proj * self.norm, self.eps)


class Layer(nn.Module):
    def __init__(self, config: dict, index: int) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.is_kda = index + 1 in config["linear_attn_config"]["kda_layers"]
        self.starts_block = index % config["attn_res_block_size"] == 0
        self.attention = DeltaAttention(config) if self.is_kda else LatentAttention(config)
        is_dense = index < config["first_k_dense_replace"]
        self.mlp = (
            FeedForward(hidden, config["intermediate_size"]) if is_dense else LatentMoE(config)
        )
        self.input_norm, self.post_norm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.attention_residual, self.mlp_residual = Residual(hidden, eps), Residual(hidden, eps)

    def forward(self, blocks: list[Tensor], prefix: Tensor) -> tuple[list[Tensor], Tensor]:
        h = self.attention_residual(blocks, prefix) if blocks else prefix
        out = self.attention(self.input_norm(h))
        if self.starts_block:
            blocks, prefix = [*blocks, prefix], out
        else:
            prefix = prefix + out
        h = self.mlp_residual(blocks, prefix)
        return blocks, prefix + self.mlp(self.post_norm(h))


class TinyK3(nn.Module):
    def __init__(self, config: dict) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.config = config
        self.embed = nn.Embedding(config["vocab_size"], hidden)
        nn.init.normal_(self.embed.weight, std=0.5)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config["num_hidden_layers"]))
        self.residual, self.norm = Residual(hidden, eps), RMSNorm(hidden, eps)
        self.head = linear(hidden, config["vocab_size"])

    def moes(self) -> list[LatentMoE]:
        return [layer.mlp for layer in self.layers if isinstance(layer.mlp, LatentMoE)]

    def forward(self, ids: Tensor) -> Tensor:
        return self.read(self.embed(ids))

    def read(self, embeddings: Tensor) -> Tensor:
        """[B, T, vocabulary] from embeddings or other rows [B, T, hidden], T a multiple of 16."""
        blocks, prefix = [], embeddings
        for layer in self.layers:
            blocks, prefix = layer(blocks, prefix)
        return self.head(self.norm(self.residual(blocks, prefix)))


def text_config() -> dict:
    """The fields of K3's text_config, at tiny sizes."""
    return {
        "vocab_size": 1024,
        "hidden_size": 128,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 384,
        "rms_norm_eps": 1e-5,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "attn_res_block_size": 3,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "num_experts": 64,
        "num_experts_per_token": 4,
        "num_shared_experts": 2,
        "moe_intermediate_size": 64,
        "routed_expert_hidden_size": 64,
        "first_k_dense_replace": 1,
        "linear_attn_config": {
            "full_attn_layers": [4, 6],
            "kda_layers": [1, 2, 3, 5],
            "head_dim": 32,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "use_full_rank_gate": True,
        },
    }
