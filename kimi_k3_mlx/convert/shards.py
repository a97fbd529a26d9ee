"""Writes one planned shard: copies byte ranges, or computes a tensor a few rows at a time.

Input: the planned shard, a reader, an open writer. Output: the shard's bytes, and what was noticed
on the way: scales that are no number, and what rounding cost.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from converters.dense import PAD_ZEROS, apply_transform, unquantized
from converters.experts import REQUANTIZE
from converters.mxfp4 import count_nan_scales
from kimi_k3_mlx.errors import CheckpointError, KimiError
from kimi_k3_mlx.schema import (
    DTYPE_BYTES,
    NARROW,
    BuildTensor,
    PlannedShard,
    Quantization,
    ShardRecord,
    Span,
)
from kimi_k3_mlx.tensors.source import Reader, Source
from kimi_k3_mlx.tensors.writer import ShardWriter

if TYPE_CHECKING:
    from converters.affine import Quantized

ROWS_BYTES = 4 << 20
"""BF16 rows that are quantized at a time."""
ZEROS = bytes(1 << 20)

_NUMBER = re.compile(r"\.\d+(?=\.)")


class ShardJob:
    """One shard under way; `kept` says what an earlier run left of it."""

    def __init__(
        self,
        shard: PlannedShard,
        source: Source,
        reader: Reader,
        writer: ShardWriter,
        kept: ShardRecord,
    ) -> None:
        self._shard = shard
        self._source = source
        self._writer = writer
        self._n_kept = writer.n_bytes
        self._nan_scales = kept.nan_scales
        self._losses = {name: list(loss) for name, loss in kept.losses.items()}
        self._offsets = {info.name: shard.header_n_bytes + info.begin for info in shard.infos()}
        self._stream = reader.blocks(self._spans())

    def steps(self) -> Iterator[int]:
        """Write all that is not there yet; yields how many bytes, each time some were written."""
        for tensor, begin in self._remaining():
            if not tensor.spans:
                continue  # scales and biases come with their weight
            if tensor.quantization and tensor.transform == REQUANTIZE:
                yield from self._requantize(tensor, tensor.quantization)
            elif tensor.quantization:
                yield from self._quantize(tensor, tensor.quantization)
            elif tensor.transform in (None, PAD_ZEROS):
                yield from self._copy(tensor, begin)
            else:
                yield self._transform(tensor)
        if self._writer.n_bytes != self._shard.n_bytes:
            raise KimiError(
                f"{self._shard.name} came to {self._writer.n_bytes:,} bytes, "
                f"{self._shard.n_bytes:,} planned."
            )

    def record(self, n_bytes: int, sha256: str = "") -> ShardRecord:
        """What there is to keep of it, up to now."""
        losses = dict(sorted(self._losses.items()))
        return ShardRecord(self._shard.name, n_bytes, sha256, self._nan_scales, losses)

    def _remaining(self) -> Iterator[tuple[BuildTensor, int]]:
        """Tensors that are not whole yet, and how many of their bytes are there."""
        for tensor in self._shard.tensors:
            n_there = self._n_kept - self._offsets[tensor.name]
            if n_there < tensor.n_bytes or not tensor.n_bytes:
                yield tensor, max(0, n_there)

    def _spans(self) -> Iterator[Span]:
        for tensor, begin in self._remaining():
            for span in tensor.spans:
                n_skipped = min(begin, span.n_bytes)
                begin -= n_skipped
                if n_skipped < span.n_bytes:
                    yield span._replace(begin=span.begin + n_skipped)

    def _take(self, n_bytes: int) -> Iterator[memoryview]:
        """The next bytes of the stream, which end where a span ends."""
        while n_bytes > 0:
            block = next(self._stream)
            n_bytes -= len(block)
            yield block

    def _read(self, n_bytes: int) -> bytes:
        return b"".join(map(bytes, self._take(n_bytes)))

    def _write(self, offset: int, block: bytes | memoryview) -> int:
        self._writer.write_at(offset, block)
        return len(block)

    def _copy(self, tensor: BuildTensor, begin: int) -> Iterator[int]:
        counts = tensor.role == "expert" and tensor.name.endswith(("scales", "weight_scale"))
        position = self._offsets[tensor.name] + begin
        for block in self._take(tensor.n_read - begin):
            if counts:
                self._nan_scales += count_nan_scales(block)
            yield self._write(position, block)
            position += len(block)
        yield from self._pad(tensor, position)

    def _pad(self, tensor: BuildTensor, position: int) -> Iterator[int]:
        end = self._offsets[tensor.name] + tensor.n_bytes
        for begin in range(position, end, len(ZEROS)):
            yield self._write(begin, memoryview(ZEROS)[: end - begin])

    def _transform(self, tensor: BuildTensor) -> int:
        data = self._read(tensor.n_read)
        result = apply_transform(tensor, data)
        if tensor.transform == NARROW:
            wanted = np.frombuffer(data, np.float32)
            words = np.frombuffer(result, np.uint16).astype(np.uint32) << 16
            error = words.view(np.float32) - wanted
            self._lose(tensor, float(error @ error), float(wanted @ wanted))
        return self._write(self._offsets[tensor.name], result)

    def _quantize(self, tensor: BuildTensor, quantization: Quantization) -> Iterator[int]:
        from converters.affine import quantize

        dtype = self._source.tensors[tensor.spans[0].tensor].dtype
        matrix = unquantized(tensor, dtype)
        ends = self._ends(tensor)
        for rows in self._rows(matrix):
            result = quantize(rows, dtype, matrix.shape[-1], quantization)
            yield self._write_parts(tensor, ends, result)

    def _rows(self, matrix: BuildTensor) -> Iterator[bytes]:
        """A matrix some rows at a time; a transformed one is small and is read whole."""
        row = matrix.shape[-1] * DTYPE_BYTES[matrix.dtype]
        size = max(1, ROWS_BYTES // row) * row
        if matrix.transform:
            data = apply_transform(matrix, self._read(matrix.n_read))
            yield from (data[begin : begin + size] for begin in range(0, len(data), size))
            return
        rows = bytearray()
        for block in self._take(matrix.n_read):
            rows += block
            if len(rows) >= size:
                yield bytes(rows[:size])
                del rows[:size]
        if rows:
            yield bytes(rows)

    def _requantize(self, tensor: BuildTensor, quantization: Quantization) -> Iterator[int]:
        from converters.affine import requantize

        width = unquantized(tensor, "BF16").shape[-1]
        ends = self._ends(tensor)
        for packed, scale in zip(tensor.spans[::2], tensor.spans[1::2], strict=True):
            codes, exponents = self._read(packed.n_bytes), self._read(scale.n_bytes)
            if count_nan_scales(exponents):
                raise CheckpointError(
                    f"tensor {scale.tensor} has scales of 255, which is no number: "
                    "the expert can't be requantized.",
                    "prune that expert, or choose a profile that copies the experts.",
                )
            rows = max(1, ROWS_BYTES // (2 * width))
            for begin in range(0, len(exponents), rows * width // 32):
                some = exponents[begin : begin + rows * width // 32]
                theirs = codes[16 * begin : 16 * (begin + len(some))]
                result = requantize(theirs, some, width, quantization)
                yield self._write_parts(tensor, ends, result)
        for part in self._shard.tensors:
            if part.name in ends:
                yield from self._pad(part, ends[part.name])

    def _ends(self, tensor: BuildTensor) -> dict[str, int]:
        """Where the next bytes of `weight`, `scales` and `biases` go."""
        module = tensor.name.removesuffix("weight")
        names = (f"{module}{part}" for part in ("weight", "scales", "biases"))
        return {name: self._offsets[name] for name in names if name in self._offsets}

    def _write_parts(self, tensor: BuildTensor, ends: dict[str, int], result: Quantized) -> int:
        self._lose(tensor, result.squared_error, result.squared_norm)
        for name, part in zip(ends, result.parts, strict=True):
            ends[name] += self._write(ends[name], part)
        return sum(map(len, result.parts))

    def _lose(self, tensor: BuildTensor, squared_error: float, squared_norm: float) -> None:
        loss = self._losses.setdefault(loss_key(tensor), [0.0, 0.0])
        loss[0] += squared_error
        loss[1] += squared_norm


def loss_key(tensor: BuildTensor) -> str:
    """Under what a rounded tensor's loss is summed up: its pattern, and how it is stored."""
    return f"{pattern_of(tensor.name)}  {tensor.quantization or tensor.dtype}"


def pattern_of(name: str) -> str:
    """A tensor's name with `*` for its numbers: one for all layers."""
    return _NUMBER.sub(".*", name)
