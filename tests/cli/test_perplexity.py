"""`kimi-k3 perplexity`: a table, JSON, and whether the text was calibrated on."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

from tests.cli.conftest import Run
from tests.cli.test_compare import PLAN
from tests.reap.test_seen_text import document, load


def test_a_table_and_json(kimi: Run, tiny_build: Path, tmp_path: Path) -> None:
    load(tmp_path / "held.jsonl", [document(n, 30) for n in range(12)])
    args = ["perplexity", "--model", tiny_build, "--text", f"{tmp_path}/held.jsonl=x"]
    told = kimi(*args, "--seq-len", 16)
    assert told.code == 0, told.err
    said = json.loads(kimi(*args, "--seq-len", 16, "--json", "-q").out)
    (everything, source) = said["rows"]
    assert (everything["source"], source["source"]) == (None, "x")
    assert source["documents"] == 12
    assert f"{source['perplexity']['value']:.3f} [" in told.out
    assert said["calibrated_on"] is None
    assert "CALIBRATED" not in told.out
    assert kimi("perplexity", "--model", "/nowhere", *args[3:]).code != 0


def test_text_of_the_calibration_is_told(kimi: Run, tiny_build: Path, tmp_path: Path) -> None:
    documents = [document(n, 60) for n in range(3)]
    load(tmp_path / "held.jsonl", documents)
    record = load(tmp_path / "other.jsonl", documents[2:]).to_json()
    build = shutil.copytree(tiny_build, tmp_path / "build")
    args = ["perplexity", "--model", build, "--text", f"{tmp_path}/held.jsonl=x", "-q"]
    (build / "prune_plan.json").write_text(PLAN.to_text())
    assert "not known whether the build's plan was calibrated" in kimi(*args).out
    runs = {"statistics": {"runs": [{"corpus": record}]}}
    (build / "prune_plan.json").write_text(replace(PLAN, chosen_by=runs).to_text())
    told = kimi(*args)
    assert told.code == 0, told.err
    assert "CALIBRATED ON THIS TEXT: the build's plan (documents: 1, files: 0)" in told.out
    assert "under 10 documents, intervals not reliable: x" in told.out
