"""Generates for one request after the other, in mlx-lm's thread, and reuses prompts.

Input: `Job`s. Output, in the job's queue: mlx-lm's `GenerationContext`, tuples of progress,
`Response`s, and None or an exception at the end. Caches are kept where messages end: after tools
and system prompt, after the last message, after the answer. Batches are mlx-lm's own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, Queue
from threading import Event
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step, stream_generate, wired_limit
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.server import (
    GenerationArguments,
    GenerationContext,
    LogitsProcessorArguments,
    ModelDescription,
    Response,
    ResponseGenerator,
    SamplingArguments,
    _make_logits_processors,
    _make_sampler,
)

from kimi_k3_mlx.errors import KimiError
from kimi_k3_mlx.runtime.cache import WINDOW, rewindable
from kimi_k3_mlx.runtime.lookup import MAX_DRAFT, Lookahead
from kimi_k3_mlx.runtime.server.prompt import Prompt
from kimi_k3_mlx.runtime.server.provider import OneBuild, PromptCaches
from kimi_k3_mlx.runtime.server.request import Asked, RequestError
from kimi_k3_mlx.runtime.vision import embed

FAILURES = (KimiError, RuntimeError, ValueError, LookupError, TypeError, OSError, MemoryError)
"""What may go wrong in one request and must not end the others: MLX raises RuntimeError."""

SAMPLERS = ("top_p", "top_k", "min_p", "xtc_probability", "xtc_threshold")


class CancelledError(Exception):
    """The client has gone."""


@dataclass
class Job:
    """A request in the queue."""

    prompt: Prompt
    max_tokens: int
    messages: list[Any] = field(default_factory=list)
    """What mlx-lm looks through for images."""
    cancelled: Event = field(default_factory=Event)
    context: Any = None
    """What mlx-lm calls a request that is running."""

    def begins(self, item: Any) -> bool:
        """Take note that it runs, if that is what the item says."""
        if not isinstance(item, GenerationContext):
            return False
        self.context = item
        return True

    def cancel(self) -> None:
        """Compute no more for it."""
        self.cancelled.set()
        if self.context is not None:
            self.context.stop()


class Engine(ResponseGenerator):  # type: ignore[misc]
    """mlx-lm's queue, with prompts that are tokens already."""

    def __init__(self, provider: OneBuild) -> None:
        self.build = provider
        self.current: Job | None = None
        super().__init__(provider, PromptCaches(provider))

    def end(self) -> None:
        """Break off what runs, and end the thread."""
        self._stop = True
        if (job := self.current) is not None:
            job.cancel()
        self.join()

    def _generate(self) -> None:
        """mlx-lm's loop. MLX aborts the process at its end if a thread has left streams behind."""
        try:
            super()._generate()
        finally:
            mx.clear_streams()

    def submit(self, asked: Asked, prompt: Prompt) -> tuple[Job, Queue[Any]]:
        """Put a request into the queue. Raises RequestError when it doesn't fit."""
        self.check_alive()
        settings = self.build.settings
        n_tokens = self.build.room.for_answer(
            len(prompt.ids), asked.max_tokens, settings.max_tokens
        )
        job = Job(prompt, n_tokens, asked.messages or [])
        queue: Queue[Any] = Queue()
        self.requests.put((queue, job, self.arguments(asked, n_tokens)))
        return job, queue

    def items(self, queue: Queue[Any], seconds: float) -> Iterator[Any]:
        """What comes out of a job's queue, and () whenever nothing came for so long."""
        while True:
            try:
                item = queue.get(timeout=seconds)
            except Empty:
                self.check_alive()
                item = ()
            if item is None:
                return
            if isinstance(item, Exception):
                raise item
            yield item

    def check_alive(self) -> None:
        """Raise RequestError when the thread that generates has ended: a defect, here or below."""
        if not self.generation_available():
            message = "the server can't generate any more; see its log, and restart it."
            raise RequestError(message, status=503, kind="server_error")

    def arguments(self, asked: Asked, n_tokens: int) -> GenerationArguments:
        """The request in mlx-lm's words."""
        settings, values = self.build.settings, asked.sampling
        sampling = {name: values.get(name, getattr(settings, name, None)) for name in SAMPLERS}
        if (sampling["top_k"] or 0) >= self.build.vocabulary:
            sampling["top_k"] = 0  # all of them, which mlx-lm's sampler would refuse
        penalties = {name: value for name, value in values.items() if "_penalty" in name}
        contexts = {name: value for name, value in values.items() if "_context_size" in name}
        return GenerationArguments(
            model=ModelDescription("default_model", "default_model", None),
            sampling=SamplingArguments(values.get("temperature", settings.temp), **sampling),
            logits=LogitsProcessorArguments(asked.logit_bias, **penalties, **contexts),
            # Known by their letters in `reply`: a text has more than one spelling in tokens.
            stop_words=[],
            max_tokens=n_tokens,
            num_draft_tokens=0,
            logprobs=asked.logprobs,
            top_logprobs=asked.top_logprobs,
            seed=asked.seed,
            chat_template_kwargs=None,
        )

    def _tokenize(self, _tokenizer: Any, job: Job, _arguments: Any) -> tuple[Any, ...]:
        """mlx-lm's call for a request that joins a batch: tokens, in segments to keep."""
        if job.cancelled.is_set():
            raise CancelledError
        ids, marks = job.prompt.ids, job.prompt.marks
        ends = zip([0, *marks], [*marks, len(ids)], strict=True)
        segments = [ids[begin:end] for begin, end in ends]
        return ids, segments, ["user"] * len(segments), "normal", None

    def _serve_single(self, request: Any, stream: Any) -> None:
        """mlx-lm's call for a request that runs alone."""
        queue, job, arguments = request
        self.current = job
        try:
            if not job.cancelled.is_set():
                Alone(self, job, arguments, queue.put, stream).run()
        except CancelledError:
            queue.put(None)
        except FAILURES as error:
            logging.error("a request failed: %s: %s", type(error).__name__, error)
            queue.put(error)


class Alone:
    """One request, from the nearest prompt cache to the last token."""

    def __init__(
        self, engine: Engine, job: Job, arguments: Any, put: Callable[[Any], None], stream: Any
    ) -> None:
        self.build, self.job, self.arguments = engine.build, job, arguments
        self.put, self.stream = put, stream
        settings = self.build.settings
        lookup = settings.lookup
        self.lookup = arguments.sampling.temperature == 0 if lookup is None else lookup
        self.options = {
            "prefill_step_size": settings.prefill_step_size,
            "kv_bits": settings.kv_bits,
            "kv_group_size": settings.kv_group_size,
            "quantized_kv_start": settings.quantized_kv_start,
        }

    def run(self) -> None:
        """Answer the request."""
        build, prompt = self.build, self.job.prompt
        if self.arguments.seed is not None:
            mx.random.seed(self.arguments.seed)
        caches, n = build.snapshots.nearest(prompt.key)
        self.put(GenerationContext(False, False, None, None, "", prompt.ids, n))
        if caches is None:
            caches = make_prompt_cache(build.model)
        for mark in prompt.marks:
            if mark > n:
                self.prefill(caches, n, mark)
                build.snapshots.put(prompt.key[:mark], caches)
                n = mark
        model = build.model
        if self.lookup:
            model = Lookahead(model, tokens=prompt.ids[:n])
            caches = rewindable(caches, max(WINDOW, MAX_DRAFT))
        tokens = self.decode(model, caches, n)
        self.put(None)
        if tokens and tokens[-1] == build.prompter.end:
            if self.lookup:
                model.settle(caches)
            build.snapshots.put([*prompt.key, *tokens], caches)

    def prefill(self, caches: list[Any], begin: int, end: int) -> None:
        """Let the caches see a part of the prompt."""
        options = self.options | self.inputs(begin, end) | {"prompt_cache": caches}
        with wired_limit(self.build.model, [self.stream]):
            for _ in generate_step(
                model=self.build.model, stream=self.stream, max_tokens=0, **options
            ):
                pass  # with no token to generate, nothing is yielded

    def decode(self, model: Any, caches: list[Any], begin: int) -> list[int]:
        """The rest of the prompt, and then tokens until an end."""
        arguments, build = self.arguments, self.build
        tokens: list[int] = []
        processors = _make_logits_processors(arguments)
        responses = stream_generate(
            model=model,
            tokenizer=build.tokenizer,
            max_tokens=arguments.max_tokens,
            stream=self.stream,
            sampler=_make_sampler(arguments, build.tokenizer),
            logits_processors=self.with_past(processors, begin),
            prompt_cache=caches,
            **self.inputs(begin, len(self.job.prompt.ids)),
            **self.options,
        )
        with closing(responses):
            for response in responses:
                tokens.append(response.token)
                self.put(self.said(response))
                if response.finish_reason is None and self.job.cancelled.is_set():
                    raise CancelledError
        return tokens

    def inputs(self, begin: int, end: int) -> dict[str, Any]:
        """A part of the prompt in the words of `generate_step`."""
        prompt, eyes = self.job.prompt, self.build.eyes
        ids, total = prompt.ids[begin:end], len(prompt.ids)
        images = [image for start, image in prompt.pictures if begin <= start < end]

        def progress(done: int, _total: int) -> None:
            if self.job.cancelled.is_set():
                raise CancelledError
            self.put((begin + done, total))

        inputs = {"prompt": mx.array(ids), "prompt_progress_callback": progress}
        if images and eyes is not None:
            seen = embed(self.build.model, eyes, ids, images)
            mx.eval(seen.embeddings)
            inputs |= {"prompt": seen.ids, "input_embeddings": seen.embeddings}
        return inputs

    def with_past(self, processors: Sequence[Any], begin: int) -> list[Any]:
        """Processors that also see the tokens in the caches, so that these change no answer."""
        past = mx.array(self.job.prompt.ids[:begin], mx.int32)

        def seen(processor: Any, tokens: Any, logits: Any) -> Any:
            return processor(mx.concatenate([past, tokens.astype(mx.int32)]), logits)

        return [partial(seen, processor) for processor in processors]

    def said(self, response: Any) -> Response:
        """A token, with what the client asked to know about it."""
        logprob = response.logprobs[response.token].item() if self.arguments.logprobs else 0.0
        top = top_tokens(response.logprobs, self.arguments.top_logprobs)
        return Response(response.text, response.token, logprob, response.finish_reason, top)


def top_tokens(logprobs: Any, n: int) -> tuple[dict[str, Any], ...]:
    """The likeliest tokens, best first, in mlx-lm's words."""
    if not n:
        return ()
    ids: list[int] = np.array(mx.argsort(-logprobs)[:n]).tolist()
    return tuple({"id": token, "logprob": logprobs[token].item()} for token in ids)
