"""The configs that mlx-vlm reads from config.json: the text part is ours, with counts per layer."""

from mlx_vlm.models.kimi_k3.config import ModelConfig, VisionConfig

from .text import kimi_k3

TextConfig = kimi_k3.TextArgs

__all__ = ["ModelConfig", "TextConfig", "VisionConfig"]
