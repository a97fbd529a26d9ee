"""A terminal in which the command line runs: keys in, everything that is shown out."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Callable

from tests.house.checks import ROOT

SECONDS = 60
CONTROLLED = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)"
"""Without a controlling terminal Ctrl-C would be a letter."""
MAIN = "import sys; from kimi_k3_mlx.cli import main; sys.exit(main())"


class Terminal:
    """A program at a pseudo-terminal; `code` runs before `main`."""

    def __init__(self, *argv: object, code: str = "", **variables: str) -> None:
        # prompt_toolkit asks terminals where the cursor is; this one doesn't know.
        plain = {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "COLUMNS": "100"}
        self.master, slave = pty.openpty()
        script = f"{CONTROLLED}\n{code}\n{MAIN}"
        self.process = subprocess.Popen(
            [sys.executable, "-c", script, *map(str, argv)],
            cwd=ROOT,
            env=os.environ | plain | variables,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)
        self.shown = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)

    def type(self, text: str) -> None:
        """Press keys."""
        os.write(self.master, text.encode())

    def until(self, text: str) -> str:
        """Wait for a text; return what was shown up to its end and is not yet returned."""
        self.read(lambda: text in self.shown)
        head, found, self.shown = self.shown.partition(text)
        if not found:
            raise AssertionError(f"{text!r} was not shown: {head!r}")
        return head + found

    def end(self) -> int:
        """Wait for the program; return its exit code."""
        self.read(lambda: False)
        return self.process.wait(SECONDS)

    def read(self, done: Callable[[], bool], seconds: float = SECONDS) -> None:
        """Read until done, or nothing more can come."""
        deadline = time.monotonic() + seconds
        while not done() and time.monotonic() < deadline:
            if not select.select([self.master], [], [], 0.2)[0]:
                continue
            try:
                found = os.read(self.master, 1 << 16)
            except OSError:  # Linux's way of saying that the other end is closed
                return
            if not found:
                return
            self.shown += found.decode(errors="replace")
