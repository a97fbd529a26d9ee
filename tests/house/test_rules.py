"""The rules of DESIGN.md, counted on the work tree; each checker is shown a bad sample first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pytest

from tests.house import checks
from tests.house.checks import Module

Rule = Callable[[Module], Iterator[str]]

RULES: dict[str, tuple[Rule, Callable[[], list[Module]]]] = {
    "imports run downward": (checks.import_findings, checks.product_modules),
    "parts stay pure": (checks.purity_findings, checks.product_modules),
    "returns are annotated": (
        checks.annotation_findings,
        lambda: checks.package() + checks.load_modules("converters/**/*.py"),
    ),
    "modules say what they are": (
        checks.docstring_findings,
        lambda: checks.product_modules() + checks.developer_modules(),
    ),
    "only cli talks and exits": (checks.call_findings, checks.product_modules),
    "guards are real": (checks.guard_findings, checks.product_modules),
    "imports have no side effects": (checks.side_effect_findings, checks.product_modules),
}

BAD: list[tuple[str, str, str]] = [
    ("imports run downward", "kimi_k3.py", "import converters.names"),
    ("imports run downward", "converters/names.py", "from kimi_k3_mlx.tensors import header"),
    ("imports run downward", "kimi_k3_mlx/tensors/header.py", "from kimi_k3_mlx import convert"),
    ("imports run downward", "kimi_k3_mlx/tensors/header.py", "from ..convert import plan"),
    ("imports run downward", "kimi_k3_mlx/tensors/__init__.py", "from ..cli import main"),
    ("imports run downward", "kimi_k3_mlx/convert/run.py", "import kimi_k3_mlx.stream.engine"),
    ("imports run downward", "kimi_k3_mlx/runtime/load.py", "def f():\n    import kimi_k3_mlx.cli"),
    ("imports run downward", "kimi_k3_mlx/errors.py", "from kimi_k3_mlx import load"),
    ("parts stay pure", "kimi_k3.py", "import torch"),
    ("parts stay pure", "kimi_k3_vision.py", "from kimi_k3_mlx.errors import KimiError"),
    ("parts stay pure", "kimi_k3_mlx/tensors/header.py", "import mlx.core as mx"),
    ("parts stay pure", "converters/names.py", "from pathlib import Path"),
    ("returns are annotated", "converters/names.py", "class A:\n    def f(self): ..."),
    ("modules say what they are", "converters/names.py", "x = 1"),
    ("only cli talks and exits", "kimi_k3_mlx/convert/run.py", "print('hello')"),
    ("only cli talks and exits", "kimi_k3_mlx/convert/run.py", "raise SystemExit(1)"),
    ("only cli talks and exits", "kimi_k3.py", "import sys\nsys.exit(1)"),
    ("guards are real", "kimi_k3.py", "def f(x):\n    assert x > 0"),
    ("guards are real", "kimi_k3.py", "try:\n    f()\nexcept:\n    pass"),
    ("guards are real", "kimi_k3.py", "try:\n    f()\nexcept (OSError, Exception):\n    pass"),
    (
        "guards are real",
        "kimi_k3.py",
        "def f():\n    try:\n        g()\n    except BaseException:\n        if h():\n"
        "            return\n        raise",
    ),
    ("imports have no side effects", "kimi_k3.py", "import os\nos.environ['A'] = 'b'"),
    ("imports have no side effects", "kimi_k3.py", "import logging\nlogging.basicConfig()"),
]

GOOD: list[tuple[str, str, str]] = [
    ("imports run downward", "kimi_k3_mlx/convert/run.py", "from kimi_k3_mlx import __version__"),
    ("imports run downward", "kimi_k3_mlx/cli/convert.py", "from kimi_k3_mlx.convert import run"),
    ("imports run downward", "kimi_k3_mlx/tensors/source.py", "from .header import read_header"),
    ("imports run downward", "kimi_k3_mlx/schema.py", "from kimi_k3_mlx.errors import KimiError"),
    ("imports run downward", "kimi_k3_mlx/stream/engine.py", "import kimi_k3, converters.names"),
    ("parts stay pure", "kimi_k3.py", "import math\nfrom mlx_lm.models.cache import KVCache"),
    ("modules say what they are", "tests/model/__init__.py", ""),
    ("only cli talks and exits", "kimi_k3_mlx/cli/demo.py", "print('hello')"),
    (
        "guards are real",
        "kimi_k3_mlx/tensors/writer.py",
        "try:\n    f()\nexcept BaseException:\n    tidy()\n    raise",
    ),
    ("guards are real", "kimi_k3.py", "try:\n    f()\nexcept (OSError, KeyError):\n    pass"),
]


@pytest.mark.parametrize("rule", RULES)
def test_the_work_tree_keeps_the_rule(rule: str) -> None:
    check, modules = RULES[rule]
    assert [finding for module in modules() for finding in check(module)] == []


@pytest.mark.parametrize(("rule", "path", "text"), BAD)
def test_the_rule_catches_a_bad_sample(rule: str, path: str, text: str) -> None:
    assert list(RULES[rule][0](Module(path, text)))


@pytest.mark.parametrize(("rule", "path", "text"), GOOD)
def test_the_rule_lets_a_good_sample_pass(rule: str, path: str, text: str) -> None:
    assert list(RULES[rule][0](Module(path, text))) == []


def test_the_work_tree_was_found() -> None:
    """An empty list of modules would let every rule pass."""
    paths = {module.path for module in checks.product_modules() + checks.developer_modules()}
    assert {"kimi_k3.py", "kimi_k3_mlx/cli/__init__.py", "tests/house/checks.py"} <= paths


def test_nothing_is_too_long() -> None:
    every = checks.product_modules() + checks.developer_modules()
    assert list(checks.long_findings(every)) == []


@pytest.mark.parametrize("n_lines", [61, 351])
def test_too_long_is_caught(n_lines: int) -> None:
    text = "def f():\n" + "    x = 1\n" * (n_lines - 1)
    assert list(checks.long_findings([Module("converters/names.py", text)]))


def test_a_model_file_may_be_longer() -> None:
    text = "x = 1\n" * 1100
    assert not list(checks.long_findings([Module("kimi_k3.py", text)]))
    assert list(checks.long_findings([Module("kimi_k3.py", text + "x = 1\n")]))


def test_golden_vectors_stay_small_enough_to_commit() -> None:
    sizes = [path.stat().st_size for path in (checks.ROOT / "tests" / "golden").iterdir()]
    assert 10**6 < sum(sizes) <= 15 * 10**6


def within_budget(modules: Iterable[Module]) -> bool:
    median, ninth_decile = checks.budget(modules)
    return median <= 12 and ninth_decile <= 35


def test_functions_are_small() -> None:
    assert within_budget(checks.product_modules()), checks.budget(checks.product_modules())


def function_of(n_lines: int) -> str:
    return "def f():\n" + "    x = 1\n" * (n_lines - 1)


def test_the_budget_can_be_exceeded() -> None:
    small, middle, big = (Module("a.py", function_of(n)) for n in (5, 13, 40))
    assert within_budget([small] * 10 + [middle])
    assert not within_budget([middle] * 10)
    assert not within_budget([small] * 6 + [big] * 3)
