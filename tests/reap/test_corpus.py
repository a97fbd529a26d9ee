"""From documents to sequences: nothing lost or doubled, caps to the token, the same every time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_k3_mlx.chat import render
from kimi_k3_mlx.errors import CheckpointError, UsageError
from kimi_k3_mlx.reap.corpus import (
    LONGEST,
    Corpus,
    cut,
    load_corpus,
    parse_specs,
)
from kimi_k3_mlx.reap.scripts import Encoder, Tagged
from tests.reap.test_corpus_scripts import BUNDLED, LikeKimis, one_byte_each

HELD_OUT = BUNDLED / "held_out"


def write_rows(path: Path, rows: Sequence[Any]) -> str:
    """A JSONL file, and its spec."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return str(path)


def load(spec: str, **options: Any) -> Corpus:
    """A corpus of byte tokens."""
    options = {"tokenizer": one_byte_each(), "seq_len": 8} | options
    return load_corpus(parse_specs(spec), **options)


def documents_of(corpus: Corpus) -> dict[str, list[int]]:
    """The tokens of each document, put together again."""
    found: dict[str, list[int]] = {}
    for sequence in corpus.sequences:
        found.setdefault(corpus.documents[sequence.document], []).extend(sequence.tokens.tolist())
    return found


def numbered(sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Documents of so many tokens; the tokens count on from document to document."""
    starts = np.cumsum([0, *sizes])
    return [
        {"id": str(i), "tokens": [int(t) % 256 for t in range(start, start + size)]}
        for i, (start, size) in enumerate(zip(starts, sizes, strict=False))
    ]


def arrays(n_tokens: int) -> Tagged:
    """Tokens that can be told apart."""
    tags = (np.arange(n_tokens) % 251).astype(np.uint8)
    return Tagged(
        np.arange(n_tokens, dtype=np.int32), tags, tags[::-1], np.ones(n_tokens, np.int32)
    )


@given(st.integers(0, 300), st.integers(1, 40))
def test_cutting_neither_loses_nor_doubles(n_tokens: int, seq_len: int) -> None:
    whole = arrays(n_tokens)
    pieces = list(cut(whole, seq_len, (3, 4, 1)))
    for name in ("tokens", "scripts", "roles"):
        joined = [value for piece in pieces for value in getattr(piece, name).tolist()]
        assert joined == getattr(whole, name).tolist()
    assert all(len(piece) == seq_len for piece in pieces[:-1])
    assert all(0 < len(piece) <= seq_len for piece in pieces)
    assert sum(piece.n_bytes for piece in pieces) == n_tokens
    assert {(it.source, it.document, it.fold) for it in pieces} <= {(3, 4, 1)}


SIZES = st.lists(st.integers(0, 40), max_size=8)


@settings(deadline=None, max_examples=50)
@given(SIZES, st.integers(1, 20), st.integers(0, 3))
def test_every_token_of_every_document_is_there_once(
    sizes: list[int], seq_len: int, seed: int
) -> None:
    rows = numbered(sizes)
    with TemporaryDirectory() as folder:
        corpus = load(write_rows(Path(folder, "c.jsonl"), rows), seq_len=seq_len, seed=seed)
    assert documents_of(corpus) == {row["id"]: row["tokens"] for row in rows if row["tokens"]}
    assert corpus.n_tokens == sum(sizes)
    assert corpus.left_out.get("c", {"empty": 0})["empty"] == sizes.count(0)


def limit(size: int, *limits: int | None) -> int:
    """The size within all limits that there are."""
    return min(size, *(bound for bound in limits if bound is not None), size)


BOUND = st.none() | st.integers(1, 60)


@settings(deadline=None, max_examples=60)
@given(SIZES, BOUND, BOUND)
def test_caps_are_honoured_to_the_token(
    sizes: list[int], per_source: int | None, per_document: int | None
) -> None:
    """C11: a cap per document; and a budget that is filled exactly if there is enough."""
    rows = numbered(sizes)
    with TemporaryDirectory() as folder:
        corpus = load(
            write_rows(Path(folder, "c.jsonl"), rows),
            tokens_per_source=per_source,
            tokens_per_document=per_document,
        )
    available = [limit(size, per_document) for size in sizes]
    assert corpus.n_tokens == limit(sum(available), per_source)
    short = 0
    for name, tokens in documents_of(corpus).items():
        assert tokens == rows[int(name)]["tokens"][: len(tokens)]
        short += len(tokens) < available[int(name)]
    assert short <= 1
    used = sum(sizes[int(name)] for name in documents_of(corpus))
    assert sum(lost["truncated"] for lost in corpus.left_out.values()) == used - corpus.n_tokens


def chat(n_letters: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x" * n_letters + "END"}]}


def test_of_a_chat_the_end_is_kept(tmp_path: Path) -> None:
    row = chat(50)
    whole = Encoder(one_byte_each()).encode(render(row["messages"]))
    corpus = load(write_rows(tmp_path / "c.jsonl", [row]), seq_len=30)
    (sequence,) = corpus.sequences
    assert sequence.tokens.tolist() == whole.tokens.tolist()[-30:]
    assert sequence.roles.tolist() == whole.roles.tolist()[-30:]
    assert corpus.left_out["c"]["truncated"] == len(whole) - 30
    assert load(str(tmp_path / "c.jsonl"), seq_len=len(whole)).left_out["c"]["truncated"] == 0


@pytest.mark.parametrize("cap", ["tokens_per_document", "tokens_per_source"])
def test_caps_keep_the_end_of_a_chat_and_the_beginning_of_a_text(cap: str, tmp_path: Path) -> None:
    text = write_rows(tmp_path / "t.jsonl", [{"text": "0123456789"}])
    chats = write_rows(tmp_path / "c.jsonl", [chat(5)])
    found = documents_of(load(f"{text},{chats}", **{cap: 4}))
    encoder = Encoder(one_byte_each())
    assert encoder.spell(found["t.jsonl:1"]) == b"0123"
    whole = encoder.encode(render(chat(5)["messages"])).tokens.tolist()
    assert found["c.jsonl:1"] == whole[-4:]


def three_sources(folder: Path) -> str:
    """Specs of two tagged files and one with sources of its own."""
    (folder / "a.txt").write_text("\n\n".join(f"Paragraph {i} of a text." for i in range(40)))
    rows = [{"text": f"текст {i}", "source": "ru" if i % 3 else "uk"} for i in range(20)]
    chats = [{"messages": [{"role": "user", "content": f"问题 {i}"}]} for i in range(7)]
    b, c = write_rows(folder / "b.jsonl", rows), write_rows(folder / "c.jsonl", chats)
    return f"{folder / 'a.txt'}=prose,{b},{c}=zh"


def test_the_same_specs_and_seed_give_the_same_corpus(tmp_path: Path) -> None:
    """Wherever the files are, and whichever way the tokenizer is called."""
    corpora = []
    for name, tokenizer in (("x", one_byte_each()), ("y", LikeKimis())):
        (tmp_path / name).mkdir()
        tokenizer.get_vocab = one_byte_each().get_vocab
        corpora.append(load(three_sources(tmp_path / name), tokenizer=tokenizer, seed=5))
    first, second = corpora
    assert first.sha256 == second.sha256
    assert first.token_sha256 == second.token_sha256
    assert first.sources == ("prose", "uk", "ru", "zh")
    for one, two in zip(first.sequences, second.sequences, strict=True):
        assert (one.tokens == two.tokens).all()


def test_a_seed_changes_the_order_and_what_a_budget_takes(tmp_path: Path) -> None:
    spec = three_sources(tmp_path)
    first, second = load(spec, seed=1), load(spec, seed=2)
    assert first.token_sha256 != second.token_sha256
    assert documents_of(first) == documents_of(second)
    few = [load(spec, seed=seed, tokens_per_source=60) for seed in (1, 2)]
    assert set(few[0].documents) != set(few[1].documents)
    assert few[0].tokens_by_source() == {"prose": 60, "uk": 60, "ru": 60, "zh": 7 * 8}


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=15), st.integers(1, 5))
def test_folds_are_balanced_and_keep_documents_whole(sizes: list[int], folds: int) -> None:
    with TemporaryDirectory() as folder:
        corpus = load(write_rows(Path(folder, "c.jsonl"), numbered(sizes)), folds=folds)
    loads = [0] * folds
    fold_of: dict[int, int] = {}
    for it in corpus.sequences:
        loads[it.fold] += len(it)
        assert fold_of.setdefault(it.document, it.fold) == it.fold
    assert max(loads) - min(loads) <= max(sizes)


def test_folds_of_a_source_do_not_depend_on_the_others(tmp_path: Path) -> None:
    one = write_rows(tmp_path / "one.jsonl", numbered([9, 3, 7, 20, 1]))
    two = write_rows(tmp_path / "two.jsonl", numbered([5, 6, 6]))

    def folds(corpus: Corpus) -> list[tuple[str, int]]:
        index = corpus.sources.index("one")
        return [
            (corpus.documents[it.document], it.fold)
            for it in corpus.sequences
            if it.source == index
        ]

    assert folds(load(one)) == folds(load(f"{two},{one}"))


def test_the_longest_sequence(tmp_path: Path) -> None:
    spec = write_rows(tmp_path / "c.jsonl", [{"tokens": [1] * (LONGEST + 1)}])
    assert [len(it) for it in load(spec, seq_len=LONGEST).sequences] == [32_768, 1]


def test_a_beginning_for_documents_of_text(tmp_path: Path) -> None:
    """Not for chats, given tokens and documents with nothing in them."""
    rows = [{"text": "ab"}, {"text": ""}, {"tokens": [7]}, chat(0)]
    spec = write_rows(tmp_path / "c.jsonl", rows)
    with_bos, without = (documents_of(load(spec, bos=bos, seq_len=64)) for bos in (True, False))
    bos = one_byte_each().bos_token_id
    assert with_bos["c.jsonl:1"] == [bos, *without["c.jsonl:1"]]
    assert {k: v for k, v in with_bos.items() if k != "c.jsonl:1"} == {
        k: v for k, v in without.items() if k != "c.jsonl:1"
    }


def sequences_with(corpus: Corpus, source: str) -> Iterator[int]:
    index = corpus.sources.index(source)
    return (len(it) for it in corpus.sequences if it.source == index)


def test_budgets_by_source(tmp_path: Path) -> None:
    spec = three_sources(tmp_path)
    corpus = load(spec, tokens_per_source={"ru": 20, "prose": 33})
    everything = load(spec).tokens_by_source()
    assert corpus.tokens_by_source() == {**everything, "ru": 20, "prose": 33}
    assert corpus.left_out["ru"]["unused"] > 0
    assert corpus.left_out["zh"] == load(spec).left_out["zh"]
    assert sum(sequences_with(corpus, "ru")) == 20


def test_a_budget_for_no_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a budget for 'code', but no such source") as caught:
        load(three_sources(tmp_path), tokens_per_source={"ru": 20, "code": 33})
    assert caught.value.hint == "the sources are prose, uk, ru, zh."


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"seq_len": 0}, "0 tokens is not between 1 and 32,768"),
        ({"seq_len": 32_769}, "32,769 tokens is not between 1 and 32,768"),
        ({"folds": 0}, "0 folds are not between"),
        ({"folds": 256}, "256 folds are not between"),
        ({"tokens_per_source": 0}, "budget of 0 tokens"),
        ({"tokens_per_source": {"a": -1}}, "budget of -1 tokens"),
        ({"tokens_per_document": 0}, "budget of 0 tokens"),
    ],
)
def test_sizes_that_mean_nothing(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        load("never-read.txt", **options)


def test_too_many_sources(tmp_path: Path) -> None:
    spec = write_rows(tmp_path / "c.jsonl", [{"text": "x", "source": i} for i in range(256)])
    with pytest.raises(UsageError, match="256 sources, 255 at most"):
        load(spec)
    assert load(f"{spec}=one").sources == ("one",)


def test_files_without_documents(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    corpus = load(str(tmp_path / "empty.txt"))
    assert (corpus.sources, corpus.sequences, corpus.n_tokens) == (("empty",), (), 0)
    assert corpus.counts() == {"empty": {}}
    assert corpus.to_json()["n_documents"] == 0
    assert load(f"{tmp_path / 'empty.txt'}=zh,{three_sources(tmp_path)}").sources[0] == "zh"


def test_errors_of_the_tokenizer_name_the_document(tmp_path: Path) -> None:
    spec = write_rows(tmp_path / "c.jsonl", [{"text": "fine"}, {"tokens": [1, 512]}])
    with pytest.raises(UsageError, match=r"c\.jsonl:2: token 512 is not in the tokenizer's vocab"):
        load(spec)
    forging = LikeKimis(honest=False)
    with pytest.raises(CheckpointError, match=r"c\.jsonl:1: the tokenizer turns the text"):
        load(write_rows(tmp_path / "c.jsonl", [chat(1)]), tokenizer=forging)
