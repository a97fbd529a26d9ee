"""The text the tiny K3 is trained on, from what every Debian machine can fetch.

Input: the Python standard library and a few Debian documentation packages
(`apt-get download` + `dpkg -x` into a cache folder; nothing is installed).
Output: documents in three domains, split into training and held-out by document, a
byte-level BPE with K3's control tokens at its end, and one token array per domain.
It never looks at a clock or a random state: the same inputs give the same corpus.
"""

from __future__ import annotations

import hashlib
import html.parser
import json
import re
import subprocess
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

DOMAINS = ("code", "english", "chinese")
N_CONTROL = 32
N_TEXT_IDS = 992
VOCAB_SIZE = N_TEXT_IDS + N_CONTROL
HELD_OUT_PER_MILLE = 40

CONTROL_NAMES = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|end_of_msg|>",
    3: "<|open|>",
    4: "<|close|>",
    5: "<|sep|>",
    6: "[start_header_id]",
    7: "[end_header_id]",
    9: "[EOT]",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    30: "[UNK]",
    31: "[PAD]",
}
BOS_ID, EOS_ID, PAD_ID = N_TEXT_IDS, N_TEXT_IDS + 1, N_TEXT_IDS + 31


@dataclass(frozen=True)
class Package:
    """A Debian package, the licence of its text and where each domain's pages are."""

    name: str
    licence: str
    pages: dict[str, str]


PACKAGES = (
    Package(
        "debian-handbook",
        "CC-BY-SA-3.0 or GPL-2.0+",
        {"english": "**/html/en-US/*.html", "chinese": "**/html/zh-CN/*.html"},
    ),
    Package("python3.11-doc", "PSF-2.0", {"english": "**/python3.11/html/**/*.html"}),
    Package(
        "installation-guide-amd64",
        "GPL-2.0",
        {"english": "**/en/*.html", "chinese": "**/zh_CN/*.html"},
    ),
    Package("debian-reference-en", "GPL-2.0+", {"english": "**/*.html"}),
    Package("debian-reference-zh-cn", "GPL-2.0+", {"chinese": "**/*.html"}),
    Package("maint-guide-zh-cn", "GPL-2.0+", {"chinese": "**/*.html"}),
    Package("debian-edu-doc-zh-cn", "GPL-2.0+", {"chinese": "**/*.html"}),
    Package("debian-faq-zh-cn", "Debian FAQ licence (verbatim copyleft)", {"chinese": "**/*.html"}),
    Package("libreoffice-help-zh-cn", "MPL-2.0", {"chinese": "**/*.html"}),
    Package("libreoffice-help-en-us", "MPL-2.0", {"english": "**/*.html"}),
    Package("fortunes-zh", "GPL-3.0+ (poems: public domain)", {"chinese": "**/fortunes/*[0-9]00"}),
)
STDLIB_LICENCE = "PSF-2.0"
# Excerpts are committed, so they come from packages whose licence is one plain sentence.
EXCERPT_PACKAGES = (
    "debian-handbook",
    "python3.11-doc",
    "libreoffice-help-en-us",
    "libreoffice-help-zh-cn",
    "fortunes-zh",
)

_STDLIB_SKIPPED = re.compile(
    r"(^|/)(tests?|idle_test|site-packages|dist-packages|encodings|pydoc_data|__pycache__)/"
)
_HAN = re.compile("[\u4e00-\u9fff]")
_BETWEEN_HAN = re.compile("(?<=[\u3000-\u9fff\uff00-\uffef]) (?=[\u3000-\u9fff\uff00-\uffef])")
_ANSI_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Document:
    """One text with a name that does not depend on where the cache is."""

    domain: str
    name: str
    text: str

    @property
    def digest(self) -> str:
        return hashlib.sha256(f"{self.domain}/{self.name}".encode()).hexdigest()

    @property
    def is_held_out(self) -> bool:
        return int(self.digest[:8], 16) % 1000 < HELD_OUT_PER_MILLE


class _PageText(html.parser.HTMLParser):
    """The running text of a page: no scripts, navigation or listings."""

    SKIPPED = frozenset({"script", "style", "head", "nav", "title", "pre"})
    BLOCKS = frozenset(
        {"p", "li", "h1", "h2", "h3", "h4", "div", "section"}
        | {"td", "tr", "dt", "dd", "br", "blockquote"}
    )

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.depth = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self.SKIPPED:
            self.depth += 1
        if tag in self.BLOCKS:
            self.parts.append("\f")

    def handle_endtag(self, tag: str) -> None:
        if tag in self.SKIPPED:
            self.depth = max(0, self.depth - 1)
        if tag in self.BLOCKS:
            self.parts.append("\f")

    def handle_data(self, data: str) -> None:
        if not self.depth:
            self.parts.append(data)


def page_lines(page: str) -> list[str]:
    parser = _PageText()
    parser.feed(page)
    blocks = "".join(parser.parts).split("\f")
    lines = (_BETWEEN_HAN.sub("", " ".join(block.split())) for block in blocks)
    return [line for line in lines if line]


def is_prose(domain: str, line: str) -> bool:
    """English needs a sentence's length; Chinese needs three tenths of Han characters."""
    if line.startswith("Title is:"):
        return False
    if domain == "chinese":
        return len(line) >= 8 and len(_HAN.findall(line)) >= 0.3 * len(line)
    letters = sum(c.isascii() and (c.isalpha() or c == " ") for c in line)
    return len(line) >= 60 and letters >= 0.85 * len(line)


def fetch_packages(cache: Path) -> None:
    """Download and unpack what the cache lacks; nothing is installed."""
    for package in PACKAGES:
        target = cache / "x" / package.name
        if target.is_dir():
            continue
        debs = cache / "debs"
        debs.mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "download", "-q", package.name], cwd=debs, check=True)
        deb = next(debs.glob(f"{package.name}_*.deb"))
        subprocess.run(["dpkg", "-x", deb, target], check=True)


def package_versions(cache: Path) -> dict[str, str]:
    debs = (cache / "debs").glob("*.deb")
    versions = dict(deb.name.split("_")[:2] for deb in debs)
    return {package.name: versions[package.name] for package in PACKAGES}


def _read_poems(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Fortune files: one document per ten entries, colour codes removed."""
    text = _ANSI_COLOUR.sub("", path.read_text(encoding="utf-8", errors="ignore"))
    entries = [entry.strip() for entry in text.split("\n%\n") if entry.strip()]
    for start in range(0, len(entries), 10):
        yield f"#{start}", "\n\n".join(entries[start : start + 10]).split("\n")


def _read_pages(path: Path) -> Iterator[tuple[str, list[str]]]:
    if path.suffix == ".html":
        yield "", page_lines(path.read_text(encoding="utf-8", errors="ignore"))
    else:
        yield from _read_poems(path)


def package_documents(cache: Path, package: Package) -> Iterator[Document]:
    root = cache / "x" / package.name
    for domain, pattern in package.pages.items():
        for path in sorted(root.glob(pattern)):
            name = f"{package.name}/{path.relative_to(root)}"
            for suffix, lines in _read_pages(path):
                kept = lines if suffix else [ln for ln in lines if is_prose(domain, ln)]
                yield Document(domain, name + suffix, "\n".join(kept))


def stdlib_documents() -> Iterator[Document]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if not _STDLIB_SKIPPED.search(name):
            text = path.read_text(encoding="utf-8", errors="ignore").replace("\f", "")
            yield Document("code", name, text.strip() + "\n")


def without_repeats(documents: Iterable[Document], seen: set[str]) -> Iterator[Document]:
    """Drop every prose line met before, so that no held-out line is also a training line."""
    for document in documents:
        lines = []
        for line in document.text.split("\n"):
            if line not in seen or not line:
                lines.append(line)
            seen.add(line)
        text = "\n".join(lines).strip() + "\n"
        if len(text.encode()) >= 400:
            yield Document(document.domain, document.name, text)


def load_documents(cache: Path) -> list[Document]:
    """All documents, held-out ones first in the removal of repeats, sorted by digest."""
    prose = [d for package in PACKAGES for d in package_documents(cache, package)]
    prose.sort(key=lambda d: (not d.is_held_out, d.digest))
    code = [d for d in stdlib_documents() if len(d.text) >= 400]
    return sorted([*code, *without_repeats(prose, set())], key=lambda d: d.digest)


def control_tokens() -> list[str]:
    names = {i: f"<|reserved_token_{N_TEXT_IDS + i}|>" for i in range(N_CONTROL)}
    return list((names | CONTROL_NAMES).values())


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A byte-level BPE of 992 entries, then the control tokens in K3's order."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=N_TEXT_IDS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in control_tokens()])
    return tokenizer


def tokenizer_texts(documents: list[Document], n_bytes: int = 2_500_000) -> Iterator[str]:
    """The same number of bytes of training text from every domain."""
    for domain in DOMAINS:
        left = n_bytes
        for document in documents:
            if document.domain == domain and not document.is_held_out and left > 0:
                yield document.text
                left -= len(document.text.encode())


def encode_documents(tokenizer: Tokenizer, documents: list[Document]) -> list[np.ndarray]:
    encoded = tokenizer.encode_batch([d.text for d in documents])
    return [np.array([BOS_ID, *e.ids, EOS_ID], dtype=np.uint16) for e in encoded]


@dataclass(frozen=True)
class Corpus:
    """The tokenizer, and by domain training tokens and documents, and held-out documents."""

    tokenizer: Tokenizer
    train: dict[str, np.ndarray]
    train_documents: dict[str, list[Document]]
    held_out: dict[str, list[Document]]
    facts: dict[str, object]


def _facts(cache: Path, documents: list[Document], train: dict[str, np.ndarray]) -> dict:
    def count(domain: str, held_out: bool) -> dict[str, int]:
        mine = [d for d in documents if d.domain == domain and d.is_held_out == held_out]
        return {"documents": len(mine), "bytes": sum(len(d.text.encode()) for d in mine)}

    return {
        "python": sysconfig.get_python_version(),
        "package_versions": package_versions(cache),
        "train": {d: count(d, False) | {"tokens": len(train[d])} for d in DOMAINS},
        "held_out": {d: count(d, True) for d in DOMAINS},
    }


def _cache_folder(cache: Path) -> Path:
    """One folder per version of this program and of the packages."""
    versions = json.dumps(package_versions(cache)) + sysconfig.get_python_version()
    key = hashlib.sha256(Path(__file__).read_bytes() + versions.encode()).hexdigest()
    return cache / key[:16]


def _cached_documents(folder: Path, cache: Path) -> list[Document]:
    path = folder / "documents.json"
    if not path.exists():
        found = [(d.domain, d.name, d.text) for d in load_documents(cache)]
        path.write_text(json.dumps(found), encoding="utf-8")
    return [Document(*fields) for fields in json.loads(path.read_text(encoding="utf-8"))]


def _cached_tokenizer(folder: Path, documents: list[Document]) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.exists():
        train_tokenizer(tokenizer_texts(documents)).save(str(path))
    return Tokenizer.from_file(str(path))


def _cached_tokens(
    folder: Path, tokenizer: Tokenizer, documents: list[Document]
) -> dict[str, np.ndarray]:
    path = folder / "train.npz"
    if not path.exists():
        train = {
            domain: [d for d in documents if d.domain == domain and not d.is_held_out]
            for domain in DOMAINS
        }
        streams = {k: np.concatenate(encode_documents(tokenizer, v)) for k, v in train.items()}
        np.savez(path, **streams)
    with np.load(path) as stored:
        return dict(stored)


def build_corpus(cache: Path) -> Corpus:
    """Everything from scratch, or from `cache` where a former call left it."""
    fetch_packages(cache)
    folder = _cache_folder(cache)
    folder.mkdir(exist_ok=True)
    documents = _cached_documents(folder, cache)
    tokenizer = _cached_tokenizer(folder, documents)
    train = _cached_tokens(folder, tokenizer, documents)
    split = (
        {d: [x for x in documents if x.domain == d and x.is_held_out == held_out] for d in DOMAINS}
        for held_out in (False, True)
    )
    return Corpus(tokenizer, train, *split, _facts(cache, documents, train))
