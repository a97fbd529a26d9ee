"""The corpus of a calibration run: sequences of tokens, each tagged with all that is free to know.

Input: specs of files and data sets, and K3's tokenizer. Output: a `Corpus`. Per sequence it has
source, document and fold, per token script and role. The same specs and seed give the
same corpus, byte for byte. Cutting neither loses nor doubles a token; what a cap or a budget leaves
out is counted. Never runs a model, never writes a file.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from kimi_k3_mlx.chat.pieces import ROLES
from kimi_k3_mlx.errors import KimiError, UsageError
from kimi_k3_mlx.reap.corpus_files import Origin, Raw, Spec, parse_specs, read_spec
from kimi_k3_mlx.reap.corpus_warnings import CorpusWarning, find_warnings
from kimi_k3_mlx.reap.pictures import Album, CorpusPicture, Rules
from kimi_k3_mlx.reap.scripts import SCRIPTS, Encoder, Ids, Tagged, Tags
from kimi_k3_mlx.reap.seen_text import corpus_marks
from kimi_k3_mlx.schema import Json, canonical

__all__ = [
    "ROLES", "SCRIPTS", "Corpus", "CorpusSequence", "CorpusWarning", "Spec",
    "load_corpus", "parse_specs",
]  # fmt: skip

LONGEST = 32_768


@dataclass(frozen=True, eq=False)
class CorpusSequence:
    """Consecutive tokens of one document, which the model sees with nothing before them."""

    source: int
    document: int
    fold: int
    tokens: Ids = field(repr=False)
    scripts: Tags = field(repr=False)
    roles: Tags = field(repr=False)
    n_bytes: int
    """Bytes of UTF-8 that its tokens stand for."""
    pictures: tuple[CorpusPicture, ...] = ()
    """Those whose rows are its tokens of the script `image`, in order, each whole."""

    def __len__(self) -> int:
        return len(self.tokens)


class Options(NamedTuple):
    """How documents become sequences."""

    seq_len: int
    tokens_per_source: int | Mapping[str, int] | None
    tokens_per_document: int | None
    seed: int
    folds: int
    thinking: bool
    bos: bool
    whole_texts: bool = False

    def budget(self, source: str) -> int | None:
        """Most tokens of a source; None: no limit."""
        if isinstance(self.tokens_per_source, Mapping):
            return self.tokens_per_source.get(source)
        return self.tokens_per_source

    def to_json(self) -> Json:
        """A JSON object."""
        budget = self.tokens_per_source
        return self._asdict() | {
            "tokens_per_source": dict(budget) if isinstance(budget, Mapping) else budget
        }


@dataclass(frozen=True, eq=False)
class Corpus:
    """All sequences. Sources, documents and folds are numbered; the names are here."""

    sources: tuple[str, ...]
    documents: tuple[str, ...] = field(repr=False)
    sequences: tuple[CorpusSequence, ...] = field(repr=False)
    options: Options
    origins: tuple[Json, ...] = field(repr=False)
    tokenizer: Json = field(repr=False)
    left_out: dict[str, dict[str, int]] = field(repr=False)
    """Per source: documents that were `empty` or `unused`, and tokens `truncated`."""
    version: int = 1

    @property
    def n_tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(len(sequence) for sequence in self.sequences)

    @property
    def lengths(self) -> Ids:
        """Tokens of each sequence."""
        return np.array([len(sequence) for sequence in self.sequences], np.int32)

    @cached_property
    def sha256(self) -> str:
        """Identity of tokens, tags, folds and pictures, wherever the files lie."""
        digest = hashlib.sha256(canonical([self.version, self.sources, SCRIPTS, ROLES]))
        for it in self.sequences:
            digest.update(canonical([it.source, it.document, it.fold, len(it)]))
            digest.update(it.tokens.astype("<i4").tobytes())
            digest.update(it.scripts.tobytes() + it.roles.tobytes())
            digest.update("".join(picture.sha256 for picture in it.pictures).encode())
        return digest.hexdigest()

    @cached_property
    def token_sha256(self) -> str:
        """Identity of the tokens alone, in order."""
        digest = hashlib.sha256()
        for sequence in self.sequences:
            digest.update(sequence.tokens.astype("<i4").tobytes())
        return digest.hexdigest()

    @cached_property
    def marks(self) -> Json:
        """What text of each source is found again by, see `reap.seen_text`."""
        return corpus_marks(self)

    def counts(self) -> dict[str, dict[str, int]]:
        """Tokens by source and script; scripts that a source has none of are left out."""
        return self._by_tag("scripts", SCRIPTS)

    def role_counts(self) -> dict[str, dict[str, int]]:
        """The same by source and role."""
        return self._by_tag("roles", ROLES)

    def _by_tag(self, field: str, names: Sequence[str]) -> dict[str, dict[str, int]]:
        table = np.zeros((len(self.sources), len(names)), np.int64)
        for it in self.sequences:
            table[it.source] += np.bincount(getattr(it, field), minlength=len(names))
        return {
            source: {name: n for name, n in zip(names, row, strict=True) if n}
            for source, row in zip(self.sources, table.tolist(), strict=True)
        }

    def tokens_by_source(self) -> dict[str, int]:
        """Tokens of each source, also of those that have none."""
        return {source: sum(row.values()) for source, row in self.counts().items()}

    def bytes_by_source(self) -> dict[str, int]:
        """UTF-8 bytes that the tokens of each source stand for."""
        n_bytes = dict.fromkeys(self.sources, 0)
        for sequence in self.sequences:
            n_bytes[self.sources[sequence.source]] += sequence.n_bytes
        return n_bytes

    def warnings(self, n_experts: int, top_k: int) -> tuple[CorpusWarning, ...]:
        """What the corpus is too small or too lopsided for, the worst first."""
        return find_warnings(self, n_experts, top_k)

    def to_json(self) -> Json:
        """Where everything comes from: enough to make the same corpus again."""
        return {
            "version": self.version,
            "sha256": self.sha256,
            "token_sha256": self.token_sha256,
            "specs": list(self.origins),
            "tokenizer": self.tokenizer,
            **self.options.to_json(),
            "n_tokens": self.n_tokens,
            "n_sequences": len(self.sequences),
            "n_documents": len(self.documents),
            "counts": self.counts(),
            "roles": self.role_counts(),
            "n_bytes": self.bytes_by_source(),
            "left_out": self.left_out,
            **self.marks,
        }


def load_corpus(
    specs: Sequence[Spec],
    tokenizer: Any,
    *,
    seq_len: int,
    tokens_per_source: int | Mapping[str, int] | None = None,
    tokens_per_document: int | None = None,
    seed: int = 0,
    folds: int = 2,
    thinking: bool = True,
    bos: bool = False,
    whole_texts: bool = False,
    rules: Rules | None = None,
) -> Corpus:
    """Read, encode, choose and cut. A budget takes documents in an order that the seed decides.

    Text is cut into sequences of `seq_len` tokens, of a chat the last `seq_len` stay. `bos` puts
    `[BOS]` before each document of text, `thinking` keeps the reasoning of chats. Long texts of
    `.txt` files become documents of about a sequence each, unless `whole_texts`: then they stay
    one, which matters where documents count as independent. Documents with pictures, which `rules`
    are for, are one sequence; what is left of them has whole pictures.
    """
    options = Options(
        seq_len, tokens_per_source, tokens_per_document, seed, folds, thinking, bos, whole_texts
    )  # fmt: skip
    check(options)
    # Four characters are about a token: a block of a long text makes about one sequence.
    n_chars = sys.maxsize if whole_texts else 4 * seq_len
    album = Album(rules, seq_len)
    origins = [read_spec(spec, n_chars, thinking=thinking, album=album) for spec in specs]
    groups = by_source(origins)
    unknown = set(tokens_per_source) - set(groups) if isinstance(tokens_per_source, Mapping) else ()
    if unknown:
        raise UsageError(
            f"there is a budget for {min(unknown)!r}, but no such source.",
            f"the sources are {', '.join(groups)}.",
        )
    return build(groups, origins, Encoder(tokenizer), options)


def check(options: Options) -> None:
    """Refuse sizes that mean nothing."""
    if not 1 <= options.seq_len <= LONGEST:
        raise UsageError(
            f"a sequence length of {options.seq_len:,} tokens is not between 1 and {LONGEST:,}.",
            "--seq-len 2048",
        )
    if not 1 <= options.folds <= 255:
        raise UsageError(f"{options.folds} folds are not between 1 and 255.")
    budget = options.tokens_per_source
    caps = list(budget.values()) if isinstance(budget, Mapping) else [budget]
    for cap in (*caps, options.tokens_per_document):
        if cap is not None and cap < 1:
            raise UsageError(
                f"a budget of {cap} tokens measures nothing.", "leave it out: no limit."
            )


def by_source(origins: Sequence[Origin]) -> dict[str, list[Raw]]:
    """The documents of each source; a spec without documents is a source that has none."""
    groups: dict[str, list[Raw]] = {}
    for origin in origins:
        if not origin.documents:
            groups.setdefault(origin.spec.source, [])
        for raw in origin.documents:
            groups.setdefault(raw.source, []).append(raw)
    if len(groups) > 255:
        raise UsageError(
            f"the corpus has {len(groups)} sources, 255 at most.", "tag the file: corpus.jsonl=tag."
        )
    return groups


def build(
    groups: dict[str, list[Raw]], origins: Sequence[Origin], encoder: Encoder, options: Options
) -> Corpus:
    """The corpus of documents that have been read."""
    names: list[str] = []
    sequences: list[CorpusSequence] = []
    left_out = {}
    for source, (name, raws) in enumerate(groups.items()):
        lost = left_out[name] = {"empty": 0, "unused": 0, "truncated": 0}
        loads = [0] * options.folds
        for raw, tagged in chosen(shuffled(raws, options.seed), encoder, options, lost):
            fold = loads.index(min(loads))
            loads[fold] += len(tagged)
            sequences += cut(tagged, options.seq_len, (source, len(names), fold))
            names.append(raw.id)
    return Corpus(
        sources=tuple(groups),
        documents=tuple(names),
        sequences=tuple(sequences),
        options=options,
        origins=tuple(origin.record for origin in origins),
        tokenizer=encoder.to_json(),
        left_out=left_out,
    )


def shuffled(raws: Sequence[Raw], seed: int) -> list[Raw]:
    """Documents in the order of a hash of seed and id, so that a budget takes no one's beginning.

    The folds follow this order as well: each document goes to the lightest fold so far.
    """

    def key(item: tuple[int, Raw]) -> tuple[bytes, int]:
        number, raw = item
        return hashlib.sha256(canonical([seed, raw.source, raw.id])).digest(), number

    return [raw for _, raw in sorted(enumerate(raws), key=key)]


def chosen(
    raws: Sequence[Raw], encoder: Encoder, options: Options, lost: dict[str, int]
) -> Iterator[tuple[Raw, Tagged]]:
    """The documents of one source that its budget has room for, encoded, caps applied."""
    room = options.budget(raws[0].source) if raws else None
    for raw in raws:
        if room == 0:
            lost["unused"] += 1
            continue
        whole = encoded(raw, encoder, options.bos)
        kept = capped(whole, raw, options, room)
        lost["truncated"] += len(whole) - len(kept)
        lost["empty"] += not len(whole)
        room = None if room is None else room - len(kept)
        if len(kept):
            yield raw, kept


def encoded(raw: Raw, encoder: Encoder, bos: bool) -> Tagged:
    """The tokens of one document."""
    try:
        if raw.tokens:
            return encoder.tag(raw.tokens)
        starts = bos and not raw.is_chat and any(piece.text for piece in raw.pieces)
        tagged = encoder.encode((encoder.beginning(), *raw.pieces) if starts else raw.pieces)
        return replace(tagged, pictures=raw.pictures)
    except KimiError as error:
        raise type(error)(f"{raw.id}: {error.message}", error.hint) from error


def capped(whole: Tagged, raw: Raw, options: Options, room: int | None) -> Tagged:
    """The beginning of a text, or the end of a chat, that is within all limits."""
    longest = options.seq_len if raw.is_chat or raw.pictures else None
    limits = (room, options.tokens_per_document, longest)
    n_tokens = min([len(whole), *(limit for limit in limits if limit is not None)])
    return whole.tail(n_tokens) if raw.is_chat else whole.head(n_tokens)


def cut(tagged: Tagged, seq_len: int, place: tuple[int, int, int]) -> Iterator[CorpusSequence]:
    """Sequences of `seq_len` tokens, the last one shorter, at a place: source, document, fold."""
    for begin in range(0, len(tagged), seq_len):
        it = tagged.part(begin, begin + seq_len)
        n_bytes = int(it.n_bytes.sum())
        yield CorpusSequence(*place, it.tokens, it.scripts, it.roles, n_bytes, it.pictures)
