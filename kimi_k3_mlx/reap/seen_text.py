"""Finds text that is measured on though it was calibrated on.

Input: token ids of documents, and the provenance that stores and plans carry. Output: marks of a
corpus, for that provenance, and the documents of another corpus that hold marked ones.

A document's marks are the smallest hashes of its windows of 32 tokens. Which windows these are
depends on nothing but the text: a document is found again in another file, in another order, or
as a part of a longer one. Text that both merely begin with, as a licence, has all marks of a
document hardly ever. Half of a calibrated document is found in one of eight cases only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kimi_k3_mlx.reap.scripts import Ids
from kimi_k3_mlx.schema import Json

if TYPE_CHECKING:
    from kimi_k3_mlx.reap.corpus import Corpus

Hashes = NDArray[np.uint64]

WINDOW = 32
MARKS = 3
DIGITS = 10
"""Hexadecimal digits of a mark."""
LIMIT = 4096
"""Documents of a source that are marked; with more, those of the smallest marks."""

MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def window_hashes(tokens: Ids) -> Hashes:
    """Hashes of all windows of a document, 40 bits each; a shorter document is one window."""
    size = min(WINDOW, len(tokens))
    n_windows = len(tokens) - size + 1
    words = tokens.astype(np.uint64)
    mixed = np.full(n_windows, size, np.uint64)
    for begin in range(size):
        mixed = mixed * MULTIPLIER + words[begin : begin + n_windows]
    # The finalizer of SplitMix64: neighbouring sums must not give neighbouring hashes.
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return (mixed ^ (mixed >> np.uint64(31))) >> np.uint64(64 - 4 * DIGITS)


def marks_of(documents: Iterable[Ids]) -> str:
    """The marks of a source's documents: hexadecimal digits, `MARKS` times `DIGITS` for each."""
    rows = set()
    for tokens in documents:
        smallest = np.unique(window_hashes(tokens))[:MARKS].tolist()
        rows.add(tuple(smallest + smallest[-1:] * (MARKS - len(smallest))))
    return "".join(f"{mark:0{DIGITS}x}" for row in sorted(rows)[:LIMIT] for mark in row)


def read_marks(text: str) -> Hashes:
    """Marks [documents, MARKS]; ValueError for what `marks_of` doesn't write."""
    values = [int(text[i : i + DIGITS], 16) for i in range(0, len(text), DIGITS)]
    return np.array(values, np.uint64).reshape(-1, MARKS)


def corpus_marks(corpus: Corpus) -> dict[str, str]:
    """The marks of each source."""
    sources = {sequence.document: sequence.source for sequence in corpus.sequences}
    documents = document_tokens(corpus)
    return {
        name: marks_of(documents[n] for n, source in sources.items() if source == number)
        for number, name in enumerate(corpus.sources)
    }


def document_tokens(corpus: Corpus) -> dict[int, Ids]:
    """The tokens of each document, its sequences joined."""
    parts: dict[int, list[Ids]] = {}
    for sequence in corpus.sequences:
        parts.setdefault(sequence.document, []).append(sequence.tokens)
    return {number: np.concatenate(tokens) for number, tokens in parts.items()}


@dataclass(frozen=True)
class Overlap:
    """What of a text was calibrated on."""

    documents: tuple[int, ...]
    """Numbers of documents that hold a calibrated one."""
    files: tuple[str, ...]
    """Files that were calibrated on, whatever was taken of them."""
    is_known: bool
    """Whether all that was calibrated on is recorded, for this tokenizer."""

    @property
    def any(self) -> bool:
        """Whether anything was."""
        return bool(self.documents or self.files)

    def to_json(self, corpus: Corpus) -> Json:
        """A JSON object, with the documents' own names."""
        return {
            "provenance_is_complete": self.is_known,
            "files": list(self.files),
            "documents": [corpus.documents[number] for number in self.documents],
        }


def find_overlap(corpus: Corpus, calibrated: Sequence[Json] | None) -> Overlap:
    """Compare a corpus with the JSON of those that were calibrated on; None: not recorded."""
    if calibrated is None:
        return Overlap((), (), False)
    try:
        files = {
            str(spec["sha256"]) for it in calibrated for spec in it["specs"] if "sha256" in spec
        }
        same = [it for it in calibrated if it["tokenizer"]["sha256"] == corpus.tokenizer["sha256"]]
        marked = [it for it in same if "marks" in it]
        texts = [text for it in marked for text in it["marks"].values()]
        marks = np.concatenate([np.zeros((0, MARKS), np.uint64), *map(read_marks, texts)])
    except (AttributeError, KeyError, TypeError, ValueError):
        return Overlap((), (), False)  # a plan is a file that people may edit
    again = [spec["name"] for spec in corpus.origins if spec.get("sha256") in files]
    found = holding(document_tokens(corpus), marks)
    return Overlap(found, tuple(again), len(marked) == len(calibrated) > 0)


def holding(documents: dict[int, Ids], marks: Hashes) -> tuple[int, ...]:
    """Documents that hold all marks of one of the marked."""
    hashes = {number: window_hashes(tokens) for number, tokens in documents.items()}
    if not hashes:
        return ()
    near = marks[np.isin(marks, np.concatenate(list(hashes.values()))).all(1)]
    return tuple(n for n, own in hashes.items() if np.isin(near, own).all(1).any())


def corpora_of(runs: object) -> list[Json] | None:
    """The corpora in the runs of a store, or of a plan's statistics; None: none are recorded."""
    if not isinstance(runs, list | tuple) or not runs:
        return None
    found = [run.get("corpus") if isinstance(run, dict) else None for run in runs]
    return None if any(not isinstance(it, dict) for it in found) else [it for it in found if it]


def statistics_runs(chosen_by: Json) -> object:
    """The runs that a plan was cut from, if it says so."""
    statistics = chosen_by.get("statistics")
    return statistics.get("runs") if isinstance(statistics, dict) else None
