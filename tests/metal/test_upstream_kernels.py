"""mlx-lm's own Metal kernels against its operations: they hold, and so does the emulator."""

from __future__ import annotations

from types import ModuleType

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import gated_delta, kimi_k3

from benchmarks.metal_path import fresh_import
from tests.metal.emulator import emulated_metal

RNG = np.random.default_rng()
SEED = np.random.default_rng(3).bit_generator.state
Inputs = tuple[mx.array, ...]


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """Every test gets the same random numbers, whichever tests run before it."""
    RNG.bit_generator.state = SEED


def normal(*shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    """Random numbers that do not depend on MLX's generator."""
    return mx.array(RNG.standard_normal(shape).astype(np.float32)).astype(dtype)


def delta_inputs(
    batch: int, length: int, heads: tuple[int, int], dims: tuple[int, int], **options: object
) -> Inputs:
    """q, k, v, decay, beta and state with K3's ranges; `vector` gives a decay per channel."""
    (key_heads, value_heads), (key_dim, value_dim) = heads, dims
    dtype = options.get("dtype", mx.float32)
    q, k = (normal(batch, length, key_heads, key_dim, dtype=dtype) for _ in "qk")
    q, k = gated_delta.normalize_qk(q, k, inv_scale=key_dim**-0.5, eps=1e-6)
    v = normal(batch, length, value_heads, value_dim, dtype=dtype)
    channels = (key_dim,) if options.get("vector") else ()
    decay = mx.exp(-5 * mx.sigmoid(normal(batch, length, value_heads, *channels)))
    beta = mx.sigmoid(normal(batch, length, value_heads))
    return q, k, v, decay, beta, 0.1 * normal(batch, value_heads, value_dim, key_dim)


def largest_difference(a: mx.array, b: mx.array) -> float:
    """In float32; NaN, the mark of an unwritten output, stays NaN and fails every bound."""
    return mx.abs(a.astype(mx.float32) - b.astype(mx.float32)).max().item()


def compare_with_operations(inputs: Inputs, mask: mx.array | None, bound: float) -> str:
    """Run both twins on the inputs; the name of the kernel that ran."""
    expected, expected_state = gated_delta.gated_delta_ops(*inputs, mask)
    with emulated_metal(check_races=True) as emulation:
        from mlx_lm.models import gated_delta as on_metal

        out, state = on_metal.gated_delta_kernel(*inputs, mask)
    assert out.dtype == inputs[0].dtype
    if mask is not None:
        expected = mx.where(mask[..., None, None], expected, 0)
    assert largest_difference(out, expected) <= bound
    assert largest_difference(state, expected_state) <= 2e-7
    (name,) = emulation.launches
    return name


@pytest.mark.parametrize(("dtype", "bound"), [(mx.float32, 1e-7), (mx.bfloat16, 2e-3)])
def test_gated_delta_with_vector_decay(dtype: mx.Dtype, bound: float) -> None:
    inputs = delta_inputs(2, 5, (2, 2), (64, 32), vector=True, dtype=dtype)
    assert compare_with_operations(inputs, None, bound) == "gated_delta_step_vec"


def test_gated_delta_with_vector_decay_and_mask() -> None:
    inputs = delta_inputs(2, 6, (1, 2), (32, 16), vector=True)
    mask = mx.array([[False, False, True, True, True, False], [True] * 6])
    assert compare_with_operations(inputs, mask, 1e-7) == "gated_delta_step_vec_mask"


def test_gated_delta_with_scalar_decay_and_mask() -> None:
    inputs = delta_inputs(2, 4, (1, 2), (32, 8))
    mask = mx.array([[False, True, True, True], [True] * 4])
    assert compare_with_operations(inputs, mask, 1e-7) == "gated_delta_step_mask"


def test_packed_kernel_is_bitwise_its_comparators() -> None:
    inputs = delta_inputs(1, 4, (1, 2), (128, 16))
    assert compare_with_operations(inputs, None, 1e-7) == "gated_delta_step_packed_btree"
    with emulated_metal() as emulation:
        from mlx_lm.models import gated_delta as on_metal

        packed = on_metal.gated_delta_kernel(*inputs)
        tree = on_metal.gated_delta_kernel_xtree(*inputs)
        plain = on_metal.gated_delta_kernel_unpacked(*inputs)
    assert sorted(emulation.launches) == [
        "gated_delta_step",
        "gated_delta_step_packed_btree",
        "gated_delta_step_xtree",
    ]
    for out, tree_out, plain_out in zip(packed, tree, plain, strict=True):
        assert mx.array_equal(out, tree_out)
        assert mx.array_equal(out, plain_out)


def mix(module: ModuleType, raw: mx.array, prefix: mx.array, direction: mx.array) -> mx.array:
    """Stock's AttnRes mix of blocks and prefix."""
    blocks = module.ResidualBlocks(1e-5)
    for block in raw:
        blocks.append(block)
    return module._attn_res_mix(blocks, prefix, direction, 1e-5)


@pytest.mark.parametrize(("dtype", "bound"), [(mx.float32, 2e-6), (mx.bfloat16, 2e-2)])
@pytest.mark.parametrize("n_blocks", [1, 5])
def test_attention_residual_mix(n_blocks: int, dtype: mx.Dtype, bound: float) -> None:
    raw = normal(n_blocks, 2, 3, 192, dtype=dtype)
    prefix, direction = normal(2, 3, 192, dtype=dtype), 0.1 * normal(192)
    expected = mix(kimi_k3, raw, prefix, direction)
    with emulated_metal(check_races=True) as emulation:
        out = mix(fresh_import(kimi_k3), raw, prefix, direction)
    assert emulation.launches == {"attnres_mix": 1}
    assert out.dtype == dtype
    assert largest_difference(out, expected) <= bound
