"""`compare` and `probe` on the command line, refusals included."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kimi_k3_mlx.prune_plan import LayerPlan, PrunePlan
from kimi_k3_mlx.schema import Quantization
from tests.cli.conftest import Run
from tests.reap.test_seen_text import document, load

PLAN = PrunePlan(8, {layer: LayerPlan((0, 2, 3, 5)) for layer in range(1, 5)})


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Held-out documents, and what a calibration on their third one left in a plan."""
    folder = tmp_path_factory.mktemp("texts")
    documents = [document(n, 60) for n in range(12)]
    load(folder / "held.jsonl", documents)
    record = load(folder / "other.jsonl", documents[2:3]).to_json()
    runs = {"statistics": {"runs": [{"corpus": record}]}}
    low = replace(PLAN.layers[1], low=(2, 3))
    graded = replace(PLAN, layers=PLAN.layers | {1: low}, low=Quantization("affine", 2, 32))
    for name, plan in (
        ("hand", PLAN), ("seen", replace(PLAN, chosen_by=runs)), ("graded", graded),
    ):  # fmt: skip
        (folder / f"{name}.json").write_text(plan.to_text())
    (folder / "more").mkdir()
    (folder / "more" / "hand.json").write_text(PLAN.to_text())
    return folder


def test_from_plans_to_a_table_and_json(
    kimi: Run, tiny_text_source: Path, texts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "costs.json"
    args = ["--hf-path", tiny_text_source, "--text", f"{texts}/held.jsonl=x", "--seq-len", 64]
    plans = ["--plans", texts / "hand.json", texts / "graded.json"]
    told = kimi("compare", *args, *plans, "--memory", "2GB", "--out", out)
    assert told.code == 0, told.err
    assert "hand: 4 experts in each layer\n" in told.out
    assert "graded: 4 experts in each layer; its low bank as if at full bits" in told.out
    assert "not known whether this text was calibrated on: plan hand" in told.out
    assert [path.name for path in tmp_path.iterdir()] == ["costs.json"]
    said = json.loads(out.read_text())
    assert said["plans"]["hand"]["rows"][0]["documents"] == 12
    (between,) = said["between_plans"]
    assert between["delta"][0] == {"source": None, "value": 0.0, "low": 0.0, "high": 0.0}
    again = kimi("compare", *args, *plans, "--memory", "1GB", "--json", "-q")
    assert (again.code, again.err) == (0, "")
    assert json.loads(again.out) == said


def test_text_that_was_calibrated_on_is_refused(
    kimi: Run, tiny_text_source: Path, texts: Path, tmp_path: Path
) -> None:
    args = ["compare", "--hf-path", tiny_text_source, "--text", f"{texts}/held.jsonl=x", "-q"]
    args += ["--plans", texts / "seen.json", "--out", tmp_path / "o.json"]
    refused = kimi(*args)
    assert refused.code == 2
    assert "The text has 1 of 12 documents (first: held.jsonl:3) that plan seen" in refused.err
    assert list(tmp_path.iterdir()) == []
    told = kimi(*args, "--allow-calibrated-text")
    assert told.code == 0
    assert "CALIBRATED ON THIS TEXT: plan seen (documents: 1, files: 0)" in told.out
    said = json.loads((tmp_path / "o.json").read_text())["calibrated_on"]["plan seen"]
    assert said == {"provenance_is_complete": True, "files": [], "documents": ["held.jsonl:3"]}


def test_usage_is_checked_before_anything_is_read(kimi: Run, texts: Path) -> None:
    args = ["compare", "--hf-path", "nowhere", "--text", "none.txt"]
    hand, other = texts / "hand.json", texts / "more" / "hand.json"
    assert "--spill needs a place" in kimi(*args, "--plans", hand, "--spill").err
    assert "is given twice" in kimi(*args, "--plans", hand, hand).err
    assert "nowhere" in kimi(*args, "--plans", hand, other).err


def test_a_probe_of_two_builds(kimi: Run, tiny_build: Path, tmp_path: Path) -> None:
    text, rng = tmp_path / "t.jsonl", np.random.default_rng(1)
    rows = [{"id": f"d{n}", "tokens": rng.integers(0, 256, n).tolist()} for n in (3, 9, 20, 30)]
    text.write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = ["--text", f"{text}=x", "--prompt-tokens", 9, "-m", 5, "--out", tmp_path / "out.json"]
    told = kimi("probe", "--model", tiny_build, "--reference", tiny_build, *args)
    assert told.code == 0, told.err
    assert "difference (paired)" in told.out
    said = json.loads((tmp_path / "out.json").read_text())
    assert [row["prompts"] for row in said["rows"]] == [3, 3]
    assert {key: len(texts) for key, texts in said["continuations"].items()} == {
        "model": 3, "reference": 3,
    }  # fmt: skip
    alone = kimi("probe", "--model", tiny_build, *args[:-2], "--prompts", 2, "--json", "-q")
    assert (alone.code, alone.err) == (0, "")
    assert json.loads(alone.out)["rows"][0]["prompts"] == 2
    refused = kimi("probe", "--model", tiny_build, "--text", text, "--prompt-tokens", 31)
    assert refused.code == 2
    assert "none of 4 documents has 31 tokens" in refused.err
