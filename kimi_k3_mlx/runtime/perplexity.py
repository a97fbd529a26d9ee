"""The perplexity of a build that fits in memory, by source, with intervals over documents.

Input: a loaded build, a corpus. Output: JSON values. Tokens, sums and intervals are those of
`reap.compare`, so that a build of the parent gives the parent's numbers; a model that does not fit
is measured there, one layer at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np
from mlx_lm.generate import wired_limit

from kimi_k3_mlx.errors import KimiError, UsageError
from kimi_k3_mlx.reap.compare import Array, predictions
from kimi_k3_mlx.reap.corpus import Corpus
from kimi_k3_mlx.reap.intervals import FEW, LEVEL, RESAMPLES, resample
from kimi_k3_mlx.runtime.generate import eager_on_cpu
from kimi_k3_mlx.runtime.load import Loaded
from kimi_k3_mlx.schema import Json
from kimi_k3_mlx.stream.budget import MICRO_TOKENS, Batch, make_batches

COLUMNS = np.eye(2)
"""Of the sums of a document: predicted tokens, nats."""


def measure(build: Loaded, corpus: Corpus, on_tokens: Callable[[int], object] = int) -> Array:
    """Nats, -Σ log p(next token) in float64, of each sequence; the first token is not predicted.

    `on_tokens` gets how many tokens have gone through. Raises UsageError for a corpus that predicts
    nothing, and KimiError for logits that are no numbers.
    """
    sequences = [sequence.tokens for sequence in corpus.sequences]
    if not any(len(tokens) > 1 for tokens in sequences):
        raise UsageError("the text has no sequence of two tokens: nothing is predicted.")
    nats = np.zeros(len(sequences))
    done = 0
    with eager_on_cpu(), wired_limit(build.model):
        for batch in make_batches(sequences, MICRO_TOKENS):
            nats += batch_nats(build, batch, len(sequences))
            done += int(batch.lengths.sum())
            on_tokens(done)
    return nats


def batch_nats(build: Loaded, batch: Batch, n_sequences: int) -> Array:
    """Nats of a batch's sequences, zero for all others. Rows are padded on the right, where no real
    token sees the padding."""
    logits = build.model(mx.array(batch.ids))
    (values,) = predictions(logits.reshape(-1, logits.shape[-1]), None, batch)
    array = np.array(values).astype(np.float64)
    if not np.isfinite(array).all():
        raise KimiError("a logit is not a finite number.", "kimi-k3 verify looks for damage.")
    owners = np.repeat(np.array(batch.indices), batch.lengths - 1)
    return np.asarray(np.bincount(owners, array, minlength=n_sequences), np.float64)


def summary(corpus: Corpus, nats: Array, *, resamples: int = RESAMPLES, seed: int = 0) -> Json:
    """Perplexity of each source and of all text (null), drawn again by document."""
    owners = np.array([sequence.document for sequence in corpus.sequences])
    sources = np.zeros(len(corpus.documents), np.int64)
    sources[owners] = [sequence.source for sequence in corpus.sequences]
    sums = np.zeros((len(corpus.documents), 2))
    np.add.at(sums, owners, np.stack([corpus.lengths - 1.0, nats], axis=1))
    predicted = sums[:, 0] > 0
    drawn = resample(
        sums[predicted], sources[predicted], len(corpus.sources), resamples=resamples, seed=seed
    )
    rows: list[Json] = [
        {
            "source": name,
            "documents": int(drawn.n_documents[group]),
            "tokens": int(drawn.sums[group, 0]),
            "perplexity": drawn.ratio(group, COLUMNS[1], COLUMNS[0]).map(np.exp)._asdict(),
        }
        for group, name in ((-1, None), *enumerate(corpus.sources))
        if drawn.sums[group, 0]
    ]
    return {
        "version": 1,
        "corpus": corpus.to_json(),
        "intervals": {"level": LEVEL, "resamples": resamples, "seed": seed},
        "few_documents": [row["source"] for row in rows[1:] if row["documents"] < FEW],
        "rows": rows,
    }
