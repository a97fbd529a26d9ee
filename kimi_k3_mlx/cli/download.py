"""Fetch a checkpoint from the Hub, or only some of its files.

Files that are there and unchanged are not fetched again; a file that broke off starts anew.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kimi_k3_mlx.cli._options import Parser, common_options
from kimi_k3_mlx.cli._output import write, write_json

USAGE = "[REPO] [--local-dir DIR] [options]"
EXAMPLES = (
    "kimi-k3 download --local-dir ./Kimi-K3",
    "kimi-k3 download --local-dir ./Kimi-K3 --include 'model-00018*'",
    "kimi-k3 download moonshotai/Kimi-K3 --revision main --include '*.json'",
)


def add_options(parser: Parser) -> None:
    """Declare the options."""
    from kimi_k3_mlx.hub.download import DEFAULT_REPOSITORY

    source = parser.add_argument_group("source")
    source.add_argument(
        "repository",
        metavar="REPO",
        nargs="?",
        default=DEFAULT_REPOSITORY,
        help="repository on the Hub",
    )
    source.add_argument("--revision", metavar="NAME", help="branch, tag or commit")
    source.add_argument("--include", metavar="GLOB", action="append", help="only these; repeatable")
    target = parser.add_argument_group("target")
    target.add_argument("--local-dir", metavar="DIR", help="folder (without: the Hub's cache)")
    common_options(parser, quiet=False)


def run(args: argparse.Namespace) -> None:
    """Fetch, then print the folder."""
    from kimi_k3_mlx.hub.download import download

    folder = Path(args.local_dir) if args.local_dir else None
    path = download(args.repository, folder, args.revision, args.include or ())
    if args.json:
        write_json({"version": 1, "path": str(path)})
    else:
        write(str(path))
