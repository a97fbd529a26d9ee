"""How the work is divided: sequences into micro-batches, and these into groups that fit in memory.

Input: token ids, a model's sizes, a number of bytes. Output: `Batch`es and groups of them. The
micro-batches depend on the sequences alone, so that no memory budget changes what is computed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

import kimi_k3
from kimi_k3_mlx.errors import DoesNotFitError, UsageError
from kimi_k3_mlx.stream.layers import Layers
from kimi_k3_mlx.units import format_bytes

MICRO_TOKENS = 2048
"""Tokens of a micro-batch, padding included; a longer sequence has one to itself."""

FILL = 0


@dataclass(frozen=True, eq=False)
class Batch:
    """Sequences that go through a layer together."""

    indices: tuple[int, ...]
    """Their places in the corpus, one a row."""
    ids: NDArray[np.int32] = field(repr=False)
    """Token ids [B, T], rows filled up on the right."""
    lengths: NDArray[np.int64] = field(repr=False)
    """Real tokens of every row."""

    @property
    def size(self) -> int:
        """Tokens, padding included."""
        return self.ids.size

    @cached_property
    def mask(self) -> NDArray[np.bool_]:
        """Which of [B, T] are real tokens."""
        mask: NDArray[np.bool_] = np.arange(self.ids.shape[1]) < self.lengths[:, None]
        return mask

    @cached_property
    def _places(self) -> Any:
        return mx.array(np.flatnonzero(self.mask))

    def real(self, array: mx.array) -> mx.array:
        """The real tokens' rows [n, …] of [B, T, …], sequence after sequence."""
        flat = array.reshape(-1, *array.shape[2:])
        return flat if self.mask.all() else flat[self._places]


Group = tuple[Batch, ...]


def make_batches(sequences: Sequence[NDArray[Any]], micro_tokens: int) -> list[Batch]:
    """Micro-batches of sequences of similar length, the longest first.

    Raises UsageError, naming the sequence, for one that is empty or not a row of token ids.
    """
    lengths = [_checked(index, ids) for index, ids in enumerate(sequences)]
    order = sorted(range(len(sequences)), key=lambda index: (-lengths[index], index))
    batches, start = [], 0
    while start < len(order):
        rows = max(1, micro_tokens // lengths[order[start]])
        batches.append(_batch(sequences, order[start : start + rows]))
        start += rows
    return batches


def _checked(index: int, ids: NDArray[Any]) -> int:
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise UsageError(f"sequence {index} is not a row of token ids: {ids.dtype} {ids.shape}.")
    if not len(ids):
        raise UsageError(f"sequence {index} has no tokens.")
    return len(ids)


def _batch(sequences: Sequence[NDArray[Any]], indices: list[int]) -> Batch:
    lengths = np.array([len(sequences[index]) for index in indices])
    ids = np.full((len(indices), lengths[0]), FILL, np.int32)
    for row, index in enumerate(indices):
        ids[row, : lengths[row]] = sequences[index]
    return Batch(tuple(indices), ids, lengths)


def check_ids(sequences: Sequence[NDArray[Any]], vocabulary: int) -> None:
    """Raise UsageError, naming sequence and id, for an id that the model doesn't know."""
    for index, ids in enumerate(sequences):
        for outside in (ids.min(), ids.max()):
            if not 0 <= outside < vocabulary:
                raise UsageError(
                    f"sequence {index} has the token id {outside}; the model has {vocabulary}."
                )


def sequences_sha256(sequences: Sequence[NDArray[Any]]) -> str:
    """Identity of a corpus: the ids and where sequences end."""
    digest = hashlib.sha256()
    for ids in sequences:
        digest.update(len(ids).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(ids, np.int32).tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Budget:
    """What of a stream takes memory, in bytes."""

    layers: int
    """A layer and the one that is being read, or an end of the model."""
    work: int
    """What is alive while a micro-batch goes through a layer or the head."""
    per_token: int
    """What all lanes keep of a token between layers."""

    @property
    def fixed(self) -> int:
        """What doesn't depend on the size of a group."""
        return self.layers + self.work


def make_budget(layers: Layers, batches: Sequence[Batch], n_lanes: int) -> Budget:
    """The memory of streaming these micro-batches."""
    args = layers.args
    n_blocks = -(-args.num_hidden_layers // args.attn_res_block_size)
    wide = _is_float32(layers)
    per_token = (n_blocks + 1) * args.hidden_size * (4 if wide else 2) + 4 * n_blocks
    held = max(2 * layers.largest, layers.n_bytes_ends)
    work = max((work_bytes(args, batch, n_blocks) for batch in batches), default=0)
    return Budget(held, work + widened_bytes(layers), per_token * n_lanes)


def work_bytes(args: Any, batch: Batch, n_blocks: int) -> int:
    """About what is alive at once in the costliest part of a layer, or in the head.

    The factors are measured: tests/stream/test_memory.py finds one that is too small.
    """
    width = 2 if kimi_k3.on_gpu() else 4
    hidden, heads, inner = args.hidden_size, args.num_attention_heads, args.moe_intermediate_size
    latent, length = args.routed_expert_hidden_size or hidden, batch.ids.shape[1]
    linear = args.linear_attn_config["num_heads"] * args.linear_attn_config["head_dim"]
    query_block = min(length, kimi_k3.QUERY_BLOCK)
    parts = (
        args.num_experts_per_token * (width * (5 * inner + 3 * latent) + 4 * latent),
        heads * (width * 6 * (args.qk_nope_head_dim + args.v_head_dim) + 16 * query_block),
        28 * 4 * linear,
        6 * width * args.intermediate_size,
        (2 * width + 8) * args.vocab_size,
    )
    # A new block copies the stack; the CPU mixes it in float32.
    mixing = (n_blocks + 1) * hidden * (4 if kimi_k3.on_gpu() else 14)
    return int(batch.size * (max(parts) + mixing))


def widened_bytes(layers: Layers) -> int:
    """On the CPU, products in float32 take a copy of a BF16 matrix: bytes of the largest one's."""
    if kimi_k3.on_gpu():
        return 0
    every = [tensor for tensors in layers.tensors.values() for tensor in tensors]
    largest = max((t.n_bytes for t in every if t.dtype == "BF16"), default=0)
    return 2 * max(largest, layers.n_bytes_ends)


def make_groups(batches: Sequence[Batch], budget: Budget, memory: int, spill: bool) -> list[Group]:
    """Consecutive micro-batches whose activations fit; with `spill`, all of them are one group.

    Raises DoesNotFitError, with the least memory that would do.
    """
    largest = max((batch.size for batch in batches), default=0)
    least = budget.fixed + budget.per_token * largest
    if memory < least:
        raise DoesNotFitError(
            f"the stream needs {format_bytes(least)} of memory at least, it may use "
            f"{format_bytes(memory)}: {format_bytes(budget.layers)} for two layers, "
            f"{format_bytes(least - budget.layers)} for {largest:,} tokens.",
            f"allow it {least:,} bytes or more, or use shorter sequences.",
        )
    room = memory - budget.fixed
    return [tuple(batches)] if spill and batches else list(_packed(batches, budget, room))


def _packed(batches: Sequence[Batch], budget: Budget, room: int) -> Iterator[Group]:
    group: list[Batch] = []
    n_bytes = 0
    for batch in batches:
        needed = batch.size * budget.per_token
        if group and n_bytes + needed > room:
            yield tuple(group)
            group, n_bytes = [], 0
        group.append(batch)
        n_bytes += needed
    if group:
        yield tuple(group)


def _is_float32(layers: Layers) -> bool:
    """Whether activations are float32, as the embedding's rows are."""
    name = "language_model.model.embed_tokens."
    infos = layers.checkpoint.tensors
    values = infos.get(f"{name}scales") or infos[f"{name}weight"]
    return values.dtype == "F32"
