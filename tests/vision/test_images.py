"""Opening pictures: files, data URLs, web addresses, and one sentence for everything else."""

import base64
import contextlib
import io
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest
from PIL import Image

from kimi_k3_mlx.errors import HubError, KimiError, UsageError
from kimi_k3_mlx.vision import images
from kimi_k3_mlx.vision.images import open_image

PIXELS = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)


def content(kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    Image.fromarray(PIXELS).save(file, kind, **options)
    return file.getvalue()


def data_url(raw: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(raw).decode()


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM", "GIF", "JPEG", "WEBP", "JPEG2000"])
def test_files_of_every_kind(kind, tmp_path):
    path = tmp_path / "picture"
    path.write_bytes(content(kind))
    image = open_image(path)
    assert (image.format, image.size) == (kind, (30, 20))
    if kind in ("PNG", "BMP", "TIFF", "PPM"):
        assert np.array_equal(np.asarray(image), PIXELS)


def test_bytes_and_data_urls_are_the_same_picture():
    for name in (content(), data_url(content()), data_url(content()).replace("data:", "DATA:")):
        assert np.array_equal(np.asarray(open_image(name)), PIXELS)


def test_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.png").write_bytes(content())
    assert open_image("~/a.png").size == (30, 20)


def animation(n_frames: int) -> bytes:
    """A GIF whose frames differ by a pixel."""
    frames = [Image.new("L", (4, 1)) for _ in range(2)]
    frames[1].putpixel((0, 0), 255)
    file = io.BytesIO()
    frames[0].save(file, "GIF", save_all=True, append_images=[frames[1]], duration=50)
    head, frame = split_gif(file.getvalue())
    return head + frame * (n_frames - 1) + b";"


def split_gif(raw: bytes) -> tuple[bytes, bytes]:
    """Everything up to the second frame, and that frame."""
    second = raw.index(b"\x21\xf9", raw.index(b"\x21\xf9") + 1)
    return raw[:second], raw[second:-1]


def png_of(width: int, height: int) -> bytes:
    """A header that promises any size, over hardly any data."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


BAD = {
    "empty": (b"", "is empty: 0 bytes"),
    "text": (b"Dear Sir or Madam, " * 9, "is no image of a known kind (AVIF, BMP, GIF"),
    "zeros": (bytes(4000), "is no image of a known kind"),
    "script": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is no image of a known kind"),
    "cut": (content()[:600], "is a damaged image: "),
    "cut jpeg": (content("JPEG")[:-300], "is a damaged image: "),
    "cut tiff": (content("TIFF")[:300], "is a damaged image: "),
    "two frames": (animation(2), "has more than one frame"),
    "10,000 frames": (animation(10_000), "has more than one frame"),
    "large": (png_of(15_000, 15_000), "is too large: Image size (225000000 pixels) exceeds"),
    "bomb": (png_of(60_000, 60_000), "is too large: Image size (3600000000 pixels) exceeds"),
    "no width": (png_of(0, 9), "image"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_still_picture_is_refused(case, tmp_path, recwarn):
    raw, words = BAD[case]
    path = tmp_path / "picture.png"
    path.write_bytes(raw)
    began = time.process_time()
    with pytest.raises(KimiError) as caught:
        open_image(path)
    assert time.process_time() - began < 1
    assert caught.value.message.startswith(str(path))
    assert words in caught.value.message
    assert "\n" not in caught.value.message
    assert not recwarn.list


def test_previews_behind_a_photograph_are_no_animation(tmp_path):
    picture = Image.fromarray(PIXELS)
    picture.save(tmp_path / "a.jpg", "MPO", save_all=True, append_images=[picture])
    assert open_image(tmp_path / "a.jpg").format == "MPO"


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_file_is_a_picture_or_a_sentence(seed):
    """Bytes changed at random, in every kind: whatever Pillow raises is caught."""
    rng = np.random.default_rng(seed)
    kind = ("PNG", "JPEG", "TIFF", "GIF", "BMP", "WEBP", "JPEG2000", "PPM")[seed % 8]
    raw = np.frombuffer(content(kind), np.uint8)
    for _ in range(10):
        changed = raw.copy()
        changed[rng.integers(0, len(raw), 4)] = rng.integers(0, 256, 4)
        with contextlib.suppress(KimiError):
            open_image(changed[: rng.integers(1, len(raw) + 1)].tobytes())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere.png", "nowhere.png: No such file or directory"),
        ("x" * 5000, r"xxx… \(5,000 characters\): File name too long"),
        ("http://example.com/a.png", "is a web address, and nothing is fetched"),
        ("HTTPS://example.com/a.png", "is a web address, and nothing is fetched"),
        ("data:image/png,abc", "the image data:image/png,abc is not base64"),
        ("data:image/png;base64,a?b", "is no base64"),
        ("file:///etc/passwd", "No such file or directory"),
    ],
)
def test_names_that_lead_nowhere(name, words):
    with pytest.raises(UsageError, match=words):
        open_image(name)


def test_a_folder_is_no_picture(tmp_path):
    with pytest.raises(UsageError, match="is a folder, not an image"):
        open_image(tmp_path)


def test_a_long_data_url_is_not_repeated():
    with pytest.raises(KimiError) as caught:
        open_image(data_url(b"no image" * 1000))
    assert len(caught.value.message) < 300


def test_without_pillow_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(images, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="images need Pillow") as caught:
        open_image(content())
    assert "pip install" in caught.value.hint


class Site(BaseHTTPRequestHandler):
    """A picture at /a.png, nothing elsewhere."""

    asked: list[str] = []  # noqa: RUF012

    def do_GET(self) -> None:
        self.asked.append(self.path)
        found = self.path == "/a.png"
        self.send_response(200 if found else 404)
        self.end_headers()
        self.wfile.write(content() if found else b"")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Site)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_the_web_only_when_allowed(site):
    Site.asked.clear()
    with pytest.raises(UsageError, match="nothing is fetched"):
        open_image(f"{site}/a.png")
    assert Site.asked == []
    image = open_image(f"{site}/a.png", allow_web=True)
    assert np.array_equal(np.asarray(image), PIXELS)


def test_a_web_address_that_does_not_answer(site, monkeypatch):
    with pytest.raises(HubError, match=r"b\.png could not be fetched: Not Found"):
        open_image(f"{site}/b.png", allow_web=True)
    with pytest.raises(HubError, match=r"could not be fetched: .*refused"):
        open_image("http://127.0.0.1:9/a.png", allow_web=True)
    monkeypatch.setattr(images, "MAX_DOWNLOAD", 100)
    with pytest.raises(HubError, match="has more than 100 B"):
        open_image(f"{site}/a.png", allow_web=True)
