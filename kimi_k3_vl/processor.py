"""mlx-vlm's processor of K3 with our pictures: stock resamples palettes, and guesses rules."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_vlm.models.base import install_auto_processor_patch
from mlx_vlm.models.kimi_k3 import processing_kimi_k3 as stock
from PIL import Image

from .processing import ImageRules


class ImageProcessor(stock.KimiK3ImageProcessor):
    """Pixels by `ImageRules`; `rules` is a preprocessor_config.json."""

    def __init__(self, rules: dict[str, Any] | None = None, **kwargs: Any):
        super().__init__(**kwargs)
        self.rules = rules or {}

    def _preprocess(self, image: Image.Image) -> tuple[mx.array, tuple[int, int, int]]:
        rules = ImageRules.from_config(self.rules)
        return mx.array(rules.patches(image)), rules.grid(*image.size)


class Processor(stock.KimiK3Processor):
    @classmethod
    def from_pretrained(cls, folder: str, **kwargs: Any) -> "Processor":
        processor = super().from_pretrained(folder, **kwargs)
        path = Path(folder) / "preprocessor_config.json"
        rules = json.loads(path.read_text()) if path.is_file() else {}
        processor.image_processor = ImageProcessor(rules)
        return processor


@cache
def install_processor() -> None:
    """Let `AutoProcessor` find it, as mlx-vlm's own models do when they are imported."""
    install_auto_processor_patch("kimi_k3", Processor)
