"""The frozen dataclasses that cross module borders, with their JSON.

`TensorInfo` describes bytes in a file, `Span` a range of one source tensor, `BuildTensor` an output
made of spans, `BuildPlan` a whole build before it exists, `Manifest` one that is finished. Which
experts stay is `prune_plan.PrunePlan`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from kimi_k3_mlx.errors import CheckpointError

if TYPE_CHECKING:
    from kimi_k3_mlx.profile import Profile
    from kimi_k3_mlx.prune_plan import PrunePlan

Json = dict[str, Any]

LOST = "delete the folder yourself, or choose another --mlx-path."
"""The hint when a build's records are damaged: nobody knows any more which files are its own."""

DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip


class Progress(Protocol):
    """Receives how far a job is: bytes done, bytes in all, and what is at work (`layer 37/93`)."""

    def __call__(self, done: int, total: int, what: str) -> None:
        """Take note."""


def silent(done: int, total: int, what: str) -> None:
    """A progress that shows nothing."""


class TensorInfo(NamedTuple):
    """A tensor in a file; `begin` and `end` count bytes from the start of the data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def n_bytes(self) -> int:
        """Bytes of the tensor."""
        return self.end - self.begin


class Span(NamedTuple):
    """Bytes `begin` to `end` of one source tensor, counted from the tensor's own start."""

    tensor: str
    begin: int
    end: int

    @property
    def n_bytes(self) -> int:
        """Bytes of the span."""
        return self.end - self.begin


class Quantization(NamedTuple):
    """How MLX stores a matrix: `mode` (affine, mxfp4, mxfp8), bits a weight, weights a scale."""

    mode: str
    bits: int
    group_size: int

    def to_json(self) -> Json:
        """The object that MLX's config.json has."""
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}

    def __str__(self) -> str:
        if self.mode != "affine":
            return self.mode
        return f"{self.bits} bits, groups of {self.group_size}"


NARROW = "narrow"
"""The transform that rounds F32 to BF16."""

MXFP4 = Quantization("mxfp4", 4, 32)


@dataclass(frozen=True)
class BuildTensor:
    """One output tensor: its spans one after the other, then the named transform, if any.

    With `quantization`, a `weight` is quantized after that. Its `scales` and `biases` come of the
    same computation: they have the same quantization and no spans of their own.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: str
    spans: tuple[Span, ...]
    transform: str | None = None
    quantization: Quantization | None = None

    @property
    def n_bytes(self) -> int:
        """Bytes of the output."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def is_rounded(self) -> bool:
        """Whether its values are not the source's: a quantized `weight`, or a narrowed tensor."""
        return bool(self.spans) and (self.quantization is not None or self.transform == NARROW)

    @property
    def n_read(self) -> int:
        """Bytes of the source that it takes."""
        return sum(span.end - span.begin for span in self.spans)

    def to_json(self) -> Json:
        """A JSON object; spans become `[tensor, begin, end]`."""
        return {
            "name": self.name,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "role": self.role,
            "n_bytes": self.n_bytes,
            "inputs": [list(span) for span in self.spans],
            "transform": self.transform,
            "quantization": self.quantization and self.quantization.to_json(),
        }


@dataclass(frozen=True)
class PlannedShard:
    """One output file: `header_n_bytes` up to the data section, then the tensors without gaps."""

    name: str
    what: str
    header_n_bytes: int
    tensors: tuple[BuildTensor, ...]
    format: str = "mlx"
    """`mlx` or `pt`, as the file's metadata say."""

    @cached_property
    def n_bytes(self) -> int:
        """Bytes of the whole file."""
        return self.header_n_bytes + sum(tensor.n_bytes for tensor in self.tensors)

    def infos(self) -> Iterator[TensorInfo]:
        """The header's entries, in file order."""
        begin = 0
        for tensor in self.tensors:
            end = begin + tensor.n_bytes
            yield TensorInfo(tensor.name, tensor.dtype, tensor.shape, begin, end)
            begin = end

    def to_json(self) -> Json:
        """A JSON object; offsets count from the start of the file."""
        tensors = [
            tensor.to_json() | {"offset": self.header_n_bytes + info.begin}
            for tensor, info in zip(self.tensors, self.infos(), strict=True)
        ]
        return {"name": self.name, "n_bytes": self.n_bytes, "tensors": tensors}


@dataclass(frozen=True)
class SourceId:
    """Which checkpoint a build is made from, wherever it lies."""

    commit: str | None
    headers_sha256: str
    """Over the names, sizes and headers of all shards and the config: no tensor byte is read."""


@dataclass(frozen=True)
class BuildPlan:
    """Everything about a build that is known before a tensor byte is read."""

    source: SourceId
    profile: Profile
    config: Json = field(repr=False)
    """The config.json of the build."""
    n_layers: int
    shards: tuple[PlannedShard, ...] = field(repr=False)
    prune: PrunePlan | None = None
    """Which experts stay; None: all."""
    version: int = 1

    @property
    def tensors(self) -> Iterator[BuildTensor]:
        """Every output tensor, shard by shard."""
        return (tensor for shard in self.shards for tensor in shard.tensors)

    @cached_property
    def n_bytes(self) -> int:
        """Bytes of all shards, headers included."""
        return sum(shard.n_bytes for shard in self.shards)

    @cached_property
    def total_size(self) -> int:
        """Tensor bytes, as the index counts them."""
        return sum(tensor.n_bytes for tensor in self.tensors)

    @cached_property
    def n_read(self) -> int:
        """Bytes of the source that the build takes."""
        return sum(tensor.n_read for tensor in self.tensors)

    @cached_property
    def sha256(self) -> str:
        """Identity of the plan: same hash, same bytes."""
        digest = hashlib.sha256(self.source.headers_sha256.encode())
        prune = self.prune and self.prune.sha256
        for part in (self.version, self.profile.to_json(), prune, self.config):
            digest.update(canonical(part))
        for shard in self.shards:
            digest.update(canonical(shard.to_json()))
        return digest.hexdigest()

    def to_json(self) -> Json:
        """A JSON object; at K3's size it lists half a million spans."""
        return {
            "version": self.version,
            "sha256": self.sha256,
            "source": asdict(self.source),
            "profile": self.profile.to_json(),
            "prune": self.prune and self.prune.to_json(),
            "n_bytes": self.n_bytes,
            "total_size": self.total_size,
            "n_read": self.n_read,
            "config": self.config,
            "shards": [shard.to_json() for shard in self.shards],
        }


@dataclass(frozen=True)
class ShardRecord:
    """A finished shard: what the journal and the manifest keep of it."""

    name: str
    n_bytes: int
    sha256: str
    nan_scales: int = 0
    """E8M0 scale bytes of 255, which decode to no number."""
    losses: dict[str, list[float]] = field(default_factory=dict)
    """By tensor pattern and format, what rounding cost: Σ(ŵ−w)² and Σw²."""

    def to_json(self) -> Json:
        """A JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Json) -> ShardRecord:
        """Read `to_json`'s object; raise KeyError, TypeError or ValueError when it is damaged."""
        record = cls(**{field.name: value[field.name] for field in fields(cls)})
        counts = (record.n_bytes, record.nan_scales)
        texts = (record.name, record.sha256, *record.losses)
        numbers = [number for loss in record.losses.values() for number in loss]
        if (
            {type(item) for item in counts} != {int}
            or min(counts) < 0
            or {type(item) for item in texts} != {str}
            or not {type(item) for item in numbers} <= {int, float}
            or any(len(loss) != 2 for loss in record.losses.values())
        ):
            raise ValueError(f"{str(value)[:60]} is no record of a shard")
        return record


@dataclass(frozen=True)
class Manifest:
    """`kimi_k3_mlx.json`: what a finished build was made from, by what, and its hashes."""

    plan_sha256: str
    profile: Json
    prune_sha256: str | None
    source: SourceId
    shards: tuple[ShardRecord, ...]
    sidecars: dict[str, str]
    """SHA-256 of each small file beside the shards, by name."""
    tools: dict[str, str]
    version: int = 1

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the shards and sidecars."""
        return (*(shard.name for shard in self.shards), *self.sidecars)

    def to_json(self) -> Json:
        """A JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Json) -> Manifest:
        """Read `to_json`'s object; raise CheckpointError when it is another version or damaged."""
        if value.get("version") != cls.version:
            raise CheckpointError(
                f"kimi_k3_mlx.json has version {value.get('version')}, expected {cls.version}.",
                "use the kimi-k3-mlx that made this build.",
            )
        try:
            return cls(
                plan_sha256=value["plan_sha256"],
                profile=dict(value["profile"]),
                prune_sha256=value["prune_sha256"],
                source=SourceId(**value["source"]),
                shards=tuple(ShardRecord.from_json(shard) for shard in value["shards"]),
                sidecars={str(name): str(sha) for name, sha in value["sidecars"].items()},
                tools=value["tools"],
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"kimi_k3_mlx.json is damaged: {error}.",
                LOST,
            ) from error


def canonical(value: object) -> bytes:
    """JSON bytes that are the same for equal values: sorted keys, no blanks."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
