"""What a build costs before it begins: bytes to read and write, free disk, memory.

Input: a plan and the output folder. Output: `Estimate`. Reads no tensor byte and writes nothing.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from kimi_k3_mlx.errors import DoesNotFitError
from kimi_k3_mlx.schema import BuildPlan, Json
from kimi_k3_mlx.tensors.header import file_size
from kimi_k3_mlx.tensors.journal import read_journal
from kimi_k3_mlx.tensors.source import BUFFER_BYTES
from kimi_k3_mlx.units import format_bytes

INTERPRETER_BYTES = 50_000_000  # Python and numpy
BYTES_PER_SPAN = 900  # names and places of source and plan; K3's half a million take 420 MB


@dataclass(frozen=True)
class Estimate:
    """Bytes that a build needs; `n_done` are in finished shards of an earlier run."""

    volume: str
    """Mount point of the output folder."""
    n_build: int
    n_done: int
    n_read: int
    n_free: int
    n_memory: int
    """Peak resident memory of the conversion."""

    @property
    def n_write(self) -> int:
        """Bytes still to be written."""
        return self.n_build - self.n_done

    @property
    def fits(self) -> bool:
        """Whether the disk has room for what is still to be written."""
        return self.n_write <= self.n_free

    def to_json(self) -> Json:
        """A JSON object."""
        return asdict(self) | {"version": 1, "n_write": self.n_write, "fits": self.fits}


def estimate(plan: BuildPlan, out: Path) -> Estimate:
    """Sizes of a build and of the disk that `out` is on; `out` need not exist."""
    place = existing_parent(Path(out))
    transforms = (tensor.n_read for tensor in plan.tensors if tensor.transform)
    n_spans = sum(len(tensor.spans) for tensor in plan.tensors)
    return Estimate(
        volume=str(mount_point(place)),
        n_build=plan.n_bytes,
        n_done=_finished_bytes(plan, Path(out)),
        n_read=plan.n_read,
        n_free=shutil.disk_usage(place).free,
        n_memory=INTERPRETER_BYTES
        + BYTES_PER_SPAN * n_spans
        + BUFFER_BYTES
        + 3 * max(transforms, default=0),
    )


def check_fits(sizes: Estimate) -> None:
    """Raise DoesNotFitError when the disk is too small."""
    if not sizes.fits:
        raise DoesNotFitError(
            f"needs {format_bytes(sizes.n_write)} on {sizes.volume}, "
            f"{format_bytes(sizes.n_free)} free.",
            "point --mlx-path at another disk, or prune harder with --target-size; "
            "--force tries anyway.",
        )


def existing_parent(path: Path) -> Path:
    """The path, or its nearest parent that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def mount_point(path: Path) -> Path:
    """The root of the disk that an existing path is on."""
    path = path.resolve()
    while not os.path.ismount(path):
        path = path.parent
    return path


def _finished_bytes(plan: BuildPlan, out: Path) -> int:
    journal = read_journal(out)
    done = journal.records if journal else {}
    shards = [shard for shard in plan.shards if shard.name in done]
    return sum(shard.n_bytes for shard in shards if file_size(out / shard.name) == shard.n_bytes)
