"""Executes a plan: shards, sidecars, index, manifest, and `config.json` last.

Input: a plan, its source, a folder. Output: a build that loads, or a folder that the same call
continues. A shard is journalled when its bytes are on the disk, then gets its name; so no crash
between the two can lose it.
"""

from __future__ import annotations

import errno
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from converters.dense import DROP_ZERO_TAIL, apply_transform
from kimi_k3_mlx.convert.disk import mount_point
from kimi_k3_mlx.convert.estimate import check_fits, estimate
from kimi_k3_mlx.convert.folder import check_folder, locked, open_journal
from kimi_k3_mlx.convert.plan import shard_header
from kimi_k3_mlx.convert.shards import ShardJob, loss_key
from kimi_k3_mlx.convert.sidecars import index_bytes, json_bytes, manifest_bytes, read_sidecars
from kimi_k3_mlx.errors import DoesNotFitError, HubError, InterruptedBuildError, KimiError
from kimi_k3_mlx.schema import (
    BuildPlan,
    BuildTensor,
    Json,
    Manifest,
    PlannedShard,
    Progress,
    ShardRecord,
    silent,
)
from kimi_k3_mlx.tensors.header import file_size
from kimi_k3_mlx.tensors.journal import JOURNAL, Journal
from kimi_k3_mlx.tensors.source import CONFIG, INDEX, MANIFEST, Reader, Source
from kimi_k3_mlx.tensors.writer import ShardWriter, partial_path, publish, sync_folder, write_file
from kimi_k3_mlx.units import format_bytes

FULL = (errno.ENOSPC, errno.EDQUOT)
CHECKPOINT_BYTES = 1 << 30  # what a killed run copies or downloads again at most
CONTINUE = "run the same command again to continue."


@dataclass(frozen=True)
class BuildSummary:
    """What a run did; `nan_scales` counts E8M0 bytes of 255, which a sane checkpoint has not."""

    path: str
    plan_sha256: str
    n_shards: int
    n_reused: int
    """Shards that were already finished."""
    n_bytes: int
    nan_scales: int
    changed: tuple[Changed, ...]
    """Every tensor whose values are not the source's, by pattern."""

    def to_json(self) -> Json:
        """A JSON object."""
        return {"version": 1} | asdict(self)


@dataclass(frozen=True)
class Changed:
    """Tensors that were rounded: `name` has `*` for the numbers of layers."""

    name: str
    n_tensors: int
    stored_as: str
    error: float
    """‖ŵ−w‖ / ‖w‖ over all of them."""


def run(
    plan: BuildPlan,
    source: Source,
    out: Path,
    progress: Progress = silent,
    *,
    force: bool = False,
    overwrite: bool = False,
) -> BuildSummary:
    """Write the build, or what is missing of it; does nothing when it is finished.

    With `overwrite`, a build of ours that lies in the folder is deleted and written anew. What can
    be refused is refused before the folder is made or anything is deleted: UsageError for a folder
    that is not this build's, DoesNotFitError for a full disk (not with `force`), CheckpointError
    for values that can't be converted. Afterwards InterruptedBuildError, DoesNotFitError and
    HubError leave a folder that the same call, without `overwrite`, continues.
    """
    out = Path(out)
    with _refusals(out), source.reader() as reader:
        found = check_folder(plan, source, out, overwrite=overwrite)
        if isinstance(found, Manifest):
            (out / JOURNAL).unlink(missing_ok=True)
            records = {shard.name: shard for shard in found.shards}
            return _summary(plan, out, records, len(plan.shards))
        sidecars = read_sidecars(plan, source)
        _check_values(plan, reader)
        if not force:
            check_fits(estimate(plan, out, overwrite=overwrite))
        out.mkdir(parents=True, exist_ok=True)
        with locked(out):
            journal = open_journal(plan, source, out, overwrite=overwrite)
            job = _Job(plan, out, journal, progress)
            with job.explained():
                n_reused = job.write_shards(source, reader)
                job.finish(sidecars)
    return _summary(plan, out, job.journal.records, n_reused)


class _Job:
    """One run in one locked folder."""

    def __init__(self, plan: BuildPlan, out: Path, journal: Journal, progress: Progress) -> None:
        self.plan = plan
        self.out = out
        self.journal = journal
        self._progress = progress
        self._n_done = 0
        self._what = ""

    def write_shards(self, source: Source, reader: Reader) -> int:
        """Write every shard that is not finished; return how many were."""
        missing = [shard for shard in self.plan.shards if not self._recover(shard)]
        for shard in missing:
            if shard.name in self.journal.records:
                self.journal.forget(shard.name)
            self._what = shard.what
            self.journal.record(self._write(shard, source, reader))
            publish(self.out / shard.name)
        return len(self.plan.shards) - len(missing)

    def finish(self, sidecars: dict[str, bytes]) -> None:
        """Manifest, sidecars, index; then config.json, after which the folder loads."""
        last = {INDEX: index_bytes(self.plan), CONFIG: json_bytes(self.plan.config)}
        manifest = manifest_bytes(self.plan, self.journal.records, sidecars | last)
        write_file(self.out / MANIFEST, manifest)  # first, as it lists what may be deleted
        for name, content in (sidecars | last).items():
            (self.out / name).parent.mkdir(exist_ok=True)
            write_file(self.out / name, content)
        self.journal.path.unlink()
        sync_folder(self.out)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn an interruption or a full disk into a sentence that says how to go on."""
        try:
            yield
        except KeyboardInterrupt as error:
            raise InterruptedBuildError(
                f"interrupted after {self._achieved()}.", CONTINUE
            ) from error
        except HubError as error:
            error.message += f" The build stopped after {self._achieved()}."
            error.hint += f" Then {CONTINUE}"
            raise
        except OSError as error:
            if error.errno == errno.EFBIG:
                raise DoesNotFitError(
                    f"{mount_point(self.out)} takes no file as big as the build's, up to "
                    f"{format_bytes(max(shard.n_bytes for shard in self.plan.shards))}.",
                    "FAT32 ends at 4 GB: point --mlx-path at another disk; "
                    f"or raise the file size limit (ulimit -f) and {CONTINUE}",
                ) from error
            if error.errno not in FULL:
                raise
            raise DoesNotFitError(
                f"no space left on {mount_point(self.out)} after {self._achieved()}.",
                f"make room for {format_bytes(self._n_left())} and {CONTINUE}",
            ) from error

    def _recover(self, shard: PlannedShard) -> bool:
        """Is the shard finished? A journalled one may still have its partial name."""
        path = self.out / shard.name
        if shard.name not in self.journal.records:
            return False
        if file_size(path) != shard.n_bytes:
            if file_size(partial_path(path)) != shard.n_bytes:
                return False
            publish(path)
        self._n_done += shard.n_bytes
        return True

    def _write(self, shard: PlannedShard, source: Source, reader: Reader) -> ShardRecord:
        kept = self._partial(shard)
        with ShardWriter(self.out / shard.name, shard_header(shard), kept.n_bytes) as writer:
            self._advance(writer.n_bytes)
            checkpoint = _Checkpoints(writer, kept.n_bytes)
            job = ShardJob(shard, source, reader, writer, kept)
            for n_bytes in job.steps():
                self._advance(n_bytes)
                if n_safe := checkpoint.due():
                    self.journal.checkpoint(job.record(n_safe))
            return job.record(shard.n_bytes, writer.finish())

    def _partial(self, shard: PlannedShard) -> ShardRecord:
        """What an earlier run left of a shard and knows to be on the disk; else nothing."""
        partial = self.journal.partial
        if partial is not None and partial.name == shard.name:
            size = file_size(partial_path(self.out / shard.name))
            if size is not None and partial.n_bytes <= size:
                return partial
        return ShardRecord(shard.name, 0, "")

    def _advance(self, n_bytes: int) -> None:
        self._n_done += n_bytes
        self._progress(self._n_done, self.plan.n_bytes, self._what)

    def _finished(self) -> list[PlannedShard]:
        names = self.journal.records
        return [shard for shard in self.plan.shards if shard.name in names]

    def _n_left(self) -> int:
        return self.plan.n_bytes - sum(shard.n_bytes for shard in self._finished())

    def _achieved(self) -> str:
        finished = self._finished()
        n_layers = sum(shard.what.startswith("layer ") for shard in finished)
        written = format_bytes(sum(shard.n_bytes for shard in finished))
        return f"layer {n_layers}/{self.plan.n_layers} ({written} written, all shards intact)"


@contextmanager
def _refusals(out: Path) -> Iterator[None]:
    """Turn the operating system's refusals into ours."""
    try:
        yield
    except OSError as error:
        kind = DoesNotFitError if error.errno in FULL else KimiError
        raise kind(
            f"{error.filename or out}: {error.strerror}.",
            f"check the disk and its permissions, then {CONTINUE}",
        ) from error


class _Checkpoints:
    """Makes a partial shard durable from time to time, so that a resumed run can keep it."""

    def __init__(self, writer: ShardWriter, n_kept: int) -> None:
        self._writer = writer
        self._at = n_kept

    def due(self) -> int:
        """How many bytes are safe now, if it was time to see to that; else 0."""
        if self._writer.n_bytes - self._at < CHECKPOINT_BYTES:
            return 0
        self._at = self._writer.n_bytes
        return self._writer.checkpoint()


def _check_values(plan: BuildPlan, reader: Reader) -> None:
    """Read the few small tensors whose values decide whether the build is possible."""
    for tensor in plan.tensors:
        if tensor.transform == DROP_ZERO_TAIL:
            apply_transform(tensor, reader.read(tensor.spans[0]))


def _summary(
    plan: BuildPlan, out: Path, records: dict[str, ShardRecord], n_reused: int
) -> BuildSummary:
    return BuildSummary(
        path=str(out),
        plan_sha256=plan.sha256,
        n_shards=len(plan.shards),
        n_reused=n_reused,
        n_bytes=plan.n_bytes,
        nan_scales=sum(shard.nan_scales for shard in records.values()),
        changed=tuple(_changed(plan, records.values())),
    )


def _changed(plan: BuildPlan, records: Iterable[ShardRecord]) -> Iterator[Changed]:
    tensors: dict[str, list[BuildTensor]] = defaultdict(list)
    for tensor in plan.tensors:
        if tensor.is_rounded:
            tensors[loss_key(tensor)].append(tensor)
    losses = [record.losses for record in records]
    for key, members in sorted(tensors.items()):
        error, norm = (sum(loss[key][i] for loss in losses if key in loss) for i in (0, 1))
        name, _, stored_as = key.partition("  ")
        yield Changed(name, len(members), stored_as, (error / norm) ** 0.5 if norm else 0.0)
