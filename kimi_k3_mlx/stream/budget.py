"""How the work is divided: sequences into micro-batches, and these into groups that fit in memory.

Input: token ids, a model's sizes, a number of bytes. Output: `Batch`es and groups of them. The
micro-batches depend on the sequences alone, so that no memory budget changes what is computed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

import kimi_k3
from kimi_k3_mlx.errors import DoesNotFitError, UsageError
from kimi_k3_mlx.stream.blocks import expert_bytes, rest_tensors
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
    """What is in use of the model and what is being read, or an end of it."""
    work: int
    """What is alive while a micro-batch goes through a layer or the head."""
    per_token: int
    """What all lanes keep of a token."""
    n_block: int = 0
    """Routed experts that are read at once; 0: layers are read whole."""

    @property
    def fixed(self) -> int:
        """What doesn't depend on the size of a group."""
        return self.layers + self.work

    def least(self, batches: Sequence[Batch]) -> int:
        """Bytes that will do for groups of one micro-batch."""
        return self.fixed + self.per_token * max((batch.size for batch in batches), default=0)

    def tokens(self, memory: int) -> int:
        """How many tokens a group may have."""
        return (memory - self.fixed) // self.per_token


def choose_budget(
    layers: Layers, batches: Sequence[Batch], n_lanes: int, memory: int, spill: bool
) -> Budget:
    """Whole layers, or with their experts in blocks: if two layers don't fit, or leave room for so
    few tokens that blocks allow groups of more than twice as many.

    Blocks get a quarter of what is free: larger ones save nothing, more tokens save reading.
    """
    whole = make_budget(layers, batches, n_lanes)
    expert = max(expert_bytes(layers, number) for number in layers.tensors)
    if not expert:
        return whole
    least = in_blocks(whole, layers, n_lanes, 1)
    if (free := memory - least.least(batches)) < 0:
        return min(whole, least, key=lambda budget: budget.least(batches))
    n_block = min(1 + free // 4 // (2 * expert), layers.args.num_experts)
    blocks = in_blocks(whole, layers, n_lanes, n_block)
    if whole.least(batches) > memory:
        return blocks
    wanted = min(blocks.tokens(memory), sum(batch.size for batch in batches))
    return blocks if not spill and 2 * whole.tokens(memory) < wanted else whole


def in_blocks(whole: Budget, layers: Layers, n_lanes: int, n_block: int) -> Budget:
    """The budget of reading so many experts at once."""
    numbers = layers.tensors
    rest = max(sum(t.n_bytes for t in rest_tensors(layers, number)) for number in numbers)
    block = n_block * max(expert_bytes(layers, number) for number in numbers)
    held = max(rest + block + max(rest, block), layers.n_bytes_ends)
    per_token = whole.per_token + n_lanes * waiting_bytes(layers)
    return replace(whole, layers=held, per_token=per_token, n_block=n_block)


def waiting_bytes(layers: Layers) -> int:
    """What of a token waits in a layer for the experts: their outputs, z, x, prefix, routing."""
    args, wide = layers.args, _is_float32(layers)
    hidden, top_k = args.hidden_size, args.num_experts_per_token
    latent = args.routed_expert_hidden_size or hidden
    width = 2 if kimi_k3.on_gpu() and not wide else 4
    vectors = (top_k + 1) * latent + hidden
    return int(width * vectors + (4 if wide else 2) * hidden + 24 * top_k + 4 * args.num_experts)


def make_budget(layers: Layers, batches: Sequence[Batch], n_lanes: int) -> Budget:
    """The memory of streaming these micro-batches through whole layers."""
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
    least = budget.least(batches)
    if memory < least:
        largest = max(batch.size for batch in batches)
        what = "one expert at a time" if budget.n_block else "two layers or the embedding"
        raise DoesNotFitError(
            f"the stream needs {format_bytes(least)} of memory at least, it may use "
            f"{format_bytes(memory)}: {format_bytes(budget.layers)} for {what}, "
            f"{format_bytes(least - budget.layers)} for {largest:,} tokens.",
            f"allow it {least:,} bytes or more, or use shorter sequences.",
        )
    room = memory - budget.fixed
    return [tuple(batches)] if spill and batches else list(packed(batches, budget, room))


def packed(batches: Sequence[Batch], budget: Budget, room: int) -> Iterator[Group]:
    """Consecutive micro-batches, as many at a time as the bytes of `room` hold."""
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
