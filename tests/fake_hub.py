"""A Hugging Face Hub on localhost, with the faults of the real one on demand.

Input: folders, as repositories. Output: a server that huggingface_hub and our own reader take for
the Hub; a log of what was asked; and faults that the next requests meet. Big files are redirected
to signed links on another origin, as the Hub does: the endpoint is 127.0.0.1, its CDN localhost.

    with FakeHub() as hub, use_hub(hub, tmp_path):
        hub.inject(Fault("cdn", cut=1000))  # the next body breaks off after 1000 bytes
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple, Self
from urllib.parse import parse_qs, quote, unquote, urlsplit

import pytest


@dataclass
class Fault:
    """What the next `times` requests of one place meet, if they ask for a file named so."""

    place: str
    """api, resolve or cdn."""
    name: str = ""
    """Part of the file's name."""
    times: int = 1
    status: int = 0
    """Answered instead."""
    headers: dict[str, str] = field(default_factory=dict)
    cut: int | None = None
    """The connection drops after this many bytes of the body."""
    ignore_range: bool = False
    """The whole file comes, with status 200."""
    shift: int = 0
    """The answer is a range that begins so many bytes later."""
    delay: float = 0.0
    """Seconds of silence before the answer."""


class Asked(NamedTuple):
    """A request; `range` counts as Python does, from begin to end."""

    place: str
    method: str
    name: str
    range: tuple[int, int] | None
    token: str | None


class FakeHub:
    """Serves repositories until it is closed; every attribute may be changed at any time."""

    def __init__(self) -> None:
        self.log: list[Asked] = []
        self.redirect = True
        """Files from `lfs_bytes` on come from another server; off: as some mirrors do it."""
        self.lfs_bytes = 4096
        self.token: str | None = None
        """What a request must carry; None: everything is public."""
        self.uses_per_link = inf
        self.latency = 0.0
        """Seconds before every answer of the CDN."""
        self.bytes_per_second = inf
        """Of all connections together."""
        self.repositories: dict[str, tuple[Path, str]] = {}
        self.commits: dict[tuple[str, str], tuple[Path, str]] = {}  # all, as a Hub keeps them
        self.pauses: list[float] = []
        self._faults: list[Fault] = []
        self._links: dict[int, int] = {}
        self._busy_until = 0.0
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def add(self, repository: str, folder: Path) -> str:
        """Serve a folder; its commit is returned, and stays when a file changes later."""
        files = [(name, etag_of(folder / name)) for name in names_in(folder)]
        commit = hashlib.sha1(repr(files).encode()).hexdigest()
        self.repositories[repository] = self.commits[repository, commit] = (folder, commit)
        return commit

    def inject(self, *faults: Fault) -> None:
        """Faults come in this order, each as often as it says."""
        with self._lock:
            self._faults += faults

    def expire_links(self) -> None:
        """All links given out so far are answered with 403 from now on."""
        with self._lock:
            self._links = dict.fromkeys(self._links, -1)

    def ranges(self, name: str = "") -> list[tuple[int, int]]:
        """The byte ranges asked of files whose names contain `name`, in order of arrival."""
        return [asked.range for asked in self.log if asked.range and name in asked.name]

    def count(self, place: str | None = None, name: str = "") -> int:
        """How many requests arrived."""
        return sum(place in (None, asked.place) and name in asked.name for asked in self.log)

    def record(self, asked: Asked) -> Fault | None:
        """Log a request; return the fault that it meets."""
        with self._lock:
            self.log.append(asked)
            for fault in self._faults:
                if fault.times and fault.place == asked.place and fault.name in asked.name:
                    fault.times -= 1
                    return fault
        return None

    def link(self, repository: str, name: str) -> str:
        """A new signed link to a file."""
        with self._lock:
            number = len(self._links)
            self._links[number] = 0
        return f"http://localhost:{self._server.server_port}/cdn/{repository}/{quote(name)}?Signature={number}"

    def use_link(self, number: int) -> bool:
        """Whether a link is still good; counts its uses."""
        with self._lock:
            n_uses = self._links.get(number, -1)
            self._links[number] = n_uses + (n_uses >= 0)
        return 0 <= n_uses < self.uses_per_link

    def queue(self, n_bytes: int) -> float:
        """Seconds until so many bytes have gone through the line."""
        with self._lock:
            now = time.monotonic()  # a sleeper that is late may make up for it
            self._busy_until = max(now - 0.05, self._busy_until) + n_bytes / self.bytes_per_second
            return max(0, self._busy_until - now)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that hang up are no error."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Refusal(Exception):
    """Status, the Hub's word for it, maybe more headers."""


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        """Be quiet."""

    def do_GET(self) -> None:
        """Log, meet the fault, answer."""
        path = unquote(urlsplit(self.path).path)
        routes = (
            ("api", r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?()$", self._api),
            ("api", r"/api/models/([^/]+/[^/]+)/tree/([^/]+)/?()$", self._tree),
            ("resolve", r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)$", self._resolve),
            ("cdn", r"/cdn/([^/]+/[^/]+)/()(.+)$", self._cdn),
        )
        try:
            for place, pattern, answer in routes:
                if match := re.match(pattern, path):
                    self._meet(place, match[3])
                    return answer(*match.groups())
            raise _Refusal(404, "EntryNotFound")
        except _Refusal as error:
            status, code, *headers = error.args
            return self._content(status, code.encode(), {"X-Error-Code": code} | dict(*headers))

    do_HEAD = do_GET

    def _meet(self, place: str, name: str) -> None:
        """Log the request, and do to it what its fault says."""
        asked = re.match(r"bytes=(\d+)-(\d+)$", self.headers.get("Range", ""))
        self._range = (int(asked[1]), int(asked[2]) + 1) if asked else None
        self._token = self.headers.get("Authorization", "").removeprefix("Bearer ") or None
        request = Asked(place, self.command, name, self._range, self._token)
        self._fault = self.hub.record(request) or Fault("cdn")
        time.sleep(self._fault.delay + self.hub.latency * (place == "cdn"))
        if self._fault.status:
            raise _Refusal(self._fault.status, "Injected", self._fault.headers)

    def _folder(self, repository: str, revision: str | None) -> tuple[Path, str]:
        """The repository's folder and commit, if the request may know them."""
        found = self.hub.repositories.get(repository)
        if not found or (self.hub.token and self._token != self.hub.token):
            raise _Refusal(401, "RepoNotFound")
        if revision not in (None, "", "main"):
            found = self.hub.commits.get((repository, revision))
        if not found:
            raise _Refusal(404, "RevisionNotFound")
        return found

    def _api(self, repository: str, revision: str | None, _: str) -> None:
        folder, commit = self._folder(repository, revision)
        names = [{"rfilename": name} for name in names_in(folder)]
        answer = {"id": repository, "sha": commit, "siblings": names}
        self._content(200, json.dumps(answer).encode(), {})

    def _tree(self, repository: str, revision: str, _: str) -> None:
        entries = []
        for name in names_in(folder := self._folder(repository, revision)[0]):
            etag, size = etag_of(folder / name), (folder / name).stat().st_size
            entry = {"type": "file", "path": name, "oid": etag[:40], "size": size}
            lfs = {"oid": etag, "size": size, "pointerSize": 135}
            entries.append(entry | ({"lfs": lfs} if size >= self.hub.lfs_bytes else {}))
        self._content(200, json.dumps(entries).encode(), {})

    def _resolve(self, repository: str, revision: str, name: str) -> None:
        folder, commit = self._folder(repository, revision)
        path, headers = folder / name, {"X-Repo-Commit": commit}
        if not path.is_file():
            raise _Refusal(404, "EntryNotFound", headers)
        if self.hub.redirect and path.stat().st_size >= self.hub.lfs_bytes:
            headers["Location"] = self.hub.link(repository, name)
            headers["X-Linked-Size"] = str(path.stat().st_size)
            headers["X-Linked-ETag"] = f'"{etag_of(path)}"'
            self._begin(302, 0, headers)
        else:
            self._file(path, headers)

    def _cdn(self, repository: str, _: str, name: str) -> None:
        signature = parse_qs(urlsplit(self.path).query).get("Signature", ["-1"])[0]
        if not self.hub.use_link(int(signature)):
            raise _Refusal(403, "AccessDenied")
        self._file(self.hub.repositories[repository][0] / name, {})

    def _file(self, path: Path, headers: dict[str, str]) -> None:
        """A file, or the range of it that was asked for, as far as the fault lets it."""
        size, status = path.stat().st_size, 200
        begin, end = 0, size
        headers |= {"ETag": f'"{etag_of(path)}"'} | self._fault.headers
        if self._range and not self._fault.ignore_range:
            begin, end, status = *self._range, 206
            if begin >= size:
                raise _Refusal(416, "InvalidRange", {"Content-Range": f"bytes */{size}"})
            begin, end = begin + self._fault.shift, min(end + self._fault.shift, size)
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
        self._begin(status, end - begin, headers)
        if self.command == "GET":
            self._send(path, begin, end)

    def _send(self, path: Path, begin: int, end: int) -> None:
        cut = self._fault.cut
        end = end if cut is None else min(end, begin + cut)
        step = end if self.hub.bytes_per_second == inf else 1 << 17
        with path.open("rb") as file:
            for position in range(begin, end, step):
                n_bytes = min(step, end - position)
                time.sleep(self.hub.queue(n_bytes))
                self.connection.sendfile(file, position, n_bytes)
        if cut is not None:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)

    def _content(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self._begin(status, len(content), headers)
        self.wfile.write(content if self.command == "GET" else b"")

    def _begin(self, status: int, n_bytes: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(n_bytes)} | headers).items():
            self.send_header(name, value)
        self.end_headers()


def names_in(folder: Path) -> list[str]:
    """All files below a folder, with their subfolders."""
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def etag_of(path: Path) -> str:
    """The SHA-256 of a file as it is now."""
    return _sha256(path, path.stat().st_mtime_ns, path.stat().st_size)


@cache
def _sha256(path: Path, *_: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def use_hub(hub: FakeHub, home: Path) -> Iterator[pytest.MonkeyPatch]:
    """Let this process' huggingface_hub talk to `hub` and keep its caches in `home`.

    It reads its environment when it is imported, so its constants are replaced. Nobody waits
    between tries: `hub.pauses` collects the seconds.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import _http, disable_progress_bars, enable_progress_bars

    from kimi_k3_mlx.tensors.remote import Patience

    values = {
        "ENDPOINT": hub.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HOME": str(home),
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_ASSETS_CACHE": str(home / "assets"),
        "HF_TOKEN_PATH": str(home / "token"),
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_TELEMETRY": True,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("HF_TOKEN", raising=False)
        for name, value in values.items():
            patch.setattr(constants, name, value)
        patch.setattr(Patience, "pause", lambda _, seconds: hub.pauses.append(seconds))
        patch.setattr(_http, "time", SimpleNamespace(sleep=hub.pauses.append))
        disable_progress_bars()
        try:
            yield patch
        finally:
            enable_progress_bars()


def environment(hub: FakeHub, home: Path) -> dict[str, str]:
    """The same for another process: what is to be changed in its environment."""
    flags = dict.fromkeys(("HF_HUB_DISABLE_TELEMETRY", "HF_HUB_DISABLE_PROGRESS_BARS"), "1")
    return flags | {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
