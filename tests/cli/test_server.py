"""`kimi-k3 server`: what is refused before a weight is read, and that options arrive."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from kimi_k3_mlx.cli import parser_of
from kimi_k3_mlx.runtime.server import provider
from kimi_k3_mlx.runtime.server import serve as module
from kimi_k3_mlx.runtime.server.settings import Settings
from tests.cli.conftest import Run


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """The verb sets up the process's logging: give it back."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_defaults_are_those_of_the_settings(kimi: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """And every option has a setting."""
    seen: list[Settings] = []
    monkeypatch.setattr(module, "serve", lambda settings, *_: seen.append(settings))
    assert kimi("server", "--model", "x").code == 0
    assert seen == [Settings(Path("x"))]
    kimi("server", "--model", "x", "--no-wire", "--no-lookup", "--allowed-origins", "a,b")
    assert (seen[1].wire, seen[1].lookup, seen[1].allowed_origins) == (False, False, ("a", "b"))
    kimi("server", "--model", "x", "--prompt-cache-bytes", "2GB", "--prompt-cache-dir", "y")
    assert (seen[2].prompt_cache_bytes, seen[2].prompt_cache_dir) == (2 * 10**9, Path("y"))


def test_names_and_defaults_are_mlx_lms(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for those that a huge model can't have."""
    import argparse

    from mlx_lm import server

    theirs: dict[str, Any] = {}

    class Seen(Exception):
        """Instead of parsing."""

    def look(parser: argparse.ArgumentParser) -> None:
        theirs.update({action.dest: action.default for action in parser._actions})
        raise Seen

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", look)
    with pytest.raises(Seen):
        server.main()
    ours = {action.dest: action.default for action in parser_of("server")._actions}
    assert ours["port"] == theirs["port"] == 8080
    others = {name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]}
    assert others == {
        "decode_concurrency", "max_tokens", "prefill_step_size", "prompt_cache_bytes"
    }  # fmt: skip
    assert ours.keys() - theirs.keys() == {
        "api_key", "lookup", "no_wire", "prompt_cache_dir", "prompt_cache_dir_bytes", "quiet"
    }  # fmt: skip
    assert {it.name for it in fields(Settings)} <= ours.keys() | {"wire"}


def test_a_port_that_is_none_is_not_another_one(kimi: Run) -> None:
    """The system takes 99,999 for 34,463: the server listened there."""
    result = kimi("server", "--model", "x", "--port", "99999")
    assert result.code == 2
    assert "99999 is more than 65535, the last port" in result.err


def test_what_is_wrong_is_known_before_a_weight_is_read(
    kimi: Run, tiny_build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build of 400 GB was loaded first."""
    monkeypatch.setattr(provider, "load", lambda *_, **__: pytest.fail("it was loaded"))
    (tmp_path / "file").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cases = {
            "can't be listened on": ("--port", port),
            "is no address": ("--host", "no host", "--api-key", "k"),
            "can't be quantized": ("--kv-bits", 8),
            "File exists": ("--prompt-cache-dir", tmp_path / "file"),
        }
        for fact, options in cases.items():
            result = kimi("server", "--model", tiny_build, "--port", 0, *options)
            assert result.code in (1, 2)
            assert fact in result.err


def test_refusals(kimi: Run, tiny_build: Path, tmp_path: Path) -> None:
    result = kimi("server", "--model", tiny_build, "--host", "0.0.0.0")
    assert result.code == 2
    assert "there is no key" in result.err
    result = kimi("server", "--model", tmp_path)
    assert (result.code, result.out) == (1, "")
    assert "config.json" in result.err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = kimi("server", "--model", tiny_build, "--port", port, "-q")
    assert result.code == 1
    assert f"127.0.0.1:{port} can't be listened on" in result.err
    result = kimi("server", "--model", tiny_build, "--kv-bits", "8", "-q")
    assert result.code == 2
    assert "can't be quantized in groups of 64" in result.err
