"""What plans cost: the parent and every plan in one stream over held-out text.

Input: an opened checkpoint, a corpus, plans, bytes of memory. Output: an `Evaluation`, float64 sums
for each document. A plan's lane is the parent whose router can't choose what the plan drops: no
build is written, and the parent need not fit. With a folder, a run that was killed continues; any
memory gives the same bits. What the sums come to is in `reap.costs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from kimi_k3_mlx.errors import KimiError, UsageError
from kimi_k3_mlx.prune_plan import PrunePlan
from kimi_k3_mlx.reap.corpus import Corpus, CorpusSequence
from kimi_k3_mlx.reap.scripts import IMAGE
from kimi_k3_mlx.reap.sight import embedder_of
from kimi_k3_mlx.schema import Progress, silent
from kimi_k3_mlx.stream.budget import Batch
from kimi_k3_mlx.stream.engine import Lane, check_lanes, run_stream
from kimi_k3_mlx.stream.layers import Layers, open_layers
from kimi_k3_mlx.tensors.source import Source

Array = NDArray[np.float64]

PARENT = "parent"
PIECE = 1 << 24
"""Logits that are widened to float32 at once: 64 MiB, and a few copies of that."""

ENDS = ("kl", "agree")
INSIDE = ("cosine", "coverage")


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Sums over the tokens of each document; documents are the unit of every interval.

    Lanes are the parent, then the plans in order.
    """

    model: str
    """Fingerprint of the parent."""
    plans: dict[str, PrunePlan] = field(repr=False)
    corpus: Corpus = field(repr=False)
    document_sources: NDArray[np.int64] = field(repr=False)
    """Number of each document's source."""
    tokens: Array = field(repr=False)
    """Tokens that were predicted [documents]: not the first of a sequence, nor rows of pictures."""
    positions: Array = field(repr=False)
    """Tokens that went through the layers [documents]."""
    nll: Array = field(repr=False)
    """Nats, -Σ log p(next token) [lanes, documents]."""
    kl: Array = field(repr=False)
    """Nats, Σ KL(parent ‖ plan) over predictions [plans, documents]."""
    agree: Array = field(repr=False)
    """Predictions whose most likely token is the parent's [plans, documents]."""
    layers: tuple[int, ...]
    """MoE layers, counted from 0."""
    cosine: Array = field(repr=False)
    """Σ cos(y, parent's y), y = Σ g e before the latent norm [layers, plans, documents]."""
    coverage: Array = field(repr=False)
    """Σ of the gates of the parent's choice that the plan keeps, over all [layers, plans,
    documents]."""

    @property
    def lanes(self) -> tuple[str, ...]:
        """Names of parent and plans."""
        return (PARENT, *self.plans)


def evaluate(
    checkpoint: Source,
    corpus: Corpus,
    plans: Mapping[str, PrunePlan],
    *,
    memory: int,
    folder: Path | None = None,
    spill: bool = False,
    progress: Progress = silent,
) -> Evaluation:
    """Measure the parent and the plans on every sequence of the corpus.

    Low banks of graded plans are evaluated as if they had all their bits. Raises as `open_layers`,
    `embedder_of` and `run_stream` do, and UsageError for a corpus that predicts nothing.
    """
    if PARENT in plans:
        raise UsageError(f"a plan can't be called {PARENT!r}.", "rename its file.")
    if not any(n_predicted(sequence) for sequence in corpus.sequences):
        raise UsageError("the text has no sequence of two tokens: nothing is predicted.")
    layers = open_layers(checkpoint)
    lanes = [Lane(PARENT), *(Lane(name, plan) for name, plan in plans.items())]
    check_lanes(layers, lanes)
    embedder = embedder_of(checkpoint, corpus)
    observer = CostObserver(layers, corpus, list(plans.values()))
    run_stream(
        layers,
        [sequence.tokens for sequence in corpus.sequences],
        lanes,
        observer,
        memory=memory,
        folder=folder,
        fingerprint=f"compare {corpus.sha256}",
        spill=spill,
        embedder=embedder,
        progress=progress,
    )
    return by_document(checkpoint.id.headers_sha256, dict(plans), corpus, observer)


class CostObserver:
    """Adds up what each sequence costs; every sum is of one sequence, so no order matters."""

    def __init__(self, layers: Layers, corpus: Corpus, plans: list[PrunePlan]) -> None:
        args = layers.args
        self.layers = tuple(layer for layer in range(layers.n_layers) if args.is_moe(layer))
        self.n_plans, self.n_sequences = len(plans), len(corpus.sequences)
        self._corpus = corpus
        self._kept = {
            layer: mx.array(kept_mask(plans, layer, args.num_experts)) for layer in self.layers
        }
        self._parent: Any = None
        self._state: dict[str, Array] = {}
        self.sums: dict[str, Array] = {}

    def moe(
        self,
        layer: int,
        lane: int,
        batch: Batch,
        experts: mx.array,
        router_weights: mx.array,
        expert_output: mx.array,
    ) -> None:
        """Compare what the experts of a lane give with what the parent's do."""
        if not self.n_plans:
            return
        gates = batch.real(router_weights).astype(mx.float32)
        y = mix(gates, batch.real(expert_output))
        if lane == 0:
            self._parent = y
            kept = self._kept[layer][:, batch.real(experts)]
            shares = (kept * gates).sum(-1) / gates.sum(-1)
            for plan, share in enumerate(shares):
                self._add(f"{layer}.coverage", plan, batch, share, batch.lengths)
        else:
            self._add(f"{layer}.cosine", lane - 1, batch, cosine(y, self._parent), batch.lengths)
        self._done(lane)

    def logits(self, lane: int, batch: Batch, logits: mx.array) -> None:
        """Compare a lane's predictions with the text, and with the parent's."""
        flat = logits.reshape(-1, logits.shape[-1])
        if lane == 0:
            self._parent = flat
        has_next = predicting(batch, self._corpus)
        values = predictions(flat, None if lane == 0 else self._parent, batch, has_next)
        sizes = has_next.sum(1)
        self._add("nll", lane, batch, values[0], sizes)
        if lane:
            for name, value in zip(ENDS, values[1:], strict=True):
                self._add(name, lane - 1, batch, value, sizes)
        self._done(lane)

    def state(self) -> dict[str, NDArray[Any]]:
        """The sums of the layer that was just run."""
        state, self._state = self._state, {}
        return dict(state)

    def restore(self, arrays: dict[str, NDArray[Any]]) -> None:
        """Take the sums over all groups and layers."""
        self.sums = dict(arrays)

    def _add(
        self, name: str, row: int, batch: Batch, values: mx.array, sizes: NDArray[np.int64]
    ) -> None:
        """Sums of the batch's sequences, that have so many of the values each."""
        array = np.array(values).astype(np.float64)
        if not np.isfinite(array).all():
            raise KimiError(f"{name} of lane {row} is not a finite number.")
        n_rows = self.n_plans + (name == "nll")
        zeros = np.zeros((n_rows, self.n_sequences))
        into = self._state.setdefault(name, zeros)
        owners = np.repeat(np.array(batch.indices), sizes)
        into[row] += np.bincount(owners, array, minlength=self.n_sequences)

    def _done(self, lane: int) -> None:
        """Let go of the parent's values after the last lane."""
        if lane == self.n_plans:
            self._parent = None


def kept_mask(plans: list[PrunePlan], layer: int, n_experts: int) -> NDArray[np.bool_]:
    """Which experts of a layer stay under each plan [plans, experts]."""
    kept = np.zeros((len(plans), n_experts), np.bool_)
    for row, plan in zip(kept, plans, strict=True):
        row[list(plan.layers[layer].keep)] = True
    return kept


def mix(gates: mx.array, outputs: mx.array) -> mx.array:
    """y = Σ g e [n, latent] in float32, of gates [n, k] and outputs [n, k, latent]."""
    y = (gates[:, None] @ outputs.astype(mx.float32))[:, 0]
    mx.eval(y)
    return y


def cosine(one: mx.array, other: mx.array) -> mx.array:
    """Cosines [n] of rows; a row of zeros has the cosine 0 with anything."""
    norms = mx.linalg.norm(one, axis=-1) * mx.linalg.norm(other, axis=-1)
    return (one * other).sum(-1) / mx.maximum(norms, mx.finfo(mx.float32).smallest_normal)


def predicting(batch: Batch, corpus: Corpus) -> NDArray[np.bool_]:
    """Which of [B, T] have a next token to predict: one that is no row of a picture."""
    has_next = followed(batch)
    for row, index in zip(has_next, batch.indices, strict=True):
        scripts = corpus.sequences[index].scripts
        row[: len(scripts) - 1] &= scripts[1:] != IMAGE
    return has_next


def followed(batch: Batch) -> NDArray[np.bool_]:
    """Which of [B, T] have a next token."""
    has_next = np.zeros(batch.mask.shape, np.bool_)
    has_next[:, :-1] = batch.mask[:, 1:]
    return has_next


def n_predicted(sequence: CorpusSequence) -> int:
    """Tokens of a sequence that are predicted."""
    return int(np.count_nonzero(sequence.scripts[1:] != IMAGE))


def predictions(
    flat: mx.array,
    parent: mx.array | None,
    batch: Batch,
    has_next: NDArray[np.bool_] | None = None,
) -> list[mx.array]:
    """-log p(next), and with a parent KL and agreement, of every token that has a next one.

    flat, parent [B·T, vocabulary]; has_next [B, T], or all that are followed by a token; the values
    [n] go sequence after sequence. Only `PIECE` logits are widened at once.
    """
    has_next = followed(batch) if has_next is None else has_next
    places = np.flatnonzero(has_next)
    targets = batch.ids.ravel()[places + 1]
    rows = max(1, PIECE // flat.shape[-1])
    parts: list[list[mx.array]] = []
    for begin in range(0, len(places), rows):
        where = mx.array(places[begin : begin + rows])
        own = None if parent is None else parent[where]
        part = costs(flat[where], own, mx.array(targets[begin : begin + rows]))
        mx.eval(part)
        parts.append(part)
    n_values = 1 if parent is None else 1 + len(ENDS)
    if not parts:
        return [mx.zeros(0)] * n_values
    return [mx.concatenate(list(values)) for values in zip(*parts, strict=True)]


def costs(logits: mx.array, parent: mx.array | None, targets: mx.array) -> list[mx.array]:
    """-log p(target), and with a parent KL(parent ‖ this) and whether the best token is the same.

    logits, parent [n, vocabulary], targets [n]; in float32, so KL is good to about 1e-6 nats.
    """
    own = log_softmax(logits)
    nll = -mx.take_along_axis(own, targets[:, None], -1)[:, 0]
    if parent is None:
        return [nll]
    other = log_softmax(parent)
    kl = (mx.exp(other) * (other - own)).sum(-1)
    return [nll, kl, (own.argmax(-1) == other.argmax(-1)).astype(mx.float32)]


def log_softmax(logits: mx.array) -> mx.array:
    """log p [n, vocabulary] in float32."""
    wide = logits.astype(mx.float32)
    wide = wide - wide.max(-1, keepdims=True)  # a large logsumexp would round off what differs
    return wide - mx.logsumexp(wide, -1, keepdims=True)


def by_document(
    model: str, plans: dict[str, PrunePlan], corpus: Corpus, observer: CostObserver
) -> Evaluation:
    """The sums of sequences, added up to documents."""
    owners = np.array([sequence.document for sequence in corpus.sequences])
    sources = np.zeros(len(corpus.documents), np.int64)
    sources[owners] = [sequence.source for sequence in corpus.sequences]
    sums, n_rows = observer.sums, {"nll": len(plans) + 1}

    def added(name: str) -> Array:
        rows = sums.get(name, np.zeros((n_rows.get(name, len(plans)), len(owners))))
        total = np.zeros((len(rows), len(sources)))
        for row, values in zip(total, rows, strict=True):
            np.add.at(row, owners, values)
        return total

    def stacked(name: str) -> Array:
        return np.stack([added(f"{layer}.{name}") for layer in observer.layers])

    lengths = corpus.lengths.astype(np.float64)
    n_targets = list(map(n_predicted, corpus.sequences))
    return Evaluation(
        model=model,
        plans=plans,
        corpus=corpus,
        document_sources=sources,
        tokens=np.bincount(owners, n_targets, len(sources)).astype(np.float64),
        positions=np.bincount(owners, lengths, len(sources)).astype(np.float64),
        nll=added("nll"),
        kl=added("kl"),
        agree=added("agree"),
        layers=observer.layers,
        cosine=stacked("cosine"),
        coverage=stacked("coverage"),
    )
