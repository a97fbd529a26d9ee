"""Checks of a machine and of a build, each with the line that mends what it found.

Input: a `Machine`, and the folder of a build if one is meant. Output: `Check`s. FAIL is what can't
work, WARN what works worse, or not here. No tensor byte is read but to measure the disk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

from converters.config import MODEL_FILE, read_dims
from kimi_k3_mlx.convert.alone import check_config, check_sidecars, check_sizes, open_build
from kimi_k3_mlx.convert.memory import MIB, SYSTEM_RESERVE, Running
from kimi_k3_mlx.convert.sidecars import read_manifest
from kimi_k3_mlx.errors import KimiError
from kimi_k3_mlx.runtime.build import check_extra_shards, explained
from kimi_k3_mlx.runtime.chips import find_chip
from kimi_k3_mlx.runtime.machine import Machine, limit_key, numbers, read_rate
from kimi_k3_mlx.runtime.wired import advise, memory_of, most_mb, set_command
from kimi_k3_mlx.runtime.wiring import WIRING_MACOS
from kimi_k3_mlx.schema import Json
from kimi_k3_mlx.tensors.local import open_source
from kimi_k3_mlx.tensors.source import MANIFEST
from kimi_k3_mlx.units import format_bytes, format_duration, format_rate

PASS, WARN, FAIL = "PASS", "WARN", "FAIL"
MLX_MACOS = 14
LEAST = {"mlx": (0, 32, 3), "mlx-lm": (0, 32, 2), "mlx-vlm": (0, 7, 10)}
BELOW = {"mlx-vlm": (0, 8)}
"""The versions that pyproject.toml asks for; a test compares them."""
GLOBAL_SCALE = (0, 32, 1)
"""From this mlx-lm on, quantized experts need mlx 0.32.3, whatever its metadata say."""
K3_SHARDS, OTHER_FILES = 96, 64
DISK_BYTES = 20 * 10**9
SLOW_DISK = 1e9


@dataclass(frozen=True)
class Check:
    """What was looked at, how it is, and what to do about it."""

    name: str
    status: str
    fact: str
    remedy: str = ""

    def to_json(self) -> Json:
        """A JSON object."""
        return asdict(self)


def examine(machine: Machine, build: Path | None, context: int) -> list[Check]:
    """Every check, in the order of a reader; those of a build only when one is given."""
    checks = [chip(machine), *([macos(machine)] if machine.is_mac else [])]
    checks += [python(machine), *packages(machine)]
    memory: Running | None = None
    if build is not None:
        found = integrity(build)
        checks.append(found)
        if found.status != FAIL:
            memory = memory_of(build, context)
            checks += [loader(build), disk_rate(build)]
    checks += [ram(machine, memory), working_set(machine), wired_limit(machine, memory)]
    return [*checks, disk(machine), open_files(machine, build)]


def chip(machine: Machine) -> Check:
    """Apple silicon, and how fast its memory is."""
    if not machine.is_mac:
        return Check(
            "chip",
            WARN,
            f"not a Mac: {machine.system} {machine.arch}; converting and verifying work here, "
            "K3 itself runs on Apple silicon",
        )
    if machine.arch != "arm64" and not machine.translated:
        return Check("chip", FAIL, f"{machine.chip} is not Apple silicon, which MLX needs")
    known = find_chip(machine.chip or "")
    speed = f"memory up to {format_rate(known.bandwidth)}" if known else "memory speed not known"
    return Check("chip", PASS, f"{machine.chip}, {speed}")


def macos(machine: Machine) -> Check:
    """MLX needs macOS 14, wiring of weights macOS 15."""
    version = ".".join(map(str, machine.macos)) or "unknown"
    major = machine.macos[0] if machine.macos else 0
    remedy = "update macOS: System Settings > General > Software Update"
    if major >= WIRING_MACOS:
        return Check("macOS", PASS, version)
    if major >= MLX_MACOS:
        fact = f"{version}: MLX wires weights from macOS 15 on; unwired ones may be paged out"
        return Check("macOS", WARN, fact, remedy)
    fact = f"{version}: MLX of today is for macOS 14 and later, and wires weights from 15 on"
    return Check("macOS", WARN, fact, remedy)


def python(machine: Machine) -> Check:
    """An x86 Python under Rosetta can't import MLX."""
    fact = f"{machine.python} {machine.arch}"
    if not machine.is_mac or machine.arch == "arm64":
        return Check("Python", PASS, fact)
    return Check(
        "Python",
        FAIL,
        f"{fact}: an Intel Python{' under Rosetta' if machine.translated else ''}; MLX needs arm64",
        "install a native one: brew install python@3.12, or uv python install 3.12",
    )


def packages(machine: Machine) -> Iterator[Check]:
    """mlx and mlx-lm that work together, and mlx-vlm if it is there."""
    for name in ("mlx", "mlx-lm"):
        yield _package(name, machine.versions.get(name))
    mlx, mlx_lm = (numbers(machine.versions.get(name) or "") for name in ("mlx", "mlx-lm"))
    if mlx and mlx < LEAST["mlx"] and mlx_lm >= GLOBAL_SCALE:
        yield Check(
            "mlx with mlx-lm",
            FAIL,
            f"mlx {machine.versions['mlx']} with mlx-lm {machine.versions['mlx-lm']}: every "
            "quantized MoE raises TypeError, since gather_qmm has no global_scale yet",
            _upgrade("mlx"),
        )
    if machine.versions.get("mlx-vlm") is None:
        yield Check("mlx-vlm", PASS, "not installed; only images need it")
    else:
        yield _package("mlx-vlm", machine.versions["mlx-vlm"])


def _package(name: str, version: str | None) -> Check:
    if version is None:
        return Check(name, FAIL, "not installed", _upgrade(name))
    found = numbers(version)
    if LEAST[name] <= found and not (name in BELOW and found >= BELOW[name]):
        return Check(name, PASS, version)
    status = WARN if name == "mlx-vlm" else FAIL
    return Check(name, status, f"{version}, expected {_wanted(name)}", _upgrade(name))


def _wanted(name: str) -> str:
    least = ".".join(map(str, LEAST[name]))
    return f">={least},<{'.'.join(map(str, BELOW[name]))}" if name in BELOW else f">={least}"


def _upgrade(name: str) -> str:
    return f"pip install -U '{name}{_wanted(name)}'"


def ram(machine: Machine, memory: Running | None) -> Check:
    """RAM, against what the build holds when it runs."""
    if memory is None:
        return Check("RAM", PASS, f"{machine.ram_gib} GB")
    fact = (
        f"{machine.ram_gib} GB; the build needs {format_bytes(memory.n_bytes)} with "
        f"{memory.context:,} tokens of context"
    )
    if memory.n_bytes <= most_mb(machine) * MIB:
        return Check("RAM", PASS, fact)
    fact += f", and the system {format_bytes(SYSTEM_RESERVE)}"
    return Check("RAM", FAIL if machine.is_mac else WARN, fact, "kimi-k3 fit")


def working_set(machine: Machine) -> Check:
    """What Metal says may be resident."""
    if machine.working_set is not None:
        share = machine.working_set / machine.ram
        return Check(
            "working set", PASS, f"{format_bytes(machine.working_set)}, {share:.0%} of RAM"
        )
    if machine.is_mac:
        return Check(
            "working set", WARN, "MLX names no limit: 75 % of RAM is assumed", _upgrade("mlx")
        )
    return Check("working set", WARN, "MLX computes on the CPU here, which has no such limit")


def wired_limit(machine: Machine, memory: Running | None) -> Check:
    """The limit of wired memory, against what the build needs."""
    name = "wired limit"
    if not machine.is_mac:
        return Check(name, WARN, f"not a Mac: {machine.system} has none")
    key = limit_key(machine.macos)
    kind = "as set" if machine.wired_limit else "the system's default"
    now = f"{key.name}: {machine.limit // MIB} MiB, {kind}"
    if machine.wired_limit is None:
        return Check(name, WARN, f"the kernel has no {key.name}")
    if machine.wired_limit > most_mb(machine) * MIB:
        left = format_bytes(max(0, machine.ram - machine.wired_limit))
        remedy = str(set_command(key, most_mb(machine)))
        return Check(name, WARN, f"{now}: leaves the system {left}, it needs 16 GiB", remedy)
    if memory is None:
        return Check(name, PASS, now)
    advice = advise(machine, memory)
    if advice.verdict == "no":
        return Check(name, FAIL, f"{now}; no limit is enough", "kimi-k3 fit")
    if advice.verdict == "enough":
        return Check(name, PASS, f"{now}; {advice.set_mb} needed")
    holds = memory.n_bytes <= machine.limit
    what = "mlx-lm will warn" if holds else "decoding would be many times slower"
    remedy = str(set_command(key, advice.set_mb)) if advice.now_mb < advice.set_mb else ""
    fact = f"{now}; {advice.set_mb} needed, {what}"
    return Check(name, WARN if holds else FAIL, fact, remedy)


def disk(machine: Machine) -> Check:
    """Free disk where the build lies, or here."""
    fact = f"{format_bytes(machine.disk_free)} free"
    if machine.disk_free < DISK_BYTES:
        return Check("disk", WARN, f"{fact}: macOS itself wants some", "free 20 GB")
    return Check("disk", PASS, fact)


def open_files(machine: Machine, build: Path | None) -> Check:
    """Every shard is open at once while a build is loaded."""
    n_shards = len(list(build.glob("*.safetensors"))) if build else K3_SHARDS
    needed = n_shards + OTHER_FILES
    if machine.open_files >= needed:
        return Check("open files", PASS, f"{machine.open_files} allowed, {needed} needed")
    status = FAIL if build and machine.open_files < n_shards else WARN
    fact = f"{machine.open_files} allowed, {needed} needed for {n_shards} shards"
    return Check("open files", status, fact, f"ulimit -n {max(1024, needed)}")


def integrity(build: Path) -> Check:
    """Index, headers, sizes, config and manifest agree; values are for `kimi-k3 verify`."""
    try:
        with explained(build):
            source = open_source(build)
            read_dims(source.config)
        if (build / MANIFEST).is_file():
            opened = open_build(build)
            for check in (check_sizes, check_config, check_sidecars):
                check(opened)
        else:
            check_extra_shards(build, source.shards)
    except KimiError as error:
        return Check("build", FAIL, error.message, error.hint)
    fact = f"{len(source.shards)} shards, {len(source.tensors):,} tensors, "
    fact += f"{format_bytes(source.total_size)}: index and headers agree"
    if not (build / MANIFEST).is_file():
        return Check("build", WARN, f"{fact}; no {MANIFEST}: it was not made by kimi-k3 convert")
    return Check("build", PASS, f"{fact}, and the manifest with them; values: kimi-k3 verify")


def loader(build: Path) -> Check:
    """Whether the model file in the build is the one that is installed, which is the one used."""
    carried = build / MODEL_FILE
    if not carried.is_file():
        return Check("loader", PASS, "the build carries no model file: stock mlx-lm loads it")
    spec = find_spec(MODEL_FILE.removesuffix(".py"))
    installed = Path(spec.origin) if spec and spec.origin else None
    if installed and _sha256(carried) == _sha256(installed):
        return Check("loader", PASS, f"{MODEL_FILE} is the installed one, {_sha256(carried)[:12]}")
    manifest = read_manifest(build)
    made_by = f"kimi-k3-mlx {manifest.tools.get('kimi_k3_mlx')}" if manifest else "others"
    return Check(
        "loader",
        WARN,
        f"{MODEL_FILE} in the build is that of {made_by}; kimi-k3 uses the installed one, stock "
        "tools the build's",
        "run the kimi-k3 convert that made it again, with --overwrite",
    )


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def disk_rate(build: Path, measure: Callable[[list[Path]], float | None] = read_rate) -> Check:
    """How fast the build's own shards are read, and so how long loading takes."""
    shards = sorted(build.glob("*.safetensors"))
    n_bytes = sum(shard.stat().st_size for shard in shards)
    rate = measure(shards)
    if rate is None:
        return Check("reading", PASS, f"{format_bytes(n_bytes)} are too few to measure a rate")
    fact = f"{format_rate(rate)} uncached: loading takes {format_duration(n_bytes / rate)} at least"
    if rate < SLOW_DISK:
        return Check("reading", WARN, fact, "move the build to the internal SSD")
    return Check("reading", PASS, fact)
