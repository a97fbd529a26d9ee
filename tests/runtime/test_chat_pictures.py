"""Pictures in a conversation: seen once, never taken for another, missed only when needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kimi_k3_mlx.errors import KimiError
from kimi_k3_mlx.runtime.chat import PICTURE, Chat
from kimi_k3_mlx.runtime.load import Loaded, load
from kimi_k3_mlx.runtime.saved_chat import read_saved
from tests.runtime.scripted import scripted
from tests.runtime.test_chat import FIRST, SECOND, SETTINGS, ask, following, near


@pytest.fixture(scope="module")
def seeing(tiny_source: Path) -> Loaded:
    return load(tiny_source)


def picture(path: Path, seed: int) -> Path:
    pixels = np.random.default_rng(seed).integers(0, 256, (56, 84, 3), np.uint8)
    Image.fromarray(pixels).save(path)
    return path


@pytest.mark.parametrize("lookup", [False, True])
def test_a_picture_is_seen_once_and_taken_for_no_other(
    seeing: Loaded, tiny_source: Path, tmp_path: Path, lookup: bool
) -> None:
    one, other = picture(tmp_path / "a.png", 1), picture(tmp_path / "b.png", 2)
    opening = Chat(seeing, tiny_source, SETTINGS).opening
    build = scripted(seeing, opening, FIRST, SECOND)

    def chat() -> Chat:
        return Chat(build, tiny_source, replace(SETTINGS, lookup=lookup))

    first = chat()
    assert ask(first, "Look", [one]).content == "Hello."
    assert sum(key >= PICTURE for key in first.keys) == 6
    n_pictured = len(first.keys)
    ask(first, "More")
    assert first.turn is not None
    assert first.turn.n_cached == n_pictured
    first.undo()
    first.undo()
    ask(first, "Look", [other])
    assert first.turn.n_cached < 20, "nothing of the first picture is used"
    cold = chat()
    ask(cold, "Look", [other])
    assert near(following(first), following(cold))
    assert not near(following(first), following(one_picture(chat(), one)))


def one_picture(chat: Chat, path: Path) -> Chat:
    ask(chat, "Look", [path])
    return chat


def test_a_picture_in_a_resumed_conversation(
    seeing: Loaded, tiny_source: Path, tmp_path: Path
) -> None:
    """The cache knows it; the file is needed again only when the cache is not."""
    path, file = picture(tmp_path / "a.png", 1), tmp_path / "talk.safetensors"
    opening = Chat(seeing, tiny_source, SETTINGS).opening
    build = scripted(seeing, opening, FIRST, SECOND)
    chat = one_picture(Chat(build, tiny_source, SETTINGS), path)
    chat.save(file)
    other = Chat(scripted(seeing, opening, SECOND, SECOND), tiny_source, SETTINGS)
    other.resume(read_saved(file, tiny_source))
    path.unlink()
    assert ask(other, "More").content == "Second."
    other.hold(None, [])
    other.kept.entries.clear()
    with pytest.raises(KimiError, match="No such file"):
        ask(other, "More")
    picture(path, 2)
    with pytest.raises(KimiError, match="not the picture any more that was shown"):
        ask(other, "More")
    picture(path, 1)
    ask(chat, "More")
    assert ask(other, "More").content == "Second."
