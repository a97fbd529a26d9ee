"""How far sources, halves and stores agree on which experts matter, as JSON values.

Input: stores, a criterion, how many experts of a layer are kept. Output: overlaps of sources and
flips between stores, each beside what chance and sampling would give.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

from kimi_k3_mlx.reap.criteria import Criterion
from kimi_k3_mlx.reap.overlap import (
    Halves,
    best,
    flips,
    halves,
    noise,
    overlap,
    pooled_choice,
    shared_tokens,
    source_scores,
    split_half,
)
from kimi_k3_mlx.reap.saliency import Saliency, shared_files
from kimi_k3_mlx.schema import Json


class NamedStore(NamedTuple):
    """A store under the name that the report calls it by."""

    name: str
    store: Saliency


def overlaps(store: Saliency, criterion: Criterion, keep: int) -> Json:
    """Every pair of sources with tokens, each source's own best `keep`; halves on the diagonal."""
    names = [name for name, n in zip(store.sources, store.tokens, strict=True) if n > 0]
    where = [store.sources.index(name) for name in names]
    choices = best(source_scores(store, criterion), keep)
    pairs = []
    for (one, first), (other, second) in combinations(zip(names, where, strict=True), 2):
        if found := overlap(choices[first], choices[second]):
            pairs.append({"sources": [one, other]} | found._asdict())
    parts = halves(store, criterion)
    ceilings: Json = dict.fromkeys(names)
    if parts:
        own = [best(source_scores(part, criterion), keep) for part in parts]
        for name, index in zip(names, where, strict=True):
            if all(part.tokens[index] for part in parts):
                between = overlap(own[0][index], own[1][index])
                ceilings[name] = between and between.share
    return {
        "criterion": criterion.name,
        "formula": criterion.formula,
        "keep": keep,
        "chance": keep / store.n_experts,
        "split_half": ceilings,
        "pairs": pairs,
    }


def all_flips(stores: Sequence[NamedStore], criterion: Criterion, keep: int) -> Json:
    """Slots that change between the halves of each store, and between every two stores."""
    choices = [pooled_choice(item.store, criterion, keep) for item in stores]
    own = [split_half(item.store, criterion, keep) for item in stores]
    by_store, pairs = [], []
    for (name, store), half in zip(stores, own, strict=True):
        tokens = float(store.tokens.sum())
        row: Json = {"name": name, "tokens": int(tokens), "split_half": None}
        if half:
            row["split_half"] = half.flips
            row["from_infinite"] = half.constant / np.sqrt(tokens)
            row["from_doubling"] = noise(half.constant, tokens, 2 * tokens, tokens)
        by_store.append(row)
    for one, other in combinations(range(len(stores)), 2):
        small, big = sorted((one, other), key=lambda at: float(stores[at].store.tokens.sum()))
        pairs.append(
            pair_flips(stores[small], stores[big], flips(choices[small], choices[big]), own[small])
        )
    slots = int(choices[0].sum())
    return {"criterion": criterion.name, "keep": keep, "slots": slots, "stores": by_store,
            "pairs": pairs}  # fmt: skip


def pair_flips(small: NamedStore, big: NamedStore, changed: int, half: Halves | None) -> Json:
    """Flips between two stores, beside what sampling alone would flip: see `overlap.noise`."""
    one, other = (float(item.store.tokens.sum()) for item in (small, big))
    shared = shared_tokens(small.store, big.store)
    expected = noise(half.constant, one, other, shared) if half else None
    return {
        "stores": [small.name, big.name],
        "nested": shared > 0,
        "shared_files": list(shared_files(small.store, big.store)),
        "flips": changed,
        "noise": expected,
        "ratio": changed / expected if expected else None,
    }
