"""Compares the tensors of a build with what a source has for them, shard by shard.

Input: an opened source and build, and the places of `naive`. Output: what was noticed on the way,
or MismatchError naming tensor, element and both values. Bytes must be equal; quantized values must
lie as close as honest rounding leaves them.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from converters.mxfp4 import count_nan_scales
from kimi_k3_mlx.convert.naive import Form, Place, element
from kimi_k3_mlx.convert.packing import Floats, Rows, decoded, least_cosine, widened
from kimi_k3_mlx.convert.shards import pattern_of
from kimi_k3_mlx.convert.wanted import AGAIN, Wanted
from kimi_k3_mlx.errors import MismatchError
from kimi_k3_mlx.schema import DTYPE_BYTES, Quantization, Span, TensorInfo
from kimi_k3_mlx.tensors.local import LocalReader, LocalSource
from kimi_k3_mlx.tensors.source import Reader

CHUNK_BYTES = 1 << 19
"""Rows of the source that are compared at a time, when the build has them quantized."""
NEVER = -1e29
"""A padding expert's bias must be lower: no token may choose it."""
ZEROS = bytes(1 << 20)


@dataclass(frozen=True)
class Rounded:
    """Quantized tensors: `name` has `*` for the numbers of layers."""

    name: str
    n_tensors: int
    stored_as: str
    cosine: float
    """The lowest of them."""
    error: float
    """‖ŵ−w‖ / ‖w‖ over all of them."""


class _Sums(NamedTuple):
    """Σŵw, Σŵ², Σw², Σ(ŵ−w)²."""

    product: float = 0.0
    found: float = 0.0
    wanted: float = 0.0
    error: float = 0.0

    def add(self, found: Floats, wanted: Floats) -> _Sums:
        ours, theirs = found.ravel(), wanted.ravel()
        error = ours - theirs
        pairs = ((ours, theirs), (ours, ours), (theirs, theirs), (error, error))
        return _Sums(*(a + float(x @ y) for a, (x, y) in zip(self, pairs, strict=True)))

    @property
    def cosine(self) -> float:
        """1 for two that are zero throughout."""
        norms = (self.found * self.wanted) ** 0.5
        return self.product / norms if norms else float(self.found == self.wanted)


class Comparison:
    """Reads the build's shards in file order, and what the source has for them in one stream."""

    def __init__(
        self,
        build: LocalSource,
        wanted: dict[str, Wanted],
        readers: tuple[Reader, LocalReader],
        advance: Callable[[int, str], None],
    ) -> None:
        self.nan_scales = 0
        self.narrowed = tuple(sorted({pattern_of(n) for n, t in wanted.items() if t.form.narrowed}))
        self._build = build
        self._tensors: dict[str, list[TensorInfo]] = defaultdict(list)
        for tensor in sorted(build.tensors.values(), key=lambda tensor: tensor.begin):
            self._tensors[build.weight_map[tensor.name]].append(tensor)
        self._wanted = wanted
        self._source, self._found = readers
        self._advance = advance
        self._rounded: dict[tuple[str, Quantization], list[_Sums]] = defaultdict(list)
        self._digest = hashlib.sha256()
        self._stream: Iterator[memoryview] = iter(())
        self._shard = ""

    def compare_shard(self, shard: str, *, hashed: bool) -> str:
        """Compare all that is wanted of one of the build's files; return its hash if `hashed`."""
        tensors = self._tensors[shard]
        jobs = [self._wanted[tensor.name] for tensor in tensors if tensor.name in self._wanted]
        self._shard = shard
        self._stream = self._source.blocks(
            span for job in jobs for place in job.places for span in place.spans
        )
        self._digest = hashlib.sha256(self._header(shard, tensors) if hashed else b"")
        for tensor in tensors:
            job = self._wanted.get(tensor.name)
            if job and job.form.stored:
                self._compare_values(job, job.form.stored)
            elif job:
                self._compare_bytes(job)
                continue
            if hashed:
                self._hash(tensor)
        return self._digest.hexdigest() if hashed else ""

    def rounded(self) -> Iterator[Rounded]:
        """What was quantized, by pattern and format."""
        for (name, stored), sums in sorted(self._rounded.items()):
            error, norm = sum(s.error for s in sums), sum(s.wanted for s in sums)
            worst = min(s.cosine for s in sums)
            yield Rounded(
                name, len(sums), str(stored), worst, (error / norm) ** 0.5 if norm else 0.0
            )

    def _header(self, shard: str, tensors: list[TensorInfo]) -> bytes:
        with (self._build.path / shard).open("rb") as file:
            return file.read(tensors[0].begin if tensors else -1)

    def _hash(self, tensor: TensorInfo) -> None:
        for block in self._found.blocks([Span(tensor.name, 0, tensor.n_bytes)]):
            self._digest.update(block)

    def _taken(self, n_bytes: int) -> Iterator[memoryview]:
        while n_bytes > 0:
            block = next(self._stream)
            n_bytes -= len(block)
            yield block

    def _blocks(self, place: Place) -> Iterator[bytes | memoryview]:
        """What a place must hold; the stream's next bytes are this place's."""
        taken = self._taken(sum(span.n_bytes for span in place.spans))
        if place.values:
            yield place.values(b"".join(map(bytes, taken)))
            return
        is_scale = place.source.endswith("weight_scale")
        for block in taken:
            if is_scale:
                self.nan_scales += count_nan_scales(block)
            yield block

    def _compare_bytes(self, job: Wanted) -> None:
        position = 0
        for place in job.places:
            position = place.begin
            for block in self._blocks(place):
                self._compare_block(job.form, place.source, position, block)
                position += len(block)
        if job.form.padded:
            self._compare_padding(job.form, position)

    def _compare_block(
        self, form: Form, source: str, position: int, block: bytes | memoryview
    ) -> None:
        expected = memoryview(block)
        for found in self._found.blocks([Span(form.build, position, position + len(block))]):
            wanted, expected = expected[: len(found)], expected[len(found) :]
            if not np.array_equal(_bytes_of(found), _bytes_of(wanted)):
                raise _difference(form, source, position, found, wanted)
            self._digest.update(found)
            position += len(found)
        self._advance(len(block), self._shard)

    def _compare_padding(self, form: Form, position: int) -> None:
        if not form.build.endswith("e_score_correction_bias"):
            for begin in range(position, form.n_bytes, len(ZEROS)):
                block = memoryview(ZEROS)[: form.n_bytes - begin]
                self._compare_block(form, "", begin, block)
            return
        found = self._found.read(Span(form.build, position, form.n_bytes))
        self._digest.update(found)
        self._advance(len(found), self._shard)
        for number, bias in enumerate(np.frombuffer(found, np.float32).tolist(), position // 4):
            if not bias <= NEVER:
                raise MismatchError(
                    f"tensor {form.build}: element [{number}] is {bias}, expected {NEVER} or less: "
                    "it belongs to an expert that doesn't exist, which no token may choose.",
                    AGAIN,
                )

    def _compare_values(self, job: Wanted, stored: Quantization) -> None:
        sums = _Sums()
        end = 0
        for place in job.places:
            for begin, rows in _chunks(job.form, place.begin, self._blocks(place)):
                sums = self._compare_rows(job.form, stored, place.source, begin, rows, sums)
            end = place.begin + place.n_bytes
        if job.form.padded:
            zeros = (memoryview(ZEROS)[: job.form.n_bytes - at] for at in _steps(end, job.form))
            for begin, rows in _chunks(job.form, end, zeros):
                self._compare_rows(job.form, stored, "", begin, rows, sums)
        least = least_cosine(stored)
        if not sums.cosine >= least:
            raise MismatchError(
                f"tensor {job.form.build}: its cosine with the source is {sums.cosine:.4f}, "
                f"at least {least} expected of {stored}.",
                AGAIN,
            )
        self._rounded[pattern_of(job.form.build), stored].append(sums)

    def _compare_rows(
        self, form: Form, stored: Quantization, source: str, begin: int, data: bytes, sums: _Sums
    ) -> _Sums:
        row = form.shape[-1] * DTYPE_BYTES[form.dtype]
        first, last = begin // row, (begin + len(data)) // row
        wanted = widened(data, form.dtype).reshape(-1, form.shape[-1])
        parts = []
        for name in form.parts():
            tensor = self._build.tensors[name]
            n_row = tensor.n_bytes // (form.n_bytes // row)
            parts.append(self._found.read(Span(name, first * n_row, last * n_row)))
        with np.errstate(all="ignore"):  # what is no number is apart from every number
            found, bounds = decoded(Rows(*parts), wanted, stored, form.dtype)
            apart = ~(np.abs(found - wanted) <= bounds)
        if apart.any():
            number = int(np.argmax(apart))
            at = [int(i) for i in np.unravel_index(first * form.shape[-1] + number, form.shape)]
            ours, theirs, far = (float(a.flat[number]) for a in (found, wanted, bounds))
            raise MismatchError(
                f"tensor {form.build}: element {at} decodes to {ours:.6g}, expected {theirs:.6g} "
                f"within {far:.2g} ({_origin(source)}).",
                AGAIN,
            )
        self._advance(len(data), self._shard)
        return sums.add(found, wanted)


def _chunks(
    form: Form, begin: int, blocks: Iterable[bytes | memoryview]
) -> Iterator[tuple[int, bytes]]:
    """Whole rows from blocks of any size, some at a time, each with its first byte's place."""
    row = form.shape[-1] * DTYPE_BYTES[form.dtype]
    size = max(1, CHUNK_BYTES // row) * row
    rows = bytearray()
    for block in blocks:
        rows += block
        while len(rows) >= size:
            yield begin, bytes(rows[:size])
            begin += size
            del rows[:size]
    if rows:
        yield begin, bytes(rows)


def _steps(begin: int, form: Form) -> range:
    return range(begin, form.n_bytes, len(ZEROS))


def _bytes_of(block: bytes | memoryview) -> NDArray[np.uint8]:
    return np.frombuffer(block, np.uint8)


def _difference(
    form: Form, source: str, position: int, found: memoryview, expected: memoryview
) -> MismatchError:
    """The error that names the first differing element of two blocks at `position`."""
    differs = _bytes_of(found) != _bytes_of(expected)
    n_element = DTYPE_BYTES[form.dtype]
    number = (position + int(np.argmax(differs))) // n_element
    begin = number * n_element - position
    window = slice(begin, begin + n_element)
    at, value = element(form.dtype, form.shape, bytes(found[window]), number)
    _, wanted = element(form.dtype, form.shape, bytes(expected[window]), number)
    return MismatchError(
        f"tensor {form.build}: element {at} is {value}, expected {wanted} ({_origin(source)}).",
        AGAIN,
    )


def _origin(source: str) -> str:
    return f"source tensor {source}" if source else "padding: no expert of the source's"
