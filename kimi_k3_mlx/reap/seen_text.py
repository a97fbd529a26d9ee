"""Finds text that is measured on though it was calibrated on.

Input: token ids of documents, and the provenance that stores and plans carry. Output: marks and a
sample of a corpus, for that provenance, and the documents of another corpus that share its text.

Both are smallest hashes of windows of 32 tokens. Which windows these are depends on nothing but the
text. Marks are those of each document: a longer text that holds it whole holds them too. The sample
is those of a source: a document that is a part of its text has windows of it only. Text that both
merely begin with, as a licence, has all marks of a document hardly ever, and is not half of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kimi_k3_mlx.reap.scripts import IMAGE, Ids
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
SAMPLED = 16_384
"""Windows of a source that are in its sample; with fewer, the sample is all of them."""

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


def sample_of(documents: Iterable[Ids]) -> str:
    """The smallest hashes of a source's windows, ascending: hexadecimal, `DIGITS` for each."""
    hashes = [window_hashes(tokens) for tokens in documents]
    smallest = np.unique(np.concatenate([np.zeros(0, np.uint64), *hashes]))[:SAMPLED]
    return "".join(f"{value:0{DIGITS}x}" for value in smallest.tolist())


def read_hashes(text: str) -> Hashes:
    """What `sample_of` wrote; ValueError for anything else."""
    values = [int(text[i : i + DIGITS], 16) for i in range(0, len(text), DIGITS)]
    return np.array(values, np.uint64)


def read_marks(text: str) -> Hashes:
    """Marks [documents, MARKS]; ValueError for what `marks_of` doesn't write."""
    return read_hashes(text).reshape(-1, MARKS)


def corpus_marks(corpus: Corpus) -> Json:
    """The `marks` and the `samples` of each source."""
    texts: dict[str, list[Ids]] = {name: [] for name in corpus.sources}
    sources = {sequence.document: sequence.source for sequence in corpus.sequences}
    for number, tokens in document_tokens(corpus).items():
        texts[corpus.sources[sources[number]]].append(tokens)
    return {
        "marks": {name: marks_of(documents) for name, documents in texts.items()},
        "samples": {name: sample_of(documents) for name, documents in texts.items()},
    }


def document_tokens(corpus: Corpus) -> dict[int, Ids]:
    """The tokens of each document, its sequences joined; pictures are told apart by their hash."""
    parts: dict[int, list[Ids]] = {}
    for sequence in corpus.sequences:
        tokens = sequence.tokens.copy()
        words = [int(picture.sha256[:7], 16) for picture in sequence.pictures]
        n_rows = [picture.n_rows for picture in sequence.pictures]
        tokens[sequence.scripts == IMAGE] = np.repeat(np.array(words, np.int32), n_rows)
        parts.setdefault(sequence.document, []).append(tokens)
    return {number: np.concatenate(tokens) for number, tokens in parts.items()}


@dataclass(frozen=True)
class Overlap:
    """What of a text was calibrated on."""

    documents: tuple[int, ...]
    """Numbers of documents that hold a calibrated one, or are a part of calibrated text."""
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
        marked = [it for it in same if "marks" in it and "samples" in it]
        texts = [text for it in same for text in it.get("marks", {}).values()]
        marks = np.concatenate([np.zeros((0, MARKS), np.uint64), *map(read_marks, texts)])
        samples = [
            read_hashes(text) for it in same for text in it.get("samples", {}).values() if text
        ]
    except (AttributeError, KeyError, TypeError, ValueError):
        return Overlap((), (), False)  # a plan is a file that people may edit
    again = [spec["name"] for spec in corpus.origins if spec.get("sha256") in files]
    documents = document_tokens(corpus)
    found = {*holding(documents, marks), *parts(documents, samples)}
    return Overlap(tuple(sorted(found)), tuple(again), len(marked) == len(calibrated) > 0)


def holding(documents: dict[int, Ids], marks: Hashes) -> tuple[int, ...]:
    """Documents that hold all marks of one of the marked."""
    hashes = {number: window_hashes(tokens) for number, tokens in documents.items()}
    if not hashes:
        return ()
    near = marks[np.isin(marks, np.concatenate(list(hashes.values()))).all(1)]
    return tuple(n for n, own in hashes.items() if np.isin(near, own).all(1).any())


def parts(documents: dict[int, Ids], samples: Sequence[Hashes]) -> tuple[int, ...]:
    """Documents of which a sample has at least half of the windows that it would have of them.

    One window is not enough where a document has more: licences would be found.
    """
    found = []
    for number, tokens in documents.items():
        own = np.unique(window_hashes(tokens))
        for sample in samples:
            near = own[own <= sample[-1]] if len(sample) >= SAMPLED else own
            at = np.minimum(np.searchsorted(sample, near), len(sample) - 1)
            n_shared = int((sample[at] == near).sum())
            if n_shared >= min(2, len(own)) and 2 * n_shared >= len(near):
                found.append(number)
                break
    return tuple(found)


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
