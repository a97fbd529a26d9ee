"""The model that sees images: mlx-vlm's own, around our text model."""

import mlx.core as mx
import mlx.nn as nn
from mlx_vlm.models.kimi_k3 import kimi_k3 as stock

from .config import ModelConfig
from .language import LanguageModel
from .text import kimi_k3

VISION = ("vision_tower.", "mm_projector.")


class Model(stock.Model):
    def __init__(self, config: ModelConfig):
        # Not stock's own initialiser, which would build stock's text model.
        nn.Module.__init__(self)
        self.config, self.model_type = config, config.model_type
        self.vision_tower = stock.VisionModel(config.vision_config)
        self.mm_projector = stock.KimiK3MultiModalProjector(config)
        self.language_model = LanguageModel(config.text_config)

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Weights under build names, from a build or from a source checkpoint."""
        vision = {name: w for name, w in weights.items() if name.startswith(VISION)}
        text = kimi_k3.sanitize(self.config.text_config, weights)
        return self.vision_tower.sanitize(vision) | text
