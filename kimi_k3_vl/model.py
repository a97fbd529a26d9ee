"""The model that sees pictures, as mlx-vlm calls it: tower, projector and text model."""

from typing import Any

import mlx.core as mx
from mlx_vlm.models.base import InputEmbeddingsFeatures, LanguageModelOutput

from .beside import kimi_k3, kimi_k3_vision
from .config import ModelConfig
from .language import LanguageModel
from .processor import install_processor
from .prompt import merge


class Model(kimi_k3_vision.Vision):
    def __init__(self, config: ModelConfig):
        super().__init__(config.vision_config)
        install_processor()
        self.config, self.model_type = config, config.model_type
        self.language_model = LanguageModel(config.text_config)

    def encode_images(self, pixel_values: mx.array, grid_thws=None, **_: Any) -> list[mx.array]:
        """What mlx-vlm keeps of a picture between turns."""
        return self.see(pixel_values, grid_thws.tolist())

    def get_input_embeddings(
        self,
        input_ids: mx.array,
        pixel_values: mx.array | None = None,
        grid_thws: mx.array | None = None,
        cached_image_features: list[mx.array] | None = None,
        **_: Any,
    ) -> InputEmbeddingsFeatures:
        """Longer than `input_ids` if these have one placeholder per picture."""
        features = cached_image_features or []
        if pixel_values is not None and not features:
            features = self.encode_images(pixel_values, grid_thws)
        ids = (self.config.media_placeholder_token_id, self.config.pad_token_id)
        merged = merge(self.language_model.embed_tokens, input_ids.tolist(), features, *ids)
        return InputEmbeddingsFeatures(inputs_embeds=merged.embeddings)

    def __call__(
        self,
        input_ids: mx.array,
        pixel_values: mx.array | None = None,
        mask: mx.array | None = None,
        cache: list[Any] | None = None,
        **kwargs: Any,
    ) -> LanguageModelOutput:
        embedded = self.get_input_embeddings(input_ids, pixel_values, **kwargs)
        return self.language_model(input_ids, embedded.inputs_embeds, mask, cache)

    @property
    def layers(self) -> list[kimi_k3.DecoderLayer]:
        return self.language_model.layers

    def make_cache(self) -> list[Any]:
        return self.language_model.make_cache()

    def shard(self, group: mx.distributed.Group | None = None):
        self.language_model.shard(group)

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Weights under build names, from a build or from a source checkpoint."""
        vision = kimi_k3_vision.sanitize(self.config.vision_config, weights)
        return vision | kimi_k3.sanitize(self.config.text_config, weights)
