"""The evidence page says what the committed sums say."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.pruning_page import page
from benchmarks.pruning_results import DOMAINS, Results
from tests.house.checks import ROOT

EVIDENCE = ROOT / "docs" / "evidence"


@pytest.fixture(scope="module")
def results() -> Results:
    """What was measured."""
    return Results(json.loads((EVIDENCE / "results.json").read_text("utf-8")))


def test_the_page_is_that_of_the_results(results: Results) -> None:
    assert (EVIDENCE / "README.md").read_text("utf-8") == page(results)


def test_added_nats_are_ratios_of_sums_by_domain(results: Results) -> None:
    documents = results.raw["documents"]
    added = []
    for domain in DOMAINS:
        mine = np.array(documents["domains"]) == domain
        sums = [np.array(values)[mine].sum() for values in (
            documents["plans"]["reap/32/1"]["nll"], documents["parent"], documents["tokens"],
        )]  # fmt: skip
        added.append((sums[0] - sums[1]) / sums[2])
    assert results.by_seed("reap", 32)[1] == pytest.approx(np.mean(added), abs=1e-9)
