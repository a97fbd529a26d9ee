"""What the tiny K3's vision sees: right answers on pictures that training never drew.

Input: tower and projector, and the text model behind a Reader. Output: plain numbers for
results.json. Pictures of a group have one size, because a batch has.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from tiny_pictures import SEEN, UNSEEN, Drawn, Size, draw, picture_size
from tiny_vision import Reader, TinyVision, patches

GROUP = 24


def groups(
    pairs: tuple[tuple[str, str], ...], first: int, n_groups: int
) -> Iterator[tuple[Size, list[Drawn]]]:
    """Groups of pictures from the seed `first` on, each of a size of its own."""
    for seed in range(first, first + n_groups * GROUP, GROUP):
        size = picture_size(np.random.default_rng(seed))
        yield size, [draw(s, pairs, size) for s in range(seed, seed + GROUP)]


def shares(drawn: list[Drawn], texts: list[str]) -> dict[str, float]:
    """How many answers begin with the right colour, go on with the right shape, are right."""
    words = [text.strip(" .").partition(" ") for text in texts]
    colour = [word[0] == d.colour for word, d in zip(words, drawn, strict=True)]
    shape = [word[2] == d.shape for word, d in zip(words, drawn, strict=True)]
    both = [text == d.answer for text, d in zip(texts, drawn, strict=True)]
    return {
        "pictures": len(drawn),
        "colour": round(float(np.mean(colour)), 3),
        "shape": round(float(np.mean(shape)), 3),
        "both": round(float(np.mean(both)), 3),
    }


@torch.no_grad()
def answers(
    vision: TinyVision, reader: Reader, shown: list[tuple[Size, list[Drawn]]]
) -> tuple[list[Drawn], list[str]]:
    """All pictures of the groups, and the greedy answer to each."""
    texts = [
        text
        for size, drawn in shown
        for text in reader.greedy(vision(patches(d.image for d in drawn)), size)
    ]
    return [d for _, drawn in shown for d in drawn], texts


def score_pictures(vision: TinyVision, reader: Reader, n_groups: int = 12) -> dict:
    """Pairs that training showed, pairs that it did not, and the first with pictures swapped."""
    drawn, texts = answers(vision, reader, list(groups(SEEN, 0, n_groups)))
    unseen = list(groups(UNSEEN, 100_000, n_groups // 2))
    return {
        "held_out": shares(drawn, texts),
        "unseen": shares(*answers(vision, reader, unseen)),
        # Each question gets the answer to the picture after it.
        "swapped": shares(drawn, texts[1:] + texts[:1]),
    }
