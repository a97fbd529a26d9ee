"""Progress: one redrawn line on a terminal, one line per layer elsewhere, honest rates."""

from __future__ import annotations

from io import StringIO

import pytest

from kimi_k3_mlx.cli._output import Progress, Silence, progress, table


class Terminal(StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def shown_on(stream: StringIO, ticks: list[tuple[float, int, str]], total: int = 1000) -> Progress:
    """Feed (time, bytes done, what) to a progress display."""
    times = iter([tick[0] for tick in ticks])
    shown = Progress(stream, clock=lambda: next(times), memory=lambda: 21_000_000_000)
    for _, done, what in ticks:
        shown(done, total, what)
    return shown


TICKS = [
    (0.0, 0, "layer 1/2"),
    (1.0, 250, "layer 1/2"),
    (2.0, 500, "layer 2/2"),
    (4.0, 1000, "layer 2/2"),
]


def test_elsewhere_each_layer_gets_one_line() -> None:
    stream = StringIO()
    shown_on(stream, TICKS).close()
    assert stream.getvalue() == (
        "layer 1/2  0 B/1.00 kB  rss 21.0 GB\n"
        "layer 2/2  500 B/1.00 kB  250 B/s  eta 0:00:02  rss 21.0 GB\n"
    )


def test_a_terminal_gets_one_line_redrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    stream = Terminal()
    shown = shown_on(stream, TICKS)
    text = stream.getvalue()
    assert "\n" not in text
    assert [line.split("  ")[1].strip() for line in text.split("\r")[1:]] == [
        "0 B/1.00 kB",
        "250 B/1.00 kB",
        "500 B/1.00 kB",
        "1.00 kB/1.00 kB",
    ]
    shown.close()
    assert stream.getvalue().endswith("\n")


def test_redrawing_is_rare_but_never_misses_the_end() -> None:
    ticks = [(i / 1000, i, "layer 1/1") for i in range(1001)]
    stream = Terminal()
    shown_on(stream, ticks)
    assert 10 <= stream.getvalue().count("\r") <= 13
    assert "1.00 kB/1.00 kB" in stream.getvalue().split("\r")[-1]


def test_a_line_never_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    stream = Terminal()
    shown_on(stream, TICKS)
    assert all(len(line) <= 19 for line in stream.getvalue().split("\r"))


def test_a_shorter_line_wipes_a_longer_one() -> None:
    stream = Terminal()
    shown_on(stream, [(0.0, 0, "a long name of a layer"), (1.0, 0, "short")])
    first, second = stream.getvalue().split("\r")[1:]
    assert len(second) == len(first)


def test_what_an_earlier_run_wrote_does_not_count_as_speed() -> None:
    stream = StringIO()
    shown_on(stream, [(0.0, 900, "layer 1/2"), (10.0, 950, "layer 2/2")])
    assert "  5 B/s  eta 0:00:10  " in stream.getvalue()


def test_quiet_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(quiet=True) as shown:
        shown(1, 2, "layer 1/1")
    assert isinstance(shown, Silence)
    assert capsys.readouterr() == ("", "")


def test_tables_line_up() -> None:
    assert table([("a", "bb"), ("ccc", "d")]) == "a    bb\nccc  d"
