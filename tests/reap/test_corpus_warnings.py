"""What a corpus is too small or too lopsided for is said before the run."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kimi_k3_mlx.reap.corpus import Corpus, CorpusWarning
from tests.reap.test_corpus import load, numbered, write_rows
from tests.reap.test_corpus_files import FakeDatasets, fake
from tests.reap.test_corpus_scripts import bundled

__all__ = ["FakeDatasets", "fake"]

VISION = CorpusWarning("note", "", "there are no images: vision experts are not measured")


def found(corpus: Corpus, n_experts: int = 1, top_k: int = 1) -> list[CorpusWarning]:
    """The warnings but the one that text always has."""
    warnings = list(corpus.warnings(n_experts, top_k))
    warnings.remove(VISION)
    return warnings


def tokens(folder: Path, n_tokens: int, n_documents: int = 2, **options: Any) -> Corpus:
    """A corpus of so many tokens in documents of about the same size."""
    cuts = [n_tokens * i // n_documents for i in range(n_documents + 1)]
    rows = numbered([end - begin for begin, end in pairwise(cuts)])
    return load(write_rows(folder / "c.jsonl", rows), **{"seq_len": 4096} | options)


@pytest.mark.parametrize(
    ("n_tokens", "level", "pairs"),
    [(11_199, "red", "199"), (11_200, "amber", "200"), (55_999, "amber", "999")],
)
def test_pairs_for_the_average_expert(
    n_tokens: int, level: str, pairs: str, tmp_path: Path
) -> None:
    """At K3's 16 of 896, 1,000 pairs are 56,000 tokens (PRUNING §4.2)."""
    (warning,) = found(tokens(tmp_path, n_tokens), 896, 16)
    message = f"{n_tokens:,} tokens are {pairs} for the average expert; 1,000 take 56,000 tokens"
    assert warning == (level, "c", message)


def test_one_document_that_is_most_of_a_source_makes_its_folds_one_sided(tmp_path: Path) -> None:
    rows = [{"tokens": [1] * n} for n in (1900, 60, 40)]
    warnings = found(load(write_rows(tmp_path / "c.jsonl", rows), seq_len=4096))
    assert [it.message for it in warnings if it.message.startswith("folds of")] in (
        ["folds of 1,900 and 100 tokens: too uneven to say what is noise"],
        ["folds of 100 and 1,900 tokens: too uneven to say what is noise"],
    )


def test_enough_pairs(tmp_path: Path) -> None:
    assert found(tokens(tmp_path, 56_000), 896, 16) == []


def test_a_source_without_tokens_is_the_worst(tmp_path: Path) -> None:
    (tmp_path / "zh.txt").touch()
    small = write_rows(tmp_path / "b.jsonl", [{"tokens": [1] * 300}, {"tokens": [1] * 300}])
    warnings = load(f"{small},{tmp_path / 'zh.txt'}").warnings(1, 1)
    assert [warning.level for warning in warnings] == ["red", "amber", "note"]
    assert warnings[0] == ("red", "zh", "there are no tokens")


def test_shares_of_bytes_and_of_tokens(tmp_path: Path) -> None:
    """15 % of the bytes were 32.6 % of the tokens: text that the tokenizer has no merges for."""
    (tmp_path / "en.txt").write_text("the text of the file is here\n\n" * 300)
    (tmp_path / "am.txt").write_text("ሰላም ነው\n\n" * 70)
    spec = f"{tmp_path / 'en.txt'},{tmp_path / 'am.txt'}"
    corpus = load(spec, tokenizer=bundled(), seq_len=64)
    n_bytes, n_tokens = corpus.bytes_by_source(), corpus.tokens_by_source()
    of_bytes = n_bytes["am"] / sum(n_bytes.values())
    of_tokens = n_tokens["am"] / sum(n_tokens.values())
    assert of_tokens > 1.5 * of_bytes
    message = f"{of_bytes:.1%} of the bytes are {of_tokens:.1%} of the tokens"
    assert CorpusWarning("amber", "am", message) in found(corpus)
    same = found(load(spec, seq_len=64))
    assert not [warning for warning in same if "bytes" in warning.message]


def test_budgets_that_are_not_filled(tmp_path: Path) -> None:
    corpus = tokens(tmp_path, 1_000, tokens_per_source=1_001)
    message = "1,000 tokens are all there are, 1,001 were asked for"
    assert found(corpus) == [("amber", "c", message)]
    assert found(tokens(tmp_path, 1_000, tokens_per_source=1_000)) == []


def test_datasets_with_too_few_rows(fake: FakeDatasets) -> None:
    fake.rows = [{"tokens": [1] * 600}] * 2
    assert found(load("c4:3")) == [("amber", "", "c4:3 has only 2 rows")]
    assert found(load("c4:2")) == []


def test_folds_that_are_not_filled(tmp_path: Path) -> None:
    one = tokens(tmp_path, 5_000, n_documents=1)
    assert found(one) == [("amber", "c", "1 documents do not fill 2 folds")]
    assert found(tokens(tmp_path, 5_000, n_documents=7, folds=8))[0].level == "amber"
    assert found(tokens(tmp_path, 5_000, n_documents=8, folds=8)) == []


def test_what_was_left_out(tmp_path: Path) -> None:
    rows = [{"tokens": [1] * 700}, {"tokens": [1] * 700}, {"text": ""}]
    corpus = load(write_rows(tmp_path / "c.jsonl", rows), tokens_per_document=600)
    assert found(corpus) == [
        ("note", "c", "200 tokens of documents were cut off"),
        ("note", "c", "1 documents are empty"),
    ]


def test_warnings_are_plain_data(tmp_path: Path) -> None:
    corpus = tokens(tmp_path, 10)
    assert json.loads(json.dumps(corpus.warnings(8, 2)))[0][:2] == ["red", "c"]
