"""`kimi-k3 doctor`: every check can pass and can fail, and says what mends it."""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from kimi_k3_mlx.runtime import doctor, machine
from kimi_k3_mlx.runtime.doctor import FAIL, PASS, WARN, Check, examine
from kimi_k3_mlx.runtime.machine import MIB, Machine
from kimi_k3_mlx.runtime.roofline import sizes
from tests.cli.conftest import Run
from tests.house.checks import ROOT
from tests.runtime.fake_mac import GIB, FakeMac

LINUX = replace(
    FakeMac().machine(),
    system="Linux", arch="x86_64", chip=None, ram=24 * GIB, macos=(), working_set=None,
    wired_limit=None,
)  # fmt: skip
PAIR = "pip install -U 'mlx>=0.32.3'"


def found(here: Machine, name: str) -> Check:
    (check,) = [check for check in examine(here, None, 32_768) if check.name == name]
    return check


def test_a_good_mac_passes_everything() -> None:
    checks = examine(FakeMac().machine(), None, 32_768)
    assert {check.status for check in checks} == {PASS}
    assert [check.name for check in checks] == [
        "chip", "macOS", "Python", "mlx", "mlx-lm", "mlx-vlm", "RAM", "working set", "wired limit",
        "disk", "open files",
    ]  # fmt: skip
    assert not any(check.remedy for check in checks)


@pytest.mark.parametrize(
    ("options", "name", "status", "fact", "remedy"),
    [
        ({"chip": "Apple M9"}, "chip", PASS, "memory speed not known", ""),
        ({"chip": "Intel(R) Core(TM) i9", "arch": "x86_64"}, "chip", FAIL, "not Apple silicon", ""),
        ({"arch": "x86_64"}, "Python", FAIL, "Intel Python under Rosetta", "uv python install"),
        ({"macos": "14.7"}, "macOS", WARN, "14.7: MLX wires weights from macOS 15", "update macOS"),
        ({"macos": "13.6"}, "macOS", WARN, "13.6: MLX of today is for macOS 14", "update macOS"),
        ({"macos": "26.1"}, "macOS", PASS, "26.1", ""),
        ({"versions": {"mlx": "0.32.2"}}, "mlx", FAIL, "expected >=0.32.3", PAIR),
        ({"versions": {"mlx": "0.32.2"}}, "mlx with mlx-lm", FAIL, "mlx 0.32.2 with mlx-lm", PAIR),
        ({"versions": {"mlx": None}}, "mlx", FAIL, "not installed", PAIR),
        ({"versions": {"mlx-lm": "0.32.1"}}, "mlx-lm", FAIL, "0.32.1", "'mlx-lm>=0.32.2'"),
        ({"versions": {"mlx-vlm": "0.7.9"}}, "mlx-vlm", WARN, "0.7.9", "'mlx-vlm>=0.7.10,<0.8'"),
        ({"versions": {"mlx-vlm": "0.8.0"}}, "mlx-vlm", WARN, "expected >=0.7.10,<0.8", "-U"),
        ({"versions": {"mlx-vlm": None}}, "mlx-vlm", PASS, "only images need it", ""),
        ({"ceiling": None}, "working set", WARN, "names no limit", PAIR),
        ({"limit": 450_000}, "wired limit", PASS, "450000 MiB, as set", ""),
        ({"limit": 520_000}, "wired limit", WARN, "it needs 16 GiB", "wired_limit_mb=507904"),
        ({"free": 10**9}, "disk", WARN, "1.00 GB free", "free 20 GB"),
        ({"files": 100}, "open files", WARN, "100 allowed, 160 needed", "ulimit -n 1024"),
    ],
)  # fmt: skip
def test_each_check(
    options: dict[str, object], name: str, status: str, fact: str, remedy: str
) -> None:
    check = found(FakeMac(**options).machine(), name)  # type: ignore[arg-type]
    assert check.status == status
    assert fact in check.fact
    assert remedy in check.remedy
    assert bool(remedy) == bool(check.remedy)


def test_a_good_pair_is_not_named() -> None:
    names = [check.name for check in examine(FakeMac().machine(), None, 1)]
    old = FakeMac(versions={"mlx": "0.32.0", "mlx-lm": "0.32.0"}).machine()
    assert "mlx with mlx-lm" not in names
    assert "mlx with mlx-lm" not in [check.name for check in examine(old, None, 1)]


def test_the_versions_are_those_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    lines = project["dependencies"] + project["optional-dependencies"]["vision"]
    for requirement in map(Requirement, lines):
        if requirement.name in doctor.LEAST:
            wanted = set(doctor._wanted(requirement.name).split(","))
            assert wanted == {str(part) for part in requirement.specifier}


@pytest.mark.parametrize(
    ("build", "limit", "status", "fact", "remedy"),
    [
        ((179, "mxfp4-q8"), 0, PASS, "393216 MiB, the system's default; 370543 needed", ""),
        (
            (242, "mxfp4-q8"),
            0,
            FAIL,
            "many times slower",
            "sudo sysctl iogpu.wired_limit_mb=478359",
        ),
        ((242, "mxfp4-q8"), 450_000, WARN, "mlx-lm will warn", "iogpu.wired_limit_mb=478359"),
        ((242, "mxfp4-q8"), 480_000, PASS, "480000 MiB, as set", ""),
        ((242, "mxfp4"), 0, FAIL, "many times slower", "iogpu.wired_limit_mb=507904"),
        ((242, "mxfp4"), 507_904, WARN, "mlx-lm will warn", ""),
        ((320, "mxfp4"), 0, FAIL, "no limit is enough", "kimi-k3 fit"),
    ],
)
def test_the_wired_limit_against_a_build(
    build: tuple[int, str], limit: int, status: str, fact: str, remedy: str
) -> None:
    keep, profile = build
    here = FakeMac(limit=limit).machine()
    check = doctor.wired_limit(here, sizes(profile).running(keep, 32_768))
    assert (check.status, fact in check.fact) == (status, True)
    assert remedy in check.remedy
    assert bool(remedy) == bool(check.remedy)


def test_macos_13_is_told_bytes() -> None:
    check = doctor.wired_limit(FakeMac(macos="13.6").machine(), sizes("mxfp4-q8").running(242, 1))
    assert check.remedy == f"sudo sysctl debug.iogpu.wired_limit={478_359 * MIB}"


def test_ram_against_a_build() -> None:
    memory = sizes("mxfp4-q8").running(242, 32_768)
    assert doctor.ram(FakeMac().machine(), memory).status == PASS
    small = doctor.ram(FakeMac(ram_gib=256).machine(), memory)
    assert (small.status, small.remedy) == (FAIL, "kimi-k3 fit")
    assert "256 GB; the build needs 455 GB with 32,768 tokens of context" in small.fact
    assert doctor.ram(LINUX, memory).status == WARN


def test_linux_is_not_broken_and_not_a_mac() -> None:
    checks = examine(LINUX, None, 32_768)
    assert {check.status for check in checks} == {PASS, WARN}
    assert found(LINUX, "chip").fact.startswith("not a Mac: Linux x86_64")
    assert found(LINUX, "Python").status == PASS
    assert found(LINUX, "wired limit") == Check("wired limit", WARN, "not a Mac: Linux has none")


@pytest.fixture
def copy(tiny_build: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_build, tmp_path / "copy")


def test_a_whole_build(tiny_build: Path) -> None:
    check = doctor.integrity(tiny_build)
    assert check.status == PASS
    assert "index and headers agree, and the manifest with them" in check.fact


def test_what_others_made_is_said(tiny_source: Path) -> None:
    check = doctor.integrity(tiny_source)
    assert check.status == WARN
    assert "no kimi_k3_mlx.json: it was not made by kimi-k3 convert" in check.fact


def test_a_stray_shard_beside_what_others_made(tiny_source: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_source, tmp_path / "copy")
    shutil.copy(shard(folder), folder / "model-x.safetensors")
    check = doctor.integrity(folder)
    assert (check.status, "model-x.safetensors" in check.fact) == (FAIL, True)


def shard(folder: Path) -> Path:
    return sorted(folder.glob("model-*.safetensors"))[1]


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b" ")


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing there": (shutil.rmtree, "is not a folder"),
    "unfinished": (lambda p: (p / "config.json").unlink(), "config.json is missing"),
    "a shard missing": (lambda p: shard(p).unlink(), "is named by model.safetensors.index.json"),
    "a shard cut": (lambda p: shard(p).write_bytes(shard(p).read_bytes()[:-9]), "is truncated"),
    "a stray shard": (lambda p: shutil.copy(shard(p), p / "model-x.safetensors"), "does not name"),
    "a sidecar changed": (lambda p: append(p / "tokenizer.json"), "tokenizer.json: SHA-256 is"),
    "the manifest damaged": (lambda p: (p / "kimi_k3_mlx.json").write_text("{}"), "version None"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_without_reading_tensors(damage: str, copy: Path) -> None:
    harm, fact = DAMAGE[damage]
    harm(copy)
    check = doctor.integrity(copy)
    assert (check.status, fact in check.fact) == (FAIL, True), check
    assert check.remedy


def test_the_loader_in_the_build(copy: Path) -> None:
    assert "carries no model file" in doctor.loader(copy).fact
    shutil.copy(ROOT / "kimi_k3.py", copy)
    assert doctor.loader(copy).status == PASS
    append(copy / "kimi_k3.py")
    check = doctor.loader(copy)
    assert check.status == WARN
    assert "is that of kimi-k3-mlx 0.1.0; kimi-k3 uses the installed one" in check.fact


@pytest.mark.parametrize(
    ("rate", "status", "fact"),
    [
        (None, PASS, "too few to measure"),
        (6e9, PASS, "6.00 GB/s uncached"),
        (0.4e9, WARN, "400 MB/s"),
    ],
)
def test_the_rate_of_the_builds_own_shards(
    tiny_build: Path, rate: float | None, status: str, fact: str
) -> None:
    asked: list[Path] = []
    check = doctor.disk_rate(tiny_build, lambda paths: asked.extend(paths) or rate)
    assert (check.status, fact in check.fact) == (status, True)
    assert asked == sorted(tiny_build.glob("*.safetensors"))


def test_files_for_the_shards_of_a_build(tiny_build: Path) -> None:
    n_shards = len(list(tiny_build.glob("*.safetensors")))
    for files, status in ((n_shards - 1, FAIL), (n_shards + 1, WARN), (n_shards + 64, PASS)):
        assert doctor.open_files(FakeMac(files=files).machine(), tiny_build).status == status


def test_the_verb(kimi: Run, tiny_build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "Probes", FakeMac)
    result = kimi("doctor", "--model", tiny_build)
    assert (result.code, result.err) == (0, "")
    assert result.out.splitlines()[0] == "PASS  chip         Apple M3 Ultra, memory up to 819 GB/s"
    assert result.out.splitlines()[-1] == "14 PASS, 0 WARN, 0 FAIL"


def test_a_failure_is_exit_code_1_with_the_remedy_below(
    kimi: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "Probes", lambda: FakeMac(versions={"mlx": "0.32.2"}))
    result = kimi("doctor")
    lines = result.out.splitlines()
    assert result.code == 1
    where = next(i for i, line in enumerate(lines) if line.startswith("FAIL  mlx with mlx-lm"))
    assert lines[where + 1].strip() == PAIR
    told = kimi("doctor", "--json")
    assert told.code == 1
    checks = {check["name"]: check for check in json.loads(told.out)["checks"]}
    assert checks["mlx with mlx-lm"]["remedy"] == PAIR


def test_a_damaged_build_is_one_check_among_others(
    kimi: Run, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "Probes", FakeMac)
    shard(copy).unlink()
    result = kimi("doctor", "--model", copy)
    assert result.code == 1
    assert "FAIL  build" in result.out
    assert result.out.endswith("1 FAIL\n")


def test_here_it_runs_without_a_mac(kimi: Run) -> None:
    told = json.loads(kimi("doctor", "--json").out)
    assert told["machine"]["ram"] > GIB
    assert {check["status"] for check in told["checks"]} <= {PASS, WARN, FAIL}
