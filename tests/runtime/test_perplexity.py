"""Perplexity of a build: the same numbers as `compare` has for its parent."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from kimi_k3_mlx.errors import KimiError, UsageError
from kimi_k3_mlx.reap.compare import PARENT, evaluate
from kimi_k3_mlx.reap.corpus import Corpus
from kimi_k3_mlx.reap.costs import Costs
from kimi_k3_mlx.runtime.load import Loaded, load
from kimi_k3_mlx.runtime.perplexity import measure, summary
from kimi_k3_mlx.tensors.local import open_source
from tests.reap.test_seen_text import document
from tests.reap.test_seen_text import load as corpus_of


@pytest.fixture(scope="module")
def build(tiny_text_source: Path) -> Loaded:
    return load(tiny_text_source)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Documents of unlike lengths."""
    path = tmp_path_factory.mktemp("text") / "held.jsonl"
    return corpus_of(path, [document(n, 20 + 7 * n) for n in range(11)])


def test_they_are_those_of_compare(build: Loaded, corpus: Corpus, tiny_text_source: Path) -> None:
    """Sums of documents, perplexities and intervals, of the same text."""
    source = open_source(tiny_text_source)
    parent = Costs(evaluate(source, corpus, {}, memory=2 << 30))
    nats = measure(build, corpus)
    owners = [sequence.document for sequence in corpus.sequences]
    found = np.bincount(owners, nats, len(corpus.documents))
    np.testing.assert_allclose(found, parent.evaluation.nll[0], rtol=1e-5)
    rows = summary(corpus, nats)["rows"]
    assert [row["source"] for row in rows] == [None, *parent.sources]
    for row in rows:
        assert row["tokens"] == parent.n_tokens(row["source"])
        assert row["documents"] == parent.n_documents(row["source"])
        theirs = parent.perplexity(PARENT, row["source"])
        assert list(row["perplexity"].values()) == pytest.approx(list(theirs), rel=1e-5)


def test_they_are_the_definition(build: Loaded, corpus: Corpus) -> None:
    """One sequence at a time, probabilities in float64."""
    expected = []
    for sequence in corpus.sequences:
        logits = np.array(build.model(mx.array(sequence.tokens)[None])[0].astype(mx.float32))
        p = np.exp(logits.astype(np.float64))
        p /= p.sum(-1, keepdims=True)
        n = len(sequence)
        expected.append(-np.log(p[np.arange(n - 1), sequence.tokens[1:]]).sum())
    heard: list[int] = []
    np.testing.assert_allclose(measure(build, corpus, heard.append), expected, rtol=2e-3)
    assert heard[-1] == corpus.n_tokens


def test_what_can_not_be_measured_is_refused(build: Loaded, tmp_path: Path) -> None:
    single = corpus_of(tmp_path / "a.jsonl", [document(1, 1)])
    with pytest.raises(UsageError, match="nothing is predicted"):
        measure(build, single)

    def broken(ids: mx.array) -> mx.array:
        return mx.full((*ids.shape, 512), float("nan"))

    with pytest.raises(KimiError, match="not a finite number"):
        measure(build._replace(model=broken), corpus_of(tmp_path / "b.jsonl", [document(1, 9)]))
