"""The source's tensors, handed out by rows of the table and checked against config.json.

Input: an opened source and its sizes. Output: `TensorInfo`s by table row and numbers, or an error
naming the tensor that is missing, unknown, or of another shape or dtype.
"""

from __future__ import annotations

from collections.abc import Iterator

from converters.config import Dims
from converters.names import F32, TABLE, TRUNK, Entry, role_of
from kimi_k3_mlx.errors import CheckpointError
from kimi_k3_mlx.schema import TensorInfo
from kimi_k3_mlx.tensors.source import Source, download_hint

EMBEDDING = "language_model.model.embed_tokens.weight"
SCOPES = tuple(dict.fromkeys(entry.scope for entry in TABLE))


class Shelf:
    """Hands out a source's tensors."""

    def __init__(self, source: Source, dims: Dims) -> None:
        self.source = source
        self.dims = dims
        self._n_taken = 0
        embedding = source.tensors.get(EMBEDDING)
        self.trunk = F32 if embedding is not None and embedding.dtype == F32 else "BF16"
        """Dtype of the trunk."""
        self._expected = {
            entry: (dims.shapes(entry.shape), self.trunk if entry.dtype == TRUNK else entry.dtype)
            for entry in TABLE
            if dims.n_blocks > 0 or entry.role not in ("vision", "projector")
        }

    def take(self, entry: Entry, *numbers: int) -> TensorInfo:
        """The tensor of a table row, with its numbers of layer and expert, or of block."""
        name = entry.source.format(*numbers)
        tensor = self.source.tensors.get(name)
        if tensor is None:
            raise CheckpointError(
                f"tensor {name} is missing: no shard has it.",
                download_hint("model.safetensors.index.json"),
            )
        shapes, dtype = self._expected[entry]
        if tensor.shape not in shapes or tensor.dtype != dtype:
            raise self._wrong(entry, tensor, shapes, dtype)
        self._n_taken += 1
        return tensor

    def experts(self, entry: Entry, layer: int) -> list[TensorInfo]:
        """One matrix of all experts of a layer, by number."""
        return [self.take(entry, layer, expert) for expert in range(self.dims.n_experts)]

    def scopes(self) -> Iterator[tuple[str, tuple[str, ...], tuple[int, ...]]]:
        """What a shard of the build holds: its description, scopes of the table, the layer.

        Raises CheckpointError for vision tensors that config.json doesn't describe.
        """
        dims = self.dims
        for layer in range(dims.n_layers):
            feed_forward = ("expert", "moe") if layer in dims.moe_layers else ("dense",)
            attention = "mla" if layer in dims.mla_layers else "kda"
            scopes = (*feed_forward, attention, "layer")
            yield f"layer {layer + 1}/{dims.n_layers}", scopes, (layer,)
        yield "embeddings and head", ("global",), ()
        present = {name.partition(".")[0] for name in self.source.tensors}
        for prefix, what, scopes in (
            ("mm_projector", "projector", ("projector",)),
            ("vision_tower", "vision tower", ("vision", "block")),
        ):
            if prefix in present:
                self._require_vision(prefix)
                yield what, scopes, ()

    def numbers(self, scope: str, numbers: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Under which numbers a scope's rows occur in such a shard."""
        if scope == "block":
            yield from ((block,) for block in range(self.dims.n_blocks))
        else:
            yield numbers

    def check_all_taken(self) -> None:
        """Raise CheckpointError for a tensor that no row of the table wants."""
        if self._n_taken == len(self.source.tensors):
            return
        wanted = {
            entry.source.format(*numbers)
            for _, scopes, layer in self.scopes()
            for scope in scopes
            for entry in TABLE
            if entry.scope == scope
            for numbers in self._all_numbers(scope, layer)
        }
        for name in sorted(self.source.tensors.keys() - wanted):
            role_of(name)
            raise CheckpointError(
                f"tensor {name} does not occur in a model of {self.dims.n_layers} layers and "
                f"{self.dims.n_experts} experts, as config.json describes it.",
                download_hint("config.json"),
            )

    def _all_numbers(self, scope: str, numbers: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if scope == "expert":
            return ((*numbers, expert) for expert in range(self.dims.n_experts))
        return self.numbers(scope, numbers)

    def _require_vision(self, prefix: str) -> None:
        if not self.dims.n_blocks:
            raise CheckpointError(
                f"config.json has no vision_config, but the checkpoint has {prefix} tensors.",
                download_hint("config.json"),
            )

    def _wrong(
        self, entry: Entry, tensor: TensorInfo, shapes: list[tuple[int, ...]], dtype: str
    ) -> CheckpointError:
        shard = self.source.weight_map[tensor.name]
        if tensor.dtype != dtype:
            fact, cause = f"dtype {tensor.dtype}, expected {dtype}", "is not Moonshot's"
        else:
            expected = " or ".join(map(str, shapes))
            fact, cause = f"shape {tensor.shape}, expected {expected}", "looks truncated"
            if entry.role != "expert":
                cause = "does not fit config.json"
        return CheckpointError(
            f"tensor {tensor.name}: {fact}.",
            f"the source shard {shard} {cause}; {download_hint(shard)}",
        )
