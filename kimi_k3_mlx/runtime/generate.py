"""Generates text through mlx-lm's own `stream_generate` and samplers; no decode loop of ours.

Input: a loaded build, a prompt, options of sampling and decoding. Output: pieces of text, then
statistics. A speed is stated only when the weights were wired: decoding unwired weights has been
seen 27 times slower. Greedy text is decoded with prompt lookup unless a draft model does better.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kimi_k3_mlx.chat import Picture, PieceEncoder
from kimi_k3_mlx.chat.render import picture
from kimi_k3_mlx.errors import UsageError
from kimi_k3_mlx.runtime.load import Loaded
from kimi_k3_mlx.runtime.vision import Eyes, Prompt, embed
from kimi_k3_mlx.runtime.wiring import weights_are_wired

if TYPE_CHECKING:
    from PIL.Image import Image

DRAFT_TOKENS = 3
"""Tokens that a draft model drafts at a time: mlx-lm's default."""


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
class Decoding:
    """How to compute. Only `kv_bits` changes what is generated."""

    lookup: bool | None = None
    """Prompt lookup; None: when greedy, and without a draft model."""
    draft: Loaded | None = None
    """A small model with the same tokenizer, see `runtime.draft`."""
    num_draft_tokens: int | None = None
    """Most tokens of a draft; None: 8 by lookup, 3 by a draft model."""
    kv_bits: int | None = None
    kv_group_size: int = 64
    quantized_kv_start: int = 5000
    """Tokens in the cache from which on it is quantized; mlx-lm's default."""
    prefill_step_size: int = 4096
    """Prompt tokens a pass. At 16 of 896 experts a token, each expert gets 73 of 4,096: its
    weights are read once for all of them. mlx-lm's 2,048 would read them twice as often."""


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
    tokens_from_drafts: int
    """Generated tokens that cost no forward pass of their own."""
    prompt_tokens_per_second: float | None = None
    """Known only when the weights were wired; so is the next one."""
    generation_tokens_per_second: float | None = None


def generate(
    build: Loaded,
    prompt: str | Prompt,
    sampling: Sampling,
    on_text: Callable[[str], object] = str,
    decoding: Decoding = Decoding(),
) -> Completion:
    """Continue a text, or a `picture_prompt`; `on_text` receives each piece once it is decoded."""
    began = time.perf_counter()
    pieces: list[str] = []
    model, options = prepare(build, sampling, decoding)
    drafted = 0
    for response in responses(build._replace(model=model), prompt, sampling, options):
        pieces.append(response.text)
        on_text(response.text)
        drafted += response.from_draft
    wired = weights_are_wired(build.model)
    return Completion(
        text="".join(pieces),
        prompt_tokens=response.prompt_tokens,
        generation_tokens=response.generation_tokens,
        finish_reason=response.finish_reason,
        seconds=time.perf_counter() - began,
        peak_memory=round(response.peak_memory * 1e9),
        wired=wired,
        tokens_from_drafts=drafted if model is build.model else model.asked - model.passes,
        prompt_tokens_per_second=response.prompt_tps if wired else None,
        generation_tokens_per_second=response.generation_tps if wired else None,
    )


def picture_prompt(build: Loaded, eyes: Eyes, images: Sequence[Image], text: str) -> Prompt:
    """K3's own markup of each picture, and after them a text as it stands."""
    pieces = [piece for image in images for piece in picture(Picture(*image.size), "user")]
    ids = PieceEncoder(build.tokenizer).encode_pieces(pieces)
    ids += build.tokenizer.encode(text, add_special_tokens=False)
    return embed(build.model, eyes, ids, images)


def prepare(build: Loaded, sampling: Sampling, decoding: Decoding) -> tuple[Any, dict[str, Any]]:
    """The model to call, and mlx-lm's options; raises UsageError for what can't be."""
    from mlx_lm.models.cache import make_prompt_cache

    from kimi_k3_mlx.runtime.cache import WINDOW, check_kv_bits, rewindable
    from kimi_k3_mlx.runtime.lookup import MAX_DRAFT, Lookahead

    if decoding.kv_bits is not None:
        check_kv_bits(build.config["text_config"], decoding.kv_group_size)
    options: dict[str, Any] = {
        "prefill_step_size": decoding.prefill_step_size,
        "kv_bits": decoding.kv_bits,
        "kv_group_size": decoding.kv_group_size,
        "quantized_kv_start": decoding.quantized_kv_start,
    }
    if decoding.draft is not None:
        if decoding.lookup:
            raise UsageError("a draft model and prompt lookup both draft.", "leave out --lookup.")
        n_tokens = decoding.num_draft_tokens or DRAFT_TOKENS
        caches = make_prompt_cache(build.model) + make_prompt_cache(decoding.draft.model)
        options |= {
            "draft_model": decoding.draft.model,
            "num_draft_tokens": n_tokens,
            "prompt_cache": rewindable(caches, max(WINDOW, n_tokens)),
        }
    elif decoding.lookup or (decoding.lookup is None and sampling.temperature == 0):
        return Lookahead(build.model, decoding.num_draft_tokens or MAX_DRAFT), options
    return build.model, options


def responses(
    build: Loaded,
    prompt: str | Prompt | Sequence[int],
    sampling: Sampling,
    options: dict[str, Any],
) -> Generator[Any, None, None]:
    """mlx-lm's stream of responses to text, pictures or token ids; there is at least one."""
    import mlx.core as mx
    from mlx_lm.generate import stream_generate
    from mlx_lm.sample_utils import make_sampler

    tokens: Any = prompt
    if isinstance(prompt, str):
        tokens = build.tokenizer.encode(prompt, add_special_tokens=False)
    elif isinstance(prompt, Prompt):
        tokens, options = prompt.ids, options | {"input_embeddings": prompt.embeddings}
    if not len(tokens):
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
        build.model,
        build.tokenizer,
        tokens,
        max_tokens=sampling.max_tokens,
        sampler=sampler,
        **options,
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
