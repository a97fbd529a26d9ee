"""The report's folder: written whole beside its place, then put there.

Input: the JSON value of `reap.report`. Output: `report.md`, `report.json` and `figures/`, the same
bytes for the same statistics and plans. Only an empty folder or an earlier report is replaced.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from kimi_k3_mlx.errors import UsageError
from kimi_k3_mlx.reap.figures import draw
from kimi_k3_mlx.reap.report import KIND
from kimi_k3_mlx.reap.report_text import markdown
from kimi_k3_mlx.schema import Json

PAGE, DATA, FIGURES = "report.md", "report.json", "figures"


def render(report: Json) -> dict[str, bytes]:
    """All files by their path in the folder."""
    drawings = draw(report)
    files = {f"{FIGURES}/{it.name}.{kind}": getattr(it, kind)
             for it in drawings for kind in ("svg", "png")}  # fmt: skip
    texts = {f"{FIGURES}/{it.name}.png": it.text for it in drawings}
    named = report | {"files": sorted([PAGE, DATA, *files])}
    data = json.dumps(named, indent=2, ensure_ascii=False, allow_nan=False)
    return files | {PAGE: markdown(report, texts).encode(), DATA: f"{data}\n".encode()}


def check_folder(out: Path) -> None:
    """Raise UsageError unless `out` is new, empty, or holds an earlier report and nothing else."""
    if out.is_symlink() or out.name in ("", ".."):
        raise UsageError(
            f"{out} can't be replaced as a whole.", "give --out the report's own folder."
        )
    if not out.exists():
        return
    if not out.is_dir():
        raise UsageError(f"{out} is a file.", "choose another --out.")
    found = {path.relative_to(out).as_posix() for path in out.rglob("*") if not path.is_dir()}
    foreign = sorted(found - set(_files_of(out / DATA)))
    if foreign:
        raise UsageError(
            f"{out} holds {foreign[0]}, which is not of an earlier report.", "choose another --out."
        )


def write_folder(out: Path, files: dict[str, bytes]) -> None:
    """Replace the folder, which `check_folder` must allow, by these files."""
    out.parent.mkdir(parents=True, exist_ok=True)
    # A folder of a new name beside it: nobody else's is touched, and a failure leaves none.
    with TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as made:
        new = Path(made) / out.name
        for name, data in files.items():
            path = new / name
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                path.write_bytes(data)
            except OSError as error:  # a full disk names no file
                error.filename = str(out / name)
                raise
        check_folder(out)
        if out.exists():
            shutil.rmtree(out)
        new.rename(out)


def _files_of(path: Path) -> list[str]:
    """What an earlier report wrote; nothing if there is none."""
    try:
        said = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return []
    if not isinstance(said, dict) or said.get("kind") != KIND:
        return []
    return [str(name) for name in said.get("files", [])]
