"""Build profiles: a published build as a TOML file.

Input: a name of one that comes with the package, or a path. Output: a checked `Profile`.
"""

from __future__ import annotations

import tomllib
from importlib import resources
from pathlib import Path

from kimi_k3_mlx.errors import UsageError
from kimi_k3_mlx.schema import Json, Profile

ALLOWED = {"version": (1,), "experts": ("mxfp4",), "trunk": ("source",)}
FIELDS = ("version", "name", "summary", "experts", "trunk")


def load_profile(name_or_path: str) -> Profile:
    """Load a profile; raise UsageError naming the file and the field that is wrong."""
    path = Path(name_or_path)
    if path.suffix == ".toml":
        if not path.is_file():
            raise UsageError(f"profile {path} doesn't exist.", _known())
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError as error:
            raise UsageError(f"profile {path} is not UTF-8: {error}.") from error
        return parse_profile(text, str(path))
    if name_or_path not in profile_names():
        raise UsageError(f"there is no profile {name_or_path!r}.", _known())
    text = (_folder() / f"{name_or_path}.toml").read_text("utf-8")
    return parse_profile(text, name_or_path)


def profile_names() -> list[str]:
    """Names of the profiles that come with the package."""
    files = (entry.name for entry in _folder().iterdir())
    return sorted(name.removesuffix(".toml") for name in files if name.endswith(".toml"))


def parse_profile(text: str, where: str) -> Profile:
    """Check a profile's TOML; `where` names it in errors."""
    try:
        values: Json = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"profile {where} is not TOML: {error}.") from error
    for field in FIELDS:
        if field not in values:
            raise UsageError(f"profile {where} lacks the field {field!r}.")
    for field, value in values.items():
        if field not in FIELDS:
            raise UsageError(
                f"profile {where} has the unknown field {field!r}.",
                f"known fields: {', '.join(FIELDS)}.",
            )
        allowed = ALLOWED.get(field)
        if allowed and value not in allowed:
            raise UsageError(
                f"profile {where}: {field} is {value!r}, expected "
                f"{' or '.join(map(repr, allowed))}."
            )
        if not allowed and not isinstance(value, str):
            raise UsageError(f"profile {where}: {field} is {value!r}, expected text.")
    return Profile(**values)


def _folder() -> resources.abc.Traversable:
    return resources.files("kimi_k3_mlx") / "profiles"


def _known() -> str:
    return f"known profiles: {', '.join(profile_names())}; or give a .toml file."
