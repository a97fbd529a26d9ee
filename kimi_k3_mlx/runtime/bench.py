"""How long a build takes to read a prompt and to write, context by context, on this machine.

Input: a loaded build, lengths of prompts. Output: JSON values, CSV, a figure. mlx-lm's own
`stream_generate` is what is timed. Tokens a second are stated only for weights that are wired:
decoding others has been seen 27 times slower, while their prefill looked healthy.
"""

from __future__ import annotations

import csv
import io
import platform
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import mlx.core as mx

from converters.config import read_dims
from kimi_k3_mlx.convert.memory import running
from kimi_k3_mlx.runtime.chips import find_chip
from kimi_k3_mlx.runtime.generate import Sampling, responses
from kimi_k3_mlx.runtime.load import Loaded, parameters
from kimi_k3_mlx.runtime.machine import Machine
from kimi_k3_mlx.runtime.roofline import Traffic
from kimi_k3_mlx.runtime.wiring import WIRING_MACOS, weights_are_wired
from kimi_k3_mlx.schema import Json
from kimi_k3_mlx.units import format_bytes

BANK = ".switch_mlp"
"""In the paths of routed experts, whichever bank they lie in."""


class Trial(NamedTuple):
    """One run."""

    n_prompt: int
    n_decoded: int
    """Tokens after the first one, which belongs to the prompt: it comes out of its last pass."""
    prefill_seconds: float
    decode_seconds: float
    peak_memory: int
    """Bytes, in this run."""


def measure(
    build: Loaded,
    contexts: Sequence[int],
    n_generate: int,
    n_trials: int,
    step: int,
    on_trial: Callable[[Trial], object] = str,
) -> list[Trial]:
    """Time prompts of random tokens, as mlx_lm.benchmark's, each `n_trials` times after a warm-up.

    `n_generate` (2 or more) tokens are written after each, and no end token ends them. No drafts.
    """
    ends, build.tokenizer.eos_token_ids = build.tokenizer.eos_token_ids, ()
    try:
        run(build, contexts[0], n_generate, step)
        trials = []
        for n_prompt in contexts:
            for _ in range(n_trials):
                trials.append(run(build, n_prompt, n_generate, step))
                on_trial(trials[-1])
    finally:
        build.tokenizer.eos_token_ids = ends
    return trials


def run(build: Loaded, n_prompt: int, n_generate: int, step: int) -> Trial:
    """One prompt and what is written after it."""
    mx.random.seed(0)
    prompt: Any = mx.random.randint(0, build.config["text_config"]["vocab_size"], (n_prompt,))
    mx.reset_peak_memory()
    *_, last = responses(build, prompt.tolist(), Sampling(n_generate), {"prefill_step_size": step})
    return Trial(
        n_prompt,
        last.generation_tokens - 1,
        n_prompt / last.prompt_tps,
        last.generation_tokens / last.generation_tps,
        round(last.peak_memory * 1e9),
    )


def why_not_wired(build: Loaded, wire: bool) -> str:
    """Why no speed may be stated; empty if the weights were wired."""
    if not wire:
        return "--no-wire leaves them where the system may page them out"
    if weights_are_wired(build.model):
        return ""
    if not mx.metal.is_available():
        return f"{platform.system()} has no Metal GPU, which is what wires them"
    n_bytes = sum(array.nbytes for _, array in parameters(build.model))
    limit = int(mx.device_info().get("max_recommended_working_set_size", 0))
    if n_bytes > limit:
        return f"they take {format_bytes(n_bytes)}, and {format_bytes(limit)} can be wired"
    return f"macOS {platform.mac_ver()[0]} is older than {WIRING_MACOS}"


def traffic(build: Loaded, context: int) -> Traffic:
    """Bytes of this build for a decoded token (`roofline`): a model, by its weights in memory.

    Of the experts of a layer a token reads its own share, the mean if they differ in bits.
    """
    dims = read_dims(build.config)
    layers: dict[str, int] = defaultdict(int)
    counts: dict[str, dict[str, int]] = defaultdict(dict)
    trunk = 0
    for name, array in parameters(build.model):
        layer, found, rest = name.partition(BANK)
        if found:
            layers[layer] += array.nbytes
            counts[layer][rest.partition(".")[0]] = array.shape[0]
        elif ".embed_tokens." not in name:
            trunk += array.nbytes
    experts = sum(
        dims.top_k * n_bytes // sum(counts[layer].values()) for layer, n_bytes in layers.items()
    )
    memory = running(dims, 0, context)
    return Traffic(trunk, experts, memory.n_cache, 2 * memory.n_state)


def summary(build: Loaded, trials: Sequence[Trial], machine: Machine, reason: str) -> Json:
    """Everything that can be said; speeds only without a `reason` against them."""
    chip = find_chip(machine.chip or "")
    rows = []
    for n_prompt in dict.fromkeys(trial.n_prompt for trial in trials):
        those = [trial for trial in trials if trial.n_prompt == n_prompt]
        needed = traffic(build, n_prompt)
        rows.append(row(those, needed, None if reason or not chip else chip.bandwidth, not reason))
    return {
        "version": 1,
        "machine": machine.to_json(),
        "wired": not reason,
        "why_not_wired": reason or None,
        "wired_limit": machine.limit if machine.is_mac else None,
        "chip": chip and chip._asdict(),
        "prompts": "random tokens",
        "rows": rows,
    }


def row(trials: list[Trial], needed: Traffic, bandwidth: float | None, wired: bool) -> Json:
    """Trials of one context: medians, extremes, and how near the ceiling they are."""
    first = trials[0]
    found: Json = {
        "prompt_tokens": first.n_prompt,
        "decoded_tokens": first.n_decoded,
        "trials": [trial._asdict() for trial in trials],
        "peak_memory": max(trial.peak_memory for trial in trials),
        "bytes_per_token": needed.to_json() | {"kind": "model"},
        "ceiling_tokens_per_second": bandwidth and bandwidth / needed.total,
    }
    for name, n_tokens in (("prefill", first.n_prompt), ("decode", first.n_decoded)):
        seconds = [getattr(trial, f"{name}_seconds") for trial in trials]
        middle = median(seconds)
        found[f"{name}_seconds"] = {"median": middle, "min": min(seconds), "max": max(seconds)}
        found[f"{name}_tokens_per_second"] = n_tokens / middle if wired else None
    speed, ceiling = found["decode_tokens_per_second"], found["ceiling_tokens_per_second"]
    found["share_of_ceiling"] = speed / ceiling if speed and ceiling else None
    return found


def csv_text(value: Json) -> str:
    """A line for every trial, each with the machine that it ran on."""
    machine = value["machine"]
    same = {
        "wired": value["wired"],
        "wired_limit_bytes": value["wired_limit"],
        "system": machine["system"],
        "chip": machine["chip"],
        "ram_bytes": machine["ram"],
        "macos": ".".join(map(str, machine["macos"])),
        "python": machine["python"],
    } | machine["versions"]
    lines = []
    for found in value["rows"]:
        for trial in found["trials"]:
            speeds = {
                f"{name}_tokens_per_second": n / trial[f"{name}_seconds"]
                if value["wired"]
                else None
                for name, n in (("prefill", trial["n_prompt"]), ("decode", trial["n_decoded"]))
            }
            lines.append(trial | speeds | same)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def svg(value: Json, title: str) -> bytes:
    """Prefill and decoding over the context: tokens a second if wired, else seconds."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    from kimi_k3_mlx.reap.figures import COLOURS, STYLE, WIDTH

    unit = "tokens a second" if value["wired"] else "seconds (weights not wired)"
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(STYLE)
        figure = Figure(figsize=(WIDTH, 3.5), layout="constrained")
        figure.suptitle(title)
        panels: Any = figure.subplots(1, 2)
        for axes, name, colour in zip(panels, ("prefill", "decode"), COLOURS, strict=False):
            at, values = points(value, name)
            axes.scatter(at, values, color=colour, s=14)
            axes.set(title=name, xlabel="tokens of the prompt", ylabel=unit, ylim=(0, None))
        out = io.BytesIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return out.getvalue()


def points(value: Json, name: str) -> tuple[list[int], list[float]]:
    """Context and speed, or seconds, of each trial."""
    at, found = [], []
    for trial in (trial for row in value["rows"] for trial in row["trials"]):
        n_tokens = trial["n_prompt" if name == "prefill" else "n_decoded"]
        seconds = trial[f"{name}_seconds"]
        at.append(trial["n_prompt"])
        found.append(n_tokens / seconds if value["wired"] else seconds)
    return at, found
