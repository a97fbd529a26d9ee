"""Tower and projector: Moonshot's numbers, a naive twin, packs, and what is refused."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kimi_k3_vision
from tests.model.golden import error, read_golden
from tests.vision import naive
from tests.vision.models import CASES, SMALL, case, golden_vision, small_vision, weights

TOLERANCE = 3e-6


def want(name: str) -> mx.array:
    return read_golden("mm_a").vectors[name]


def projected(vision: kimi_k3_vision.Vision, name: str) -> mx.array:
    return mx.concatenate(vision.see(*case(name)))


@pytest.mark.parametrize("name", CASES)
def test_golden(name):
    vision, (patches, grids) = golden_vision(), case(name)
    merged = vision.vision_tower(patches, [tuple(grid) for grid in grids])
    assert error(merged.reshape(len(merged), 4, -1), want(f"{name}.merged")) < TOLERANCE
    assert error(projected(vision, name), want(f"{name}.projected")) < TOLERANCE


def rms(a: mx.array, b: mx.array) -> float:
    a, b = a.astype(mx.float32), b.astype(mx.float32)
    return (mx.sqrt(mx.square(a - b).mean()) / mx.sqrt(mx.square(b).mean())).item()


@pytest.mark.parametrize("name", CASES)
def test_bfloat16_on_the_cpu_is_closer_than_torch(name):
    ours = rms(projected(golden_vision(mx.bfloat16), name), want(f"{name}.projected"))
    assert ours < rms(want(f"bf16/{name}.projected"), want(f"{name}.projected"))


def test_bfloat16_with_the_gpus_dtypes_is_as_close_as_torch(monkeypatch):
    """The GPU's attention keeps scores in float32, which the CPU's in bfloat16 doesn't."""
    stock = mx.fast.scaled_dot_product_attention

    def fused(*qkv: mx.array, scale: float) -> mx.array:
        return stock(*(x.astype(mx.float32) for x in qkv), scale=scale).astype(qkv[0].dtype)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", fused)
    monkeypatch.setattr(kimi_k3_vision, "on_gpu", lambda: True)
    vision = golden_vision(mx.bfloat16)
    found = {name: projected(vision, name) for name in CASES}
    assert all(x.dtype == mx.bfloat16 for x in found.values())
    ours = [rms(found[name], want(f"{name}.projected")) for name in CASES]
    torch = [rms(want(f"bf16/{name}.projected"), want(f"{name}.projected")) for name in CASES]
    assert np.mean(ours) < np.mean(torch)


sides = st.integers(1, 4).map(lambda n: 2 * n)
some_grids = st.lists(st.tuples(st.integers(1, 4), sides, sides), min_size=1, max_size=3)


@settings(deadline=None, max_examples=12)
@given(grids=some_grids, seed=st.integers(0, 9))
def test_any_grids_equal_the_naive_twin(grids, seed):
    rng = np.random.default_rng(seed)
    n = sum(t * h * w for t, h, w in grids)
    patches = rng.standard_normal((n, 3, 2, 2)).astype(np.float32)
    vision = small_vision()
    slow = naive.features(SMALL, weights(vision), patches, grids)
    fast = vision.see(mx.array(patches), grids)
    assert [len(rows) for rows in fast] == [h * w // 4 for _, h, w in grids]
    assert error(mx.concatenate(fast), mx.array(slow.astype(np.float32))) < 1e-5


@pytest.mark.parametrize("limit", [1, 24, 130, 10**6])
def test_packs_do_not_show(limit, monkeypatch):
    whole = projected(golden_vision(), "packed")
    monkeypatch.setattr(kimi_k3_vision, "PACK", limit)
    assert error(projected(golden_vision(), "packed"), whole) < 1e-6


@settings(deadline=None)
@given(grids=st.lists(st.tuples(st.integers(1, 4), sides, sides), max_size=9))
def test_packs_hold_every_picture_once_and_no_more_than_they_may(grids):
    seen, first = [], 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kimi_k3_vision, "PACK", 100)
        packs = list(kimi_k3_vision.packs(grids))
    for start, pack in packs:
        size = sum(map(kimi_k3_vision.n_patches, pack))
        assert start == first
        assert size <= 100 or len(pack) == 1
        first, seen = first + size, seen + pack
    assert seen == grids


@pytest.mark.parametrize("scores", [1, 1000])
def test_blocks_of_queries_do_not_show(scores, monkeypatch):
    whole = projected(golden_vision(), "larger")
    monkeypatch.setattr(kimi_k3_vision, "SCORES", scores)
    assert error(projected(golden_vision(), "larger"), whole) < 1e-6


def peak(n_pictures: int) -> int:
    """Bytes above what is there before, while so many pictures are seen."""
    vision, grid = golden_vision(), (1, 16, 16)
    patches = mx.zeros((n_pictures * 256, 3, 14, 14))
    mx.eval(patches, vision.parameters())
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    vision.see(patches, [grid] * n_pictures)
    return mx.get_peak_memory() - before


def test_memory_does_not_grow_with_the_pictures(monkeypatch):
    monkeypatch.setattr(kimi_k3_vision, "PACK", 512)
    peak(2)
    assert peak(16) < 1.5 * peak(2)
    monkeypatch.setattr(kimi_k3_vision, "PACK", 10**6)
    assert peak(16) > 3 * peak(2)


def test_a_picture_sees_nothing_of_its_neighbours():
    patches, grids = case("packed")
    n = grids[0][1] * grids[0][2]
    changed = mx.concatenate([patches[:n], patches[n:] + 1])
    before, after = (golden_vision().see(x, grids) for x in (patches, changed))
    assert error(after[0], before[0]) < 1e-6
    assert error(after[1], before[1]) > 1e-2


@pytest.mark.parametrize("eps", [2.0**-7, 1e-5])
def test_a_wrong_eps_shows(eps, monkeypatch):
    """mlx-vlm 0.7.10 has the first."""
    tower = golden_vision().vision_tower.encoder
    for norm in [tower.final_layernorm, *(b[n] for b in tower.blocks for n in ("norm0", "norm1"))]:
        monkeypatch.setattr(norm, "eps", eps)
    assert error(projected(golden_vision(), "native"), want("native.projected")) > TOLERANCE


def test_mlx_vlms_patch_projection_is_turned_back():
    name = "vision_tower.patch_embed.proj.weight"
    w, args = read_golden("mm_a").weights[name], golden_vision().vision_tower.args
    for given_weights in ({name: w}, {name: w.transpose(0, 2, 3, 1)}):
        assert mx.array_equal(kimi_k3_vision.sanitize(args, given_weights)[name], w)
    assert kimi_k3_vision.sanitize(args, {"language_model.x": w}) == {}


@pytest.mark.parametrize(
    ("grids", "words"),
    [
        ([(5, 2, 2)], "a clip has 5 frames; the tower takes 1 to 4"),
        ([(0, 2, 2)], "a clip has 0 frames"),
        ([(1, 3, 2)], "a grid has 3 x 2 patches, not multiples of 2 x 2"),
        ([(1, 2, 0)], "a grid has 2 x 0 patches"),
        ([(1, 2, 2), (1, 2, 2)], "there are 4 patches; the grids have 8"),
    ],
)
def test_impossible_grids_are_refused(grids, words):
    with pytest.raises(ValueError, match=words):
        small_vision().see(mx.zeros((4, 3, 2, 2)), grids)


@pytest.mark.parametrize(
    ("field", "value"),
    [("merge_type", "sd2"), ("attn_bias", True), ("merge_kernel_size", [4, 4])],
)
def test_what_the_tower_is_not_is_refused(field, value):
    with pytest.raises(ValueError, match=rf"vision_config\.{field} is "):
        kimi_k3_vision.VisionArgs.from_dict({field: value})


def test_no_pictures_are_no_features():
    assert small_vision().see(mx.zeros((0, 3, 2, 2)), []) == []
