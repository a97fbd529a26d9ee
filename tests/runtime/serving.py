"""Servers in a thread of the test, and a model that says what a script tells it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from openai import OpenAI

import kimi_k3_mlx
from kimi_k3_mlx.chat import PieceEncoder
from kimi_k3_mlx.chat.pieces import END, Piece
from kimi_k3_mlx.runtime.load import Loaded, load
from kimi_k3_mlx.runtime.server import provider
from kimi_k3_mlx.runtime.server.serve import Server, serve
from kimi_k3_mlx.runtime.server.settings import Settings
from tests.runtime.answers import answer_pieces
from tests.tiny_k3 import TinyConfig, write_source

TINY_K3 = Path(kimi_k3_mlx.__file__).parent / "assets" / "tiny-k3"
LONG = "a long story"
Script = Callable[[list[Any]], dict[str, Any] | list[Piece] | None]
"""Messages of a request -> the assistant's message, or its pieces; None lets the model itself."""


def small_k3(folder: Path) -> Path:
    """A random model of two layers with the trained one's tokenizer: fast, and f32 throughout."""
    sizes = TinyConfig(2, (1,), experts=2, top_k=1, vocab=1024, vision=False, trunk_dtype="F32")
    write_source(folder, sizes)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(TINY_K3 / name, folder / name)
    config, other = (json.loads((it / "config.json").read_text()) for it in (folder, TINY_K3))
    for place, model in ((config, other), (config["text_config"], other["text_config"])):
        place.update({k: v for k, v in model.items() if k.endswith("token_id")})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@contextmanager
def serving(model: Path, script: Script | None = None, **options: Any) -> Iterator[Server]:
    """A server in a thread, on a free port."""
    failures: list[BaseException] = []
    servers: list[Server] = []
    patch = pytest.MonkeyPatch()
    if script is not None:
        patch.setattr(provider, "load", scripted_load(script, servers))

    def run() -> None:
        try:
            serve(Settings(model, port=0, **options), on_ready=servers.append)
        except BaseException as error:
            failures.append(error)

    thread = Thread(target=run, daemon=True)
    thread.start()
    while not servers and thread.is_alive():
        thread.join(0.05)
    try:
        if failures:
            raise failures[0]
        yield servers[0]
    finally:
        patch.undo()
        if servers:
            servers[0].shutdown()
        thread.join(60)
        assert not thread.is_alive()


def client_of(server: Server, **options: Any) -> OpenAI:
    """The real client of OpenAI's API."""
    return OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=120, **options)


def scripted_load(script: Script, servers: list[Server]) -> Callable[..., Loaded]:
    """`load`, with a scripted model in the model's place."""

    def loaded(*args: Any, **options: Any) -> Loaded:
        build = load(*args, **options)
        return build._replace(model=Scripted(build, script, servers))

    return loaded


def ask(client: OpenAI, *messages: Any, **options: Any) -> Any:
    """A chat completion; texts are a user's messages."""
    given = [{"role": "user", "content": m} if isinstance(m, str) else m for m in messages]
    return client.chat.completions.create(model="any", messages=given, **options)


def long_story(messages: list[Any]) -> dict[str, Any] | None:
    """A script with one answer of 1,200 tokens."""
    story = {"reasoning_content": "and then " * 400}
    return story if messages and messages[-1].get("content") == LONG else None


class Answer(NamedTuple):
    """What HTTP gives back."""

    status: int
    body: Any


def talk(server: Server, method: str, path: str, body: Any = None, **headers: str) -> Answer:
    """One request, without a client's help."""
    connection = HTTPConnection(*server.server_address[:2], timeout=60)
    try:
        content = json.dumps(body).encode() if isinstance(body, dict) else body
        connection.request(method, path, content, headers)
        response = connection.getresponse()
        return Answer(response.status, json.loads(response.read()))
    finally:
        connection.close()


class Scripted(nn.Module):
    """A model whose caches are real and whose logits are forced.

    It knows where an answer begins from the job that the server's engine runs.
    """

    def __init__(self, build: Loaded, script: Script, servers: list[Server]) -> None:
        super().__init__()
        self.inner = build.model
        self._encoder = PieceEncoder(build.tokenizer)
        self._script, self._servers = script, servers
        self._last: tuple[Any, list[int] | None] = (None, None)

    @property
    def model(self) -> Any:
        return self.inner.model

    @property
    def layers(self) -> list[Any]:
        return self.inner.layers

    def make_cache(self) -> list[Any]:
        return self.inner.make_cache()

    def answer(self, job: Any) -> list[int] | None:
        """The tokens of the answer to a job."""
        if self._last[0] is not job:
            said = self._script(job.messages)
            pieces = answer_pieces(said) if isinstance(said, dict) else said
            ids = None if pieces is None else self._encoder.encode_pieces(pieces)
            self._last = (job, ids)
        return self._last[1]

    def __call__(self, inputs: Any, cache: Any = None, input_embeddings: Any = None) -> Any:
        begin = next(c.offset for c in cache if hasattr(c, "offset"))
        logits = self.inner(inputs, cache, input_embeddings=input_embeddings)
        job = self._servers[0].engine.current
        answer = self.answer(job)
        if answer is None:
            return logits
        forced = np.array(logits.astype(mx.float32))
        for i in range(inputs.shape[1]):
            place = begin + i + 1 - len(job.prompt.ids)
            inside = 0 <= place < len(answer)
            token = answer[place] if inside else self._encoder.control(END)
            forced[0, i, token] = forced[0, i].max() + 0.5
        return mx.array(forced)


def tool(name: str, **properties: str) -> dict[str, Any]:
    """A tool as a request declares it."""
    kinds = {key: {"type": kind} for key, kind in properties.items()}
    parameters = {"type": "object", "properties": kinds}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    """A call as an assistant's message holds it."""
    return {"type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
