"""One file of a repository by byte ranges, however often the connection breaks.

Input: a repository, its commit, a file's name. Output: bytes. What breaks off is continued where it
broke, what fails is tried again with growing pauses, and what makes no sense is refused. The token
goes to the endpoint and to no other server.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit

from kimi_k3_mlx import __version__
from kimi_k3_mlx.errors import HubError, KimiError

T = TypeVar("T")
LIBRARY = "kimi_k3_mlx"
OPENING_TRIES, READING_TRIES = 4, 12
FIRST_PAUSE, LONGEST_PAUSE, LONGEST_RETRY_AFTER = 1.0, 60.0, 600.0
AGAIN = "run the same command again to continue."
ACCESS = (
    "check the name and your access (hf auth login); a gated repository wants its terms accepted."
)
ENDPOINT = "check the network and HF_ENDPOINT"


class Version(NamedTuple):
    """What tells one content of a file from another."""

    etag: str
    size: int


@dataclass
class _Link:
    """Where a file's bytes are for some time, and what goes along with a request."""

    url: str
    headers: dict[str, str]
    is_hub: bool
    """Whether the Hub itself answers, with the file's own ETag, and not a server for big files."""
    has_worked: bool = False


class RemoteFile:
    """A file of one commit. Several threads may share it; `stop` ends their patience.

    `version` is what the file is known to be; without it, the Hub's first answer decides.
    """

    def __init__(
        self,
        repository: str,
        commit: str,
        name: str,
        stop: Event,
        *,
        version: Version | None = None,
        tries: int = READING_TRIES,
    ) -> None:
        from huggingface_hub import hf_hub_url

        self._version = version
        self._what = f"{name} of {repository}"
        self._url = hf_hub_url(repository, name, revision=commit)
        self._stop = stop
        self._tries = tries
        self._link: _Link | None = None
        self._lock = Lock()

    def version(self) -> Version:
        """What the file is; asks the Hub if that isn't known."""
        if self._version is None:
            patiently(self._locate, self._what, self._stop)
        return self._known()

    def read(self, begin: int, end: int) -> bytes:
        """The bytes from `begin` to `end`."""
        buffer = bytearray(end - begin)
        self.fetch(begin, memoryview(buffer))
        return bytes(buffer)

    def fetch(self, begin: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `begin` on.

        Raises HubError when the server refuses, changes the file, or fails for too long.
        """
        patience = Patience(self._what, self._tries, self._stop, refusals=1)
        n_done = 0
        while n_done < len(into):
            n_before, link = n_done, None
            try:
                link = self._locate()
                for chunk in self._chunks(link, begin + n_done, begin + len(into)):
                    into[n_done : n_done + len(chunk)] = chunk
                    n_done += len(chunk)
            except (http_error(), OSError) as error:
                progress = n_done > n_before
                if not progress and (is_refusal(error) or not status_of(error)):
                    self._forget(link)
                expired = link is not None and link.has_worked
                patience.after(error, progress=progress, expired=expired)

    def _locate(self) -> _Link:
        """Where the bytes are now."""
        with self._lock:
            self._check_running()
            if self._link is None:
                self._link = self._resolve()
            return self._link

    def _check_running(self) -> None:
        if self._stop.is_set():
            raise HubError(f"{self._what}: reading was stopped.")

    def _forget(self, link: _Link | None) -> None:
        with self._lock:
            if self._link is link:
                self._link = None

    def _resolve(self) -> _Link:
        from huggingface_hub import constants, get_hf_file_metadata
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        try:
            found = get_hf_file_metadata(self._url, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        except http_error() as error:
            if is_refusal(error):
                raise explained(error, self._what) from error
            raise
        self._check_version(found.etag, found.size)
        headers = build_hf_headers(library_name=LIBRARY, library_version=__version__)
        headers["accept-encoding"] = "identity"
        is_hub = urlsplit(found.location)[:2] == urlsplit(self._url)[:2]
        if not is_hub:
            headers.pop("authorization", None)
        return _Link(found.location, headers, is_hub)

    def _check_version(self, etag: str | None, size: int | None) -> None:
        if etag is None or size is None:
            raise HubError(
                f"{self._what}: the server tells no {'size' if etag else 'ETag'}, as a Hub would.",
                f"{ENDPOINT}.",
            )
        if self._version is None:
            self._version = Version(etag, size)
        if self._version != (etag, size):
            known = self._version
            raise HubError(
                f"{self._what} has changed under the same commit: ETag {known.etag} "
                f"({known.size:,} bytes) became {etag} ({size:,} bytes).",
                f"{ENDPOINT}, remove {cache_folder()} and begin again.",
            )

    def _known(self) -> Version:
        if self._version is None:
            raise HubError(f"{self._what}: its size isn't known.", f"{ENDPOINT}.")
        return self._version

    def _chunks(self, link: _Link, begin: int, end: int) -> Iterator[bytes]:
        """The body of one range request, whose head is checked before."""
        from huggingface_hub import constants, get_session, hf_raise_for_status

        headers = link.headers | {"range": f"bytes={begin}-{end - 1}"}
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        with get_session().stream("GET", link.url, headers=headers, timeout=timeout) as answer:
            hf_raise_for_status(answer)
            self._check_range(answer.status_code, answer.headers.get("content-range"), begin, end)
            if link.is_hub:
                self._check_version(bare(answer.headers.get("etag")), self._known().size)
            link.has_worked = True
            for chunk in answer.iter_raw():
                self._check_running()
                if (begin := begin + len(chunk)) > end:
                    raise HubError(f"{self._what}: the server sends too many bytes.", ENDPOINT)
                yield chunk
        if begin < end:
            raise ConnectionError(f"the answer ended {end - begin:,} bytes early")

    def _check_range(self, status: int, given: str | None, begin: int, end: int) -> None:
        if status != 206:
            raise HubError(
                f"{self._what}: the server ignores byte ranges and would send the whole file "
                f"(status {status} instead of 206).",
                "fetch the repository first (kimi-k3 download) and give its folder.",
            )
        wanted = f"bytes {begin}-{end - 1}/{self._known().size}"
        if given != wanted:
            raise HubError(
                f"{self._what}: the server answers with range {given!r} instead of {wanted!r}.",
                f"{ENDPOINT}.",
            )


class Patience:
    """How often and how long failures are waited out, counted since the last progress."""

    def __init__(self, what: str, tries: int, stop: Event, refusals: int = 0) -> None:
        self._what = what
        self._tries = tries
        self._stop = stop
        self._refusals = refusals
        self._n_failed = self._n_refused = 0

    def pause(self, seconds: float) -> None:
        """Wait, but no longer than until `stop`."""
        self._stop.wait(seconds)

    def after(self, error: Exception, *, progress: bool = False, expired: bool = False) -> None:
        """Return when the next try is due; raise a KimiError when it would be in vain.

        After progress that is at once, and after the first `refusals`, which may be a link's fault.
        Later ones are final, unless the link had worked before and has `expired`.
        """
        if progress:
            self._n_failed = self._n_refused = 0
        elif is_refusal(error) and self._n_refused < self._refusals:
            self._n_refused += 1
        else:
            self._n_failed += 1
            is_vain = is_refusal(error) and not expired
            if is_vain or self._n_failed >= self._tries or self._stop.is_set():
                raise explained(error, self._what, self._n_failed) from error
            seconds = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (self._n_failed - 1))
            self.pause(max(seconds, retry_after(error)))


def patiently(attempt: Callable[[], T], what: str, stop: Event | None = None) -> T:
    """The result of an attempt at one thing of the Hub, which is repeated a few times."""
    patience = Patience(what, OPENING_TRIES, stop or Event())
    while True:
        try:
            return attempt()
        except (http_error(), OSError) as error:
            patience.after(error)


def http_error() -> type[Exception]:
    """The base of all errors of the HTTP library that huggingface_hub speaks through."""
    from huggingface_hub import errors

    return errors.HTTPError  # type: ignore[attr-defined]


def status_of(error: Exception) -> int:
    """The HTTP status that an error is about, or 0."""
    return getattr(getattr(error, "response", None), "status_code", 0)


def is_refusal(error: Exception) -> bool:
    """Whether the same request would meet the same answer."""
    status = status_of(error)
    return 400 <= status < 500 and status not in (408, 429)


def is_local(error: Exception) -> bool:
    """Whether this machine's disk failed, and not the network."""
    is_network = isinstance(error, (ConnectionError, TimeoutError, http_error()))
    return isinstance(error, OSError) and error.errno is not None and not is_network


def retry_after(error: Exception) -> float:
    """Seconds that the server asks us to wait, in one of two headers."""
    headers = getattr(getattr(error, "response", None), "headers", {})
    limit = re.search(r"\br=0\b.*\bt=(\d+)", headers.get("ratelimit", ""))
    seconds = limit[1] if limit else headers.get("retry-after", "")
    return min(float(seconds), LONGEST_RETRY_AFTER) if seconds.isdigit() else 0.0


def explained(error: Exception, what: str, n_tries: int = 1) -> KimiError:
    """What went wrong in one sentence; without the links, for they are signed."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    status, times = status_of(error), f", {n_tries} times in a row" if n_tries > 1 else ""
    if status in (401, 403):
        return HubError(f"{what}: the Hub gives no access (status {status}).", ACCESS)
    if status == 404:
        return HubError(f"{what} is not on the Hub (status 404).", ACCESS)
    if status:
        return HubError(f"{what}: the Hub answers with status {status}{times}.", AGAIN)
    if isinstance(error, OSError) and is_local(error):
        where = error.filename or what
        return KimiError(f"{where}: {error.strerror}.", "check HF_HOME and its disk.")
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return HubError(f"{what}: the connection failed{times}: {reason}.", f"{ENDPOINT}, then {AGAIN}")


def bare(etag: str | None) -> str | None:
    """An ETag without its marks."""
    return etag.removeprefix("W/").strip('"') if etag else None


def small_file(repository: str, commit: str, name: str) -> bytes:
    """A file's content, through the Hub's cache; huggingface_hub is patient by itself."""
    from huggingface_hub import hf_hub_download

    try:
        path = hf_hub_download(repository, name, revision=commit)
    except (http_error(), OSError) as error:
        raise explained(error, f"{name} of {repository}") from error
    return Path(str(path)).read_bytes()


def cache_folder(namespace: str = "", subfolder: str = "") -> Path:
    """A folder of ours beside the Hub's cache of files."""
    from huggingface_hub import cached_assets_path, constants

    folder = Path(constants.HF_ASSETS_CACHE)
    if not namespace:
        return folder / LIBRARY
    return Path(cached_assets_path(LIBRARY, namespace, subfolder, assets_dir=folder))
