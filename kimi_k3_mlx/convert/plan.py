"""From headers to a `BuildPlan`: every tensor of every shard with its inputs, before a byte moves.

Input: an opened source and a profile. Output: the plan, or an error naming the tensor that does not
fit the config. One shard per text layer, then the globals, the projector and the vision tower.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from converters.config import Dims, build_config, check_source, read_dims
from converters.dense import a_log, absorbed, copied, joined, joined_conv
from converters.experts import check_keep, kept_rows, stacked
from converters.names import F32, TABLE, TRUNK, Entry, role_of
from kimi_k3_mlx.errors import CheckpointError
from kimi_k3_mlx.schema import (
    DTYPE_BYTES,
    BuildPlan,
    BuildTensor,
    PlannedShard,
    Profile,
    TensorInfo,
)
from kimi_k3_mlx.tensors.header import encode_header
from kimi_k3_mlx.tensors.source import Source, download_hint

ALIGN = 16 * 1024
METADATA = {"format": "mlx"}
EMBEDDING = "language_model.model.embed_tokens.weight"
LayerTensors = tuple[str, list[BuildTensor]]
"""What a shard holds, in words, and its tensors."""


def plan_build(source: Source, profile: Profile) -> BuildPlan:
    """Lay out a whole build.

    Raises CheckpointError when the config is not a source's of this architecture and packed format,
    or a tensor is missing, unknown, or of another shape or dtype than the config says.
    """
    dims = read_dims(source.config)
    check_source(source.config)
    shelf = _Shelf(source, dims)
    parts = list(_parts(shelf))
    shelf.check_all_taken()
    return BuildPlan(
        source=source.id,
        profile=profile,
        config=build_config(source.config),
        n_layers=dims.n_layers,
        shards=tuple(
            _shard(f"model-{number:05d}-of-{len(parts):06d}.safetensors", what, tensors)
            for number, (what, tensors) in enumerate(parts, 1)
        ),
    )


def shard_header(shard: PlannedShard) -> bytes:
    """The bytes of a planned shard up to its data section, which starts on 16 KiB."""
    return encode_header(shard.infos(), METADATA, ALIGN)


class _Shelf:
    """The source's tensors, each handed out checked and at most once."""

    def __init__(self, source: Source, dims: Dims) -> None:
        self.source = source
        self.dims = dims
        self.taken: set[str] = set()
        self._shapes = {entry: dims.shapes(entry.shape) for entry in TABLE if self._occurs(entry)}
        self._trunk = self._trunk_dtype()

    def take(self, entry: Entry, *numbers: int) -> TensorInfo:
        """The tensor of a table row, with its numbers of layer and expert, or of block."""
        name = entry.source.format(*numbers)
        tensor = self.source.tensors.get(name)
        if tensor is None:
            raise CheckpointError(
                f"tensor {name} is missing: no shard has it.",
                download_hint("model.safetensors.index.json"),
            )
        self._check(entry, tensor)
        self.taken.add(tensor.name)
        return tensor

    def has(self, prefix: str) -> bool:
        """Whether any tensor's name begins so."""
        return any(name.startswith(prefix) for name in self.source.tensors)

    def check_all_taken(self) -> None:
        """Raise CheckpointError for a tensor that no row of the table wants."""
        for name in sorted(self.source.tensors.keys() - self.taken):
            role_of(name)
            raise CheckpointError(
                f"tensor {name} does not occur in a model of {self.dims.n_layers} layers and "
                f"{self.dims.n_experts} experts, as config.json describes it.",
                download_hint("config.json"),
            )

    def _occurs(self, entry: Entry) -> bool:
        return self.dims.n_blocks > 0 or entry.role not in ("vision", "projector")

    def _trunk_dtype(self) -> str:
        embedding = self.source.tensors.get(EMBEDDING)
        return F32 if embedding is not None and embedding.dtype == F32 else "BF16"

    def _check(self, entry: Entry, tensor: TensorInfo) -> None:
        shapes = self._shapes[entry]
        dtype = self._trunk if entry.dtype == TRUNK else entry.dtype
        if tensor.shape in shapes and tensor.dtype == dtype:
            return
        shard = self.source.weight_map[tensor.name]
        if tensor.dtype != dtype:
            fact, cause = f"dtype {tensor.dtype}, expected {dtype}", "is not Moonshot's"
        else:
            expected = " or ".join(map(str, shapes))
            fact, cause = f"shape {tensor.shape}, expected {expected}", "looks truncated"
            if entry.role != "expert":
                cause = "does not fit config.json"
        raise CheckpointError(
            f"tensor {tensor.name}: {fact}.",
            f"the source shard {shard} {cause}; {download_hint(shard)}",
        )


def _parts(shelf: _Shelf) -> Iterator[LayerTensors]:
    dims = shelf.dims
    for layer in range(dims.n_layers):
        tensors: list[BuildTensor] = []
        for scope in _layer_scopes(dims, layer):
            tensors += _convert(shelf, scope, layer)
        yield f"layer {layer + 1}/{dims.n_layers}", tensors
    yield "embeddings and head", _convert(shelf, "global")
    if shelf.has("mm_projector."):
        _require_vision(dims, "mm_projector")
        yield "projector", _convert(shelf, "projector")
    if shelf.has("vision_tower."):
        _require_vision(dims, "vision_tower")
        blocks = [_convert(shelf, "block", block) for block in range(dims.n_blocks)]
        yield "vision tower", [*_convert(shelf, "vision"), *(t for block in blocks for t in block)]


def _layer_scopes(dims: Dims, layer: int) -> tuple[str, ...]:
    feed_forward = ("expert", "moe") if layer in dims.moe_layers else ("dense",)
    return (*feed_forward, "mla" if layer in dims.mla_layers else "kda", "layer")


def _require_vision(dims: Dims, prefix: str) -> None:
    if not dims.n_blocks:
        raise CheckpointError(
            f"config.json has no vision_config, but the checkpoint has {prefix} tensors.",
            download_hint("config.json"),
        )


def _groups(scope: str) -> Iterable[list[Entry]]:
    """Table rows of a scope, those of one build tensor together, in the table's order."""
    groups: dict[tuple[str, ...], list[Entry]] = {}
    for entry in TABLE:
        if entry.scope == scope:
            groups.setdefault(entry.build, []).append(entry)
    return groups.values()


def _convert(shelf: _Shelf, scope: str, *numbers: int) -> list[BuildTensor]:
    tensors: list[BuildTensor] = []
    for group in _groups(scope):
        tensors += _convert_group(shelf, group, numbers)
    return tensors


def _convert_group(
    shelf: _Shelf, group: list[Entry], numbers: tuple[int, ...]
) -> Sequence[BuildTensor]:
    entry, dims = group[0], shelf.dims
    names = [name.format(*numbers) for name in entry.build]
    name, role = names[0], entry.role
    if entry.how == "stack":
        keep = range(dims.n_experts)
        check_keep(numbers[0], keep, dims.n_experts, dims.top_k)
        experts = [shelf.take(entry, *numbers, expert) for expert in range(dims.n_experts)]
        return [stacked(name, role, experts, keep)]
    tensors = [shelf.take(row, *numbers) for row in group]
    match entry.how:
        case "join":
            return [joined(name, role, tensors)]
        case "conv":
            return [joined_conv(name, role, tensors)]
        case "a_log":
            return [a_log(name, role, tensors[0], dims)]
        case "kv_b":
            return absorbed(names, role, tensors[0], dims)
        case "rows":
            return [kept_rows(name, role, tensors[0], range(dims.n_experts))]
        case _:
            return [copied(name, role, tensors[0])]


def _shard(name: str, what: str, tensors: list[BuildTensor]) -> PlannedShard:
    """Experts first and big first, so that at K3's sizes each expert begins on 16 KiB."""
    ordered = sorted(
        tensors,
        key=lambda tensor: (
            tensor.role != "expert",
            -DTYPE_BYTES[tensor.dtype],
            -tensor.n_bytes,
            tensor.name,
        ),
    )
    header = shard_header(PlannedShard(name, what, 0, tuple(ordered)))
    return PlannedShard(name, what, len(header), tuple(ordered))
