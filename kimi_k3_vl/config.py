"""The configs that mlx-vlm reads from config.json: text and vision are those of the root files."""

from dataclasses import dataclass

from mlx_vlm.models.kimi_k3.config import ModelConfig as StockConfig

from .beside import kimi_k3, kimi_k3_vision

TextConfig = kimi_k3.TextArgs
VisionConfig = kimi_k3_vision.VisionArgs


@dataclass
class ModelConfig(StockConfig):
    pad_token_id: int | None = None
