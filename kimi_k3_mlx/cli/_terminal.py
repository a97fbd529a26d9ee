"""The terminal of a chat: lines with history in, streamed text out, Ctrl-C as a flag.

Input: keys, pieces of text. Output: answers to stdout, thoughts and notes to stderr. Escape codes
go to terminals only, not with NO_COLOR, and never those that a model writes.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from kimi_k3_mlx.cli._output import write

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

DIM, PLAIN, CLEAR = "\x1b[2m", "\x1b[0m", "\r\x1b[K"
CONTROLS = {n: None for n in (*range(32), *range(127, 160)) if chr(n) not in "\n\t"}
HISTORY = "~/.kimi_k3_history"
PROMPT = "> "


def colours(stream: TextIO) -> bool:
    """Whether escape codes may be written."""
    dumb = os.environ.get("TERM", "") in {"", "dumb"}
    return stream.isatty() and not dumb and not os.environ.get("NO_COLOR")


def shown(text: str, stream: TextIO) -> str:
    """A model's text; what would steer a terminal is left out there."""
    return text.translate(CONTROLS) if stream.isatty() else text


class Screen:
    """Where an answer is shown while it comes."""

    def __init__(self, quiet: bool, colour: bool) -> None:
        self.quiet, self.colour = quiet, colour
        self.part = ""
        """What was written last: `thoughts`, `answer` or `status`."""

    def think(self, text: str) -> None:
        """More of the thoughts."""
        if not self.quiet:
            self.begin("thoughts")
            self.dimmed(shown(text, sys.stderr))

    def answer(self, text: str) -> None:
        """More of the answer."""
        self.begin("answer")
        write(shown(text, sys.stdout), end="")

    def end(self) -> None:
        """The answer is over; its last line ends here, on the stream that it is on."""
        if self.part == "thoughts":
            self.line()
        elif self.part == "answer":
            write("")
        elif self.part == "status":
            self.dimmed(CLEAR)
        self.part = ""

    def begin(self, part: str) -> None:
        """Go over to another part; without dimmed letters a heading tells them apart."""
        if part == self.part:
            return
        self.end()
        if not self.colour and not self.quiet and sys.stderr.isatty():
            sys.stderr.write(f"[{part}]\n")
        self.part = part

    def note(self, text: str) -> None:
        """A line about what happened."""
        if not self.quiet:
            self.dimmed(f"[{text}]")
            self.line()

    def line(self) -> None:
        """End a line of talk."""
        sys.stderr.write("\n")
        sys.stderr.flush()

    def status(self, text: str) -> None:
        """A line that whatever follows replaces; only where lines can be redrawn."""
        if self.colour and not self.quiet:
            self.part = "status"
            self.dimmed(f"{CLEAR}{text}")

    def dimmed(self, text: str) -> None:
        """Talk, in letters that stand back."""
        sys.stderr.write(f"{DIM}{text}{PLAIN}" if self.colour else text)
        sys.stderr.flush()


class Interrupt:
    """Turns the first Ctrl-C into a flag: the tokens that were computed stay whole. The second one
    is an interruption as ever. Call it to ask for the flag."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self) -> bool:
        return self.asked

    def __enter__(self) -> Interrupt:
        self.before = signal.signal(signal.SIGINT, self.note)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self.before)

    def note(self, *_: object) -> None:
        """The handler."""
        self.asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)


def input_session(screen: Screen) -> PromptSession[str]:
    """Where messages are typed: several lines, edited, remembered from earlier chats."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.output import ColorDepth, create_output

    return PromptSession(
        PROMPT,
        history=history(screen),
        multiline=True,
        prompt_continuation=". ",
        key_bindings=keys(),
        output=create_output(stdout=sys.stderr),
        color_depth=None if screen.colour else ColorDepth.DEPTH_1_BIT,
    )


def history(screen: Screen) -> History:
    """Earlier messages, in a file that is the user's alone; in memory if it can't be written."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    path = Path(HISTORY).expanduser()
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    except OSError as error:
        screen.note(f"no history: {path}: {error.strerror}")
        return InMemoryHistory()
    return FileHistory(str(path))


def keys() -> KeyBindings:
    """Enter sends unless a backslash stands before it, Alt-Enter doesn't, Ctrl-C clears."""
    from prompt_toolkit.key_binding import KeyBindings

    bindings = KeyBindings()
    bindings.add("enter")(enter)
    bindings.add("escape", "enter")(begin_line)
    bindings.add("c-c")(clear)
    return bindings


def enter(event: KeyPressEvent) -> None:
    """Send, or go on in a new line."""
    buffer = event.current_buffer
    if buffer.document.current_line_before_cursor.endswith("\\"):
        buffer.delete_before_cursor()
        begin_line(event)
    else:
        buffer.validate_and_handle()


def begin_line(event: KeyPressEvent) -> None:
    """A new line."""
    event.current_buffer.newline(copy_margin=False)


def clear(event: KeyPressEvent) -> None:
    """Forget what was typed."""
    event.current_buffer.reset()
