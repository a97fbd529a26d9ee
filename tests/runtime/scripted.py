"""A model that says what it is told to: a real one, whose logits are bent to a script.

The caches are the real model's. What comes next depends on the tokens before it alone, so that
drafts, snapshots and resumed conversations see the same script.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from kimi_k3_mlx.chat import PieceEncoder
from kimi_k3_mlx.chat.pieces import CLOSE, END, OPEN, SEP
from kimi_k3_mlx.runtime.load import Loaded

MARKUP = {"<": OPEN, "/": CLOSE, ">": SEP, "!": END}


class Scripted(nn.Module):
    """Answers the n-th question that it sees with the n-th list of tokens."""

    def __init__(self, model: Any, question: list[int], answers: list[list[int]]) -> None:
        super().__init__()
        self.real, self.question, self.answers = model, question, answers
        self.computed: list[int] = []
        """Tokens of every call."""
        self._seen: list[int] = []

    @property
    def model(self) -> Any:
        """Where the embedding is."""
        return self.real.model

    @property
    def layers(self) -> list[Any]:
        return self.real.layers

    def make_cache(self) -> list[Any]:
        return self.real.make_cache()

    def __call__(self, inputs: Any, cache: Any = None, input_embeddings: Any = None) -> Any:
        begin = next((c.offset for c in cache if hasattr(c, "offset")), 0)
        self.computed.append(inputs.shape[1])
        # What a resumed conversation holds was not seen here.
        self._seen += [0] * (begin - len(self._seen))
        self._seen[begin:] = inputs[0].tolist()
        logits = self.real(inputs, cache, input_embeddings=input_embeddings)
        wanted = [self.next(n) for n in range(begin + 1, len(self._seen) + 1)]
        bent = mx.zeros_like(logits)
        bent[:, mx.arange(len(wanted)), mx.array(wanted)] = 1e4
        return logits + bent

    def next(self, n: int) -> int:
        """The token after the first n."""
        seen, opening = self._seen[:n], self.question
        starts = [i for i in range(n) if seen[i : i + len(opening)] == opening]
        answer = self.answers[min(len(starts), len(self.answers)) - 1] if starts else [0]
        written = n - starts[-1] - len(opening) if starts else 0
        return answer[written] if 0 <= written < len(answer) else answer[-1]


def script(tokenizer: Any, text: str) -> list[int]:
    """Tokens of an answer: `{<}think{>}` is markup, all else text."""
    encoder, found = PieceEncoder(tokenizer), []
    for i, part in enumerate(text.replace("}", "{").split("{")):
        found += [encoder.control(MARKUP[part])] if i % 2 else tokenizer.encode(
            part, add_special_tokens=False, split_special_tokens=True
        )  # fmt: skip
    return found


def scripted(build: Loaded, opening: list[int], *texts: str) -> Loaded:
    """The build with a model that says these texts; `opening` is the generation prompt."""
    answers = [script(build.tokenizer, text) for text in texts]
    return build._replace(model=Scripted(build.model, opening, answers))


def answer(reasoning: str, content: str) -> str:
    """A whole answer of a model that thinks."""
    return (
        f"{reasoning}{{/}}think{{>}}{{<}}response{{>}}{content}{{/}}response{{>}}"
        f"{{/}}message{{>}}{{!}}"
    )
