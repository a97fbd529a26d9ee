"""Preprocessing: the original's pixels and sizes, transparency, modes, EXIF, limits."""

import io
import json
import lzma
import math
from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from kimi_k3_vl.processing import ImageRules, image_prompt
from tests.model.golden import FOLDER

RULES = ImageRules()
PICTURES = [
    "rgb_30x45",
    "rgb_56x28_exact",
    "rgba_40x33",
    "la_29x29",
    "l_13x9",
    "one_pixel",
    "palette_50x20",
    "palette_transparent_50x20",
]


@cache
def vectors() -> tuple[dict, dict[str, np.ndarray]]:
    """The reference's rules, sizes and prompts; its pictures as files and as patches."""
    raw = lzma.decompress((FOLDER / "preproc.safetensors.xz").read_bytes())
    tensors, metadata = mx.load(io.BytesIO(raw), format="safetensors", return_metadata=True)
    return json.loads(metadata["rules"]), {name: np.array(x) for name, x in tensors.items()}


def picture(name: str) -> Image.Image:
    return Image.open(io.BytesIO(vectors()[1][f"{name}.png"].tobytes()))


def values(steps: np.ndarray) -> np.ndarray:
    """The float32 that the reference makes of a byte."""
    return (steps / 255.0).astype(np.float32) * 2 - 1


def test_the_defaults_are_k3s():
    assert ImageRules.from_config({"media_proc_cfg": vectors()[0]["config"]}) == RULES
    assert ImageRules.from_config({}) == RULES


@pytest.mark.parametrize("name", PICTURES)
def test_golden_pictures(name):
    about, tensors = vectors()
    image, about = picture(name), about["images"][name]
    assert (image.mode, list(image.size)) == (about["mode"], about["size"])
    assert np.array_equal(RULES.patches(image), values(tensors[f"{name}.pixel_values"]))
    assert [list(RULES.grid(*image.size))] == tensors[f"{name}.grid_thws"].tolist()
    assert RULES.n_tokens(*image.size) == about["tokens"]
    assert image_prompt(*image.size) == about["prompt"]


def test_golden_sizes():
    sizes = vectors()[0]["sizes"]
    assert len(sizes) > 20
    for name, want in sizes.items():
        width, height = map(int, name.split("x"))
        size = RULES.size(width, height)
        names = ("new_width", "new_height", "pad_width", "pad_height")
        assert size == tuple(want[part] for part in names), name
        assert list(RULES.grid(width, height)) == want["grid_thw"], name
        assert RULES.n_tokens(width, height) == want["num_tokens"], name


@pytest.mark.parametrize(
    ("width", "height", "n_tokens"),
    [
        (224, 224, 64),
        (448, 448, 256),
        (640, 480, 414),
        (611, 437, 352),
        (1920, 1080, 2691),
        (3585, 3585, 16641),
        (1, 1, 1),
    ],
)
def test_tokens(width, height, n_tokens):
    assert RULES.n_tokens(width, height) == n_tokens


@given(st.integers(1, 30000), st.integers(1, 30000))
def test_sizes_keep_their_promises(width, height):
    size = RULES.size(width, height)
    assert 1 <= size.width <= min(width, 7168)
    assert 1 <= size.height <= min(height, 7168)
    assert (size.width + size.pad_width) % 28 == (size.height + size.pad_height) % 28 == 0
    assert max(size.pad_width, size.pad_height) < 28
    whole = max(1, width // 14) * max(1, height // 14)
    scale = min(1, math.sqrt(65536 / whole), 7168 / width, 7168 / height)
    assert size[:2] == (max(1, int(width * scale)), max(1, int(height * scale)))


def noise(mode: str, width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 4), np.uint8)
    image = Image.fromarray(pixels, "RGBA")
    return image if mode == "RGBA" else image.convert(mode)


def naive_patches(image: Image.Image) -> list[np.ndarray]:
    """Pixel by pixel, of an RGB or RGBA picture that needs no resampling."""
    width, height = image.size
    patches = []
    for top in range(0, -(-height // 28) * 28, 14):
        for left in range(0, -(-width // 28) * 28, 14):
            patch = np.full((3, 14, 14), -1, np.float32)
            for y in range(min(14, height - top)):
                for x in range(min(14, width - left)):
                    place = (left + x, top + y)
                    patch[:, y, x] = [(v / 255 - 0.5) * 2 for v in shown(image, *place)]
            patches.append(patch)
    return patches


def shown(image: Image.Image, x: int, y: int) -> list[int]:
    """A pixel over the chessboard."""
    pixel = image.getpixel((x, y))
    if len(pixel) == 3:
        return list(pixel)
    alpha = np.float32(pixel[3]) / np.float32(255)
    board = 180 if (x // 8 + y // 8) % 2 else 255
    return [int(alpha * np.float32(v) + (1 - alpha) * np.float32(board)) for v in pixel[:3]]


@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
@pytest.mark.parametrize("size", [(31, 17), (28, 57)])
def test_patches_equal_the_naive_twin(mode, size):
    image = noise(mode, *size)
    np.testing.assert_allclose(RULES.patches(image), np.array(naive_patches(image)), atol=1e-6)


def joined(patches: np.ndarray, grid: tuple[int, int, int]) -> np.ndarray:
    """Patches as a picture [height, width, 3] of bytes."""
    _, rows, columns = grid
    cells = patches.reshape(rows, columns, 3, 14, 14).transpose(0, 3, 1, 4, 2)
    return np.rint((cells.reshape(rows * 14, columns * 14, 3) + 1) * 127.5).astype(np.uint8)


def test_a_large_picture_is_resampled_by_bicubic():
    rules = ImageRules(in_patch_limit=16)
    image = noise("RGB", 200, 100)
    width, height = rules.size(200, 100)[:2]
    assert (width, height) == (int(200 * math.sqrt(16 / 98)), int(100 * math.sqrt(16 / 98)))
    seen = joined(rules.patches(image), rules.grid(200, 100))
    want = np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))
    assert np.array_equal(seen[:height, :width], want)
    assert not seen[height:].any()
    assert not seen[:, width:].any()


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "CMYK", "YCbCr", "HSV", "LAB", "I"])
def test_modes_look_like_what_pillow_makes_of_them(mode):
    image = noise("RGBA", 28, 28)
    image = image.convert("RGB").convert(mode) if mode in ("LAB", "HSV") else image.convert(mode)
    if mode in ("LA", "PA"):
        image.putalpha(255)
    want = np.asarray(image.convert("RGB"))
    assert np.array_equal(joined(RULES.patches(image), (1, 2, 2)), want)


def test_exif_orientation_is_left_alone():
    image = noise("RGB", 28, 56)
    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    image.save(file, "PNG", exif=exif)
    turned = Image.open(file)
    assert ImageOps.exif_transpose(turned).size == (56, 28)
    assert np.array_equal(RULES.patches(turned), RULES.patches(image))


def test_a_fully_transparent_picture_is_the_board():
    image = Image.new("RGBA", (28, 28), (9, 9, 9, 0))
    seen = joined(RULES.patches(image), (1, 2, 2))[..., 0]
    assert np.array_equal(np.unique(seen), [180, 255])
    assert (seen[0, 0], seen[0, 8], seen[8, 8]) == (255, 180, 255)


@pytest.mark.parametrize(("pattern", "gray"), [("black", 0), ("gray", 128), ("white", 255)])
def test_plain_backgrounds(pattern, gray):
    rules = ImageRules(transparent_bg_config={"pattern": pattern})
    image = Image.new("RGBA", (28, 28), (9, 9, 9, 0))
    assert np.unique(joined(rules.patches(image), (1, 2, 2))).tolist() == [gray]


def test_the_background_may_be_filled_before_resizing():
    image = noise("RGBA", 200, 100)
    filled = {
        stage: ImageRules(in_patch_limit=16, transparent_bg_fill_stage=stage).patches(image)
        for stage in ("before_resize", "after_resize")
    }
    opaque = ImageRules(in_patch_limit=16).patches(RULES.opaque(image))
    assert np.array_equal(filled["before_resize"], opaque)
    assert not np.array_equal(filled["before_resize"], filled["after_resize"])


@pytest.mark.parametrize(
    ("width", "height", "grid"),
    [(1000, 14, (1, 2, 8)), (14, 1000, (1, 8, 2)), (57, 57, (1, 6, 6)), (2000, 2000, (1, 8, 8))],
)
def test_limit_on_one_side(width, height, grid):
    rules = ImageRules(patch_limit_on_one_side=8)
    assert rules.grid(width, height) == grid
    assert rules.patches(Image.new("RGB", (width, height))).shape == (grid[1] * grid[2], 3, 14, 14)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"patch_limit_on_one_side": 9}, "patch_limit_on_one_side is 9, not a multiple"),
        ({"fixed_output_tokens": 64}, "fixed_output_tokens is 64; only null is supported"),
        ({"transparent_bg_fill_stage": "never"}, "transparent_bg_fill_stage is 'never'"),
        ({"transparent_bg_config": {"pattern": "dots"}}, "transparent_bg_config.pattern is 'dots'"),
    ],
)
def test_rules_that_k3_has_not_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        ImageRules.from_config({"media_proc_cfg": change})


def test_a_kernel_may_be_a_list():
    assert ImageRules.from_config({"media_proc_cfg": {"merge_kernel_size": [2, 2]}}) == RULES
