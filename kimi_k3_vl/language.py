"""The text model with the signature and the caches of mlx-vlm."""

from typing import Any

import mlx.core as mx
from mlx_vlm.models.base import LanguageModelOutput
from mlx_vlm.models.cache import ArraysCache, KVCache

from .beside import kimi_k3


class LanguageModel(kimi_k3.LanguageModel):
    # It needs nothing of a model but `layers`.
    shard = kimi_k3.Model.shard

    def __init__(self, config: kimi_k3.TextArgs):
        super().__init__(config)
        self.config, self.model_type = config, config.model_type

    def __call__(
        self,
        inputs: mx.array,
        inputs_embeds: mx.array | None = None,
        mask: mx.array | None = None,
        cache: list[Any] | None = None,
        **_: Any,
    ) -> LanguageModelOutput:
        """The caches know the padding: `mask` and whatever else mlx-vlm passes is ignored."""
        logits = super().__call__(inputs, cache, input_embeddings=inputs_embeds)
        return LanguageModelOutput(logits=logits)

    def embed_tokens(self, ids: mx.array) -> mx.array:
        return self.model.embed_tokens(ids)

    @property
    def layers(self) -> list[kimi_k3.DecoderLayer]:
        return self.model.pipeline_layers

    def make_cache(self) -> list[Any]:
        return [ArraysCache(size=2) if layer.is_linear else KVCache() for layer in self.layers]
