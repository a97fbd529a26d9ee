"""The tiny K3's vision in PyTorch: a MoonViT tower and the projector, as K3 has them, for stills.

Input: patches of pictures of one size. Output: rows of the text model's width, which stand in a
prompt where the text model reads them. Parameters have the names on disk. The text model is frozen.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from tiny_corpus import EOS_ID, N_TEXT_IDS, PAD_ID
from tiny_kda import CHUNK
from tiny_layers import RMSNorm, linear
from tiny_model import TinyK3
from tiny_pictures import PROMPT, Size
from tokenizers import Tokenizer
from torch import Tensor, nn

CELL = 28
"""Pixels on each side of what becomes one row: 2 x 2 patches."""
NORM_EPS = 2.0**-23
MEDIA_BEGIN, MEDIA_CONTENT, MEDIA_END, MEDIA_PAD = range(N_TEXT_IDS + 18, N_TEXT_IDS + 22)

RULES = {
    "fixed_output_tokens": None,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "in_patch_limit": 65536,
    "merge_kernel_size": 2,
    "patch_limit_on_one_side": 512,
    "patch_size": 14,
    "transparent_bg_config": {
        "chessboard_gray_value": 180,
        "chessboard_square_on_top_left": True,
        "chessboard_square_size": 8,
        "chessboard_white_value": 255,
        "pattern": "chessboard",
    },
    "transparent_bg_fill_stage": "after_resize",
}
"""K3's own rules for pictures, for preprocessor_config.json."""


def vision_config(text_hidden_size: int) -> dict:
    """The fields of K3's vision_config, at tiny sizes."""
    return {
        "activation_func": "gelu_pytorch_tanh",
        "attn_bias": False,
        "init_pos_emb_height": 8,
        "init_pos_emb_time": 4,
        "init_pos_emb_width": 8,
        "linear_bias": False,
        "merge_kernel_size": [2, 2],
        "merge_type": "sd2_tpool",
        "mlp_type": "mlp2",
        "mm_hidden_size": 64,
        "mm_projector_type": "patchmergerv2",
        "norm_type": "rmsnorm",
        "patch_embed_proj_bias": False,
        "patch_size": 14,
        "pos_emb_interpolation_mode": "bilinear",
        "pos_emb_type": "divided_fixed",
        "projector_hidden_act": "gelu",
        "projector_ln_eps": 1e-5,
        "qkv_hidden_size": 96,
        "text_hidden_size": text_hidden_size,
        "vt_hidden_size": 64,
        "vt_intermediate_size": 256,
        "vt_num_attention_heads": 2,
        "vt_num_hidden_layers": 3,
    }


def patches(images: Iterable[Image.Image], patch: int = 14) -> Tensor:
    """[B, rows, columns, 3, patch, patch] of RGB pictures of one size, padded with black."""
    pixels = torch.from_numpy(np.stack([np.asarray(image) for image in images]))
    height, width = pixels.shape[1:3]
    pixels = F.pad(pixels, (0, 0, 0, -width % CELL, 0, -height % CELL)).float() / 255
    cells = (pixels - 0.5).mul(2).unflatten(2, (-1, patch)).unflatten(1, (-1, patch))
    return cells.permute(0, 1, 3, 5, 2, 4)


def rotations(rows: int, columns: int, head_dim: int) -> Tensor:
    """[rows * columns, head_dim / 2] complex: channel pairs turn with column and row in turn."""
    frequencies = 10000.0 ** (-torch.arange(head_dim // 4) * 4 / head_dim)
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    angles = torch.stack([column.flatten(), row.flatten()], -1)[:, None] * frequencies[:, None]
    return torch.polar(torch.ones_like(angles), angles).flatten(1)


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """x [B, heads, n, head_dim]; neighbouring channels are a complex number."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turns).flatten(-2)


class PatchEmbedding(nn.Module):
    def __init__(self, config: dict) -> None:
        super().__init__()
        hidden, patch = config["vt_hidden_size"], config["patch_size"]
        shape = (config["init_pos_emb_height"], config["init_pos_emb_width"], hidden)
        self.proj, self.pos_emb = nn.Module(), nn.Module()
        fan_in = 3 * patch**2
        self.proj.weight = nn.Parameter(torch.randn(hidden, 3, patch, patch) * fan_in**-0.5)
        self.pos_emb.weight = nn.Parameter(torch.randn(shape) * 0.1)

    def forward(self, cells: Tensor) -> Tensor:
        """[B, rows * columns, hidden]."""
        plane = self.pos_emb.weight.permute(2, 0, 1)[None]
        plane = F.interpolate(plane, cells.shape[1:3], mode="bilinear", align_corners=False)
        projected = cells.flatten(3) @ self.proj.weight.flatten(1).T
        return (projected + plane.permute(0, 2, 3, 1)).flatten(1, 2)


class MLP(nn.Module):
    def __init__(self, config: dict) -> None:
        super().__init__()
        hidden, inner = config["vt_hidden_size"], config["vt_intermediate_size"]
        self.fc0, self.fc1 = linear(hidden, inner), linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc1(F.gelu(self.fc0(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, config: dict) -> None:
        super().__init__()
        hidden, width = config["vt_hidden_size"], config["qkv_hidden_size"]
        self.heads = config["vt_num_attention_heads"]
        self.norm0, self.norm1 = RMSNorm(hidden, NORM_EPS), RMSNorm(hidden, NORM_EPS)
        self.wqkv, self.wo = linear(hidden, 3 * width), linear(width, hidden)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        qkv = self.wqkv(self.norm0(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(rotate(q, turns), rotate(k, turns), v)
        x = x + self.wo(out.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm1(x))


class Encoder(nn.Module):
    def __init__(self, config: dict) -> None:
        super().__init__()
        self.head_dim = config["qkv_hidden_size"] // config["vt_num_attention_heads"]
        self.blocks = nn.ModuleList(Block(config) for _ in range(config["vt_num_hidden_layers"]))
        self.final_layernorm = RMSNorm(config["vt_hidden_size"], NORM_EPS)

    def forward(self, x: Tensor, rows: int, columns: int) -> Tensor:
        turns = rotations(rows, columns, self.head_dim)
        for block in self.blocks:
            x = block(x, turns)
        return self.final_layernorm(x)


class Tower(nn.Module):
    def __init__(self, config: dict) -> None:
        super().__init__()
        self.patch_embed, self.encoder = PatchEmbedding(config), Encoder(config)

    def forward(self, cells: Tensor) -> Tensor:
        """[B, rows * columns / 4, 4 * hidden]."""
        rows, columns = cells.shape[1:3]
        x = self.encoder(self.patch_embed(cells), rows, columns)
        x = x.unflatten(1, (rows // 2, 2, columns // 2, 2)).transpose(2, 3)
        return x.flatten(3).flatten(1, 2)


class Projector(nn.Module):
    def __init__(self, config: dict) -> None:
        super().__init__()
        size, out = 4 * config["mm_hidden_size"], config["text_hidden_size"]
        self.proj = nn.Sequential(linear(size, size), nn.GELU(), linear(size, out))
        self.post_norm = RMSNorm(out, config["projector_ln_eps"])

    def forward(self, x: Tensor) -> Tensor:
        return self.post_norm(self.proj(x))


class TinyVision(nn.Module):
    def __init__(self, config: dict) -> None:
        super().__init__()
        self.vision_tower, self.mm_projector = Tower(config), Projector(config)

    def forward(self, cells: Tensor) -> Tensor:
        """[B, rows * columns / 4, text hidden] from the patches of pictures of one size."""
        return self.mm_projector(self.vision_tower(cells))


class Reader:
    """The frozen text model, with pictures before its text as in `kimi-k3 generate --image`."""

    def __init__(self, text: TinyK3, tokenizer: Tokenizer) -> None:
        self.text, self.tokenizer = text.requires_grad_(False), tokenizer
        self.prompt = self.encode(PROMPT)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def logits(self, features: Tensor, size: Size, answers: Tensor) -> Tensor:
        """[B, n, vocabulary]: what follows the prompt and each of n - 1 ids of the answers."""
        markup = [MEDIA_BEGIN, *self.encode("image {}x{}".format(*size)), MEDIA_CONTENT]
        before, after = (
            self.text.embed(torch.tensor(ids)).expand(len(features), -1, -1)
            for ids in (markup, [MEDIA_END, *self.prompt])
        )
        read = torch.cat([before, features, after, self.text.embed(answers)], 1)
        padding = (0, 0, 0, -read.shape[1] % CHUNK)
        logits = self.text.read(F.pad(read, padding))
        return logits[:, read.shape[1] - answers.shape[1] - 1 : read.shape[1]]

    def targets(self, answers: Iterable[str]) -> Tensor:
        """[B, n] ids of the answers, which end the text; padded with PAD."""
        rows = [torch.tensor([*self.encode(answer), EOS_ID]) for answer in answers]
        return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD_ID)

    @torch.no_grad()
    def greedy(self, features: Tensor, size: Size, n_tokens: int = 14) -> list[str]:
        """The most likely answers, without a cache; what follows the end is cut."""
        ids = torch.empty(len(features), 0, dtype=torch.long)
        for _ in range(n_tokens):
            chosen = self.logits(features, size, ids)[:, -1].argmax(-1)
            ids = torch.cat([ids, chosen[:, None]], 1)
        rows = (row[: row.index(EOS_ID)] if EOS_ID in row else row for row in ids.tolist())
        return [self.tokenizer.decode(row, skip_special_tokens=False) for row in rows]
