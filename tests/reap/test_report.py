"""The report as a user gets it: its numbers, its words, its files, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from kimi_k3_mlx.cli import parser_of
from kimi_k3_mlx.cli import report as report_verb
from kimi_k3_mlx.errors import UsageError
from kimi_k3_mlx.prune_plan import LayerPlan, PrunePlan, keep_first
from kimi_k3_mlx.reap.agree import NamedStore
from kimi_k3_mlx.reap.corpus_warnings import one_sided
from kimi_k3_mlx.reap.criteria import CRITERIA, Masses
from kimi_k3_mlx.reap.judge import NamedPlan, partners
from kimi_k3_mlx.reap.overlap import flips, pooled_choice
from kimi_k3_mlx.reap.report import make_report
from kimi_k3_mlx.reap.report_text import flip_section, markdown, percent, spread, table
from kimi_k3_mlx.reap.saliency import Saliency, layer_axis, merge, shared_files, state_shapes
from kimi_k3_mlx.schema import Json
from tests.reap.routing import EXPERTS, LAYERS, SOURCES, TOP_K, random_store
from tests.reap.test_planner import kept_mask, planner

STORE = random_store(3, n_sequences=30)
OTHER = replace(random_store(4, n_sequences=30, first=100), runs=({"corpus": "seed 4"},))
REAP, LOO = planner().cut(6), planner(criterion="loo", weights={"zh": 3.0}).cut(4)
Capture = pytest.CaptureFixture[str]


@cache
def report() -> Json:
    stores = [NamedStore("both", merge(STORE, OTHER)), NamedStore("one", STORE)]
    return make_report(stores, [NamedPlan("six", REAP), NamedPlan("four", LOO)])


def report_of(plan: PrunePlan, store: Saliency = STORE) -> Json:
    return make_report([NamedStore("stats", store)], [NamedPlan("plan", plan)])


def without(store: Saliency, *parts: str) -> Saliency:
    """The store as if some arrays had never been measured."""
    kept = {n: a for n, a in store.arrays.items() if not any(part in n for part in parts)}
    return replace(store, arrays=kept)


def test_each_plan_is_judged_under_its_own_criterion() -> None:
    for said, plan, name in zip(report()["plans"], (REAP, LOO), ("reap", "loo"), strict=True):
        assert said["criterion"]["name"] == name
        assert said["criterion"]["denominator"].startswith("n, the tokens")
        assert said["sha256"] == plan.sha256
        masses = Masses(merge(STORE, OTHER), CRITERIA[name])
        mass, coverage = masses.retained(kept_mask(plan)), masses.coverage(kept_mask(plan))
        for s, source in enumerate(SOURCES):
            row = said["retained"][source]
            assert (row["mass"], row["coverage"]) == (mass[s], coverage[s])
            assert 0 < row["held_out_mass"] <= row["held_out_coverage"] <= 1
        assert said["retained"][said["worst"]]["coverage"] == coverage.min()
    assert report()["plans"][1]["weights"] == {"code": 0.2, "zh": 0.6, "en": 0.2}
    assert [curve["plans"] for curve in report()["curves"]] == [["six"], ["four"]]


def test_a_plan_says_of_itself_what_the_report_says() -> None:
    worst = {1: tuple(planner().masses.shares.sum(0)[0].argsort()[:2].tolist())}
    for plan in (REAP, LOO, planner(protected=worst).cut(6)):
        said, own = report_of(plan)["plans"][0], plan.chosen_by
        for source, row in own["retained"]["by_source"].items():
            assert {key: said["retained"][source][key] for key in row} == row
        for key in ("slots", "ambiguous", "ambiguous_kept"):
            assert said["cut"][key] == own["cut"][key]
        assert said["chosen_from"] == "these runs"
        assert sum(said["by_layer"]["ambiguous"]) == said["cut"]["ambiguous"]


def test_flips_between_nested_stores() -> None:
    (pair,) = report()["flips"]["pairs"]
    assert pair["stores"] == ["one", "both"]
    assert pair["nested"] is True
    choices = [pooled_choice(s, CRITERIA["reap"], 6) for s in (STORE, merge(STORE, OTHER))]
    assert pair["flips"] == flips(*choices)
    half = report()["flips"]["stores"][1]["split_half"]
    n, n_big = STORE.tokens.sum(), STORE.tokens.sum() + OTHER.tokens.sum()
    halves = STORE.arrays["fold_tokens"][:, :, 0].sum(1)
    expected = half * np.sqrt((1 / n - 1 / n_big) / (1 / halves).sum())
    assert pair["noise"] == pytest.approx(expected)
    assert pair["ratio"] == pytest.approx(pair["flips"] / expected)
    apart = make_report([NamedStore("a", STORE), NamedStore("b", OTHER)], [NamedPlan("p", REAP)])
    (pair,) = apart["flips"]["pairs"]
    assert pair["nested"] is False
    expected = np.sqrt(1 / n + 1 / OTHER.tokens.sum())
    own = {row["name"]: row for row in apart["flips"]["stores"]}[pair["stores"][0]]
    assert pair["noise"] > own["from_infinite"] > own["from_doubling"] > 0


def test_partners_are_counted_pair_by_pair() -> None:
    rng = np.random.default_rng(0)
    together = rng.integers(0, 9, (len(LAYERS), EXPERTS, EXPERTS)).astype(np.uint32)
    together += together.transpose(0, 2, 1)
    together[:, range(EXPERTS), range(EXPERTS)] = 0
    kept = kept_mask(REAP)
    found = partners(replace(STORE, arrays=STORE.arrays | {"together": together}), kept)
    sums = np.zeros((2, 2))
    for layer, one, other in np.ndindex(together.shape):
        n, stays = int(together[layer, one, other]), kept[layer, other]
        sums[1] += n * np.array([stays, 1])
        if not kept[layer, one]:
            sums[0] += n * np.array([stays, 1])
    shares = sums[:, 0] / sums[:, 1]
    assert found == {"kept": pytest.approx(shares[0]), "kept_of_all": pytest.approx(shares[1])}
    assert partners(without(STORE, "together"), kept) is None


def test_what_was_not_measured_is_said() -> None:
    full = report_of(REAP)["not_measured"]
    assert any("kimi-k3 compare" in line for line in full)
    assert any("Images" in line for line in full)
    assert not any("folds" in line for line in full)
    alone = report_of(REAP, without(STORE, "together"))["not_measured"]
    assert [line for line in alone if line not in full] == [
        "Who takes over from dropped experts: no counts of experts chosen together."
    ]
    man = report_of(planner(criterion="man").cut(6))
    assert "Held-out mass of plan: the statistics have no folds of man." in man["not_measured"]
    assert "Ambiguous slots of plan: the statistics have no errors of man." in man["not_measured"]
    arrays = {name: array.copy() for name, array in STORE.arrays.items()}
    for name, array in arrays.items():
        np.moveaxis(array, layer_axis(name) - 1, 0)[1] = 0
    silent = report_of(REAP, replace(STORE, arrays=arrays))
    assert "Source zh: it has no tokens." in silent["not_measured"]
    assert set(silent["plans"][0]["retained"]) == {"code", "en"}
    assert "zh" not in silent["overlap"]["split_half"]


def test_a_store_with_pairs_and_one_sum_is_enough() -> None:
    """The MLX port's statistics: no folds, no errors, no sequences."""
    bare = without(STORE, "seq", "fold", "loo", "norm", "gate", "relative", "_max", "_sq")
    found = report_of(REAP, replace(bare, runs=({"file": "port.npz"},)))
    plan = found["plans"][0]
    assert plan["retained"]["zh"]["held_out_mass"] is None
    assert plan["cut"]["ambiguous"] is None
    assert found["flips"]["stores"][0]["split_half"] is None
    assert found["sources"][0]["sequences"] is None
    assert "not measured" in markdown(found, {})


def test_warnings() -> None:
    said = [(row["level"], row["about"]) for row in report_of(REAP)["warnings"]]
    assert said == [("red", source) for source in SOURCES]
    assert not any(row["about"] == "six" for row in report_of(REAP)["warnings"])
    run: Json = {"corpus": {"counts": {"zh": {"Han": 7}}, "n_bytes": {"code": 9, "zh": 1, "en": 5}}}
    counted = report_of(REAP, replace(STORE, runs=(run,)))
    said = [row["message"] for row in counted["warnings"]]
    assert "was chosen from other runs, and is judged by these" in said
    assert any(message.startswith("6.7% of the bytes are") for message in said)
    assert counted["sources"][1]["scripts"] == {"Han": 7}
    unsaid = report_of(keep_first(6, EXPERTS, LAYERS))
    assert unsaid["plans"][0]["criterion_is_its_own"] is False
    assert any("judged by reap" in row["message"] for row in unsaid["warnings"])


def test_masses_carry_criterion_formula_and_denominator() -> None:
    text = markdown(report(), {"figures/retained-loo.png": "what it shows"})
    for name, formula, mass in (("reap", "Σc/n", "Σc"), ("loo", "ΣΔ/n", "ΣΔ")):
        assert f"| {name} = {formula} | n, the tokens that were routed to the expert |" in text
        assert f"### Mass of {mass}\n" in text
    first, second = text.split("### Mass of ")[1:]
    assert "| six |" in first
    assert "| four |" not in first
    assert "| four |" in second.split("## Coverage")[0]
    assert "concave by construction" in text
    assert "knee" not in text.lower()
    assert "![retained](figures/retained-loo.png)\n\n*what it shows*" in text


def test_the_worst_source_comes_first() -> None:
    text = markdown(report(), {}).split("## Coverage")[1].split("## Overlap")[0]
    shares = re.findall(r"^\| *(six|four)? \| (\w+) \| ([\d.]+) %", text, re.MULTILINE)
    assert [bool(plan) for plan, *_ in shares] == [True, False, False] * 2
    values = [float(share) for *_, share in shares]
    assert values[:3] == sorted(values[:3])
    assert shares[0][1] == report()["plans"][0]["worst"]


def test_words_for_numbers() -> None:
    assert percent(0.5725) == "57.2 %"
    assert percent(None) == "not measured"
    assert spread([3, 1, 2], "{:.0f}") == "2 (1 to 3)"
    assert table([["a|b"], ["c"]]) == "| a\\|b |\n| --- |\n| c |"


def saved(folder: Path) -> tuple[Path, Path]:
    """The store and the plan of a report, as files."""
    stats, plan = folder / "stats.safetensors", folder / "plan.json"
    STORE.save(stats)
    plan.write_text(REAP.to_text(), "utf-8")
    return stats, plan


def run(*argv: object) -> None:
    report_verb.run(parser_of("report", report_verb).parse([str(arg) for arg in argv]))


def test_a_folder_with_figures_the_same_in_another_process(tmp_path: Path, capsys: Capture) -> None:
    stats, plan = saved(tmp_path)
    out = tmp_path / "out"
    run("--stats", stats, "--plan", plan, "--out", out, "--json")
    told = json.loads(capsys.readouterr().out)
    assert told == json.loads((out / "report.json").read_text("utf-8"))
    found = sorted(path.relative_to(out).as_posix() for path in out.rglob("*.*"))
    assert told["files"] == found
    page = (out / "report.md").read_text("utf-8")
    linked = re.findall(r"\((figures/[\w-]+\.png)\)", page)
    assert sorted(linked) == [name for name in found if name.endswith(".png")]
    assert len(linked) == 4
    for name in linked:
        data = (out / name).read_bytes()
        width, height = struct.unpack(">II", data[16:24])
        assert 900 <= width <= 1800
        assert height > 200
        assert len(ElementTree.parse((out / name).with_suffix(".svg")).findall(".//*")) > 50
    before = {name: (out / name).read_bytes() for name in found}
    argv = ["report", "--stats", stats, "--plan", plan, "--out", out]
    environment = os.environ | {"PYTHONHASHSEED": "7", "MPLBACKEND": "tkagg"}
    subprocess.run([sys.executable, "-m", "kimi_k3_mlx", *argv], check=True, env=environment)
    assert {name: (out / name).read_bytes() for name in found} == before
    assert not list(tmp_path.glob("*.partial"))


def test_without_a_plan_the_best_are_judged(tmp_path: Path) -> None:
    argv = ["--stats", "any", "--keep", "5", "--criterion", "loo", "--out", str(tmp_path / "out")]
    args = parser_of("report", report_verb).parse(argv)
    ((name, plan),) = report_verb.plans_of(args, STORE)
    assert name == "best 5"
    assert plan.sha256 == planner(criterion="loo").cut(5).sha256


REFUSED: list[tuple[list[Any], str]] = [
    ([], "there is nothing to judge"),
    (["--plan", "PLAN", "--keep", 4], "--keep and --criterion cut a plan"),
    (["--plan", "PLAN", "PLAN"], "is given twice"),
    (["--plan", "MISSING"], "plan MISSING doesn't exist"),
    (["--keep", 13], "keep is 13, but the layers have 12"),
    (["--keep", 2], "below the floor of 3"),
    (["--keep", 4, "--criterion", "x"], "there is no criterion 'x'"),
    (["--keep", 4, "--out", "PLAN"], "is a file"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_is_wrong_takes_one_sentence(tmp_path: Path, options: list[Any], message: str) -> None:
    stats, plan = saved(tmp_path)
    options = [plan if option == "PLAN" else option for option in options]
    with pytest.raises(UsageError, match=message):
        run("--stats", stats, "--out", tmp_path / "out", *options)
    assert not (tmp_path / "out").exists()


def test_stores_and_plans_of_other_models() -> None:
    stores = [NamedStore("a", STORE), NamedStore("b", replace(STORE, model="model-b"))]
    with pytest.raises(UsageError, match="a and b differ in model: model-a and model-b"):
        make_report(stores, [NamedPlan("plan", REAP)])
    with pytest.raises(UsageError, match="plan was chosen for model model-a, the statistics are"):
        report_of(REAP, replace(STORE, model="model-b"))
    few = LayerPlan(tuple(range(TOP_K - 1)))
    with pytest.raises(UsageError, match="keeps 2 experts in layer 1"):
        report_of(PrunePlan(EXPERTS, dict.fromkeys(LAYERS, few)))
    empty = {name: np.zeros_like(array) for name, array in STORE.arrays.items()}
    with pytest.raises(UsageError, match="statistics stats have no tokens"):
        report_of(REAP, replace(STORE, arrays=empty))


@pytest.mark.parametrize("weight", ["abc", None, -1, float("inf"), float("nan"), True, 10**400])
def test_a_weight_that_someone_edited_is_named(weight: object) -> None:
    edited = replace(REAP, chosen_by=REAP.chosen_by | {"weights": {"code": weight}})
    with pytest.raises(UsageError, match=r"plan plan: chosen_by\.weights\.code is .* no weight"):
        report_of(edited)


def test_one_sided_folds_are_warned_of() -> None:
    arrays = {name: array.copy() for name, array in STORE.arrays.items()}
    arrays["fold_tokens"][:, 1] = [[1926], [74]]
    found = report_of(REAP, replace(STORE, arrays=arrays))["warnings"]
    sided = [it["about"] for it in found if it["message"].startswith("folds of")]
    assert sided == [SOURCES[1]]
    assert any("folds of 1,926 and 74 tokens" in it["message"] for it in found)
    assert not one_sided([1, 3])
    assert one_sided([1, 4])
    assert not one_sided([])


def test_runs_that_read_one_file_are_not_called_unshared() -> None:
    read = {"corpus": {"specs": [{"name": "code.txt", "sha256": "ab"}], "counts": {}}}
    one, other = (
        replace(store, runs=(read | {"seed": seed},)) for seed, store in enumerate((STORE, OTHER))
    )
    assert shared_files(one, other) == ("code.txt",)
    assert shared_files(one, OTHER) == ()
    for second, text in ((other, "unknown: both read code.txt"), (OTHER, "none known")):
        stores = [NamedStore("a", one), NamedStore("b", second)]
        found = make_report(stores, [NamedPlan("p", keep_first(4, EXPERTS, LAYERS))])
        assert text in flip_section(found)


def test_files_of_one_name_are_told_apart() -> None:
    names = report_verb.short_names(["a/plan.json", "b/plan.json", "c/other.json"])
    assert [name for name, _ in names] == ["a/plan.json", "b/plan.json", "other"]


def test_kimi_k3_takes_seconds() -> None:
    """12 sources, 92 layers, 896 experts, three plans: everything but the drawing."""
    rng = np.random.default_rng(0)
    arrays = {
        name: np.broadcast_to(1.0, shape)
        if name not in ("pairs", "weighted")
        else rng.random(shape)
        for name, shape in state_shapes(12, 92, 896, 2).items()
    }
    names = tuple(f"source-{s}" for s in range(12))
    store = Saliency("m", names, tuple(range(1, 93)), 896, 16, arrays)
    plans = [NamedPlan(f"{k}", keep_first(k, 896, store.layers)) for k in (448, 242, 112)]
    began = time.process_time()
    found = make_report([NamedStore("stats", store)], plans)
    assert time.process_time() - began < 15
    assert len(found["overlap"]["pairs"]) == 66
