"""Checks a build against itself: its manifest against the files, the files against each other.

Input: a build's folder. Output: `AloneReport`, or MismatchError naming file, field or tensor. Needs
no source: it finds what has changed since the build was written, not what was written wrong.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from converters.config import MODEL_FILE
from kimi_k3_mlx.convert.consistent import check_shapes
from kimi_k3_mlx.convert.plan import plan_build
from kimi_k3_mlx.convert.sidecars import PRUNE_PLAN, read_manifest
from kimi_k3_mlx.convert.wanted import AGAIN
from kimi_k3_mlx.errors import CheckpointError, MismatchError, UsageError
from kimi_k3_mlx.profile import Profile
from kimi_k3_mlx.prune_plan import PrunePlan, read_plan
from kimi_k3_mlx.schema import Json, Manifest, Progress, silent
from kimi_k3_mlx.tensors.journal import JOURNAL
from kimi_k3_mlx.tensors.local import LocalSource, fill, open_source, open_uncached
from kimi_k3_mlx.tensors.source import CONFIG, MANIFEST

BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class OpenedBuild:
    """A build with its records, which agree with the names and sizes of its files."""

    files: LocalSource
    manifest: Manifest
    profile: Profile
    prune: PrunePlan | None

    @property
    def path(self) -> Path:
        """The folder."""
        return self.files.path


@dataclass(frozen=True)
class AloneReport:
    """What was checked; a report exists only when everything agreed."""

    build: str
    profile: str
    prune_sha256: str | None
    source_commit: str | None
    n_tensors: int
    n_shards: int
    n_bytes: int
    """Bytes of the shards, all of which were hashed."""
    n_sidecars: int

    def to_json(self) -> Json:
        """A JSON object."""
        return {"version": 1} | asdict(self)


def verify_alone(
    build: Path, progress: Progress = silent, *, prune: PrunePlan | None = None
) -> AloneReport:
    """Check a build without its source; raise MismatchError (exit code 3) at the first difference.

    Checked are: headers, index and total_size, the manifest's sizes and SHA-256 of shards and small
    files, the prune plan, and config.json against the shapes of all tensors.
    """
    opened = open_build(Path(build))
    check_plan_given(opened, prune)
    check_sizes(opened)
    check_config(opened)
    check_sidecars(opened)
    n_bytes, n_done = sum(opened.files.shards.values()), 0

    def advance(n_more: int) -> None:
        nonlocal n_done
        n_done += n_more
        progress(n_done, n_bytes, record.name)

    for record in opened.manifest.shards:
        check_hash(record.name, sha256_of(opened.path / record.name, advance), record.sha256)
    return AloneReport(
        build=str(build),
        profile=opened.profile.name,
        prune_sha256=opened.manifest.prune_sha256,
        source_commit=opened.manifest.source.commit,
        n_tensors=len(opened.files.tensors),
        n_shards=len(opened.files.shards),
        n_bytes=n_bytes,
        n_sidecars=len(opened.manifest.sidecars),
    )


def open_build(build: Path) -> OpenedBuild:
    """Open a build by its headers and records; what is wrong with its files is a mismatch.

    Raises UsageError when the folder doesn't exist.
    """
    if (build / JOURNAL).is_file() and not (build / CONFIG).is_file():
        raise MismatchError(
            f"{build} is an unfinished build.", "run the command that began it again to finish it."
        )
    try:
        files = open_source(build)
    except CheckpointError as error:
        raise MismatchError(error.message, AGAIN) from error
    for path in sorted(build.glob("*.safetensors")):
        if path.name not in files.shards:
            raise MismatchError(
                f"{path.name} is in {build}, but the index does not name it: "
                "loaders that take every such file would take it too.",
                f"delete it: rm {path}",
            )
    manifest, profile = _manifest(build)
    return OpenedBuild(files, manifest, profile, _prune_plan(build, manifest))


def check_plan_given(opened: OpenedBuild, prune: PrunePlan | None) -> None:
    """The build was made with the plan that the user gives; padding apart, which is an option."""
    if prune is None:
        return
    if opened.prune is not None:
        prune = replace(prune, pad_uniform=opened.prune.pad_uniform)
    stated = opened.manifest.prune_sha256
    if prune.sha256 != stated:
        raise MismatchError(
            f"{MANIFEST}: prune_sha256 is {stated or 'none'}, the plan given has {prune.sha256}.",
            "give the plan that the build was made with, or convert it again with --overwrite.",
        )


def check_sizes(opened: OpenedBuild) -> None:
    """The manifest lists the shards that the index names, with their sizes."""
    found = opened.files.shards
    stated = {record.name: record.n_bytes for record in opened.manifest.shards}
    for name in sorted(found.keys() | stated.keys()):
        ours, theirs = _bytes(found.get(name)), _bytes(stated.get(name))
        if ours != theirs:
            raise MismatchError(f"{name} has {ours}, {MANIFEST} says {theirs}.", AGAIN)


def check_sidecars(opened: OpenedBuild) -> None:
    """Every small file that the manifest lists is there and has its hash."""
    for name, sha256 in opened.manifest.sidecars.items():
        check_hash(name, hashlib.sha256(small_file(opened.path, name)).hexdigest(), sha256)


def check_config(opened: OpenedBuild) -> None:
    """config.json describes the tensors that are there, and names no code but ours."""
    named = opened.files.config.get("model_file")
    if named is not None and (named != MODEL_FILE or named not in opened.manifest.sidecars):
        raise MismatchError(
            f"config.json: model_file is {str(named)[:40]}, which {MANIFEST} does not list.", AGAIN
        )
    if opened.profile.layout != "moonshot":
        check_shapes(opened.files)
        _check_counts(opened)
        return
    try:
        plan_build(opened.files, opened.profile)
    except CheckpointError as error:
        raise MismatchError(error.message, AGAIN) from error


def _check_counts(opened: OpenedBuild) -> None:
    """Router rows are as many as the plan's experts."""
    if opened.prune is None:
        return
    for layer, plan in opened.prune.layers.items():
        name = f"language_model.model.layers.{layer}.mlp.e_score_correction_bias"
        count = opened.prune.largest if opened.prune.pad_uniform else len(plan.keep)
        tensor = opened.files.tensors.get(name)
        if tensor is None or tensor.shape != (count,):
            shape = tensor and tensor.shape
            raise MismatchError(
                f"tensor {name}: {shape}, but {PRUNE_PLAN} has {count} experts in layer {layer}.",
                AGAIN,
            )


def check_hash(name: str, found: str, stated: str | None) -> None:
    """Raise MismatchError unless a file has the hash that the manifest states."""
    if found != stated:
        raise MismatchError(f"{name}: SHA-256 is {found}, {MANIFEST} says {stated}.", AGAIN)


def small_file(build: Path, name: str) -> bytes:
    """A small file of a build; raise MismatchError when it is missing."""
    path = build / name
    if not path.is_file():
        raise MismatchError(f"{name} is missing in {build}.", AGAIN)
    return path.read_bytes()


def sha256_of(path: Path, advance: Callable[[int], None]) -> str:
    """Hash of a file; the next block is read while one is hashed."""
    digest = hashlib.sha256()
    buffers = [memoryview(bytearray(BLOCK_BYTES)) for _ in range(2)]
    file = open_uncached(path)
    try:
        with ThreadPoolExecutor(1) as reader:
            ahead = reader.submit(fill, file, buffers[0], 0)
            position = 0
            while n_read := ahead.result():
                block = buffers[0][:n_read]
                position += n_read
                buffers.reverse()
                ahead = reader.submit(fill, file, buffers[0], position)
                digest.update(block)
                advance(n_read)
    finally:
        os.close(file)
    return digest.hexdigest()


def _manifest(build: Path) -> tuple[Manifest, Profile]:
    try:
        manifest = read_manifest(build)
        profile = Profile.from_json(manifest.profile) if manifest else None
    except CheckpointError as error:
        raise MismatchError(error.message, AGAIN) from error
    except (AttributeError, KeyError, TypeError) as error:
        raise MismatchError(f"{MANIFEST} is damaged in its profile: {error}.", AGAIN) from error
    if manifest is None or profile is None:
        raise MismatchError(f"{MANIFEST} is missing in {build}.", AGAIN)
    return manifest, profile


def _prune_plan(build: Path, manifest: Manifest) -> PrunePlan | None:
    """The plan that lies in the build, which must be the one that the manifest names."""
    wanted = manifest.prune_sha256
    if wanted is None:
        if (build / PRUNE_PLAN).exists():
            raise MismatchError(
                f"{PRUNE_PLAN} is in {build}, but {MANIFEST} knows of no plan.", AGAIN
            )
        return None
    try:
        plan = read_plan(small_file(build, PRUNE_PLAN).decode(), PRUNE_PLAN)
    except (UnicodeDecodeError, UsageError) as error:
        raise MismatchError(str(error), AGAIN) from error
    if plan.sha256 != wanted:
        raise MismatchError(
            f"{PRUNE_PLAN}: its SHA-256 is {plan.sha256}, {MANIFEST} says {wanted}.", AGAIN
        )
    return plan


def _bytes(n_bytes: int | None) -> str:
    return "no bytes" if n_bytes is None else f"{n_bytes:,} bytes"
