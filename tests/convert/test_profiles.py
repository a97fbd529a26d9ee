"""Profiles are data, and every field that is wrong is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from kimi_k3_mlx.convert.profiles import load_profile, parse_profile, profile_names
from kimi_k3_mlx.errors import UsageError

GOOD = 'version = 1\nname = "mine"\nsummary = "s"\nexperts = "mxfp4"\ntrunk = "source"\n'


def test_every_profile_of_the_package_loads_under_its_name() -> None:
    assert "mxfp4" in profile_names()
    for name in profile_names():
        assert load_profile(name).name == name


def test_a_profile_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(GOOD)
    profile = load_profile(str(tmp_path / "mine.toml"))
    assert (profile.name, profile.experts, profile.trunk) == ("mine", "mxfp4", "source")


@pytest.mark.parametrize("name", ["mxfp5", "", "../errors", "nowhere.toml"])
def test_unknown_profiles_are_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(UsageError) as error:
        load_profile(name)
    assert "known profiles: mxfp4" in error.value.hint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('trunk = "source"', ""), "lacks the field 'trunk'"),
        (('trunk = "source"', 'trunk = "affine8"'), "trunk is 'affine8', expected 'source'"),
        (("version = 1", "version = 2"), "version is 2, expected 1"),
        (('"s"', "3"), "summary is 3, expected text"),
        (('"s"', '"s"\nbits = 4'), "unknown field 'bits'"),
        (('"s"', "'"), "is not TOML"),
    ],
)
def test_each_wrong_field_is_named(change: tuple[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=f"profile mine.*{message}"):
        parse_profile(GOOD.replace(*change), "mine")


def test_a_profile_that_is_not_utf_8(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_bytes(GOOD.replace('"s"', '"ä"').encode("latin-1"))
    with pytest.raises(UsageError, match=r"profile .*mine\.toml is not UTF-8: "):
        load_profile(str(tmp_path / "mine.toml"))
