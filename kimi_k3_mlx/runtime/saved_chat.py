"""A conversation in a file: its messages, and the prompt cache to go on from.

Input and output: `Saved`, one safetensors file of mlx-lm's `save_prompt_cache`; the messages are
JSON in its metadata. A file of another build is refused. Reading one reads no array.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

from kimi_k3_mlx.errors import KimiError, UsageError
from kimi_k3_mlx.runtime.snapshots import UNREADABLE, fingerprint
from kimi_k3_mlx.schema import Json
from kimi_k3_mlx.tensors.writer import sync

SUFFIX = ".safetensors"


class Message(NamedTuple):
    """A message as chat APIs write it, and the keys of its tokens (see `runtime.chat`)."""

    value: Json
    keys: list[int]


class Saved(NamedTuple):
    """A conversation."""

    messages: list[Message]
    thinking: bool
    effort: str | None
    keys: list[int]
    """Of the tokens that the caches hold."""
    caches: list[Any]


def write_saved(path: Path, saved: Saved, build: str) -> None:
    """Write it, whole or not at all; `build` is the fingerprint. Raises KimiError or OSError."""
    talk = saved._asdict() | {"version": 1}
    del talk["caches"]
    partial = path.with_name(f".{path.name}.partial{SUFFIX}")
    try:
        said = {"build": build, "conversation": json.dumps(talk)}
        save_prompt_cache(str(partial), saved.caches, said)
        with partial.open("r+b") as file:
            sync(file.fileno())
        os.replace(partial, path)
    except RuntimeError as error:
        raise KimiError(f"{path} can't be written: {error}.") from error
    finally:
        partial.unlink(missing_ok=True)


def read_saved(path: Path, folder: Path) -> Saved:
    """The conversation in a file.

    Raises UsageError for a file that is none, or of another build than the one in `folder`.
    """
    if not path.is_file():
        raise UsageError(f"{path} is no file.", "give the file that /save or --save wrote.")
    try:
        caches, said = load_prompt_cache(str(path), return_metadata=True)
        talk = json.loads(said["conversation"])
        messages = [Message(*item) for item in talk["messages"]]
        saved = Saved(messages, talk["thinking"], talk["effort"], talk["keys"], list(caches))
        build = said["build"]
    except UNREADABLE as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise UsageError(f"{path} is no saved conversation: {reason}.") from error
    if build != fingerprint(folder):
        raise UsageError(
            f"{path} was saved with another build than {folder}, or by another version of this "
            "program: its cache can't be used.",
            "give --model the build that it was saved with.",
        )
    return saved
