"""Generates text through mlx-lm's own `stream_generate` and samplers; no decode loop of ours.

Input: a loaded build, a prompt, sampling options. Output: pieces of text, then statistics. A speed
is stated only when the weights were wired: decoding unwired weights has been seen 27 times slower.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any

from kimi_k3_mlx.errors import UsageError
from kimi_k3_mlx.runtime.load import Loaded


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens; the defaults are those of mlx-lm, greedy."""

    max_tokens: int = 100
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    """0, or as many as there are tokens, keeps all."""
    min_p: float = 0.0
    seed: int | None = None


@dataclass(frozen=True)
class Completion:
    """A finished generation."""

    text: str
    prompt_tokens: int
    generation_tokens: int
    finish_reason: str
    seconds: float
    peak_memory: int
    """Bytes."""
    wired: bool
    prompt_tokens_per_second: float | None = None
    """Known only when the weights were wired; so is the next one."""
    generation_tokens_per_second: float | None = None


def generate(
    build: Loaded,
    prompt: str,
    sampling: Sampling,
    on_text: Callable[[str], object] = str,
) -> Completion:
    """Continue `prompt`; `on_text` receives each piece of text as soon as it is decoded."""
    began = time.perf_counter()
    pieces: list[str] = []
    for response in responses(build, prompt, sampling):
        pieces.append(response.text)
        on_text(response.text)
    wired = weights_are_wired(build.model)
    return Completion(
        text="".join(pieces),
        prompt_tokens=response.prompt_tokens,
        generation_tokens=response.generation_tokens,
        finish_reason=response.finish_reason,
        seconds=time.perf_counter() - began,
        peak_memory=round(response.peak_memory * 1e9),
        wired=wired,
        prompt_tokens_per_second=response.prompt_tps if wired else None,
        generation_tokens_per_second=response.generation_tps if wired else None,
    )


def responses(build: Loaded, prompt: str, sampling: Sampling) -> Iterator[Any]:
    """mlx-lm's stream of responses; there is always at least one."""
    import mlx.core as mx
    from mlx_lm.generate import stream_generate
    from mlx_lm.sample_utils import make_sampler

    tokens = build.tokenizer.encode(prompt, add_special_tokens=False)
    if not tokens:
        raise UsageError("the prompt is empty.", "give some text: -p 'def main('")
    if sampling.seed is not None:
        mx.random.seed(sampling.seed)
    vocabulary = build.config["text_config"]["vocab_size"]
    sampler = make_sampler(
        temp=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k if sampling.top_k < vocabulary else 0,
        min_p=sampling.min_p,
    )
    stream = stream_generate(
        build.model, build.tokenizer, tokens, max_tokens=sampling.max_tokens, sampler=sampler
    )
    while response := next_response(stream):
        yield response


def next_response(stream: Iterator[Any]) -> Any:
    """The next response; mlx-lm prints its warnings to stdout, where only data may go."""
    with redirect_stdout(sys.stderr), eager_on_cpu():
        return next(stream, None)


@contextmanager
def eager_on_cpu() -> Iterator[None]:
    """Without a GPU, don't fuse: MLX runs g++ for each new kernel, a minute for nothing."""
    import mlx.core as mx

    if mx.metal.is_available() or "MLX_DISABLE_COMPILE" in os.environ:
        yield
        return
    mx.disable_compile()
    try:
        yield
    finally:
        mx.enable_compile()


def weights_are_wired(model: Any) -> bool:
    """Whether mlx-lm's wired limit covers the whole model on this machine."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    if not mx.metal.is_available():
        return False
    n_bytes = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    return bool(n_bytes <= mx.device_info().get("max_recommended_working_set_size", 0))
