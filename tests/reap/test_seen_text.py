"""Text that was calibrated on is found in whole and in part, and what isn't recorded is said."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_k3_mlx.reap.corpus import Corpus, load_corpus, parse_specs
from kimi_k3_mlx.reap.seen_text import (
    DIGITS,
    LIMIT,
    MARKS,
    WINDOW,
    corpora_of,
    find_overlap,
    holding,
    marks_of,
    parts,
    read_hashes,
    read_marks,
    sample_of,
    statistics_runs,
    window_hashes,
)
from tests.reap.test_corpus_scripts import one_byte_each


def document(seed: int, n_tokens: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, n_tokens).astype(np.int32)


def load(path: Path, documents: list[np.ndarray], **options) -> Corpus:
    rows = (json.dumps({"tokens": tokens.tolist()}) + "\n" for tokens in documents)
    path.write_text("".join(rows))
    options = {"seq_len": 50} | options
    return load_corpus(parse_specs(f"{path}=x"), one_byte_each(), **options)


@settings(deadline=None)
@given(st.lists(st.integers(0, 1023), min_size=1, max_size=80))
def test_equal_windows_have_equal_hashes_and_others_don_t(tokens: list[int]) -> None:
    size = min(WINDOW, len(tokens))
    windows = [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]
    found = window_hashes(np.array(tokens, np.int32)).tolist()
    assert len(found) == len(windows)
    assert len(set(found)) == len(set(windows))
    assert max(found) < 16**DIGITS
    alone = [int(window_hashes(np.array(window, np.int32))[0]) for window in windows]
    assert alone == found


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 99), st.integers(1, 200), st.integers(0, 90), st.integers(0, 90))
def test_a_document_is_found_inside_of_a_longer_one(
    seed: int, size: int, before: int, after: int
) -> None:
    """If it has a window; a shorter one is found only when it is the same."""
    whole = document(seed, before + size + after)
    marks = read_marks(marks_of([whole[before : before + size], document(seed + 500, 60)]))
    is_found = size >= WINDOW or before == after == 0
    others = {1: document(seed + 1000, 300), 2: document(seed + 2000, 5)}
    assert holding({0: whole} | others, marks) == ((0,) if is_found else ())


def test_a_common_beginning_is_not_enough() -> None:
    licence = document(0, 100)
    marked = [np.concatenate([licence, document(n, 400)]) for n in range(1, 101)]
    others = {n: np.concatenate([licence, document(n + 500, 400)]) for n in range(100)}
    assert holding(others, read_marks(marks_of(marked))) == ()
    assert len(holding({0: licence, 1: marked[7]}, read_marks(marks_of([*marked, licence])))) == 2


def test_half_a_document_is_found_in_one_of_eight_cases() -> None:
    found = sum(
        bool(holding({0: whole[:500]}, read_marks(marks_of([whole]))))
        for whole in (document(n, 1000) for n in range(400))
    )
    assert 0.07 < found / 400 < 0.18


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 99), st.integers(WINDOW, 200), st.integers(0, 90), st.integers(0, 90))
def test_a_part_of_a_calibrated_document_is_found(
    seed: int, size: int, before: int, after: int
) -> None:
    whole = document(seed, before + size + after)
    sample = read_hashes(sample_of([whole, document(seed + 500, 60)]))
    documents = {0: whole[before : before + size], 1: document(seed + 1000, 300)}
    assert parts(documents, [sample]) == (0,)


def test_paragraphs_of_a_calibrated_file_are_refused(tmp_path: Path) -> None:
    """One long document is calibrated on, its parts are held out as documents of their own."""
    whole = document(0, 2000)
    calibrated = json.loads(json.dumps(load(tmp_path / "a.jsonl", [whole]).to_json()))
    paragraphs = [whole[begin : begin + 90] for begin in range(0, 1980, 90)]
    leak = load(tmp_path / "b.jsonl", [document(1, 90), *paragraphs])
    found = find_overlap(leak, [calibrated]).documents
    assert {leak.documents[n] for n in found} == {f"b.jsonl:{n}" for n in range(2, 24)}
    without = {key: value for key, value in calibrated.items() if key != "samples"}
    assert not find_overlap(leak, [without]).is_known


def test_a_sample_is_bounded_and_still_finds_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kimi_k3_mlx.reap.seen_text.SAMPLED", 500)
    whole, other = document(0, 20_000), document(1, 20_000)
    sample = read_hashes(sample_of([whole]))
    assert len(sample) == 500
    rows = range(0, 20_000, 400)
    halves = {n: text[b : b + 400] for b in rows for n, text in ((b, whole), (b + 1, other))}
    found = parts(halves, [sample])
    assert len(found) > 0.9 * len(rows)
    assert not any(n % 2 for n in found)


def test_a_common_licence_is_no_part() -> None:
    licence = document(0, 100)
    seen = [np.concatenate([licence, document(n, 400)]) for n in range(1, 101)]
    held = {n: np.concatenate([licence, document(n + 500, 400)]) for n in range(100)}
    assert parts(held, [read_hashes(sample_of(seen))]) == ()


def test_marks_have_a_limit_and_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [document(n, 40) for n in range(30)]
    whole = read_marks(marks_of(documents))
    assert whole.shape == (30, MARKS)
    assert LIMIT == 4096
    monkeypatch.setattr("kimi_k3_mlx.reap.seen_text.LIMIT", 7)
    some = marks_of(documents)
    assert np.array_equal(read_marks(some), whole[:7])
    assert marks_of(reversed(documents)) == some
    for wrong in ("xyz", "00"):
        with pytest.raises(ValueError, match=r"invalid literal|reshape"):
            read_marks(wrong)


def test_overlap_is_of_documents_and_of_files(tmp_path: Path) -> None:
    seen, new = [document(n, 120) for n in range(5)], [document(n, 120) for n in range(50, 55)]
    calibrated = json.loads(json.dumps(load(tmp_path / "a.jsonl", seen).to_json()))
    mixed = load(tmp_path / "b.jsonl", [new[0], np.concatenate([new[1], seen[3], new[2]])])
    found = find_overlap(mixed, [calibrated])
    assert [mixed.documents[n] for n in found.documents] == ["b.jsonl:2"]
    assert (found.files, found.is_known, found.any) == ((), True, True)
    assert not find_overlap(load(tmp_path / "c.jsonl", new), [calibrated]).any
    again = load(tmp_path / "a.jsonl", seen, tokens_per_source=30)
    assert find_overlap(again, [calibrated]).files == (str(tmp_path / "a.jsonl"),)
    assert (
        len(find_overlap(load(tmp_path / "d.jsonl", seen, seq_len=7), [calibrated]).documents) == 5
    )


def test_what_is_not_recorded_is_not_known(tmp_path: Path) -> None:
    corpus = load(tmp_path / "a.jsonl", [document(0, 90)])
    record = corpus.to_json()
    old = {key: value for key, value in record.items() if key != "marks"}
    other = record | {"tokenizer": {"sha256": "0"}}
    for calibrated in (None, [], [old], [other], [record, old]):
        assert not find_overlap(corpus, calibrated).is_known
    assert find_overlap(corpus, [old]).files
    assert find_overlap(corpus, [record, old]).documents == (0,)
    for damaged in ([{}], [record | {"marks": {"x": "zz"}}], [record | {"specs": 5}]):
        assert not find_overlap(corpus, damaged).any
    for runs in (None, [], "x", [5], [{}], [{"corpus": 5}]):
        assert corpora_of(runs) is None
    assert corpora_of([{"corpus": record}]) == [record]
    for chosen_by in ({}, {"statistics": 5}, {"statistics": {}}):
        assert statistics_runs(chosen_by) is None
