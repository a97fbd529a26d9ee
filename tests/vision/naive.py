"""The tower and the projector the slow way: float64 loops, and one mask over all pictures."""

import math

import mlx.core as mx
import numpy as np

import kimi_k3_vision

EPS = float(np.finfo(np.float32).eps)


def features(
    args: kimi_k3_vision.VisionArgs,
    weights: dict[str, mx.array],
    patches: np.ndarray,
    grids: list[tuple[int, int, int]],
) -> np.ndarray:
    """Projected rows of all pictures, one after the other."""
    w = {name: np.array(x.astype(mx.float32), np.float64) for name, x in weights.items()}
    tower = {k.removeprefix("vision_tower."): x for k, x in w.items()}
    kernel = tower["patch_embed.proj.weight"]
    x = np.einsum("npyx,dpyx->nd", patches, kernel)
    table = tower["patch_embed.pos_emb.weight"]
    x = x + np.concatenate([positions(table, grid) for grid in grids])
    places = [place for grid in grids for place in columns_and_rows(grid)]
    item = np.repeat(np.arange(len(grids)), [t * h * w for t, h, w in grids])
    mask = item[:, None] == item
    for i in range(args.vt_num_hidden_layers):
        block = {
            k.removeprefix(f"encoder.blocks.{i}."): x
            for k, x in tower.items()
            if k.startswith(f"encoder.blocks.{i}.")
        }
        qkv = norm(x, block["norm0.weight"], EPS) @ block["wqkv.weight"].T
        x = x + attend(qkv, args.vt_num_attention_heads, places, mask) @ block["wo.weight"].T
        hidden = norm(x, block["norm1.weight"], EPS) @ block["mlp.fc0.weight"].T
        inner = math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3)
        x = x + (hidden * (1 + np.tanh(inner)) / 2) @ block["mlp.fc1.weight"].T
    x = merged(norm(x, tower["encoder.final_layernorm.weight"], EPS), grids)
    hidden = x @ w["mm_projector.proj.0.weight"].T
    hidden = hidden * (1 + np.vectorize(math.erf)(hidden / math.sqrt(2))) / 2
    out = hidden @ w["mm_projector.proj.2.weight"].T
    return norm(out, w["mm_projector.post_norm.weight"], args.projector_ln_eps)


def norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def positions(table: np.ndarray, grid: tuple[int, int, int]) -> np.ndarray:
    """Bilinear, half-pixel centres, one value at a time; a row of time only for clips."""
    t, h, w = grid
    width = table.shape[-1]
    plane = [[bilinear(table, y, x, h, w) for x in range(w)] for y in range(h)]
    frames = []
    for k in range(t):
        angles = [k / 10000 ** (j / (width // 2)) for j in range(width // 2)]
        time = np.concatenate([np.sin(angles), np.cos(angles)])
        frames.append(np.reshape(plane, (h * w, width)) + (time if t > 1 else 0))
    return np.concatenate(frames)


def bilinear(table: np.ndarray, y: int, x: int, h: int, w: int) -> np.ndarray:
    def around(at: int, size: int, n: int) -> list[tuple[int, float]]:
        source = max((at + 0.5) * n / size - 0.5, 0)
        low = int(source)
        return [(low, 1 - (source - low)), (min(low + 1, n - 1), source - low)]

    rows, columns = around(y, h, len(table)), around(x, w, table.shape[1])
    return sum(table[i, j] * a * b for i, a in rows for j, b in columns)


def columns_and_rows(grid: tuple[int, int, int]) -> list[tuple[int, int]]:
    t, h, w = grid
    return [(x, y) for _ in range(t) for y in range(h) for x in range(w)]


def attend(qkv: np.ndarray, heads: int, places: list, mask: np.ndarray) -> np.ndarray:
    """[N, width] of qkv [N, 3·width]: full attention under the mask."""
    n = len(qkv)
    q, k, v = qkv.reshape(n, 3, heads, -1).transpose(1, 2, 0, 3)
    q, k = turned(q, places), turned(k, places)
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    scores = np.where(mask, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return (weights @ v).transpose(1, 0, 2).reshape(n, -1)


def turned(x: np.ndarray, places: list[tuple[int, int]]) -> np.ndarray:
    """Rotary: channels 4i, 4i+1 by the column, 4i+2, 4i+3 by the row."""
    result, width = np.empty_like(x), x.shape[-1]
    for n, place in enumerate(places):
        for pair in range(width // 2):
            angle = place[pair % 2] * 10000 ** (-4 * (pair // 2) / width)
            a, b = x[:, n, 2 * pair], x[:, n, 2 * pair + 1]
            result[:, n, 2 * pair] = a * math.cos(angle) - b * math.sin(angle)
            result[:, n, 2 * pair + 1] = a * math.sin(angle) + b * math.cos(angle)
    return result


def merged(x: np.ndarray, grids: list[tuple[int, int, int]]) -> np.ndarray:
    """Cells of 2 x 2 patches, averaged over the frames."""
    rows, first = [], 0
    for t, h, w in grids:
        frames = x[first : first + t * h * w].reshape(t, h, w, -1).mean(0)
        for y in range(0, h, 2):
            for x0 in range(0, w, 2):
                cell = frames[y : y + 2, x0 : x0 + 2]
                rows.append(cell.reshape(-1))
        first += t * h * w
    return np.array(rows)
