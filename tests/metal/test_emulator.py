"""The emulator itself: what it computes against numpy, and what it must refuse."""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.metal.emulator import EmulatorError, emulated_metal

RNG = np.random.default_rng(7)


def launch(source: str, x: np.ndarray, threads: int = 32, **options: Any) -> np.ndarray:
    """Run a body over `x`: input `a`, output `o` of the same shape unless options say otherwise."""
    array = mx.array(x)
    races = options.pop("check_races", False)
    header = options.pop("header", "")
    arguments = {
        "inputs": [array],
        "grid": (x.size, 1, 1),
        "threadgroup": (threads, 1, 1),
        "output_shapes": [array.shape],
        "output_dtypes": [array.dtype],
    } | options
    with emulated_metal(check_races=races):
        kernel = mx.fast.metal_kernel("probe", ["a"], ["o"], source, header)
        out = kernel(**arguments)[0]
        return np.array(out.astype(mx.float32) if out.dtype == mx.bfloat16 else out)


def lanes(expression: str, x: np.ndarray, **options: Any) -> np.ndarray:
    """One expression of `v`, the thread's own element, for every thread."""
    body = f"uint i = thread_position_in_grid.x; auto v = a[i]; o[i] = {expression};"
    return launch(body, x, **options)


FLOATS = RNG.standard_normal(64).astype(np.float32)
GROUPS = FLOATS.reshape(2, 32)
PLUS_5 = np.where(np.arange(32) < 27, np.arange(32) + 5, np.arange(32))


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("simd_max(v)", np.repeat(GROUPS.max(1), 32)),
        ("simd_min(v)", np.repeat(GROUPS.min(1), 32)),
        ("simd_shuffle(v, 3)", np.repeat(GROUPS[:, 3], 32)),
        ("simd_broadcast(v, 31)", np.repeat(GROUPS[:, 31], 32)),
        ("simd_broadcast_first(v)", np.repeat(GROUPS[:, 0], 32)),
        ("simd_shuffle_xor(v, 8)", GROUPS[:, np.arange(32) ^ 8].ravel()),
        ("simd_shuffle_down(v, 5)", GROUPS[:, PLUS_5].ravel()),
        ("simd_shuffle(v, 31 - thread_index_in_simdgroup)", GROUPS[:, ::-1].ravel()),
        ("simd_any(v > 0) ? 1.0f : 0.0f", np.repeat((GROUPS > 0).any(1), 32)),
        ("simd_all(v > 0) ? 1.0f : 0.0f", np.repeat((GROUPS > 0).all(1), 32)),
        ("metal::max(v, 0.5f)", np.maximum(FLOATS, 0.5)),
        ("metal::clamp(v, -0.5f, 0.5f)", np.clip(FLOATS, -0.5, 0.5)),
    ],
)
def test_exact_functions(expression: str, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(lanes(expression, FLOATS, threads=64), expected)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("simd_sum(v)", np.repeat(GROUPS.sum(1), 32)),
        ("simd_product(v)", np.repeat(GROUPS.prod(1), 32)),
        ("simd_prefix_inclusive_sum(v)", GROUPS.cumsum(1).ravel()),
        ("simd_prefix_exclusive_sum(v)", (GROUPS.cumsum(1) - GROUPS).ravel()),
        ("metal::rsqrt(metal::exp(v))", np.exp(-FLOATS / 2)),
        ("metal::precise::tanh(v)", np.tanh(FLOATS)),
    ],
)
def test_rounding_functions(expression: str, expected: np.ndarray) -> None:
    np.testing.assert_allclose(
        lanes(expression, FLOATS, threads=64), expected, rtol=3e-6, atol=3e-6
    )


def test_simd_sum_is_the_ascending_butterfly() -> None:
    tree = GROUPS.copy()
    for step in (1, 2, 4, 8, 16):
        tree = tree + tree[:, np.arange(32) ^ step]
    np.testing.assert_array_equal(lanes("simd_sum(v)", FLOATS, threads=64), tree.ravel())


def test_lanes_that_returned_bring_nothing_to_a_sum() -> None:
    body = "uint i = thread_position_in_grid.x; if (i >= 20) return; o[i] = simd_sum(a[i]);"
    out = launch(body, np.ones(32, np.float32))
    np.testing.assert_array_equal(out[:20], 20)
    assert np.isnan(out[20:]).all(), "an output that no thread writes must show"


def test_threadgroup_memory_and_barrier_reverse_an_array() -> None:
    body = """
      threadgroup float shared[64];
      uint i = thread_position_in_threadgroup.x;
      shared[i] = a[thread_position_in_grid.x];
      threadgroup_barrier(mem_flags::mem_threadgroup);
      o[thread_position_in_grid.x] = shared[63 - i];
    """
    x = RNG.standard_normal(192).astype(np.float32)
    out = launch(body, x, threads=64, check_races=True)
    np.testing.assert_array_equal(out, x.reshape(3, 64)[:, ::-1].ravel())


def test_threadgroups_at_the_edge_are_smaller() -> None:
    body = """
      uint i = thread_position_in_grid.y * 10 + thread_position_in_grid.x;
      o[i] = threads_per_threadgroup.x * 100 + threads_per_threadgroup.y * 10
           + dispatch_threads_per_threadgroup.x + simdgroups_per_threadgroup * 1000;
    """
    out = launch(body, np.zeros((3, 10), np.float32), grid=(10, 3, 1), threadgroup=(8, 2, 1))
    expected = np.full((3, 10), 1828)
    expected[:, 8:] -= 600
    expected[2] -= 10
    np.testing.assert_array_equal(out, expected)


def test_a_threadgroup_larger_than_the_grid_is_clipped_to_it() -> None:
    out = lanes("threads_per_threadgroup.x", np.zeros(40, np.float32), threads=256)
    np.testing.assert_array_equal(out, 40)


def test_shapes_strides_and_scalars_arrive_as_mlx_passes_them() -> None:
    body = "o[0] = a_shape[1] * 1000 + a_strides[0] * 10 + a_ndim;"
    one = {"grid": (1, 1, 1), "output_shapes": [(1,)], "output_dtypes": [mx.float32]}
    x = np.zeros((3, 4, 5), np.float32)
    assert launch(body, x, **one)[0] == 4203
    for value in (7, 7.0, mx.array(7, mx.uint8)):
        assert launch("o[0] = a;", x, inputs=[value], **one)[0] == 7


def test_templates_and_header() -> None:
    header = "METAL_FUNC float twice(float x) { return 2 * x; }"
    body = "uint i = thread_position_in_grid.x; o[i] = T(Double ? twice(a[i]) + K : a[i]);"
    template = [("T", mx.int32), ("K", 3), ("Double", True)]
    out = launch(body, FLOATS, template=template, header=header, output_dtypes=[mx.int32])
    np.testing.assert_array_equal(out, (2 * FLOATS + 3).astype(np.int32))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.uint8])
def test_strided_inputs_are_made_contiguous_and_noted(dtype: mx.Dtype) -> None:
    x = mx.array(np.arange(64).reshape(2, 32)).astype(dtype)
    body = "uint i = thread_position_in_grid.x; o[i] = static_cast<float>(a[i] + b[i]);"
    with emulated_metal() as emulation:
        kernel = mx.fast.metal_kernel("probe", ["a", "b"], ["o"], body)
        out = kernel(
            inputs=[x.T, x.reshape(32, 1, 2)[:, :, :]],
            grid=(64, 1, 1),
            threadgroup=(64, 1, 1),
            output_shapes=[(32, 2)],
            output_dtypes=[mx.float32],
        )[0]
    expected = np.arange(64).reshape(2, 32).T + np.arange(64).reshape(32, 2)
    np.testing.assert_array_equal(np.array(out), expected)
    assert emulation.strided_inputs == {"probe.a": 1}


def test_bfloat_rounds_to_nearest_even_after_every_operation() -> None:
    bits = np.arange(0x3F80, 0x3F80 + 64, dtype=np.uint16)
    x = mx.array(bits).view(mx.bfloat16)
    out = lanes(
        "static_cast<bfloat16_t>(v * v + v)", FLOATS, inputs=[x], output_dtypes=[mx.bfloat16]
    )
    np.testing.assert_array_equal(out, np.array((x * x + x).astype(mx.float32)))


def test_init_value_fills_the_output() -> None:
    out = launch("if (thread_position_in_grid.x == 0) o[0] = 1;", FLOATS, init_value=0)
    assert out[0] == 1
    assert not out[1:].any()


BAD_SOURCES = {
    "undeclared name": ("o[0] = undeclared_name;", "'undeclared_name' was not declared"),
    "attribute in a helper only": ("o[0] = helper();", "thread_index_in_simdgroup"),
    "float into bfloat": ("bfloat16_t b = a[0]; o[0] = b;", "from 'const float'"),
    "double": ("o[0] = double(a[0]);", "poisoned"),
    "heap": ("o[0] = *new float(1);", "poisoned"),
    "initial value": ("threadgroup float s = 0; o[0] = s;", "'s' has an initial value"),
    "write into an input": ("a[0] = 1;", "read-only"),
    "C's erf": ("o[0] = erf(a[0]);", "'erf' was not declared"),
    "divergent barrier": (
        "if (thread_position_in_grid.x < 16) threadgroup_barrier(mem_flags::mem_threadgroup);\n"
        "else o[0] = simd_sum(a[0]);",
        r"deadlock: thread 0 waits in threadgroup_barrier \(line 1\), thread 16 in simd_sum",
    ),
    "two barriers": (
        "if (thread_position_in_grid.x < 16) threadgroup_barrier(mem_flags::mem_threadgroup);\n"
        "else threadgroup_barrier(mem_flags::mem_threadgroup);",
        r"divergent flow.*\(line 1\).*\(line 2\)",
    ),
    "barrier after return": (
        "if (thread_position_in_grid.x < 16) return;\n"
        "threadgroup_barrier(mem_flags::mem_threadgroup);",
        "after another thread returned",
    ),
    "return instead of barrier": (
        "if (thread_position_in_grid.x > 16) return;\n"
        "threadgroup_barrier(mem_flags::mem_threadgroup);",
        r"returned without the threadgroup_barrier \(line 2\)",
    ),
    "two simd calls": (
        "if (thread_position_in_grid.x < 16) o[0] = simd_sum(a[0]);\nelse o[1] = simd_max(a[0]);",
        "divergent flow.*simd_sum.*simd_max",
    ),
    "inactive lane": (
        "if (thread_position_in_grid.x == 5) return;\no[0] = simd_shuffle_xor(a[0], 1);",
        "lane 4 reads the inactive lane 5",
    ),
    "threadgroup memory": (
        "threadgroup float s[8193]; s[0] = a[0]; o[0] = s[0];",
        "32772 bytes of threadgroup memory, the limit is 32768",
    ),
    "write behind": ("o[64] = 0;", "behind the end of 'o'"),
    "write before": ("o[-1] = 0;", "before the start of 'o'"),
}


@pytest.mark.parametrize("case", BAD_SOURCES)
def test_refuses(case: str) -> None:
    source, message = BAD_SOURCES[case]
    header = ""
    if case == "attribute in a helper only":
        header = "METAL_FUNC float helper() { return thread_index_in_simdgroup; }"
    with pytest.raises(EmulatorError, match=message):
        launch(source, FLOATS, header=header)


def test_threadgroup_memory_up_to_the_limit_is_fine() -> None:
    body = "threadgroup float s[8192]; s[0] = 3; o[thread_position_in_grid.x] = s[0];"
    np.testing.assert_array_equal(launch(body, FLOATS), 3)


MISSING_BARRIER = """
  threadgroup float shared[2];
  uint i = thread_position_in_threadgroup.x;
  float sum = simd_sum(a[i]);
  if (thread_index_in_simdgroup == 0) shared[simdgroup_index_in_threadgroup] = sum;
  BARRIER
  o[i] = shared[0] + shared[1];
"""


def test_a_missing_barrier_is_seen_as_a_race() -> None:
    barrier = "threadgroup_barrier(mem_flags::mem_threadgroup);"
    good = MISSING_BARRIER.replace("BARRIER", barrier)
    out = launch(good, FLOATS, threads=64, check_races=True)
    np.testing.assert_allclose(out, FLOATS.sum(), rtol=1e-5)
    with pytest.raises(EmulatorError, match="'o' depends on the order of threads"):
        launch(MISSING_BARRIER.replace("BARRIER", ""), FLOATS, threads=64, check_races=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threadgroup": (1025, 1, 1)}, "1025 threads a group"),
        ({"threadgroup": (32, 32, 2)}, "2048 threads a group"),
        ({"grid": (0, 1, 1)}, "empty grid"),
        ({"inputs": []}, "expected 1 inputs for probe, got 0"),
        ({"output_shapes": [(1,), (1,)]}, "expected 1 output_shapes"),
        ({"output_dtypes": []}, "expected 1 output_dtypes"),
    ],
)
def test_refuses_a_launch(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        launch("o[0] = a[0];", FLOATS, **options)


def test_metal_is_there_inside_and_gone_after_an_error() -> None:
    from mlx_lm.models import gated_delta

    def fail_inside() -> None:
        with emulated_metal():
            from mlx_lm.models import gated_delta as fresh

            assert fresh is not gated_delta
            assert fresh._gated_delta_kernel is not None
            assert mx.metal.is_available()
            assert mx.default_device() == mx.gpu
            raise KeyError

    before = (mx.fast.metal_kernel, mx.metal.is_available, mx.default_device)
    with pytest.raises(KeyError):
        fail_inside()
    assert before == (mx.fast.metal_kernel, mx.metal.is_available, mx.default_device)
    assert importlib.import_module("mlx_lm.models.gated_delta") is gated_delta


def test_compile_is_off_inside_and_as_before_outside(mlx_compile: None) -> None:
    from benchmarks.metal_path import compile_is_enabled

    assert compile_is_enabled()
    with emulated_metal():
        assert not compile_is_enabled()
    assert compile_is_enabled()
