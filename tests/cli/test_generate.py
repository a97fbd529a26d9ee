"""`kimi-k3 generate`: text on stdout as it comes, numbers on stderr, no speed that is not true."""

from __future__ import annotations

import json
import os
import shutil
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest

from kimi_k3_mlx.runtime import load as load_module
from tests.cli.conftest import Run, program

TINY_K3 = Path(__file__).parents[2] / "kimi_k3_mlx" / "assets" / "tiny-k3"


def test_text_on_stdout_statistics_on_stderr(kimi: Run, tiny_build: Path) -> None:
    result = kimi("generate", "--model", tiny_build, "-p", "def f(", "-m", 8)
    assert result.code == 0
    assert result.out.endswith("\n")
    assert "[6 prompt + 8 generated tokens in " in result.err
    assert "stopped by length]" in result.err
    assert "Traceback" not in result.err


def test_no_speed_is_stated_for_weights_that_are_not_wired(kimi: Run, tiny_build: Path) -> None:
    args = ("generate", "--model", tiny_build, "-p", "def f(", "-m", 3)
    text, told = kimi(*args), json.loads(kimi(*args, "--json").out)
    if told["wired"]:
        pytest.skip("this machine has a GPU and wires the weights")
    assert "tok/s" not in text.err
    assert told["generation_tokens_per_second"] is None


def test_json_holds_the_same_text(kimi: Run, tiny_build: Path) -> None:
    args = ("generate", "--model", tiny_build, "-p", "def f(", "-m", 8, "-q")
    text, result = kimi(*args), kimi(*args, "--json")
    told = json.loads(result.out)
    assert told["text"] + "\n" == text.out
    assert (told["prompt_tokens"], told["generation_tokens"]) == (6, 8)
    assert text.err == ""


def test_a_lazy_start_writes_the_same(kimi: Run, tiny_build: Path) -> None:
    args = ("generate", "--model", tiny_build, "-p", "def f(", "-m", 8)
    whole, lazy = kimi(*args), kimi(*args, "--lazy")
    assert whole.out == lazy.out
    assert "weights  0 B/" in whole.err
    assert "weights  0 B/" not in lazy.err


def test_a_seed_repeats_and_another_differs(kimi: Run, tiny_build: Path) -> None:
    args = ("generate", "--model", tiny_build, "-p", "x", "-m", 12, "--temp", 1, "-q", "--seed")
    first, again, other = (kimi(*args, seed).out for seed in (1, 1, 2))
    assert first == again != other


def test_the_prompt_may_come_from_stdin(kimi: Run, tiny_build: Path) -> None:
    args = ("generate", "--model", tiny_build, "-m", 4)
    piped = program(*args, "-p", "-", stdin="def f(")
    assert piped.code == 0
    assert piped.out == kimi(*args, "-p", "def f(").out
    assert "[6 prompt + 4" in piped.err
    assert "transformers" not in piped.err


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_stdin_that_is_no_text_is_refused(
    errors: str, kimi: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a C locale Python decodes stdin with surrogates instead of failing."""
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(b"caf\xe9"), "utf-8", errors))
    result = kimi("generate", "--model", "/nowhere", "-p", "-")
    assert result.code == 2
    assert result.err.startswith("kimi-k3: error: the prompt is not UTF-8.\nhint: ")


def test_an_argument_that_is_no_text_is_refused(kimi: Run) -> None:
    result = kimi("generate", "--model", "/nowhere", "-p", os.fsdecode(b"caf\xe9"))
    assert result.code == 2
    assert result.err.startswith("kimi-k3: error: the prompt is not UTF-8.\nhint: ")


def test_a_prompt_may_begin_with_a_hyphen(kimi: Run, tiny_build: Path) -> None:
    args = ("generate", "--model", tiny_build, "-m", 2)
    refused = kimi(*args, "-p", "-x")
    assert refused.code == 2
    assert refused.err.endswith("one that begins with - needs an equals sign: -p=-x\n")
    assert "[2 prompt + 2 generated" in kimi(*args, "-p=-x").err


def test_a_seed_has_64_bits(kimi: Run, tiny_build: Path) -> None:
    args = ("generate", "--model", tiny_build, "-p", "x", "-m", 2, "--seed")
    assert kimi(*args, 2**64 - 1).code == 0
    result = kimi(*args, 2**64)
    assert result.code == 2
    assert "--seed: 18446744073709551616 is more than 18446744073709551615" in result.err


def test_as_many_candidates_as_there_are_tokens_are_all_of_them(
    kimi: Run, tiny_build: Path
) -> None:
    args = ("generate", "--model", tiny_build, "-p", "x", "-m", 6, "--temp", 1, "--seed", 1, "-q")
    everything = kimi(*args)
    assert kimi(*args, "--top-k", 100_000) == everything
    assert everything.code == 0


def test_an_empty_prompt_is_refused(kimi: Run, tiny_build: Path) -> None:
    result = kimi("generate", "--model", tiny_build, "-p", "")
    assert result.code == 2
    assert result.err.startswith("kimi-k3: error: the prompt is empty.")


def test_a_source_and_its_build_write_the_same(
    kimi: Run, tiny_source: Path, tiny_build: Path
) -> None:
    """Stock names and source names load alike: conversion loses nothing that tokens can see."""
    source, build = (
        kimi("generate", "--model", path, "-p", "import ", "-m", 6, "-q").out
        for path in (tiny_source, tiny_build)
    )
    assert source == build


def test_what_does_not_load_is_one_sentence(kimi: Run, tiny_build: Path, tmp_path: Path) -> None:
    build = shutil.copytree(tiny_build, tmp_path / "build")
    (build / "model-00002-of-000008.safetensors").rename(build / "model-stale.safetensors")
    args = ("generate", "--model", build, "-p", "x")
    missing = kimi(*args)
    assert missing.code == 1
    assert "shard model-00002-of-000008.safetensors is named by " in missing.err
    assert "hint: make it again by the same kimi-k3 convert" in missing.err
    shutil.copy(build / "model-stale.safetensors", build / "model-00002-of-000008.safetensors")
    stale = kimi(*args)
    assert stale.code == 1
    assert "holds model-stale.safetensors that the index does not name" in stale.err


def test_a_cpu_needs_no_compiler_and_no_environment(
    kimi: Run, tiny_build: Path, tmp_path: Path
) -> None:
    """MLX fuses on a CPU by running g++ for each kernel, a minute for the first prompt."""
    args = ("generate", "--model", tiny_build, "-p", "def f(", "-m", 4)
    result = program(*args, MLX_DISABLE_COMPILE=None, TMPDIR=str(tmp_path))
    assert result.code == 0, result.err
    assert result.out == kimi(*args).out
    assert not (tmp_path / "mlx").exists()


def test_what_drafts_saved_is_told(kimi: Run, tiny_build: Path) -> None:
    args = ("generate", "--model", tiny_build, "-p", "def f(", "-m", 12)
    assert ", 0 from drafts, " in kimi(*args, "--no-lookup").err
    told = json.loads(kimi(*args, "--draft-model", tiny_build, "--json").out)
    assert told["tokens_from_drafts"] >= 6


REFUSED = {
    "two ways of drafting": (["--draft-model", "BUILD", "--lookup"], "both draft"),
    "another tokenizer": (["--draft-model", "OTHER"], "tokenizer is another one: it has "),
    "groups that don't divide": (["--kv-bits", "8"], "can't be quantized in groups of 64"),
    "three bits": (["--kv-bits", "3"], "argument --kv-bits: invalid choice"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_be_is_refused_before_the_prompt(
    case: str, kimi: Run, tiny_build: Path
) -> None:
    options, fact = REFUSED[case]
    places = {"BUILD": str(tiny_build), "OTHER": str(TINY_K3)}
    args = [places.get(option, option) for option in options]
    result = kimi("generate", "--model", tiny_build, "-p", "x", "-m", 2, *args)
    assert result.code == 2
    assert fact in result.err
    assert result.out == ""


def test_a_hint_does_not_name_what_was_given(
    kimi: Run, tiny_build: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of 32 were advised to who had given 32, and that only after the build was loaded."""
    monkeypatch.setattr(load_module, "load", lambda *_, **__: pytest.fail("it was loaded"))
    result = kimi(
        "generate", "--model", tiny_build, "-p", "x", "--kv-bits", 8, "--kv-group-size", 32
    )
    assert result.code == 2
    assert "in groups of 32" in result.err
    assert result.err.endswith("hint: leave out --kv-bits.\n")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two pictures of different sizes."""
    image = pytest.importorskip("PIL.Image")
    folder = tmp_path_factory.mktemp("pictures")
    paths = [folder / "red.png", folder / "blue.png"]
    for path, size in zip(paths, ((56, 42), (84, 28)), strict=True):
        image.new("RGB", size, path.stem).save(path)
    return paths


def test_pictures_come_before_the_text(kimi: Run, tiny_build: Path, pictures: list[Path]) -> None:
    args = ("generate", "--model", tiny_build, "-p", "def f(", "-m", 6, "--json")
    none, one, two, swapped = (
        json.loads(kimi(*args, *(word for path in paths for word in ("--image", path))).out)
        for paths in ([], pictures[:1], pictures, pictures[::-1])
    )
    assert none["prompt_tokens"] < one["prompt_tokens"] < two["prompt_tokens"]
    assert two["prompt_tokens"] == swapped["prompt_tokens"]
    assert two["text"] != swapped["text"]


def test_pictures_that_cannot_be(
    kimi: Run, tiny_build: Path, pictures: list[Path], tmp_path: Path
) -> None:
    no_picture = tmp_path / "a.png"
    no_picture.write_bytes(b"GIF")
    args = ("generate", "--model", tiny_build, "-p", "x", "--image")
    result = kimi(*args, no_picture)
    assert result.code != 0
    assert f"{no_picture}" in result.err
    result = kimi(*args, pictures[0], "--draft-model", tiny_build)
    assert (result.code, result.out) == (2, "")
    assert "pictures go with neither a draft model nor several Macs." in result.err
    result = kimi(*args, "https://example.org/a.png")
    assert result.code == 2
