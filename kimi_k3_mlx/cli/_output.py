"""The one place that prints: data to stdout, talk, progress and errors to stderr.

With `--json`, stdout carries one JSON object and nothing else. Progress is one redrawn line on a
terminal, one line per layer or shard elsewhere, and nothing with `-q`.
"""

from __future__ import annotations

import json
import resource
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from typing import TextIO

from kimi_k3_mlx.errors import KimiError
from kimi_k3_mlx.units import format_bytes, format_duration, format_rate

REDRAW_SECONDS = 0.1


def say(text: str) -> None:
    """Talk to the user."""
    print(text, file=sys.stderr, flush=True)


def write(text: str, end: str = "\n") -> None:
    """Print data."""
    print(text, end=end, flush=True)


def write_json(value: object) -> None:
    """Print data for programs, in ASCII: any encoding of stdout leaves it valid JSON."""
    write(json.dumps(value, indent=2))


def report_error(error: KimiError) -> None:
    """Print an error as a fact and a hint. An interruption is no error."""
    kind = "" if error.exit_code == 130 else "error: "
    say(f"kimi-k3: {kind}{error.message}")
    if error.hint:
        say(f"hint: {error.hint}")


def table(rows: Sequence[tuple[str, ...]]) -> str:
    """Left-aligned columns, two blanks apart."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def peak_memory() -> int:
    """Most resident bytes that the process has held; macOS counts bytes, Linux KiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Progress:
    """Shows bytes done, rate and time left. Call it as often as you like."""

    def __init__(
        self,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        memory: Callable[[], int] = peak_memory,
    ) -> None:
        self._stream = stream or sys.stderr
        self._clock = clock
        self._memory = memory
        self._redraw = self._stream.isatty()
        self._begin: tuple[float, int] | None = None
        self._drawn_at = float("-inf")
        self._what = ""
        self._width = 0

    def __call__(self, done: int, total: int, what: str) -> None:
        """Take note of the bytes done and of what is at work, such as `layer 37/93`."""
        now = self._clock()
        if self._begin is None:
            self._begin = (now, done)
        last = done >= total
        if self._redraw:
            if last or what != self._what or now - self._drawn_at >= REDRAW_SECONDS:
                self._draw(self.line(done, total, what, now), now)
        elif what != self._what:
            print(self.line(done, total, what, now), file=self._stream, flush=True)
        self._what = what

    def line(self, done: int, total: int, what: str, now: float) -> str:
        """`layer 37/93  412 GB/1.561 TB  1.90 GB/s  eta 0:10:05  rss 21.0 MB`."""
        began_at, began_with = self._begin or (now, done)
        moved, seconds = done - began_with, now - began_at
        parts = [what, f"{format_bytes(done)}/{format_bytes(total)}"]
        if moved > 0 and seconds > 0:
            rate = moved / seconds
            parts += [format_rate(rate), f"eta {format_duration((total - done) / rate)}"]
        return "  ".join([*parts, f"rss {format_bytes(self._memory())}"])

    def close(self) -> None:
        """End the redrawn line, so that what follows starts on its own."""
        if self._width:
            print(file=self._stream, flush=True)
            self._width = 0

    def _draw(self, line: str, now: float) -> None:
        line = line[: shutil.get_terminal_size().columns - 1]
        print("\r" + line.ljust(self._width), end="", file=self._stream, flush=True)
        self._width, self._drawn_at = len(line), now

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Silence(Progress):
    """Progress that is not shown."""

    def __call__(self, done: int, total: int, what: str) -> None:
        """Ignore it."""


def progress(quiet: bool) -> Progress:
    """The progress display that the options ask for."""
    return Silence() if quiet else Progress()
