"""The layer stream: what reading layer by layer costs, and that memory is the budget's.

Input: a source checkpoint (a random one unless told). Output: seconds of a stream against those of
the same layers loaded before, on the same micro-batches, in turns; tokens per second of calibrating
the trained tiny model against a pass through the whole model with taps, in turns; and the peak
memory of streams over 1 and 8 times as many tokens with the same budget, each in a process of its
own.

    python -m benchmarks.stream [--source DIR] [--tokens N] [--repeats N] [--json]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.base import create_attention_mask

import kimi_k3
from kimi_k3_mlx.reap.accumulate import Accumulator, Tags
from kimi_k3_mlx.reap.calibrate import calibrate
from kimi_k3_mlx.reap.corpus import Corpus, load_corpus, parse_specs
from kimi_k3_mlx.reap.saliency import Saliency
from kimi_k3_mlx.runtime.load import load_tokenizer, load_weights
from kimi_k3_mlx.stream.budget import MICRO_TOKENS, Batch, make_batches, make_budget
from kimi_k3_mlx.stream.engine import Lane, run_stream
from kimi_k3_mlx.stream.layers import Layers, open_layers
from kimi_k3_mlx.stream.passes import OBSERVED
from kimi_k3_mlx.tensors.local import open_source
from kimi_k3_mlx.units import format_bytes
from tests.reap.routing import observe
from tests.tiny_k3 import TinyConfig, write_source

TINY = Path(__file__).parents[1] / "kimi_k3_mlx/assets/tiny-k3"
SIZES = TinyConfig(
    layers=6, hidden=256, intermediate=512, heads=4, head_dim=64, q_lora=64, kv_lora=64,
    experts=64, top_k=2, latent=128, moe_intermediate=128, vocab=2048, vision=False,
)  # fmt: skip
# Little to compute and much to hold between layers: 41 kB a token.
WIDE = TinyConfig(
    layers=4, hidden=4096, intermediate=32, heads=1, head_dim=32, q_lora=32, kv_lora=32,
    experts=4, top_k=1, latent=32, moe_intermediate=32, block_size=1, vocab=512, vision=False,
)  # fmt: skip
TIMES = (1, 8)
WIDE_TOKENS, GROUPS = 2048, 2
MICRO = 512


class Counter:
    """Adds up how often every expert is chosen: about the least that an observer does."""

    def __init__(self, args: Any) -> None:
        self.counts = np.zeros((args.num_hidden_layers, args.num_experts), np.int64)

    def moe(self, layer: int, lane: int, batch: Batch, experts: mx.array, *_: mx.array) -> None:
        chosen = np.array(batch.real(experts)).ravel()
        self.counts[layer] += np.bincount(chosen, minlength=self.counts.shape[1])

    def logits(self, lane: int, batch: Batch, logits: mx.array) -> None:
        pass

    def state(self) -> dict[str, np.ndarray]:
        delta, self.counts = self.counts, np.zeros_like(self.counts)
        return {"counts": delta}

    def restore(self, arrays: dict[str, np.ndarray]) -> None:
        self.counts = arrays["counts"]


def corpus(n_tokens: int, vocabulary: int) -> list[np.ndarray]:
    """Random sequences of 64 to 512 tokens."""
    rng = np.random.default_rng(0)
    sequences, left = [], n_tokens
    while left > 0:
        length = min(left, int(rng.integers(64, 513)))
        sequences.append(rng.integers(0, vocabulary, length).astype(np.int32))
        left -= length
    return sequences


def stream(layers: Layers, sequences: list[np.ndarray], memory: int) -> Counter:
    """The engine itself."""
    counter = Counter(layers.args)
    run_stream(layers, sequences, [Lane("parent")], counter, memory=memory, micro_tokens=MICRO)
    return counter


def in_memory(layers: Layers, loaded: list[Any], batches: list[Batch]) -> Counter:
    """The same layers, all loaded: a whole model's pass over one micro-batch after the other."""
    counter = Counter(layers.args)
    for batch in batches:
        prefix = layers.embed(mx.array(batch.ids))
        blocks = kimi_k3.BlockStack(layers.args.rms_norm_eps)
        causal = create_attention_mask(prefix, None, return_array=True)
        for number, layer in enumerate(loaded):
            taps: dict[str, mx.array] = {}
            mask = None if layer.is_linear else causal
            prefix = layer(prefix, blocks, mask, None, taps.__setitem__)
            mx.eval(prefix, taps)
            if "experts" in taps:
                counter.moe(number, 0, batch, *(taps[name] for name in OBSERVED))
        mx.eval(layers.head(prefix, blocks))
    return counter


def compare(source: Path, n_tokens: int, repeats: int) -> dict[str, float]:
    """Median seconds, after a round that counts for nothing."""
    layers = open_layers(open_source(source))
    sequences = corpus(n_tokens, layers.args.vocab_size)
    batches = make_batches(sequences, MICRO)
    loaded = [layers.layer(number) for number in range(layers.n_layers)]
    streamed, held = [], []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        found = stream(layers, sequences, 1 << 40)
        middle = time.perf_counter()
        expected = in_memory(layers, loaded, batches)
        streamed.append(middle - start)
        held.append(time.perf_counter() - middle)
        if not np.array_equal(found.counts, expected.counts):
            raise ValueError("the stream and the loaded layers differ")
    seconds = {"streamed": median(streamed[1:]), "loaded": median(held[1:])}
    return seconds | {"cost": seconds["streamed"] / seconds["loaded"] - 1}


def plain_calibration(model: Any, corpus: Corpus, layers: tuple[int, ...]) -> Saliency:
    """What one writes without a stream: the whole model in memory, taps, one sequence at a time."""
    args = model.args.text_config
    sizes = (args.num_experts, args.num_experts_per_token, corpus.options.folds)
    total = Accumulator(corpus.sources, layers, *sizes)
    for batch in make_batches([sequence.tokens for sequence in corpus.sequences], MICRO_TOKENS):
        taps: dict[tuple[int, str], mx.array] = {}

        def tap(layer: int, name: str, array: mx.array, taps: Any = taps) -> None:
            if name in OBSERVED:
                taps[layer, name] = array

        mx.eval(model(mx.array(batch.ids), tap=tap), taps)
        for row, index in enumerate(batch.indices):
            sequence, n = corpus.sequences[index], batch.lengths[row]
            tags = Tags(*(np.full(n, x) for x in (sequence.source, index, sequence.fold)))
            for layer in layers:
                own = (np.array(taps[layer, name].astype(mx.float32))[row, :n] for name in OBSERVED)
                experts, gates, outputs = own
                experts = experts.astype(np.int64)
                values = observe(experts, gates, outputs)
                total.add(layer, tags, experts, gates.astype(np.float64), *values)
    return total.finish("plain", {})


def calibrations(n_tokens: int, repeats: int) -> dict[str, float]:
    """Median tokens per second, after a round that counts for nothing; the whole model is loaded
    before, the stream reads its layers each time."""
    texts = ",".join(f"{path}={path.stem}" for path in sorted((TINY / "held_out").glob("*.txt")))
    corpus = load_corpus(
        parse_specs(texts), load_tokenizer(TINY, None), tokens_per_source=n_tokens, seq_len=512
    )
    source, (model, _) = open_source(TINY), load_weights(TINY, lazy=False)
    streamed, plain = [], []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        found = calibrate(source, corpus, memory=1 << 40)
        middle = time.perf_counter()
        expected = plain_calibration(model, corpus, found.layers)
        streamed.append(corpus.n_tokens / (middle - start))
        plain.append(corpus.n_tokens / (time.perf_counter() - middle))
        pairs = [np.abs(store.arrays["weighted"]).sum() for store in (found, expected)]
        if abs(pairs[0] / pairs[1] - 1) > 1e-3:
            raise ValueError("the two calibrations differ")
    rates = {"streamed": median(streamed[1:]), "plain": median(plain[1:])}
    return rates | {"tokens": corpus.n_tokens, "ratio": rates["streamed"] / rates["plain"]}


def peak(source: Path, times: int) -> None:
    """In a process of its own: a stream over so many times the tokens, and its peak memory."""
    layers = open_layers(open_source(source))
    # Of one length, so that all micro-batches are alike.
    ids = np.random.default_rng(0).integers(0, layers.args.vocab_size, WIDE_TOKENS, np.int32)
    sequences = list(ids.reshape(-1, MICRO)) * times
    budget = make_budget(layers, make_batches(sequences, MICRO), 1)
    memory = budget.fixed + budget.per_token * WIDE_TOKENS // GROUPS
    before = peak_bytes()
    stream(layers, sequences, memory)
    held = budget.per_token * WIDE_TOKENS * times
    sizes = {"budget": memory, "all": held, "mlx": mx.get_peak_memory()}
    print(json.dumps(sizes | {"before": before, "peak": peak_bytes()}))


def peak_bytes() -> int:
    """The most memory that this process ever had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def measure_peaks() -> dict[int, dict[str, int]]:
    """Run `peak` in fresh processes."""
    peaks = {}
    with tempfile.TemporaryDirectory() as folder:
        source = write_source(Path(folder) / "source", WIDE)
        for times in TIMES:
            command = [sys.executable, "-m", "benchmarks.stream", "--source", str(source)]
            command += ["--peak", str(times)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            peaks[times] = json.loads(done.stdout)
    return peaks


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the layer stream.")
    parser.add_argument("--source", type=Path)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--peak", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def report(source: Path, options: argparse.Namespace) -> None:
    """Measure and print."""
    seconds = compare(source, options.tokens, options.repeats)
    rates = calibrations(options.tokens // 4, options.repeats)
    peaks = measure_peaks()
    growth = peaks[TIMES[1]]["peak"] / peaks[TIMES[0]]["peak"] - 1
    if options.json:
        print(
            json.dumps({"seconds": seconds, "calibration": rates, "peaks": peaks, "growth": growth})
        )
        return
    print(f"{options.tokens:,} tokens streamed      {seconds['streamed']:7.2f} s")
    print(f"{options.tokens:,} tokens, all loaded   {seconds['loaded']:7.2f} s")
    print(f"what streaming costs        {seconds['cost']:+.1%}  (at most 15 % is the aim)")
    print(f"calibrating {rates['tokens']:,} tokens    {rates['streamed']:7.0f} tokens/s")
    print(f"a plain pass with taps      {rates['plain']:7.0f} tokens/s")
    print(f"the stream is faster by     {rates['ratio']:.2f} x  (more than 1 is the aim)")
    for times, values in peaks.items():
        texts = {name: format_bytes(value) for name, value in values.items()}
        print(f"peak at {times} x the tokens      {texts['peak']}, {texts['before']} before")
        print(f"  of it in MLX              {texts['mlx']}, budget {texts['budget']}")
        print(f"  all activations at once   {texts['all']}")
    print(f"growth of the peak          {growth:+.1%}  (at most 10 % is the aim)")


def main() -> None:
    options = arguments()
    if options.peak:
        peak(options.source, options.peak)
        return
    with tempfile.TemporaryDirectory() as folder:
        report(options.source or write_source(Path(folder) / "source", SIZES), options)


if __name__ == "__main__":
    main()
