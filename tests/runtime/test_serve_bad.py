"""What goes wrong: clients that leave, requests that are none. The server goes on."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from kimi_k3_mlx.runtime.server import handler
from tests.runtime.serving import (
    LONG,
    Answer,
    Server,
    ask,
    client_of,
    long_story,
    serving,
    small_k3,
    talk,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(small_k3(tmp_path_factory.mktemp("served") / "small-k3"), long_story) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return client_of(server)


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch, server: Server) -> list[int]:
    """Let the model take its time, and count its calls."""
    calls: list[int] = []
    model = type(server.engine.build.model)
    plain = model.__call__

    def slow(self: Any, *args: Any, **options: Any) -> Any:
        calls.append(args[0].shape[1])
        time.sleep(0.02)
        return plain(self, *args, **options)

    monkeypatch.setattr(model, "__call__", slow)
    return calls


def settled(server: Server, calls: list[int]) -> None:
    """Wait until nothing is computed any more; less than a second, not the whole answer."""
    deadline = time.monotonic() + 20
    seen = -1
    while len(calls) != seen:
        assert time.monotonic() < deadline
        seen = len(calls)
        time.sleep(0.4)


def test_a_cancelled_stream_stops_the_computation(
    client: openai.OpenAI, server: Server, slowly: list[int]
) -> None:
    stream = ask(client, LONG, stream=True)
    for _, part in zip(range(5), stream, strict=False):
        assert part.choices
    stream.close()
    settled(server, slowly)
    assert len(slowly) < 200, "the answer has 1,200 tokens"
    assert ask(client, "x", max_tokens=2).usage.completion_tokens == 2


@pytest.mark.parametrize("queued", [False, True])
def test_a_client_that_leaves_while_it_waits(
    queued: bool, client: openai.OpenAI, server: Server, slowly: list[int]
) -> None:
    """Without a stream nothing is written that could fail: the closed connection is noticed."""
    first = ask(client, LONG, stream=True) if queued else None
    if first is not None:
        next(iter(first))
    with pytest.raises(openai.APITimeoutError):
        ask(client.with_options(timeout=1.0), LONG)
    if first is not None:
        first.close()
    settled(server, slowly)
    assert len(slowly) < 300
    assert ask(client, "x", max_tokens=2).usage.completion_tokens == 2


def post(server: Server, body: Any, path: str = "/v1/chat/completions") -> Answer:
    return talk(server, "POST", path, body)


HELLO = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
ORPHAN = {"role": "tool", "tool_call_id": "nobody", "content": "5"}
IMAGE = {"type": "image_url", "image_url": {"url": "https://example.org/x.png"}}
POST = b"POST /v1/chat/completions HTTP/1.1\r\n"
BAD: dict[str, tuple[Any, str]] = {
    "broken JSON": (b'{"messages": [', "is not JSON"),
    "not UTF-8": (b'{"messages": "\xff"}', "is not UTF-8"),
    "half a surrogate": (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "not UTF-8"),
    "deep": (b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    "a list": (b"[]", "is a list"),
    "nothing": (b"", "is not JSON"),
    "no messages": ({}, "`messages` is missing"),
    "messages are text": ({"messages": "x"}, "`messages` is a str"),
    "a message is text": ({"messages": ["x"]}, r"messages[0]"),
    "unknown role": ({"messages": [{"role": "robot", "content": "x"}]}, "'robot'"),
    "content is a number": ({"messages": [{"role": "user", "content": 5}]}, "`content` is a int"),
    "a result without a call": ({"messages": [ORPHAN]}, "answers no call"),
    "an image": ({"messages": [{"role": "user", "content": [IMAGE]}]}, "images are not served"),
    "too long": (HELLO | {"max_tokens": 2_000_000}, "but 1,048,576 fit"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_requests_are_answered_and_survived(case: str, server: Server) -> None:
    body, words = BAD[case]
    answer = post(server, body)
    assert answer.status == 400
    error = answer.body["error"]
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}
    assert post(server, HELLO).status == 200


def test_depth_is_survived_wherever_the_stack_ends(server: Server) -> None:
    """JSON that can just be read may be too deep to be written again."""
    seen = set()
    for n in range(900, 1004, 8):
        deep = b'"tools": [{"function": {"name": "f", "x": ' + b"[" * n + b"]" * n + b"}}], "
        seen.add(post(server, b"{" + deep + json.dumps(HELLO).encode()[1:]).status)
    assert seen == {200, 400}


def test_other_paths_and_methods(server: Server) -> None:
    assert post(server, HELLO, "/v1/embeddings").status == 404
    assert talk(server, "GET", "/v1/nothing").body["error"]["code"] == "not_found"
    assert talk(server, "PUT", "/v1/models").body["error"]["message"].startswith("Unsupported")


def test_huge_bodies_are_refused(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handler, "MAX_BODY", 1000)
    answer = post(server, HELLO | {"user": "x" * 3_000_000})
    assert answer.status == 413
    assert "1,000 are read at most" in answer.body["error"]["message"]


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\x16\x03\x01\x02\x00garbage\r\n\r\n", b""),
        (b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n", b"414"),
        (POST + b"Content-Length: x\r\n\r\n", b"400"),
        (POST + b"Content-Length: -5\r\n\r\n", b"400"),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", b"411"),
        (POST + b"Content-Length: 50\r\n\r\n{", b""),
        (b"", b""),
    ],
)
def test_raw_bytes(sent: bytes, status: bytes, server: Server) -> None:
    with socket.create_connection(server.server_address[:2], timeout=20) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert status in answer.split(b"\r\n")[0]
    assert post(server, HELLO).status == 200


def test_a_failure_inside_is_an_error_of_one_request(
    server: Server, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = type(server.engine.build.model)

    def out_of_memory(self: Any, *args: Any, **options: Any) -> Any:
        raise RuntimeError("[metal::malloc] too much")

    with monkeypatch.context() as patch:
        patch.setattr(model, "__call__", out_of_memory)
        with pytest.raises(openai.InternalServerError, match="metal::malloc"):
            ask(client, "another text", max_tokens=1)
        with pytest.raises(openai.APIError, match="metal::malloc"):
            list(ask(client, "another text", max_tokens=1, stream=True))
    assert ask(client, "x", max_tokens=1).usage.completion_tokens == 1
