"""What breaks on the way from the Hub is mended, what makes no sense is refused in one sentence."""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from kimi_k3_mlx.errors import HubError
from kimi_k3_mlx.schema import Span
from kimi_k3_mlx.tensors import hub as hub_module
from kimi_k3_mlx.tensors.hub import HubSource, open_repository
from kimi_k3_mlx.tensors.local import open_source
from kimi_k3_mlx.tensors.remote import READING_TRIES, Patience
from kimi_k3_mlx.tensors.source import CONFIG, INDEX
from tests.fake_hub import FakeHub, Fault, use_hub
from tests.tiny_k3 import TinyConfig, write_source

pytestmark = pytest.mark.hub
NAME = "moonshotai/Tiny-K3"
SHARD = "model-00002-of-000003.safetensors"
TENSOR = "language_model.model.layers.1.self_attn.g_proj.weight"
N_BYTES = 8192
REAL_PAUSE = Patience.pause


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = TinyConfig(layers=2, vision=False, tokenizer=False)
    return write_source(tmp_path_factory.mktemp("small") / "source", config)


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "served"))


@pytest.fixture
def hub(folder: Path, tmp_path: Path) -> Iterator[FakeHub]:
    with FakeHub() as hub, use_hub(hub, tmp_path / "home"):
        hub.add(NAME, folder)
        yield hub


@pytest.fixture
def source(hub: FakeHub) -> HubSource:
    source = open_repository(NAME)
    hub.log.clear()
    return source


@pytest.fixture
def expected(original: Path) -> bytes:
    with open_source(original).reader() as reader:
        return reader.read(Span(TENSOR, 0, N_BYTES))


def read(source: HubSource, n_bytes: int = N_BYTES) -> bytes:
    with source.reader() as reader:
        return reader.read(Span(TENSOR, 0, n_bytes))


def refusal(source: HubSource) -> HubError:
    """The error that reading ends with; it is presentable."""
    with pytest.raises(HubError) as caught:
        read(source)
    error = caught.value
    assert error.exit_code == 5
    assert SHARD in error.message
    assert error.message.endswith(".")
    assert error.hint
    assert not re.search(r"Signature|http|\n", error.message)
    return error


def test_a_broken_body_goes_on_where_it_broke(
    hub: FakeHub, source: HubSource, expected: bytes
) -> None:
    hub.inject(Fault("cdn", cut=1000), Fault("cdn", cut=0), Fault("cdn", cut=700))
    assert read(source) == expected
    begin = source.tensors[TENSOR].begin
    begins = [begin, begin + 1000, begin + 1000, begin + 1700]
    assert hub.ranges() == [(start, begin + N_BYTES) for start in begins]
    assert hub.pauses == [1]


def test_as_long_as_bytes_come_nobody_gives_up(
    hub: FakeHub, source: HubSource, expected: bytes
) -> None:
    hub.inject(Fault("cdn", cut=256, times=1000))
    assert read(source) == expected
    assert len(hub.ranges()) == N_BYTES // 256 > READING_TRIES
    assert (hub.count("resolve"), hub.pauses) == (1, [])


def test_progress_resets_the_count(hub: FakeHub, source: HubSource, expected: bytes) -> None:
    n_failures = READING_TRIES - 1
    for _ in range(3):
        hub.inject(Fault("cdn", status=503, times=n_failures), Fault("cdn", cut=1000))
    assert read(source) == expected
    assert hub.pauses == 3 * [1, 2, 4, 8, 16, 32, 60, 60, 60, 60, 60]


def test_a_server_that_stays_away_is_given_up(hub: FakeHub, source: HubSource) -> None:
    hub.inject(Fault("cdn", status=503, times=1000))
    error = refusal(source)
    assert error.message.endswith(f"{NAME}: the Hub answers with status 503, 12 times in a row.")
    assert error.hint == "run the same command again to continue."
    assert len(hub.ranges()) == READING_TRIES == len(hub.pauses) + 1


def test_answers_without_a_body_are_failures(hub: FakeHub, source: HubSource) -> None:
    hub.inject(Fault("cdn", times=1000, cut=0, headers={"Content-Length": "0"}))
    assert "12 times in a row: the answer ended 8,192 bytes early" in refusal(source).message


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
@pytest.mark.parametrize("place", ["cdn", "resolve"])
def test_what_may_pass_is_waited_out(
    hub: FakeHub, source: HubSource, expected: bytes, place: str, status: int
) -> None:
    hub.inject(Fault(place, status=status, times=2))
    assert read(source) == expected
    assert hub.pauses == [1, 2]


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "30"}, 30),
        ({"Retry-After": "0"}, 1),
        ({"Retry-After": "86400"}, 600),
        ({"Retry-After": "Fri, 01 Jan 2027 00:00:00 GMT"}, 1),
        ({"RateLimit": '"resolvers";r=0;t=55', "Retry-After": "7"}, 55),
        ({"RateLimit": '"resolvers";r=2999;t=228'}, 1),
    ],
)
def test_the_server_says_how_long_to_wait(
    hub: FakeHub, source: HubSource, expected: bytes, headers: dict[str, str], seconds: float
) -> None:
    hub.inject(Fault("resolve", status=429, headers=headers))
    assert read(source) == expected
    assert hub.pauses == [seconds]


def test_silence_is_a_failure(
    hub: FakeHub, source: HubSource, expected: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    hub.inject(Fault("cdn", delay=0.5, times=2))
    assert read(source) == expected
    assert hub.pauses == [1, 2]
    assert hub.count("resolve") == 3, "the server that is silent may not be the right one now"


def test_a_dead_connection(
    hub: FakeHub, source: HubSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    template = "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    error = refusal(source)
    assert "the connection failed, 12 times in a row: [Errno 111] Connection refused" in str(error)
    assert "HF_ENDPOINT" in error.hint
    hub.pauses.clear()
    with pytest.raises(HubError, match="Tiny-K3: the connection failed, 4 times in a row"):
        open_repository(NAME)
    assert hub.pauses == [1, 2, 4]


def test_expired_links_are_renewed(hub: FakeHub, source: HubSource, expected: bytes) -> None:
    with source.reader() as reader:
        for _ in range(3):
            assert reader.read(Span(TENSOR, 0, N_BYTES)) == expected
            hub.expire_links()
    assert (hub.count("resolve"), len(hub.ranges()), hub.pauses) == (3, 3 + 2, [])


def test_many_requests_renew_a_link_once(
    hub: FakeHub, source: HubSource, expected: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "REQUEST_BYTES", 512)
    with source.reader() as reader:
        reader.read(Span(TENSOR, 0, 1))
        hub.expire_links()
        assert reader.read(Span(TENSOR, 0, N_BYTES)) == expected
    assert (hub.count("resolve"), hub.pauses) == (2, [])


def test_a_link_that_others_use_up_is_waited_for(
    hub: FakeHub, source: HubSource, expected: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module.RemoteFile, "_forget", lambda *_: None)
    with source.reader() as reader:
        reader.read(Span(TENSOR, 0, 1))
        hub.inject(Fault("cdn", status=403, times=3))
        assert reader.read(Span(TENSOR, 0, N_BYTES)) == expected
    assert hub.pauses == [1, 2]


def test_what_is_refused_while_others_succeed_is_given_up_too(hub: FakeHub) -> None:
    error = OSError("no")
    error.response = SimpleNamespace(status_code=403, headers={})  # type: ignore[attr-defined]
    patience = Patience(SHARD, 3, Event(), refusals=1)
    for _ in range(3):
        patience.after(error, expired=True)
    with pytest.raises(HubError, match="no access"):
        patience.after(error, expired=True)
    assert hub.pauses == [1, 2]


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (401, "the Hub gives no access (status 401)."),
        (403, "the Hub gives no access (status 403)."),
        (404, "is not on the Hub (status 404)."),
        (410, "the Hub answers with status 410."),
        (416, "the Hub answers with status 416."),
    ],
)
def test_a_refusal_is_final_after_a_new_link(
    hub: FakeHub, source: HubSource, status: int, message: str
) -> None:
    hub.inject(Fault("cdn", status=status, times=1000))
    assert refusal(source).message.endswith(message)
    assert (hub.count("resolve"), hub.count("cdn"), hub.pauses) == (2, 2, [])


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_refusal_of_the_endpoint_is_final(hub: FakeHub, source: HubSource, status: int) -> None:
    hub.inject(Fault("resolve", status=status, times=1000))
    assert "hf auth login" in refusal(source).hint
    assert (hub.count(), hub.pauses) == (1, [])


def test_a_gated_repository(hub: FakeHub) -> None:
    hub.inject(Fault("resolve", CONFIG, 1, 403, {"X-Error-Code": "GatedRepo"}))
    with pytest.raises(HubError, match=rf"^{CONFIG} of {NAME}: the Hub gives no access") as error:
        open_repository(NAME)
    assert "terms accepted" in error.value.hint


@pytest.mark.parametrize("redirect", [True, False])
def test_a_server_that_ignores_ranges(hub: FakeHub, source: HubSource, redirect: bool) -> None:
    hub.redirect = redirect
    hub.inject(Fault("cdn" if redirect else "resolve", SHARD, times=1000, ignore_range=True))
    assert "ignores byte ranges and would send the whole file (status 200" in str(refusal(source))
    assert len(hub.ranges()) == 1


def test_a_server_that_sends_another_range(hub: FakeHub, source: HubSource) -> None:
    hub.inject(Fault("cdn", shift=1))
    begin, size = source.tensors[TENSOR].begin, source.shards[SHARD]
    end = begin + N_BYTES
    assert refusal(source).message == (
        f"{SHARD} of {NAME}: the server answers with range 'bytes {begin + 1}-{end}/{size}' "
        f"instead of 'bytes {begin}-{end - 1}/{size}'."
    )


@pytest.mark.parametrize("redirect", [True, False])
def test_a_shard_that_changes_under_way(
    hub: FakeHub, source: HubSource, folder: Path, expected: bytes, redirect: bool
) -> None:
    hub.redirect = redirect
    content = (folder / SHARD).read_bytes()
    with source.reader() as reader:
        assert reader.read(Span(TENSOR, 0, N_BYTES)) == expected
        (folder / SHARD).write_bytes(content[:-1] + b"?")
        if redirect:
            assert len(reader.read(Span(TENSOR, 0, 10))) == 10, "a signed link is trusted"
            hub.expire_links()
        with pytest.raises(HubError, match=rf"^{SHARD} of {NAME} has changed under the same") as e:
            reader.read(Span(TENSOR, 0, N_BYTES))
    etags = re.findall("[0-9a-f]{64}", e.value.message)
    assert etags[0] == source.etags[SHARD] != etags[1]
    assert str(Path(constants.HF_ASSETS_CACHE) / "kimi_k3_mlx") in e.value.hint


def test_a_shard_that_changed_since_its_header_was_cached(
    hub: FakeHub, source: HubSource, folder: Path
) -> None:
    (folder / SHARD).write_bytes((folder / SHARD).read_bytes() + b"?")
    again = open_repository(NAME)
    assert again == source
    size = source.shards[SHARD]
    assert f"({size:,} bytes) became " in refusal(again).message
    shutil.rmtree(constants.HF_ASSETS_CACHE)
    (folder / SHARD).write_bytes((folder / SHARD).read_bytes()[:-2] + b"?")
    third = open_repository(NAME)
    assert third.id == source.id
    assert third.state() != source.state()


def test_a_link_whose_file_became_longer(hub: FakeHub, source: HubSource, folder: Path) -> None:
    with source.reader() as reader:
        reader.read(Span(TENSOR, 0, 10))
        (folder / SHARD).write_bytes((folder / SHARD).read_bytes() + b"?")
        with pytest.raises(HubError, match=rf"range 'bytes .*/{source.shards[SHARD] + 1}' instead"):
            reader.read(Span(TENSOR, 0, N_BYTES))


def test_a_server_that_is_no_hub(hub: FakeHub, source: HubSource) -> None:
    hub.inject(Fault("resolve", status=200))
    assert "the server tells no ETag, as a Hub would" in refusal(source).message
    hub.inject(Fault("api", status=200))
    with pytest.raises(HubError, match="Tiny-K3: the server answers, but not as a Hub"):
        open_repository(NAME)


@pytest.mark.parametrize("name", ["", CONFIG, INDEX, SHARD])
def test_opening_is_patient_too(hub: FakeHub, name: str) -> None:
    place = "resolve" if name else "api"
    hub.inject(Fault(place, name, times=2, status=502))
    assert open_repository(NAME).where.startswith(NAME)
    assert hub.pauses
    hub.pauses.clear()
    shutil.rmtree(constants.HF_HOME)
    hub.inject(Fault(place, name, times=1000, status=502))
    with pytest.raises(HubError, match="the Hub answers with status 502") as error:
        open_repository(NAME)
    assert name in error.value.message
    assert 7 <= sum(hub.pauses) < 30


def test_leaving_ends_the_patience(
    hub: FakeHub, source: HubSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[Patience.__module__], "FIRST_PAUSE", 60.0)
    pausing = Event()
    monkeypatch.setattr(Patience, "pause", lambda *args: (pausing.set(), REAL_PAUSE(*args)))
    other = next(name for name, shard in source.weight_map.items() if shard != SHARD)
    hub.inject(Fault("cdn", SHARD, times=1000, status=503))
    with source.reader() as reader:
        next(reader.blocks([Span(other, 0, 2), Span(TENSOR, 0, 10), Span(other, 0, 2)]))
        assert pausing.wait(30)
        time.sleep(0.1)
        begin = time.monotonic()
    assert time.monotonic() - begin < 10
    assert len(hub.ranges(SHARD)) == 1
