"""Run `mx.fast.metal_kernel` sources on Linux: a gate before a Mac, not a replacement for one.

Input: the arguments of `mx.fast.metal_kernel` and of a launch. The body becomes a C++20 function
with the signature that MLX would generate, is compiled with g++ against shim.h and runs on real
data; every thread is a fiber (fibers.h). Output: MLX arrays.

Reported as errors: undeclared names, a `float` put into a `bfloat` without a cast, `double` and the
C++ that Metal lacks, barriers and simd_* calls that not every thread reaches, a shuffle that reads
an inactive lane, more than 1024 threads or 32 KiB of threadgroup memory, writes just outside of a
buffer, and, with `check_races`, a result that depends on the order in which threads run. Outputs,
threadgroup memory and the surroundings of buffers start as NaN, so that what a kernel wrongly reads
there shows in its result.

Not modelled: address spaces in overloads and casts, const rules of `constant`, implicit `half`
rules, C++ that g++ takes and Metal does not, registers and a pipeline's own thread limit,
fast-math, the rounding of Apple's transcendental functions, simd_* calls in flow that Metal allows
to diverge, races that both orders hide, memory order between threadgroups, atomics,
simdgroup_matrix, textures, quadgroups, MLX's own kernel headers, strided inputs
(`ensure_row_contiguous=False` still gets contiguous ones), speed.
"""

from __future__ import annotations

import ctypes
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from benchmarks.metal_path import compile_mode, metal_path
from tests.metal.source import (
    METAL_TYPES,
    EmulatorError,
    Parameter,
    Template,
    compile_kernel,
    generate,
)

MAX_THREADS = 1024
Dims = tuple[int, int, int]


class Buffer:
    """Bytes with a guard zone on both sides; everything not given is all ones, NaN as a float."""

    GUARD = 256

    def __init__(self, name: str, n_bytes: int) -> None:
        self.name = name
        self.memory = np.full(n_bytes + 2 * self.GUARD, 0xFF, np.uint8)
        self.data = self.memory[self.GUARD : self.GUARD + n_bytes]

    @classmethod
    def of(cls, name: str, values: mx.array | np.ndarray) -> Buffer:
        """A buffer that holds the values in row-major order."""
        if isinstance(values, mx.array):
            values = np.array(mx.contiguous(values).reshape(-1).view(mx.uint8))
        buffer = cls(name, values.nbytes)
        buffer.data[:] = values.reshape(-1).view(np.uint8)
        return buffer

    @property
    def address(self) -> int:
        """Where the kernel finds the data."""
        return int(self.data.ctypes.data)

    def check_guards(self) -> None:
        """Refuse a kernel that wrote outside of the buffer."""
        if (self.memory[: self.GUARD] != 0xFF).any():
            raise EmulatorError(f"the kernel wrote before the start of '{self.name}'")
        if (self.memory[-self.GUARD :] != 0xFF).any():
            raise EmulatorError(f"the kernel wrote behind the end of '{self.name}'")


def row_strides(shape: Sequence[int]) -> list[int]:
    """Strides in elements of a row-major array."""
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


def shape_parameters(name: str, array: mx.array, source: str) -> Iterator[tuple[Parameter, Buffer]]:
    """`x_shape`, `x_strides` and `x_ndim`, each if the source names it."""
    facts = {
        "shape": ("int", np.array(array.shape, np.int32), False),
        "strides": ("int64_t", np.array(row_strides(array.shape), np.int64), False),
        "ndim": ("int", np.array([array.ndim], np.int32), True),
    }
    for fact, (type_name, values, scalar) in facts.items():
        if array.ndim and f"{name}_{fact}" in source:
            full = f"{name}_{fact}"
            yield Parameter(f"const {type_name}", full, scalar), Buffer.of(full, values)


def to_array(value: Any) -> mx.array:
    """A launch input as MLX takes it: Python numbers become 0-d arrays."""
    if isinstance(value, mx.array):
        return value
    dtype = {bool: mx.bool_, int: mx.int32, float: mx.float32}[type(value)]
    return mx.array(value, dtype)


@dataclass
class Emulation:
    """The settings and the record of one `emulated_metal()` block."""

    check_races: bool = False
    launches: Counter[str] = field(default_factory=Counter)
    strided_inputs: Counter[str] = field(default_factory=Counter)
    """`kernel.input` that MLX would have copied before the launch: a launch that no graph shows."""

    def metal_kernel(self, name: str, *args: Any, **kwargs: Any) -> EmulatedKernel:
        """Stands in for `mx.fast.metal_kernel`."""
        return EmulatedKernel(self, name, *args, **kwargs)


@dataclass
class EmulatedKernel:
    """What `mx.fast.metal_kernel` returns: called with inputs, it runs at once, not lazily."""

    emulation: Emulation
    name: str
    input_names: Sequence[str]
    output_names: Sequence[str]
    source: str
    header: str = ""
    ensure_row_contiguous: bool = True
    atomic_outputs: bool = False
    compile_options: object | None = None

    def __post_init__(self) -> None:
        if self.atomic_outputs or "quadgroup" in self.source:
            raise EmulatorError(f"kernel '{self.name}' uses atomics or quadgroups: not modelled")

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: Dims,
        threadgroup: Dims,
        template: Template = (),
        init_value: float | None = None,
        **_: Any,
    ) -> list[mx.array]:
        """Compile (or find) the instance, run it, give the outputs."""
        self.check_call(inputs, output_shapes, output_dtypes, grid, threadgroup)
        arguments = self.input_arguments([to_array(x) for x in inputs])
        outputs = list(zip(self.output_names, output_shapes, output_dtypes, strict=True))
        parameters = [p for p, _ in arguments]
        parameters += [Parameter(METAL_TYPES[dtype], name) for name, _, dtype in outputs]
        code = generate(self.name, self.header, self.source, template or (), parameters)
        sizes = [*grid, *(min(t, g) for t, g in zip(threadgroup, grid, strict=True))]
        self.emulation.launches[self.name] += 1

        def run(reverse: bool) -> list[Buffer]:
            results = [output_buffer(*output, init_value) for output in outputs]
            self.run(code, [b for _, b in arguments] + results, sizes, reverse)
            return results

        results = run(reverse=False)
        if self.emulation.check_races:
            self.compare(results, run(reverse=True))
        return [
            mx.array(buffer.data).view(dtype).reshape(shape)
            for buffer, (_, shape, dtype) in zip(results, outputs, strict=True)
        ]

    def check_call(
        self,
        inputs: Sequence[Any],
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[mx.Dtype],
        grid: Dims,
        threadgroup: Dims,
    ) -> None:
        """What MLX and Metal refuse before anything runs."""
        for what, given, names in (
            ("inputs", inputs, self.input_names),
            ("output_shapes", shapes, self.output_names),
            ("output_dtypes", dtypes, self.output_names),
        ):
            if len(given) != len(names):
                raise ValueError(f"expected {len(names)} {what} for {self.name}, got {len(given)}")
        if min(*grid, *threadgroup) < 1:
            raise ValueError(f"{self.name}: empty grid {grid} or threadgroup {threadgroup}")
        n_threads = math.prod(threadgroup)
        if n_threads > MAX_THREADS:
            raise ValueError(
                f"{self.name}: {n_threads} threads a group, the limit is {MAX_THREADS}"
            )

    def input_arguments(self, inputs: Sequence[mx.array]) -> list[tuple[Parameter, Buffer]]:
        """Every input with the shape facts that the source asks for."""
        arguments = []
        for name, array in zip(self.input_names, inputs, strict=True):
            if not is_row_contiguous(array):
                self.emulation.strided_inputs[f"{self.name}.{name}"] += 1
            parameter = Parameter(f"const {METAL_TYPES[array.dtype]}", name, array.ndim == 0)
            arguments.append((parameter, Buffer.of(name, array)))
            arguments.extend(shape_parameters(name, array, self.source))
        return arguments

    def run(self, code: str, buffers: list[Buffer], sizes: list[int], reverse: bool) -> None:
        """One launch; raises what the shim reports."""
        function = compile_kernel(self.name, code)
        addresses = (ctypes.c_void_p * len(buffers))(*(b.address for b in buffers))
        error = function(addresses, (ctypes.c_uint * 6)(*sizes), int(reverse))
        if error:
            raise EmulatorError(f"kernel '{self.name}': {error.decode()}")
        for buffer in buffers:
            buffer.check_guards()

    def compare(self, forward: list[Buffer], backward: list[Buffer]) -> None:
        """Refuse a kernel whose result depends on the order of its threads."""
        for a, b in zip(forward, backward, strict=True):
            if (a.data != b.data).any():
                raise EmulatorError(
                    f"kernel '{self.name}': '{a.name}' depends on the order of threads"
                )


def is_row_contiguous(array: mx.array) -> bool:
    """Whether MLX can pass the array to a kernel as it lies in memory."""
    mx.eval(array)
    words = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}[array.dtype.size]
    strides = memoryview(array.view(words)).strides or ()
    expected = row_strides(array.shape)
    return all(
        n == 1 or stride == array.dtype.size * e
        for n, stride, e in zip(array.shape, strides, expected, strict=True)
    )


def output_buffer(
    name: str, shape: Sequence[int], dtype: mx.Dtype, init_value: float | None
) -> Buffer:
    """An output before the launch: NaN, or the caller's value."""
    if init_value is not None:
        return Buffer.of(name, mx.full(shape, init_value, dtype))
    return Buffer(name, math.prod(shape) * dtype.size)


@contextmanager
def emulated_metal(*, check_races: bool = False) -> Iterator[Emulation]:
    """Let MLX believe that it runs on a GPU whose custom kernels are emulated; yields the record.

    Kernels that a module made at import, without Metal, are None: load it again inside the block
    with `benchmarks.metal_path.fresh_import`. Built-in operations run on the CPU as always, and
    `mx.compile` is off, for the emulator needs values.
    """
    emulation = Emulation(check_races)
    with metal_path(emulation.metal_kernel), compile_mode(enabled=False):
        yield emulation
