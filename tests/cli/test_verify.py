"""`kimi-k3 verify`: agreement on stdout, a mismatch with exit code 3."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest

from kimi_k3_mlx.units import format_bytes
from tests.cli.conftest import Run
from tests.convert.verify_kinds import KINDS, built, linked
from tests.fake_hub import FakeHub, use_hub

ALL_HASHES = "SHA-256   of all shards and small files as the manifest says"


def pattern(*lines: str) -> str:
    """Lines of plain text, in which ### is the time that it took."""
    return "\n".join(map(re.escape, lines)).replace(r"\#\#\#", r"\d+\.\d") + "\n"


def test_agreement(kimi: Run, tiny_source: Path, tiny_build: Path) -> None:
    result = kimi("verify", "--mlx-path", tiny_build, "--hf-path", tiny_source, "-q")
    assert (result.code, result.err) == (0, "")
    lines = (
        f"{tiny_build} agrees with {tiny_source}",
        "compared  192 expert tensors and 146 others, 1.06 MB in ### s",
        "all       equal, bit for bit",
        ALL_HASHES,
    )
    assert re.fullmatch(pattern(*lines), result.out)


def test_rounded_values_are_told_apart(kimi: Run, tiny_source: Path) -> None:
    build = built("graded", tiny_source)
    result = kimi("verify", "--mlx-path", build, "--hf-path", tiny_source, "-q", "--full")
    assert result.code == 0
    rows = dict(re.split(r"  +", line, maxsplit=1) for line in result.out.splitlines()[1:])
    assert list(rows) == [
        "compared", "in 8 bits, groups of 64", "in 2 bits, groups of 64", "all else", "SHA-256"
    ]  # fmt: skip
    assert re.fullmatch(
        r"9 tensors, every element within rounding; at worst cosine 0\.9\d{4}, error \d\d\.\d\d% "
        r"\(language_model\.model\.layers\.\*\.mlp\.switch_mlp_low\.\w+\.weight\)",
        rows["in 2 bits, groups of 64"],
    )


def test_narrowed_tensors_are_listed(kimi: Run, tiny_source: Path) -> None:
    build = built("narrowed", tiny_source)
    result = kimi("verify", "--mlx-path", build, "--hf-path", tiny_source, "-q")
    assert "self_attn.o_norm.weight: the nearest to each F32\n" in result.out
    assert "\nall else  equal, bit for bit\n" in result.out


def test_a_sample_says_what_it_left_out(kimi: Run, tiny_source: Path, tiny_build: Path) -> None:
    options = ("verify", "--mlx-path", tiny_build, "--hf-path", tiny_source, "-q", "--sample", 2)
    result = kimi(*options)
    assert "48 expert tensors and 146 others" in result.out
    told = re.search(
        r"not compared  experts other than 2 of each layer \(--seed (\d+) repeats the choice\), "
        "and the shards' SHA-256\n",
        result.out,
    )
    assert told
    again = kimi(*options, "--seed", told[1])
    assert told[0] in again.out


def test_alone(kimi: Run, tiny_build: Path) -> None:
    result = kimi("verify", "--mlx-path", tiny_build, "-q")
    assert (result.code, result.err) == (0, "")
    size = format_bytes(sum(path.stat().st_size for path in tiny_build.glob("*.safetensors")))
    lines = (
        f"{tiny_build} is as it was written",
        f"SHA-256       of 8 shards and 7 small files as the manifest says, {size} in ### s",
        "shapes        160 tensors as index, headers and config.json say",
        "not compared  values with the source: give it with --hf-path",
    )
    assert re.fullmatch(pattern(*lines), result.out)


@pytest.mark.parametrize("alone", [True, False])
def test_json(alone: bool, kimi: Run, tiny_source: Path, tiny_build: Path) -> None:
    source = [] if alone else ["--hf-path", tiny_source]
    told = kimi("verify", "--mlx-path", tiny_build, *source, "--json")
    value = json.loads(told.out)
    assert value["version"] == 1
    assert value["n_tensors"] == (160 if alone else 338)
    assert len(told.err.splitlines()) == 8


@pytest.mark.parametrize("kind", ["mixed", "padded", "ragged", "moonshot"])
def test_a_plan_that_is_given(kind: str, kimi: Run, tiny_source: Path, tmp_path: Path) -> None:
    options = ["verify", "--mlx-path", built(kind, tiny_source), "-q"]
    plan = KINDS[kind][1]
    if plan:
        (tmp_path / "plan.json").write_text(plan.to_text())
        options += ["--prune-plan", tmp_path / "plan.json"]
    assert kimi(*options).code == 0
    assert kimi(*options, "--hf-path", tiny_source).code == 0


def test_another_plan_is_a_mismatch(kimi: Run, tiny_source: Path, tmp_path: Path) -> None:
    plan = KINDS["uniform"][1]
    assert plan
    (tmp_path / "plan.json").write_text(plan.to_text())
    build = built("ragged", tiny_source)
    result = kimi("verify", "--mlx-path", build, "--prune-plan", tmp_path / "plan.json")
    assert (result.code, result.out) == (3, "")
    assert "the plan given has" in result.err


@pytest.mark.parametrize("shard", range(1, 9))
@pytest.mark.parametrize("alone", [True, False])
def test_one_flipped_bit_anywhere_is_a_mismatch(
    shard: int, alone: bool, kimi: Run, tiny_source: Path, tiny_build: Path, tmp_path: Path
) -> None:
    build = shutil.copytree(tiny_build, tmp_path / "build")
    path = build / f"model-{shard:05d}-of-000008.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1 - 97 * shard] ^= 4
    path.write_bytes(raw)
    source = [] if alone else ["--hf-path", tiny_source]
    result = kimi("verify", "--mlx-path", build, *source, "-q")
    assert (result.code, result.out) == (3, "")
    assert f"kimi-k3: error: {f'{path.name}: SHA-256' if alone else 'tensor '}" in result.err
    assert "hint: make it again with --overwrite." in result.err


def test_a_damaged_source_is_not_a_mismatch(
    kimi: Run, tiny_source: Path, tiny_build: Path, tmp_path: Path
) -> None:
    source = shutil.copytree(tiny_source, tmp_path / "source")
    (source / "model-00002-of-000008.safetensors").unlink()
    result = kimi("verify", "--mlx-path", tiny_build, "--hf-path", source)
    assert result.code == 1
    assert "shard model-00002-of-000008.safetensors is named by" in result.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--sample", 2), "--sample needs a source."),
        (("--full",), "--full needs a source."),
        (("--seed", 2), "--seed needs a source."),
        (("--revision", "v1"), "--revision needs a source."),
        (("--hf-path", "{}", "--seed", 2), "--seed is for --sample."),
        (("--hf-path", "{}", "--sample", 0), "'0' is not a whole number of at least 1"),
        (("--hf-path", "{}", "--sample", 2, "--full"), "not allowed with argument"),
        (("--prune-plan", "none.json"), "plan none.json doesn't exist."),
    ],
)
def test_options_that_do_not_fit(
    options: tuple[object, ...], message: str, kimi: Run, tiny_source: Path, tiny_build: Path
) -> None:
    given = [tiny_source if option == "{}" else option for option in options]
    result = kimi("verify", "--mlx-path", tiny_build, *given, "-q")
    assert (result.code, result.out) == (2, "")
    assert message in result.err


@pytest.mark.hub
def test_a_repository(kimi: Run, tiny_source: Path, tiny_build: Path, tmp_path: Path) -> None:
    with FakeHub() as hub, use_hub(hub, tmp_path / "home"):
        commit = hub.add("moonshotai/Tiny-K3", tiny_source)
        result = kimi("verify", "--mlx-path", tiny_build, "--hf-path", "moonshotai/Tiny-K3", "-q")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith(f"{tiny_build} agrees with moonshotai/Tiny-K3@{commit}\n")


def test_warnings(kimi: Run, tiny_source: Path, tmp_path: Path) -> None:
    build = linked(built("ragged", tiny_source), tmp_path / "build")
    code = (build / "kimi_k3.py").read_bytes()
    manifest = json.loads((build / "kimi_k3_mlx.json").read_text())
    (build / "kimi_k3.py").unlink()
    (build / "kimi_k3.py").write_bytes(code + b"\n")
    manifest["sidecars"]["kimi_k3.py"] = hashlib.sha256(code + b"\n").hexdigest()
    (build / "kimi_k3_mlx.json").unlink()
    (build / "kimi_k3_mlx.json").write_text(json.dumps(manifest))
    result = kimi("verify", "--mlx-path", build, "--hf-path", tiny_source, "-q")
    assert result.code == 0
    assert result.err == (
        "warning: the build's model files are those of another kimi-k3-mlx than this one\n"
    )
