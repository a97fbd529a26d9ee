"""What loss on text does not show: whether a model that continues by itself repeats or never ends.

Input: generated token ids, end included if it came. Output: numbers of each continuation. Pure:
`runtime.greedy` generates.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kimi_k3_mlx.reap.intervals import resample
from kimi_k3_mlx.schema import Json

N_GRAMS = (1, 2, 3, 4)
LOOP_TIMES = 4
"""So often a block must follow itself, up to the end of the text, to count as a loop."""
LOOP_TOKENS = 32
"""And so many tokens must all its copies have: a run of blanks or of digits is none."""


@dataclass(frozen=True)
class Repeat:
    """A block of tokens that follows itself."""

    begin: int
    period: int
    """Tokens of the block."""
    length: int
    """Tokens of all its copies, a part of one at the end included; 0: nothing repeats."""


@dataclass(frozen=True)
class Continuation:
    """What is wrong, or not, with one generated text."""

    n_tokens: int
    """Without the end token."""
    ended: bool
    """Whether the end token came."""
    distinct: tuple[float, ...]
    """Share of different n-grams, n = 1 … 4; 1 for a text too short to have any."""
    longest_repeat: Repeat
    looped: bool
    """Whether it is repeating itself when it stops."""


def examine(tokens: Sequence[int], ends: Collection[int]) -> Continuation:
    """Measure one continuation; what follows its first end token doesn't count."""
    stop = next((place for place, token in enumerate(tokens) if token in ends), None)
    text = list(tokens[:stop])
    return Continuation(
        n_tokens=len(text),
        ended=stop is not None,
        distinct=tuple(distinct(text, n) for n in N_GRAMS),
        longest_repeat=longest_repeat(text),
        looped=stop is None and loops(text),
    )


def distinct(tokens: Sequence[int], n: int) -> float:
    """Different n-grams over all of them (distinct-n, arXiv:1510.03055)."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def longest_repeat(tokens: Sequence[int]) -> Repeat:
    """The longest stretch in which a block follows itself at least once more, whole.

    Of several as long, the one with the shortest block, then the first.
    """
    ids, best = np.asarray(tokens), Repeat(0, 0, 0)
    for period in range(1, len(ids) // 2 + 1):
        begin, n_equal = longest_run(ids[period:] == ids[:-period])
        if n_equal >= period and n_equal + period > best.length:
            best = Repeat(begin, period, n_equal + period)
    return best


def loops(tokens: Sequence[int]) -> bool:
    """Whether the text ends in `LOOP_TIMES` copies of a block, `LOOP_TOKENS` tokens in all."""
    ids = np.asarray(tokens)
    for period in range(1, len(ids) // LOOP_TIMES + 1):
        length = max(LOOP_TIMES * period, LOOP_TOKENS)
        end = ids[-length:]
        if len(end) == length and np.array_equal(end[period:], end[:-period]):
            return True
    return False


def longest_run(true: NDArray[np.bool_]) -> tuple[int, int]:
    """Where the longest run of True begins, and its length; of several, the first."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], true.astype(np.int8), [0]))))
    begins, lengths = edges[::2], edges[1::2] - edges[::2]
    if not len(begins):
        return 0, 0
    longest = int(lengths.argmax())
    return int(begins[longest]), int(lengths[longest])


MEASURES = ("looped", "ended", "distinct_4", "longest_repeat")
"""What is averaged over prompts: two shares, a share of n-grams, and tokens."""


def measures(found: Continuation) -> tuple[float, ...]:
    """The values of `MEASURES`."""
    return (found.looped, found.ended, found.distinct[-1], found.longest_repeat.length)


def summarize(
    sources: Sequence[str],
    of_prompt: Sequence[int],
    model: Sequence[Continuation],
    reference: Sequence[Continuation] | None = None,
) -> list[Json]:
    """Means over the prompts of each source, and over all, with intervals; the worst first.

    `of_prompt` numbers each prompt's source. With a reference, on the same prompts, `difference` is
    the model's mean less the reference's, paired.
    """
    n = len(MEASURES)
    lanes = [model] if reference is None else [model, reference]
    values = np.array([sum((measures(it) for it in its), ()) for its in zip(*lanes, strict=True)])
    ones = np.ones((len(values), 1))
    sums = resample(np.concatenate([values, ones], 1), np.array(of_prompt), len(sources))
    weights = np.eye(values.shape[1] + 1)

    def means(group: int, columns: NDArray[np.float64]) -> Json:
        found = (sums.ratio(group, column, weights[-1]) for column in columns)
        return {name: it._asdict() for name, it in zip(MEASURES, found, strict=True)}

    rows = []
    for group in range(len(sources) + 1):
        name = sources[group] if group < len(sources) else None
        row: Json = {"source": name, "prompts": int(sums.n_documents[group])}
        row["model"] = means(group, weights[:n])
        if reference is not None:
            row["reference"] = means(group, weights[n : 2 * n])
            row["difference"] = means(group, weights[:n] - weights[n : 2 * n])
        rows.append(row)
    heard = [row for row in rows[:-1] if row["prompts"]]
    return [*sorted(heard, key=lambda row: -row["model"]["looped"]["value"]), rows[-1]]
