"""The server as a program: killed, started again, with a key, with batches, with pictures."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import openai
import pytest

from kimi_k3_mlx.cli import main
from kimi_k3_mlx.runtime.server.engine import Engine
from kimi_k3_mlx.runtime.wiring import WIRES
from tests.house.checks import ROOT
from tests.runtime.serving import TINY_K3, Server, client_of, serving, talk
from tests.tiny_k3 import TinyConfig, write_source

pytestmark = pytest.mark.slow
STORY = [
    {"role": "system", "content": "You write Python."},
    {"role": "user", "content": "def fibonacci(n):"},
]


@contextmanager
def program(*options: object) -> Iterator[tuple[subprocess.Popen[str], openai.OpenAI]]:
    """`kimi-k3 server` in a process of its own."""
    command = [sys.executable, "-m", "kimi_k3_mlx", "server", "--port", "0", *map(str, options)]
    preload = {"LD_PRELOAD": "libopenblas.so.0"} if sys.platform == "linux" else {}
    process = subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=os.environ | preload
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r"listening at (http://127\.0\.0\.1:\d+/v1);", line):
                break
        else:
            raise AssertionError("it did not start")
        yield process, openai.OpenAI(base_url=found[1], api_key="k", max_retries=0, timeout=120)
    finally:
        process.kill()
        process.wait()


def ask(client: openai.OpenAI, **options: Any) -> Any:
    options = {"messages": STORY, "max_tokens": 16} | options
    return client.chat.completions.create(model="any", **options)


def test_a_restart_finds_its_prompts_on_disk(tmp_path: Path) -> None:
    """Killed in the midst of an answer; the second process computes less and says the same."""
    options = ("--model", TINY_K3, "--prompt-cache-dir", tmp_path)
    with program(*options) as (process, client):
        cold = ask(client)
        assert cold.usage.prompt_tokens_details.cached_tokens == 0
        stream = iter(ask(client, stream=True, max_tokens=4000))
        next(stream)
        process.kill()
        with pytest.raises((openai.APIError, OSError)):
            list(stream)
    with program(*options) as (process, client):
        warm = ask(client)
        assert warm.usage.prompt_tokens_details.cached_tokens > 0
        assert warm.choices[0].message == cold.choices[0].message
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130, "and no crash of MLX's at the end"


def test_an_impatient_end_is_no_abort() -> None:
    """A second Ctrl-C broke the wait for the thread that generates, and MLX aborted the process."""
    with program("--model", TINY_K3) as (process, _):
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        # Ended by the second signal, or, on a fast machine, in order before it.
        assert process.wait(60) in (-signal.SIGINT, 130)


def test_a_key(tmp_path: Path) -> None:
    with serving(TINY_K3, api_key="secret") as server:
        for header in (None, "Bearer wrong", "secret", "Basic secret", "Bearer é"):
            headers = {} if header is None else {"Authorization": header}
            answer = talk(server, "GET", "/v1/models", **headers)
            assert (answer.status, answer.body["error"]["code"]) == (401, "invalid_api_key")
            answer = talk(server, "POST", "/v1/chat/completions", {"messages": STORY}, **headers)
            assert answer.status == 401
        assert talk(server, "GET", "/health").status == 200
        answer = talk(server, "GET", "/v1/models", Authorization="Bearer secret")
        assert answer.status == 200
        with pytest.raises(openai.AuthenticationError):
            client_of(server).models.list()


def test_several_at_once(tiny_float_source: Path) -> None:
    """mlx-lm's batches give the answers of single requests, and use and fill the same caches."""
    prompts = [f"{i} {'x' * (7 * i)}" for i in range(4)]

    def texts(server: Server) -> list[tuple[str, int]]:
        def one(prompt: str) -> tuple[str, int]:
            messages = [STORY[0], {"role": "user", "content": prompt}]
            answer = ask(client_of(server), messages=messages, max_tokens=12)
            text = answer.choices[0].message.model_dump().get("reasoning_content", "")
            return text, answer.usage.prompt_tokens_details.cached_tokens

        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(one, prompts))

    with serving(tiny_float_source) as server:
        alone = [text for text, _ in texts(server)]
    with serving(tiny_float_source, decode_concurrency=3) as server:
        for round_ in range(2):
            together = texts(server)
            assert [text for text, _ in together] == alone
            assert round_ == 0 or all(cached > 40 for _, cached in together)
        assert (
            talk(server, "POST", "/v1/chat/completions", {"messages": STORY, "seed": 1}).status
            == 200
        )


def test_quantized_latents_come_back(tmp_path: Path) -> None:
    model = write_source(tmp_path / "x", TinyConfig(vision=False, trunk_dtype="F32", qk_rope=32))
    bits = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0}
    with serving(model, **bits, prompt_cache_dir=tmp_path / "prompts") as server:
        cold, warm = (ask(client_of(server)) for _ in range(2))
        server.engine.build.snapshots.entries.clear()
        from_disk = ask(client_of(server))
    assert warm.usage.prompt_tokens_details.cached_tokens > 40
    assert warm.choices[0].message == cold.choices[0].message == from_disk.choices[0].message
    with serving(model, prompt_cache_dir=tmp_path / "prompts") as server:
        other = ask(client_of(server))
        assert other.usage.prompt_tokens_details.cached_tokens == 0, "another kind of cache"


@pytest.mark.parametrize("wire", [True, False])
def test_wiring_can_be_left_out(
    wire: bool, tiny_float_source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("mlx_lm.server", "mlx_lm.generate"):
        monkeypatch.setattr(import_module(name), WIRES, lambda name=name: calls.append(name))
    with serving(tiny_float_source, wire=wire) as server:
        ask(client_of(server), max_tokens=1)
    assert (sorted(set(calls)) == ["mlx_lm.generate", "mlx_lm.server"]) is wire
    assert wire or not calls


def test_what_nobody_expected_is_told(
    tiny_float_source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A defect ends the thread that generates; clients learn it at once."""

    def defect(*_: Any) -> None:
        raise ZeroDivisionError

    with serving(tiny_float_source) as server:
        monkeypatch.setattr(Engine, "_serve_single", defect)
        for _ in range(2):
            answer = talk(server, "POST", "/v1/chat/completions", {"messages": STORY})
            assert (answer.status, answer.body["error"]["type"]) == (503, "server_error")
        assert talk(server, "GET", "/health") == (503, {"status": "unavailable"})


def test_pictures(tiny_source: Path) -> None:
    """A picture is seen, kept, and not taken for another of its size."""
    image = pytest.importorskip("PIL.Image")

    def url(color: str) -> str:
        file = io.BytesIO()
        image.new("RGB", (60, 40), color).save(file, "PNG")
        return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()

    def asked(*urls: str) -> dict[str, Any]:
        parts = [{"type": "image_url", "image_url": {"url": it}} for it in urls]
        content = [{"type": "text", "text": "What is it?"}, *parts]
        return {"messages": [STORY[0], {"role": "user", "content": content}], "max_tokens": 8}

    def answer(server: Server, *urls: str) -> tuple[dict[str, Any], int]:
        status, body = talk(server, "POST", "/v1/chat/completions", asked(*urls))
        assert status == 200, body
        cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
        return body["choices"][0]["message"], cached

    with serving(tiny_source) as server:
        red, cached = answer(server, url("red"))
        assert cached == 0
        system = answer(server)[1]
        assert answer(server, url("blue"))[1] == system > 0
        again, cached = answer(server, url("red"))
        assert again == red
        assert cached > system
        assert answer(server, url("red"), url("blue"))[1] == system
        for bad in ("https://example.org/x.png", "/etc/passwd", "data:image/png;base64,AAAA"):
            assert talk(server, "POST", "/v1/chat/completions", asked(bad)).status == 400


def test_stock_tools_run_our_builds(tiny_text_source: Path, tmp_path: Path) -> None:
    """`mlx_lm.generate` and `mlx_lm.server` on a build, without a line of ours."""
    build = tmp_path / "build"
    main(["convert", "--hf-path", str(tiny_text_source), "--mlx-path", str(build), "-q"])

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *map(str, arguments)]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    done = run("-m", "mlx_lm", "generate", "--model", build, "--prompt", "x", "-m", 4)
    assert "Generation: 4 tokens" in done.stdout
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    code = STOCK.format(model=str(build), messages=json.dumps(STORY), port=port)
    done = run("-c", code)
    assert '"completion_tokens": 4' in done.stdout, done.stderr


STOCK = """
import json, os, sys, threading, time, urllib.request
from mlx_lm import server
sys.argv = ["server", "--model", {model!r}, "--port", "{port}"]
body = json.dumps({{"messages": {messages}, "max_tokens": 4}}).encode()
def ask():
    for _ in range(240):
        try:
            asked = urllib.request.Request("http://127.0.0.1:{port}/v1/chat/completions", body)
            print(json.dumps(json.load(urllib.request.urlopen(asked))), flush=True)
            os._exit(0)
        except OSError:
            time.sleep(0.25)
    os._exit(1)
threading.Thread(target=ask, daemon=True).start()
server.main()
"""
