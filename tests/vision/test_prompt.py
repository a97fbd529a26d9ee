"""Pictures in prompts: Moonshot's merged embeddings and logits, both conventions, padding."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache, BatchKVCache

from kimi_k3_vl.prompt import Merged, expand, merge
from tests.model.golden import error, float32_model, read_golden
from tests.vision.models import case, golden_vision

TOLERANCE = 5e-5
MEDIA, PAD = 505, 511


def merged(name: str) -> Merged:
    vectors = read_golden("mm_a").vectors
    features = golden_vision().see(*case(name))
    table = float32_model("mm_a").model.embed_tokens
    return merge(table, vectors[f"{name}.input_ids"].tolist(), features, MEDIA, PAD)


def caches(padding: list[int]) -> list:
    return [
        ArraysCache(2, left_padding=padding) if layer.is_linear else BatchKVCache(padding)
        for layer in float32_model("mm_a").layers
    ]


@pytest.mark.parametrize("name", ["one", "batch"])
def test_golden_embeddings(name):
    vectors, found = read_golden("mm_a").vectors, merged(name)
    assert error(found.embeddings, vectors[f"{name}.merged_embeds"]) < 3e-6
    assert mx.array_equal(found.mask, vectors[f"{name}.merged_mask"])
    assert found.ids.shape == found.mask.shape
    n_rows = sum(len(rows) for rows in golden_vision().see(*case(name)))
    assert (found.ids == MEDIA).sum().item() == n_rows
    assert mx.abs(mx.where(found.mask[..., None], 0, found.embeddings)).max().item() == 0


@pytest.mark.parametrize("name", ["one", "batch"])
def test_golden_logits_and_decoding(name):
    vectors, model, found = read_golden("mm_a").vectors, float32_model("mm_a"), merged(name)
    mask = found.mask[..., None]
    cache = caches((found.mask.shape[1] - found.mask.sum(1)).tolist())
    logits = model(found.ids, cache, input_embeddings=found.embeddings)
    assert error(logits * mask, vectors[f"{name}.logits"] * mask) < TOLERANCE
    ids = vectors[f"{name}.next_ids"]
    steps = [model(ids[:, i : i + 1], cache) for i in range(ids.shape[1])]
    assert error(mx.concatenate(steps, 1), vectors[f"{name}.decode_logits"]) < TOLERANCE


def test_the_expanded_convention_gives_the_same():
    vectors, found = read_golden("mm_a").vectors, merged("batch")
    features = golden_vision().see(*case("batch"))
    prompts = vectors["batch.input_ids"].tolist()
    expanded = expand(prompts, [len(rows) for rows in features], MEDIA)
    assert [len(prompt) for prompt in expanded] == [13, 6]
    table = float32_model("mm_a").model.embed_tokens
    again = merge(table, expanded, features, MEDIA, PAD)
    assert all(mx.array_equal(a, b) for a, b in zip(again, found, strict=True))


def test_padding_goes_where_a_prompt_ends_in_it():
    table = nn.Embedding(10, 4)
    left = merge(table, [[1, 2, 3], [4]], [], 5, 9)
    assert left.ids.tolist() == [[1, 2, 3], [9, 9, 4]]
    assert left.mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    right = merge(table, [[1, 5, 2], [4, 9, 9]], [mx.ones((2, 4))], 5, 9)
    assert right.ids.tolist() == [[1, 5, 5, 2], [4, 9, 9, 9]]
    assert right.mask.tolist() == [[1, 1, 1, 1], [1, 0, 0, 0]]
    assert mx.array_equal(right.embeddings[1, 1:], mx.zeros((3, 4)))


def test_ids_outside_the_table_are_never_embedded():
    """A wrapper that embeds first reads whatever lies behind the table."""
    asked = []

    def table(ids: mx.array) -> mx.array:
        asked.append(ids.max().item())
        return mx.ones((*ids.shape, 4))

    found = merge(table, [[1, 5000, 2], [9000, 2]], [mx.full((3, 4), 7.0)], 5000, 9000)
    assert asked == [2]
    assert found.embeddings[..., 0].tolist() == [[1, 7, 7, 7, 1], [0, 0, 0, 0, 1]]


def test_without_a_pad_token_short_prompts_are_padded_all_the_same():
    found = merge(nn.Embedding(4, 2), [[1], [1, 2]], [], 3)
    assert found.mask.tolist() == [[0, 1], [1, 1]]
    assert mx.array_equal(found.embeddings[0, 0], mx.zeros(2))


def test_features_take_the_dtype_of_the_table():
    table = nn.Embedding(4, 2)
    table.weight = table.weight.astype(mx.bfloat16)
    assert merge(table, [[3]], [mx.ones((1, 2))], 3).embeddings.dtype == mx.bfloat16


@given(st.lists(st.lists(st.sampled_from([0, 1, 2]), min_size=1), min_size=1), st.data())
def test_expand_is_the_loop(prompts, data):
    n = sum(prompt.count(2) for prompt in prompts)
    counts = data.draw(st.lists(st.integers(1, 5), min_size=n, max_size=n))
    left, want = list(counts), []
    for prompt in prompts:
        row = []
        for token in prompt:
            row += [token] * (left.pop(0) if token == 2 else 1)
        want.append(row)
    assert expand(prompts, counts, 2) == want
    assert expand(want, counts, 2) == want


@pytest.mark.parametrize(
    ("prompt", "counts", "words"),
    [
        ([1, 5], [], "1 image placeholders for 0 images"),
        ([1], [3], "0 image placeholders for 1 images of 3 tokens"),
        ([5, 5], [3], "2 image placeholders for 1 images"),
        ([5], [2, 3], "1 image placeholders for 2 images of 5 tokens"),
    ],
)
def test_other_numbers_are_refused(prompt, counts, words):
    with pytest.raises(ValueError, match=words):
        expand([prompt], counts, 5)
