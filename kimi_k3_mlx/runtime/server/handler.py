"""Speaks HTTP with one client: reads its request, streams or sends the answer, notices its end.

Input: a connection. Output: OpenAI's JSON or server-sent events; errors in OpenAI's shape, with
their status. Nothing that a client sends ends the server, and a client that goes away ends the
computation for it.
"""

from __future__ import annotations

import hmac
import json
import logging
import select
import socket
from collections.abc import Iterator
from http import HTTPStatus
from http.client import HTTPMessage
from queue import Queue
from typing import Any

from mlx_lm.server import APIHandler

from kimi_k3_mlx.errors import KimiError
from kimi_k3_mlx.runtime.server import request
from kimi_k3_mlx.runtime.server.engine import FAILURES, CancelledError, Engine, Job
from kimi_k3_mlx.runtime.server.reply import Envelope, Reply, Usage
from kimi_k3_mlx.runtime.server.request import RequestError
from kimi_k3_mlx.schema import Json

MAX_BODY = 64 << 20
MAX_DRAINED = 4 * MAX_BODY
"""A client that is still sending would not see the refusal."""
POLL_SECONDS, KEEPALIVE_SECONDS = 0.5, 10.0
GONE = (ConnectionError, TimeoutError)

CHAT, TEXT, MODELS = "/chat/completions", "/completions", "/models"


class Handler(APIHandler):  # type: ignore[misc]
    """A connection, in a thread of its own."""

    protocol_version = "HTTP/1.1"
    timeout = 60
    """Seconds that a client may take to send its request, or to take a piece of the answer."""
    response_generator: Engine
    headers = HTTPMessage()
    """What a request has that http.server refuses before its headers."""

    @property
    def engine(self) -> Engine:
        """What generates."""
        return self.response_generator

    @property
    def route(self) -> str:
        """The path without query, final slash and `/v1`."""
        path: str = self.path
        return path.partition("?")[0].rstrip("/").removeprefix("/v1")

    def handle(self) -> None:
        """What http.server calls for a connection."""
        try:
            super().handle()
        except GONE:
            logging.info("a client has gone")

    def end_headers(self) -> None:
        """One request is one connection."""
        self.send_header("Connection", "close")
        super().end_headers()

    def do_GET(self) -> None:
        """`/health` for everybody, `/v1/models` for those with the key."""
        if self.route == "/health":
            healthy = self.engine.is_healthy
            self.send_json({"status": "ok" if healthy else "unavailable"}, 200 if healthy else 503)
            return
        try:
            self.check_key()
            self.send_json(self.models())
        except RequestError as error:
            self.refuse(error)

    def do_POST(self) -> None:
        """Chat completions and completions."""
        try:
            body = self.read_body()
            self.check_key()
            if self.route not in (CHAT, TEXT):
                raise unknown_path(self.path)
            self.complete(request.parse(body))
        except RequestError as error:
            self.refuse(error)
        except RecursionError:
            self.refuse(RequestError("the body is nested too deeply."))

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What http.server itself refuses, in the shape of all other errors."""
        self.close_connection = True
        self.refuse(RequestError(message or HTTPStatus(code).phrase, status=code))

    def log_message(self, template: str, *values: Any) -> None:
        """Requests go to the log."""
        logging.info("%s %s", self.address_string(), template % values)

    def models(self) -> Json:
        """The one model, as a list or by its name."""
        name, room = self.engine.build.settings.name, self.engine.build.room
        model = {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "kimi-k3-mlx",
            "context_length": room.n_tokens,
        }
        if self.route == MODELS:
            return {"object": "list", "data": [model]}
        if self.route == f"{MODELS}/{name}":
            return model
        raise unknown_path(self.path)

    def check_key(self) -> None:
        """Refuse a request without the key, if there is one; its time tells nothing of the key."""
        key = self.engine.build.settings.api_key
        scheme, _, given = self.headers.get("Authorization", "").partition(" ")
        if key is None:
            return
        if scheme.lower() != "bearer" or not hmac.compare_digest(
            given.strip().encode(), key.encode()
        ):
            raise RequestError(
                "the API key is missing or wrong: Authorization: Bearer KEY.",
                status=401,
                code="invalid_api_key",
            )

    def read_body(self) -> bytes:
        """The body, of a bounded size."""
        given = self.headers.get("Content-Length")
        if given is None:
            raise RequestError("the header Content-Length is missing.", status=411)
        if not given.isdecimal() or len(given) > 18:
            raise RequestError("the header Content-Length is no number of bytes.")
        n_bytes = int(given)
        if n_bytes > MAX_BODY:
            left = min(n_bytes, MAX_DRAINED)
            while left and (piece := self.rfile.read(min(left, 1 << 20))):
                left -= len(piece)
            raise RequestError(
                f"the body has {n_bytes:,} bytes; {MAX_BODY:,} are read at most.", status=413
            )
        body: bytes = self.rfile.read(n_bytes)
        if len(body) < n_bytes:
            raise ConnectionAbortedError
        return body

    def complete(self, body: Json) -> None:
        """Answer a request that is JSON."""
        build = self.engine.build
        reader = request.chat if self.route == CHAT else request.text
        asked = reader(body, build.vocabulary)
        prompt = build.prompter.prompt(asked)
        job, queue = self.engine.submit(asked, prompt)
        reply = Reply(asked, Usage(len(prompt.ids)), build.markers, build.prompter.spell)
        envelope = Envelope(asked, build.settings.name, self.system_fingerprint)
        try:
            if asked.stream:
                self.stream_answer(job, queue, reply, envelope)
            else:
                pieces = [piece for pieces in self.pieces(job, queue, reply) for piece in pieces]
                self.send_json(envelope.whole(pieces, reply))
        finally:
            job.cancel()
        usage = reply.usage
        numbers = (usage.prompt, usage.cached, usage.completion, reply.finish_reason)
        logging.info("%d tokens of prompt (%d cached), %d of answer: %s", *numbers)

    def pieces(self, job: Job, queue: Queue[Any], reply: Reply) -> Iterator[list[Json]]:
        """The pieces of every token, and an empty list whenever there was nothing to say.

        Raises RequestError when the generation fails, ConnectionError when the client has gone.
        """
        try:
            for item in self.engine.items(queue, POLL_SECONDS):
                if self.client_has_gone():
                    raise ConnectionAbortedError
                if isinstance(item, tuple):
                    yield []
                elif job.begins(item):
                    reply.usage.cached = item.prompt_cache_count
                else:
                    yield reply.feed(item)
                    if reply.finish_reason is not None:
                        return
        except (RequestError, *GONE):
            raise
        except CancelledError:
            raise ConnectionAbortedError from None
        except FAILURES as error:
            reason = error.message if isinstance(error, KimiError) else f"{error}"
            message = f"the generation failed: {reason or type(error).__name__}"
            raise RequestError(message, status=500, kind="server_error") from error
        raise RequestError("the generation ended early.", status=500, kind="server_error")

    def client_has_gone(self) -> bool:
        """Whether the other end is closed: it may still have sent something, but not an end."""
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        return bool(poll.poll(0)) and not self.connection.recv(1, socket.MSG_PEEK)

    def stream_answer(self, job: Job, queue: Queue[Any], reply: Reply, envelope: Envelope) -> None:
        """Send the answer as server-sent events, in chunks: an end that is none can be told."""
        self._set_stream_headers(200)
        if self.request_version != "HTTP/1.0":
            self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if reply.asked.messages is not None:
            self.send_event(envelope.chunk({"role": "assistant", "content": ""}))
        try:
            waited = 0.0
            for pieces in self.pieces(job, queue, reply):
                for piece in pieces:
                    self.send_event(envelope.chunk(piece, reply.take_logprobs()))
                waited = 0.0 if pieces else waited + POLL_SECONDS
                if waited >= KEEPALIVE_SECONDS:
                    waited = 0.0
                    self.send_chunk(b": keepalive\n\n")
        except RequestError as error:
            self.send_event(error.body())
            self.send_chunk(b"")
            return
        self.send_event(envelope.chunk({}, reply.take_logprobs(), reply.finish_reason))
        if reply.asked.include_usage:
            self.send_event(envelope.part([], reply.usage))
        self.send_chunk(b"data: [DONE]\n\n")
        self.send_chunk(b"")

    def send_event(self, value: Json) -> None:
        """A server-sent event."""
        self.send_chunk(b"data: " + json.dumps(value).encode() + b"\n\n")

    def send_chunk(self, value: bytes) -> None:
        """A part of a body of unknown length; an empty one is its end."""
        old = self.request_version == "HTTP/1.0"
        self.send_bytes(value if old else b"%x\r\n%b\r\n" % (len(value), value))

    def send_bytes(self, value: bytes) -> None:
        """Send at once."""
        self.wfile.write(value)
        self.wfile.flush()

    def send_json(self, value: Json, status: int = 200) -> None:
        """An answer in one piece."""
        body = json.dumps(value).encode()
        self._set_completion_headers(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.send_bytes(body)

    def refuse(self, error: RequestError) -> None:
        """Send an error."""
        logging.info("refused: %s", error.message)
        self.send_json(error.body(), error.status)


def unknown_path(path: str) -> RequestError:
    """There is nothing at this path."""
    known = f"/v1{CHAT}, /v1{TEXT}, /v1{MODELS}, /health"
    return RequestError(f"{path[:80]} is none of {known}.", status=404, code="not_found")
