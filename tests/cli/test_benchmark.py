"""`kimi-k3 benchmark`: seconds, ratios and files; no speed where weights are not wired."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run


def test_a_table_json_and_files(kimi: Run, tiny_build: Path, tmp_path: Path) -> None:
    table, figure = tmp_path / "b.csv", tmp_path / "b.svg"
    args = ("benchmark", "--model", tiny_build, "-p", "12,6,6", "-g", 3, "-n", 2)
    told = kimi(*args, "--csv", table, "--svg", figure)
    assert told.code == 0, told.err
    said = json.loads(kimi(*args, "--json", "-q").out)
    assert [row["prompt_tokens"] for row in said["rows"]] == [6, 12]
    assert [len(row["trials"]) for row in said["rows"]] == [2, 2]
    assert len(list(csv.DictReader(table.open()))) == 4
    assert figure.read_bytes().startswith(b"<?xml")
    assert "tokens: prefill" in told.err
    if said["wired"]:
        pytest.skip("this machine has a GPU and wires the weights")
    assert "tok/s" not in told.out + told.err
    assert "no tokens a second: the weights were not wired, " in told.out
    assert said["rows"][0]["decode_tokens_per_second"] is None
    for word in (said["machine"]["versions"]["mlx"], said["machine"]["system"], "no wired limit"):
        assert word in told.out


REFUSED = {
    "no decoding": (["-g", "1"], "-g 1 times no decoding"),
    "no length": (["-p", "512,x"], "'x' is not a whole number of at least 1"),
    "no place": (["--csv", "/nowhere/x.csv"], "/nowhere/x.csv can't be written"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_be_is_refused_first(case: str, kimi: Run) -> None:
    options, fact = REFUSED[case]
    result = kimi("benchmark", "--model", "/nowhere", *options)
    assert result.code == 2
    assert fact in result.err
