"""Write the tiny K3's own texts as JSONL, split as in its training: for `benchmarks/pruning.py`.

Input: the corpus cache of train_tiny.py. Output: DIR/train/DOMAIN.jsonl and
DIR/held_out/DOMAIN.jsonl, one `{"id": …, "text": …}` a line.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import tiny_corpus


def write(documents: list[tiny_corpus.Document], path: Path) -> None:
    """One document a line."""
    lines = [json.dumps({"id": d.name, "text": d.text}, ensure_ascii=False) for d in documents]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{path}: {len(documents)} documents")


def main() -> None:
    """Everything that training saw, and what it never saw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, default=Path("/tmp/tiny-corpus"))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    tiny_corpus.fetch_packages(args.cache)
    documents = tiny_corpus.load_documents(args.cache)
    for domain in tiny_corpus.DOMAINS:
        mine = [d for d in documents if d.domain == domain]
        for part, held_out in (("train", False), ("held_out", True)):
            write(
                [d for d in mine if d.is_held_out == held_out], args.out / part / f"{domain}.jsonl"
            )


if __name__ == "__main__":
    main()
