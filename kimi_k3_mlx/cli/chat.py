"""Talk with a build in the terminal; it keeps its cache, so that a turn computes only what is new.

Enter sends; a line that ends in a backslash goes on, and so does pasted text. Ctrl-C stops an
answer, which stays as it is; Ctrl-D ends the chat. Without a terminal, stdin is one message.
Answers go to stdout, thoughts and numbers to stderr.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimi_k3_mlx.cli._options import Parser, common_options, folder
from kimi_k3_mlx.cli._output import progress, report_error, say
from kimi_k3_mlx.cli._terminal import Interrupt, Screen, colours, input_session
from kimi_k3_mlx.cli.generate import memory_options, read_prompt, sampling_options
from kimi_k3_mlx.errors import KimiError, UsageError

if TYPE_CHECKING:
    from kimi_k3_mlx.runtime.chat import Chat

USAGE = "--model DIR [options]"
EXAMPLES = (
    "kimi-k3 chat --model ./Kimi-K3-mlx",
    "kimi-k3 chat --model ./Kimi-K3-mlx --temp 1 --top-p 0.95 --effort low --save talk",
    "kimi-k3 chat --model ./Kimi-K3-mlx --resume talk --save talk",
    "kimi-k3 chat --model ./Kimi-K3-mlx -q < question.txt > answer.txt",
)
HELP = """\
/help          this
/image FILE    show a picture with the next message; a picture's path in a message does the same
/undo          take back the last question and its answer
/reset         begin anew; the system prompt stays
/system TEXT   begin anew with another system prompt; without TEXT with none
/save FILE     write the conversation and its cache, for --resume
Enter sends, Alt-Enter or a backslash before Enter begins a new line. Ctrl-D ends the chat."""
COMMAND = re.compile(r"/([a-z]+)(?:\s+(.*))?", re.DOTALL)
WORD = re.compile(r"""'([^'\n]+)'|"([^"\n]+)"|((?:\\.|\S)+)""")
IMAGES = (".avif", ".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
SUFFIX = ".safetensors"
LONG = 1024
"""With more tokens to compute, it is shown how far it is."""


def add_options(parser: Parser) -> None:
    """Declare the options; names are those of mlx_lm.chat."""
    group = parser.add_argument_group("model and conversation")
    group.add_argument(
        "--model", metavar="DIR", type=folder, required=True, help="folder of a build"
    )
    group.add_argument("--system-prompt", metavar="TEXT", help="what to tell it beforehand")
    group.add_argument(
        "--thinking", action=argparse.BooleanOptionalAction, help="let it think first (default)"
    )
    group.add_argument("--effort", metavar="E", help="how much to think: low, high or max")
    group.add_argument(
        "--save", metavar="FILE", type=safetensors, help="write the conversation at its end"
    )
    group.add_argument(
        "--resume", metavar="FILE", type=safetensors, help="go on with a written conversation"
    )
    sampling_options(parser, max_tokens=8192)
    group = parser.add_argument_group("speed")
    group.add_argument(
        "--lookup",
        action=argparse.BooleanOptionalAction,
        help="draft from the conversation; without either: only when --temp is 0",
    )
    memory_options(parser.add_argument_group("machine"))
    common_options(parser, json=False)


def safetensors(text: str) -> Path:
    """A file's path, which ends as mlx wants it."""
    return Path(text if text.endswith(SUFFIX) else f"{text}{SUFFIX}")


def run(args: argparse.Namespace) -> None:
    """Check, load, talk, save."""
    alone = not sys.stdin.isatty()
    question = read_prompt("-").removesuffix("\n") if alone else ""
    check(args)
    # transformers warns that it does not know K3; only its tokenizer is used.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from kimi_k3_mlx.runtime.wiring import wiring

    with wiring(not args.no_wire):
        chat = opened(args)
        screen = Screen(args.quiet, colours(sys.stderr))
        try:
            if alone:
                answer(chat, screen, question)
            else:
                Talk(chat, screen, args).run()
        finally:
            # Also after a second Ctrl-C: what was said before it is whole.
            if args.save and chat.messages:
                chat.save(args.save)
                screen.note(f"saved {args.save}")


def check(args: argparse.Namespace) -> None:
    """Refuse what can't be, before anything is loaded."""
    from kimi_k3_mlx.chat import EFFORTS

    if args.effort and args.effort not in EFFORTS:
        raise UsageError(f"--effort {args.effort!r} is none of {', '.join(EFFORTS)}.")
    if args.effort and args.thinking is False:
        raise UsageError("--effort is for thinking.", "leave it out, or --no-thinking.")
    if args.resume and args.system_prompt is not None:
        raise UsageError(
            "a resumed conversation has its system prompt already.", "leave out --system-prompt."
        )
    if args.save:
        check_place(args.save)


def check_place(path: Path) -> None:
    """Refuse a file that can't be written, before there is something to lose."""
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise UsageError(f"{path} can't be written.", "name a file in a folder of yours.")


def opened(args: argparse.Namespace) -> Chat:
    """The build with an empty or a resumed conversation; a wrong file is found before weights."""
    from kimi_k3_mlx.runtime.build import check_build
    from kimi_k3_mlx.runtime.chat import Chat, Settings
    from kimi_k3_mlx.runtime.generate import Sampling
    from kimi_k3_mlx.runtime.load import load
    from kimi_k3_mlx.runtime.saved_chat import read_saved

    check_build(args.model)
    saved = read_saved(args.resume, args.model) if args.resume else None
    settings = Settings(
        Sampling(args.max_tokens, args.temp, args.top_p, args.top_k, args.min_p, args.seed),
        args.thinking if args.thinking is not None else not saved or saved.thinking,
        args.effort or (saved.effort if saved else None),
        args.temp == 0 if args.lookup is None else args.lookup,
        not args.no_wire,
    )
    with progress(args.quiet) as shown:
        chat = Chat(load(args.model, progress=shown, force=args.force), args.model, settings)
    if saved:
        chat.resume(saved)
    elif args.system_prompt:
        chat.set_system(args.system_prompt)
    return chat


class Talk:
    """A chat at the terminal."""

    def __init__(self, chat: Chat, screen: Screen, args: argparse.Namespace) -> None:
        self.chat, self.screen = chat, screen
        self.images: list[Path] = []
        """Pictures for the next message."""
        screen.note(f"{args.model}: /help lists commands, Ctrl-C stops an answer, Ctrl-D ends")
        if args.resume:
            screen.note(f"{len(chat.messages)} messages, {context(chat)}")

    def run(self) -> None:
        """Until Ctrl-D."""
        session = input_session(self.screen)
        while True:
            try:
                text = session.prompt()
            except EOFError:
                return
            try:
                self.take(text)
            except (KimiError, OSError) as error:
                told = error if isinstance(error, KimiError) else KimiError(f"{error}.")
                report_error(told)

    def take(self, text: str) -> None:
        """A command, or a message."""
        match = COMMAND.fullmatch(text.strip())
        if match:
            self.command(match[1], (match[2] or "").strip())
            return
        if not text.strip():
            return
        images = [*self.images, *self.named_images(text)]
        with Interrupt() as interrupt:
            answer(self.chat, self.screen, text, images, interrupt)
        if self.chat.turn is None:
            self.screen.note("stopped before the answer began; the message was taken back")
        else:
            self.images = []

    def command(self, name: str, value: str) -> None:
        """What `/name value` asks for."""
        chat = self.chat
        if name == "help":
            say(HELP)
            return
        if name == "image":
            self.attach(Path(value).expanduser())
        elif name == "save":
            if not value:
                raise UsageError("/save needs a file.", "/save talk")
            path = safetensors(value)
            chat.save(path)
            self.screen.note(f"saved {path}")
        elif name == "undo":
            done = chat.undo()
            self.screen.note(context(chat) if done else "there is no answer to take back")
        elif name == "reset":
            chat.reset()
            self.screen.note(context(chat))
        elif name == "system":
            chat.set_system(value)
            self.screen.note(context(chat))
        else:
            raise UsageError(f"there is no command /{name}.", "/help; a blank before / sends it.")

    def attach(self, path: Path) -> None:
        """A picture for the next message."""
        from kimi_k3_mlx.vision.images import open_image

        if not self.chat.can_see:
            raise UsageError("this build has no vision: it can't see pictures.")
        size = "{}x{}".format(*open_image(path).size)
        self.images.append(path)
        self.screen.note(f"picture {path}, {size}, goes with the next message")

    def named_images(self, text: str) -> list[Path]:
        """Pictures whose paths are words of a message, as a terminal writes a dropped file."""
        words = ("".join(match.groups("")) for match in WORD.finditer(text))
        names = [re.sub(r"\\(.)", r"\1", word) for word in words if word.lower().endswith(IMAGES)]
        paths = [os.path.expanduser(name) for name in names]
        found = [Path(path) for path in paths if os.path.isfile(path)]
        if found and not self.chat.can_see:
            self.screen.note("this build has no vision: the picture is not shown, only its name")
            return []
        for path in found:
            self.screen.note(f"picture {path}")
        return found


def answer(
    chat: Chat,
    screen: Screen,
    text: str,
    images: list[Path] | None = None,
    stopped: Any = bool,
) -> None:
    """Ask, show the answer while it comes, and what it cost."""
    from kimi_k3_mlx.runtime.events import BrokenCall, Content, Reasoning

    def prefill(done: int, total: int) -> None:
        if done < total and total > LONG:
            screen.status(f"read {done:,} of {total:,} tokens")

    # Closed at once, so that an interruption leaves no question without its answer.
    with closing(chat.ask(text, images or (), stopped, prefill)) as events:
        for event in events:
            if isinstance(event, Reasoning):
                screen.think(event.text)
            elif isinstance(event, Content):
                screen.answer(event.text)
            elif isinstance(event, BrokenCall):
                screen.think(f"\n[a call that can't be made: {event.reason}]\n{event.text}\n")
    screen.end()
    if chat.turn:
        screen.note(cost(chat))


def cost(chat: Chat) -> str:
    """What the last answer cost; a speed only if the weights were wired."""
    turn = chat.turn
    if turn is None:
        return ""
    speed = "" if turn.tokens_per_second is None else f", {turn.tokens_per_second:.1f} tok/s"
    ends = {"stop": "", "length": ", cut at --max-tokens", "interrupted": ", stopped"}
    return f"{turn.n_generated:,} tokens{speed}{ends[turn.finish]}; {context(chat)}"


def context(chat: Chat) -> str:
    """How much of the context is used."""
    longest = chat.build.config["text_config"].get("max_position_embeddings")
    of = f" of {longest:,}" if longest else ""
    return f"context {len(chat.all_keys):,}{of} tokens"
