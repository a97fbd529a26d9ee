"""What the sums of an evaluation come to: perplexity, paired differences, KL, agreement, by source.

Input: an `Evaluation`. Output: intervals, tables as JSON, worst first. Differences are paired: of
the same tokens, drawn again by document. Nothing here runs a model or prints.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from itertools import combinations

import numpy as np

from kimi_k3_mlx.prune_plan import PrunePlan
from kimi_k3_mlx.reap.compare import INSIDE, PARENT, Array, Evaluation
from kimi_k3_mlx.reap.intervals import FEW, LEVEL, RESAMPLES, Interval, Resampled, resample
from kimi_k3_mlx.schema import Json

NOT_MEASURED = (
    "loops and early ends of generated text: kimi-k3 probe",
    "what fewer bits of a low bank, or of the trunk, cost: lanes have the parent's own weights",
)
NO_IMAGES = "images: the text has none"


class Costs:
    """The derived numbers of an evaluation. Lanes and sources go by name; source None: all text."""

    def __init__(
        self, evaluation: Evaluation, *, resamples: int = RESAMPLES, seed: int = 0
    ) -> None:
        self.evaluation = evaluation
        self._resamples, self._seed = resamples, seed

    @cached_property
    def _resampled(self) -> Resampled:
        it = self.evaluation
        columns = np.concatenate([it.tokens[None], it.nll, it.kl, it.agree]).T
        predicted = it.tokens > 0
        return resample(
            columns[predicted],
            it.document_sources[predicted],
            len(it.corpus.sources),
            resamples=self._resamples,
            seed=self._seed,
        )

    def nll(self, lane: str, source: str | None = None) -> Interval:
        """Nats for a token."""
        return self._per_token(self._column("nll", lane), source)

    def perplexity(self, lane: str, source: str | None = None) -> Interval:
        """exp of nats for a token."""
        return self.nll(lane, source).map(np.exp)

    def delta(self, lane: str, source: str | None = None, against: str = PARENT) -> Interval:
        """Nats for a token more than another lane has, paired."""
        above = self._column("nll", lane) - self._column("nll", against)
        return self._per_token(above, source)

    def kl(self, plan: str, source: str | None = None) -> Interval:
        """KL(parent ‖ plan), nats for a token."""
        return self._per_token(self._column("kl", plan), source)

    def agreement(self, plan: str, source: str | None = None) -> Interval:
        """Share of the predictions whose best token is the parent's."""
        return self._per_token(self._column("agree", plan), source)

    def inside(self, name: str, plan: str, source: str | None = None) -> Array:
        """Mean `cosine` or `coverage` of each MoE layer over tokens."""
        it = self.evaluation
        sums: Array = getattr(it, name)[:, list(it.plans).index(plan)]
        of = np.ones(len(it.positions), np.bool_)
        if source is not None:
            of = it.document_sources == it.corpus.sources.index(source)
        means: Array = sums[:, of].sum(1) / it.positions[of].sum()
        return means

    def n_documents(self, source: str | None = None) -> int:
        """Documents of a source, or all."""
        return int(self._resampled.n_documents[self._group(source)])

    def n_tokens(self, source: str | None = None) -> int:
        """Predicted tokens of a source, or of all."""
        return int(self._resampled.sums[self._group(source), 0])

    @property
    def sources(self) -> list[str]:
        """Sources of which something is predicted."""
        return [source for source in self.evaluation.corpus.sources if self.n_tokens(source)]

    @property
    def few(self) -> list[str]:
        """Sources with so few documents that their intervals are too narrow."""
        return [source for source in self.sources if self.n_documents(source) < FEW]

    def worst_first(self, plan: str) -> list[str]:
        """Sources by what the plan costs them."""
        return sorted(self.sources, key=lambda source: -self.delta(plan, source).value)

    def _per_token(self, above: Array, source: str | None) -> Interval:
        below = np.zeros(len(above))
        below[0] = 1
        return self._resampled.ratio(self._group(source), above, below)

    def _group(self, source: str | None) -> int:
        return -1 if source is None else self.evaluation.corpus.sources.index(source)

    def _column(self, name: str, lane: str) -> Array:
        """Which of the columns it is: tokens, then `nll` of all lanes, `kl`, `agree` of plans."""
        lanes, n_plans = self.evaluation.lanes, len(self.evaluation.plans)
        start, names = {
            "nll": (1, lanes),
            "kl": (2 + n_plans, lanes[1:]),
            "agree": (2 + 2 * n_plans, lanes[1:]),
        }[name]
        column = np.zeros(2 + 3 * n_plans)
        column[start + names.index(lane)] = 1
        return column

    def to_json(self) -> Json:
        """Everything that can be said, and the sums of each document; source null: all text."""
        it = self.evaluation
        has_images = any("image" in row for row in it.corpus.counts().values())
        return {
            "version": 1,
            "model": it.model,
            "corpus": it.corpus.to_json(),
            "intervals": {
                "level": LEVEL,
                "method": "percentile bootstrap of Σ/Σ, documents drawn within their source",
                "resamples": self._resamples,
                "seed": self._seed,
                "few_documents": self.few,
            },
            "parent": [self._row(PARENT, source) for source in (None, *self.sources)],
            "plans": {name: self._plan_json(name, plan) for name, plan in it.plans.items()},
            "between_plans": [
                {"plan": one, "against": other, "delta": self._deltas(one, other)}
                for one, other in combinations(it.plans, 2)
            ],
            "documents": self._documents(),
            "not_measured": [*NOT_MEASURED, *([] if has_images else [NO_IMAGES])],
        }

    def _row(self, lane: str, source: str | None) -> Json:
        row = {
            "source": source,
            "documents": self.n_documents(source),
            "tokens": self.n_tokens(source),
            "perplexity": self.perplexity(lane, source)._asdict(),
        }
        if lane == PARENT:
            return row
        measured: dict[str, Callable[[str, str | None], Interval]]
        measured = {"delta": self.delta, "kl": self.kl, "agreement": self.agreement}
        return row | {name: of(lane, source)._asdict() for name, of in measured.items()}

    def _plan_json(self, name: str, plan: PrunePlan) -> Json:
        return {
            "sha256": plan.sha256,
            "counts": {str(layer): len(kept.keep) for layer, kept in sorted(plan.layers.items())},
            "low_bank_at_full_bits": plan.low is not None,
            "rows": [self._row(name, source) for source in (*self.worst_first(name), None)],
            "layers": self._layers(name),
        }

    def _layers(self, plan: str) -> list[Json]:
        """Of each MoE layer, over all tokens and by source."""
        sources = (None, *self.sources)
        columns = {
            (what, source): self.inside(what, plan, source).tolist()
            for what in INSIDE
            for source in sources
        }
        return [
            {"layer": layer}
            | {what: columns[what, None][row] for what in INSIDE}
            | {
                "by_source": {
                    source: {what: columns[what, source][row] for what in INSIDE}
                    for source in self.sources
                }
            }
            for row, layer in enumerate(self.evaluation.layers)
        ]

    def _deltas(self, one: str, other: str) -> list[Json]:
        return [
            {"source": source, **self.delta(one, source, other)._asdict()}
            for source in (None, *self.sources)
        ]

    def _documents(self) -> Json:
        it = self.evaluation
        return {
            "id": list(it.corpus.documents),
            "source": it.document_sources.tolist(),
            "tokens": it.tokens.tolist(),
            "nll": dict(zip(it.lanes, it.nll.tolist(), strict=True)),
            "kl": dict(zip(it.plans, it.kl.tolist(), strict=True)),
            "agree": dict(zip(it.plans, it.agree.tolist(), strict=True)),
        }
