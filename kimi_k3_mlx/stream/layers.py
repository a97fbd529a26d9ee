"""The decoder layers of a checkpoint, loaded one by one while the one before computes.

Input: an opened source checkpoint or build, on disk or on the Hub. Output: `kimi_k3`'s own modules
with their weights. Bytes are read straight into MLX's memory: a layer never exists twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from threading import Event
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np

import kimi_k3
from converters.config import check_source, read_dims
from converters.dense import copied
from converters.experts import stacked
from converters.names import PROJECTIONS
from kimi_k3_mlx.errors import CheckpointError
from kimi_k3_mlx.schema import MXFP4, BuildTensor, Json
from kimi_k3_mlx.tensors.source import Reader, Source

LAYER = "language_model.model.layers."
LANGUAGE_MODEL = "language_model."
HEAD = ("lm_head.", "model.norm.", "model.output_attn_res_")
EMBEDDING = ("model.embed_tokens.",)
PARTS = {"weight_packed": "weight", "weight_scale": "scales"}

DTYPES: dict[str, tuple[type[np.generic], Any]] = {
    "BF16": (np.uint16, mx.bfloat16),
    "F16": (np.uint16, mx.float16),
    "F32": (np.float32, mx.float32),
    "U32": (np.uint32, mx.uint32),
    "U8": (np.uint8, mx.uint8),
}
"""How memory is asked for, and what it is seen as once it is filled."""

Tensors = list[BuildTensor]
Memory = dict[str, tuple[mx.array, str]]
"""Memory of tensors by name, with their dtypes."""
Key = TypeVar("Key")


@dataclass
class Layers:
    """An opened checkpoint; at most a layer, the next one and the embedding or head are loaded."""

    checkpoint: Source
    args: Any
    """`kimi_k3.TextArgs`."""
    tensors: dict[int, Tensors] = field(repr=False)
    """What has to be read, per decoder layer."""
    _ends: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def n_layers(self) -> int:
        """Decoder layers."""
        return len(self.tensors)

    def n_bytes(self, layer: int) -> int:
        """Bytes of a decoder layer in memory."""
        return sum(tensor.n_bytes for tensor in self.tensors[layer])

    @cached_property
    def largest(self) -> int:
        """Bytes of the largest decoder layer."""
        return max(map(self.n_bytes, self.tensors))

    @cached_property
    def n_bytes_ends(self) -> int:
        """Bytes of the embedding or of the head, whichever has more."""
        return max(sum(t.n_bytes for t in self._end_tensors(part)) for part in (EMBEDDING, HEAD))

    def layer(self, number: int) -> Any:
        """One `kimi_k3.DecoderLayer` with its weights."""
        with self.checkpoint.reader() as reader:
            memory = allocate(self.tensors[number])
            fill(reader, self.tensors[number], memory)
        return self.decoder_layer(number, memory)

    def stream(self, numbers: Iterable[int]) -> Iterator[tuple[int, Any]]:
        """The layers with their numbers; while one is in use, the next one is read in a thread."""
        for number, memory in self.read((number, self.tensors[number]) for number in numbers):
            yield number, self.decoder_layer(number, memory)

    def read(self, pieces: Iterable[tuple[Key, Tensors]]) -> Iterator[tuple[Key, Memory]]:
        """The bytes of pieces; while one is in use, the next one is read in a thread."""
        left = Event()
        with self.checkpoint.reader() as reader, ThreadPoolExecutor(1, "layers") as thread:
            coming: list[tuple[Key, Memory, Future[None]]] = []
            try:
                for key, tensors in pieces:
                    # MLX's streams belong to threads: memory is asked for here, filled there.
                    memory = allocate(tensors)
                    coming.append((key, memory, thread.submit(fill, reader, tensors, memory, left)))
                    del memory
                    if len(coming) > 1:
                        yield _arrived(*coming.pop(0))
                while coming:
                    yield _arrived(*coming.pop(0))
            finally:
                left.set()

    def decoder_layer(self, number: int, memory: Memory, without: Iterable[str] = ()) -> Any:
        """A `kimi_k3.DecoderLayer` with its weights, `without` some parts of its `mlp`."""
        layer = kimi_k3.DecoderLayer(self.args, number)
        for part in without:
            layer.mlp.pop(part, None)
        return self.loaded(layer, f"{LAYER}{number}.", memory)

    def embed(self, ids: mx.array) -> mx.array:
        """The embeddings [B, T, H] of token ids [B, T]."""
        embedded: mx.array = self._end("embedding", EMBEDDING).model.embed_tokens(ids)
        return embedded

    def head(self, prefix: mx.array, blocks: Any) -> mx.array:
        """The logits [B, T, vocabulary] of what leaves the last layer."""
        end = self._end("head", HEAD)
        model = end.model
        res = (model.output_attn_res_proj, model.output_attn_res_norm)
        h = kimi_k3.attn_res(blocks, prefix, *res, model.norm).astype(prefix.dtype)
        logits: mx.array = end.lm_head(h.astype(kimi_k3.working_dtype(h))).astype(h.dtype)
        return logits

    def release(self) -> None:
        """Let go of the embedding and the head."""
        self._ends.clear()

    def _end(self, which: str, parts: tuple[str, ...]) -> Any:
        """`kimi_k3.LanguageModel` without layers, with the weights of one of its ends."""
        if which not in self._ends:
            args = replace(
                self.args, num_hidden_layers=0, expert_counts=None, low_expert_counts=None
            )
            tensors = self._end_tensors(parts)
            memory = allocate(tensors)
            with self.checkpoint.reader() as reader:
                fill(reader, tensors, memory)
            module = kimi_k3.LanguageModel(args)
            self._ends[which] = self.loaded(module, LANGUAGE_MODEL, memory, parts)
        return self._ends[which]

    def _end_tensors(self, parts: tuple[str, ...]) -> Tensors:
        wanted = tuple(f"{LANGUAGE_MODEL}{part}" for part in parts)
        infos = self.checkpoint.tensors.values()
        return [copied(info.name, "end", info) for info in infos if info.name.startswith(wanted)]

    def loaded(
        self, module: Any, prefix: str, memory: Memory, parts: tuple[str, ...] = ("",)
    ) -> Any:
        """The module with its weights; `parts` are the beginnings of the paths it must have."""
        weights = kimi_k3.sanitize(self.args, seen(memory))
        memory.clear()
        quantize(module, prefix, weights, self.checkpoint.config)
        given = [(name.removeprefix(prefix), array) for name, array in weights.items()]
        expected = {path for path, _ in flat_parameters(module) if path.startswith(parts)}
        if odd := sorted(expected ^ {name for name, _ in given}):
            fact = "is missing" if odd[0] in expected else "is not one of the model's"
            raise CheckpointError(f"tensor {prefix}{odd[0]} {fact} in {self.checkpoint.where}.")
        module.load_weights(given, strict=False)
        mx.eval([array for _, array in given])
        return module


def open_layers(checkpoint: Source) -> Layers:
    """Prepare an opened checkpoint for streaming; no tensor byte is read.

    Raises CheckpointError when its config or tensors are not those of a Kimi-K3 that streams.
    """
    config = checkpoint.config
    dims = read_dims(config)
    is_build = config.get("quantization") is not None
    if not is_build:
        check_source(config)
    try:
        args = kimi_k3.ModelArgs.from_dict(config).text_config
    except ValueError as error:
        raise CheckpointError(f"config.json of {checkpoint.where}: {error}") from error
    by_layer: dict[int, Tensors] = {number: [] for number in range(dims.n_layers)}
    for number, names in _names_by_layer(checkpoint).items():
        if number not in by_layer:
            raise CheckpointError(f"tensor {names[0]} is of layer {number} of {dims.n_layers}.")
        by_layer[number] = [copied(name, "layer", checkpoint.tensors[name]) for name in names]
    if not is_build:
        for number in dims.moe_layers:
            by_layer[number] += _source_experts(checkpoint, number, dims.n_experts)
    return Layers(checkpoint, args, by_layer)


def _names_by_layer(checkpoint: Source) -> dict[int, list[str]]:
    """Tensor names of every layer, without the single experts of a source."""
    names: dict[int, list[str]] = defaultdict(list)
    for name in checkpoint.tensors:
        if name.startswith(LAYER) and ".experts." not in name:
            number = name[len(LAYER) :].partition(".")[0]
            names[int(number)].append(name)
    return names


def _source_experts(checkpoint: Source, layer: int, n_experts: int) -> Iterator[BuildTensor]:
    """The experts of a source's layer, stacked as the model holds them."""
    for matrix, projection in PROJECTIONS.items():
        for part, suffix in PARTS.items():
            template = f"{LAYER}{layer}.block_sparse_moe.experts.{{}}.{matrix}.{part}"
            names = [template.format(expert) for expert in range(n_experts)]
            for name in names:
                if name not in checkpoint.tensors:
                    raise CheckpointError(f"tensor {name} is missing in {checkpoint.where}.")
            infos = [checkpoint.tensors[name] for name in names]
            name = f"{LAYER}{layer}.mlp.switch_mlp.{projection}.{suffix}"
            yield stacked(name, infos, range(n_experts))


def _arrived(key: Key, memory: Memory, filling: Future[None]) -> tuple[Key, Memory]:
    filling.result()
    return key, memory


def allocate(tensors: Sequence[BuildTensor]) -> Memory:
    """MLX's memory for tensors."""
    memory: Memory = {}
    for tensor in tensors:
        if tensor.dtype not in DTYPES:
            raise CheckpointError(
                f"tensor {tensor.name} has the dtype {tensor.dtype}, which is not streamed."
            )
        kind = getattr(mx, DTYPES[tensor.dtype][0].__name__)
        memory[tensor.name] = (mx.zeros(tensor.shape, kind), tensor.dtype)
    mx.eval([array for array, _ in memory.values()])
    return memory


def fill(
    reader: Reader,
    tensors: Sequence[BuildTensor],
    memory: Memory,
    left: Event | None = None,
) -> None:
    """Read the tensors' bytes into their memory, unless nobody waits for them any more.

    Runs in any thread: no MLX operation.
    """
    blocks = reader.blocks(span for tensor in tensors for span in tensor.spans)
    for tensor in tensors:
        target = np.array(memory[tensor.name][0], copy=False).reshape(-1).data.cast("B")
        position = 0
        while position < tensor.n_bytes:
            if left is not None and left.is_set():
                return
            block = next(blocks)
            target[position : position + len(block)] = block
            position += len(block)
    next(blocks, None)  # lets the reader finish its last span


def seen(memory: Memory) -> dict[str, mx.array]:
    """Filled memory as arrays of the tensors' own dtypes."""
    return {name: array.view(DTYPES[dtype][1]) for name, (array, dtype) in memory.items()}


def quantize(module: Any, prefix: str, weights: dict[str, mx.array], config: Json) -> None:
    """Make modules whose scales are there quantized ones, as the config says of each path."""
    block = config.get("quantization") or MXFP4.to_json()
    usual = {name: block[name] for name in MXFP4.to_json() if name in block}

    def chosen(path: str, part: nn.Module) -> bool | Json:
        if f"{prefix}{path}.scales" not in weights or not hasattr(part, "to_quantized"):
            return False
        own = block.get(f"{prefix}{path}", usual)
        if not isinstance(own, dict):
            raise CheckpointError(f"config.json: quantization.{prefix}{path} is {own!r}.")
        return own

    nn.quantize(module, class_predicate=chosen)


def flat_parameters(module: Any) -> list[tuple[str, mx.array]]:
    """Parameters with their paths."""
    from mlx.utils import tree_flatten

    flat: list[tuple[str, mx.array]] = tree_flatten(module.parameters())
    return flat
