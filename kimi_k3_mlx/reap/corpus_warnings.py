"""Says for what a corpus is too small or too lopsided, before hours are spent on it.

Input: a corpus, and the model's number of experts and experts per token. Output: sentences, each
with a level and the source that it is about. Nothing is refused here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from kimi_k3_mlx.reap.corpus import Corpus

RED_PAIRS, AMBER_PAIRS = 200, 1_000
"""Fewer (token, expert) pairs than this, for an expert of average load, are too few."""
SKEW = 1.5
"""Ratio of a source's share of the tokens to its share of the bytes from which it is said."""

FOLD_SKEW = 3
"""A source's fold with so many times the tokens of another makes noise look like difference."""

Level = Literal["red", "amber", "note"]
LEVELS: tuple[Level, ...] = ("red", "amber", "note")


class CorpusWarning(NamedTuple):
    """Something that makes a measurement weaker than it looks."""

    level: Level
    source: str
    """The source that it is about; empty: all."""
    message: str


def find_warnings(corpus: Corpus, n_experts: int, top_k: int) -> tuple[CorpusWarning, ...]:
    """All of them, the worst first."""
    found = [
        *support_warnings(corpus, n_experts, top_k),
        *share_warnings(corpus),
        *shortage_warnings(corpus),
        *fold_warnings(corpus),
        *loss_notes(corpus),
        *image_notes(corpus),
    ]
    return tuple(sorted(found, key=lambda warning: LEVELS.index(warning.level)))


def support_warnings(corpus: Corpus, n_experts: int, top_k: int) -> Iterator[CorpusWarning]:
    """Sources with too few tokens for the number of experts."""
    for source, n_tokens in corpus.tokens_by_source().items():
        pairs = n_tokens * top_k / n_experts
        if not n_tokens:
            yield CorpusWarning("red", source, "there are no tokens")
        elif pairs < AMBER_PAIRS:
            enough = ceil(AMBER_PAIRS * n_experts / top_k)
            yield CorpusWarning(
                "red" if pairs < RED_PAIRS else "amber",
                source,
                f"{n_tokens:,} tokens are {int(pairs):,} for the average expert; "
                f"{AMBER_PAIRS:,} take {enough:,} tokens",
            )


def share_warnings(corpus: Corpus) -> Iterator[CorpusWarning]:
    """Sources whose text is much more, or much less, of the tokens than of the bytes."""
    n_bytes = corpus.bytes_by_source()
    counts = corpus.counts().items()
    text_tokens = {name: sum(row.values()) - row.get("image", 0) for name, row in counts}
    all_bytes, all_tokens = sum(n_bytes.values()), sum(text_tokens.values())
    for source, n_tokens in text_tokens.items():
        if not n_tokens or not n_bytes[source]:
            continue
        of_bytes, of_tokens = n_bytes[source] / all_bytes, n_tokens / all_tokens
        if not 1 / SKEW < of_tokens / of_bytes < SKEW:
            message = f"{of_bytes:.1%} of the bytes are {of_tokens:.1%} of the tokens"
            yield CorpusWarning("amber", source, message)


def shortage_warnings(corpus: Corpus) -> Iterator[CorpusWarning]:
    """Budgets and data sets that have less than was asked for."""
    for source, n_tokens in corpus.tokens_by_source().items():
        budget = corpus.options.budget(source)
        if budget is not None and 0 < n_tokens < budget:
            message = f"{n_tokens:,} tokens are all there are, {budget:,} were asked for"
            yield CorpusWarning("amber", source, message)
    for origin in corpus.origins:
        if origin.get("n_rows", origin["rows"]) < origin["rows"]:
            message = f"{origin['text']} has only {origin['n_rows']:,} rows"
            yield CorpusWarning("amber", "", message)


def fold_warnings(corpus: Corpus) -> Iterator[CorpusWarning]:
    """Sources whose folds are empty or one-sided: what they say of noise is not to be had."""
    documents: dict[int, set[int]] = {}
    tokens: dict[int, list[int]] = {}
    for sequence in corpus.sequences:
        documents.setdefault(sequence.source, set()).add(sequence.document)
        of_source = tokens.setdefault(sequence.source, [0] * corpus.options.folds)
        of_source[sequence.fold] += len(sequence)
    for source, members in documents.items():
        if len(members) < corpus.options.folds:
            message = f"{len(members)} documents do not fill {corpus.options.folds} folds"
            yield CorpusWarning("amber", corpus.sources[source], message)
        elif one_sided(tokens[source]):
            yield CorpusWarning("amber", corpus.sources[source], folds_text(tokens[source]))


def one_sided(folds: Sequence[int]) -> bool:
    """Whether one fold of a source has several times the tokens of another."""
    return bool(folds) and max(folds) > FOLD_SKEW * min(folds)


def folds_text(folds: Sequence[int]) -> str:
    """What to know of one-sided folds."""
    shown = " and ".join(f"{n:,}" for n in folds)
    return f"folds of {shown} tokens: too uneven to say what is noise"


def loss_notes(corpus: Corpus) -> Iterator[CorpusWarning]:
    """What was left out of documents that were used, and documents with nothing in them."""
    for source, lost in corpus.left_out.items():
        if lost["truncated"]:
            message = f"{lost['truncated']:,} tokens of documents were cut off"
            yield CorpusWarning("note", source, message)
        if lost["empty"]:
            yield CorpusWarning("note", source, f"{lost['empty']:,} documents are empty")


def image_notes(corpus: Corpus) -> Iterator[CorpusWarning]:
    """That no token of a picture is there."""
    if not any("image" in row for row in corpus.counts().values()):
        yield CorpusWarning("note", "", "there are no images: vision experts are not measured")
