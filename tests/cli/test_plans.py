"""Prune plans on the command line: `convert --prune-plan`, `prune`, `estimate`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kimi_k3_mlx.prune_plan import LayerPlan, PrunePlan
from kimi_k3_mlx.schema import Quantization
from tests.cli.conftest import Run

UNIFORM = PrunePlan(8, {n: LayerPlan((1, 3, 4, 6)) for n in range(1, 5)})
UNEVEN = PrunePlan(8, UNIFORM.layers | {2: LayerPlan((0, 7))})
GRADED = PrunePlan(
    8, UNIFORM.layers | {2: LayerPlan((0, 2, 7), (2,))}, low=Quantization("affine", 2, 32)
)


def plan_file(folder: Path, plan: PrunePlan) -> Path:
    (folder / "plan.json").write_text(plan.to_text())
    return folder / "plan.json"


def test_prune_writes_moonshots_layout(kimi: Run, tiny_source: Path, tmp_path: Path) -> None:
    out, plan = tmp_path / "out", plan_file(tmp_path, UNIFORM)
    result = kimi("prune", "--hf-path", tiny_source, "--prune-plan", plan, "--out", out)
    assert result.code == 0
    assert result.err.splitlines()[-1].endswith(", every tensor bit-equal to the source's")
    config = json.loads((out / "config.json").read_text())
    assert config["text_config"]["num_experts"] == 4
    assert config["text_config"]["quantization_config"]["quant_method"] == "compressed-tensors"
    assert config["auto_map"]
    assert (out / "prune_plan.json").read_text() == plan.read_text()


def test_prune_names_its_folder_and_its_own_option(
    kimi: Run, tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    args = ("prune", "--hf-path", tiny_source, "--prune-plan", plan_file(tmp_path, UNIFORM))
    assert kimi(*args, "-q").code == 0
    assert (tmp_path / "source-4-experts" / "config.json").is_file()
    other = kimi(*args, "--out", tiny_source, "-q")
    assert other.err.endswith("hint: choose another --out.\n")


def test_prune_needs_no_mlx(tiny_source: Path, tmp_path: Path) -> None:
    from tests.cli.conftest import program

    plan = plan_file(tmp_path, UNIFORM)
    script = (
        "import sys; sys.modules['mlx'] = None; from kimi_k3_mlx.cli import main; "
        f"sys.exit(main(['prune', '--hf-path', {str(tiny_source)!r}, '--prune-plan', "
        f"{str(plan)!r}, '--out', {str(tmp_path / 'out')!r}, '-q']))"
    )
    import subprocess
    import sys

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert program("inspect", tmp_path / "out").code == 0


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (UNIFORM, "4 of 8 experts in each layer"),
        (UNEVEN, "2 to 4 of 8 experts in each layer; needs our model file"),
        (GRADED, "3 to 4 of 8 experts in each layer, 1 of 15 in banks of 2 bits, groups of 32;"),
    ],
)
def test_a_dry_run_describes_the_plan(
    plan: PrunePlan, says: str, kimi: Run, tiny_source: Path, tmp_path: Path
) -> None:
    args = ("convert", "--hf-path", tiny_source, "--prune-plan", plan_file(tmp_path, plan))
    result = kimi(*args, "--allow-requantize", "--dry-run", "--mlx-path", tmp_path / "out")
    assert result.code == 0, result.err
    assert f"plan     {says}" in result.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json"]


def test_padding_is_asked_for(kimi: Run, tiny_source: Path, tmp_path: Path) -> None:
    args = ("convert", "--hf-path", tiny_source, "--mlx-path", tmp_path / "out", "-q")
    assert kimi(*args, "--pad-uniform").err == (
        "kimi-k3: error: --pad-uniform needs a plan.\nhint: give one with --prune-plan.\n"
    )
    assert kimi(*args, "--pad-uniform", "--prune-plan", plan_file(tmp_path, UNEVEN)).code == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["text_config"]["num_experts"] == 4
    assert "model_file" not in config


def test_fewer_bits_for_experts_must_be_meant(kimi: Run, tiny_source: Path, tmp_path: Path) -> None:
    args = ("convert", "--hf-path", tiny_source, "--mlx-path", tmp_path / "out")
    for extra in (("--profile", "q2-q8"), ("--prune-plan", plan_file(tmp_path, GRADED))):
        result = kimi(*args, *extra)
        assert result.code == 2
        assert "requantizes MXFP4 experts to 2 bits" in result.err
        assert "pass --allow-requantize" in result.err
        assert not (tmp_path / "out").exists()
    told = kimi(*args, "--prune-plan", plan_file(tmp_path, GRADED), "--allow-requantize")
    (row,) = re.findall(r"\S*switch_mlp_low\.down_proj\S* +(\d+) +(.*?)  +(\S+)%", told.err)
    assert row[:2] == ("1", "2 bits, groups of 32")
    assert 10 < float(row[2]) < 70


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "plan.json doesn't exist."),
        (b"\xff", "plan.json is not UTF-8"),
        (b"{}", "is not a prune plan"),
        (PrunePlan(896, UNIFORM.layers).to_text().encode(), "a model with 896 experts a layer"),
    ],
)
def test_a_bad_plan_is_one_sentence_and_nothing_is_written(
    text: bytes | None, message: str, kimi: Run, tiny_source: Path, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "plan.json").write_bytes(text)
    plan, out = tmp_path / "plan.json", tmp_path / "out"
    result = kimi("convert", "--hf-path", tiny_source, "--prune-plan", plan, "--mlx-path", out)
    assert result.code == 2
    assert message in result.err.splitlines()[0]
    assert not out.exists()


def test_estimates_are_what_a_build_comes_to(kimi: Run, tiny_source: Path, tmp_path: Path) -> None:
    args = ("--hf-path", tiny_source, "--profile", "mxfp4-q8")
    told = json.loads(kimi("estimate", *args, "--keep", 4, "--json").out)
    out = tmp_path / "out"
    kimi("convert", *args, "--prune-plan", plan_file(tmp_path, UNIFORM), "--mlx-path", out, "-q")
    sizes = {path.name: path.stat().st_size for path in out.glob("model-*.safetensors")}
    assert {shard["name"]: shard["n_bytes"] for shard in told["shards"]} == sizes
    assert told["n_bytes"] == sum(sizes.values())
    assert told["running"]["n_weights"] == told["total_size"]


def test_an_estimate_in_words(kimi: Run, tiny_source: Path) -> None:
    result = kimi("estimate", "--hf-path", tiny_source, "--keep", 4, "--context", 1000)
    assert result.code == 0
    assert "plan     4 of 8 experts in each layer" in result.out
    assert "runs on  64 GB Mac: yes" in result.out
    assert "one sequence of 1,000 tokens (a model, not a measurement)" in result.out
    moonshot = kimi("estimate", "--hf-path", tiny_source, "--keep", 4, "--profile", "moonshot")
    assert "runs on" not in moonshot.out


def test_an_estimate_of_too_many_or_too_few(kimi: Run, tiny_source: Path, tmp_path: Path) -> None:
    args = ("estimate", "--hf-path", tiny_source)
    assert "--keep is 9, but the layers have 8" in kimi(*args, "--keep", 9).err
    assert "keeps 1 experts in layer 1 but the router" in kimi(*args, "--keep", 1).err
    both = kimi(*args, "--keep", 4, "--prune-plan", plan_file(tmp_path, UNIFORM))
    assert "--keep and --prune-plan exclude each other" in both.err


def test_a_revision_is_for_repositories(kimi: Run, tiny_source: Path) -> None:
    result = kimi("inspect", tiny_source, "--revision", "main")
    assert result.code == 2
    assert "--revision main is for repositories on the Hub" in result.err
