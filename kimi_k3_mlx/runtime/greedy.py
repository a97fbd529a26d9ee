"""Continues many prompts of one length at once, greedily.

Input: a model in memory, token ids. Output: token ids. Prompts of one length need no padding, which
is why this is not mlx-lm's batch generation: rows are the same whatever stands beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kimi_k3_mlx.runtime.generate import eager_on_cpu


def continue_greedily(
    model: Any,
    prompts: NDArray[np.int32],
    n_tokens: int,
    ends: Collection[int],
    on_token: Callable[[int], object] = int,
) -> NDArray[np.int32]:
    """The `n_tokens` likeliest tokens [prompts, n], one after another, of prompts [prompts, T].

    Fewer when every row has an end token among them. `on_token` gets how many there are.
    """
    import mlx.core as mx
    from mlx_lm.generate import wired_limit
    from mlx_lm.models.cache import make_prompt_cache

    cache = make_prompt_cache(model)
    columns: list[NDArray[np.int32]] = []
    ended = np.zeros(len(prompts), np.bool_)
    with eager_on_cpu(), wired_limit(model):
        if prompts.shape[1] > 1:
            model(mx.array(prompts[:, :-1]), cache=cache)
            mx.eval([part.state for part in cache])  # not the logits, which are never asked for
        token = mx.array(prompts[:, -1:])
        while len(columns) < n_tokens and not ended.all():
            token = model(token, cache=cache)[:, -1].argmax(-1, keepdims=True)
            columns.append(np.array(token[:, 0], np.int32))
            ended |= np.isin(columns[-1], list(ends))
            on_token(len(columns))
    return np.stack(columns, axis=1) if columns else np.zeros((len(prompts), 0), np.int32)
