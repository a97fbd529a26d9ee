"""docs/cli.md is what the parsers say."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest

from kimi_k3_mlx.cli import VERBS
from tests.house.checks import ROOT


@pytest.fixture(scope="module")
def make_cli_docs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_cli_docs", ROOT / "tools/make_cli_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_docs_are_up_to_date(make_cli_docs: ModuleType) -> None:
    written = (ROOT / "docs" / "cli.md").read_text("utf-8")
    assert written == make_cli_docs.document(), "run: python tools/make_cli_docs.py"


@pytest.mark.parametrize("columns", ["40", "200"])
def test_the_page_does_not_depend_on_the_terminal(
    columns: str, make_cli_docs: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = make_cli_docs.document()
    monkeypatch.setenv("COLUMNS", columns)
    assert make_cli_docs.document() == before


def test_every_verb_has_a_section(make_cli_docs: ModuleType) -> None:
    assert all(f"\n## kimi-k3 {verb}\n" in make_cli_docs.document() for verb in VERBS)
