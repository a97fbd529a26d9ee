"""The prune plan's JSON, and every way in which a plan can be wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_k3_mlx.errors import UsageError
from kimi_k3_mlx.prune_plan import (
    LayerPlan,
    PrunePlan,
    check_keep,
    check_plan,
    keep_first,
    read_plan,
)
from kimi_k3_mlx.schema import Quantization

TWO_BITS = Quantization("affine", 2, 64)
GRADED = PrunePlan(
    n_experts=8,
    layers={1: LayerPlan((0, 2, 3, 5), (2, 3)), 2: LayerPlan((1, 6))},
    low=TWO_BITS,
    chosen_by={"criterion": "reap", "对": ["中文", 2]},
)
keeps = st.sets(st.integers(0, 30), min_size=2).map(sorted).map(tuple)


@given(st.dictionaries(st.integers(0, 99), keeps, min_size=1), st.booleans())
def test_a_plan_survives_its_file(layers: dict[int, tuple[int, ...]], pad: bool) -> None:
    plan = PrunePlan(31, {n: LayerPlan(keep) for n, keep in layers.items()}, pad_uniform=pad)
    assert read_plan(plan.to_text(), "plan.json") == plan


def test_a_graded_plan_survives_its_file_which_has_a_line_for_each_layer() -> None:
    text = GRADED.to_text()
    assert read_plan(text, "plan.json") == GRADED
    assert json.loads(text) == GRADED.to_json()
    assert '    "1": {"keep": [0, 2, 3, 5], "low": [2, 3]},\n' in text


def test_the_first_bank_comes_first() -> None:
    layer = GRADED.layers[1]
    assert (layer.first, layer.low, layer.order) == ((0, 5), (2, 3), (0, 5, 2, 3))


def test_the_hash_is_that_of_what_stays() -> None:
    assert GRADED.sha256 == replace(GRADED, chosen_by={}).sha256
    assert GRADED.sha256 != replace(GRADED, low=Quantization("affine", 3, 64)).sha256
    assert GRADED.sha256 != replace(GRADED, pad_uniform=True).sha256


def test_what_stock_tools_can_load() -> None:
    assert keep_first(4, 8, (1, 2)).is_uniform
    assert not GRADED.is_uniform
    uneven = PrunePlan(8, {1: LayerPlan((0, 1)), 2: LayerPlan((0, 1, 2))})
    assert not uneven.is_uniform
    assert replace(uneven, pad_uniform=True).is_uniform
    assert uneven.largest == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:-3], "plan p is not JSON"),
        (lambda text: "[1]", "p is not a prune plan: its kind is not 'kimi_k3_mlx.prune_plan'"),
        (lambda text: text.replace('"version": 1', '"version": 2'), "version 2, expected 1"),
        (lambda text: text.replace('"n_experts"', '"experts"'), "lacks the field 'n_experts'"),
        (lambda text: text.replace("[1, 6]", "[1, true]"), "damaged: 'True' is not a whole number"),
        (lambda text: text.replace("[1, 6]", "[1, -6]"), "damaged: '-6' is not a whole number"),
        (lambda text: text.replace("[1, 6]", "7"), "damaged: "),
        (lambda text: text.replace('"2":', '"two":'), "damaged: "),
        (lambda text: text.replace('"bits"', '"bytes"'), "'low': bits is None, expected one of 2"),
        (lambda text: text.replace('"bits": 2', '"bits": true'), "'low': bits is True"),
        (
            lambda text: text.replace('"bits": 2', '"bits": 4'),
            "'low': bits is 4, expected one",
        ),
        (
            lambda text: text.replace('e": 64', 'e": 8'),
            "'low': group_size is 8, expected",
        ),
        (
            lambda text: text.replace('"affine"', '"mxfp4"'),
            "mode of 'low' is 'mxfp4'",
        ),
        (lambda text: text.replace('"2":', '"1":'), "not JSON: '1' occurs twice in an object"),
        (lambda text: text.replace('"2":', '"02":'), "damaged: layer '02' is not a plain number"),
        (lambda text: text.replace('"reap"', "NaN"), "not JSON: NaN is no number of JSON's"),
        (lambda text: "[" * 100_000, "plan p is not JSON"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(change: Callable[[str], str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_plan(change(GRADED.to_text()), "p")


GOOD = LayerPlan((0, 2, 3, 5))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_experts": 896}, "for a model with 896 experts a layer, this one has 8"),
        ({"layers": {1: GOOD}}, "plan: layer 2 is missing in the plan"),
        ({"layers": {0: GOOD, 1: GOOD, 2: GOOD}}, "plan: layer 0 has no routed experts"),
        ({"layers": {1: GOOD, 2: LayerPlan((0,))}}, "plan keeps 1 experts in layer 2"),
        ({"layers": {1: GOOD, 2: LayerPlan((0, 0))}}, "lists expert 0 after 0 in layer 2"),
        ({"layers": {1: GOOD, 2: LayerPlan((0, 8))}}, "keeps expert 8 in layer 2, which has 8"),
        ({"low": None}, "layer 1 has a second bank, but the plan has no field 'low'"),
        ({"pad_uniform": True}, "layer 1 has a second bank, which can't be padded"),
        ({"layers": {1: LayerPlan((0, 2), (3,)), 2: GOOD}}, "'low' of layer 1 must list"),
        ({"layers": {1: LayerPlan((0, 2), (2, 0)), 2: GOOD}}, "'low' of layer 1 must list"),
        ({"layers": {1: LayerPlan((0, 2), (0, 2)), 2: GOOD}}, "layer 1 has all its experts in"),
    ],
)
def test_a_plan_for_another_model_or_none_is_refused(change: dict[str, Any], message: str) -> None:
    check_plan(GRADED, 8, (1, 2), 2)
    with pytest.raises(UsageError, match=message):
        check_plan(replace(GRADED, **change), 8, (1, 2), 2)


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (range(12), "plan keeps 12 experts in layer 40 but the router selects 16 per token."),
        ([*range(16), 15], "plan lists expert 15 after 15 in layer 40"),
        ([*range(1, 17), 0], "plan lists expert 0 after 16 in layer 40"),
        ([*range(16), 896], "plan keeps expert 896 in layer 40, which has 896 experts."),
        ([-1, *range(16)], "plan lists expert -1 after -1 in layer 40"),
    ],
)
def test_keep_sets_that_can_not_be(keep: list[int], message: str) -> None:
    with pytest.raises(UsageError) as error:
        check_keep(40, keep, 896, 16)
    assert message in error.value.message


def test_the_hint_for_too_few() -> None:
    with pytest.raises(UsageError) as error:
        check_keep(40, range(12), 896, 16)
    assert error.value.hint == "raise --keep to at least 16 (64 recommended)."
    check_keep(40, range(16), 896, 16)
