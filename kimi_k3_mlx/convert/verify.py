"""Compares a build with its source: bytes that must be equal, values that were rounded.

Input: a build's folder and an opened source. Output: `VerifyReport`, or MismatchError naming tensor
and element. What belongs where comes from `naive`, not from the code that wrote the build; the
plan only tells whether the source can be one, and whether the manifest is about this build.
"""

from __future__ import annotations

import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

from converters.config import check_source, read_dims
from kimi_k3_mlx.convert.alone import (
    OpenedBuild,
    check_config,
    check_hash,
    check_plan_given,
    check_sidecars,
    check_sizes,
    open_build,
    small_file,
)
from kimi_k3_mlx.convert.compare import Comparison, Rounded
from kimi_k3_mlx.convert.naive import Layout
from kimi_k3_mlx.convert.plan import plan_build
from kimi_k3_mlx.convert.sidecars import (
    PRUNE_PLAN,
    TEMPLATE,
    copied_names,
    made_names,
    read_sidecars,
)
from kimi_k3_mlx.convert.wanted import (
    AGAIN,
    Wanted,
    expected_config,
    sample_experts,
    wanted_tensors,
)
from kimi_k3_mlx.errors import MismatchError, UsageError
from kimi_k3_mlx.prune_plan import PrunePlan
from kimi_k3_mlx.schema import BuildPlan, Json, Progress, canonical, silent
from kimi_k3_mlx.tensors.source import MANIFEST, Source


@dataclass(frozen=True)
class Sample:
    """Which part of the experts was compared."""

    experts: int
    """Of each layer, at most."""
    seed: int
    """With the build's plan hash, what they were chosen by."""


@dataclass(frozen=True)
class VerifyReport:
    """What was compared; a report exists only when everything agreed."""

    build: str
    source: str
    n_tensors: int
    """Source tensors compared."""
    n_expert_tensors: int
    n_bytes: int
    """Bytes of the source that were compared."""
    nan_scales: int
    """E8M0 bytes of 255 in source and build alike."""
    rounded: tuple[Rounded, ...]
    """What was compared by value, within the bounds of its rounding. All else: byte for byte."""
    narrowed: tuple[str, ...]
    """F32 tensors, by pattern, that are the nearest BF16."""
    sample: Sample | None
    """None: all experts."""
    hashed: bool
    """Whether the shards' SHA-256 were compared with the manifest's: not in a sample."""
    model_file: str | None
    """`installed` or `another version`, if the build carries our model file; its hash is right."""

    def to_json(self) -> Json:
        """A JSON object."""
        return {"version": 1} | asdict(self)


def verify_build(
    build: Path,
    source: Source,
    progress: Progress = silent,
    *,
    sample: int | None = None,
    seed: int | None = None,
    prune: PrunePlan | None = None,
) -> VerifyReport:
    """Compare a whole build; raise MismatchError (exit code 3) at the first difference.

    Compared are: every tensor, the SHA-256 of every shard with the manifest's, the manifest with
    the plan of this source, every field of config.json, every byte of the files that a build
    carries from its source. With `sample`, only so many experts of each layer (chosen by `seed`,
    or a fresh one), and no hashes of shards. With `prune`, the build must be of that plan.

    Raises CheckpointError for a source that can't be converted.
    """
    read_dims(source.config)
    check_source(source.config)
    opened = open_build(Path(build))
    check_plan_given(opened, prune)
    model_file = _check_small_files(opened, source, _checked_plan(opened, source))
    wanted = _checked_tensors(opened, source)
    check_sizes(opened)
    check_config(opened)
    check_sidecars(opened)
    chosen = None
    if sample is not None:
        chosen = Sample(sample, secrets.randbits(32) if seed is None else seed)
        wanted = sample_experts(wanted, sample, f"{opened.manifest.plan_sha256} {chosen.seed}")
    comparison = _compare(opened, source, wanted, progress, hashed=chosen is None)
    spans = {span for tensor in wanted.values() for place in tensor.places for span in place.spans}
    names = {span.tensor for span in spans}
    return VerifyReport(
        build=str(build),
        source=source.where,
        n_tensors=len(names),
        n_expert_tensors=sum(".experts." in name for name in names),
        n_bytes=sum(span.n_bytes for span in spans),
        nan_scales=comparison.nan_scales,
        rounded=tuple(comparison.rounded()),
        narrowed=comparison.narrowed,
        sample=chosen,
        hashed=chosen is None,
        model_file=model_file,
    )


def _compare(
    opened: OpenedBuild,
    source: Source,
    wanted: dict[str, Wanted],
    progress: Progress,
    *,
    hashed: bool,
) -> Comparison:
    total, n_done = sum(tensor.n_bytes for tensor in wanted.values()), 0

    def advance(n_more: int, shard: str) -> None:
        nonlocal n_done
        n_done += n_more
        progress(n_done, total, shard)

    with source.reader() as expected, opened.files.reader() as found:
        comparison = Comparison(opened.files, wanted, (expected, found), advance)
        for record in opened.manifest.shards:
            sha256 = comparison.compare_shard(record.name, hashed=hashed)
            if hashed:
                check_hash(record.name, sha256, record.sha256)
    return comparison


def _checked_plan(opened: OpenedBuild, source: Source) -> BuildPlan:
    """The plan of the source under the build's own profile and prune plan, which must be its."""
    try:
        plan = plan_build(source, opened.profile, opened.prune)
    except UsageError as error:
        _check_source(opened, source)
        raise MismatchError(f"{opened.path}: {error.message}", AGAIN) from error
    _check_source(opened, source)
    if plan.sha256 != opened.manifest.plan_sha256:
        raise MismatchError(
            f"{MANIFEST}: plan_sha256 is {opened.manifest.plan_sha256}, expected {plan.sha256}: "
            "it is of another kimi-k3-mlx, or damaged.",
            AGAIN,
        )
    return plan


def _check_source(opened: OpenedBuild, source: Source) -> None:
    made_from = opened.manifest.source
    stated, wanted = made_from.headers_sha256, source.id.headers_sha256
    if stated != wanted:
        moved = made_from.commit not in (None, source.id.commit)
        raise MismatchError(
            f"{MANIFEST}: source.headers_sha256 is {stated[:16]}, that of {source.where} is "
            f"{wanted[:16]}: the build was made from another checkpoint.",
            f"give the one it was made from: its commit is {made_from.commit}." if moved else AGAIN,
        )


def _checked_tensors(opened: OpenedBuild, source: Source) -> dict[str, Wanted]:
    """What the build must hold, once the names, shapes and config.json of it agree with that."""
    layout = Layout(source.config, opened.profile, opened.prune)
    wanted = wanted_tensors(source, opened.files, layout)
    forms = [tensor.form for tensor in wanted.values()]
    expected = expected_config(source.config, layout, opened.prune, forms)
    _check_json(opened.files.config, expected)
    return wanted


def _check_small_files(opened: OpenedBuild, source: Source, plan: BuildPlan) -> str | None:
    """Copies, and the tokenizer, are the source's; whose our model file is."""
    ours: set[bool] = set()
    copies = {*copied_names(plan, source), *made_names(plan, source)} - {TEMPLATE}
    for name, content in read_sidecars(plan, source).items():
        if name in copies and small_file(opened.path, name) != content:
            raise MismatchError(f"{name} in {opened.path} differs from the source's.", AGAIN)
        if name not in (*copies, TEMPLATE, PRUNE_PLAN):
            path = opened.path / name
            ours.add(path.is_file() and path.read_bytes() == content)
    if not ours:
        return None
    return "installed" if ours == {True} else "another version"


def _check_json(found: Json, expected: Json, path: str = "") -> None:
    """Compare JSON objects field by field; 1, 1.0 and true differ."""
    for field in sorted(found.keys() | expected.keys()):
        ours, theirs = found.get(field), expected.get(field)
        if isinstance(ours, dict) and isinstance(theirs, dict):
            _check_json(ours, theirs, f"{path}{field}.")
        elif (field in found) != (field in expected) or canonical(ours) != canonical(theirs):
            ours, theirs = (str(values.get(field, "none"))[:70] for values in (found, expected))
            raise MismatchError(f"config.json: {path}{field} is {ours}, expected {theirs}.", AGAIN)
