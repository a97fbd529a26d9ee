"""Builds that carry our code, in stock mlx-lm and stock mlx-vlm: text and images."""

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.utils import load_model as load_in_mlx_lm

from kimi_k3_mlx.convert.run import run
from kimi_k3_mlx.runtime.vision import embed, load_vision
from tests.convert.conftest import planned
from tests.model import builds
from tests.model.golden import error
from tests.tiny_k3 import TinyConfig, write_source

pytest.importorskip("mlx_vlm", reason="mlx-vlm is not installed: pip install -e '.[vision]'")
vlm = importlib.import_module("mlx_vlm.utils")

COUNTS = [0, 8, 7, 6, 4]
LOW = [0, 0, 2, 5, 1]
TWO_BITS = {"group_size": 32, "bits": 2, "mode": "affine"}
NORMS = ("norm0", "norm1")
TEXT = mx.array([[1, 7, 300, 42, 11, 200, 5, 9, 31, 64, 2, 100]])


@pytest.fixture(scope="module")
def uniform(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 build as the converter writes it, with nothing of ours in it."""
    folder = tmp_path_factory.mktemp("vision")
    source = write_source(folder / "source", TinyConfig(trunk_dtype="F32"))
    run(*planned(source), folder / "build")
    return folder / "build"


@pytest.fixture(scope="module")
def graded(uniform: Path) -> Path:
    """Other counts in every layer, and the last experts of three layers with two bits."""
    return builds.graded(uniform, uniform.parent / "graded", COUNTS, LOW, TWO_BITS)


@pytest.fixture(scope="module")
def load(uniform: Path) -> Callable[[Path], nn.Module]:
    """mlx-vlm's loader, once per folder."""
    loaded: dict[Path, nn.Module] = {}

    def load_once(folder: Path) -> nn.Module:
        if folder not in loaded:
            loaded[folder] = vlm.load_model(folder)
        return loaded[folder]

    return load_once


def picture(seed: int = 0) -> tuple[mx.array, mx.array]:
    """The patches of a 56 x 84 picture, and their grid: 2 x 3 tokens after merging."""
    pixels = np.random.default_rng(seed).standard_normal((24, 3, 14, 14)).astype(np.float32)
    return mx.array(pixels), mx.array([[1, 4, 6]])


def text_logits(model: nn.Module) -> mx.array:
    return model.language_model(TEXT).logits


def image_logits(model: nn.Module, seed: int = 0) -> mx.array:
    """A text with the picture in its middle."""
    pad = model.config.media_placeholder_token_id
    ids = mx.concatenate([TEXT[:, :5], mx.full((1, 6), pad), TEXT[:, 5:]], 1)
    pixels, grid = picture(seed)
    embeddings = model.get_input_embeddings(ids, pixels, grid_thws=grid).inputs_embeds
    return model.language_model(ids, inputs_embeds=embeddings).logits


def with_torchs_eps(stock: nn.Module) -> nn.Module:
    """mlx-vlm 0.7.10 gives the norms of its tower 2^-7, which only old torch had, in bfloat16."""
    tower = stock.vision_tower.encoder
    for norm in [tower.final_layernorm, *(b[name] for b in tower.blocks for name in NORMS)]:
        assert norm.eps == 2**-7
        norm.eps = 2**-23
    return stock


def is_ours(model: nn.Module) -> bool:
    return type(model).__module__.startswith("kimi_k3_vl")


def test_our_code_gives_stocks_logits(uniform, load):
    ours = load(builds.with_code(uniform, uniform.parent / "with_code"))
    stock = load(uniform)
    assert is_ours(ours)
    assert not is_ours(stock)
    assert error(text_logits(ours), text_logits(stock)) < 3e-5


def test_the_eps_is_all_that_differs_from_stocks_tower(uniform, load):
    stock = vlm.load_model(uniform)
    ours = image_logits(load(builds.with_code(uniform, uniform.parent / "eps")))
    assert error(image_logits(stock), ours) > 0.1
    assert error(image_logits(with_torchs_eps(stock)), ours) < 3e-5


def test_a_graded_build_sees_in_mlx_vlm(graded, load):
    model = load(graded)
    assert is_ours(model)
    assert "switch_mlp_low" in model.language_model.layers[3].mlp
    bank = model.language_model.layers[3].mlp.switch_mlp_low.gate_proj
    assert (bank.bits, bank.mode, bank.num_experts) == (2, "affine", 5)
    a, b = image_logits(model), image_logits(model, seed=1)
    assert error(a[:, :5], b[:, :5]) < 3e-5
    assert error(a[:, 11:], b[:, 11:]) > 1e-2


def test_both_loaders_give_the_same_text_model(graded, load):
    text, _ = load_in_mlx_lm(graded, trust_remote_code=True)
    assert type(text).__module__ == "custom_model"
    assert mx.array_equal(load(graded).language_model(TEXT).logits, text(TEXT))


def test_banks_of_equal_bits_give_the_uniform_builds_logits(uniform, load):
    split = load(builds.graded(uniform, uniform.parent / "split", [0, 8, 8, 8, 8], LOW, None))
    assert error(text_logits(split), text_logits(load(uniform))) < 3e-5
    whole = load(builds.with_code(uniform, uniform.parent / "whole"))
    assert error(image_logits(split), image_logits(whole)) < 3e-5


@pytest.fixture
def answer(graded, tmp_path) -> Callable[[int, int], list[str]]:
    """mlx-vlm's own generation, after its own loading, processing and chat encoding."""
    generate = importlib.import_module("mlx_vlm").generate
    chat = importlib.import_module("mlx_vlm.prompt_utils").apply_chat_template
    image = pytest.importorskip("PIL.Image")
    model, processor = vlm.load(str(graded))

    def run_generation(n_images: int, max_tokens: int):
        pixels = np.random.default_rng(0).integers(0, 255, (56, 84, 3), dtype=np.uint8)
        paths = [str(tmp_path / f"{i}.png") for i in range(n_images)]
        for path in paths:
            image.fromarray(pixels).save(path)
        prompt = chat(processor, vlm.load_config(graded), "What is this?", num_images=n_images)
        sampling = {"max_tokens": max_tokens, "temperature": 0.0}
        return generate(model, processor, prompt, image=paths or None, **sampling)

    return run_generation


def test_mlx_vlm_generates(answer):
    text, seen = answer(0, 6), answer(1, 6)
    assert text.generation_tokens == seen.generation_tokens == 6
    assert seen.prompt_tokens > text.prompt_tokens + 5


def test_one_placeholder_for_a_picture_becomes_many(graded, load):
    model, (pixels, grid) = load(graded), picture()
    pad = model.config.media_placeholder_token_id
    one = mx.concatenate([TEXT[:, :5], mx.array([[pad]]), TEXT[:, 5:]], 1)
    many = mx.concatenate([TEXT[:, :5], mx.full((1, 6), pad), TEXT[:, 5:]], 1)
    kept = model.encode_images(pixels, grid_thws=grid)
    found = [
        model.get_input_embeddings(one, pixels, grid_thws=grid),
        model.get_input_embeddings(many, pixels, grid_thws=grid),
        model.get_input_embeddings(many, pixels, cached_image_features=kept),
    ]
    for embedded in found[1:]:
        assert mx.array_equal(embedded.inputs_embeds, found[0].inputs_embeds)
    logits = model(many, pixels, grid_thws=grid).logits
    assert mx.array_equal(logits, image_logits(model))


def test_mlx_vlm_and_kimi_k3_see_alike(uniform, graded, load):
    """A palette that shrinks is where mlx-vlm's own preprocessing differs."""
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (28, 7200, 3), dtype=np.uint8)
    palette = image.fromarray(pixels).convert("P")
    model, eyes = load(graded), load_vision(uniform)
    inputs = vlm.load_processor(graded)(images=[palette], text="<|media_pad|>")
    embedded = model.get_input_embeddings(**inputs).inputs_embeds
    want = embed(model.language_model, eyes, [eyes.placeholder], [palette]).embeddings
    assert mx.array_equal(embedded[0], want)
    stock = importlib.import_module("mlx_vlm.models.kimi_k3").ImageProcessor()
    assert error(stock([palette])["pixel_values"], inputs["pixel_values"]) > 0.1


def test_a_build_without_vision_runs(tmp_path):
    source = write_source(tmp_path / "source", TinyConfig(vision=False, trunk_dtype="F32"))
    run(*planned(source), tmp_path / "build")
    folder = builds.graded(tmp_path / "build", tmp_path / "graded", COUNTS, LOW, TWO_BITS)
    model = vlm.load_model(folder)
    assert model.vision_tower is None
    text, _ = load_in_mlx_lm(folder, trust_remote_code=True)
    assert mx.array_equal(model.language_model(TEXT).logits, text(TEXT))


def test_padded_batches_in_mlx_vlms_caches(graded, load):
    """As mlx-vlm batches: left padding, in its own cache classes."""
    caches = importlib.import_module("mlx_vlm.models.cache")
    model = load(graded).language_model
    cache = [
        caches.ArraysCache(2, left_padding=[0, 4])
        if isinstance(entry, caches.ArraysCache)
        else caches.BatchKVCache([0, 4])
        for entry in model.make_cache()
    ]
    short = mx.concatenate([mx.zeros((1, 4), TEXT.dtype), TEXT[:, :8]], 1)
    batch = mx.concatenate([TEXT, short])
    logits = model(batch, cache=cache).logits
    step = model(mx.array([[3], [4]]), cache=cache).logits
    assert error(logits[:1], model(TEXT).logits) < 3e-5
    assert error(logits[1:, 4:], model(TEXT[:, :8]).logits) < 3e-5
    longer = mx.concatenate([TEXT[:, :8], mx.array([[4]])], 1)
    assert error(step[1:], model(longer).logits[:, -1:]) < 3e-5


ALONE = """
import sys
from pathlib import Path
from mlx_vlm.utils import load_model
model = load_model(Path(sys.argv[1]))
sys.exit(bool({"kimi_k3", "kimi_k3_vl"} & set(sys.modules)))
"""


def test_a_build_needs_nothing_that_is_installed(graded, tmp_path):
    """Nor takes it, nor leaves anything of its own under a public name."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [sys.executable, "-c", ALONE, str(graded)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_every_build_runs_its_own_code(uniform, tmp_path):
    """Two versions of the package in one process."""
    for name in ("first", "second"):
        folder = builds.with_code(uniform, tmp_path / name)
        with (folder / "kimi_k3_vl" / "model.py").open("a") as file:
            file.write(f"\n\nModel.version = {name!r}\n")
    models = [vlm.load_model(tmp_path / name) for name in ("first", "second")]
    assert [model.version for model in models] == ["first", "second"]
    packages = {type(model).__module__.partition(".")[0] for model in models}
    assert len(packages) == 2


def test_mlx_vlm_finds_no_class_that_would_mislead_it(graded):
    """VisionModel would be built again for its sanitize; an audio config asks for AudioConfig."""
    module, _ = vlm.get_model_and_args(vlm.load_config(graded), graded)
    assert not hasattr(module, "VisionModel")
    assert not hasattr(module, "AudioModel")
    config = module.ModelConfig.from_dict(vlm.load_config(graded))
    assert not hasattr(config, "audio_config")
    assert not hasattr(module.LanguageModel, "sanitize")
