"""Reads what calibration runs over: text files, JSONL, and data sets of the Hub.

Input: corpus specs, as `--corpus` takes them. Output: documents, not yet encoded, and where they
come from: each file's SHA-256 or the data set's revision. Whatever is malformed is refused with its
file and line, pictures too. Everything is read before anything is chosen.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from kimi_k3_mlx.chat.pieces import Piece
from kimi_k3_mlx.chat.render import SEE_FORMAT, Picture, chat_pieces, objects, picture
from kimi_k3_mlx.errors import HubError, KimiError, UsageError
from kimi_k3_mlx.reap.pictures import Album, CorpusPicture
from kimi_k3_mlx.schema import Json
from kimi_k3_mlx.tensors.remote import explained, http_error
from kimi_k3_mlx.vision.images import image_names

LOCAL = re.compile(r"(?P<name>.+\.(?P<kind>txt|jsonl))(?:=(?P<tag>[^=]+))?")
DATASET = re.compile(
    r"(?P<name>[\w./-]+)(?:\[(?P<subset>[^]]+)\])?(?:\((?P<split>[^)]+)\))?"
    r":(?P<rows>[1-9][0-9]*)(?:=(?P<tag>[^=]+))?"
)
GRAMMAR = "write file.txt, file.jsonl or name[subset](split):rows, each with =tag if you like."
KINDS = ("text", "messages", "tokens")
SHAPES = 'a document is {"text": "…"}, {"messages": […]} or {"tokens": […]}.'
PAIR = 'write {"image": "a.png", "text": "…"}, or messages with parts {"type": "image", …}.'
PAGE = re.compile(r"^\f\r?\n?", re.MULTILINE)
"""A line with one form feed, which separates documents in a text file."""
PARAGRAPH = re.compile(r".*?\n[ \t\r]*\n|.+\Z", re.DOTALL)


@dataclass(frozen=True)
class Spec:
    """One item of `--corpus`."""

    text: str
    kind: str
    """`txt`, `jsonl` or `dataset`."""
    name: str
    """A path, or the data set's name."""
    subset: str | None = None
    split: str = "train"
    rows: int = 0
    """Rows of the data set to take, from its beginning."""
    tag: str | None = None

    @property
    def source(self) -> str:
        """The source of documents that don't name their own."""
        if self.tag:
            return self.tag
        if self.kind != "dataset":
            return Path(self.name).stem
        return f"{self.name}[{self.subset}]" if self.subset else self.name


class Raw(NamedTuple):
    """A document before it is encoded: pieces of text, or tokens that were given."""

    source: str
    id: str
    pieces: tuple[Piece, ...] = ()
    tokens: tuple[int, ...] = ()
    pictures: tuple[CorpusPicture, ...] = ()
    is_chat: bool = False


class Reading(NamedTuple):
    """How documents are read."""

    thinking: bool
    album: Album
    folder: Path | None = None
    """Where paths of pictures begin."""


class Origin(NamedTuple):
    """A spec that was read: its documents, and what to record of it."""

    spec: Spec
    documents: tuple[Raw, ...]
    record: Json


def parse_specs(text: str) -> tuple[Spec, ...]:
    """The specs of a comma-separated list; raise UsageError naming the first that is none."""
    specs, position = [], 0
    for number, item in enumerate(text.split(","), 1):
        at = position + len(item) - len(item.lstrip()) + 1
        position += len(item) + 1
        specs.append(parse_spec(item.strip(), f"corpus {number} (character {at})"))
    return tuple(specs)


def parse_spec(item: str, where: str) -> Spec:
    """One spec."""
    if match := LOCAL.fullmatch(item):
        return Spec(item, match["kind"], match["name"], tag=match["tag"])
    match = DATASET.fullmatch(item)
    if match is None:
        raise UsageError(f"{where} is {item!r}: neither a file nor rows of a data set.", GRAMMAR)
    split = match["split"] or "train"
    rows = int(match["rows"])
    return Spec(item, "dataset", match["name"], match["subset"], split, rows, match["tag"])


def read_spec(spec: Spec, n_chars: int, *, thinking: bool, album: Album) -> Origin:
    """All documents of a spec; long text files are cut at blank lines, about every `n_chars`."""
    if spec.kind == "dataset":
        return read_dataset(spec, Reading(thinking, album))
    path = Path(spec.name).expanduser()
    data = read_bytes(path)
    text = decode(data, spec.name)
    if spec.kind == "jsonl":
        read = json_documents(spec, text, Reading(thinking, album, path.parent))
    else:
        read = text_documents(spec, text, n_chars)
    sha256 = hashlib.sha256(data).hexdigest()
    return Origin(spec, tuple(read), {**asdict(spec), "n_bytes": len(data), "sha256": sha256})


def read_bytes(path: Path) -> bytes:
    """A file's content."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"the corpus {path} can't be read: {error.strerror}.") from error


def decode(data: bytes, name: str) -> str:
    """UTF-8 text; a byte order mark is left out."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise UsageError(
            f"{name}:{line} is not UTF-8: byte 0x{error.object[error.start]:02x}.",
            f"iconv -f ENCODING -t utf-8 {name} > utf8-{Path(name).name}",
        ) from error


def text_documents(spec: Spec, text: str, n_chars: int) -> Iterator[Raw]:
    """The documents of a text file, numbered from 1."""
    blocks = [block for page in PAGE.split(text) for block in split_text(page, n_chars)]
    for number, block in enumerate(blocks, 1):
        yield Raw(spec.source, f"{Path(spec.name).name}#{number}", (Piece(block),))


def split_text(text: str, n_chars: int) -> list[str]:
    """Cut a text after blank lines into blocks of `n_chars` at most, if the paragraphs allow."""
    blocks, block = [], ""
    for paragraph in PARAGRAPH.findall(text) if len(text) > n_chars else [text]:
        if block and len(block) + len(paragraph) > n_chars:
            blocks.append(block)
            block = ""
        block += paragraph
    return [*blocks, block] if block else blocks


def json_documents(spec: Spec, text: str, how: Reading) -> Iterator[Raw]:
    """The documents of a JSONL file, one a line; blank lines are none."""
    # Not splitlines: a line separator of Unicode may stand in a JSON string.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{spec.name}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = str(error).replace("line 1 column", "column")
            raise UsageError(f"{where} is not JSON: {reason}.", SHAPES) from error
        raw = document(row, where, how)
        name = raw.id or f"{Path(spec.name).name}:{number}"
        yield raw._replace(source=spec.tag or raw.source or spec.source, id=name)


def document(row: Any, where: str, how: Reading) -> Raw:
    """A document from a JSON object; without `source` or `id` these are empty."""
    if not isinstance(row, dict):
        raise UsageError(f"{where} is a {type(row).__name__}, not an object.", SHAPES)
    kinds = [kind for kind in KINDS if row.get(kind) is not None]
    if len(kinds) != 1:
        raise UsageError(
            f"{where} has {' and '.join(kinds) or 'none of text, messages and tokens'} "
            f"(its fields: {', '.join(map(str, row)) or 'none'}).",
            SHAPES,
        )
    source, name = label(row, "source", where), label(row, "id", where)
    try:
        raw = parts(row, kinds[0], how)
        for piece in raw.pieces:
            piece.text.encode()
    except KimiError as error:
        raise type(error)(f"{where}: {error.message}", error.hint) from error
    except UnicodeEncodeError as error:
        raise UsageError(f"{where} has half a surrogate pair: it is not text.") from error
    return raw._replace(source=source, id=name)


def label(row: Json, key: str, where: str) -> str:
    """A name that a row may give: text, or a number."""
    value = row.get(key)
    if value is None:
        return ""
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise UsageError(f"{where}: `{key}` is a {type(value).__name__}, not text.", SHAPES)
    return str(value)


def parts(row: Json, kind: str, how: Reading) -> Raw:
    """The pieces and pictures, or the tokens, of a row."""
    value, image = row[kind], row.get("image")
    if kind == "text":
        if not isinstance(value, str):
            raise UsageError(f"`text` is a {type(value).__name__}.", SHAPES)
        return Raw("", "", (Piece(value),)) if image is None else pair(image, value, how)
    if image is not None:
        raise UsageError(f"it has an `image` beside `{kind}`.", PAIR)
    if not isinstance(value, list):
        raise UsageError(f"`{kind}` is a {type(value).__name__}, not a list.", SEE_FORMAT)
    if kind == "messages":
        return conversation(value, objects(row, "tools"), how)
    wrong = [item for item in value if type(item) is not int or item < 0]
    if wrong:
        raise UsageError(f"`tokens` has {wrong[0]!r}, which is no token id.", SHAPES)
    return Raw("", "", tokens=tuple(value))


def pair(image: object, text: str, how: Reading) -> Raw:
    """A picture, and the text after it."""
    found = how.album.picture(image, how.folder)
    return Raw("", "", (*picture(shown(found), "none"), Piece(text)), pictures=(found,))


def conversation(messages: list[Any], tools: list[Json], how: Reading) -> Raw:
    """A conversation, in which pictures may stand."""
    pictures = tuple(how.album.picture(name, how.folder) for name in image_names(messages))
    pieces = chat_pieces(
        messages, tools=tools, thinking=how.thinking, images=list(map(shown, pictures)),
        add_generation_prompt=False,
    )  # fmt: skip
    return Raw("", "", pieces, pictures=pictures, is_chat=True)


def shown(found: CorpusPicture) -> Picture:
    """A picture as the renderer takes it, with a placeholder for each row."""
    return Picture(found.width, found.height, found.n_rows)


def read_dataset(spec: Spec, how: Reading) -> Origin:
    """The first rows of a data set, at the revision that is newest now."""
    module = datasets_module(spec)
    revision = revision_of(spec)
    documents = []
    for number, row in enumerate(rows_of(module, spec, revision)):
        # A data set's column `source` is often a URL: one source for each row.
        row = {key: value for key, value in row.items() if key != "source"}
        raw = document(row, f"{spec.text}, row {number}", how)
        documents.append(raw._replace(source=spec.source, id=raw.id or f"{spec.name}:{number}"))
    record = {**asdict(spec), "revision": revision, "n_rows": len(documents)}
    return Origin(spec, tuple(documents), record)


def datasets_module(spec: Spec) -> Any:
    """The package `datasets`, which is optional."""
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        raise UsageError(
            f"the corpus {spec.text!r} needs the package datasets, which is not installed.",
            'pip install "kimi-k3-mlx[calibrate]"',
        ) from error


def revision_of(spec: Spec) -> str | None:
    """The commit of a data set; None for a folder."""
    import huggingface_hub

    if Path(spec.name).is_dir():
        return None
    try:
        return huggingface_hub.HfApi().dataset_info(spec.name).sha
    except (http_error(), OSError, ValueError) as error:
        raise explained(error, f"the data set {spec.name}") from error


def rows_of(module: Any, spec: Spec, revision: str | None) -> list[Json]:
    """The rows themselves, streamed: nobody needs the rest of the data set."""
    base = getattr(getattr(module, "exceptions", None), "DatasetsError", OSError)
    try:
        rows: Iterable[Json] = module.load_dataset(
            spec.name, spec.subset, split=spec.split, revision=revision, streaming=True
        )
        return list(islice(rows, spec.rows))
    except (http_error(), base, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300].rstrip(".")
        raise HubError(
            f"the corpus {spec.text!r} can't be read: {reason}.",
            "check the names of subset and split, or save the rows as a .jsonl file.",
        ) from error
