"""Memory doesn't grow with the model (mlx-lm#876): 24 layers need what 4 need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.tiny_k3 import TinyConfig, write_source

PROGRAM = """
import resource, sys
from pathlib import Path
from kimi_k3_mlx.convert.plan import plan_build
from kimi_k3_mlx.convert.profiles import load_profile
from kimi_k3_mlx.convert.run import run
from kimi_k3_mlx.tensors.local import open_source
source = open_source(Path(sys.argv[1]))
run(plan_build(source, load_profile("mxfp4")), source, Path(sys.argv[2]))
assert "mlx" not in sys.modules, "converting must not need MLX"
status = Path("/proc/self/status")
if status.exists():  # ru_maxrss would start from the size of pytest itself
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
    peak = int(lines["VmHWM"].split()[0]) * 1024
else:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
sys.stdout.write(str(peak))
"""
LAYER_BYTES = 1_600_000


def peak_of(tmp_path: Path, layers: int) -> int:
    """Peak resident bytes of a process that converts so many layers of about 1.6 MB."""
    sizes = TinyConfig(
        layers=layers, experts=16, latent=256, moe_intermediate=256, vision=False, tokenizer=False
    )
    source = write_source(tmp_path / f"source-{layers}", sizes)
    shard = source / f"model-00002-of-{layers + 1:06d}.safetensors"
    assert shard.stat().st_size > LAYER_BYTES
    command = [sys.executable, "-c", PROGRAM, str(source), str(tmp_path / f"out-{layers}")]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_24_layers_need_no_more_than_4(tmp_path: Path) -> None:
    """20 layers more are 32 MB of experts; plan and headers may take a little."""
    small, big = peak_of(tmp_path, 4), peak_of(tmp_path, 24)
    assert big - small < 2 * LAYER_BYTES
    assert big < 120_000_000
