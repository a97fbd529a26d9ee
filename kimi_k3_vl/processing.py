"""What K3 does to a picture before the tower: size, resampling, background, padding, patches.

Input: a PIL image of any mode and the rules of `preprocessor_config.json`. Output: patches and
their grid, equal to the original's to the last bit. Needs numpy and Pillow only. The picture's EXIF
orientation is not applied, and an animation counts as its current frame, as in the original.
"""

import math
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

BOARD = {
    "pattern": "chessboard",
    "chessboard_square_size": 8,
    "chessboard_square_on_top_left": True,
    "chessboard_white_value": 255,
    "chessboard_gray_value": 180,
}
PLAIN = {"black": 0, "gray": 128, "white": 255}
STAGES = ("before_resize", "after_resize")


class Size(NamedTuple):
    """A picture after resampling, in pixels, and the black stripes that fill its last patches."""

    width: int
    height: int
    pad_width: int
    pad_height: int


@dataclass(frozen=True)
class ImageRules:
    """`media_proc_cfg` of preprocessor_config.json; the defaults are those of K3."""

    patch_size: int = 14
    merge_kernel_size: int = 2
    in_patch_limit: int = 65536
    patch_limit_on_one_side: int = 512
    fixed_output_tokens: int | None = None
    image_mean: list[float] = field(default_factory=lambda: [0.5, 0.5, 0.5])
    image_std: list[float] = field(default_factory=lambda: [0.5, 0.5, 0.5])
    transparent_bg_fill_stage: str = "after_resize"
    transparent_bg_config: dict[str, Any] = field(default_factory=BOARD.copy)

    def __post_init__(self) -> None:
        if self.patch_limit_on_one_side % self.merge_kernel_size:
            raise ValueError(
                f"patch_limit_on_one_side is {self.patch_limit_on_one_side}, "
                f"not a multiple of merge_kernel_size, {self.merge_kernel_size}."
            )
        if self.fixed_output_tokens is not None:
            raise ValueError(
                f"fixed_output_tokens is {self.fixed_output_tokens}; only null is supported: "
                "the tower makes as many tokens as a picture's size needs."
            )
        if self.transparent_bg_fill_stage not in STAGES:
            stage = self.transparent_bg_fill_stage
            raise ValueError(f"transparent_bg_fill_stage is {stage!r}, not one of {STAGES}.")
        pattern = self.transparent_bg_config.get("pattern")
        if pattern not in (BOARD["pattern"], *PLAIN):
            raise ValueError(f"transparent_bg_config.pattern is {pattern!r}, which K3 has not.")

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "ImageRules":
        """From the content of preprocessor_config.json; raises ValueError, naming the field."""
        given = config.get("media_proc_cfg", {})
        chosen = {f.name: given[f.name] for f in fields(cls) if given.get(f.name) is not None}
        kernel = chosen.get("merge_kernel_size")
        if isinstance(kernel, list):
            chosen["merge_kernel_size"] = kernel[0]
        return cls(**chosen)

    def size(self, width: int, height: int) -> Size:
        """Never enlarged, and no more than `in_patch_limit` patches before floors and padding."""
        patch, longest = self.patch_size, self.patch_limit_on_one_side * self.patch_size
        whole = max(1, width // patch) * max(1, height // patch)
        scale = min(1.0, math.sqrt(self.in_patch_limit / whole), longest / width, longest / height)
        new_width = min(max(1, int(width * scale)), longest)
        new_height = min(max(1, int(height * scale)), longest)
        cell = patch * self.merge_kernel_size
        return Size(new_width, new_height, -new_width % cell, -new_height % cell)

    def grid(self, width: int, height: int) -> tuple[int, int, int]:
        """(1, rows, columns) of patches."""
        size, patch = self.size(width, height), self.patch_size
        rows, columns = size.height + size.pad_height, size.width + size.pad_width
        return 1, rows // patch, columns // patch

    def n_tokens(self, width: int, height: int) -> int:
        """How many tokens a picture takes in the prompt."""
        _, rows, columns = self.grid(width, height)
        return rows * columns // self.merge_kernel_size**2

    def patches(self, image: Image.Image) -> np.ndarray:
        """[rows·columns, 3, patch, patch] float32, row by row."""
        size, patch = self.size(*image.size), self.patch_size
        if self.transparent_bg_fill_stage == "before_resize":
            image = self.opaque(image)
        image = self.opaque(image.resize(size[:2], Image.Resampling.BICUBIC))
        pad = ((0, size.pad_height), (0, size.pad_width), (0, 0))
        pixels = np.pad(np.asarray(image), pad)
        # Divided in float64, as the original does, then rounded once.
        values = (pixels / 255.0).astype(np.float32)
        values -= np.array(self.image_mean, np.float32)
        values *= 1 / np.array(self.image_std, np.float32)
        rows, columns = (n // patch for n in values.shape[:2])
        cells = values.reshape(rows, patch, columns, patch, 3).transpose(0, 2, 4, 1, 3)
        return np.ascontiguousarray(cells).reshape(-1, 3, patch, patch)

    def opaque(self, image: Image.Image) -> Image.Image:
        """RGB, on the configured background if the picture is transparent."""
        if image.mode == "RGB":
            return image
        if "A" not in image.getbands() and "transparency" not in image.info:
            return image.convert("RGB")
        pixels = np.asarray(image.convert("RGBA"))
        alpha = pixels[..., 3:].astype(np.float32) / 255
        board = self.background(*pixels.shape[:2])[..., None]
        return Image.fromarray((alpha * pixels[..., :3] + (1 - alpha) * board).astype(np.uint8))

    def background(self, rows: int, columns: int) -> np.ndarray:
        """[rows, columns] gray values."""
        config = BOARD | self.transparent_bg_config
        if config["pattern"] in PLAIN:
            return np.full((rows, columns), PLAIN[config["pattern"]], np.uint8)
        side = config["chessboard_square_size"]
        odd = (np.arange(rows)[:, None] // side + np.arange(columns) // side) % 2
        gray = odd == (1 if config["chessboard_square_on_top_left"] else 0)
        values = config["chessboard_gray_value"], config["chessboard_white_value"]
        return np.where(gray, *values).astype(np.uint8)


def image_prompt(width: int, height: int) -> str:
    """What stands for a picture in a prompt; the size is that of the original."""
    return f"<|media_begin|>image {width}x{height}<|media_content|><|media_pad|><|media_end|>"
