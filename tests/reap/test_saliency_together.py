"""How often two experts are chosen together, against a loop; and stores without it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kimi_k3_mlx.errors import UsageError
from kimi_k3_mlx.reap.pairs import co_selected
from kimi_k3_mlx.reap.saliency import TOGETHER, load_saliency, merge
from tests.reap.routing import EXPERTS, TOP_K, accumulator, feed, random_batch, random_store


def test_together_is_a_count_of_pairs_of_experts() -> None:
    batch, acc = random_batch(4), accumulator()
    for sequences in ([0, 1, 2], [3, 4, 5, 6, 7, 8]):
        feed(acc, 2, batch.of(sequences))
    expected = np.zeros((EXPERTS, EXPERTS), np.int64)
    for chosen in batch.experts:
        for one in chosen:
            for other in chosen:
                expected[one, other] += one != other
    found = acc.state()[TOGETHER]
    assert found.dtype == np.uint32
    assert np.array_equal(found[1], expected)
    assert not found[[0, 2]].any()
    assert np.array_equal(co_selected(batch.experts, EXPERTS), expected)
    assert expected.sum() == len(batch) * TOP_K * (TOP_K - 1)


def test_a_store_without_together_loads_and_drops_it_from_a_sum(tmp_path: Path) -> None:
    one, other = random_store(1), random_store(2)
    old = replace(one, arrays={n: a for n, a in one.arrays.items() if n != TOGETHER})
    old.save(tmp_path / "old.safetensors")
    loaded = load_saliency(tmp_path / "old.safetensors")
    assert loaded.unmeasured == (TOGETHER,)
    assert merge(loaded, other).unmeasured == (TOGETHER,)
    assert merge(one, other).arrays[TOGETHER].sum() == sum(
        store.arrays[TOGETHER].sum() for store in (one, other)
    )
    with pytest.raises(UsageError, match="the statistics lack together: it was not measured"):
        loaded.arrays[TOGETHER]
