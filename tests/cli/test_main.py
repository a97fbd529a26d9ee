"""Dispatch, usage errors and exit codes: one sentence, one hint, never a traceback."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kimi_k3_mlx import __version__, cli, errors
from kimi_k3_mlx.cli import VERBS, inspect
from tests.cli.conftest import Run, program
from tests.house.checks import ROOT

USAGE_ERRORS = {
    "": (f"a verb is missing: {', '.join(VERBS)}.", "kimi-k3 --help"),
    "convrt": ("unknown verb 'convrt'.", "did you mean convert?"),
    "xyzzy": ("unknown verb 'xyzzy'.", "kimi-k3 --help"),
    "--verison": ("unknown option '--verison'.", "kimi-k3 --help"),
    "convert --hf-pth x": (
        "unknown option --hf-pth for kimi-k3 convert.",
        "did you mean --hf-path?",
    ),
    "verify --mlxpath=x": (
        "unknown option --mlxpath for kimi-k3 verify.",
        "did you mean --mlx-path?",
    ),
    "inspect": ("the following arguments are required: PATH|REPO.", "kimi-k3 inspect --help"),
    "inspect a b": ("unrecognized arguments: b.", "kimi-k3 inspect --help"),
    "generate --model x -p y -m 0": (
        "argument -m/--max-tokens: '0' is not a whole number of at least 1.",
        "kimi-k3 generate --help",
    ),
    "generate --model x -p y --top-p 2": (
        "argument --top-p: '2' is not a number from 0 to 1.",
        "kimi-k3 generate --help",
    ),
    "generate --model x -p y --temp nan": (
        "argument --temp: 'nan' is not a number of at least 0.",
        "kimi-k3 generate --help",
    ),
    "generate --model mlx-community/K3 -p x": (
        "mlx-community/K3 is not a folder.",
        "fetch it first: kimi-k3 download mlx-community/K3 --local-dir ./K3",
    ),
    "inspect tests/nowhere": (
        "tests/nowhere is not a folder.",
        "give the folder that holds config.json.",
    ),
    "convert --x": ("unknown option --x for kimi-k3 convert.", "kimi-k3 convert --help"),
}


@pytest.mark.parametrize("line", USAGE_ERRORS)
def test_usage_errors_name_the_nearest_word(line: str, kimi: Run) -> None:
    fact, hint = USAGE_ERRORS[line]
    result = kimi(*line.split())
    assert result == (2, "", f"kimi-k3: error: {fact}\nhint: {hint}\n")


BAD_PATHS = {
    "inspect /nowhere": 2,
    "convert --hf-path /nowhere": 2,
    "verify --mlx-path /nowhere --hf-path /nowhere": 2,
    "generate --model /nowhere -p x": 2,
    "inspect {empty}": 1,
    "convert --hf-path {empty}": 1,
    "verify --mlx-path {empty} --hf-path {tiny}": 3,
    "generate --model {empty} -p x": 1,
    "demo --hf-path {empty}": 1,
    "convert --hf-path {tiny} --profile nope": 2,
    "convert --hf-path {tiny} --mlx-path /dev/null/x": 1,
    "convert --hf-path {tiny} --mlx-path /dev/null": 2,
}


@pytest.mark.parametrize("line", BAD_PATHS)
def test_bad_paths_are_one_sentence(
    line: str, kimi: Run, tiny_source: Path, tmp_path: Path
) -> None:
    result = kimi(*line.format(empty=tmp_path, tiny=tiny_source).split())
    assert result.code == BAD_PATHS[line], result.err
    assert "Traceback" not in result.err
    assert "unexpected" not in result.err
    last = [text for text in result.err.splitlines() if text.startswith("kimi-k3: error: ")]
    assert len(last) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flag", ["-h", "--help", "help"])
def test_help_lists_every_verb(flag: str, kimi: Run) -> None:
    result = kimi(flag)
    assert (result.code, result.err) == (0, "")
    assert all(
        f"  {name}" in result.out and verb.summary in result.out for name, verb in VERBS.items()
    )


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(verb: str, kimi: Run) -> None:
    result = kimi(verb, "--help")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith(f"usage: kimi-k3 {verb} ")
    examples = result.out.split("examples:\n")[1].strip().splitlines()
    assert 2 <= len(examples) <= 4
    assert all(line.strip().startswith(f"kimi-k3 {verb}") for line in examples)


@pytest.mark.parametrize("verb", VERBS)
def test_examples_in_help_parse(verb: str) -> None:
    """An example that its own parser refuses would be worse than none."""
    for example in cli.load_verb(verb).EXAMPLES:
        words = shlex.split(example.split(" < ")[0])
        assert isinstance(cli.parser_of(verb).parse(words[2:]), argparse.Namespace)


def test_version(kimi: Run) -> None:
    assert kimi("--version") == (0, f"kimi-k3 {__version__}\n", "")


RAISED = {
    errors.KimiError("a fact.", "a command"): (1, "kimi-k3: error: a fact.\nhint: a command\n"),
    errors.CheckpointError("a fact."): (1, "kimi-k3: error: a fact.\n"),
    errors.UsageError("a fact."): (2, "kimi-k3: error: a fact.\n"),
    errors.MismatchError("a fact."): (3, "kimi-k3: error: a fact.\n"),
    errors.DoesNotFitError("a fact."): (4, "kimi-k3: error: a fact.\n"),
    errors.HubError("a fact."): (5, "kimi-k3: error: a fact.\n"),
    errors.InterruptedBuildError("interrupted after layer 1."): (
        130,
        "kimi-k3: interrupted after layer 1.\n",
    ),
    KeyboardInterrupt(): (130, "kimi-k3: interrupted.\nhint: run the same command again.\n"),
    PermissionError(13, "Permission denied", "/x"): (
        1,
        "kimi-k3: error: /x: Permission denied.\n",
    ),
    OSError("odd"): (1, "kimi-k3: error: odd.\n"),
}


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_every_error_has_its_exit_code(
    error: BaseException, kimi: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(args: argparse.Namespace) -> None:
        raise error

    monkeypatch.setattr(inspect, "run", fail)
    code, text = RAISED[error]
    assert kimi("inspect", "x") == (code, "", text)


@pytest.mark.parametrize(("value", "shown"), [("1", True), ("", False), ("0", False)])
def test_traceback_only_on_request(
    value: str, shown: bool, kimi: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KIMI_K3_DEBUG", value)
    result = kimi("inspect", "/nowhere")
    assert ("Traceback" in result.err) is shown
    assert "kimi-k3: error: /nowhere is not a folder." in result.err


BROKEN_VERB = """
from kimi_k3_mlx.cli import inspect
def fail(args):
    raise ZeroDivisionError("oh")
inspect.run = fail
"""


@pytest.mark.parametrize("debug", ["", "1"])
def test_a_defect_of_ours_is_one_sentence_too(debug: str) -> None:
    result = program("inspect", "x", code=BROKEN_VERB, KIMI_K3_DEBUG=debug)
    assert (result.code, result.out) == (1, "")
    assert "kimi-k3: error: unexpected ZeroDivisionError: oh\nhint: run it again" in result.err
    assert ("Traceback" in result.err) == bool(debug)


SIGNALLED_VERB = """
import os, signal
from kimi_k3_mlx.cli import inspect
inspect.run = lambda args: os.kill(os.getpid(), signal.{signal}) or signal.pause()
"""


@pytest.mark.parametrize("signal", ["SIGINT", "SIGTERM"])
def test_signals_end_with_130(signal: str) -> None:
    result = program("inspect", "x", code=SIGNALLED_VERB.format(signal=signal))
    assert result == (130, "", "kimi-k3: interrupted.\nhint: run the same command again.\n")


def test_a_reader_that_goes_away_is_no_error(tiny_source: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "kimi_k3_mlx", "inspect", str(tiny_source), "--tensors", "*"]
    done = subprocess.run(command, cwd=ROOT, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, b"")


def test_a_closed_stdout_is_one_sentence(tiny_source: Path) -> None:
    result = closed(">&-", "inspect", tiny_source)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("kimi-k3: error: standard output is closed.\nhint: ")


def test_a_closed_stderr_keeps_errors_out_of_stdout() -> None:
    result = closed("2>&-", "inspect", "/nowhere")
    assert (result.returncode, result.stdout) == (2, "")


def test_a_closed_stdin_is_an_empty_one() -> None:
    result = closed("<&-", "generate", "--model", "/nowhere", "-p", "-")
    assert result.returncode == 2
    assert result.stderr.startswith("kimi-k3: error: the prompt is empty.")


def closed(stream: str, *argv: object) -> subprocess.CompletedProcess[str]:
    """Run the program with one of its standard streams closed by the shell."""
    command = shlex.join([sys.executable, "-m", "kimi_k3_mlx", *map(str, argv)])
    return subprocess.run(
        f"{command} {stream}", shell=True, cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_a_terminal_without_the_character_shows_the_rest(tmp_path: Path) -> None:
    result = program("inspect", tmp_path / "世界", PYTHONIOENCODING="ascii")
    assert result.code == 2
    assert result.err.startswith(f"kimi-k3: error: {tmp_path}/?? is not a folder.")


def test_the_program_runs_as_a_module() -> None:
    assert program("--version") == (0, f"kimi-k3 {__version__}\n", "")
