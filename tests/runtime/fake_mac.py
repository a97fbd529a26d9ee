"""A Mac that is not there: it answers `Probes`, records what is run, and changes accordingly."""

from __future__ import annotations

import plistlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kimi_k3_mlx.runtime.machine import Machine, Probes, limit_key, numbers

GOOD = {"mlx": "0.32.4", "mlx-lm": "0.32.2", "mlx-vlm": "0.7.10", "kimi-k3-mlx": "0.1.0"}
GIB = 1 << 30


class FakeMac(Probes):
    """Kernel values, a folder of LaunchDaemons, and the commands that root ran."""

    def __init__(
        self,
        *,
        ram_gib: int = 512,
        macos: str = "15.3.1",
        limit: int = 0,
        ceiling: float | None = 0.75,
        chip: str = "Apple M3 Ultra",
        arch: str = "arm64",
        versions: dict[str, str | None] | None = None,
        files: int = 2560,
        free: int = 10**12,
    ) -> None:
        self.values = {
            "kern.osproductversion": macos,
            "hw.memsize": str(ram_gib * GIB),
            "machdep.cpu.brand_string": chip,
            "hw.optional.arm64": "1" if chip.startswith("Apple") else "0",
            limit_key(numbers(macos)).name: str(limit),
        }
        self._ceiling, self._arch, self._files, self._free = ceiling, arch, files, free
        self._versions = GOOD | (versions or {})
        self.calls: list[tuple[str, ...]] = []
        self.loaded: set[str] = set()
        self.modes: dict[str, str] = {}
        self.failing = ""
        """A command that begins so fails."""

    def system(self) -> str:
        return "Darwin"

    def arch(self) -> str:
        return self._arch

    def sysctl(self, name: str) -> str | None:
        return self.values.get(name)

    def version(self, package: str) -> str | None:
        return self._versions[package]

    def device(self) -> dict[str, Any]:
        if self._ceiling is None:
            return {"device_name": "none"}
        size = int(self._ceiling * int(self.values["hw.memsize"]))
        return {"max_recommended_working_set_size": size}

    def open_files(self) -> int:
        return self._files

    def free(self, folder: Path) -> int:
        return self._free

    def machine(self) -> Machine:
        """As it is now."""
        return Machine.read(Path(), self)

    def run(self, argv: Sequence[str]) -> int:
        """The runner: what a Mac would do."""
        self.calls.append(tuple(argv))
        words = [Path(word).name if word.startswith("/") else word for word in argv]
        if self.failing and " ".join(words).startswith(self.failing):
            return 1
        match words:
            case ["plutil", "-lint", "-s", _]:
                plistlib.loads(Path(argv[-1]).read_bytes())
            case ["sudo", *_]:
                return self._root(argv[1:], words[1:])
            case _:
                raise AssertionError(f"not foreseen: {argv}")
        return 0

    def _root(self, argv: Sequence[str], words: Sequence[str]) -> int:
        match words:
            case ["sysctl", setting]:
                name, _, value = setting.partition("=")
                assert name in self.values, (
                    f"no {name} on macOS {self.sysctl('kern.osproductversion')}"
                )
                self.values[name] = value
            case ["install", "-o", "root", "-g", "wheel", "-m", mode, _, name]:
                Path(argv[-1]).write_bytes(Path(argv[-2]).read_bytes())
                self.modes[name] = mode
            case ["launchctl", "bootstrap", "system", _]:
                daemon = plistlib.loads(Path(argv[-1]).read_bytes())
                if daemon["Label"] in self.loaded:
                    return 5  # as launchctl says when it is loaded already
                self.loaded.add(daemon["Label"])
                return self._root(
                    daemon["ProgramArguments"], ["sysctl", daemon["ProgramArguments"][1]]
                )
            case ["launchctl", "bootout", service]:
                name = service.removeprefix("system/")
                if name not in self.loaded:
                    return 3
                self.loaded.remove(name)
            case ["rm", _]:
                Path(argv[-1]).unlink()
            case _:
                raise AssertionError(f"not foreseen as root: {argv}")
        return 0
