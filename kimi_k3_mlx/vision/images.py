"""Opens pictures that a user names: files, `data:` URLs, and web addresses where they are allowed.

Input: a name, or the bytes of a file. Output: a decoded PIL image, as it lies in the file: EXIF
orientation is not applied, as K3's own code doesn't. What is no still picture of a reasonable size
raises one sentence that names it. Nothing is fetched unless the caller says so.
"""

from __future__ import annotations

import base64
import binascii
import re
import struct
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from kimi_k3_mlx.chat.render import IMAGES
from kimi_k3_mlx.errors import HubError, KimiError, UsageError
from kimi_k3_mlx.units import format_bytes

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
"""What Pillow may try: no format that starts another program, as EPS does."""
MAX_DOWNLOAD = 64 << 20
SECONDS = 20
STILL = "MPO"
"""A JPEG with previews behind the picture, as phones write it: no animation."""
DATA_URL = re.compile(r"data:[^,]*,", re.IGNORECASE)
WEB = re.compile(r"https?://", re.IGNORECASE)
BROKEN = (OSError, SyntaxError, ValueError, EOFError, LookupError, TypeError, struct.error)
"""What Pillow's readers raise over damaged files."""
SAVE_AS = "save it as a PNG or JPEG and try again."


def open_image(name: str | Path | bytes, *, allow_web: bool = False) -> Image:
    """The decoded picture of a path, a `data:` URL, a web address or the content of a file.

    Raises UsageError for a name that can't be followed, HubError when a web address doesn't
    answer, and KimiError for what is no still picture, or more pixels than Pillow's own limit.
    """
    if isinstance(name, bytes):
        return decode(BytesIO(name), "the image")
    text = str(name)
    if DATA_URL.match(text):
        return decode(BytesIO(from_data_url(text)), f"the image {shortened(text)}")
    if WEB.match(text):
        if not allow_web:
            raise UsageError(
                f"{text} is a web address, and nothing is fetched from the network.",
                f"curl -LO '{text}' and give the file.",
            )
        return decode(BytesIO(download(text)), text)
    return from_file(Path(text).expanduser())


def image_names(messages: Iterable[Any]) -> Iterator[Any]:
    """What the image parts of a conversation name, in order; nothing is checked."""
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if kind in IMAGES:
                named = part.get(kind)
                yield named.get("url") if isinstance(named, dict) else named


def from_file(path: Path) -> Image:
    """The picture in a file."""
    try:
        if path.is_dir():
            raise UsageError(f"{path} is a folder, not an image.")
        if path.stat().st_size == 0:
            raise KimiError(f"{path} is empty: 0 bytes.")
        with path.open("rb") as file:
            return decode(file, str(path))
    except OSError as error:
        raise UsageError(f"{shortened(str(path))}: {error.strerror}.") from error


def from_data_url(url: str) -> bytes:
    """The content of `data:image/png;base64,…`."""
    head, _, body = url.partition(",")
    if not head.lower().endswith(";base64"):
        raise UsageError(f"the image {shortened(url)} is not base64.", "data:image/png;base64,…")
    try:
        return base64.b64decode("".join(body.split()), validate=True)
    except binascii.Error as error:
        raise UsageError(f"the image {shortened(url)} is no base64: {error}.") from error


def shortened(text: str) -> str:
    """As much of a name as fits a sentence."""
    return text if len(text) <= 200 else f"{text[:60]}… ({len(text):,} characters)"


def download(url: str) -> bytes:
    """The content of a web address; raises HubError when it doesn't come or is too much."""
    try:
        with urllib.request.urlopen(url, timeout=SECONDS) as answer:
            content: bytes = answer.read(MAX_DOWNLOAD + 1)
    except (OSError, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise HubError(f"{url} could not be fetched: {reason}.") from error
    if len(content) > MAX_DOWNLOAD:
        raise HubError(f"{url} has more than {format_bytes(MAX_DOWNLOAD)}.")
    return content


def decode(file: BinaryIO, name: str) -> Image:
    """The picture in the bytes of an open file."""
    require_pillow()
    from PIL import Image, UnidentifiedImageError

    with explained(name), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            image = Image.open(file, formats=FORMATS)
        except UnidentifiedImageError as error:
            kinds = ", ".join(FORMATS)
            raise KimiError(f"{name} is no image of a known kind ({kinds}).", SAVE_AS) from error
        except Image.DecompressionBombError as error:
            reason = str(error).partition(",")[0]
            raise KimiError(
                f"{name} is too large: {reason}.",
                "make it smaller: K3 sees 7,168 pixels a side at most.",
            ) from error
        if getattr(image, "is_animated", False) and image.format != STILL:
            raise KimiError(
                f"{name} has more than one frame; K3 takes still images.", "give one frame of it."
            )
        image.load()
    return image


@contextmanager
def explained(name: str) -> Iterator[None]:
    """One sentence for whatever Pillow raises over a damaged file."""
    try:
        yield
    except BROKEN as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise KimiError(f"{name} is a damaged image: {reason}.", SAVE_AS) from error


def require_pillow() -> None:
    """Say what to install, instead of an ImportError."""
    if find_spec("PIL") is None:
        raise UsageError("images need Pillow.", 'pip install "kimi-k3-mlx[vision]"')
