"""Compares a build with its source: every expert byte for byte, every trunk tensor by value.

Input: a build's folder and an opened source. Output: `VerifyReport`, or MismatchError naming tensor
and element. What belongs where comes from `naive`, not from the code that wrote the build.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kimi_k3_mlx.convert.naive import WORDS, Place, element, places
from kimi_k3_mlx.convert.sidecars import sidecar_names
from kimi_k3_mlx.errors import CheckpointError, MismatchError
from kimi_k3_mlx.schema import DTYPE_BYTES, Json, Progress, Span, TensorInfo, silent
from kimi_k3_mlx.tensors.header import file_size
from kimi_k3_mlx.tensors.source import Reader, Source, open_source

AGAIN = "convert it again with --overwrite."
QUANTIZATION = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
DROPPED = ("quantization_config", "auto_map", "quantization")
NAN_SCALE = 255


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
    """Compare a whole build; raise MismatchError (exit code 3) at the first difference."""
    opened = _open_build(Path(build))
    _check_files(opened, source)
    _check_config(opened.config, source.config)
    _check_sizes(opened)
    with source.reader() as expected, opened.reader() as found:
        comparison = _Comparison(source, opened, expected, found, progress)
        for tensor in source.tensors.values():
            comparison.compare(tensor)
        comparison.check_coverage()
    return VerifyReport(
        build=str(build),
        source=str(source.path),
        n_tensors=len(source.tensors),
        n_expert_tensors=sum(".experts." in name for name in source.tensors),
        n_bytes=comparison.n_done,
        nan_scales=comparison.nan_scales,
    )


class _Comparison:
    """Walks over the source's tensors and looks each up in the build."""

    def __init__(
        self, source: Source, build: Source, expected: Reader, found: Reader, progress: Progress
    ) -> None:
        self.nan_scales = 0
        self.n_done = 0
        self._source = source
        self._build = build
        self._expected = expected
        self._found = found
        self._progress = progress
        self._total = source.total_size
        self._covered: Counter[str] = Counter()

    def compare(self, tensor: TensorInfo) -> None:
        """Compare one source tensor at all its places."""
        for place in places(tensor, self._source.config):
            self._check_form(tensor, place)
            position = place.begin
            for block in self._blocks(tensor, place):
                self._compare_block(tensor, place, position, block)
                position += len(block)
            self._covered[place.build] += position - place.begin
        self.n_done += tensor.n_bytes
        self._progress(self.n_done, self._total, self._source.weight_map[tensor.name])

    def check_coverage(self) -> None:
        """Raise MismatchError when the build has bytes that no source tensor accounts for."""
        for name, tensor in self._build.tensors.items():
            if self._covered[name] != tensor.n_bytes:
                raise MismatchError(
                    f"tensor {name}: {tensor.n_bytes - self._covered[name]:,} of its "
                    f"{tensor.n_bytes:,} bytes have no counterpart in the source.",
                    AGAIN,
                )

    def _check_form(self, tensor: TensorInfo, place: Place) -> None:
        found = self._build.tensors.get(place.build)
        if found is None:
            raise MismatchError(
                f"tensor {place.build} is missing in the build (source tensor {tensor.name}).",
                AGAIN,
            )
        if (found.dtype, found.shape) != (place.dtype, place.shape):
            raise MismatchError(
                f"tensor {place.build}: {found.dtype} {found.shape}, "
                f"expected {place.dtype} {place.shape}.",
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
                self.nan_scales += int(np.count_nonzero(_bytes_of(block) == NAN_SCALE))
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
            position += len(found)


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


def _check_config(found: Json, expected: Json, path: str = "") -> None:
    """Every field of the source's config must be in the build's, and the quantization block."""
    if not path and found.get("quantization") != QUANTIZATION:
        raise _wrong_field("quantization", found.get("quantization"), QUANTIZATION)
    if "quantization_config" in found:
        raise _wrong_field(f"{path}quantization_config", "present", "none")
    for field in sorted((found.keys() | expected.keys()) - set(DROPPED)):
        ours, theirs = found.get(field), expected.get(field)
        if field == "text_config" and isinstance(ours, dict) and isinstance(theirs, dict):
            _check_config(ours, theirs, "text_config.")
        elif ours != theirs:
            raise _wrong_field(f"{path}{field}", ours, theirs)


def _check_sizes(build: Source) -> None:
    """The build's config must describe the build's own tensors."""
    text = build.config["text_config"]
    for name, tensor in build.tensors.items():
        if name.endswith(".mlp.gate.weight"):
            _check_size(name, tensor.shape, (text["num_experts"], text["hidden_size"]))
        elif name.endswith("model.embed_tokens.weight"):
            _check_size(name, tensor.shape, (text["vocab_size"], text["hidden_size"]))
    layers = {name.split(".")[3] for name in build.tensors if ".layers." in name}
    if len(layers) != text["num_hidden_layers"]:
        raise _wrong_field("text_config.num_hidden_layers", text["num_hidden_layers"], len(layers))


def _check_size(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise MismatchError(f"tensor {name}: {found}, config.json says {expected}.", AGAIN)


def _wrong_field(field: str, found: object, expected: object) -> MismatchError:
    return MismatchError(f"config.json: {field} is {found}, expected {expected}.", AGAIN)
