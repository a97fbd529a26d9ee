"""`--help` answers at once: argparse only, everything heavy is imported in the handlers."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from kimi_k3_mlx.cli import VERBS
from tests.house.checks import ROOT

HEAVY = {"mlx", "mlx_lm", "numpy", "huggingface_hub", "safetensors", "transformers", "tokenizers"}
BOUND_SECONDS = 0.3
BOUND_RATIO = 8
"""Times a bare interpreter, which takes 15 to 20 ms on a quiet machine."""


def seconds(*argv: str) -> float:
    """Wall time of one Python process."""
    began = time.perf_counter()
    subprocess.run([sys.executable, *argv], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def fast_enough(*argv: str, attempts: int = 5) -> bool:
    """Noise only ever adds: one try within the bounds is proof, so stop at the first."""
    return any(
        seconds(*argv) < max(BOUND_SECONDS, BOUND_RATIO * seconds("-c", "pass"))
        for _ in range(attempts)
    )


COMMANDS = [("--help",), ("--version",), *((verb, "--help") for verb in VERBS)]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_is_fast(command: tuple[str, ...]) -> None:
    assert fast_enough("-m", "kimi_k3_mlx", *command)


@pytest.mark.parametrize(
    ("bare", "asked", "fast"),
    [(0.02, 0.2, True), (0.02, 0.31, False), (0.1, 0.7, True), (0.1, 0.9, False)],
)
def test_slowness_is_caught_and_noise_is_not(
    bare: float, asked: float, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {"pass": bare, "--help": asked}
    monkeypatch.setattr(f"{__name__}.seconds", lambda *argv: times[argv[-1]])
    assert fast_enough("-m", "kimi_k3_mlx", "--help") is fast


def test_seconds_are_wall_time() -> None:
    assert seconds("-c", "import time; time.sleep(0.2)") > 0.2


PROBE = """
import sys
from kimi_k3_mlx.cli import main
code = main(sys.argv[1:])
print(code, *sorted({name.split(".")[0] for name in sys.modules}), file=sys.stderr)
"""


def loaded_by(*command: str) -> set[str]:
    """Top-level modules in memory after a command."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    code, *names = done.stderr.split()
    assert code == "0"
    return set(names)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_imports_nothing_heavy(command: tuple[str, ...]) -> None:
    """Says the same as the clock, and no noise can fail it."""
    assert not loaded_by(*command) & HEAVY


def test_inspect_and_dry_run_need_no_mlx(tiny_source: object, tmp_path: object) -> None:
    source, out = str(tiny_source), str(tmp_path)
    assert not loaded_by("inspect", source, "--json") & (HEAVY - {"numpy"})
    planned = loaded_by("convert", "--hf-path", source, "--mlx-path", out, "--dry-run")
    assert not planned & (HEAVY - {"numpy"})
    assert "kimi_k3_mlx" in planned
