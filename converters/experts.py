"""The only place where experts are selected, stacked or renumbered, and the router with them.

Input: tensor descriptions and `keep`, the original numbers of the experts that stay, in their new
order: an expert's new number is its place in `keep`. Output: `BuildTensor`s made of ranges.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from converters.dense import PAD_BIAS, PAD_ZEROS, copied, quantized, whole
from converters.mxfp4 import mlx_shape
from converters.names import Entry
from kimi_k3_mlx.errors import UsageError
from kimi_k3_mlx.schema import BuildTensor, Quantization, Span, TensorInfo

REQUANTIZE = "requantize"


def stacked(
    name: str, tensors: Sequence[TensorInfo], keep: Sequence[int], count: int | None = None
) -> BuildTensor:
    """One matrix of the kept experts, `[out, …]` each, as `[kept, out, …]`.

    `tensors` holds that matrix of every expert by number. Packed bytes become 32-bit words. With
    `count` more than `keep` has, zeros follow.
    """
    first = tensors[0]
    is_packed = first.name.endswith("weight_packed")
    dtype, inner = ("U32", mlx_shape(first.shape)) if is_packed else (first.dtype, first.shape)
    spans = tuple(whole(tensors[expert]) for expert in keep)
    count = count or len(keep)
    transform = PAD_ZEROS if count > len(keep) else None
    return BuildTensor(name, dtype, (count, *inner), "expert", spans, transform)


def requantized(
    module: str,
    packed: Sequence[TensorInfo],
    scales: Sequence[TensorInfo],
    keep: Sequence[int],
    quantization: Quantization,
    count: int | None = None,
) -> list[BuildTensor]:
    """`weight`, `scales`, `biases` of one matrix of the kept experts, in fewer bits.

    The spans are codes and scales of one expert after the other.
    """
    out, n_bytes = packed[0].shape
    if 2 * n_bytes % quantization.group_size:
        raise UsageError(
            f"experts have rows of {2 * n_bytes}, which groups of {quantization.group_size} "
            "don't divide: they can't be requantized so.",
            "choose a smaller group_size.",
        )
    spans = tuple(whole(part[expert]) for expert in keep for part in (packed, scales))
    shape = (count or len(keep), out, 2 * n_bytes)
    weight = BuildTensor(f"{module}.weight", "BF16", shape, "expert", spans, REQUANTIZE)
    return quantized(weight, quantization)


def renumbered(
    entry: Entry, layer: int, tensors: Sequence[TensorInfo], keep: Sequence[int]
) -> Iterator[BuildTensor]:
    """One matrix of each kept expert under the source's name for its new number."""
    for number, expert in enumerate(keep):
        yield copied(entry.source.format(layer, number), "expert", tensors[expert])


def kept_rows(
    name: str, role: str, tensor: TensorInfo, keep: Sequence[int], count: int | None = None
) -> BuildTensor:
    """The kept experts' rows of the router's weight or bias, in the experts' new order.

    With `count` more than `keep` has, rows of experts follow that are never chosen.
    """
    row = tensor.n_bytes // tensor.shape[0]
    spans = tuple(
        Span(tensor.name, begin * row, end * row) for begin, end in consecutive_runs(keep)
    )
    count = count or len(keep)
    pad = PAD_BIAS if name.endswith("e_score_correction_bias") else PAD_ZEROS
    transform = pad if count > len(keep) else None
    return BuildTensor(name, tensor.dtype, (count, *tensor.shape[1:]), role, spans, transform)


def consecutive_runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Half-open runs of consecutive numbers: 0 1 2 5 6 → (0, 3) (5, 7)."""
    begin = end = numbers[0]
    for number in numbers:
        if number != end:
            yield begin, end
            begin = number
        end = number + 1
    yield begin, end
