"""Benchmarks: what is timed, what is told of it, and what is not."""

from __future__ import annotations

import csv
import io
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from kimi_k3_mlx.convert.plan import plan_build
from kimi_k3_mlx.convert.profiles import load_profile
from kimi_k3_mlx.convert.run import run
from kimi_k3_mlx.prune_plan import LayerPlan, PrunePlan
from kimi_k3_mlx.runtime import bench
from kimi_k3_mlx.runtime.bench import Trial, csv_text, measure, summary, svg, traffic
from kimi_k3_mlx.runtime.load import Loaded, load
from kimi_k3_mlx.runtime.machine import Machine, Probes
from kimi_k3_mlx.tensors.local import open_source

TRIALS = [
    Trial(64, 9, 2.0, 1.0, 100), Trial(64, 9, 4.0, 3.0, 300), Trial(64, 9, 3.0, 1.5, 200),
    Trial(256, 9, 16.0, 2.0, 500),
]  # fmt: skip


@pytest.fixture(scope="module")
def build(tiny_text_source: Path) -> Loaded:
    return load(tiny_text_source)


@pytest.fixture(scope="module")
def here() -> Machine:
    return Machine.read(Path(), Probes())


@pytest.fixture
def mac(here: Machine) -> Machine:
    return replace(here, system="Darwin", chip="Apple M3 Ultra", macos=(15, 1), wired_limit=9 << 30)


def test_prompts_and_answers_have_the_length_that_was_asked_for(build: Loaded) -> None:
    ends, heard = set(build.tokenizer.eos_token_ids), []
    trials = measure(build, [5, 9], 4, 2, 4096, heard.append)
    assert [(it.n_prompt, it.n_decoded) for it in trials] == [(5, 3), (5, 3), (9, 3), (9, 3)]
    assert heard == trials
    assert all(min(it[2:]) > 0 for it in trials)
    assert build.tokenizer.eos_token_ids == ends


def test_an_end_token_ends_nothing(build: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    class Ending:
        layers = build.model.layers
        make_cache = build.model.make_cache
        parameters = build.model.parameters

        def __call__(self, inputs: Any, **_: Any) -> mx.array:
            (end,) = ends
            return mx.broadcast_to(mx.arange(512) == end, (*inputs.shape, 512)) * 1.0

    ends = build.tokenizer.eos_token_ids
    (trial,) = measure(build._replace(model=Ending()), [3], 6, 1, 4096)
    assert trial.n_decoded == 5


def test_seconds_are_those_of_mlx_lm(build: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    class Last:
        prompt_tps, generation_tps, generation_tokens, peak_memory = 100.0, 8.0, 32, 0.5

    monkeypatch.setattr(bench, "responses", lambda *_: iter([None, Last]))
    assert bench.run(build, 50, 32, 1) == Trial(50, 31, 0.5, 4.0, 500_000_000)


def test_no_speed_without_wired_weights(build: Loaded, mac: Machine) -> None:
    value = summary(build, TRIALS, mac, "no reason")
    assert (value["wired"], value["why_not_wired"]) == (False, "no reason")
    for row in value["rows"]:
        assert row["prefill_tokens_per_second"] is None
        assert row["decode_tokens_per_second"] is None
        assert row["ceiling_tokens_per_second"] is None
        assert row["share_of_ceiling"] is None
    assert value["rows"][0]["prefill_seconds"] == {"median": 3.0, "min": 2.0, "max": 4.0}
    lines = list(csv.DictReader(io.StringIO(csv_text(value))))
    assert {line["decode_tokens_per_second"] for line in lines} == {""}
    assert [line["decode_seconds"] for line in lines] == ["1.0", "3.0", "1.5", "2.0"]


def test_speeds_of_wired_weights(build: Loaded, mac: Machine) -> None:
    value = summary(build, TRIALS, mac, "")
    first, last = value["rows"]
    assert first["prefill_tokens_per_second"] == pytest.approx(64 / 3)
    assert first["decode_tokens_per_second"] == pytest.approx(9 / 1.5)
    assert (first["peak_memory"], last["peak_memory"]) == (300, 500)
    ceiling = 819e9 / traffic(build, 64).total
    assert first["ceiling_tokens_per_second"] == pytest.approx(ceiling)
    assert first["share_of_ceiling"] == pytest.approx(6 / ceiling)
    (line, *_) = csv.DictReader(io.StringIO(csv_text(value)))
    expected = {
        "prefill_tokens_per_second": "32.0", "wired": "True", "chip": "Apple M3 Ultra",
        "macos": "15.1", "wired_limit_bytes": str(9 << 30),
    }  # fmt: skip
    assert expected.items() <= line.items()
    assert line["mlx"] == mac.versions["mlx"]


@pytest.mark.parametrize("reason", ["", "not wired"])
def test_the_figure_is_the_same_for_the_same_numbers(
    build: Loaded, here: Machine, reason: str
) -> None:
    value = summary(build, TRIALS, here, reason)
    drawn = svg(value, "a <build> & $x$")
    assert drawn == svg(value, "a <build> & $x$")
    assert ElementTree.fromstring(drawn).tag.endswith("svg")
    number = [it for row in value["rows"] for it in row["trials"]]
    at, found = bench.points(value, "decode")
    assert at == [64, 64, 64, 256]
    assert found == [it["decode_seconds"] if reason else 9 / it["decode_seconds"] for it in number]


def test_why_weights_are_not_wired(build: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--no-wire" in bench.why_not_wired(build, wire=False)
    monkeypatch.setattr(bench.mx.metal, "is_available", lambda: False)
    monkeypatch.setattr(bench.platform, "system", lambda: "Linux")
    assert bench.why_not_wired(build, wire=True).startswith("Linux has no Metal GPU")
    monkeypatch.setattr(bench.mx.metal, "is_available", lambda: True)
    for limit, macos, reason in (
        (1000, "15.0", "and 1.00 kB can be wired"),
        (1 << 40, "14.5", "macOS 14.5 is older than 15"),
        (1 << 40, "15.0", ""),
    ):
        info = {"max_recommended_working_set_size": limit}
        monkeypatch.setattr(bench.mx, "device_info", lambda info=info: info)
        monkeypatch.setattr("platform.mac_ver", lambda macos=macos: (macos, (), ""))
        assert bench.why_not_wired(build, wire=True).endswith(reason)


def test_bytes_of_a_token_by_the_plan(tiny_source: Path, tmp_path: Path) -> None:
    """Of a pruned build: the roles of the converter's own table, and each layer's own experts."""
    counts = dict(zip(range(1, 5), (8, 6, 5, 4), strict=True))
    keep = {layer: LayerPlan(tuple(range(n))) for layer, n in counts.items()}
    opened = open_source(tiny_source)
    plan = plan_build(opened, load_profile("mxfp4-q8"), PrunePlan(8, keep))
    run(plan, opened, tmp_path / "build")
    found = traffic(load(tmp_path / "build"), 100)
    unread = ("vision", "projector", "embedding", "expert")
    assert found.trunk == sum(it.n_bytes for it in plan.tensors if it.role not in unread)
    by_layer = {layer: 0 for layer in counts}
    for it in plan.tensors:
        if it.role == "expert":
            by_layer[int(it.name.split(".layers.")[1].split(".")[0])] += it.n_bytes
    assert len(set(by_layer.values())) == 4
    top_k = opened.config["text_config"]["num_experts_per_token"]
    assert found.experts == sum(top_k * n // counts[layer] for layer, n in by_layer.items())
    assert traffic(load(tmp_path / "build"), 200).cache == 2 * found.cache
