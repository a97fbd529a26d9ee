"""The output folder: whose is it, is it finished, may we go on? And the lock that keeps others out.

Input: a plan and the folder. Output: nothing, a journal, or a refusal that names what differs.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

from kimi_k3_mlx.convert.sidecars import MANIFEST, is_sidecar, read_manifest
from kimi_k3_mlx.errors import UsageError
from kimi_k3_mlx.schema import BuildPlan, Json, Manifest, canonical
from kimi_k3_mlx.tensors.header import file_size
from kimi_k3_mlx.tensors.journal import JOURNAL, Journal, read_journal, start_journal
from kimi_k3_mlx.tensors.source import CONFIG, INDEX, Source
from kimi_k3_mlx.tensors.writer import PARTIAL, sync_folder

OTHER_FOLDER = "choose another --mlx-path, or pass --overwrite to delete it."


def finished_build(plan: BuildPlan, out: Path) -> Manifest | None:
    """The manifest when `out` is this plan's finished build; None when it is not finished.

    Raises UsageError when it is a finished build of another plan, or lacks shards.
    """
    manifest = read_manifest(out)
    if manifest is None:
        return None
    found = {
        "profile": manifest.profile.get("name"),
        "source_sha256": manifest.source.headers_sha256,
        "plan_sha256": manifest.plan_sha256,
    }
    difference = _difference(found, _identity(plan))
    if difference:
        raise UsageError(f"{out} is a finished build of another plan ({difference}).", OTHER_FOLDER)
    for shard in plan.shards:
        if file_size(out / shard.name) != shard.n_bytes:
            raise UsageError(
                f"{out} is a finished build, but {shard.name} is missing or truncated.",
                "pass --overwrite to delete it and begin again.",
            )
    return manifest


def check_folder(plan: BuildPlan, source: Source, out: Path) -> Journal | None:
    """The journal of this plan's unfinished build, or None when the folder is new or empty.

    Raises UsageError when the folder is somebody else's, or belongs to other options.
    """
    if not out.exists():
        return None
    names = _visible_names(out)
    if not names:
        return None
    journal = read_journal(out)
    if journal is None:
        raise UsageError(
            f"{out} is not empty and not a build of kimi-k3-mlx: it holds {min(names)}.",
            OTHER_FOLDER if MANIFEST in names else "choose another --mlx-path.",
        )
    difference = _difference(journal.identity, _identity(plan, source))
    if difference:
        raise UsageError(
            f"{out} is an unfinished build with other options ({difference}).", OTHER_FOLDER
        )
    planned = {shard.name for shard in plan.shards}
    for path in sorted(out.glob("model*.safetensors")):
        if path.name not in planned:
            raise UsageError(
                f"{out} holds {path.name}, which is no shard of this build.",
                "move it away, or choose another --mlx-path.",
            )
    return journal


def open_journal(plan: BuildPlan, source: Source, out: Path) -> Journal:
    """Continue the folder's journal or begin one; call it under the lock."""
    return check_folder(plan, source, out) or start_journal(out, _identity(plan, source))


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Keep a second writer out; the lock is on the folder itself and leaves no file behind."""
    folder = os.open(out, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(
                f"{out} is being written by another process.", "wait until it has ended."
            ) from error
        yield
    finally:
        os.close(folder)


def delete_build(out: Path) -> None:
    """Delete a build, finished or not; the folder and files that we don't write stay.

    Raises UsageError when the folder is not a build of ours.
    """
    if not out.exists() or not _visible_names(out):
        return
    if file_size(out / JOURNAL) is None and file_size(out / MANIFEST) is None:
        raise UsageError(f"{out} is not a build of kimi-k3-mlx; it is not deleted.")
    with locked(out):
        (out / CONFIG).unlink(missing_ok=True)  # first: from here on nothing loads
        sync_folder(out)
        last = (JOURNAL, MANIFEST)  # so that a deletion that was interrupted can be repeated
        for name in sorted(filter(_is_ours, os.listdir(out)), key=lambda name: name in last):
            (out / name).unlink()


def _is_ours(name: str) -> bool:
    name = name.removesuffix(PARTIAL)
    return (
        name in (CONFIG, INDEX, MANIFEST, JOURNAL)
        or fnmatch(name, "model-*-of-*.safetensors")
        or is_sidecar(name)
    )


def _identity(plan: BuildPlan, source: Source | None = None) -> Json:
    """What must agree for a folder to be continued; the order is that of naming differences."""
    identity = {
        "profile": plan.profile.name,
        "profile_sha256": hashlib.sha256(canonical(plan.profile.to_json())).hexdigest(),
        "source_sha256": plan.source.headers_sha256,
        "plan_sha256": plan.sha256,
    }
    return identity | ({"source_files": source.state()} if source else {})


def _difference(found: Json, wanted: Json) -> str:
    """The first field that both have and that differs: `plan_sha256 3fa1… ≠ 9c02…`."""
    for field, value in wanted.items():
        if field in found and found[field] != value:
            return f"{field} {_short(field, found[field])} ≠ {_short(field, value)}"
    return ""


def _short(field: str, value: object) -> str:
    return str(value) if field == "profile" else f"{str(value)[:4]}…"


def _visible_names(folder: Path) -> set[str]:
    """Entries, without what macOS leaves behind and a journal that was never born."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder.", "choose another --mlx-path.")
    names = {entry.name for entry in folder.iterdir()}
    return {name for name in names if not name.startswith(".")} - {JOURNAL + PARTIAL}
