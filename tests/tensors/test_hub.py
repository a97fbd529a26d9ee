"""A repository opens and reads like its local twin, by exact ranges, from a Hub on localhost."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_k3_mlx.errors import CheckpointError, HubError, KimiError, UsageError
from kimi_k3_mlx.schema import Span
from kimi_k3_mlx.tensors import hub as hub_module
from kimi_k3_mlx.tensors.header import LENGTH_BYTES, read_header
from kimi_k3_mlx.tensors.hub import HubSource, open_repository
from kimi_k3_mlx.tensors.local import open_source
from kimi_k3_mlx.tensors.source import CONFIG, INDEX, Reader
from tests.fake_hub import FakeHub, environment, use_hub

pytestmark = pytest.mark.hub
NAME = "moonshotai/Tiny-K3"
SHARD = "model-00002-of-000008.safetensors"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def hub(tiny_source: Path, tmp_path: Path) -> Iterator[FakeHub]:
    """A Hub with the tiny source, and an empty cache."""
    with FakeHub() as hub, use_hub(hub, tmp_path / "home"):
        hub.add(NAME, tiny_source)
        yield hub


@pytest.fixture
def copied(hub: FakeHub, tiny_source: Path, tmp_path: Path) -> Path:
    """A copy of the source, which the Hub serves instead."""
    copy = Path(shutil.copytree(tiny_source, tmp_path / "copy"))
    hub.add(NAME, copy)
    return copy


def whole(source: HubSource, name: str) -> Span:
    return Span(name, 0, source.tensors[name].n_bytes)


def neighbours(source: HubSource, shard: str = SHARD) -> list[Span]:
    """All tensors of a shard, in the order of the file."""
    tensors = [t for t in source.tensors.values() if source.weight_map[t.name] == shard]
    return [whole(source, t.name) for t in sorted(tensors, key=lambda tensor: tensor.begin)]


def read_all(source: HubSource, spans: list[Span]) -> bytes:
    with source.reader() as reader:
        return b"".join(map(bytes, reader.blocks(spans)))


def n_asked(hub: FakeHub) -> int:
    return sum(end - begin for begin, end in hub.ranges())


def change(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_it_opens_like_its_local_twin(hub: FakeHub, tiny_source: Path) -> None:
    source, twin = open_repository(NAME), open_source(tiny_source)
    assert source.id.headers_sha256 == twin.id.headers_sha256
    assert source.tensors == twin.tensors
    assert (source.shards, source.weight_map) == (twin.shards, twin.weight_map)
    assert (source.config, source.total_size) == (twin.config, twin.total_size)
    assert source.files() == twin.files()
    assert source.read_file("LICENSE") == twin.read_file("LICENSE")


def test_it_is_pinned_to_a_commit(hub: FakeHub, tiny_source: Path) -> None:
    commit = hub.add(NAME, tiny_source)
    for revision in (None, "main", commit):
        source = open_repository(NAME, revision)
        assert source.id.commit == commit
        assert (source.where, source.name) == (f"{NAME}@{commit}", "Tiny-K3")
    with pytest.raises(HubError, match=f"{NAME} at revision v9 is not on the Hub") as error:
        open_repository(NAME, "v9")
    assert error.value.exit_code == 5


def test_files_of_subfolders_do_not_count(hub: FakeHub, copied: Path) -> None:
    (copied / "extra").mkdir()
    (copied / "extra" / "notes.txt").write_text("x")
    hub.add(NAME, copied)
    source = open_repository(NAME)
    assert not any("notes" in name for name in source.files())
    with pytest.raises(HubError, match="no such is missing in"):
        source.read_file("no such")


def test_opening_fetches_headers_and_no_tensor_byte(hub: FakeHub) -> None:
    open_repository(NAME)
    headers = [read_header(hub.repositories[NAME][0] / name).n_bytes for name in shards(hub)]
    assert n_asked(hub) == sum(headers)
    assert hub.count("cdn", INDEX) == 1


def shards(hub: FakeHub) -> list[str]:
    return [path.name for path in hub.repositories[NAME][0].glob("*.safetensors")]


def test_a_second_opening_asks_only_for_the_commit(hub: FakeHub) -> None:
    first = open_repository(NAME)
    hub.log.clear()
    second = open_repository(NAME)
    assert [(asked.place, asked.method) for asked in hub.log] == [("api", "GET")]
    assert second == first
    assert second.state() == first.state()


def test_another_commit_is_another_cache(hub: FakeHub, copied: Path) -> None:
    first = open_repository(NAME)
    change(copied / CONFIG, bos_token_id=1)
    hub.add(NAME, copied)
    hub.log.clear()
    second = open_repository(NAME)
    assert second.id.headers_sha256 != first.id.headers_sha256
    assert second.state() != first.state()
    assert len(hub.ranges()) == 2 * len(first.shards)


@pytest.mark.parametrize("damage", [b"", b"[1]\n", b"5\n", b"{", b'["e", 1, "00"]\nraw'])
def test_a_damaged_cache_is_fetched_again(hub: FakeHub, damage: bytes) -> None:
    first = open_repository(NAME)
    (cached,) = Path(constants.HF_ASSETS_CACHE).rglob(f"{SHARD}.header")
    intact = cached.read_bytes()
    cached.write_bytes(damage or intact[:-1])
    hub.log.clear()
    assert open_repository(NAME) == first
    assert len(hub.ranges()) == len(hub.ranges(SHARD)) == 2
    assert cached.read_bytes() == intact
    assert [path.name for path in cached.parent.iterdir() if path.suffix != ".header"] == []


def check_blocks(reader: Reader, twin: Reader, spans: list[Span]) -> None:
    """The twin's bytes, no block across spans, each one valid while the next one is read."""
    blocks = reader.blocks(spans)
    held = memoryview(b"")
    for span in spans:
        found = b""
        while len(found) < span.n_bytes:
            before, block = bytes(held), next(blocks)
            assert held == before
            found, held = found + block, block
        assert found == twin.read(span)
    assert list(blocks) == []


def test_any_spans_have_the_bytes_of_the_local_twin(
    hub: FakeHub, tiny_source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "REQUEST_BYTES", 3000)
    monkeypatch.setattr(hub_module, "PARALLEL", 3)
    source = open_repository(NAME)
    names = st.lists(st.sampled_from(sorted(source.tensors)), max_size=12)
    with source.reader() as reader, open_source(tiny_source).reader() as twin:

        @settings(deadline=None, max_examples=50)
        @given(names=names, parts=st.randoms())
        def compare(names: list[str], parts: random.Random) -> None:
            hub.log.clear()
            spans = [piece(source, name, parts) for name in names]
            check_blocks(reader, twin, spans)
            assert n_asked(hub) == sum(span.n_bytes for span in spans)

        compare()


def piece(source: HubSource, name: str, parts: random.Random) -> Span:
    """Any part of a tensor, now and then all or nothing."""
    n_bytes = source.tensors[name].n_bytes
    begin = parts.choice([0, parts.randint(0, n_bytes)])
    return Span(name, begin, parts.choice([begin, n_bytes, parts.randint(begin, n_bytes)]))


def test_neighbours_share_a_request(hub: FakeHub) -> None:
    source = open_repository(NAME)
    spans = neighbours(source)
    first, last = source.tensors[spans[0].tensor], source.tensors[spans[-1].tensor]
    hub.log.clear()
    assert len(read_all(source, spans)) == last.end - first.begin
    assert hub.ranges() == [(first.begin, last.end)]


def test_what_is_not_wanted_is_not_asked_for(hub: FakeHub) -> None:
    source = open_repository(NAME)
    spans = [span for shard in source.shards for span in neighbours(source, shard)][::3]
    random.Random(1).shuffle(spans)
    hub.log.clear()
    assert n_asked(hub) == 0
    assert len(read_all(source, spans)) == n_asked(hub) == sum(span.n_bytes for span in spans)
    assert hub.count("resolve") == len({source.weight_map[span.tensor] for span in spans})


def test_it_looks_ahead_no_further_than_it_may(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_repository(NAME)
    spans = [span for span in neighbours(source)[::2] if span.n_bytes == 128] * 3
    for n_parallel in (1, 5, 16):
        monkeypatch.setattr(hub_module, "PARALLEL", n_parallel)
        drawn = iter(spans)
        with source.reader() as reader:
            next(reader.blocks(drawn))
        # One more is next, and its neighbour has been looked at.
        assert len(spans) - len(list(drawn)) == n_parallel + 2


def test_buffers_are_used_again(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "PARALLEL", 3)
    source = open_repository(NAME)
    with source.reader() as reader:
        buffers = {id(block.obj) for block in reader.blocks(neighbours(source)[::2] * 4)}
    assert len(buffers) == 3 + 1


def test_requests_run_at_the_same_time(hub: FakeHub) -> None:
    hub.latency, begin = 0.1, time.monotonic()
    source = open_repository(NAME)
    assert 0.3 <= time.monotonic() - begin < 0.1 * 2 * len(source.shards)
    spans, begin = neighbours(source)[::2][:32], time.monotonic()
    read_all(source, spans)
    assert 0.2 <= time.monotonic() - begin < 0.1 * len(spans) / 2


def test_no_thread_survives(hub: FakeHub) -> None:
    source = open_repository(NAME)
    hub.latency = 0.02
    with source.reader() as reader:
        for _ in reader.blocks(neighbours(source)[::2]):
            break
        assert any(thread.name.startswith("hub") for thread in threading.enumerate())
    assert not any(thread.name.startswith("hub") for thread in threading.enumerate())


def test_a_server_that_does_not_redirect(hub: FakeHub, tiny_source: Path) -> None:
    hub.redirect = False
    source = open_repository(NAME)
    third = neighbours(source, SHARD.replace("2", "3", 1))
    spans = neighbours(source)[:1] + third[1:2]  # neighbours, but for the shard
    with open_source(tiny_source).reader() as twin:
        assert read_all(source, spans) == b"".join(map(twin.read, spans))
    assert hub.count("cdn") == 0


@pytest.mark.parametrize("redirect", [True, False])
def test_the_token_goes_to_the_endpoint_only(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, redirect: bool
) -> None:
    hub.token, hub.redirect = "hf_secret", redirect
    with pytest.raises(HubError, match=r"Tiny-K3: the Hub gives no access \(status 401\)") as error:
        open_repository(NAME)
    assert "hf auth login" in error.value.hint
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.log.clear()
    source = open_repository(NAME)
    read_all(source, neighbours(source)[::2])
    tokens = {place: {a.token for a in hub.log if a.place == place} for place in ("resolve", "cdn")}
    assert tokens == {"resolve": {"hf_secret"}, "cdn": {None} if redirect else set()}


def test_offline_no_request_is_made(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    open_repository(NAME)
    hub.log.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match=f"{NAME} can't be read: HF_HUB_OFFLINE") as error:
        open_repository(NAME)
    assert error.value.exit_code == 5
    assert hub.log == []


def test_names_of_no_repository(hub: FakeHub) -> None:
    with pytest.raises(UsageError, match="'a b' is not a repository: owner/name"):
        open_repository("a b")
    with pytest.raises(HubError, match=r"^nobody/nothing: the Hub gives no access"):
        open_repository("nobody/nothing")


def damaged_header(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'{"__m', b'["__m', 1))


DEFECTS = {
    rf"{CONFIG} is missing in {NAME}@": lambda path: (path / CONFIG).unlink(),
    rf"{INDEX} of {NAME}@\w+ is not JSON": lambda path: (path / INDEX).write_text("{"),
    rf"{INDEX} has no weight_map": lambda path: (path / INDEX).write_text("{}"),
    rf"shard {SHARD} is named by .* missing in": lambda path: (path / SHARD).unlink(),
    rf"{SHARD} is truncated in its header: [\d,]+ bytes expected, 100 f": lambda p: os.truncate(
        p / SHARD, 100
    ),
    rf"{SHARD} is truncated: [\d,]+ bytes exp": lambda p: os.truncate(p / SHARD, 30_000),
    rf"{SHARD} is too short": lambda path: os.truncate(path / SHARD, LENGTH_BYTES - 1),
    rf"{SHARD} has 9 bytes after": lambda p: (p / SHARD).write_bytes(
        (p / SHARD).read_bytes() + b"x" * 9
    ),
    rf"{SHARD} has a header that is not JSON": lambda path: damaged_header(path / SHARD),
}


@pytest.mark.parametrize("message", DEFECTS)
def test_a_damaged_repository(hub: FakeHub, copied: Path, message: str) -> None:
    DEFECTS[message](copied)
    hub.add(NAME, copied)
    with pytest.raises(CheckpointError, match=message) as error:
        open_repository(NAME)
    assert error.value.hint.startswith(f"the fault is in {NAME}@")
    assert "download" not in error.value.hint


def test_a_cache_that_cannot_be_written(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "/dev/null/hub")
    with pytest.raises(KimiError, match=r"/dev/null.*: Not a directory") as error:
        open_repository(NAME)
    assert "HF_HOME" in error.value.hint
    assert hub.pauses == []


def test_a_real_process_obeys_its_environment(hub: FakeHub, tmp_path: Path) -> None:
    program = (
        "import sys; from kimi_k3_mlx.tensors.hub import open_repository as f\n"
        "assert not {'huggingface_hub', 'mlx'} & sys.modules.keys()\n"
        f"sys.stdout.write(f({NAME!r}).id.headers_sha256)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | environment(hub, tmp_path / "other"),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert len(hub.ranges()) == 2 * len(shards(hub))
    assert any((tmp_path / "other" / "assets").rglob(f"{SHARD}.header"))
    assert done.stdout == open_repository(NAME).id.headers_sha256
