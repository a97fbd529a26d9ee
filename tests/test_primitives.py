"""The primitives of one decode step: stock's number is pinned, ours has a ceiling."""

from __future__ import annotations

import functools
import importlib
import json
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from benchmarks import primitives
from benchmarks.metal_path import compile_is_enabled
from benchmarks.primitives import CodePath, Counts, count_primitives

STOCK = "mlx_lm.models.kimi_k3"
OURS = "kimi_k3"
CEILING = 4200
"""Stock needs 4,619; the difference is room for nothing but progress."""


@functools.cache
def counts(
    name: str,
    path: CodePath,
    layers: int = primitives.K3_LAYERS,
    float32: bool = False,
    n_low: int = 0,
) -> Counts:
    """Count once for all tests."""
    module = pytest.importorskip(name)
    return count_primitives(module, path, layers, float32_tensors=float32, n_low=n_low)


def test_stock_on_the_metal_path() -> None:
    stock = counts(STOCK, "metal")
    assert stock.total == 4619
    assert stock.by_name["Arange"] == 276
    assert stock.opaque == {
        "fast.rms_norm": 534,
        "attnres_mix": 186,
        "gated_delta_step_vec": 69,
    }


@pytest.mark.parametrize("float32", [False, True])
def test_ours_on_the_metal_path(float32: bool) -> None:
    ours = counts(OURS, "metal", float32=float32)
    assert ours.total <= CEILING
    assert ours.by_name.get("Arange", 0) == 0, "gather_qmm makes indices that we can give it"


def test_a_second_bank_costs_less_than_a_third_of_a_step() -> None:
    """Three products, an activation, two index arrays from two reductions, and the choice."""
    one, two = counts(OURS, "metal"), counts(OURS, "metal", n_low=primitives.N_LOW)
    assert two.total <= 1.3 * one.total
    assert two.total - one.total == 9 * 92
    assert two.by_name["GatherQMM"] == 2 * one.by_name["GatherQMM"] == 2 * 3 * 92
    assert two.by_name.get("Arange", 0) == 0


def test_float32_tensors_cost_stock_casts_but_not_ours() -> None:
    stock, stock32 = (counts(STOCK, "metal", 6, float32) for float32 in (False, True))
    ours, ours32 = (counts(OURS, "metal", 6, float32) for float32 in (False, True))
    assert stock32.total > stock.total
    assert ours32.total <= ours.total


def test_a_layer_more_costs_what_a_layer_costs() -> None:
    few, more = counts(OURS, "metal", 5), counts(OURS, "metal", 6)
    assert 25 < more.total - few.total < 60
    assert more.by_name["GatherQMM"] - few.by_name["GatherQMM"] == 3


@pytest.mark.parametrize("name", [STOCK, OURS])
def test_the_cpu_path_has_no_kernels(name: str) -> None:
    cpu, metal = counts(name, "cpu", 6), counts(name, "metal", 6)
    assert cpu.opaque == {}
    assert cpu.total > 2 * metal.total
    assert cpu.by_name["GatherQMM"] == metal.by_name["GatherQMM"] == 15


def test_nothing_stays_patched() -> None:
    before = (mx.fast.rms_norm, mx.metal.is_available, mx.default_device, compile_is_enabled())
    count_primitives(importlib.import_module(STOCK), "metal", 2)
    after = (mx.fast.rms_norm, mx.metal.is_available, mx.default_device, compile_is_enabled())
    assert before == after


def test_the_graph_counts_instances_not_primitives(mlx_compile: None) -> None:
    @mx.compile
    def twice(x: mx.array) -> mx.array:
        return x @ x

    a, b = mx.ones((2, 2)), mx.ones((2, 2))
    mx.eval(a, b)
    assert primitives.graph_nodes([twice(a), twice(b)])["Matmul"] == 2


def test_table_shows_every_count() -> None:
    stock, ours = (counts(name, "metal", 6) for name in (STOCK, OURS))
    text = primitives.table([stock, ours, counts(OURS, "metal", 6, n_low=primitives.N_LOW)])
    assert "mlx_lm metal" in text
    assert "kimi_k3 metal banks" in text
    assert str(ours.total) in text
    assert "gated_delta_step_vec" in text


def test_program_counts_our_model_with_two_banks_too() -> None:
    command = [sys.executable, "-m", "benchmarks.primitives", "--json", "--layers", "4", OURS]
    root = Path(primitives.__file__).parents[1]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    assert [row["n_low"] for row in json.loads(result.stdout)] == [0, primitives.N_LOW] * 2


def test_program_prints_json_for_every_module_and_path() -> None:
    command = [sys.executable, "-m", "benchmarks.primitives", "--json", "--layers", "4", STOCK]
    root = Path(primitives.__file__).parents[1]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    rows = json.loads(result.stdout)
    assert [(row["module"], row["path"]) for row in rows] == [(STOCK, "cpu"), (STOCK, "metal")]
    assert rows[1]["total"] == counts(STOCK, "metal", 4).total
