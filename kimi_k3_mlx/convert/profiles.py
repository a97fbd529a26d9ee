"""Build profiles: a published build as a TOML file.

Input: a name of one that comes with the package, or a path. Output: a checked `Profile`. A format
is `"source"`, `"mxfp4"` (experts), `"mxfp8"`, or an affine one: `{ bits = 8, group_size = 64 }`.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from converters.names import QUANTIZABLE
from kimi_k3_mlx.errors import UsageError
from kimi_k3_mlx.profile import EXPERT_BITS, EXPERT_GROUPS, Formats, Profile, affine
from kimi_k3_mlx.schema import MXFP4, Json, Quantization

MXFP8 = Quantization("mxfp8", 8, 32)
ROUTER = Quantization("affine", 8, 64)
TRUNK_BITS, TRUNK_GROUPS = (4, 5, 6, 8), (32, 64)
NARROWED = ("qkv_conv.conv", "o_norm")
REQUIRED = ("version", "name", "summary", "experts", "trunk")
OPTIONAL = ("layout", "roles", "overrides", "narrow")


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
    return _Fields(values, f"profile {where}").profile()


def with_trunk(
    profile: Profile, mode: str | None, bits: int | None, group_size: int | None
) -> Profile:
    """A profile with another format for the whole trunk, as `--q-mode`, `--q-bits` and
    `--q-group-size` ask; raise UsageError when MLX or K3 doesn't have it."""
    mode = mode or "affine"
    if mode not in ("affine", "mxfp8"):
        raise UsageError(f"--q-mode is {mode!r}, expected 'affine' or 'mxfp8'.")
    if mode == "mxfp8":
        trunk, name = MXFP8, "mxfp8"
        if (bits or MXFP8.bits, group_size or MXFP8.group_size) != MXFP8[1:]:
            raise UsageError("--q-mode mxfp8 has 8 bits and groups of 32.")
    else:
        values = {"bits": bits or 8, "group_size": group_size or 64}
        trunk = affine(values, "the trunk", TRUNK_BITS, TRUNK_GROUPS)
        name = f"q{trunk.bits}-g{trunk.group_size}"
    if profile.layout == "moonshot":
        raise UsageError(f"profile {profile.name} keeps every tensor as it is.")
    roles = dict(profile.roles)
    if trunk.bits < ROUTER.bits:
        roles.setdefault("router", ROUTER)  # a wrong expert costs more than the bits
    return replace(
        profile,
        name=f"{profile.name}-{name}",
        summary=f"{profile.summary}; trunk changed to {trunk}",
        trunk=trunk,
        roles=tuple(roles.items()),
    )


class _Fields:
    """The fields of a profile; errors name the profile and the field."""

    def __init__(self, values: Json, where: str) -> None:
        self.values = values
        self.where = where

    def profile(self) -> Profile:
        self._check_names()
        if not re.fullmatch(r"[\w.+-]+", self._text("name")):
            raise self._wrong("name", self.values["name"], "letters, digits and . + - _")
        return Profile(
            name=self._text("name"),
            summary=self._text("summary"),
            layout=self._choice("layout", ("mlx", "moonshot")),
            experts=self._experts(),
            trunk=self._trunk("trunk", self.values["trunk"]),
            roles=self._formats("roles", QUANTIZABLE),
            overrides=self._formats("overrides"),
            narrow=self._narrow(),
        )

    def _check_names(self) -> None:
        for field in REQUIRED:
            if field not in self.values:
                raise UsageError(f"{self.where} lacks the field {field!r}.")
        for field in self.values:
            if field not in REQUIRED + OPTIONAL:
                raise UsageError(
                    f"{self.where} has the unknown field {field!r}.",
                    f"known fields: {', '.join(REQUIRED + OPTIONAL)}.",
                )
        if type(self.values["version"]) is not int or self.values["version"] != Profile.version:
            raise self._wrong("version", self.values["version"], str(Profile.version))
        if self.values.get("layout") == "moonshot":
            for field in ("roles", "overrides", "narrow"):
                if field in self.values:
                    raise UsageError(f"{self.where}: layout 'moonshot' has no field {field!r}.")
            for field, only in (("experts", "mxfp4"), ("trunk", "source")):
                if self.values[field] != only:
                    raise self._wrong(field, self.values[field], repr(only))

    def _text(self, field: str) -> str:
        value = self.values[field]
        if not isinstance(value, str):
            raise self._wrong(field, value, "text")
        return value

    def _choice(self, field: str, choices: tuple[str, ...]) -> str:
        value = self.values.get(field, choices[0])
        if value not in choices:
            raise self._wrong(field, value, " or ".join(map(repr, choices)))
        return str(value)

    def _experts(self) -> Quantization:
        value = self.values["experts"]
        if value == "mxfp4":
            return MXFP4
        if not isinstance(value, dict):
            raise self._wrong("experts", value, "'mxfp4' or { bits = 2, group_size = 64 }")
        return affine(value, f"{self.where}: experts", EXPERT_BITS, EXPERT_GROUPS)

    def _trunk(self, field: str, value: Any) -> Quantization | None:
        if value == "source":
            return None
        if value == "mxfp8":
            return MXFP8
        if not isinstance(value, dict):
            raise self._wrong(field, value, "'source', 'mxfp8' or { bits = 8, group_size = 64 }")
        return affine(value, f"{self.where}: {field}", TRUNK_BITS, TRUNK_GROUPS)

    def _formats(self, field: str, known: tuple[str, ...] = ()) -> Formats:
        table = self.values.get(field, {})
        if not isinstance(table, dict):
            raise self._wrong(field, table, "a table")
        for key in table:
            if known and key not in known:
                raise self._wrong(field, key, f"one of {', '.join(known)}")
        return tuple((key, self._trunk(f"{field}.{key}", value)) for key, value in table.items())

    def _narrow(self) -> tuple[str, ...]:
        value = self.values.get("narrow", [])
        if not isinstance(value, list) or not set(map(str, value)) <= set(NARROWED):
            raise self._wrong("narrow", value, f"a list of {' and '.join(map(repr, NARROWED))}")
        return tuple(value)

    def _wrong(self, field: str, value: Any, expected: str) -> UsageError:
        return UsageError(f"{self.where}: {field} is {value!r}, expected {expected}.")


def _folder() -> resources.abc.Traversable:
    return resources.files("kimi_k3_mlx") / "profiles"


def _known() -> str:
    return f"known profiles: {', '.join(profile_names())}; or give a .toml file."
