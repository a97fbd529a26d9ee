"""The only place where experts are selected, stacked or renumbered, and the router with them.

Input: tensor descriptions and `keep`, the original numbers of the experts that stay, ascending: the
new number of an expert is its place in `keep`. Output: `BuildTensor`s made of ranges.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from converters.mxfp4 import mlx_shape
from kimi_k3_mlx.errors import UsageError
from kimi_k3_mlx.schema import BuildTensor, Span, TensorInfo


def check_keep(layer: int, keep: Sequence[int], n_experts: int, top_k: int) -> None:
    """Raise UsageError unless `keep` ascends without repeats, in range, and has top-k at least."""
    if len(keep) < top_k:
        raise UsageError(
            f"plan keeps {len(keep)} experts in layer {layer} "
            f"but the router selects {top_k} per token.",
            f"raise --keep to at least {top_k} ({4 * top_k} recommended).",
        )
    for before, expert in zip((-1, *keep), keep, strict=False):
        if expert <= before:
            raise UsageError(
                f"plan lists expert {expert} after {before} in layer {layer}: "
                "experts must ascend without repeats."
            )
        if expert >= n_experts:
            raise UsageError(
                f"plan keeps expert {expert} in layer {layer}, which has {n_experts} experts."
            )


def stacked(
    name: str, role: str, tensors: Sequence[TensorInfo], keep: Sequence[int]
) -> BuildTensor:
    """One matrix of the kept experts, `[out, …]` each, as `[kept, out, …]`.

    `tensors` holds that matrix of every expert by number. Packed bytes become 32-bit words.
    """
    first = tensors[0]
    is_packed = first.name.endswith("weight_packed")
    dtype, inner = ("U32", mlx_shape(first.shape)) if is_packed else (first.dtype, first.shape)
    spans = tuple(Span(tensors[expert].name, 0, tensors[expert].n_bytes) for expert in keep)
    return BuildTensor(name, dtype, (len(keep), *inner), role, spans)


def kept_rows(name: str, role: str, tensor: TensorInfo, keep: Sequence[int]) -> BuildTensor:
    """The kept experts' rows of the router's weight or bias, in the experts' new order."""
    row = tensor.n_bytes // tensor.shape[0]
    spans = tuple(
        Span(tensor.name, begin * row, end * row) for begin, end in consecutive_runs(keep)
    )
    return BuildTensor(name, tensor.dtype, (len(keep), *tensor.shape[1:]), role, spans)


def consecutive_runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Half-open runs of consecutive numbers: 0 1 2 5 6 → (0, 3) (5, 7)."""
    begin = end = numbers[0]
    for number in numbers:
        if number != end:
            yield begin, end
            begin = number
        end = number + 1
    yield begin, end
