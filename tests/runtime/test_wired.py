"""The wired limit: what builds need on which Mac, and the commands that set it. No real Mac."""

from __future__ import annotations

import io
import json
import plistlib
import sys
from collections.abc import Iterator
from math import ceil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_k3_mlx.convert.memory import MACS, MIB, Running
from kimi_k3_mlx.errors import DoesNotFitError, KimiError, UsageError
from kimi_k3_mlx.runtime import machine, wired
from kimi_k3_mlx.runtime.roofline import sizes
from kimi_k3_mlx.runtime.wired import LABEL, advise, check_fits, check_setting, memory_of, most_mb
from tests.cli.conftest import Run
from tests.runtime.fake_mac import GIB, FakeMac

BUILDS = {"350": (179, "mxfp4-q8"), "451": (242, "mxfp4-q8"), "504": (242, "mxfp4")}
MACOS = ("13.6", "14.7", "15.3.1", "26.1")


@pytest.fixture(autouse=True)
def _no_real_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here may start a program: the modules lose theirs."""
    monkeypatch.setattr(wired, "subprocess", None)
    monkeypatch.setattr(machine, "subprocess", None)


def memory(build: str, context: int = 32_768) -> Running:
    """Memory of a published build, to the byte."""
    keep, profile = BUILDS[build]
    return sizes(profile).running(keep, context)


@pytest.mark.parametrize(
    ("build", "limit", "context", "verdict"),
    [
        ("350", 0, 8192, "enough"),
        ("350", 0, 131_072, "enough"),
        ("350", 0, 1 << 20, "enough"),
        ("451", 0, 8192, "raise"),
        ("451", 450_000, 8192, "raise"),
        ("451", 520_000, 8192, "enough"),
        ("451", 520_000, 1 << 20, "enough"),
        ("504", 0, 8192, "tight"),
        ("504", 450_000, 8192, "tight"),
        ("504", 520_000, 8192, "tight"),
        ("504", 520_000, 1 << 20, "no"),
    ],
)
def test_c24(build: str, limit: int, context: int, verdict: str) -> None:
    advice = advise(FakeMac(limit=limit).machine(), memory(build, context))
    assert advice.verdict == verdict
    assert advice.set_mb <= advice.most_mb == 512 * 1024 - 16 * 1024


def test_the_numbers_of_the_451_gb_build() -> None:
    """At least 477,896 MiB silence mlx-lm; the sum has 27,648 B a token and 0.45 GB of state."""
    needed = memory("451", 8192)
    assert needed.n_bytes == 451_435_437_920 + 8192 * 27_648 + needed.n_state + 2 * 10**9
    assert needed.n_state == pytest.approx(0.45e9, rel=0.01)
    assert (
        advise(FakeMac().machine(), needed).set_mb == ceil(451_435_437_920 / 0.9 / MIB) == 478_359
    )


@settings(max_examples=200, deadline=None)
@given(
    ram=st.sampled_from(MACS),
    limit=st.sampled_from((0, 40_000, 450_000, 520_000)),
    ceiling=st.sampled_from((0.66, 0.75, 0.81)),
    weights=st.integers(1, 600 * GIB),
    cache=st.integers(0, 40 * GIB),
)
def test_advice_against_the_rule_in_words(
    ram: int, limit: int, ceiling: float, weights: int, cache: int
) -> None:
    mac = FakeMac(ram_gib=ram, limit=limit, ceiling=ceiling).machine()
    needed = Running(1, weights, cache, 0)
    advice = advise(mac, needed)
    most = (ram - 16) * 1024
    total = weights + cache + 2 * 10**9
    quiet = max(ceil(total / MIB), ceil(weights / 0.9 / MIB))
    now = limit if limit else int(ceiling * ram * GIB) // MIB
    assert advice.now_mb == now
    if total > most * MIB and not quiet <= 0.75 * ram * 1024:
        assert advice.verdict == "no"
    elif quiet > most:
        assert advice.verdict == "tight"
    else:
        assert advice.verdict == ("enough" if now >= quiet else "raise")
        assert advice.set_mb == quiet <= most


def test_what_does_not_fit_is_refused_with_numbers() -> None:
    mac = FakeMac(ram_gib=256).machine()
    with pytest.raises(DoesNotFitError, match=r"353 GB would have to be wired, but of 256 GB at"):
        check_fits(mac, advise(mac, memory("350")))
    check_fits(FakeMac().machine(), advise(FakeMac().machine(), memory("504")))


@pytest.mark.parametrize("ram", MACS)
def test_a_limit_above_ram_without_the_reserve_is_refused(ram: int) -> None:
    mac = FakeMac(ram_gib=ram).machine()
    most = (ram - 16) * 1024
    assert most_mb(mac) == most
    check_setting(mac, most)
    for mib in (most + 1, ram * 1024, 2 * ram * 1024):
        with pytest.raises(UsageError, match=f"--set {mib} is more than {most} MiB"):
            check_setting(mac, mib)
    with pytest.raises(UsageError, match="--set 450 is less than 4096 MiB"):
        check_setting(mac, 450)


def test_sequences_multiply_cache_and_state(tiny_source: Path) -> None:
    one, four = memory_of(tiny_source, 1000), memory_of(tiny_source, 1000, 4)
    assert (four.n_cache, four.n_state) == (4 * one.n_cache, 4 * one.n_state)
    assert four.n_weights == one.n_weights
    assert one.n_cache == 1000 * memory_of(tiny_source, 1).n_cache


def test_the_real_runner_runs_nothing_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    with pytest.raises(KimiError, match="not run on linux"):
        wired.run_command(["/usr/bin/sudo", "true"])


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeMac]:
    """A Mac of 512 GB under the command line."""
    fake = FakeMac()
    install(fake, monkeypatch, tmp_path)
    yield fake
    assert all(call[0] in wired.PROGRAMS for call in fake.calls)


def install(fake: FakeMac, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(machine, "Probes", lambda: fake)
    monkeypatch.setattr(wired, "run_command", fake.run)
    monkeypatch.setattr(wired, "DAEMONS", folder)
    monkeypatch.setattr(wired, "memory_of", lambda path, context, n: memory(path.name, context))


def said(fake: FakeMac) -> list[str]:
    return [str(wired.Command(call)) for call in fake.calls]


def test_a_line_is_printed_and_nothing_changes(kimi: Run, mac: FakeMac) -> None:
    result = kimi("wired-limit", "--model", "451")
    assert (result.code, result.err) == (0, "")
    assert result.out.splitlines()[-1] == "set    sudo sysctl iogpu.wired_limit_mb=478359"
    assert "now    393216 MiB, the system's default (iogpu.wired_limit_mb)" in result.out
    assert "455 GB wired: 451 GB weights, 906 MB cache (32,768 tokens a sequence)" in result.out
    assert mac.calls == []
    assert "sysctl.conf" not in result.out


def test_what_the_default_holds_needs_nothing(kimi: Run, mac: FakeMac) -> None:
    result = kimi("wired-limit", "--model", "350", "--apply", "-y")
    assert result.code == 0
    assert "set    nothing: 370543 MiB are enough" in result.out
    assert mac.calls == []


def test_too_large_is_exit_code_4(kimi: Run, mac: FakeMac) -> None:
    result = kimi("wired-limit", "--model", "504", "--context", 1 << 20, "--apply", "-y")
    assert (result.code, mac.calls) == (4, [])
    assert "kimi-k3: error: 536 GB would have to be wired" in result.err


def test_persisting_what_the_default_holds_does_not_lower_it(kimi: Run, mac: FakeMac) -> None:
    assert kimi("wired-limit", "--model", "350", "--persist", "-y").code == 0
    assert mac.calls == []
    mac.values["iogpu.wired_limit_mb"] = "480000"
    assert kimi("wired-limit", "--model", "451", "--persist", "-y").code == 0
    assert mac.loaded == {LABEL}


def test_without_a_build_the_limit_is_shown(kimi: Run, mac: FakeMac) -> None:
    mac.values["iogpu.wired_limit_mb"] = "450000"
    result = kimi("wired-limit")
    assert result == (0, "now  450000 MiB, as set (iogpu.wired_limit_mb)\n", "")


def test_tight_is_said(kimi: Run, mac: FakeMac) -> None:
    result = kimi("wired-limit", "--model", "504", "--apply", "-y")
    assert result.code == 0
    assert "warning: weights are over 0.9 of the most that can be set" in result.err
    assert mac.values["iogpu.wired_limit_mb"] == "507904"


@pytest.mark.parametrize("macos", MACOS)
@pytest.mark.parametrize("ram", MACS)
def test_apply_persist_and_undo_everywhere(
    macos: str,
    ram: int,
    kimi: Run,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    fake = FakeMac(macos=macos, ram_gib=ram)
    install(fake, monkeypatch, tmp_path)
    mib = (ram - 16) * 1024
    setting = f"iogpu.wired_limit_mb={mib}"
    if macos.startswith("13"):
        setting = f"debug.iogpu.wired_limit={mib * MIB}"
    name, _, value = setting.partition("=")

    assert kimi("wired-limit", "--set", mib, "--apply", "-y").code == 0
    assert said(fake) == [f"sudo sysctl {setting}"]
    assert fake.values[name] == value

    fake.values[name] = "0"
    fake.calls.clear()
    assert kimi("wired-limit", "--set", mib, "--persist", "-y").code == 0
    path = tmp_path / f"{LABEL}.plist"
    calls = said(fake)
    assert calls[1] == f"sudo sysctl {setting}"
    assert [call.split()[:3] for call in (calls[0], *calls[2:])] == [
        ["plutil", "-lint", "-s"], ["sudo", "install", "-o"], ["sudo", "launchctl", "bootstrap"],
    ]  # fmt: skip
    assert calls[2].startswith("sudo install -o root -g wheel -m 644 /")
    assert calls[2].endswith(str(path))
    assert plistlib.loads(path.read_bytes()) == {
        "Label": LABEL, "ProgramArguments": ["/usr/sbin/sysctl", setting], "RunAtLoad": True,
    }  # fmt: skip
    assert (fake.loaded, fake.modes, fake.values[name]) == ({LABEL}, {path.name: "644"}, value)

    fake.calls.clear()
    assert kimi("wired-limit", "--undo", "-y").code == 0
    assert said(fake) == [
        f"sudo launchctl bootout system/{LABEL}", f"sudo rm {path}", f"sudo sysctl {name}=0",
    ]  # fmt: skip
    assert (fake.loaded, path.exists(), fake.values[name]) == (set(), False, "0")


def test_persisting_again_replaces_what_is_loaded(kimi: Run, mac: FakeMac, tmp_path: Path) -> None:
    for mib in (400_000, 410_000):
        assert kimi("wired-limit", "--set", mib, "--persist", "-y").code == 0
    assert b"410000" in (tmp_path / f"{LABEL}.plist").read_bytes()
    assert mac.loaded == {LABEL}


def test_the_plist_and_the_commands_are_shown_first(kimi: Run, mac: FakeMac) -> None:
    result = kimi("wired-limit", "--set", 400_000, "--persist")
    assert (result.code, mac.calls) == (2, [])
    assert "<string>iogpu.wired_limit_mb=400000</string>" in result.err
    assert f"sudo launchctl bootstrap system {wired.DAEMONS / LABEL}.plist" in result.err
    assert result.err.endswith(
        "kimi-k3: error: this changes a setting of the system.\nhint: confirm it with -y.\n"
    )


@pytest.mark.parametrize(
    ("answer", "code", "limit"), [("y\n", 0, "400000"), ("n\n", 2, "0"), ("", 2, "0")]
)
def test_a_terminal_is_asked(
    answer: str,
    code: int,
    limit: str,
    kimi: Run,
    mac: FakeMac,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = io.StringIO(answer)
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)
    result = kimi("wired-limit", "--set", 400_000, "--apply")
    assert (result.code, mac.values["iogpu.wired_limit_mb"]) == (code, limit)
    assert "run this with sudo? [y/N]" in result.err


@pytest.mark.parametrize(
    "failing", ["sudo sysctl", "sudo install", "plutil", "sudo launchctl bootstrap"]
)
def test_a_command_that_fails_stops_and_is_named(kimi: Run, mac: FakeMac, failing: str) -> None:
    mac.failing = failing
    result = kimi("wired-limit", "--set", 400_000, "--persist", "-y")
    assert result.code == 1
    assert f"kimi-k3: error: {failing}" in result.err
    assert "failed with status 1" in result.err
    assert said(mac)[-1].startswith(failing)


def test_a_limit_that_did_not_take_is_no_success(
    kimi: Run, mac: FakeMac, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wired, "run_command", lambda argv: 0)
    result = kimi("wired-limit", "--set", 400_000, "--apply", "-y")
    assert result.code == 1
    assert "the limit is 0 bytes after it was set to 400000 MiB" in result.err


def test_json_is_all_there_is_on_stdout(kimi: Run, mac: FakeMac) -> None:
    told = json.loads(kimi("wired-limit", "--model", "451", "--apply", "-y", "--json").out)
    assert (told["version"], told["set_mb"], told["advice"]["verdict"]) == (1, 478_359, "raise")
    assert told["commands"] == ["sudo sysctl iogpu.wired_limit_mb=478359"]
    assert told["machine"]["chip"] == "Apple M3 Ultra"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "520000"], "--set 520000 is more than 507904 MiB"),
        (["--apply"], "which limit?"),
        (["--undo", "--set", "400000"], "--undo goes back to the default"),
        (["--set", "400000", "--apply", "--undo"], "not allowed with argument"),
        (["--set", "400000", "--model", "451"], "not allowed with argument"),
    ],
)
def test_bad_options(kimi: Run, mac: FakeMac, options: list[str], message: str) -> None:
    result = kimi("wired-limit", *options)
    assert (result.code, mac.calls) == (2, [])
    assert message in result.err


def test_elsewhere_it_says_so(
    kimi: Run,
    tiny_source: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine.Probes, "system", lambda self: "Linux")
    result = kimi("wired-limit", "--model", tiny_source)
    assert result.code == 0
    assert result.out.startswith("now    not a Mac: Linux ")
    assert "64 GB Mac: yes" in result.out
    for options in (
        ["--set", "50000"],
        ["--undo", "-y"],
        ["--model", str(tiny_source), "--apply", "-y"],
    ):
        refused = kimi("wired-limit", *options)
        assert (refused.code, refused.out) == (2, "")
        assert "not a Mac" in refused.err
