"""What verbs that run for hours check before they begin, and what they leave.

Input: options. Output: paths that may be written, or UsageError before anything was read.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from kimi_k3_mlx.errors import UsageError

SHARE_OF_RAM = 2  # the other half is for the page cache and the rest of the machine


def checked_out(out: str, inputs: Iterable[str | Path]) -> Path:
    """Where a file goes: in a folder that is there, and not over what is read."""
    path = Path(out)
    parent = path.absolute().parent
    if path.is_dir() or out.endswith("/") or not path.name:
        raise UsageError(f"--out {out} is a folder, not a file.", "name a file: --out NAME")
    if not parent.is_dir():
        raise UsageError(f"--out {out}: there is no folder {parent}.", f"mkdir -p {parent}")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(f"--out {out}: {parent} is not writable.", "choose another --out.")
    for source in map(Path, inputs):
        if path.exists() and source.exists() and path.samefile(source):
            raise UsageError(
                f"--out {out} is read as well: it would be overwritten.", "choose another --out."
            )
    return path


def files_of(specs: str) -> list[Path]:
    """The files among the specs of a corpus."""
    from kimi_k3_mlx.reap.corpus_files import parse_specs

    return [Path(it.name).expanduser() for it in parse_specs(specs) if it.kind != "dataset"]


def run_folder(out: Path) -> Path:
    """Where an unfinished run that ends with `out` is; raise UsageError if others' files are."""
    from kimi_k3_mlx.tensors.journal import JOURNAL

    folder = out.with_name(f"{out.name}.run")
    is_ours = not folder.exists() or (folder / JOURNAL).is_file()
    if not is_ours and not (folder.is_dir() and not any(folder.iterdir())):
        raise UsageError(
            f"{folder}, where the run would be kept, holds other files.", "choose another --out."
        )
    return folder


def memory_of(args: argparse.Namespace) -> int:
    """Bytes that the run may use."""
    if args.memory is not None:
        return int(args.memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // SHARE_OF_RAM


def short_names(paths: Sequence[str]) -> list[tuple[str, str]]:
    """Each file's name without its ending, or the whole path where two would be called the same."""
    if twice := [path for path in paths if paths.count(path) > 1]:
        raise UsageError(f"{twice[0]} is given twice.")
    stems = [Path(path).stem for path in paths]
    return [
        (stem if stems.count(stem) == 1 else path, path)
        for stem, path in zip(stems, paths, strict=True)
    ]
