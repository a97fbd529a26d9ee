"""How much is compared: samples of experts, sources on the Hub, matrices bigger than a chunk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kimi_k3_mlx.convert import compare
from kimi_k3_mlx.convert.plan import plan_build
from kimi_k3_mlx.convert.verify import Sample, verify_build
from kimi_k3_mlx.errors import MismatchError
from kimi_k3_mlx.schema import Progress
from kimi_k3_mlx.tensors import local
from kimi_k3_mlx.tensors.hub import open_repository
from kimi_k3_mlx.tensors.local import LocalReader, open_source
from kimi_k3_mlx.tensors.source import Source
from tests.convert.damage import LAYER, values_of
from tests.convert.verify_kinds import KINDS, built, linked, profile_of
from tests.fake_hub import FakeHub, use_hub

NAME = "moonshotai/Tiny-K3"


@pytest.fixture
def damaged(tiny_source: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A build of a kind, to damage."""
    return lambda kind: linked(built(kind, tiny_source), tmp_path / "build")


def passes(build: Path, source: Path, sample: int, seed: int) -> bool:
    try:
        verify_build(build, open_source(source), sample=sample, seed=seed)
    except MismatchError:
        return False
    return True


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("kind", ["ragged", "padded q2 experts", "graded", "moonshot"])
def test_a_sample_takes_so_many_experts_of_each_layer(
    kind: str, count: int, tiny_source: Path
) -> None:
    seen: list[tuple[int, int]] = []
    progress: Progress = lambda done, total, what: seen.append((done, total))  # noqa: E731
    _, prune = KINDS[kind]
    report = verify_build(
        built(kind, tiny_source), open_source(tiny_source), progress, sample=count
    )
    kept = [8] * 4 if prune is None else [len(layer.keep) for layer in prune.layers.values()]
    assert report.n_expert_tensors == 6 * sum(min(count, n) for n in kept)
    assert report.n_tensors == report.n_expert_tensors + 146
    assert seen[-1][0] == seen[-1][1]
    assert report.hashed is False
    assert report.sample is not None
    assert report.to_json()["sample"] == {"experts": count, "seed": report.sample.seed}


def test_every_sample_is_another_one_unless_it_is_repeated(tiny_source: Path) -> None:
    build, source = built("mxfp4", tiny_source), open_source(tiny_source)
    seeds = {verify_build(build, source, sample=1).sample for _ in range(4)}
    assert len(seeds) == 4
    assert verify_build(build, source, sample=1, seed=7).sample == Sample(1, 7)


@pytest.mark.parametrize("kind", ["mxfp4", "moonshot"])
def test_a_sample_sees_damage_in_its_own_experts_only(
    kind: str, damaged: Callable[[str], Path], tiny_source: Path
) -> None:
    """Some seeds take the damaged expert, others don't; all experts together always do."""
    build = damaged(kind)
    name = f"{LAYER}2.mlp.switch_mlp.up_proj.weight"
    if kind == "moonshot":
        name = f"{LAYER}2.block_sparse_moe.experts.2.w3.weight_packed"
    with values_of(build, name) as values:
        values[... if kind == "moonshot" else 2] ^= 0x66
    seeds = range(300)
    good = next(seed for seed in seeds if passes(build, tiny_source, 1, seed))
    bad = next(seed for seed in seeds if not passes(build, tiny_source, 1, seed))
    assert passes(build, tiny_source, 1, good)
    assert not passes(build, tiny_source, 1, bad)
    assert not passes(build, tiny_source, 8, 0)


def test_two_builds_have_different_samples_of_one_seed(
    tiny_source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[list[tuple[int, int]]] = []
    for kind in ("mxfp4", "narrowed"):
        spans = read_spans(
            monkeypatch,
            lambda kind=kind: verify_build(  # type: ignore[misc]
                built(kind, tiny_source), open_source(tiny_source), sample=2, seed=1
            ),
        )
        chosen.append(sorted(span for span in spans if ".experts." in span))
    assert chosen[0] != chosen[1]


def read_spans(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> list[str]:
    """Names of the source tensors that are read."""
    names: list[str] = []
    blocks = LocalReader.blocks

    def noting(self: LocalReader, spans: object) -> object:
        spans = list(spans)  # type: ignore[call-overload]
        names.extend(span.tensor for span in spans)
        return blocks(self, spans)

    with monkeypatch.context() as patch:
        patch.setattr(LocalReader, "blocks", noting)
        act()
    return names


def test_experts_that_go_are_never_read(tiny_source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(tiny_source)
    names = read_spans(monkeypatch, lambda: verify_build(built("uniform", tiny_source), source))
    experts = {name for name in names if ".block_sparse_moe.experts." in name}
    numbers = {int(name.split(".experts.")[1].split(".")[0]) for name in experts}
    assert numbers == {1, 3, 4, 6}


@pytest.mark.hub
@pytest.mark.parametrize("kind", ["graded q3", "moonshot"])
def test_a_source_on_the_hub(kind: str, tiny_source: Path, tmp_path: Path) -> None:
    """Also: hardly more is fetched than the plan keeps."""
    build = built(kind, tiny_source)
    twin = verify_build(build, open_source(tiny_source))
    with FakeHub() as hub, use_hub(hub, tmp_path / "home"):
        commit = hub.add(NAME, tiny_source)
        source = open_repository(NAME)
        n_kept = plan_build(source, profile_of(kind), KINDS[kind][1]).n_read
        hub.log.clear()
        report = verify_build(build, source)
        n_fetched = sum(end - begin for begin, end in hub.ranges())
    assert report.source == f"{NAME}@{commit}"
    assert report.rounded == twin.rounded
    assert report.n_bytes == twin.n_bytes
    assert n_kept <= n_fetched <= n_kept * 1.1 + 4096


@pytest.mark.hub
def test_damage_is_caught_from_the_hub(
    damaged: Callable[[str], Path], tiny_source: Path, tmp_path: Path
) -> None:
    build = damaged("graded")
    with values_of(build, f"{LAYER}4.self_attn.o_proj.weight") as words:
        words[7, 3] ^= 1 << 31
    with FakeHub() as hub, use_hub(hub, tmp_path / "home"):
        hub.add(NAME, tiny_source)
        with pytest.raises(MismatchError, match=r"o_proj\.weight: element \[7, 15\] decodes to"):
            verify_build(build, open_repository(NAME))


@pytest.mark.parametrize(("kind", "chunk"), [("padded q2 experts", 2000), ("mxfp8", 1)])
def test_chunks_of_any_size_give_the_same(
    kind: str, chunk: int, tiny_source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, source = built(kind, tiny_source), open_source(tiny_source)
    expected = verify_build(build, source)
    monkeypatch.setattr(compare, "CHUNK_BYTES", chunk)
    monkeypatch.setattr(compare, "ZEROS", bytes(100))
    monkeypatch.setattr(local, "BUFFER_BYTES", 1000)
    found = verify_build(build, source)
    assert [r.name for r in found.rounded] == [r.name for r in expected.rounded]
    for ours, theirs in zip(found.rounded, expected.rounded, strict=True):
        assert ours.cosine == pytest.approx(theirs.cosine, rel=1e-5)
        assert ours.error == pytest.approx(theirs.error, rel=1e-4)


def test_a_wrong_value_in_a_later_chunk_is_placed_right(
    damaged: Callable[[str], Path], tiny_source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "CHUNK_BYTES", 300)
    build = damaged("q3 experts")
    with values_of(build, f"{LAYER}3.mlp.switch_mlp.gate_proj.scales") as scales:
        scales[5, 33, 0] = 0
    with pytest.raises(MismatchError) as error:
        verify_build(build, open_source(tiny_source))
    assert "gate_proj.weight: element [5, 33, " in error.value.message
    assert "block_sparse_moe.experts.5.w1.weight_packed)" in error.value.message
    assert np.isfinite(float(error.value.message.split("decodes to ")[1].split(",")[0]))


@pytest.mark.parametrize("kind", ["mixed", "padded q2 experts"])
def test_a_source_that_is_f32_throughout(kind: str, tiny_float_source: Path) -> None:
    source = open_source(tiny_float_source)
    report = verify_build(built(kind, tiny_float_source), source)
    assert report.n_bytes > 0
    with pytest.raises(MismatchError, match="the build was made from another checkpoint"):
        verify_build(built("mxfp4", tiny_float_source), other(source))


def other(source: Source) -> Source:
    """The same source with other headers."""
    return replace(source, id=replace(source.id, headers_sha256="0" * 64))
