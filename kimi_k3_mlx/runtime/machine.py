"""This machine as `doctor`, `wired-limit` and `fit` see it, and how fast its disk reads.

Input: `Probes`, the one place that asks the system; tests hand in others. Output: `Machine`, in
bytes and plain values, and bytes a second. Nothing is changed.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import metadata
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

from kimi_k3_mlx.convert.disk import existing_parent
from kimi_k3_mlx.convert.memory import DEFAULT_WIRED, GIB, MIB
from kimi_k3_mlx.schema import Json
from kimi_k3_mlx.tensors.local import fill, open_uncached

MAC = "Darwin"
SYSCTL = "/usr/sbin/sysctl"
PACKAGES = ("mlx", "mlx-lm", "mlx-vlm", "kimi-k3-mlx")
BLOCK_BYTES = 8 << 20
READERS = 4
ENOUGH_BYTES = 64 << 20
MOST_BYTES = 4 << 30
MOST_SECONDS = 3.0
MOST_FILES = 32


class Probes:
    """What is asked of the system."""

    def system(self) -> str:
        """`Darwin` or `Linux`."""
        return platform.system()

    def arch(self) -> str:
        """What this Python was compiled for."""
        return platform.machine()

    def python(self) -> str:
        """Python's version."""
        return platform.python_version()

    def sysctl(self, name: str) -> str | None:
        """A value of macOS's kernel; None where it has none of that name."""
        done = subprocess.run([SYSCTL, "-n", name], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else None

    def memory(self) -> int:
        """Bytes of RAM, on other systems than macOS."""
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def version(self, package: str) -> str | None:
        """Version of an installed package."""
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return None

    def device(self) -> dict[str, Any]:
        """What MLX says of the device; on a CPU without sizes, without MLX nothing."""
        try:
            import mlx.core as mx
        except ImportError:
            return {}
        return dict(getattr(mx, "device_info", dict)())  # MLX of old has it elsewhere

    def open_files(self) -> int:
        """How many files a process may have open."""
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return sys.maxsize if soft == resource.RLIM_INFINITY else soft

    def free(self, folder: Path) -> int:
        """Free bytes of the disk that a folder is on."""
        return shutil.disk_usage(existing_parent(folder)).free


class LimitKey(NamedTuple):
    """The kernel's name for the limit of memory that the GPU may wire, and its unit in bytes."""

    name: str
    unit: int

    def setting(self, mib: int) -> str:
        """`iogpu.wired_limit_mb=478362`, or on macOS 13 the bytes."""
        return f"{self.name}={mib * MIB // self.unit}"


def limit_key(macos: tuple[int, ...]) -> LimitKey:
    """MiB from macOS 14 on, bytes under another name on macOS 13."""
    if macos and macos[0] < 14:
        return LimitKey("debug.iogpu.wired_limit", 1)
    return LimitKey("iogpu.wired_limit_mb", MIB)


@dataclass(frozen=True)
class Machine:
    """A machine; None and () are what it doesn't have or doesn't tell."""

    system: str
    arch: str
    translated: bool
    """Whether Python is x86 under Rosetta."""
    chip: str | None
    """`Apple M3 Ultra`."""
    ram: int
    macos: tuple[int, ...]
    python: str
    versions: dict[str, str | None]
    working_set: int | None
    """Bytes that Metal recommends as the most; it follows the wired limit."""
    wired_limit: int | None
    """Bytes that `sysctl` was told; 0 is the system's default."""
    open_files: int
    disk_free: int

    @classmethod
    def read(cls, folder: Path, probes: Probes) -> Machine:
        """Ask the system; `folder` is where the free disk counts."""
        is_mac = probes.system() == MAC
        sysctl = probes.sysctl if is_mac else lambda name: None
        # platform.mac_ver says 10.16 or 16 to a Python that was built for an older macOS.
        macos = numbers(sysctl("kern.osproductversion") or "")
        key = limit_key(macos)
        limit = sysctl(key.name)
        device = probes.device()
        return cls(
            system=probes.system(),
            arch=probes.arch(),
            translated=probes.arch() == "x86_64" and sysctl("hw.optional.arm64") == "1",
            chip=sysctl("machdep.cpu.brand_string"),
            ram=int(sysctl("hw.memsize") or 0) if is_mac else probes.memory(),
            macos=macos,
            python=probes.python(),
            versions={package: probes.version(package) for package in PACKAGES},
            working_set=device.get("max_recommended_working_set_size"),
            wired_limit=None if limit is None else int(limit) * key.unit,
            open_files=probes.open_files(),
            disk_free=probes.free(folder),
        )

    @property
    def is_mac(self) -> bool:
        """Whether it runs macOS."""
        return self.system == MAC

    @property
    def ram_gib(self) -> int:
        """RAM as it is sold."""
        return self.ram // GIB

    @property
    def limit(self) -> int:
        """Bytes that the GPU may wire now: what was set, what Metal says, or 75 % of RAM."""
        return self.wired_limit or self.working_set or int(DEFAULT_WIRED * self.ram)

    def __str__(self) -> str:
        if self.is_mac:
            version = ".".join(map(str, self.macos)) or "?"
            return f"{self.chip}, {self.ram_gib} GB, macOS {version}"
        return f"{self.system} {self.arch}, {self.ram_gib} GB"

    def to_json(self) -> Json:
        """A JSON object."""
        return asdict(self)


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: 15.3.1 → (15, 3, 1), 0.32.4.dev2 → (0, 32, 4)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def read_rate(
    paths: Sequence[Path], most_bytes: int = MOST_BYTES, most_seconds: float = MOST_SECONDS
) -> float | None:
    """Bytes a second of reading files past the page cache, in blocks spread over all of them.

    Four readers take 8 MiB at a time. None when there is too little to tell. What macOS has cached
    already comes from memory all the same.
    """
    step = 1 + len(paths) // MOST_FILES
    files = [open_uncached(path) for path in paths[::step]]
    try:
        for file in files:
            forget(file)
        began = time.perf_counter()
        blocks = spread(files, most_bytes)
        with ThreadPoolExecutor(READERS) as readers:
            shares = [blocks[first::READERS] for first in range(READERS)]
            n_bytes = sum(readers.map(_reader, shares, repeat(began + most_seconds)))
        seconds = time.perf_counter() - began
    finally:
        for file in files:
            forget(file)
            os.close(file)
    return n_bytes / seconds if n_bytes >= ENOUGH_BYTES else None


def forget(file: int) -> None:
    """Drop a file's pages on Linux; macOS has F_NOCACHE."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def spread(files: Sequence[int], most_bytes: int) -> list[tuple[int, int]]:
    """File and offset of at most so many bytes in blocks, evenly over all files."""
    every = [
        (file, position)
        for file in files
        for position in range(0, os.fstat(file).st_size, BLOCK_BYTES)
    ]
    step = max(1, -(-len(every) * BLOCK_BYTES // most_bytes))
    return every[::step]


def _reader(blocks: Sequence[tuple[int, int]], deadline: float) -> int:
    """Read blocks until the deadline; return the bytes."""
    buffer = memoryview(bytearray(BLOCK_BYTES))
    n_bytes = 0
    for file, position in blocks:
        if time.perf_counter() > deadline:
            break
        n_bytes += fill(file, buffer, position)
    return n_bytes
