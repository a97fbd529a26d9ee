"""What a checkpoint holds, from its headers: layers, experts, and the bytes of each part.

Input: an opened source or build. Output: an `Inventory`. Reads no tensor byte.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from math import prod

from converters.config import read_dims
from converters.names import role_of
from kimi_k3_mlx.schema import LOST, MXFP4, Json, Manifest, TensorInfo
from kimi_k3_mlx.tensors.source import MANIFEST, Source, parse_json

ROUTER = re.compile(r".*\.layers\.(\d+)\.(?:block_sparse_moe|mlp)\.gate\.weight")


@dataclass(frozen=True)
class Part:
    """All tensors with one role."""

    role: str
    n_tensors: int
    n_bytes: int
    parameters: int
    dtypes: tuple[str, ...]


@dataclass(frozen=True)
class Inventory:
    """A checkpoint, summed up."""

    path: str
    kind: str
    """`source` (Moonshot's layout) or `build` (MLX)."""
    commit: str | None
    profile: str | None
    plan_sha256: str | None
    kda_layers: int
    mla_layers: int
    dense_layers: int
    moe_layers: int
    experts: tuple[int, ...]
    """Experts of each MoE layer, in order."""
    experts_per_token: int
    n_shards: int
    n_tensors: int
    n_bytes: int
    parameters: int
    """Logical ones: a packed code counts, its scale does not."""
    parts: tuple[Part, ...]
    source: Source = field(repr=False)

    def tensors(self, pattern: str) -> list[TensorInfo]:
        """The tensors whose names match a glob pattern, by name."""
        found = (t for t in self.source.tensors.values() if fnmatchcase(t.name, pattern))
        return sorted(found, key=lambda tensor: tensor.name)

    def to_json(self) -> Json:
        """A JSON object."""
        values = {name: value for name, value in vars(self).items() if name != "source"}
        return {"version": 1} | values | {"parts": [asdict(part) for part in self.parts]}


def take_inventory(source: Source) -> Inventory:
    """Sum up an opened checkpoint; raises CheckpointError when it is no Kimi-K3."""
    dims = read_dims(source.config)
    manifest = None
    if MANIFEST in source.files():
        content = source.read_file(MANIFEST)
        manifest = Manifest.from_json(parse_json(content, MANIFEST, LOST))
    parts = tuple(summed_parts(source))
    return Inventory(
        path=source.where,
        kind="build" if "quantization" in source.config else "source",
        commit=manifest.source.commit if manifest else source.id.commit,
        profile=manifest.profile.get("name") if manifest else None,
        plan_sha256=manifest.plan_sha256 if manifest else None,
        kda_layers=dims.n_layers - len(dims.mla_layers),
        mla_layers=len(dims.mla_layers),
        dense_layers=dims.n_layers - len(dims.moe_layers),
        moe_layers=len(dims.moe_layers),
        experts=expert_counts(source),
        experts_per_token=dims.top_k,
        n_shards=len(source.shards),
        n_tensors=len(source.tensors),
        n_bytes=source.total_size,
        parameters=sum(part.parameters for part in parts),
        parts=parts,
        source=source,
    )


def expert_counts(source: Source) -> tuple[int, ...]:
    """Rows of each router, by layer."""
    rows = {
        int(match[1]): tensor.shape[0]
        for name, tensor in source.tensors.items()
        if (match := ROUTER.fullmatch(name))
    }
    return tuple(rows[layer] for layer in sorted(rows))


def summed_parts(source: Source) -> Iterator[Part]:
    """One part for each role, most bytes first."""
    by_role: dict[str, list[TensorInfo]] = {}
    for tensor in source.tensors.values():
        by_role.setdefault(role_of(tensor.name), []).append(tensor)
    parts = (
        Part(
            role=role,
            n_tensors=len(tensors),
            n_bytes=sum(tensor.n_bytes for tensor in tensors),
            parameters=sum(parameters(tensor, source.config) for tensor in tensors),
            dtypes=tuple(sorted({tensor.dtype for tensor in tensors})),
        )
        for role, tensors in by_role.items()
    )
    yield from sorted(parts, key=lambda part: -part.n_bytes)


def parameters(tensor: TensorInfo, config: Json) -> int:
    """Logical parameters of one tensor."""
    module, _, part = tensor.name.rpartition(".")
    if part in ("weight_scale", "scales", "biases"):
        return 0
    if tensor.dtype not in {"U8", "U32"}:
        return prod(tensor.shape)
    block = config.get("quantization", {})
    bits: int = block.get(module, block).get("bits", MXFP4.bits)
    return tensor.n_bytes * 8 // bits
