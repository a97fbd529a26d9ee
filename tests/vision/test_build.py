"""Builds that see: weights carried bit for bit, our loader, prompts with pictures, generation."""

import shutil
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model
from PIL import Image

import kimi_k3
from kimi_k3_mlx.convert.plan import plan_build
from kimi_k3_mlx.convert.profiles import load_profile
from kimi_k3_mlx.convert.run import run
from kimi_k3_mlx.errors import CheckpointError, UsageError
from kimi_k3_mlx.prune_plan import LayerPlan, PrunePlan
from kimi_k3_mlx.runtime.vision import Eyes, embed, load_vision
from kimi_k3_mlx.tensors.local import open_source
from tests.model.golden import error
from tests.tiny_k3 import TinyConfig, write_json, write_source

VISION = ("vision_tower.", "mm_projector.")
TEXT = [1, 7, 300, 42, 11]
UNEVEN = PrunePlan(8, {n: LayerPlan(tuple(range(n, 8))) for n in range(1, 5)})


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("eyes") / "source", TinyConfig(trunk_dtype="F32"))


@pytest.fixture(scope="module")
def convert(source: Path) -> Callable[[str, PrunePlan | None], Path]:
    """A build of the source by profile and plan, made once."""

    def convert_once(profile: str, plan: PrunePlan | None = None) -> Path:
        out = source.parent / f"{profile}-{plan is not None}"
        if not out.exists():
            opened = open_source(source)
            run(plan_build(opened, load_profile(profile), plan), opened, out)
        return out

    return convert_once


def tensors(folder: Path) -> dict[str, tuple]:
    """dtype, shape and bytes of the vision tensors, as they lie in the files."""
    opened = open_source(folder)
    found = {}
    for name in sorted(n for n in opened.tensors if n.startswith(VISION)):
        info = opened.tensors[name]
        raw = (folder / opened.weight_map[name]).read_bytes()
        found[name] = (info.dtype, info.shape, raw[info.begin : info.end])
    return found


@pytest.fixture(scope="module")
def build(convert: Callable[..., Path]) -> Path:
    return convert("mxfp4")


@pytest.fixture(scope="module")
def model(build: Path) -> kimi_k3.Model:
    classes = (kimi_k3.Model, kimi_k3.ModelArgs)
    return load_model(build, get_model_classes=lambda config: classes)[0]


@pytest.fixture(scope="module")
def eyes(build: Path) -> Eyes:
    return load_vision(build)


def picture(width: int = 84, height: int = 56, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def last_logits(model: kimi_k3.Model, eyes: Eyes, image: Image.Image) -> mx.array:
    prompt = embed(model, eyes, [*TEXT, eyes.placeholder, 9], [image])
    return model(prompt.ids[None], input_embeddings=prompt.embeddings[None])[:, -1]


def test_the_source_and_its_build_see_alike(source, eyes):
    images = [picture(), picture(29, 57, seed=1)]
    for a, b in zip(load_vision(source).features(images), eyes.features(images), strict=True):
        assert mx.array_equal(a, b)
    assert [len(rows) for rows in eyes.features(images)] == [6, 6]
    assert eyes.features([]) == []


def test_every_picture_is_seen_as_if_alone(eyes):
    images = [picture(), picture(29, 57, seed=1)]
    for image, rows in zip(images, eyes.features(images), strict=True):
        eyes.kept.clear()
        assert error(rows, eyes.features([image])[0]) < 1e-6


def test_a_picture_that_is_sent_again_is_not_seen_again(eyes, monkeypatch):
    """And pictures of one colour, whose patches are the same bytes in another grid, are two."""
    looks: list[int] = []
    see = type(eyes.vision).see
    monkeypatch.setattr(
        type(eyes.vision),
        "see",
        lambda self, x, grids: looks.append(len(grids)) or see(self, x, grids),
    )
    eyes.kept.clear()
    one, two = (Image.new("RGB", size, "red") for size in ((112, 28), (56, 56)))
    first = eyes.features([one, picture(), one])
    assert looks == [2]
    assert mx.array_equal(first[0], first[2])
    again = eyes.features([picture(), one])
    assert looks == [2]
    assert mx.array_equal(again[1], first[0])
    assert len(eyes.features([two])[0]) == len(first[0])
    assert looks == [2, 1]
    monkeypatch.setattr("kimi_k3_mlx.runtime.vision.KEPT_BYTES", first[0].nbytes)
    eyes.features([two, picture(seed=7)])
    assert sum(rows.nbytes for rows in eyes.kept.values()) <= first[0].nbytes


def test_a_prompt_with_pictures(model, eyes):
    images = [picture(), picture(28, 28, seed=1)]
    ids = [*TEXT, eyes.placeholder, 8, eyes.placeholder, 9]
    prompt = embed(model, eyes, ids, images)
    assert prompt.ids.tolist() == [*TEXT, *[eyes.placeholder] * 6, 8, eyes.placeholder, 9]
    table = model.model.embed_tokens
    assert mx.array_equal(prompt.embeddings[:5], table(mx.array(TEXT)))
    assert mx.array_equal(prompt.embeddings[5:11], eyes.features(images)[0])
    again = embed(model, eyes, prompt.ids.tolist(), images)
    assert mx.array_equal(again.embeddings, prompt.embeddings)


def test_without_pictures_it_is_the_text(model, eyes):
    prompt = embed(model, eyes, TEXT, [])
    ids = mx.array([TEXT])
    found = model(prompt.ids[None], input_embeddings=prompt.embeddings[None])
    assert error(found, model(ids)) < 1e-6


def test_the_answer_depends_on_the_picture(model, eyes):
    a, b = (last_logits(model, eyes, picture(seed=seed)) for seed in (0, 1))
    assert error(a, b) > 1e-2


@pytest.mark.parametrize("step", [3, 2048])
def test_mlx_lm_generates_from_a_prompt_with_pictures(model, eyes, step):
    prompt = embed(model, eyes, [*TEXT, eyes.placeholder, 9], [picture()])
    steps = generate_step(
        prompt.ids,
        model,
        input_embeddings=prompt.embeddings,
        max_tokens=4,
        prefill_step_size=step,
    )
    tokens = [token for token, _ in steps]
    cache, logits = make_prompt_cache(model), None
    logits = model(prompt.ids[None], cache, input_embeddings=prompt.embeddings[None])
    for token in tokens:
        assert logits[0, -1].argmax().item() == token
        logits = model(mx.array([[token]]), cache)


@pytest.mark.parametrize(
    ("n_places", "n_images", "words"),
    [(1, 0, "1 image placeholders for 0 images"), (1, 2, "1 image placeholders for 2 images")],
)
def test_counts_are_compared_before_anything_is_computed(
    n_places, n_images, words, model, eyes, monkeypatch
):
    monkeypatch.setattr(type(eyes.vision), "see", lambda *_: pytest.fail("computed"))
    with pytest.raises(UsageError, match=words):
        embed(model, eyes, [*TEXT, *[eyes.placeholder] * n_places], [picture()] * n_images)


@pytest.mark.parametrize("profile", ["mxfp4", "mxfp4-q4", "q2-q8", "moonshot"])
def test_vision_weights_are_carried_bit_for_bit(profile, source, convert):
    want = tensors(source)
    assert len(want) == 18
    assert tensors(convert(profile)) == want


def test_a_pruned_build_sees_alike(source, convert, eyes):
    pruned = convert("mxfp4", UNEVEN)
    assert tensors(pruned) == tensors(source)
    found, want = (e.features([picture()])[0] for e in (load_vision(pruned), eyes))
    assert mx.array_equal(found, want)
    for file in ("kimi_k3_vision.py", "kimi_k3_vl/processing.py"):
        assert (pruned / file).is_file()


def test_rules_come_from_the_build(build, tmp_path):
    shutil.copytree(build, tmp_path / "build")
    rules = {"media_proc_cfg": {"in_patch_limit": 4}}
    write_json(tmp_path / "build" / "preprocessor_config.json", rules)
    limited = load_vision(tmp_path / "build")
    sizes = [len(e.features([picture()])[0]) for e in (limited, load_vision(build))]
    assert sizes == [2, 6]
    rules["media_proc_cfg"]["fixed_output_tokens"] = 9
    write_json(tmp_path / "build" / "preprocessor_config.json", rules)
    with pytest.raises(
        CheckpointError, match=r"preprocessor_config\.json: fixed_output_tokens is 9"
    ):
        load_vision(tmp_path / "build")


def test_a_build_without_vision_says_so(tiny_text_source):
    with pytest.raises(CheckpointError, match="has no vision_config: it can't see"):
        load_vision(tiny_text_source)


def test_a_config_that_does_not_fit_its_weights(build, tmp_path):
    shutil.copytree(build, tmp_path / "build")
    config = open_source(build).config
    vision = config["vision_config"] | {"vt_intermediate_size": 32}
    write_json(tmp_path / "build" / "config.json", config | {"vision_config": vision})
    with pytest.raises(CheckpointError, match="vision_config and weights don't fit"):
        load_vision(tmp_path / "build")
