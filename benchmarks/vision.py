"""Our vision tower against stock mlx-vlm's on the same random weights, in one process, in turns.

Input: nothing; the tower has K3's widths and, unless told, one of its 27 blocks. Output: a table of
images per process second, and of the memory that a call takes above weights and patches.

Stock's norms get the eps of ours first, so that both must give the same features, which is checked.
The times are of the CPU and say nothing about a Mac, where attention is fused and takes no blocks
of queries. On Linux, MLX is 30 times faster with LD_PRELOAD=libopenblas.so.0.

    python -m benchmarks.vision [--blocks N] [--repeats N] [--dtype float32|bfloat16] [--json]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from mlx_vlm.models.kimi_k3 import kimi_k3 as stock
from mlx_vlm.models.kimi_k3.config import VisionConfig

from kimi_k3_mlx.units import format_bytes
from kimi_k3_vision import NORM_EPS, Grid, Vision, VisionArgs, n_patches

CASES: dict[str, list[Grid]] = {
    "1 of 112 x 112": [(1, 8, 8)],
    "16 of 112 x 112": [(1, 8, 8)] * 16,
    "64 of 112 x 112": [(1, 8, 8)] * 64,
    "1 of 560 x 420": [(1, 30, 40)],
}
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}


@dataclass(frozen=True)
class Row:
    """Images per process second, the median over the repeats, and bytes, ours before stock's."""

    work: str
    images_per_second: tuple[float, float]
    peak_bytes: tuple[int, int]


class Stock(nn.Module):
    """mlx-vlm's tower and projector, called as its model calls them."""

    def __init__(self, ours: Vision, args: VisionArgs) -> None:
        super().__init__()
        config = VisionConfig.from_dict(asdict(args))
        text = SimpleNamespace(hidden_size=args.text_hidden_size)
        self.vision_tower = stock.VisionModel(config)
        self.mm_projector = stock.KimiK3MultiModalProjector(
            SimpleNamespace(vision_config=config, text_config=text)
        )
        weights = dict(tree_flatten(ours.parameters()))
        self.load_weights(list(self.vision_tower.sanitize(weights).items()))
        for _, module in self.vision_tower.named_modules():
            if isinstance(module, nn.RMSNorm):
                module.eps = NORM_EPS

    def see(self, patches: mx.array, grids: list[Grid]) -> list[mx.array]:
        """The features of all pictures."""
        x = patches.transpose(0, 2, 3, 1).astype(self.vision_tower.patch_embed.proj.weight.dtype)
        features = self.mm_projector(self.vision_tower(x, grids))
        mx.eval(features)
        return [features]


See = Callable[[mx.array, list[Grid]], list[mx.array]]


def towers(blocks: int, dtype: str) -> tuple[See, See]:
    """Ours and stock's, with the same weights."""
    args = VisionArgs(vt_num_hidden_layers=blocks)
    ours = Vision(args)
    embedding = ours.vision_tower.patch_embed
    for part, scale in ((embedding.proj, 0.04), (embedding.pos_emb, 1.0)):
        part.weight = scale * mx.random.normal(part.weight.shape)
    ours.update(tree_map(lambda x: x.astype(getattr(mx, dtype)), ours.parameters()))
    opponent = Stock(ours, args)
    mx.eval(ours.parameters(), opponent.parameters())
    return ours.see, opponent.see


def run_once(see: See, patches: mx.array, grids: list[Grid]) -> tuple[float, int, mx.array]:
    """Process seconds, bytes above what was there before, and the features."""
    mx.clear_cache()
    mx.reset_peak_memory()
    before, began = mx.get_active_memory(), time.process_time()
    features = see(patches, grids)
    return (
        time.process_time() - began,
        mx.get_peak_memory() - before,
        mx.concatenate(features).astype(mx.float32),
    )


def measure(pair: tuple[See, See], work: str, repeats: int, dtype: str) -> Row:
    """Both once per round, after a round that counts for nothing but that they agree."""
    grids = CASES[work]
    patches = mx.random.normal((sum(map(n_patches, grids)), 3, 14, 14))
    mx.eval(patches)
    first = [run_once(see, patches, grids) for see in pair]
    difference = (mx.abs(first[0][2] - first[1][2]).max() / mx.abs(first[1][2]).max()).item()
    if not difference < TOLERANCE[dtype]:
        raise RuntimeError(f"{work}: the features differ by {difference:.1e}.")
    rounds = [[run_once(see, patches, grids)[0] for see in pair] for _ in range(repeats)]
    ours, opponent = (len(grids) / median(times) for times in zip(*rounds, strict=True))
    return Row(work, (ours, opponent), (first[0][1], first[1][1]))


def table(rows: list[Row]) -> str:
    """Ours, stock's and the ratio, of both quantities; more is better on the left, less right."""
    lines = [
        f"{'':17}{'images/s':>9}{'stock':>9}{'ratio':>8}{'memory':>10}{'stock':>10}{'ratio':>8}"
    ]
    for row in rows:
        (speed, other), (peak, other_peak) = row.images_per_second, row.peak_bytes
        lines.append(
            f"{row.work:17}{speed:>9.3f}{other:>9.3f}{speed / other:>7.2f}×"
            f"{format_bytes(peak):>10}{format_bytes(other_peak):>10}{peak / other_peak:>7.2f}×"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure every case, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=1, help="of the tower; K3 has 27")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", choices=list(TOLERANCE), default="float32")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    pair = towers(args.blocks, args.dtype)
    rows = [measure(pair, work, args.repeats, args.dtype) for work in CASES]
    print(json.dumps([asdict(row) for row in rows]) if args.json else table(rows))


if __name__ == "__main__":
    main()
