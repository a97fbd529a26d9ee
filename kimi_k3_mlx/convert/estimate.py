"""What a build costs before it begins: bytes to read and write, free disk, memory, time.

Input: a plan and the output folder. Output: `Estimate`. Reads no tensor byte and writes nothing.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path

from converters.experts import REQUANTIZE
from kimi_k3_mlx.convert.disk import existing_parent, mount_point
from kimi_k3_mlx.convert.folder import own_files
from kimi_k3_mlx.convert.shards import ROWS_BYTES
from kimi_k3_mlx.convert.sidecars import read_manifest
from kimi_k3_mlx.errors import DoesNotFitError
from kimi_k3_mlx.schema import BuildPlan, BuildTensor, Json
from kimi_k3_mlx.tensors.header import file_size
from kimi_k3_mlx.tensors.journal import read_journal
from kimi_k3_mlx.tensors.local import BUFFER_BYTES
from kimi_k3_mlx.tensors.writer import partial_path
from kimi_k3_mlx.units import format_bytes

INTERPRETER_BYTES = 50_000_000  # Python and numpy
MLX_BYTES = 60_000_000
BYTES_PER_SPAN = 900  # names and places of source and plan; K3's half a million take 420 MB


@dataclass(frozen=True)
class Estimate:
    """Bytes that a build needs.

    `n_done` are in finished shards of an earlier run; `n_freed` lie in files that are deleted or
    truncated before the first byte is written.
    """

    volume: str
    """Mount point of the output folder."""
    n_build: int
    n_done: int
    n_read: int
    n_free: int
    n_memory: int
    """Peak resident memory of the conversion."""
    n_freed: int = 0
    read_rate: float | None = None
    """Bytes a second at which the source's headers came from the disk; None: too few to tell."""

    @property
    def n_write(self) -> int:
        """Bytes still to be written."""
        return self.n_build - self.n_done

    @property
    def seconds(self) -> float | None:
        """How long reading takes at least."""
        return self.n_read / self.read_rate if self.read_rate else None

    @property
    def fits(self) -> bool:
        """Whether the disk has room for what is still to be written."""
        return self.n_write <= self.n_free + self.n_freed

    def to_json(self) -> Json:
        """A JSON object."""
        return asdict(self) | {
            "version": 1,
            "n_write": self.n_write,
            "fits": self.fits,
            "seconds": self.seconds,
        }


def estimate(
    plan: BuildPlan, out: Path, *, overwrite: bool = False, read_rate: float | None = None
) -> Estimate:
    """Sizes of a build and of the disk that `out` is on; `out` need not exist."""
    out = Path(out)
    place = existing_parent(out)
    done: set[str] = set()
    n_freed = _own_bytes(out)
    if not overwrite:
        done, n_freed = _reused(plan, out)
    todo = [shard for shard in plan.shards if shard.name not in done]
    n_spans = sum(len(tensor.spans) for tensor in plan.tensors)
    return Estimate(
        volume=str(mount_point(place)),
        n_build=plan.n_bytes,
        n_done=sum(shard.n_bytes for shard in plan.shards if shard.name in done),
        n_read=sum(tensor.n_read for shard in todo for tensor in shard.tensors),
        n_free=shutil.disk_usage(place).free,
        n_memory=INTERPRETER_BYTES
        + BYTES_PER_SPAN * n_spans
        + 4 * BUFFER_BYTES
        + max(map(_working_bytes, plan.tensors), default=0),
        n_freed=n_freed,
        read_rate=read_rate,
    )


def _working_bytes(tensor: BuildTensor) -> int:
    """What computing a tensor holds: rows, or an expert, in F32 and in what becomes of them."""
    if tensor.transform == REQUANTIZE:
        return MLX_BYTES + 8 * prod(tensor.shape[1:]) * 4
    if tensor.quantization:
        return MLX_BYTES + 8 * ROWS_BYTES
    return 3 * tensor.n_read if tensor.transform else 0


def check_fits(sizes: Estimate) -> None:
    """Raise DoesNotFitError when the disk is too small."""
    if not sizes.fits:
        raise DoesNotFitError(
            f"needs {format_bytes(sizes.n_write)} on {sizes.volume}, "
            f"{format_bytes(sizes.n_free + sizes.n_freed)} free.",
            "point --mlx-path at another disk, or prune harder with --target-size; "
            "--force tries anyway.",
        )


def _own_bytes(out: Path) -> int:
    return sum(path.stat().st_size for path in own_files(out))


def _reused(plan: BuildPlan, out: Path) -> tuple[set[str], int]:
    """Shards that are finished, whatever their name, and bytes of partial ones that are not."""
    manifest, journal = read_manifest(out), read_journal(out)
    finished = {shard.name for shard in manifest.shards} if manifest else set()
    finished |= journal.records.keys() if journal else set()
    n_torn = 0
    done = set()
    for shard in plan.shards:
        path = out / shard.name
        sizes = file_size(path), file_size(partial_path(path))
        if shard.name in finished and shard.n_bytes in sizes:
            done.add(shard.name)
        else:
            n_torn += sum(filter(None, sizes))
    return done, n_torn
