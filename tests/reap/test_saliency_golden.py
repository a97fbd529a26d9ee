"""The reference implementation's routing weights, norms and REAP sums, from our taps.

Also CASES C10: the weights are those that the model mixes with, not the biased selection scores.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kimi_k3_mlx.reap.accumulate import Accumulator, Tags
from kimi_k3_mlx.reap.calibrate import measure
from tests.model.golden import TEXT, TOLERANCE, float32_model, read_golden


def tapped(name: str) -> dict[tuple[str, int], np.ndarray]:
    """Experts, weights and outputs of every MoE layer, without the batch axis."""
    golden, seen = read_golden(name), {}
    float32_model(name)(
        golden.vectors["input_ids"],
        tap=lambda layer, what, array: seen.__setitem__((what, layer), array),
    )
    wanted = ("experts", "router_weights", "expert_output")
    return {key: np.array(array[0]) for key, array in seen.items() if key[0] in wanted}


def one_sequence(n_tokens: int) -> Tags:
    zeros = np.zeros(n_tokens, np.int64)
    return Tags(zeros, zeros, zeros)


def golden_of(name: str, vector: str, layer: int) -> np.ndarray:
    return np.array(read_golden(name).vectors[f"{vector}.{layer}"].astype(mx.float32), np.float64)


def accumulated(layer: int, n_experts: int, seen: tuple[np.ndarray, ...]) -> dict[str, Any]:
    experts, gates, norms, dots, y_squares = seen
    acc = Accumulator(("golden",), (layer,), n_experts, experts.shape[1])
    acc.add(layer, one_sequence(len(experts)), experts, gates, norms, dots, y_squares)
    return {key: array[0, 0] for key, array in acc.state().items() if array.ndim == 3}


def close(found: np.ndarray, expected: np.ndarray, tolerance: float = TOLERANCE) -> bool:
    return float(np.abs(found - expected).max()) <= tolerance * float(np.abs(expected).max())


@pytest.mark.parametrize("name", TEXT)
def test_statistics_of_our_taps_are_the_reference_s(name: str) -> None:
    seen, n_layers = tapped(name), 0
    for layer in read_golden(name).layers_with("reap_sum"):
        experts, gates, outputs = (
            seen[what, layer] for what in ("experts", "router_weights", "expert_output")
        )
        observed = measure(mx.array(gates), mx.array(outputs))
        by_expert = np.argsort(experts, axis=1)
        index = golden_of(name, "router_idx", layer).astype(int)
        reference = np.argsort(index, axis=1)
        assert np.array_equal(
            np.take_along_axis(experts, by_expert, 1), np.take_along_axis(index, reference, 1)
        )
        for found, vector in ((gates, "router_w"), (observed[0], "expert_norm")):
            expected = np.take_along_axis(golden_of(name, vector, layer), reference, 1)
            assert close(np.take_along_axis(found, by_expert, 1), expected)
        sums = accumulated(
            layer, golden_of(name, "reap_count", layer).size, (experts, gates, *observed)
        )
        assert np.array_equal(sums["pairs"], golden_of(name, "reap_count", layer))
        assert close(sums["weighted"], golden_of(name, "reap_sum", layer))
        assert close(sums["norm"], golden_of(name, "reap_norm_sum", layer))
        n_layers += 1
    assert n_layers >= 1


@pytest.mark.parametrize("name", TEXT)
def test_sums_of_the_reference_s_own_pairs_are_its_sums(name: str) -> None:
    """Within what adding in float32 loses: nothing but adding is ours here."""
    for layer in read_golden(name).layers_with("reap_sum"):
        index = golden_of(name, "router_idx", layer).astype(int)
        gates, norms = (golden_of(name, v, layer) for v in ("router_w", "expert_norm"))
        seen = (index, gates, norms, np.zeros_like(norms), np.ones(len(norms)))
        sums = accumulated(layer, golden_of(name, "reap_count", layer).size, seen)
        assert np.array_equal(sums["pairs"], golden_of(name, "reap_count", layer))
        assert close(sums["weighted"], golden_of(name, "reap_sum", layer), 1e-6)
        assert close(sums["norm"], golden_of(name, "reap_norm_sum", layer), 1e-6)


@pytest.mark.parametrize("name", TEXT)
def test_the_mix_is_the_reference_s(name: str) -> None:
    """‖y‖² is that of the latent before its norm."""
    seen, golden = tapped(name), read_golden(name)
    for layer in golden.layers_with("latent_mix"):
        taps = (mx.array(seen[what, layer]) for what in ("router_weights", "expert_output"))
        mix = golden_of(name, "latent_mix", layer)
        assert close(measure(*taps)[2], (mix.reshape(len(mix), -1) ** 2).sum(1))
