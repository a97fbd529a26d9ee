"""`kimi-k3 fit`: the table for people and for programs."""

from __future__ import annotations

import json

import pytest

from kimi_k3_mlx.runtime import machine
from tests.cli.conftest import Run
from tests.runtime.fake_mac import FakeMac


def line(out: str, begin: str) -> list[str]:
    (found,) = [text.split() for text in out.splitlines() if text.startswith(begin)]
    return found


def test_512_gb(kimi: Run) -> None:
    result = kimi("fit", "--ram", "512GB", "--chip", "M3 Ultra")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith(
        "M3 Ultra with 512 GB, memory up to 819 GB/s, 32,768 tokens of context\n"
    )
    record = line(result.out, "mxfp4-q8 (on the Hub)  242")
    assert record[-6:] == ["raised", "478359", "86.3", "9.5", "5.4", "5.5"]
    assert line(result.out, "mxfp4 (on the Hub)     896")[-2:] == ["-", "-"]
    assert "measured        5.5 tok/s on M3 Ultra, published by" in result.out
    assert "under 64" not in result.out


def test_every_number_says_what_it_is(kimi: Run) -> None:
    out = kimi("fit", "--ram", "512GB", "--chip", "M3 Ultra").out
    kinds = {name: line(out, f"{name} ")[len(name.split())] for name in (
        "weights", "wired", "GB/token", "tok/s at most", "expected",
    )}  # fmt: skip
    assert kinds == {
        "weights": "exact:", "wired": "model:", "GB/token": "model:", "tok/s at most": "model:",
        "expected": "model:",
    }  # fmt: skip


def test_json(kimi: Run) -> None:
    told = json.loads(kimi("fit", "--ram", "512GB", "--chip", "m3 ultra", "--json").out)
    assert (told["ram_gib"], told["chip"]["name"], told["context"]) == (512, "M3 Ultra", 32_768)
    build = told["builds"][5]
    assert (build["keep"], build["n_weights"], build["verdict"]) == (242, 451_435_437_920, "raise")
    per_token = build["bytes_per_token"]
    assert per_token["total"] == sum(
        per_token[name] for name in ("trunk", "experts", "cache", "state")
    )
    assert build["tokens_per_second"]["ceiling"] == pytest.approx(819e9 / per_token["total"])


def test_this_mac(kimi: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "Probes", lambda: FakeMac(chip="Apple M4 Max", ram_gib=128))
    result = kimi("fit", "--context", 8192)
    assert result.out.startswith("M4 Max with 128 GB, memory up to 546 GB/s, 8,192 tokens")
    assert "under 64        kimi-k3 plan keeps so few experts only with --floor" in result.out
    other = kimi("fit", "--ram", "256GB")
    assert other.out.startswith("a Mac with 256 GB, speed unknown: give --chip")


def test_an_unknown_chip_of_this_mac_has_no_speed(
    kimi: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "Probes", lambda: FakeMac(chip="Apple M9 Ultra"))
    assert kimi("fit").out.startswith("Apple M9 Ultra with 512 GB, speed unknown: give --chip")


def test_not_a_mac_is_said(kimi: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.Probes, "system", lambda self: "Linux")
    assert kimi("fit").out.startswith("not a Mac: Linux ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ram", "512GB", "--chip", "M9"], "there is no chip 'M9' in the table"),
        (["--ram", "512GB", "--chip", "M5 Max"], "no Mac with M5 Max has 512 GB: at most 128"),
        (["--ram", "512"], "is not a memory size such as 512GB"),
        (["--context", "0"], "is not a whole number of at least 1"),
    ],
)
def test_bad_options(kimi: Run, options: list[str], message: str) -> None:
    result = kimi("fit", *options)
    assert (result.code, result.out) == (2, "")
    assert message in result.err
