"""Profiles are data, and every field that is wrong is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from kimi_k3_mlx.convert.profiles import load_profile, parse_profile, profile_names, with_trunk
from kimi_k3_mlx.errors import UsageError
from kimi_k3_mlx.schema import MXFP4, Quantization

GOOD = 'version = 1\nname = "mine"\nsummary = "s"\nexperts = "mxfp4"\ntrunk = "source"\n'


def test_every_profile_of_the_package_loads_under_its_name() -> None:
    assert "mxfp4" in profile_names()
    for name in profile_names():
        assert load_profile(name).name == name


def test_a_profile_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(GOOD)
    profile = load_profile(str(tmp_path / "mine.toml"))
    assert (profile.name, profile.experts, profile.trunk) == ("mine", MXFP4, None)


@pytest.mark.parametrize("name", ["mxfp5", "", "../errors", "nowhere.toml"])
def test_unknown_profiles_are_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(UsageError) as error:
        load_profile(name)
    assert "known profiles: moonshot, mxfp4" in error.value.hint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('trunk = "source"', ""), "lacks the field 'trunk'"),
        (
            ('trunk = "source"', 'trunk = "affine8"'),
            "trunk is 'affine8', expected 'source'",
        ),
        (("version = 1", "version = 2"), "version is 2, expected 1"),
        (('"s"', "3"), "summary is 3, expected text"),
        (('"s"', '"s"\nbits = 4'), "unknown field 'bits'"),
        (('"mxfp4"', '"mxfp8"'), "experts is 'mxfp8', expected 'mxfp4' or"),
        (('"mxfp4"', "{ bits = 4, group_size = 64 }"), "experts: bits is 4, expected one of 2, 3"),
        (
            ('"source"', "{ bits = 7, group_size = 64 }"),
            "trunk: bits is 7, expected one of 4",
        ),
        (
            ('"source"', "{ bits = 8, group_size = 128 }"),
            "trunk: group_size is 128",
        ),
        (('"source"', "{ bits = 8 }"), "trunk: group_size is None"),
        (('"source"', '{ bits = 8, group_size = 64, mode = "x" }'), "trunk: unknown field 'mode'"),
        (('"s"', '"s"\nnarrow = ["A_log"]'), r"narrow is \['A_log'\], expected a list of"),
        (('"s"', '"s"\nlayout = "gguf"'), "layout is 'gguf', expected 'mlx' or 'moonshot'"),
        (('"s"', '"s"\nlayout = "moonshot"\nnarrow = []'), "'moonshot' has no field 'narrow'"),
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


def test_roles_and_overrides_are_read_and_their_errors_name_them() -> None:
    text = f'{GOOD}[roles]\nrouter = "mxfp8"\n[overrides]\n"*.b_proj" = "source"\n'
    profile = parse_profile(text, "mine")
    assert profile.roles == (("router", Quantization("mxfp8", 8, 32)),)
    assert profile.overrides == (("*.b_proj", None),)
    with pytest.raises(UsageError, match="roles is 'norm', expected one of attention"):
        parse_profile(f'{GOOD}[roles]\nnorm = "source"\n', "mine")
    with pytest.raises(UsageError, match=r"overrides\.x is 'q8', expected 'source'"):
        parse_profile(f'{GOOD}[overrides]\nx = "q8"\n', "mine")


def test_the_trunk_can_be_changed_and_the_router_keeps_eight_bits() -> None:
    changed = with_trunk(load_profile("mxfp4"), None, 4, 32)
    assert (changed.name, changed.trunk) == ("mxfp4-q4-g32", Quantization("affine", 4, 32))
    assert changed.format_of("layers.1.mlp.gate", "router") == Quantization("affine", 8, 64)
    eight = with_trunk(load_profile("mxfp4"), None, None, None)
    assert eight.format_of("layers.1.mlp.gate", "router") == Quantization("affine", 8, 64)
    assert with_trunk(load_profile("mxfp4"), "mxfp8", None, None).trunk == ("mxfp8", 8, 32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("nvfp4", None, None), "--q-mode is 'nvfp4'"),
        (("mxfp8", 4, None), "--q-mode mxfp8 has 8 bits"),
        ((None, 3, None), "the trunk: bits is 3"),
        ((None, 8, 128), "the trunk: group_size is 128"),
    ],
)
def test_trunks_that_mlx_has_not(
    options: tuple[str | None, int | None, int | None], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        with_trunk(load_profile("mxfp4"), *options)
    with pytest.raises(UsageError, match="profile moonshot keeps every tensor as it is"):
        with_trunk(load_profile("moonshot"), None, 8, 64)
