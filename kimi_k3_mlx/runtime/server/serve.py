"""Starts the server and ends it.

Input: `Settings`. Output: none, until it is interrupted; then the running answer is broken off.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import ThreadingHTTPServer

from mlx_lm import server as mlx_lm_server

from kimi_k3_mlx.errors import KimiError, UsageError
from kimi_k3_mlx.runtime.cluster import group_of
from kimi_k3_mlx.runtime.generate import eager_on_cpu
from kimi_k3_mlx.runtime.machine import Probes
from kimi_k3_mlx.runtime.server.engine import Engine
from kimi_k3_mlx.runtime.server.handler import Handler
from kimi_k3_mlx.runtime.server.provider import OneBuild
from kimi_k3_mlx.runtime.server.settings import Settings
from kimi_k3_mlx.runtime.wiring import wiring
from kimi_k3_mlx.schema import Progress, silent


class Server(ThreadingHTTPServer):
    """An address that is taken at once, and answered from `listen` on: a thread for each client."""

    daemon_threads = True
    request_queue_size = 128

    engine: Engine

    def __init__(self, host: str, port: int) -> None:
        try:
            infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise UsageError(f"--host {host} is no address: {error.strerror}.") from error
        self.address_family, _, _, _, address = infos[0]
        super().__init__(address[:2], Handler, bind_and_activate=False)  # type: ignore[arg-type]
        try:
            self.server_bind()
        except OSError as error:
            self.server_close()
            raise KimiError(
                f"{host}:{port} can't be listened on: {error.strerror}.",
                "another --port; 0 takes a free one.",
            ) from error

    def listen(self, engine: Engine) -> None:
        """Let clients in."""
        self.engine = engine
        fingerprint = mlx_lm_server.get_system_fingerprint()
        self.RequestHandlerClass = partial(Handler, engine, system_fingerprint=fingerprint)
        self.server_activate()

    @property
    def url(self) -> str:
        """What clients call the base URL."""
        host, port = self.server_address[:2]
        shown = f"[{host!s}]" if self.address_family == socket.AF_INET6 else f"{host!s}"
        return f"http://{shown}:{port}/v1"


def serve(
    settings: Settings,
    progress: Progress = silent,
    on_ready: Callable[[Server], object] = str,
    probes: Probes | None = None,
) -> None:
    """Load the build and answer requests until KeyboardInterrupt, or `Server.shutdown`.

    Raises what loading raises; UsageError for an address without a key, KimiError for a port that
    is taken.
    """
    settings.check()
    if group_of() is not None:
        raise UsageError("the server runs on one Mac.", "start it without mlx.launch.")
    provider = OneBuild(settings, progress, probes)
    with (
        wiring(settings.wire, mlx_lm_server.__name__),
        eager_on_cpu(),
        Server(settings.host, settings.port) as server,
        generating(provider) as engine,
    ):
        server.listen(engine)
        on_ready(server)
        server.serve_forever(poll_interval=0.1)


@contextmanager
def generating(provider: OneBuild) -> Iterator[Engine]:
    """The thread that loads and generates."""
    # For the whole life of the process: between requests nothing may be paged out.
    mlx_lm_server.maybe_set_recommended_wired_limit()
    engine = Engine(provider)
    try:
        while not provider.ready.wait(0.1):
            if not engine.generation_available():
                raise KimiError("the build could not be loaded.", "see the log.")
        if provider.failure is not None:
            raise provider.failure
        yield engine
    finally:
        provider.stopping = True
        engine.end()
