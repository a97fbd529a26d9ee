"""The pictures of a corpus: what is known of them before the tower sees them.

Input: paths and `data:` URLs as documents name them. Output: `CorpusPicture`s, without pixels: a
picture is opened once to be measured and hashed, and once more when its features are needed. What
is no picture, or lies on the network, is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from kimi_k3_mlx.errors import UsageError
from kimi_k3_mlx.vision.images import DATA_URL, WEB, from_data_url, open_image, shortened

if TYPE_CHECKING:
    from PIL.Image import Image

    from kimi_k3_vl.processing import ImageRules

Rules = Callable[[], "ImageRules"]
"""Gives the checkpoint's rules when the first picture is met; raises KimiError if it can't see."""


@dataclass(frozen=True)
class CorpusPicture:
    """A picture that stands in a document."""

    name: str = field(repr=False)
    """Its path, or `data:` URL."""
    sha256: str
    """Of the content of the file."""
    width: int
    height: int
    n_rows: int
    """Tokens that it takes in the prompt."""

    def image(self) -> Image:
        """The picture itself; raises UsageError if it is not the one that was measured."""
        image = open_image(self.name)
        if content_sha256(self.name) != self.sha256:
            raise UsageError(f"{shortened(self.name)} has changed since the corpus was read.")
        return image


class Album:
    """Looks at pictures, at each once, by the rules of a checkpoint."""

    def __init__(self, rules: Rules | None, seq_len: int) -> None:
        self._read_rules, self._seq_len = rules, seq_len
        self._known: dict[str, CorpusPicture] = {}

    @cached_property
    def rules(self) -> ImageRules:
        """What the checkpoint's preprocessor does."""
        if self._read_rules is None:
            raise UsageError("it has an image, but only text is read here.", "leave it out.")
        return self._read_rules()

    def picture(self, name: object, folder: Path | None) -> CorpusPicture:
        """The picture of that name; paths are relative to the folder, if there is one."""
        rules = self.rules  # who can't see says so before anything is opened
        if not isinstance(name, str):
            raise UsageError(f"an image is a {type(name).__name__}, no path and no data: URL.")
        if not DATA_URL.match(name) and not WEB.match(name):
            if folder is None:
                raise UsageError(
                    f"the image {shortened(name)} is a path, and a data set has no folder.",
                    "save its rows as a .jsonl file beside the images.",
                )
            name = str(folder / Path(name).expanduser())
        if name not in self._known:
            self._known[name] = self._measured(name, rules)
        return self._known[name]

    def _measured(self, name: str, rules: ImageRules) -> CorpusPicture:
        width, height = open_image(name).size
        n_rows = rules.n_tokens(width, height)
        if n_rows > self._seq_len:
            raise UsageError(
                f"{shortened(name)} takes {n_rows:,} tokens; a sequence has {self._seq_len:,}.",
                f"--seq-len {n_rows + 64}, or make the image smaller.",
            )
        return CorpusPicture(name, content_sha256(name), width, height, n_rows)


def content_sha256(name: str) -> str:
    """Hash of a file's bytes, whether it is named by a path or is a `data:` URL."""
    if DATA_URL.match(name):
        return hashlib.sha256(from_data_url(name)).hexdigest()
    with Path(name).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
