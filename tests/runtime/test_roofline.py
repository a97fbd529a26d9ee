"""Sizes of K3 builds without a checkpoint, bytes per token, and the speeds that follow."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from converters.config import read_dims
from kimi_k3_mlx.convert.memory import MACS
from kimi_k3_mlx.convert.plan import plan_build
from kimi_k3_mlx.convert.profiles import load_profile
from kimi_k3_mlx.prune_plan import keep_first
from kimi_k3_mlx.reap.sizes import RUNS, measured
from kimi_k3_mlx.runtime import roofline
from kimi_k3_mlx.runtime.chips import CHIPS, find_chip
from kimi_k3_mlx.runtime.roofline import (
    PROFILES,
    PUBLISHED,
    RECORD,
    k3_config,
    nominal_source,
    record_share,
    rows,
    sizes,
)
from tests.house.checks import ROOT

M3_ULTRA = find_chip("M3 Ultra")


def test_the_config_is_the_published_one() -> None:
    golden = json.loads((ROOT / "tests/golden/k3_config.json").read_text("utf-8"))
    assert k3_config(896) == golden


@pytest.mark.slow
def test_the_nominal_source_is_k3_to_the_byte() -> None:
    source = nominal_source(k3_config(896))
    assert len(source.tensors) == 497_220
    assert source.total_size == 1_560_860_324_864


# Published builds, to the byte, as tests/convert/test_full_scale.py has them from the full table.
@pytest.mark.parametrize(
    ("keep", "profile", "n_bytes"),
    [
        (242, "mxfp4-q8", 451_435_437_920),
        (242, "mxfp4", 504_213_726_560),
        (179, "mxfp4-q8", 349_687_330_256),
        (896, "mxfp4", 1_560_860_324_864 - 69 * 32 * 4),
        (320, "mxfp4", 630_235_805_696 - 69 * 32 * 4),
        (896, "moonshot", 1_560_860_324_864),
    ],
)
def test_sizes_are_the_published_ones(keep: int, profile: str, n_bytes: int) -> None:
    assert sizes(profile).n_weights(keep) == n_bytes


@pytest.mark.parametrize("profile", ["mxfp4", "mxfp4-q4"])
def test_sizes_are_those_of_a_plan_and_of_the_planner(profile: str) -> None:
    """The slow twins: a source with 18 experts, pruned to 17; and the sum that `plan` uses."""
    source = nominal_source(k3_config(18))
    dims = read_dims(source.config)
    plan = plan_build(source, load_profile(profile), keep_first(17, 18, dims.moe_layers))
    assert sizes(profile).n_weights(17) == plan.total_size
    n_experts = len(dims.moe_layers) * 242
    assert sizes(profile).n_weights(242) == measured(source, load_profile(profile)).total(n_experts)


def test_bytes_per_token_are_those_of_the_survey() -> None:
    """Trunk 111, about 59, 45 and 31 GB; M3 Ultra's ceilings leave out the state there."""
    for profile, trunk, ceiling in (
        ("mxfp4", 111, 6.0), ("mxfp4-q8", 59, 9.5), ("mxfp4-q6", 45, 11.6), ("mxfp4-q4", 31, 14.4),
    ):  # fmt: skip
        traffic = sizes(profile).traffic(242, 1)
        assert traffic.experts == 16 * 92 * 17_547_264 == 25_829_572_608
        assert traffic.trunk / 1e9 == pytest.approx(trunk, rel=0.02)
        assert 819e9 / (traffic.trunk + traffic.experts) == pytest.approx(ceiling, rel=0.025)


def test_trunk_bytes_by_hand() -> None:
    """All text weights but experts and embedding; everything is read once."""
    dense = 114_404_258_816 - 92_289_024 - 802_428_928 - 69 * 32 * 4
    embedding = 163_840 * 7168 * 2
    gone = 92 * (896 - 242) * (7168 * 2 + 4)
    assert sizes("mxfp4").traffic(242, 1).trunk == dense - embedding - gone


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(PROFILES), st.integers(16, 896), st.integers(1, 1 << 20))
def test_context_and_experts_cost_what_they_do(profile: str, keep: int, context: int) -> None:
    traffic, memory = sizes(profile).traffic(keep, context), sizes(profile).running(keep, context)
    assert traffic.cache == memory.n_cache == 27_648 * context
    assert traffic.state == 2 * memory.n_state
    assert traffic.total == sum((traffic.trunk, traffic.experts, traffic.cache, traffic.state))
    assert traffic.experts == sizes("mxfp4").traffic(16, 1).experts


@pytest.mark.parametrize("ram", MACS)
@pytest.mark.parametrize("profile", ["mxfp4-q4", "mxfp4"])
def test_the_largest_by_trying_all(profile: str, ram: int) -> None:
    fitting = [
        keep
        for keep in range(16, 897)
        if sizes(profile).running(keep, 8192).on(ram).verdict in RUNS
    ]
    assert sizes(profile).largest(ram, 8192) == max(fitting, default=16)


def test_a_smaller_machine_is_named_in_every_row() -> None:
    for row in rows(64, M3_ULTRA, 32_768):
        assert (row.fit.verdict, row.ceiling, row.expected) == ("no", None, None)


def test_the_record_is_the_only_measurement_and_is_not_ours() -> None:
    found = rows(512, M3_ULTRA, 32_768)
    (record,) = [row for row in found if row.measured]
    assert (record.keep, record.profile, record.published) == (242, "mxfp4-q8", True)
    assert record.to_json()["measured"]["source"] == RECORD.source
    assert "not ours" in RECORD.source
    assert {row.to_json()["tokens_per_second"]["kind"] for row in found} == {"model"}
    assert not [row for row in rows(512, find_chip("M2 Ultra"), 32_768) if row.measured]


def test_the_share_gives_the_record_back() -> None:
    assert record_share() == pytest.approx(0.573, abs=0.005)
    assert M3_ULTRA.bandwidth == roofline.RECORD_BANDWIDTH
    short = sizes("mxfp4-q8").traffic(242, roofline.RECORD_CONTEXT)
    assert record_share() * M3_ULTRA.bandwidth / short.total == pytest.approx(5.5)


def test_without_a_chip_there_is_no_speed() -> None:
    assert {row.ceiling for row in rows(512, None, 32_768)} == {None}


def test_rows_are_the_profiles_then_the_published() -> None:
    found = rows(512, M3_ULTRA, 32_768)
    assert [row.profile for row in found[:4]] == list(PROFILES)
    assert [(row.keep, row.profile) for row in found[4:]] == list(PUBLISHED)


@pytest.mark.parametrize("name", ["M3 Ultra", "Apple M3 Ultra", " apple  m3 ULTRA "])
def test_chips_are_found_by_their_name(name: str) -> None:
    assert find_chip(name) == ("M3 Ultra", 819e9, 512)


def test_unknown_chips_are_not_guessed() -> None:
    assert find_chip("M9 Ultra") is find_chip("") is find_chip("Intel(R) Core(TM) i9") is None


def documented() -> dict[str, list[str]]:
    """The table of chips in docs/mac.md."""
    row = r"^\| (M\d(?: Pro| Max| Ultra)?) \| (\S+) \| (\S+) \|$"
    text = (ROOT / "docs/mac.md").read_text("utf-8")
    return {name: rest for name, *rest in re.findall(row, text, re.MULTILINE)}


def test_the_docs_have_the_table() -> None:
    table = {chip.name: [f"{chip.bandwidth / 1e9:g}", f"{chip.ram_gib}"] for chip in CHIPS}
    assert documented() == table
