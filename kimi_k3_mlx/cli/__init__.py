"""The command line: finds the verb, runs it, turns errors into one sentence and an exit code.

Input: arguments. Output: an exit code (0 done, 1 failed, 2 usage, 3 verification mismatch, 4 does
not fit, 5 Hub or network, 130 interrupted). A verb is a module of this package with `USAGE`,
`EXAMPLES`, `add_options(parser)` and `run(args)`; it computes nothing and is imported only when
it is asked for, so that `--help` stays fast.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import traceback
from io import TextIOWrapper
from types import ModuleType, TracebackType
from typing import NamedTuple

from kimi_k3_mlx.cli._options import Parser, nearest
from kimi_k3_mlx.cli._output import report_error
from kimi_k3_mlx.errors import InterruptedBuildError, KimiError, UsageError

PROGRAM = "kimi-k3"


class Verb(NamedTuple):
    """A verb's module and what it does, in one line."""

    module: str
    summary: str


VERBS = {
    "demo": Verb("demo", "the whole way, on the small trained model that comes along"),
    "doctor": Verb("doctor", "check this machine, and a build on it"),
    "fit": Verb("fit", "say which builds a Mac runs, and how fast at most"),
    "wired-limit": Verb("wired_limit", "work out and set the memory that the GPU may wire"),
    "download": Verb("download", "fetch a checkpoint from the Hub"),
    "inspect": Verb("inspect", "show what a checkpoint holds, from its headers alone"),
    "estimate": Verb("estimate", "say what a build would need, before anything is written"),
    "convert": Verb("convert", "write an MLX build of a source checkpoint"),
    "verify": Verb("verify", "compare a build with its source, or with its own manifest"),
    "calibrate": Verb("calibrate", "measure which experts a corpus needs"),
    "stats": Verb("stats", "add up statistics of calibration runs, or show them"),
    "plan": Verb("plan", "choose which experts stay, from measured statistics"),
    "report": Verb("report", "show what plans retain, source by source, with figures"),
    "compare": Verb("compare", "measure on held-out text what plans cost, before building any"),
    "prune": Verb("prune", "write a pruned checkpoint in Moonshot's layout, for vLLM and SGLang"),
    "generate": Verb("generate", "continue a prompt with a build"),
    "chat": Verb("chat", "talk with a build in the terminal"),
    "server": Verb("server", "answer programs that speak OpenAI's chat completions"),
    "benchmark": Verb("benchmark", "time prefill and decoding, context by context"),
    "perplexity": Verb("perplexity", "measure a build on text, source by source"),
    "probe": Verb("probe", "count loops and texts without end in what a build writes"),
}


def main(argv: list[str] | None = None) -> int:
    """Run the command line; without `argv`, as a program with the process's own arguments."""
    try:
        if argv is None:
            become_program()
            argv = sys.argv[1:]
        return dispatch(argv)
    except KimiError as error:
        show_traceback()
        report_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        report_error(InterruptedBuildError("interrupted.", "run the same command again."))
        return 130
    except BrokenPipeError:
        # The reader of our output has gone: nothing is left to say, not even at interpreter exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        show_traceback()
        report_error(describe(error))
        return 1


def become_program() -> None:
    """Settings of the whole process, which a caller of `main` keeps to itself."""
    sys.excepthook = report_defect
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # A terminal that can't show a character should show the others.
            stream.reconfigure(errors="replace")


def open_closed_streams() -> None:
    """Refuse a closed stdout; a closed stdin or stderr becomes an empty one.

    Python sets such a stream to None, and the next file that is opened takes its number.
    """
    stdout_is_closed = sys.stdout is None
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    if stdout_is_closed:
        raise KimiError("standard output is closed.", "send it somewhere: > /dev/null")


def dispatch(argv: list[str]) -> int:
    """Run the verb that the first argument names."""
    if not argv:
        raise UsageError(f"a verb is missing: {', '.join(VERBS)}.", f"{PROGRAM} --help")
    name, rest = argv[0], argv[1:]
    if name in {"-h", "--help", "help"}:
        sys.stdout.write(overview())
        return 0
    if name == "--version":
        sys.stdout.write(f"{PROGRAM} {version()}\n")
        return 0
    if name not in VERBS:
        kind = "option" if name.startswith("-") else "verb"
        raise UsageError(f"unknown {kind} {name!r}.", nearest(name, VERBS, f"{PROGRAM} --help"))
    module = load_verb(name)
    parser = parser_of(name, module)
    if asks_for_help(rest):
        sys.stdout.write(parser.format_help())
        return 0
    code = module.run(parser.parse(rest))
    sys.stdout.flush()
    return int(code or 0)


def asks_for_help(argv: list[str]) -> bool:
    """Whether -h or --help stands among a verb's arguments."""
    options = argv[: argv.index("--")] if "--" in argv else argv
    return bool({"-h", "--help"} & set(options))


def load_verb(name: str) -> ModuleType:
    """Import the module of a verb."""
    return importlib.import_module(f"{__name__}.{VERBS[name].module}")


def parser_of(name: str, module: ModuleType | None = None) -> Parser:
    """The parser of a verb, with its options and examples."""
    module = module or load_verb(name)
    parser = Parser(
        prog=f"{PROGRAM} {name}",
        usage=f"{PROGRAM} {name} {module.USAGE}",
        description=module.__doc__,
        examples=module.EXAMPLES,
    )
    module.add_options(parser)
    return parser


def overview() -> str:
    """The text of `kimi-k3 --help`."""
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {name:{width}}  {verb.summary}" for name, verb in VERBS.items())
    return (
        f"usage: {PROGRAM} VERB [options]\n\n"
        "Choose what to keep of moonshotai/Kimi-K3, convert it for MLX, check it, run it.\n\n"
        f"verbs:\n{verbs}\n\n"
        "options:\n  -h, --help  show this text, or after a verb the verb's options\n"
        "  --version   show the version\n\n"
        f"examples:\n  {PROGRAM} demo\n  {PROGRAM} convert --help\n"
    )


def version() -> str:
    """The version of the package."""
    from kimi_k3_mlx import __version__

    return __version__


def debugging() -> bool:
    """Whether the user asked for tracebacks."""
    return os.environ.get("KIMI_K3_DEBUG", "") not in {"", "0"}


def show_traceback() -> None:
    """Print the exception being handled, if the user asked for tracebacks."""
    if debugging():
        traceback.print_exc()


def describe(error: OSError) -> KimiError:
    """The system's refusal as one sentence."""
    where = f"{error.filename}: " if error.filename else ""
    return KimiError(f"{where}{error.strerror or error}.")


def report_defect(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """An exception that nobody expected is a defect of ours: say so, and how to see more."""
    if debugging():
        traceback.print_exception(kind, error, trace)
    hint = "run it again with KIMI_K3_DEBUG=1 and report what it prints."
    report_error(KimiError(f"unexpected {kind.__name__}: {error}", hint))
