"""Compares a build with its source: every expert byte for byte, every trunk tensor by value.

Input: a build's folder and an opened source. Output: `VerifyReport`, or MismatchError naming tensor
and element. What belongs where comes from `naive`, not from the code that wrote the build; the
plan only tells whether the source can be one, and whether the manifest is about this build.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from converters.config import check_source, read_dims
from converters.mxfp4 import count_nan_scales
from kimi_k3_mlx.convert.naive import WORDS, Place, element, places
from kimi_k3_mlx.convert.plan import plan_build
from kimi_k3_mlx.convert.sidecars import read_manifest, sidecar_names
from kimi_k3_mlx.errors import CheckpointError, MismatchError
from kimi_k3_mlx.schema import (
    DTYPE_BYTES,
    Json,
    Manifest,
    Profile,
    Progress,
    Span,
    TensorInfo,
    silent,
)
from kimi_k3_mlx.tensors.header import file_size
from kimi_k3_mlx.tensors.source import MANIFEST, Reader, Source, open_source

AGAIN = "convert it again with --overwrite."
QUANTIZATION = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
DROPPED = ("quantization_config", "auto_map", "model_file")
NONE = "none"
Pieces = dict[str, list[tuple[Place, TensorInfo]]]
"""By build tensor: the places in it, in order, and the source tensors that must fill them."""


@dataclass(frozen=True)
class VerifyReport:
    """What was compared; a report exists only when everything agreed."""

    build: str
    source: str
    n_tensors: int
    """Source tensors compared."""
    n_expert_tensors: int
    n_bytes: int
    nan_scales: int
    """E8M0 bytes of 255 in source and build alike."""

    def to_json(self) -> Json:
        """A JSON object."""
        return {"version": 1} | asdict(self)


def verify_build(build: Path, source: Source, progress: Progress = silent) -> VerifyReport:
    """Compare a whole build; raise MismatchError (exit code 3) at the first difference.

    Compared are: every byte of every tensor, the SHA-256 of every shard with the manifest's, the
    manifest with the plan of this source, every field of config.json, every byte of the files that
    a build carries from its source. Raises CheckpointError for a source that can't be converted.
    """
    read_dims(source.config)
    check_source(source.config)
    opened = _open_build(Path(build))
    _check_files(opened, source)
    _check_config(opened.config, _expected_config(source.config))
    manifest = _checked_manifest(opened, source)
    with source.reader() as expected, opened.reader() as found:
        comparison = _Comparison(source, opened, expected, found, progress)
        for shard in opened.shards:
            comparison.compare_shard(shard, manifest)
    return VerifyReport(
        build=str(build),
        source=str(source.path),
        n_tensors=len(source.tensors),
        n_expert_tensors=sum(".experts." in name for name in source.tensors),
        n_bytes=source.total_size,
        nan_scales=comparison.nan_scales,
    )


class _Comparison:
    """Reads the build's shards in file order, and for each tensor what the source has for it."""

    def __init__(
        self, source: Source, build: Source, expected: Reader, found: Reader, progress: Progress
    ) -> None:
        self.nan_scales = 0
        self._build = build
        self._expected = expected
        self._found = found
        self._progress = progress
        self._n_done = 0
        self._digest = hashlib.sha256()
        self._pieces = _pieces(source, build)
        self._tensors: dict[str, list[TensorInfo]] = defaultdict(list)
        for tensor in build.tensors.values():
            self._tensors[build.weight_map[tensor.name]].append(tensor)

    def compare_shard(self, shard: str, manifest: Manifest) -> None:
        """Compare all tensors of one of the build's files, then the file's hash."""
        tensors = self._tensors[shard]
        self._digest = hashlib.sha256(_header_bytes(self._build.path / shard, tensors))
        for tensor in tensors:
            self._compare(tensor)
            self._n_done += tensor.n_bytes
            self._progress(self._n_done, self._build.total_size, shard)
        stated = {record.name: record.sha256 for record in manifest.shards}
        if stated.get(shard) != self._digest.hexdigest():
            raise MismatchError(
                f"{shard}: SHA-256 is {self._digest.hexdigest()}, "
                f"{MANIFEST} says {stated.get(shard)}.",
                AGAIN,
            )

    def _compare(self, tensor: TensorInfo) -> None:
        position = 0
        for place, wanted in self._pieces[tensor.name]:
            if place.begin != position:
                break
            for block in self._blocks(wanted, place):
                self._compare_block(wanted, place, position, block)
                position += len(block)
        if position != tensor.n_bytes:
            raise MismatchError(
                f"tensor {tensor.name}: {tensor.n_bytes - position:,} of its "
                f"{tensor.n_bytes:,} bytes have no counterpart in the source.",
                AGAIN,
            )

    def _blocks(self, tensor: TensorInfo, place: Place) -> Iterator[bytes | memoryview]:
        if place.values is not None:
            values = np.frombuffer(self._expected.read(tensor.name), WORDS[tensor.dtype])
            yield place.values(values.reshape(tensor.shape)).tobytes()
            return
        is_scale = tensor.name.endswith("weight_scale")
        for block in self._expected.blocks(Span(tensor.name, 0, tensor.n_bytes)):
            if is_scale:
                self.nan_scales += count_nan_scales(block)
            yield block

    def _compare_block(
        self, tensor: TensorInfo, place: Place, position: int, block: bytes | memoryview
    ) -> None:
        end = position + len(block)
        expected = memoryview(block)
        for found in self._found.blocks(Span(place.build, position, end)):
            wanted, expected = expected[: len(found)], expected[len(found) :]
            if not np.array_equal(_bytes_of(found), _bytes_of(wanted)):
                raise _difference(tensor, place, position, found, wanted)
            self._digest.update(found)
            position += len(found)


def _pieces(source: Source, build: Source) -> Pieces:
    """Raises MismatchError when the build lacks a tensor, or has it in another form."""
    pieces: Pieces = defaultdict(list)
    for tensor in source.tensors.values():
        for place in places(tensor, source.config):
            _check_form(build.tensors.get(place.build), tensor, place)
            pieces[place.build].append((place, tensor))
    for parts in pieces.values():
        parts.sort(key=lambda part: part[0].begin)
    return pieces


def _check_form(found: TensorInfo | None, tensor: TensorInfo, place: Place) -> None:
    if found is None:
        raise MismatchError(
            f"tensor {place.build} is missing in the build (source tensor {tensor.name}).", AGAIN
        )
    if (found.dtype, found.shape) != (place.dtype, place.shape):
        raise MismatchError(
            f"tensor {place.build}: {found.dtype} {found.shape}, "
            f"expected {place.dtype} {place.shape}.",
            AGAIN,
        )


def _header_bytes(path: Path, tensors: list[TensorInfo]) -> bytes:
    with path.open("rb") as file:
        return file.read(tensors[0].begin if tensors else -1)


def _bytes_of(block: bytes | memoryview) -> NDArray[np.uint8]:
    return np.frombuffer(block, np.uint8)


def _difference(
    tensor: TensorInfo, place: Place, position: int, found: memoryview, expected: memoryview
) -> MismatchError:
    """The error that names the first differing element of two blocks at `position`."""
    differs = _bytes_of(found) != _bytes_of(expected)
    n_element = DTYPE_BYTES[place.dtype]
    number = (position + int(np.argmax(differs))) // n_element
    begin = number * n_element - position
    window = slice(begin, begin + n_element)
    at, value = element(place.dtype, place.shape, bytes(found[window]), number)
    _, wanted = element(place.dtype, place.shape, bytes(expected[window]), number)
    return MismatchError(
        f"tensor {place.build}: element {at} is {value}, "
        f"expected {wanted} (source tensor {tensor.name}).",
        AGAIN,
    )


def _open_build(build: Path) -> Source:
    """Open a build; what is wrong with its files is a mismatch."""
    try:
        return open_source(build)
    except CheckpointError as error:
        raise MismatchError(error.message, AGAIN) from error


def _check_files(build: Source, source: Source) -> None:
    for path in sorted(build.path.glob("model*.safetensors")):
        if path.name not in build.shards:
            raise MismatchError(
                f"{path.name} is in {build.path}, but the index does not name it: "
                "mlx-lm would load it all the same.",
                f"delete it: rm {path}",
            )
    for name in sidecar_names(source.path):
        if file_size(build.path / name) is None:
            raise MismatchError(f"{name} is missing in {build.path}; the source has it.", AGAIN)
        if (build.path / name).read_bytes() != (source.path / name).read_bytes():
            raise MismatchError(f"{name} in {build.path} differs from the source's.", AGAIN)


def _checked_manifest(build: Source, source: Source) -> Manifest:
    """The build's manifest, which must be that of the source's plan."""
    try:
        manifest = read_manifest(build.path)
        profile = Profile(**manifest.profile) if manifest else None
    except (CheckpointError, TypeError) as error:
        raise MismatchError(f"{MANIFEST} is damaged: {error}", AGAIN) from error
    if manifest is None or profile is None:
        raise MismatchError(f"{MANIFEST} is missing in {build.path}.", AGAIN)
    plan = plan_build(source, profile)
    for field, stated, wanted in (
        ("source.headers_sha256", manifest.source.headers_sha256, plan.source.headers_sha256),
        ("plan_sha256", manifest.plan_sha256, plan.sha256),
        (
            "shards",
            [(shard.name, shard.n_bytes) for shard in manifest.shards],
            [(shard.name, shard.n_bytes) for shard in plan.shards],
        ),
    ):
        if stated != wanted:
            raise MismatchError(
                f"{MANIFEST}: {field} is {str(stated)[:70]}, expected {str(wanted)[:70]}.", AGAIN
            )
    return manifest


def _expected_config(config: Json) -> Json:
    """A source's config as a build must have it."""
    kept, text = (
        {field: value for field, value in holder.items() if field not in DROPPED}
        for holder in (config, config["text_config"])
    )
    return kept | {"text_config": text, "quantization": QUANTIZATION}


def _check_config(found: Json, expected: Json, path: str = "") -> None:
    for field in sorted(found.keys() | expected.keys()):
        ours, theirs = found.get(field, NONE), expected.get(field, NONE)
        if isinstance(ours, dict) and isinstance(theirs, dict):
            _check_config(ours, theirs, f"{path}{field}.")
        elif ours != theirs:
            raise _wrong_field(f"{path}{field}", ours, theirs)


def _wrong_field(field: str, found: object, expected: object) -> MismatchError:
    ours, theirs = str(found)[:70], str(expected)[:70]
    return MismatchError(f"config.json: {field} is {ours}, expected {theirs}.", AGAIN)
