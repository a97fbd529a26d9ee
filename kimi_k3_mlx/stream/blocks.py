"""Routed experts some at a time, for memory that two whole layers don't fit in.

Input: `Layers`, and how many experts may be in memory at once. Output: `kimi_k3`'s own decoder
layers without their experts, and these in `Block`s of consecutive ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice, pairwise
from typing import Any, NamedTuple

import kimi_k3
from kimi_k3_mlx.errors import CheckpointError
from kimi_k3_mlx.schema import BuildTensor, Span
from kimi_k3_mlx.stream.layers import LAYER, Layers, Memory, Tensors

BANKS = ("switch_mlp", "switch_mlp_low")


class Block(NamedTuple):
    """Consecutive experts of a layer."""

    first: int
    """The layer's number of its first expert."""
    size: int
    experts: Any
    """A `kimi_k3.Experts`."""


Blocks = Callable[[], Iterable[Block]]
"""Gives the blocks of a layer, for one round of passes; they must all be taken."""


class Piece(NamedTuple):
    """What is read at once: a layer without its experts, or some of these."""

    layer: int
    tensors: Tensors
    bank: str = ""
    first: int = 0
    size: int = 0


def stream_in_blocks(
    layers: Layers, numbers: Sequence[int], size: int, n_rounds: int
) -> Iterator[tuple[int, Any, Blocks]]:
    """The layers without experts, and their blocks, `size` experts each, once for every round.

    While one piece is in use, the next one is read.
    """
    pieces = (
        piece
        for number in numbers
        for blocks in [block_pieces(layers, number, size)]
        for piece in (Piece(number, rest_tensors(layers, number)), *blocks * n_rounds)
    )
    arriving = layers.read((piece, piece.tensors) for piece in pieces)
    loaded = (_loaded(layers, *arrived) for arrived in arriving)
    for number in numbers:
        n_blocks = sum(-(-n // size) for n in bank_sizes(layers.args, number))
        yield number, next(loaded), partial(islice, loaded, n_blocks)


def _loaded(layers: Layers, piece: Piece, memory: Memory) -> Any:
    if not piece.bank:
        return layers.decoder_layer(piece.layer, memory, without=BANKS)
    args = layers.args
    latent = args.routed_expert_hidden_size or args.hidden_size
    experts = kimi_k3.Experts(args, latent, piece.size)
    prefix = f"{LAYER}{piece.layer}.mlp.{piece.bank}."
    return Block(piece.first, piece.size, layers.loaded(experts, prefix, memory))


def rest_tensors(layers: Layers, number: int) -> Tensors:
    """A layer's tensors without its routed experts."""
    return [tensor for tensor in layers.tensors[number] if not _bank(tensor)]


def expert_bytes(layers: Layers, number: int) -> int:
    """Bytes of the layer's largest routed expert; 0 in a dense layer."""
    sizes = dict.fromkeys(BANKS, 0)
    for tensor in layers.tensors[number]:
        if bank := _bank(tensor):
            sizes[bank] += tensor.n_bytes // tensor.shape[0]
    return max(sizes.values())


def bank_sizes(args: Any, number: int) -> tuple[int, int]:
    """How many routed experts each bank of a layer holds."""
    if not args.is_moe(number):
        return 0, 0
    n_low = args.low_experts_in(number)
    return args.experts_in(number) - n_low, n_low


def block_pieces(layers: Layers, number: int, size: int) -> list[Piece]:
    """The experts of a layer, `size` at a time, none for a dense layer."""
    sizes = bank_sizes(layers.args, number)
    pieces = []
    for bank, start, n in zip(BANKS, (0, sizes[0]), sizes, strict=True):
        tensors = [tensor for tensor in layers.tensors[number] if _bank(tensor) == bank]
        for tensor in tensors:
            if tensor.shape[0] != n:
                raise CheckpointError(
                    f"tensor {tensor.name} holds {tensor.shape[0]} experts, the config says {n}."
                )
        for begin, end in pairwise([*range(0, n, size), n]):
            some = [rows_of(tensor, begin, end) for tensor in tensors]
            pieces.append(Piece(number, some, bank, start + begin, end - begin))
    return pieces


def rows_of(tensor: BuildTensor, begin: int, end: int) -> BuildTensor:
    """The part of a tensor with these places on its first axis."""
    row = tensor.n_bytes // tensor.shape[0]
    first, last = begin * row, end * row
    spans, at = [], 0
    for span in tensor.spans:
        low, high = max(first - at, 0), min(last - at, span.n_bytes)
        if low < high:
            spans.append(Span(span.tensor, span.begin + low, span.begin + high))
        at += span.n_bytes
    return replace(tensor, shape=(end - begin, *tensor.shape[1:]), spans=tuple(spans))


def _bank(tensor: BuildTensor) -> str:
    """The bank of experts that a tensor belongs to, or none."""
    return next((bank for bank in BANKS if f".mlp.{bank}." in tensor.name), "")
