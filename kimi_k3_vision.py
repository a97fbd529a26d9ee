"""Kimi-K3's vision: the MoonViT-3D tower and the projector, in one file that a build can carry.

- Input: patches [N, 3, 14, 14] of any number of pictures and clips, and a grid (frames, rows,
  columns) of patches for each. Output: rows of the text model's width, one per 2 x 2 patches;
  the frames of a clip are averaged.
- Pictures share matrix products in packs of PACK patches, attend each to itself without a mask,
  and are evaluated pack by pack: memory grows with the largest picture, not with their number.
- The stream keeps the dtype of the weights; positions, rotation, softmax and GELU are float32. The
  CPU computes in float32 throughout.
- Parameters have the names and shapes of the source checkpoint.

It imports only mlx, mlx_lm, numpy and the standard library, by absolute names: a build's copy runs
under whatever name its loader gives it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.base import BaseModelArgs

# torch's nn.RMSNorm without an eps: that of float32, which it computes in, for every dtype.
NORM_EPS = 2.0**-23
ROTARY_BASE = 10000.0
# Patches whose matrix products are taken together.
PACK = 512
# Scores of one block of queries on the CPU, where attention is not fused: 64 MiB.
SCORES = 2**24
# Fields of the vision config with one value that this file computes.
SUPPORTED = {
    "norm_type": "rmsnorm",
    "mlp_type": "mlp2",
    "merge_type": "sd2_tpool",
    "mm_projector_type": "patchmergerv2",
    "pos_emb_type": "divided_fixed",
    "pos_emb_interpolation_mode": "bilinear",
    "attn_bias": False,
    "linear_bias": False,
    "patch_embed_proj_bias": False,
    "merge_kernel_size": [2, 2],
}
# Patches on each side of the cell that becomes a token.
CELL = 2
PREFIXES = ("vision_tower.", "mm_projector.")
Grid = tuple[int, int, int]


@dataclass
class VisionArgs(BaseModelArgs):
    """The `vision_config` of a K3 config.json. Activations in it are ignored, as Moonshot does."""

    patch_size: int = 14
    init_pos_emb_height: int = 64
    init_pos_emb_width: int = 64
    init_pos_emb_time: int = 4
    vt_hidden_size: int = 1024
    vt_intermediate_size: int = 4096
    vt_num_attention_heads: int = 12
    vt_num_hidden_layers: int = 27
    qkv_hidden_size: int = 1536
    merge_kernel_size: list[int] = field(default_factory=lambda: [CELL, CELL])
    mm_hidden_size: int = 1024
    text_hidden_size: int = 7168
    projector_ln_eps: float = 1e-5
    norm_type: str = "rmsnorm"
    mlp_type: str = "mlp2"
    merge_type: str = "sd2_tpool"
    mm_projector_type: str = "patchmergerv2"
    pos_emb_type: str = "divided_fixed"
    pos_emb_interpolation_mode: str = "bilinear"
    attn_bias: bool = False
    linear_bias: bool = False
    patch_embed_proj_bias: bool = False

    def __post_init__(self):
        for name, value in SUPPORTED.items():
            if (found := getattr(self, name)) != value:
                raise ValueError(f"vision_config.{name} is {found!r}; only {value!r} is supported.")


def on_gpu() -> bool:
    return mx.metal.is_available() and mx.default_device() == mx.gpu


# What depends on the grid alone


def stretch(x: mx.array, axis: int, size: int) -> mx.array:
    """Linear resize along an axis: half-pixel centres, no antialiasing, edges repeated."""
    n = x.shape[axis]
    at = np.clip((np.arange(size) + 0.5) * (n / size) - 0.5, 0, n - 1)
    low = np.floor(at).astype(np.int32)
    share = mx.array((at - low).astype(np.float32)).reshape(-1, *[1] * (x.ndim - 1 - axis))
    high = mx.array(np.minimum(low + 1, n - 1))
    return mx.take(x, mx.array(low), axis) * (1 - share) + mx.take(x, high, axis) * share


def time_rows(n_frames: int, width: int) -> mx.array:
    """[n_frames, width]: sines, then cosines. Row 0 is not zero: its cosines are one."""
    angles = np.arange(n_frames)[:, None] * ROTARY_BASE ** (-np.arange(width // 2) / (width // 2))
    return mx.array(np.concatenate([np.sin(angles), np.cos(angles)], 1).astype(np.float32))


def rotations(grid: Grid, head_dim: int) -> mx.array:
    """[t·h·w, head_dim / 2] unit complex numbers: even channel pairs turn with the column, odd ones
    with the row, alike in every frame."""
    t, h, w = grid
    frequencies = ROTARY_BASE ** (-np.arange(head_dim // 4) * 4 / head_dim)
    angles = np.empty((h, w, head_dim // 4, 2))
    angles[..., 0] = np.arange(w)[None, :, None] * frequencies
    angles[..., 1] = np.arange(h)[:, None, None] * frequencies
    turns = np.exp(1j * angles.reshape(h * w, -1)).astype(np.complex64)
    return mx.array(np.tile(turns, (t, 1)))


def rotate(x: mx.array, turns: mx.array) -> mx.array:
    """x [n, heads, head_dim]; neighbouring channels are a complex number."""
    pairs = x.astype(mx.float32).view(mx.complex64)
    return (pairs * turns[:, None]).view(mx.float32).astype(x.dtype)


def n_patches(grid: Grid) -> int:
    return grid[0] * grid[1] * grid[2]


def n_rows(grid: Grid) -> int:
    """Tokens of a picture or clip."""
    return grid[1] * grid[2] // CELL**2


@partial(mx.compile, shapeless=True)
def gelu_tanh(x: mx.array) -> mx.array:
    return nn.gelu_approx(x.astype(mx.float32)).astype(x.dtype)


@partial(mx.compile, shapeless=True)
def gelu_erf(x: mx.array) -> mx.array:
    return nn.gelu(x.astype(mx.float32)).astype(x.dtype)


# The tower


class PositionEmbedding(nn.Module):
    def __init__(self, args: VisionArgs):
        super().__init__()
        shape = (args.init_pos_emb_height, args.init_pos_emb_width, args.vt_hidden_size)
        self.weight = mx.zeros(shape)

    def __call__(self, grid: Grid) -> mx.array:
        """[t·h·w, hidden]; a single picture gets no time."""
        t, h, w = grid
        plane = stretch(stretch(self.weight.astype(mx.float32), 0, h), 1, w).reshape(1, h * w, -1)
        if t > 1:
            plane = plane + time_rows(t, plane.shape[-1])[:, None]
        return plane.reshape(t * h * w, -1)


class PatchProjection(nn.Module):
    def __init__(self, args: VisionArgs):
        super().__init__()
        self.weight = mx.zeros((args.vt_hidden_size, 3, args.patch_size, args.patch_size))

    def __call__(self, patches: mx.array) -> mx.array:
        return patches.reshape(patches.shape[0], -1) @ self.weight.flatten(1).T


class PatchEmbedding(nn.Module):
    def __init__(self, args: VisionArgs):
        super().__init__()
        self.proj = PatchProjection(args)
        self.pos_emb = PositionEmbedding(args)

    def __call__(self, patches: mx.array, grids: list[Grid]) -> mx.array:
        dtype = self.proj.weight.dtype if on_gpu() else mx.float32
        tables = {grid: self.pos_emb(grid) for grid in grids}
        positions = mx.concatenate([tables[grid] for grid in grids])
        return (self.proj(patches.astype(dtype)) + positions).astype(dtype)


class MLP(nn.Module):
    def __init__(self, args: VisionArgs):
        super().__init__()
        self.fc0 = nn.Linear(args.vt_hidden_size, args.vt_intermediate_size, bias=False)
        self.fc1 = nn.Linear(args.vt_intermediate_size, args.vt_hidden_size, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.fc1(gelu_tanh(self.fc0(x)))


class Block(nn.Module):
    def __init__(self, args: VisionArgs):
        super().__init__()
        hidden, width = args.vt_hidden_size, args.qkv_hidden_size
        self.num_heads = args.vt_num_attention_heads
        self.norm0 = nn.RMSNorm(hidden, eps=NORM_EPS)
        self.norm1 = nn.RMSNorm(hidden, eps=NORM_EPS)
        self.wqkv = nn.Linear(hidden, 3 * width, bias=False)
        self.wo = nn.Linear(width, hidden, bias=False)
        self.mlp = MLP(args)

    def __call__(self, x: mx.array, turns: list[mx.array]) -> mx.array:
        """x [N, hidden]: pictures one after the other, with the rotations of each."""
        qkv = self.wqkv(self.norm0(x)).reshape(x.shape[0], 3, self.num_heads, -1)
        ends = list(accumulate(len(part) for part in turns))
        pictures = mx.split(qkv, ends[:-1])
        attended = [self.attend(*item) for item in zip(pictures, turns, strict=True)]
        x = x + self.wo(mx.concatenate(attended))
        return x + self.mlp(self.norm1(x))

    def attend(self, qkv: mx.array, turns: mx.array) -> mx.array:
        """[n, width] from the qkv [n, 3, heads, head_dim] of one picture or clip."""
        n, _, heads, head_dim = qkv.shape
        q, k, v = rotate(qkv[:, 0], turns), rotate(qkv[:, 1], turns), qkv[:, 2]
        q, k, v = (part.swapaxes(0, 1)[None] for part in (q, k, v))
        step = n if on_gpu() else max(1, SCORES // (heads * n))
        parts = [
            mx.fast.scaled_dot_product_attention(
                q[:, :, first : first + step], k, v, scale=head_dim**-0.5
            )
            for first in range(0, n, step)
        ]
        return mx.concatenate(parts, 2)[0].swapaxes(0, 1).reshape(n, -1)


class Encoder(nn.Module):
    def __init__(self, args: VisionArgs):
        super().__init__()
        self.head_dim = args.qkv_hidden_size // args.vt_num_attention_heads
        self.blocks = [Block(args) for _ in range(args.vt_num_hidden_layers)]
        self.final_layernorm = nn.RMSNorm(args.vt_hidden_size, eps=NORM_EPS)

    def __call__(self, x: mx.array, grids: list[Grid]) -> mx.array:
        tables = {grid: rotations(grid, self.head_dim) for grid in grids}
        for block in self.blocks:
            x = block(x, [tables[grid] for grid in grids])
        return self.final_layernorm(x)


class Tower(nn.Module):
    def __init__(self, args: VisionArgs):
        super().__init__()
        self.args = args
        self.patch_embed = PatchEmbedding(args)
        self.encoder = Encoder(args)

    def __call__(self, patches: mx.array, grids: list[Grid]) -> mx.array:
        """[rows, 4·hidden] of patches [N, 3, p, p], rows of all pictures one after the other."""
        x = self.encoder(self.patch_embed(patches, grids), grids)
        parts = mx.split(x, list(accumulate(map(n_patches, grids)))[:-1])
        return mx.concatenate([self.pool(*item) for item in zip(parts, grids, strict=True)])

    def pool(self, x: mx.array, grid: Grid) -> mx.array:
        """Averages the frames and joins each cell of patches, row by row."""
        t, h, w = grid
        x = x.reshape(t, h // CELL, CELL, w // CELL, CELL, -1)
        if t > 1:
            x = x.astype(mx.float32).mean(0, keepdims=True).astype(x.dtype)
        return x[0].swapaxes(1, 2).reshape(n_rows(grid), -1)


class Projector(nn.Module):
    def __init__(self, args: VisionArgs):
        super().__init__()
        size, out = args.mm_hidden_size * CELL**2, args.text_hidden_size
        # The number in the middle is the activation's: the source calls the matrices 0 and 2.
        self.proj = [nn.Linear(size, size, bias=False), {}, nn.Linear(size, out, bias=False)]
        self.post_norm = nn.RMSNorm(out, eps=args.projector_ln_eps)

    def __call__(self, x: mx.array) -> mx.array:
        return self.post_norm(self.proj[2](gelu_erf(self.proj[0](x))))


class Vision(nn.Module):
    """Tower and projector, with weights as `vision_tower.…` and `mm_projector.…`."""

    def __init__(self, args: VisionArgs):
        super().__init__()
        self.vision_tower = Tower(args)
        self.mm_projector = Projector(args)

    def see(self, patches: mx.array, grids: list[Grid]) -> list[mx.array]:
        """Evaluated features [rows, text hidden] of each picture or clip.

        patches [N, 3, p, p] float, in the order of the grids, frames, rows, columns. Raises
        ValueError for a grid that the tower can't take, or with other patches than `grids` says.
        """
        grids = check_grids(self.vision_tower.args, patches.shape[0], grids)
        features = []
        for first, pack in packs(grids):
            part = patches[first : first + sum(map(n_patches, pack))]
            joined = self.mm_projector(self.vision_tower(part, pack))
            ends = list(accumulate(n_rows(grid) for grid in pack))
            features += mx.split(joined, ends[:-1])
            mx.eval(features)
        return features


def check_grids(args: VisionArgs, total: int, grids) -> list[Grid]:
    """The grids as tuples, after refusing what no picture has."""
    grids = [tuple(int(n) for n in grid) for grid in grids]
    for t, h, w in grids:
        if not 1 <= t <= args.init_pos_emb_time:
            limit = args.init_pos_emb_time
            raise ValueError(f"a clip has {t} frames; the tower takes 1 to {limit}.")
        if h < 1 or w < 1 or h % CELL or w % CELL:
            raise ValueError(f"a grid has {h} x {w} patches, not multiples of {CELL} x {CELL}.")
    if total != (wanted := sum(map(n_patches, grids))):
        raise ValueError(f"there are {total} patches; the grids have {wanted}.")
    return grids


def packs(grids: list[Grid]) -> Iterator[tuple[int, list[Grid]]]:
    """Neighbouring pictures with at most PACK patches in all, or one that is larger; and the first
    patch of each pack."""
    first, pack = 0, []
    for grid in grids:
        size = sum(map(n_patches, pack))
        if pack and size + n_patches(grid) > PACK:
            yield first, pack
            first, pack = first + size, []
        pack.append(grid)
    if pack:
        yield first, pack


def sanitize(args: VisionArgs, weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """The vision weights under source names; mlx-vlm writes the patch projection channels last."""
    weights = {name: w for name, w in weights.items() if name.startswith(PREFIXES)}
    name = "vision_tower.patch_embed.proj.weight"
    if name in weights and weights[name].shape[1:] == (args.patch_size, args.patch_size, 3):
        weights[name] = weights[name].transpose(0, 3, 1, 2)
    return weights
