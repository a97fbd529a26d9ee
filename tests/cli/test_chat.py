"""`kimi-k3 chat` at a pseudo-terminal and in a pipe, with a model that says what it is told to."""

from __future__ import annotations

from pathlib import Path

import pytest

from kimi_k3_mlx.cli._terminal import Screen
from kimi_k3_mlx.runtime.saved_chat import read_saved
from tests.cli.conftest import Run, program
from tests.cli.terminal import Terminal

TINY_K3 = Path(__file__).parents[2] / "kimi_k3_mlx" / "assets" / "tiny-k3"
PROMPT = "\x1b[?2004h"
"""What is shown when a message can be typed."""
SCRIPT = """
import kimi_k3_mlx.chat
from kimi_k3_mlx.runtime import load as module
from tests.runtime.scripted import answer, scripted
TEXTS = answer("I think", "First \\x1b]52;answer."), answer("hm", "Long " * 30)
real = module.load

def load(*args, **options):
    build = real(*args, **options)
    encoder = kimi_k3_mlx.chat.PieceEncoder(build.tokenizer)
    opening = encoder.encode_pieces(kimi_k3_mlx.chat.chat_pieces([]))
    return scripted(build, opening, *TEXTS)

module.load = load
"""


@pytest.mark.slow
def test_a_chat_at_a_terminal(tmp_path: Path) -> None:
    """Several lines, dimmed thoughts, Ctrl-C, commands, history, a file to resume."""
    args = ("chat", "--model", TINY_K3, "--save", tmp_path / "talk")
    with Terminal(*args, code=SCRIPT, HOME=str(tmp_path)) as terminal:
        terminal.until(PROMPT)
        terminal.type("Two\\\rlines\r")
        shown = terminal.until("context ")
        assert "\x1b[2mI" in shown, "thoughts are dimmed"
        assert "First ]52;answer." in shown, "what steers a terminal is left out"
        terminal.until(PROMPT)
        terminal.type("\x1b[200~pasted\nlines\x1b[201~\r")
        terminal.until("Long Long")
        terminal.type("\x03")
        shown = terminal.until("context ")
        assert ", stopped; " in shown
        assert shown.count("Long") < 28
        terminal.until(PROMPT)
        terminal.type("typed\x03/undo\r")
        terminal.until("context ")
        terminal.until(PROMPT)
        terminal.type("/nonsense\r")
        terminal.until("there is no command /nonsense")
        terminal.until(PROMPT)
        terminal.type("/image no-such.png\r")
        terminal.until("no-such.png: No such file or directory")
        terminal.until(PROMPT)
        terminal.type("\x04")
        assert terminal.end() == 0
        assert f"saved {tmp_path / 'talk'}.safetensors" in terminal.shown
    history = (tmp_path / ".kimi_k3_history").read_text()
    assert "+Two\n+lines\n" in history
    assert "+pasted\n+lines\n" in history
    assert (tmp_path / ".kimi_k3_history").stat().st_mode & 0o77 == 0
    with Terminal(
        "chat", "--model", TINY_K3, "--resume", tmp_path / "talk",
        code=SCRIPT, HOME=str(tmp_path), NO_COLOR="1",
    ) as terminal:  # fmt: skip
        terminal.until("[2 messages, context ")
        terminal.until(PROMPT)
        terminal.type("again\r")
        shown = terminal.until("context ")
        assert "[thoughts]\r\nI think\r\n[answer]\r\nFirst" in shown
        assert "\x1b[2m" not in shown


@pytest.mark.slow
def test_a_second_interruption_ends_the_program(tmp_path: Path) -> None:
    code = SCRIPT + "import time\nfrom tests.runtime.scripted import Scripted\n"
    code += "Scripted.__call__ = lambda *args, **options: time.sleep(60)\n"
    args = ("chat", "--model", TINY_K3)
    with Terminal(*args, code=code, HOME=str(tmp_path)) as terminal:
        terminal.until(PROMPT)
        terminal.type("Hi\r")
        terminal.until("?2004l")
        for _ in range(2):
            terminal.read(lambda: False, seconds=1)
            terminal.type("\x03")
        assert terminal.end() == 130
        assert "kimi-k3: interrupted." in terminal.shown


def test_an_interruption_costs_no_conversation(tmp_path: Path) -> None:
    """`--save` wrote nothing after a second Ctrl-C; here it comes while the answer is shown."""
    args = ("chat", "--model", TINY_K3, "--save")
    assert program(*args, tmp_path / "a", code=SCRIPT, stdin="Hi").code == 0
    code = SCRIPT + "import os, signal\nfrom kimi_k3_mlx.cli._terminal import Screen\n"
    code += "Screen.answer = lambda *_: os.kill(os.getpid(), signal.SIGTERM)\n"
    told = program(*args, tmp_path / "b", "--resume", tmp_path / "a", code=code, stdin="More")
    assert told.code == 130
    first, second = (read_saved(tmp_path / f"{name}.safetensors", TINY_K3) for name in "ab")
    assert second.messages == first.messages
    assert {c.offset for c in second.caches if hasattr(c, "offset")} == {len(second.keys)}


def test_in_a_pipe_there_is_one_message_and_no_escape_code() -> None:
    args = ("chat", "--model", TINY_K3)
    told = program(*args, code=SCRIPT, stdin="Two\nlines\n")
    assert (told.code, told.out) == (0, "First \x1b]52;answer.\n")
    assert "I think\n[" in told.err
    assert "context " in told.err
    assert "\x1b" not in told.err
    assert "tok/s" not in told.err
    quiet = program(*args, "-q", "--seed", 1, code=SCRIPT, stdin="/help")
    assert (quiet.out, quiet.err) == (told.out, "")


def test_what_follows_replaces_a_status(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(quiet=False, colour=True)
    screen.status("read 0 of 9")
    screen.think("hm")
    screen.end()
    screen.status("read 0 of 9")
    screen.end()
    plain = Screen(quiet=False, colour=False)
    plain.status("read 0 of 9")
    plain.note("done")
    read, clear = "\x1b[2m\r\x1b[Kread 0 of 9\x1b[0m", "\x1b[2m\r\x1b[K\x1b[0m"
    expected = f"{read}{clear}\x1b[2mhm\x1b[0m\n{read}{clear}[done]\n"
    assert capsys.readouterr().err == expected


REFUSED = {
    "an effort that K3 doesn't know": (["--effort", "medium"], "--effort 'medium' is none of low"),
    "effort without thoughts": (["--effort", "low", "--no-thinking"], "--effort is for thinking"),
    "two system prompts": (["--resume", "x", "--system-prompt", "y"], "has its system prompt"),
    "no file": (["--resume", "/nowhere/x"], "/nowhere/x.safetensors is no file"),
    "no place": (["--save", "/nowhere/x"], "/nowhere/x.safetensors can't be written"),
    "no build": (["--model", "/nowhere"], "/nowhere"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_be_is_refused_before_weights_are_read(
    case: str, kimi: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    question = tmp_path / "question"
    question.write_text("Hi")
    options, fact = REFUSED[case]
    with question.open() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        result = kimi("chat", "--model", TINY_K3, *options)
    assert result.code in (1, 2)
    assert fact in result.err
    assert result.out == ""


def test_nothing_on_stdin_is_refused(kimi: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/null", encoding="utf-8") as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        result = kimi("chat", "--model", TINY_K3)
    assert result.code == 2
    assert "the prompt is empty" in result.err
