"""Pictures in a prompt: placeholders become as many tokens as a picture has rows of features.

Input: token ids and features. Output: embeddings for a text model. A prompt holds one placeholder
per picture, as K3's own code wants it, or as many as the picture has rows, as mlx-vlm's does.
"""

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx
import numpy as np


class Merged(NamedTuple):
    """Prompts with their pictures."""

    embeddings: mx.array
    """[B, T, hidden], in the dtype of the embedding."""
    ids: mx.array
    """[B, T] int32; a picture is as many placeholders as it has rows."""
    mask: mx.array
    """[B, T] int32: 0 where a prompt is padded."""


def expand(prompts: list[list[int]], counts: list[int], placeholder: int) -> list[list[int]]:
    """The prompts of a batch with as many placeholders per picture as `counts` says.

    Raises ValueError when there are neither as many placeholders as pictures nor as many as rows.
    """
    found = sum(prompt.count(placeholder) for prompt in prompts)
    if found == sum(counts):
        return prompts
    if found != len(counts):
        raise ValueError(
            f"the prompt has {found} image placeholders for {len(counts)} images "
            f"of {sum(counts)} tokens."
        )
    left = iter(counts)
    return [
        [copy for t in prompt for copy in [t] * (next(left) if t == placeholder else 1)]
        for prompt in prompts
    ]


def merge(
    embed: Callable[[mx.array], mx.array],
    prompts: list[list[int]],
    features: list[mx.array],
    placeholder: int,
    pad: int | None = None,
) -> Merged:
    """Embeddings of a batch, with the features [rows, hidden] where the placeholders are.

    Prompts are padded on the left, or on the right if one of them ends in `pad`. Padding is zero.
    Neither `pad` nor the placeholder is embedded: they may lie outside the table. Raises ValueError
    as `expand` does.
    """
    prompts = expand(prompts, [len(rows) for rows in features], placeholder)
    longest = max(map(len, prompts))
    on_the_right = pad is not None and any(prompt[-1] == pad for prompt in prompts)
    filler = -1 if pad is None else pad
    ids = np.full((len(prompts), longest), filler, np.int32)
    for row, prompt in zip(ids, prompts, strict=True):
        first = 0 if on_the_right else longest - len(prompt)
        row[first : first + len(prompt)] = prompt

    padded, pictured = ids == filler, ids == placeholder
    embeddings = embed(mx.array(np.where(padded | pictured, 0, ids)))
    embeddings = mx.where(mx.array(padded)[..., None], 0, embeddings)
    if pictured.any():
        places = tuple(mx.array(axis) for axis in pictured.nonzero())
        embeddings[places] = mx.concatenate(features).astype(embeddings.dtype)
    return Merged(embeddings, mx.array(ids), mx.array(~padded).astype(mx.int32))
