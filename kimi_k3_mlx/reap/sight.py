"""Puts the features of a corpus's pictures where their placeholders are, before the first layer.

Input: an opened checkpoint and a corpus. Output: what the stream embeds its groups with. Pictures
go through the checkpoint's own tower one after the other, so that no grouping changes a bit; what
is held at once is the tower, one picture, and the features of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np

from kimi_k3_mlx.errors import CheckpointError, UsageError
from kimi_k3_mlx.reap.corpus import Corpus
from kimi_k3_mlx.reap.pictures import CorpusPicture
from kimi_k3_mlx.reap.scripts import IMAGE
from kimi_k3_mlx.stream.budget import Batch, Group
from kimi_k3_mlx.stream.engine import Embedder
from kimi_k3_mlx.stream.layers import Layers
from kimi_k3_mlx.tensors.source import Source
from kimi_k3_mlx.vision.tower import load_tower, read_rules, tower_tensors
from kimi_k3_vision import SCORES, Vision, VisionArgs, on_gpu


def embedder_of(checkpoint: Source, corpus: Corpus) -> Embedder:
    """What embeds the corpus, once it is checked that its placeholders are its pictures' rows.

    Raises UsageError or CheckpointError, naming the document, when they are not, or when the
    checkpoint can't see what the corpus shows.
    """
    placeholder = checkpoint.config.get("media_placeholder_token_id", -1)
    for sequence in corpus.sequences:
        document, pictured = corpus.documents[sequence.document], sequence.scripts == IMAGE
        for place in np.flatnonzero((sequence.tokens == placeholder) != pictured):
            if pictured[place]:
                raise CheckpointError(
                    f"{document}: the placeholder of its images is {sequence.tokens[place]}; "
                    f"config.json of {checkpoint.where} says {placeholder}.",
                    "use the tokenizer of the checkpoint.",
                )
            raise UsageError(
                f"{document} has the placeholder {placeholder} of an image, and no image for it.",
                "write messages with parts of type image, not tokens.",
            )
    pictures = {picture for sequence in corpus.sequences for picture in sequence.pictures}
    return Sight(checkpoint, corpus, pictures) if pictures else Embedder()


class Sight(Embedder):
    """Embeds tokens, and pictures by the checkpoint's tower."""

    def __init__(self, checkpoint: Source, corpus: Corpus, pictures: set[CorpusPicture]) -> None:
        self._checkpoint, self._sequences = checkpoint, corpus.sequences
        self._rules = read_rules(checkpoint)
        for it in pictures:
            if it.n_rows != (n_rows := self._rules.n_tokens(it.width, it.height)):
                raise UsageError(
                    f"an image of {it.width} x {it.height} pixels has {it.n_rows:,} tokens in the "
                    f"corpus, {n_rows:,} by the rules of {checkpoint.where}.",
                    "read the corpus with the rules of the checkpoint.",
                )
        self.n_bytes = self._needed(max(picture.n_rows for picture in pictures))

    def __call__(self, layers: Layers, group: Group) -> Iterator[mx.array]:
        tower: Vision | None = None
        for batch in group:
            pictured = self._pictured(batch)
            # A placeholder is never looked up: it may lie outside the table.
            embedded = layers.embed(mx.array(np.where(pictured, 0, batch.ids)))
            if pictured.any():
                tower = tower or load_tower(self._checkpoint)
                places = tuple(mx.array(axis) for axis in pictured.nonzero())
                embedded[places] = self._features(tower, batch).astype(embedded.dtype)
            yield embedded

    def _pictured(self, batch: Batch) -> np.ndarray:
        """Which of [B, T] are rows of pictures."""
        pictured = np.zeros(batch.ids.shape, np.bool_)
        for row, index in zip(pictured, batch.indices, strict=True):
            scripts = self._sequences[index].scripts
            row[: len(scripts)] = scripts == IMAGE
        return pictured

    def _features(self, tower: Vision, batch: Batch) -> mx.array:
        """Rows [n, hidden] of the batch's pictures, evaluated one by one."""
        rows = []
        for index in batch.indices:
            for picture in self._sequences[index].pictures:
                image = picture.image()
                patches = mx.array(self._rules.patches(image))
                rows += tower.see(patches, [self._rules.grid(*image.size)])
                mx.clear_cache()
        return mx.concatenate(rows)

    def _needed(self, n_rows: int) -> int:
        """About what the tower takes, and the widest part of its layers for so many rows.

        The factors are measured: tests/reap/test_sight_memory.py finds them if they are too small.
        """
        args = VisionArgs.from_dict(self._checkpoint.config["vision_config"])
        weights = sum(tensor.n_bytes for tensor in tower_tensors(self._checkpoint))
        n_patches = 4 * n_rows
        wide = 4 * args.vt_hidden_size + 10 * args.qkv_hidden_size + 4 * args.vt_intermediate_size
        # Where attention is not fused, MLX has the scores of all blocks of queries at once.
        scores = args.vt_num_attention_heads * n_patches**2
        scores = 0 if on_gpu() else 4 * (scores + min(SCORES, scores))
        # Products in float32 take copies of the projector's matrices.
        widened = 2 * 4 * (4 * args.mm_hidden_size) ** 2
        return int(weights + 4 * n_patches * (wide + 2 * 3 * args.patch_size**2) + scores + widened)
