"""Pictures in a corpus: encoded as K3 does, tagged, hashed, never cut; what is none is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from kimi_k3_mlx.chat import Picture, encode_chat
from kimi_k3_mlx.errors import KimiError, UsageError
from kimi_k3_mlx.reap.corpus import Corpus, load_corpus, parse_specs
from kimi_k3_mlx.reap.pictures import CorpusPicture
from kimi_k3_mlx.reap.scripts import IMAGE, Tagged
from kimi_k3_mlx.reap.seen_text import find_overlap
from kimi_k3_mlx.runtime.vision import load_vision
from kimi_k3_mlx.tensors.local import LocalSource, open_source
from tests.reap.pictured import corpus_in, load, paint, rows, said, write
from tests.reap.test_corpus_files import FakeDatasets, fake
from tests.reap.test_corpus_scripts import one_byte_each
from tests.tiny_k3 import TinyConfig, write_json, write_source

__all__ = ["FakeDatasets", "fake"]

PART = {"type": "image", "image": "a.png"}
SIZES = {"one": [(84, 56)], "two": [(50, 50), (84, 56), (84, 56)], "pair": [(50, 50)]}
NOTE = "there are no images: vision experts are not measured"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> LocalSource:
    config = TinyConfig(layers=2, mla_layers=(1,), trunk_dtype="F32")
    return open_source(write_source(tmp_path_factory.mktemp("seen") / "source", config))


@pytest.fixture
def corpus(source: LocalSource, tmp_path: Path) -> Corpus:
    return corpus_in(tmp_path, source)


def tokens_of(corpus: Corpus) -> dict[str, list[int]]:
    return {corpus.documents[it.document]: it.tokens.tolist() for it in corpus.sequences}


def test_conversations_are_encoded_as_a_request_is(
    corpus: Corpus, source: LocalSource, tmp_path: Path
) -> None:
    """One placeholder for each picture, expanded afterwards, as the server does."""
    eyes = load_vision(source.path)
    for row in rows(tmp_path)[:2]:
        images = [Image.new("RGB", size) for size in SIZES[row["id"]]]
        pictures = [Picture(*image.size) for image in images]
        options = {"images": pictures, "add_generation_prompt": False}
        ids = encode_chat(one_byte_each(), row["messages"], **options)
        assert tokens_of(corpus)[row["id"]] == eyes.expanded(ids, images)


def test_a_pair_is_the_picture_and_the_text_after_it(corpus: Corpus) -> None:
    tokenizer = one_byte_each()
    names = ["<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>"]
    begin, content, pad, end = tokenizer.convert_tokens_to_ids(names)
    size, text = b"image 50x50", b"a square of noise"
    ids = [begin, *tokenizer.encode(size.decode()), content, pad, pad, pad, pad, end]
    assert tokens_of(corpus)["pair"] == [*ids, *tokenizer.encode(text.decode())]


def test_rows_of_pictures_have_a_script_of_their_own(corpus: Corpus) -> None:
    assert corpus.counts()["seen"]["image"] == 6 + (4 + 6 + 6) + 4 + 1
    pad = one_byte_each().convert_tokens_to_ids("<|media_pad|>")
    for sequence in corpus.sequences:
        assert np.array_equal(sequence.scripts == IMAGE, sequence.tokens == pad)
        sizes = [(it.width, it.height) for it in sequence.pictures]
        name = corpus.documents[sequence.document]
        assert sizes == SIZES.get(name, [(9, 20)] if name == "dot" else [])
    assert NOTE not in [warning.message for warning in corpus.warnings(8, 2)]
    assert not [it for it in corpus.warnings(8, 2) if "of the bytes are" in it.message]


def test_text_alone_still_says_that_there_are_no_images(source, tmp_path) -> None:
    spec = write(tmp_path / "a.jsonl", [{"text": "words", "image": None}])
    assert NOTE in [warning.message for warning in load(spec, source).warnings(8, 2)]


def test_a_picture_in_its_name_is_the_picture_in_the_file(corpus: Corpus) -> None:
    two = next(it for it in corpus.sequences if len(it.pictures) == 3)
    assert two.pictures[1].sha256 == two.pictures[2].sha256 != two.pictures[0].sha256
    assert np.array_equal(two.pictures[1].image(), two.pictures[2].image())


def test_the_hash_is_of_what_is_seen(source: LocalSource, tmp_path: Path) -> None:
    """Other folders, the same pictures: the same corpus. Another picture of the size: another."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one, other = (corpus_in(tmp_path / name, source) for name in "ab")
    assert one.sha256 == other.sha256
    paint(tmp_path / "b/pictures/square.png", 50, 50, seed=9)
    changed = load(str(tmp_path / "b/seen.jsonl"), source)
    assert changed.token_sha256 == other.token_sha256
    assert changed.sha256 != other.sha256
    with pytest.raises(UsageError, match=r"square\.png has changed since the corpus was read"):
        [it.image() for sequence in other.sequences for it in sequence.pictures]


@pytest.mark.parametrize("seq_len", range(20, 150, 7))
def test_pictures_are_never_cut(seq_len: int, source: LocalSource, tmp_path: Path) -> None:
    whole = {name: ids for name, ids in tokens_of(corpus_in(tmp_path, source)).items()}
    corpus = load(str(tmp_path / "seen.jsonl"), source, seq_len=seq_len)
    pad = one_byte_each().convert_tokens_to_ids("<|media_pad|>")
    for it in corpus.sequences:
        name = corpus.documents[it.document]
        assert len(it) <= seq_len
        assert np.count_nonzero(it.tokens == pad) == sum(p.n_rows for p in it.pictures)
        if name in ("one", "two"):  # the end of a chat, less than a picture shorter than allowed
            assert whole[name][-len(it) :] == it.tokens.tolist()
            assert len(it) > min(seq_len, len(whole[name])) - 6
        elif name in ("pair", "dot"):
            assert whole[name][: len(it)] == it.tokens.tolist()
    lost = corpus.left_out["seen"]["truncated"]
    assert lost == sum(map(len, whole.values())) - corpus.n_tokens


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4)), max_size=5), st.integers(0, 9))
def test_the_ends_of_a_document_have_whole_pictures(
    layout: list[tuple[int, int]], n_last: int
) -> None:
    """Of so many tokens of text before each picture, and after the last, whatever the limit."""
    owners = [owner for n, (text, rows) in enumerate(layout) for owner in [-1] * text + [n] * rows]
    owners += [-1] * n_last
    pictures = [CorpusPicture("", str(n), 1, 1, rows) for n, (_, rows) in enumerate(layout)]
    ids, zeros = np.array(owners, np.int32), np.zeros(len(owners), np.uint8)
    scripts = np.where(ids >= 0, IMAGE, 0).astype(np.uint8)
    whole = Tagged(ids, scripts, zeros, np.zeros(len(owners), np.int32), tuple(pictures))
    for limit in range(len(owners) + 1):
        for part, side in (
            (whole.head(limit), owners[:limit]),
            (whole.tail(limit), owners[len(owners) - limit :]),
        ):
            cut = {n for n in set(side) - {-1} if side.count(n) < layout[n][1]}
            kept = [owner for owner in side if owner not in cut]
            assert part.tokens.tolist() == kept
            assert [int(it.sha256) for it in part.pictures] == sorted(set(kept) - {-1})


def test_a_budget_that_ends_in_a_picture_leaves_it_out(source, tmp_path) -> None:
    paint(tmp_path / "a.png", 84, 56)
    spec = write(tmp_path / "a.jsonl", [{"image": "a.png", "text": "xyz"}])
    head = len(tokens_of(load(spec, source))["a.jsonl:1"]) - 6 - 1 - 3
    for cap, kept in ((head, head), (head + 5, head), (head + 6, head + 6)):
        corpus = load(spec, source, tokens_per_document=cap)
        assert corpus.n_tokens == kept
        assert len(corpus.sequences[0].pictures) == (kept > head)


def test_what_is_refused(source: LocalSource, tmp_path: Path) -> None:
    """With file and line, in one sentence, before anything runs."""
    paint(tmp_path / "a.png", 84, 56)
    paint(tmp_path / "large.png", 700, 700)
    (tmp_path / "torn.png").write_bytes((tmp_path / "a.png").read_bytes()[:900])
    (tmp_path / "empty.png").touch()

    def image(name: Any) -> dict[str, Any]:
        return {"messages": [said({"type": "image", "image": name})]}

    for row, says in (
        (image("none.png"), r"none\.png: No such file"),
        (image("torn.png"), r"torn\.png is a damaged image"),
        (image("empty.png"), r"empty\.png is empty"),
        (image("a.jsonl"), "is no image of a known kind"),
        (image("https://example.org/a.png"), "nothing is fetched from the network"),
        (image("data:image/png;base64,@"), "is no base64"),
        (image(None), "an image is a NoneType, no path"),
        (image("large.png"), r"large\.png takes 625 tokens; a sequence has 512"),
        ({"messages": [said(PART)], "image": "a.png"}, "has an `image` beside `messages`"),
        ({"tokens": [1], "image": "a.png"}, "has an `image` beside `tokens`"),
        ({"image": "a.png"}, "has none of text, messages and tokens"),
        ({"image": 3, "text": "x"}, "an image is a int"),
    ):
        spec = write(tmp_path / "a.jsonl", [{"text": "x"}, row])
        with pytest.raises(KimiError, match=says) as caught:
            load(spec, source)
        assert caught.value.message.startswith(f"{spec}:2")
        assert "\n" not in caught.value.message


def test_who_cannot_see_says_so(
    tiny_text_source: Path, source: LocalSource, tmp_path: Path
) -> None:
    paint(tmp_path / "a.png", 84, 56)
    for row in ({"image": "a.png", "text": "x"}, {"messages": [said(PART)]}):
        spec = write(tmp_path / "a.jsonl", [row])
        with pytest.raises(KimiError, match=r"a\.jsonl:1: .* has no vision_config: it can't see"):
            load(spec, open_source(tiny_text_source))
        with pytest.raises(UsageError, match=r"a\.jsonl:1: it has an image, but only text is read"):
            load_corpus(parse_specs(spec), one_byte_each(), seq_len=512)


def test_rules_are_those_of_the_checkpoint(source: LocalSource, tmp_path: Path) -> None:
    folder = write_source(tmp_path / "source", TinyConfig(layers=2, mla_layers=(1,)))
    write_json(folder / "preprocessor_config.json", {"media_proc_cfg": {"in_patch_limit": 4}})
    paint(tmp_path / "a.png", 84, 56)
    spec = write(tmp_path / "a.jsonl", [{"image": "a.png", "text": "x"}])
    counts = [load(spec, it).counts()["a"]["image"] for it in (source, open_source(folder))]
    assert counts == [6, 2]


def test_paths_in_a_data_set_begin_nowhere(fake: FakeDatasets, source: LocalSource) -> None:
    fake.rows = [{"image": "a.png", "text": "x"}]
    with pytest.raises(UsageError, match=r"c4:1, row 0: the image a\.png is a path, and a"):
        load("c4:1", source)


def test_pictures_of_one_size_are_not_one_text(source: LocalSource, tmp_path: Path) -> None:
    """The same picture is found again, in another file; another one of the size is not."""
    for name, seed in (("a", 1), ("b", 2)):
        paint(tmp_path / f"{name}.png", 280, 280, seed)
        write(tmp_path / f"{name}.jsonl", [{"image": f"{name}.png", "text": "a caption"}])
    write(tmp_path / "c.jsonl", [{"text": "x" * 40}, {"image": "a.png", "text": "a caption"}])
    a, b, c = (load(str(tmp_path / f"{name}.jsonl"), source) for name in "abc")
    assert a.token_sha256 == b.token_sha256
    assert find_overlap(b, [a.to_json()]).documents == ()
    (found,) = find_overlap(c, [a.to_json()]).documents
    assert c.documents[found] == "c.jsonl:2"
