"""Prompt-lookup decoding: text that the prompt or the output has seen before is not decoded anew.

`Lookahead` stands for a model in any loop of mlx-lm that decodes one sequence. It follows the text
through an index of its n-grams; while the index foresees the tokens, one forward pass gives the
logits after several of them, and the loop gets these one by one, as it asks. The loop samples as
ever, from the model's own logits: a token that was not foreseen is taken back from the cache. So
the distribution of the text is that of plain decoding at any temperature, and greedy text is the
same up to rounding. (Sampling y from p and keeping a draft x if y = x is rejection sampling with
a draft that is certain: x is kept with probability p(x), and a y that replaces it has the
distribution p, given y ≠ x.)

Input: a model of `kimi_k3`. Output: logits, and counts of tokens and forward passes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import can_trim_prompt_cache, trim_prompt_cache

from kimi_k3_mlx.errors import KimiError
from kimi_k3_mlx.runtime.cache import WINDOW, rewindable

N_GRAMS = (8, 4, 2)
"""Lengths by which the index finds a place again, longest first."""

MAX_DRAFT = 8
"""Every token of a draft reads its own 16 experts a layer, so that long drafts cost bandwidth."""

MAX_PATIENCE = 32
"""Right predictions in a row that it takes to draft again, after drafts that all failed."""


class NGramIndex:
    """A text, and the place in it where the same tokens came before.

    `append` costs a few dictionary operations, whatever the length of the text. The place is kept
    as long as it foresees the tokens: a copy with changes goes on reading the same original. When
    it is wrong, the last occurrence of the longest known n-gram is the next place.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens: list[int] = []
        self.ends: tuple[dict[tuple[int, ...], int], ...] = tuple({} for _ in N_GRAMS)
        self.place: int | None = None
        """Index of the token that should come next."""
        self.streak = 0
        """How many tokens it has foreseen in a row."""
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        """Add the token that came."""
        foreseen = self.place is not None and self.tokens[self.place] == token
        self.streak = self.streak + 1 if foreseen else 0
        self.tokens.append(token)
        place = None
        for n, ends in zip(N_GRAMS, self.ends, strict=True):
            if len(self.tokens) >= n:
                gram = tuple(self.tokens[-n:])
                place = ends.get(gram) if place is None else place
                ends[gram] = len(self.tokens)
        self.place = self.place + 1 if foreseen and self.place is not None else place

    def draft(self, n: int) -> list[int]:
        """At most n tokens that should come next."""
        return [] if self.place is None else self.tokens[self.place : self.place + n]


@dataclass
class Ahead:
    """Logits that the loop has not asked for yet."""

    drafts: list[int]
    logits: Any
    """[1, 1 + drafts, vocabulary]: after the last token, and after every draft."""
    right: int = 0
    """How many drafts have come true."""

    @property
    def open(self) -> int:
        """Drafts in the cache of which nobody knows yet."""
        return len(self.drafts) - self.right


class Lookahead(nn.Module):  # type: ignore[misc]
    """A model that answers ahead: give it to mlx-lm in the model's place, for one sequence.

    The caches must be able to go back `max_draft` tokens: `make_cache` makes such. `settle` them
    before anything else uses them. `tokens` are those that a given cache holds already.

    While nothing is foreseen it costs no forward pass and never waits for a token. It drafts when
    the index has just been right about `patience` tokens, first 2 tokens and twice as many after
    every draft that came true as a whole; after one of which nothing did, patience doubles.
    """

    def __init__(self, model: Any, max_draft: int = MAX_DRAFT, tokens: Iterable[int] = ()) -> None:
        super().__init__()
        self.model = model
        self.max_draft = max_draft
        self.patience, self.length = 1, 2
        self.asked = 0
        """Answers that the loop asked for, one token each."""
        self.passes = 0
        """Forward passes that gave them."""
        self.index = NGramIndex(tokens)
        self._unread: Any = None
        self._ahead = Ahead([], None)

    @property
    def layers(self) -> list[Any]:
        """The model's."""
        return self.model.layers  # type: ignore[no-any-return]

    def make_cache(self) -> list[Any]:
        """The model's caches, able to go back as far as a draft."""
        return rewindable(self.model.make_cache(), max(WINDOW, self.max_draft))

    def __call__(
        self, inputs: Any, cache: list[Any] | None = None, input_embeddings: Any = None
    ) -> Any:
        """Logits [1, T, vocabulary] of tokens [1, T], which come after all that came before."""
        if len(inputs) != 1:
            raise KimiError(f"prompt lookup decodes one sequence, not {len(inputs)}.")
        self.read()
        if inputs.shape[1] > 1 or cache is None or input_embeddings is not None:
            self.settle(cache)
            self._unread = inputs
            return self.model(inputs, cache, input_embeddings=input_embeddings)
        self.asked += 1
        if self._ahead.drafts:
            return self.answer(inputs.item(), inputs, cache)
        self._unread = inputs
        if self.ready():
            # The loop has computed this token at the same time as we found its place.
            self.read()
        return self.forward(inputs, cache)

    def answer(self, token: int, inputs: Any, cache: list[Any]) -> Any:
        """The logits after a token that was drafted, or not."""
        ahead = self._ahead
        self.index.append(token)
        if ahead.open and ahead.drafts[ahead.right] == token:
            ahead.right += 1
            return ahead.logits[:, ahead.right : ahead.right + 1]
        self.learn()
        self.settle(cache)
        return self.forward(inputs, cache)

    def learn(self) -> None:
        """Adapt to how the last draft went."""
        ahead = self._ahead
        self.patience = 1 if ahead.right else min(2 * self.patience, MAX_PATIENCE)
        self.length = 2 if ahead.open else min(2 * self.length, self.max_draft)

    def forward(self, inputs: Any, cache: list[Any]) -> Any:
        """One pass over the token, and a draft if the index is ready and knows the token."""
        self.passes += 1
        drafts = []
        if self._unread is None and self.ready():
            drafts = self.index.draft(min(self.length, self.max_draft))
        if drafts:
            if not can_trim_prompt_cache(cache):
                raise KimiError(
                    "prompt lookup needs caches that can go back.", "runtime.cache.rewindable"
                )
            inputs = mx.concatenate([inputs, mx.array([drafts], inputs.dtype)], axis=1)
        logits = self.model(inputs, cache)
        self._ahead = Ahead(drafts, logits)
        return logits[:, :1]

    def ready(self) -> bool:
        """Whether the index has been right often enough to be believed."""
        return self.index.streak >= self.patience

    def read(self) -> None:
        """Let the index see the tokens of the last call, which the loop has read by now."""
        if self._unread is not None:
            for token in self._unread[0].tolist():
                self.index.append(token)
            self._unread = None

    def settle(self, cache: list[Any] | None) -> None:
        """Take drafts back that the loop did not ask for: the cache holds `index.tokens`."""
        self.read()
        if self._ahead.open and cache is not None:
            trim_prompt_cache(cache, self._ahead.open)
        self._ahead = Ahead([], None)
