"""What is known about each token and where it comes from: sources, scripts, roles, positions."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np

from kimi_k3_mlx.reap.corpus import ROLES, SCRIPTS, Corpus
from kimi_k3_mlx.reap.scripts import Encoder
from tests.reap.test_corpus import load, three_sources
from tests.reap.test_corpus_scripts import BUNDLED, bundled, one_byte_each

HELD_OUT = BUNDLED / "held_out"


def test_hashes_are_over_the_tokens_and_the_tags(tmp_path: Path) -> None:
    corpus = load(three_sources(tmp_path))
    joined = b"".join(it.tokens.astype("<i4").tobytes() for it in corpus.sequences)
    assert corpus.token_sha256 == hashlib.sha256(joined).hexdigest()
    first, *rest = corpus.sequences
    assert first.tokens.dtype == np.int32
    for change in (
        {"roles": first.roles + 1}, {"scripts": first.scripts + 1}, {"fold": 1 - first.fold},
        {"source": 2}, {"document": 3}, {"tokens": first.tokens + 1},
    ):  # fmt: skip
        other = replace(corpus, sequences=(replace(first, **change), *rest))
        assert other.sha256 != corpus.sha256
        assert (other.token_sha256 == corpus.token_sha256) is ("tokens" not in change)


def test_every_token_has_its_source(tmp_path: Path) -> None:
    corpus = load(three_sources(tmp_path))
    names = [corpus.sources[it.source] for it in corpus.sequences for _ in range(len(it))]
    assert len(names) == corpus.n_tokens == corpus.lengths.sum()
    assert {name: names.count(name) for name in corpus.sources} == corpus.tokens_by_source()
    text = Path(tmp_path / "a.txt").read_bytes()
    assert corpus.tokens_by_source()["prose"] == len(text) == corpus.bytes_by_source()["prose"]


def test_counts_by_script(tmp_path: Path) -> None:
    corpus = load(three_sources(tmp_path), seq_len=100)
    counts = corpus.counts()
    assert counts["ru"] == {"symbols": 13, "digits": 20, "cyrillic": 13 * len("текст".encode())}
    assert counts["zh"]["han"] == 7 * 2 * 3
    assert counts["zh"]["digits"] == 7
    assert counts["zh"]["markup"] == len(corpus_markup(corpus))
    assert "latin" not in counts["zh"]
    assert counts["prose"].keys() == {"symbols", "digits", "latin"}
    assert counts["uk"]["cyrillic"] == 7 * len("текст".encode())


def corpus_markup(corpus: Corpus) -> list[int]:
    """Tokens that the renderer placed."""
    markup = SCRIPTS.index("markup")
    return [t for it in corpus.sequences for t in it.tokens[it.scripts == markup].tolist()]


def test_roles(tmp_path: Path) -> None:
    corpus = load(three_sources(tmp_path), seq_len=100)
    prose, *_, zh = (
        {ROLES[role] for it in corpus.sequences if it.source == source for role in it.roles}
        for source in range(4)
    )
    counts = corpus.to_json()["roles"]
    assert counts[corpus.sources[0]].keys() == {"none"}
    assert {name: sum(row.values()) for name, row in counts.items()} == corpus.tokens_by_source()
    assert prose == {"none"}
    assert zh == {"none", "user"}


def test_held_out_text_of_the_tiny_k3() -> None:
    spec = ",".join(str(HELD_OUT / f"{name}.txt") for name in ("code", "english", "chinese"))
    corpus = load(spec, tokenizer=bundled(), seq_len=256)
    assert corpus.sources == ("code", "english", "chinese")
    for name in corpus.sources:
        text = re.sub(r"(?m)^\f\n", "", (HELD_OUT / f"{name}.txt").read_text("utf-8"))
        assert corpus.bytes_by_source()[name] == len(text.encode())
    counts = corpus.counts()
    assert counts["chinese"]["han"] > 5_000
    assert "han" not in counts["english"]


def test_provenance(tmp_path: Path) -> None:
    spec = three_sources(tmp_path)
    corpus = load(spec, seed=4, tokens_per_source={"ru": 20}, folds=3)
    record = json.loads(json.dumps(corpus.to_json()))
    assert [item["text"] for item in record["specs"]] == spec.split(",")
    for item in record["specs"]:
        assert item["sha256"] == hashlib.sha256(Path(item["name"]).read_bytes()).hexdigest()
    assert record["sha256"] == corpus.sha256
    assert record["tokens_per_source"] == {"ru": 20}
    assert (record["seq_len"], record["seed"], record["folds"]) == (8, 4, 3)
    assert record["tokenizer"]["sha256"] == Encoder(one_byte_each()).sha256
    assert record["counts"] == corpus.counts()
    assert record["n_tokens"] == corpus.n_tokens
