"""The output folder: whose is it, is it finished, may we go on? And the lock that keeps others out.

Input: a plan and the folder. Output: nothing, a journal, a manifest, or a refusal that names what
differs. A build's own files are those that its journal and its manifest list, and nothing else.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kimi_k3_mlx.convert.sidecars import ROOT_FILES, read_manifest, sidecar_names
from kimi_k3_mlx.errors import UsageError
from kimi_k3_mlx.schema import LOST, BuildPlan, Json, Manifest, canonical
from kimi_k3_mlx.tensors.header import file_size
from kimi_k3_mlx.tensors.journal import (
    JOURNAL,
    Journal,
    journal_files,
    read_journal,
    start_journal,
)
from kimi_k3_mlx.tensors.local import LocalSource, read_json
from kimi_k3_mlx.tensors.source import CONFIG, INDEX, MANIFEST, Source
from kimi_k3_mlx.tensors.writer import PARTIAL, partial_path, sync_folder

CACHE = "__pycache__"
OTHER_FOLDER = "choose another --mlx-path, or pass --overwrite to delete it."


def _finished_build(plan: BuildPlan, out: Path) -> Manifest | None:
    """The manifest when `out` is this plan's finished build; None when it is not finished.

    Raises UsageError when it is a finished build of another plan, lacks shards, or has other small
    files than were written.
    """
    manifest = read_manifest(out)
    if manifest is None:
        return None
    found = {
        "profile": manifest.profile.get("name"),
        "prune_sha256": manifest.prune_sha256,
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
    for name, sha256 in manifest.sidecars.items():
        path = out / name
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
            raise UsageError(
                f"{out} is a finished build, but {name} is missing or has changed.",
                "bring it back, or pass --overwrite to delete the build and begin again.",
            )
    return manifest


def check_folder(
    plan: BuildPlan, source: Source, out: Path, *, overwrite: bool = False
) -> Manifest | Journal | None:
    """The manifest of this plan's finished build, the journal of its unfinished one, or None when
    the folder is new or empty, or when what lies there may be overwritten.

    Raises UsageError when the folder is somebody else's, or belongs to other options.
    """
    if not out.exists():
        return None
    if isinstance(source, LocalSource) and out.samefile(source.path):
        raise UsageError(f"{out} is the source itself.", "choose another --mlx-path.")
    names = _visible_names(out)
    if not names:
        return None
    if overwrite:
        _check_overwritable(plan, source, out, names)
        return None
    return _finished_build(plan, out) or _unfinished_build(plan, source, out, names)


def _unfinished_build(plan: BuildPlan, source: Source, out: Path, names: set[str]) -> Journal:
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
    _check_shards(out, set(_files(plan, source)))
    return journal


def _check_overwritable(plan: BuildPlan, source: Source, out: Path, names: set[str]) -> None:
    if not names & {JOURNAL, MANIFEST}:
        raise UsageError(
            f"{out} is not a build of kimi-k3-mlx; it is not deleted.",
            "choose another --mlx-path.",
        )
    own = {path.name for path in own_files(out)}
    _check_shards(out, own)
    for name in sorted((names - own) & {*_files(plan, source), CONFIG, INDEX}):
        raise UsageError(
            f"{out} holds {name}, which the build that lies there did not write.",
            "move it away, or choose another --mlx-path.",
        )


def _check_shards(out: Path, expected: set[str]) -> None:
    """mlx-lm loads every file of such a name, whatever the index says."""
    for path in sorted(out.glob("model*.safetensors")):
        if path.name not in expected:
            raise UsageError(
                f"{out} holds {path.name}, which is no shard of this build.",
                "move it away, or choose another --mlx-path.",
            )


def open_journal(plan: BuildPlan, source: Source, out: Path, *, overwrite: bool) -> Journal:
    """Continue the folder's journal or begin one; call it under the lock.

    With `overwrite`, the build in the folder is deleted. At every moment a journal or a manifest
    lists what is left of it, so a deletion that was interrupted can be repeated.
    """
    found = check_folder(plan, source, out, overwrite=overwrite)
    if isinstance(found, Manifest):
        raise UsageError(
            f"{out} was finished by another process.", "run the same command again to see it."
        )
    if found:
        return found
    delete_build(out)
    notes = {"files": _files(plan, source), "commit": plan.source.commit}
    journal = start_journal(out, _identity(plan, source) | notes)
    (out / MANIFEST).unlink(missing_ok=True)
    return journal


def begun_commit(out: Path) -> str | None:
    """The commit that an unfinished build in the folder is made from, if it knows one."""
    journal = read_journal(out) if out.is_dir() else None
    commit = journal.identity.get("commit") if journal else None
    return str(commit) if commit else None


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


def own_files(out: Path) -> list[Path]:
    """The files in a folder that a build of ours wrote, finished or not, by its own records.

    Raises CheckpointError when the records are damaged.
    """
    names = {CONFIG, INDEX, MANIFEST, JOURNAL, *journal_files(out)}
    if file_size(out / MANIFEST) is not None:
        names.update(Manifest.from_json(read_json(out / MANIFEST, LOST)).files)
    paths = [out / name for name in sorted(names) if _is_inside(name)]
    return [p for path in paths for p in (path, partial_path(path)) if p.is_file()]


def _is_inside(name: str) -> bool:
    """A damaged record must not make us delete elsewhere: only our own packages are folders."""
    folder, file = os.path.split(name)
    return folder in ("", *ROOT_FILES) and os.path.basename(file) == file != ".."


def delete_build(out: Path) -> None:
    """Delete a build but its journal and manifest; a user's own files stay. Needs the lock."""
    files = own_files(out)
    (out / CONFIG).unlink(missing_ok=True)  # first: from here on nothing loads
    sync_folder(out)
    for path in files:
        if path.name not in (CONFIG, JOURNAL, MANIFEST):
            path.unlink()
        if path.parent != out and not {file.name for file in path.parent.iterdir()} - {CACHE}:
            shutil.rmtree(path.parent)  # Python may have left its own files in our package


def _files(plan: BuildPlan, source: Source) -> list[str]:
    return [*(shard.name for shard in plan.shards), *sidecar_names(plan, source)]


def _identity(plan: BuildPlan, source: Source | None = None) -> Json:
    """What must agree for a folder to be continued; the order is that of naming differences."""
    identity = {
        "profile": plan.profile.name,
        "profile_sha256": hashlib.sha256(canonical(plan.profile.to_json())).hexdigest(),
        "prune_sha256": plan.prune.sha256 if plan.prune else None,
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
    whole = field == "profile" or value is None
    return str(value) if whole else f"{str(value)[:4]}…"


def _visible_names(folder: Path) -> set[str]:
    """Entries, without what macOS leaves behind and a journal that was never born."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder.", "choose another --mlx-path.")
    names = {entry.name for entry in folder.iterdir()}
    return {name for name in names if not name.startswith(".")} - {JOURNAL + PARTIAL}
