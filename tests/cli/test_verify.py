"""`kimi-k3 verify`: agreement on stdout, a mismatch with exit code 3."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import Run


def test_agreement(kimi: Run, tiny_source: Path, tiny_build: Path) -> None:
    result = kimi("verify", "--mlx-path", tiny_build, "--hf-path", tiny_source, "-q")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith(
        f"{tiny_build} agrees with {tiny_source}: 192 expert tensors byte for byte, "
        "146 others by value, 1.06 MB in "
    )


def test_json(kimi: Run, tiny_source: Path, tiny_build: Path) -> None:
    told = kimi("verify", "--mlx-path", tiny_build, "--hf-path", tiny_source, "--json")
    assert json.loads(told.out)["n_tensors"] == 338
    assert len(told.err.splitlines()) == 8


@pytest.mark.parametrize("shard", range(1, 9))
def test_one_flipped_bit_anywhere_is_a_mismatch(
    shard: int, kimi: Run, tiny_source: Path, tiny_build: Path, tmp_path: Path
) -> None:
    build = shutil.copytree(tiny_build, tmp_path / "build")
    path = build / f"model-{shard:05d}-of-000008.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1 - 97 * shard] ^= 4
    path.write_bytes(raw)
    result = kimi("verify", "--mlx-path", build, "--hf-path", tiny_source, "-q")
    assert (result.code, result.out) == (3, "")
    assert "kimi-k3: error: tensor " in result.err
    assert "hint: convert it again with --overwrite." in result.err


def test_a_damaged_source_is_not_a_mismatch(
    kimi: Run, tiny_source: Path, tiny_build: Path, tmp_path: Path
) -> None:
    source = shutil.copytree(tiny_source, tmp_path / "source")
    (source / "model-00002-of-000008.safetensors").unlink()
    result = kimi("verify", "--mlx-path", tiny_build, "--hf-path", source)
    assert result.code == 1
    assert "shard model-00002-of-000008.safetensors is named by" in result.err
