"""`plan` and `stats` as verbs: options in, plan and words out, one sentence for what is wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from kimi_k3_mlx.cli import parser_of
from kimi_k3_mlx.cli import plan as plan_verb
from kimi_k3_mlx.cli import stats as stats_verb
from kimi_k3_mlx.convert.plan import plan_build
from kimi_k3_mlx.convert.profiles import load_profile
from kimi_k3_mlx.errors import DoesNotFitError, UsageError
from kimi_k3_mlx.prune_plan import read_plan
from kimi_k3_mlx.reap.planner import Planner, Recipe
from kimi_k3_mlx.reap.saliency import load_saliency, merge
from kimi_k3_mlx.tensors.local import open_source
from tests.reap.test_planner_sizes import store_for

GRADED = ("--mode", "graded", "--low-bits", 2)
Capture = pytest.CaptureFixture[str]


def run(verb: ModuleType, *argv: object) -> None:
    name = verb.__name__.rpartition(".")[2]
    verb.run(parser_of(name, verb).parse([str(arg) for arg in argv]))


@pytest.fixture
def stats(tiny_source: Path, tmp_path: Path) -> Path:
    store = replace(store_for(open_source(tiny_source)), runs=({"corpus": "one"},))
    store.save(tmp_path / "stats.safetensors")
    return tmp_path / "stats.safetensors"


def planned(stats: Path, *argv: object) -> Path:
    out = stats.with_name("plan.json")
    run(plan_verb, "--stats", stats, "--out", out, "--floor", 2, *argv)
    return out


def test_a_plan_is_written_and_explained(stats: Path, capsys: Capture) -> None:
    out = planned(stats, "--keep", 4, "--weights", "source-0=3", "--protect", "2:1,3")
    plan = read_plan(out.read_text("utf-8"), "plan.json")
    assert {1, 3} <= set(plan.layers[2].keep)
    said = capsys.readouterr().out
    assert said.startswith("plan     4 of 8 experts in each layer\nchosen   by reap = Σc/n, over n")
    assert "weights  source-0 0.750, source-1 0.250 (mass, uniform)" in said
    assert said.count("of its own best choice") == 2


def test_a_build_of_the_largest_plan_fits_to_the_byte(
    stats: Path, tiny_source: Path, capsys: Capture
) -> None:
    source, profile = open_source(tiny_source), load_profile("mxfp4-q8")
    first = planned(stats, "--keep", 5)
    plan = read_plan(first.read_text("utf-8"), "plan.json")
    n_bytes = plan_build(source, profile, plan).n_bytes
    capsys.readouterr()
    size = ("--hf-path", tiny_source, "--trunk", "q8", "--json", "--target-size")
    planned(stats, *size, n_bytes)
    told = json.loads(capsys.readouterr().out)
    assert told["sha256"] == plan.sha256
    assert told["chosen_by"]["size"]["n_bytes"] == n_bytes
    assert told["counts"] == dict.fromkeys("1234", 5)
    planned(stats, *size, n_bytes - 1)
    assert json.loads(capsys.readouterr().out)["counts"] == dict.fromkeys("1234", 4)


def test_a_mac_and_a_ratio(stats: Path, tiny_source: Path, capsys: Capture) -> None:
    planned(stats, "--fit", "64GB", "--hf-path", tiny_source, "--context", 1000)
    said = capsys.readouterr().out
    assert said.startswith("plan     8 of 8 experts")
    assert "running, profile mxfp4\n" in said
    planned(stats, "--ratio", 0.5, "--profile", "mxfp4-q4", "--hf-path", tiny_source)
    said = capsys.readouterr().out
    assert said.startswith("plan     4 of 8 experts")
    assert "running, profile mxfp4-q4\n" in said


def test_graded_says_what_stays_at_full_bits(stats: Path, capsys: Capture) -> None:
    options = ("--mode", "graded", "--low-bits", 2, "--low-group-size", 32, "--first", 3)
    planned(stats, *options)
    said = capsys.readouterr().out
    assert "8 (3 of them at full bits) of 8 experts" in said
    assert said.count("100.0% of its own best choice), ") == 2
    planned(stats, *options, "--keep", 6, "--criterion", "man")
    assert "errors of this criterion were not measured" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "the plan's size is missing"),
        (["--keep", 1], "keep is 1, below the floor of 2"),
        (["--keep", 4, "--ratio", 0.5], "not allowed with"),
        (["--keep", 4, "--criterion", "x"], "there is no criterion 'x'"),
        (["--keep", 4, "--weights", "a"], "'a' is not a weight such as code=2"),
        (["--keep", 4, "--weights", "fr=1"], "have no source 'fr'"),
        (["--keep", 4, "--protect", "2"], "'2' is not a layer with experts"),
        (["--fit", "64GB"], "need the checkpoint's sizes"),
        (["--fit", "64"], "'64' is not a memory size"),
        (["--target-size", "4XB"], "'4XB' is not a size such as"),
        (["--fit", "64GB", "--keep", 4, "--hf-path", "SOURCE"], "--keep and --ratio can't be said"),
        (["--fit", "64GB", "--first", 4, "--hf-path", "SOURCE"], "--first can't be said"),
        (["--keep", 4, "--mode", "graded"], "needs the format of its second bank"),
        (["--ratio", 1], "keep is 0, below the floor of 2"),
        (["--fit", "64GB", "--ratio", 1, "--hf-path", "SOURCE"], "--ratio can't be said"),
        (["--fit", "64GB", "--ratio", 1, "--hf-path", "SOURCE", *GRADED], "keep is 0, below"),
        (["--keep", 4, "--trunk", "q8"], "--trunk, --profile and --context say what build"),
        (["--keep", 4, "--profile", "mxfp4"], "--trunk, --profile and --context say what build"),
        (["--keep", 4, "--context", 9], "--trunk, --profile and --context say what build"),
    ],
)
def test_what_is_wrong_takes_one_sentence(
    stats: Path, tiny_source: Path, options: list[object], message: str
) -> None:
    options = [tiny_source if option == "SOURCE" else option for option in options]
    with pytest.raises(UsageError, match=message):
        planned(stats, *options)
    assert not stats.with_name("plan.json").exists()


def test_statistics_of_another_checkpoint(
    stats: Path, tiny_source: Path, tiny_text_source: Path
) -> None:
    with pytest.raises(UsageError, match="statistics are of another checkpoint"):
        planned(stats, "--keep", 4, "--hf-path", tiny_text_source)
    with pytest.raises(DoesNotFitError, match="the fewest that the recipe allows"):
        planned(stats, "--target-size", "3kB", "--hf-path", tiny_source)


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [("451GB", 451 * 10**9), ("1.5kb", 1500), ("2GiB", 2 << 30), ("12", 12), ("3 TB", 3 * 10**12)],
)
def test_sizes_have_units(text: str, n_bytes: int) -> None:
    assert plan_verb.n_bytes(text) == n_bytes


def test_merge_and_show(stats: Path, capsys: Capture) -> None:
    other, both = stats.with_name("other.safetensors"), stats.with_name("both.safetensors")
    one = load_saliency(stats)
    replace(one, runs=({"corpus": "two"},), sources=("source-1", "ja")).save(other)
    run(stats_verb, "merge", stats, other, "--out", both)
    assert capsys.readouterr().out.endswith(f"0 of 32 never routed\nwrote {both}\n")
    assert load_saliency(both).provenance() == merge(one, load_saliency(other)).provenance()
    run(stats_verb, "show", both, "--json")
    told = json.loads(capsys.readouterr().out)
    assert told["by_source"]["source-1"]["tokens"] == 200_000
    assert told["by_source"]["ja"]["pairs_per_expert"] == 100_000 * 2 / 8


def test_adding_up_two_runs_over_one_file_warns(stats: Path, capsys: Capture) -> None:
    for number, name in enumerate(("a", "b")):
        corpus = {"specs": [{"name": "code.txt", "sha256": "ab"}], "seed": number}
        run_of = replace(load_saliency(stats), runs=({"corpus": corpus},))
        run_of.save(stats.with_name(f"{name}.safetensors"))
    files = [stats.with_name(f"{name}.safetensors") for name in ("a", "b")]
    run(stats_verb, "merge", *files, "--out", stats.with_name("sum.safetensors"))
    assert "warning: two of them read code.txt" in capsys.readouterr().err
    run(stats_verb, "merge", files[0], stats, "--out", stats.with_name("sum.safetensors"))
    assert "warning" not in capsys.readouterr().err


def test_a_hint_names_an_option_only_where_it_helps(stats: Path) -> None:
    store = load_saliency(stats)
    for floor, hint in ((None, "keep more, or cut a plan: kimi-k3 plan --floor"), (2, "keep more")):
        with pytest.raises(UsageError) as caught:
            Planner(store, Recipe(floor=floor)).cut(1)
        assert caught.value.hint == hint


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["divide", "S"], "unknown action 'divide'"),
        (["show", "S", "S"], "takes one file"),
        (["show", "S", "--out", "x"], "takes one file"),
        (["merge", "S", "--out", "x"], "two files or more"),
        (["merge", "S", "S"], "needs a file to write"),
        (["merge", "S", "S", "--out", "x"], "both statistics hold the same run"),
        (["show", "nothing"], "statistics nothing don't exist"),
    ],
)
def test_stats_that_make_no_sense(stats: Path, argv: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run(stats_verb, *(stats if arg == "S" else arg for arg in argv))
