"""Writes docs/cli.md from the parsers, so that it says what `--help` says.

python tools/make_cli_docs.py            writes docs/cli.md
python tools/make_cli_docs.py --check    exits 1 when the file differs
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kimi_k3_mlx.cli import PROGRAM, VERBS, overview, parser_of

DOCS = Path(__file__).resolve().parents[1] / "docs" / "cli.md"
COLUMNS = "100"
HEAD = """# Command line

Made by `tools/make_cli_docs.py` from the parsers; a test compares it. Exit codes of every verb:
0 done, 1 failed, 2 usage, 3 mismatch, 4 does not fit, 5 Hub or network, 130 interrupted.
Data goes to stdout, talk and progress to stderr. `KIMI_K3_DEBUG=1` shows tracebacks.
"""


def document() -> str:
    """The whole page."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = COLUMNS
    try:
        sections = {PROGRAM: overview()}
        sections |= {f"{PROGRAM} {verb}": parser_of(verb).format_help() for verb in VERBS}
    finally:
        os.environ.pop("COLUMNS") if before is None else os.environ.update(COLUMNS=before)
    blocks = (f"## {title}\n\n```text\n{text.rstrip()}\n```\n" for title, text in sections.items())
    return "\n".join([HEAD, *blocks])


def main() -> int:
    """Write the page, or compare it."""
    if "--check" in sys.argv[1:]:
        return int(DOCS.read_text("utf-8") != document())
    DOCS.parent.mkdir(exist_ok=True)
    DOCS.write_text(document(), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
