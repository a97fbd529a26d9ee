"""A checkpoint on the Hub: opened by its headers, read in exact byte ranges, never stored.

Input: a repository and a revision. Output: `HubSource`, pinned to one commit. Headers are kept in
the Hub's cache of assets, by commit. The reader has several requests in flight and gives out their
bytes in order.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from types import TracebackType
from typing import NamedTuple

from kimi_k3_mlx.errors import CheckpointError, HubError, UsageError
from kimi_k3_mlx.schema import Json, Span, canonical
from kimi_k3_mlx.tensors.header import LENGTH_BYTES, Header, check_size, header_length, parse_header
from kimi_k3_mlx.tensors.remote import (
    ENDPOINT,
    OPENING_TRIES,
    RemoteFile,
    Version,
    cache_folder,
    explained,
    patiently,
    small_file,
)
from kimi_k3_mlx.tensors.source import (
    CONFIG,
    INDEX,
    Reader,
    Source,
    assemble,
    checked_weight_map,
    parse_json,
)

PARALLEL = 16  # httpx keeps no more than 20 connections alive
REQUEST_BYTES = 6 << 20  # a matrix of K3's experts takes 5,505,024 bytes


@dataclass(frozen=True)
class HubSource(Source):
    """A checkpoint in a repository, at one commit."""

    repository: str
    names: tuple[str, ...] = field(repr=False)
    """Files beside each other at the top."""
    etags: dict[str, str] = field(repr=False)
    """ETag per shard, from when its header was read."""

    @property
    def name(self) -> str:
        """The repository's name without its owner."""
        return self.repository.rpartition("/")[2]

    @property
    def commit(self) -> str:
        """The commit to which everything is pinned."""
        return self.id.commit or ""

    def reader(self) -> HubReader:
        """A context manager that reads tensor bytes."""
        return HubReader(self)

    def files(self) -> list[str]:
        """Names of the files beside each other at the top, sorted."""
        return list(self.names)

    def read_file(self, name: str) -> bytes:
        """A small file's content; it stays in the Hub's cache."""
        if name not in self.names:
            raise HubError(f"{name} is missing in {self.where}.")
        return small_file(self.repository, self.commit, name)

    def state(self) -> str:
        """Hash of the commit and of every shard's ETag and size."""
        files = {name: (self.etags[name], size) for name, size in self.shards.items()}
        return hashlib.sha256(canonical([self.commit, files])).hexdigest()


@dataclass
class _Request:
    """A range of one shard; the ends of the blocks that it is given out in."""

    shard: str
    begin: int
    end: int
    cuts: list[int]

    @property
    def n_bytes(self) -> int:
        return self.end - self.begin

    def goes_on_at(self, shard: str, position: int) -> bool:
        """Whether that is the next byte, and there is room for it."""
        return (self.shard, self.end) == (shard, position) and self.n_bytes < REQUEST_BYTES


class _Flight(NamedTuple):
    """A request under way, and the buffer that it fills."""

    request: _Request
    buffer: memoryview
    future: Future[None]


class HubReader(Reader):
    """Has `PARALLEL` requests in flight; one more buffer keeps the block given out before."""

    def __init__(self, source: HubSource) -> None:
        self._source = source
        self._stop = Event()
        self._pool = ThreadPoolExecutor(PARALLEL, "hub")
        self._files: dict[str, RemoteFile] = {}
        self._free: list[memoryview] = []
        self._held: list[memoryview] = []

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)

    def blocks(self, spans: Iterable[Span]) -> Iterator[memoryview]:
        """Blocks of up to 6 MiB. Give many spans in one call: every call begins with a wait."""
        flights: deque[_Flight] = deque()
        try:
            for request in self._requests(spans):
                if len(flights) == PARALLEL:
                    yield from self._land(flights.popleft())
                flights.append(self._start(request))
            while flights:
                yield from self._land(flights.popleft())
        finally:
            for flight in flights:
                flight.future.cancel()

    def _land(self, flight: _Flight) -> Iterator[memoryview]:
        """A request's blocks, as soon as it is done. Frees the buffer of the one before."""
        flight.future.result()
        begin = 0
        for cut in flight.request.cuts:
            yield flight.buffer[begin:cut]
            begin = cut
        self._free += self._held
        self._held = [flight.buffer]

    def _requests(self, spans: Iterable[Span]) -> Iterator[_Request]:
        """Neighbours in one request, big spans in several."""
        request: _Request | None = None
        for span in spans:
            shard = self._source.weight_map[span.tensor]
            start = self._source.tensors[span.tensor].begin
            position, end = start + span.begin, start + span.end
            while position < end:
                if request is None or not request.goes_on_at(shard, position):
                    if request is not None:
                        yield request
                    request = _Request(shard, position, position, [])
                position = request.end = min(end, request.begin + REQUEST_BYTES)
                request.cuts.append(request.n_bytes)
        if request is not None:
            yield request

    def _start(self, request: _Request) -> _Flight:
        if (file := self._files.get(request.shard)) is None:
            source, name = self._source, request.shard
            version = Version(source.etags[name], source.shards[name])
            file = RemoteFile(source.repository, source.commit, name, self._stop, version=version)
            self._files[name] = file
        buffer = self._free.pop() if self._free else memoryview(bytearray(REQUEST_BYTES))
        future = self._pool.submit(file.fetch, request.begin, buffer[: request.n_bytes])
        return _Flight(request, buffer, future)


def open_repository(repository: str, revision: str | None = None) -> HubSource:
    """Open a repository at the commit of a revision and check everything that headers tell.

    Raises HubError when the Hub refuses or can't be reached, UsageError for a malformed name,
    CheckpointError for what is also wrong in a folder.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HFValidationError

    if constants.HF_HUB_OFFLINE:
        raise HubError(
            f"{repository} can't be read: HF_HUB_OFFLINE forbids all requests.",
            "unset HF_HUB_OFFLINE, or give the folder of a download.",
        )
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    what = f"{repository} at revision {revision}" if revision else repository
    try:
        info = patiently(
            lambda: HfApi().model_info(repository, revision=revision, timeout=timeout), what
        )
    except HFValidationError as error:
        raise UsageError(f"{repository!r} is not a repository: owner/name.") from error
    except (KeyError, TypeError, ValueError) as error:
        raise HubError(f"{what}: the server answers, but not as a Hub.", f"{ENDPOINT}.") from error
    names = tuple(sorted(f.rfilename for f in info.siblings or () if "/" not in f.rfilename))
    opening = _Opening(repository, str(info.sha), names)
    try:
        return opening.source()
    except CheckpointError as error:
        error.hint = f"the fault is in {opening.where} itself: choose another revision."
        raise
    except OSError as error:
        raise explained(error, opening.where) from error


class _Opening:
    """Collects what `assemble` checks. Headers come from the cache, or else from the Hub."""

    def __init__(self, repository: str, commit: str, names: tuple[str, ...]) -> None:
        self.where = f"{repository}@{commit}"
        self._repository = repository
        self._commit = commit
        self._names = names
        self._etags: dict[str, str] = {}

    def source(self) -> HubSource:
        config, index = self._json(CONFIG), self._json(INDEX)
        shards = sorted(set(checked_weight_map(index).values()))
        if missing := [name for name in shards if name not in self._names]:
            count = f" and {len(missing) - 1} more" if missing[1:] else ""
            raise CheckpointError(
                f"shard {missing[0]}{count} is named by {INDEX} but missing in {self.where}."
            )
        self._fetch_all([name for name in shards if not self._path(name).is_file()])
        contents = assemble(config, index, self._header, self._commit)
        return HubSource(self.where, *contents, self._repository, self._names, self._etags)

    def _json(self, name: str) -> Json:
        if name not in self._names:
            raise CheckpointError(f"{name} is missing in {self.where}.")
        content = small_file(self._repository, self._commit, name)
        return parse_json(content, f"{name} of {self.where}", "")

    def _path(self, shard: str) -> Path:
        return cache_folder(self._repository, self._commit) / f"{shard}.header"

    def _fetch_all(self, shards: list[str]) -> None:
        stop = Event()
        with ThreadPoolExecutor(PARALLEL, "hub") as pool:
            try:
                for _ in pool.map(lambda shard: self._fetch(shard, stop), shards):
                    pass
            finally:
                stop.set()

    def _fetch(self, shard: str, stop: Event) -> _Head:
        """A shard's header from the Hub; it is cached."""
        file = RemoteFile(self._repository, self._commit, shard, stop, tries=OPENING_TRIES)
        version = file.version()
        length = file.read(0, min(LENGTH_BYTES, version.size))
        end = LENGTH_BYTES + header_length(length, version.size, shard)
        head = _Head(version, file.read(LENGTH_BYTES, end))
        head.store(self._path(shard))
        return head

    def _header(self, shard: str) -> tuple[Header, int]:
        (etag, size), raw = _Head.load(self._path(shard)) or self._fetch(shard, Event())
        header = parse_header(raw, shard)
        check_size(header, size, shard)
        self._etags[shard] = etag
        return header, size


class _Head(NamedTuple):
    """A shard's header as it is cached: a line that describes it, then its JSON."""

    version: Version
    raw: bytes

    @classmethod
    def load(cls, path: Path) -> _Head | None:
        """None when the file is absent or damaged."""
        try:
            line, _, raw = path.read_bytes().partition(b"\n")
            etag, size, sha256 = json.loads(line)
        except (FileNotFoundError, TypeError, ValueError):
            return None
        is_whole = sha256 == hashlib.sha256(raw).hexdigest()
        return cls(Version(etag, size), raw) if is_whole else None

    def store(self, path: Path) -> None:
        """Other processes see the whole file or none."""
        line = canonical([*self.version, hashlib.sha256(self.raw).hexdigest()])
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            temporary = Path(folder, path.name)
            temporary.write_bytes(line + b"\n" + self.raw)
            temporary.replace(path)
