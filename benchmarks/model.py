"""Our text model against stock mlx-lm's on one build, in one process, in turns.

Input: a source checkpoint (the tiny K3 unless told). Output: a table of seconds and ratios.

Stock appears twice. On the build as it is, K3's float32 convolution and output norm promote its
whole stream to float32. Narrowed to bfloat16, as `mlx_lm.convert` writes them, they leave it in
bfloat16, which is the dtype that our model computes in; this CPU is slow at bfloat16. The times
are of the CPU and say nothing about a Mac; the primitives of a decode step on the Metal path do.

    python -m benchmarks.model [--source DIR] [--repeats N] [--json]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path
from mlx_lm.models import kimi_k3 as stock
from mlx_lm.utils import load_model

import kimi_k3
from benchmarks.primitives import count_primitives
from kimi_k3_mlx.convert.plan import plan_build
from kimi_k3_mlx.convert.profiles import load_profile
from kimi_k3_mlx.convert.run import run
from kimi_k3_mlx.tensors.local import open_source

TINY_K3 = Path(__file__).parents[1] / "kimi_k3_mlx" / "assets" / "tiny-k3"
PREFILLS = (256, 1024, 4096)
DECODE_STEPS = 16
OURS, STOCK, NARROWED = "ours", "stock", "stock, narrowed"


@dataclass(frozen=True)
class Row:
    """Process seconds of one kind of work, the median over the repeats, per model."""

    work: str
    seconds: dict[str, float]

    def ratio(self, opponent: str) -> float:
        """How many times faster ours is."""
        return self.seconds[opponent] / self.seconds[OURS]


def convert(source: Path, out: Path) -> None:
    """The default build of a source."""
    opened = open_source(source)
    run(plan_build(opened, load_profile("mxfp4")), opened, out)


def load(build: Path, module: object) -> nn.Module:
    """The build in a model class of `module`."""
    classes = (module.Model, module.ModelArgs)
    return load_model(build, get_model_classes=lambda config: classes)[0]


def narrowed(model: nn.Module) -> nn.Module:
    """The model with its float32 convolution and output norm in bfloat16."""

    def narrow(path: str, x: mx.array) -> mx.array:
        return x.astype(mx.bfloat16) if path.endswith(("conv.weight", "o_norm.weight")) else x

    model.update(tree_map_with_path(narrow, model.parameters()))
    mx.eval(model.parameters())
    return model


def prefill(model: nn.Module, n_tokens: int) -> float:
    """Process seconds to fill an empty cache and give the last logits."""
    ids = mx.random.randint(0, model.args.text_config.vocab_size, (1, n_tokens))
    cache = model.make_cache()
    mx.eval(ids)
    start = time.process_time()
    mx.eval(model(ids, cache)[:, -1], [c.state for c in cache])
    return time.process_time() - start


def decode(model: nn.Module) -> float:
    """Process seconds per token after a short prompt."""
    cache = model.make_cache()
    mx.eval(model(mx.array([[1, 2, 3]]), cache), [c.state for c in cache])
    start = time.process_time()
    for token in range(DECODE_STEPS):
        mx.eval(model(mx.array([[token]]), cache), [c.state for c in cache])
    return (time.process_time() - start) / DECODE_STEPS


def measure(
    work: str, models: dict[str, nn.Module], repeats: int, run_once: Callable[[nn.Module], float]
) -> Row:
    """Every model once per round, after a round that counts for nothing."""
    times: dict[str, list[float]] = {name: [] for name in models}
    for round_ in range(repeats + 1):
        for name, model in models.items():
            seconds = run_once(model)
            if round_:
                times[name].append(seconds)
    return Row(work, {name: median(values) for name, values in times.items()})


def measure_all(build: Path, repeats: int) -> list[Row]:
    """Prefill at every length, then decode."""
    models = {
        OURS: load(build, kimi_k3),
        STOCK: load(build, stock),
        NARROWED: narrowed(load(build, stock)),
    }
    rows = [
        measure(f"prefill {n}", models, repeats if n < 4096 else 2, lambda m, n=n: prefill(m, n))
        for n in PREFILLS
    ]
    return [*rows, measure("decode, a token", models, 4 * repeats, decode)]


def table(rows: list[Row]) -> str:
    """Seconds of every model and our advantage over stock's two."""
    lines = [f"{'':18}{OURS:>10}{STOCK:>10}{'ratio':>8}{NARROWED:>18}{'ratio':>8}"]
    for row in rows:
        ours, whole, narrow = (row.seconds[name] for name in (OURS, STOCK, NARROWED))
        lines.append(
            f"{row.work:18}{ours:>9.3f}s{whole:>9.3f}s{row.ratio(STOCK):>7.2f}×"
            f"{narrow:>17.3f}s{row.ratio(NARROWED):>7.2f}×"
        )
    return "\n".join(lines)


def main() -> None:
    """Convert, measure in turns, count primitives, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, default=TINY_K3, help="default: the tiny K3")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        convert(args.source, Path(folder) / "build")
        rows = measure_all(Path(folder) / "build", args.repeats)
    primitives = {
        name: count_primitives(module, "metal", float32_tensors=True).total
        for name, module in ((OURS, kimi_k3), (STOCK, stock))
    }
    primitives[NARROWED] = count_primitives(stock, "metal").total
    if args.json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "primitives": primitives}))
        return
    print(table(rows))
    print("primitives in a decode step of 93 layers on the Metal path:", primitives)


if __name__ == "__main__":
    main()
