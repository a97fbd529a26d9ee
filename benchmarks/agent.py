"""What an agent waits for, ours against stock mlx-lm, in one process, in turns.

Input: the tiny K3's build. Output: process seconds and ratios of prefill and decoding, of the
second turn of a conversation of 4,096 tokens, and the tokens a pass that prompt lookup writes when
a file is edited (stock can't: its caches of K3 don't go back). The second turn is sent once with
the thoughts of the first and once without, as many clients do: stock keeps the cache after its
answer alone, in its server's own `LRUPromptCache`, and can't cut it back; we keep one after the
prompt, too. Stock is the build as it loads (see `benchmarks.model`). Times are of the CPU and say
nothing about a Mac.

    python -m benchmarks.agent [--repeats N] [--json]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import kimi_k3 as stock
from mlx_lm.models.cache import LRUPromptCache

import kimi_k3
from benchmarks.lookup import EDITS, MAX_DRAFT, replay
from benchmarks.model import OURS, STOCK, TINY_K3, Row, convert, decode, load, measure, prefill
from kimi_k3_mlx.runtime.load import load_tokenizer
from kimi_k3_mlx.runtime.snapshots import Bounds, Snapshots

PROMPT, THOUGHTS, ANSWER, RESULT = 4096, 64, 64, 256
VOCABULARY = 992
Tokens = list[int]


def second_turn(model: Any, thoughts_come_back: bool) -> float:
    """Process seconds from the second request to the logits of its first new token."""
    rng = np.random.default_rng(0)
    prompt, thoughts, answer, result = (
        rng.integers(0, VOCABULARY, n).tolist() for n in (PROMPT, THOUGHTS, ANSWER, RESULT)
    )
    kept = kept_by_us if isinstance(model, kimi_k3.Model) else kept_by_stock
    nearest = kept(model, prompt, thoughts + answer)
    request = prompt + (thoughts if thoughts_come_back else []) + answer + result
    start = time.process_time()
    caches, n_reused = nearest(request)
    advance(model, request[n_reused:], caches or model.make_cache())
    return time.process_time() - start


def kept_by_us(model: Any, prompt: Tokens, written: Tokens) -> Any:
    """Snapshots at message boundaries, as our server keeps them."""
    kept, caches = Snapshots(model, "benchmark", Bounds(1 << 30)), model.make_cache()
    advance(model, prompt, caches)
    kept.put(prompt, caches)
    advance(model, written, caches)
    kept.put(prompt + written, caches)
    return kept.nearest


def kept_by_stock(model: Any, prompt: Tokens, written: Tokens) -> Any:
    """The cache after the answer, as mlx-lm's server keeps it when a tool's result came last."""
    kept, caches = LRUPromptCache(), model.make_cache()
    advance(model, prompt + written, caches)
    kept.insert_cache("model", prompt + written, caches)

    def nearest(request: Tokens) -> tuple[Any, int]:
        found, rest = kept.fetch_nearest_cache("model", request)
        return found, len(request) - len(rest)

    return nearest


def advance(model: Any, tokens: Tokens, caches: list[Any]) -> None:
    """Compute tokens, and the logits after them."""
    mx.eval(model(mx.array([tokens]), caches)[:, -1], [c.state for c in caches])


def main() -> None:
    """Measure in turns, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    mx.disable_compile()
    with tempfile.TemporaryDirectory() as folder:
        convert(TINY_K3, Path(folder) / "build")
        models = {name: load(Path(folder) / "build", module) for name, module in
                  ((OURS, kimi_k3), (STOCK, stock))}  # fmt: skip
        tokenizer = load_tokenizer(Path(folder) / "build", None)
    rows = [
        measure("prefill 1024", models, args.repeats, lambda model: prefill(model, 1024)),
        measure("decode, a token", models, 4 * args.repeats, decode),
        *(
            measure(
                f"second turn, thoughts {'come back' if back else 'left out'}",
                models, args.repeats, lambda model, back=back: second_turn(model, back),
            )
            for back in (True, False)
        ),
    ]  # fmt: skip
    lookup = mean(replay(edit, tokenizer, MAX_DRAFT).tokens_per_pass for edit in EDITS)
    print(as_json(rows, lookup) if args.json else as_table(rows, lookup))


def as_json(rows: list[Row], lookup: float) -> str:
    """Everything measured."""
    return json.dumps({row.work: row.seconds for row in rows} | {"tokens_per_pass": lookup})


def as_table(rows: list[Row], lookup: float) -> str:
    """Seconds and ratios."""
    lines = [f"{'':34}{OURS:>10}{STOCK:>10}{'ratio':>8}"]
    for row in rows:
        ours, theirs = row.seconds[OURS], row.seconds[STOCK]
        lines.append(f"{row.work:34}{ours:>9.3f}s{theirs:>9.3f}s{row.ratio(STOCK):>7.2f}×")
    lines.append(
        f"{'code edit by lookup, tokens a pass':34}{lookup:>10.2f}{1:>10.2f}{lookup:>7.2f}×"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
