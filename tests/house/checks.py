"""The rules of the house as functions from source text to findings.

Input: parsed modules of the work tree (or of a bad sample in a test). Output: one sentence per
finding. Nothing here imports or executes the code that it judges.
"""

from __future__ import annotations

import ast
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

RANKS = {
    "kimi_k3": 0,
    "kimi_k3_vision": 0,
    "kimi_k3_vl": 0,
    "converters": 1,
    "kimi_k3_mlx.errors": 1,
    "kimi_k3_mlx.profile": 1,
    "kimi_k3_mlx.prune_plan": 1,
    "kimi_k3_mlx.schema": 1,
    "kimi_k3_mlx.units": 1,
    "kimi_k3_mlx.chat": 2,
    "kimi_k3_mlx.tensors": 2,
    "kimi_k3_mlx.convert": 3,
    "kimi_k3_mlx.stream": 3,
    "kimi_k3_mlx.vision": 4,
    "kimi_k3_mlx.reap": 5,
    "kimi_k3_mlx.runtime": 6,
    "kimi_k3_mlx.hub": 6,
    "kimi_k3_mlx.cli": 7,
    "kimi_k3_mlx": 8,
}
"""Height of each part: imports run downward only. The package itself may re-export anything."""

ROOT_FILE_IMPORTS = {"mlx", "mlx_lm", "numpy", "kimi_k3", "kimi_k3_vision", "kimi_k3_vl"}
"""What a root file may import besides the standard library: a published build carries a copy."""

VISION_IMPORTS = {"mlx_vlm", "PIL"}
"""What `kimi_k3_vl` may import too: who shows pictures has installed the extra `vision`."""

PURE_FORBIDDEN = {"os", "io", "pathlib", "shutil", "socket", "subprocess", "tempfile", "urllib"}
"""Converters take arrays and give arrays: no files, no network."""


@dataclass(frozen=True)
class Module:
    """One parsed source file."""

    path: str
    """Relative to the work tree."""
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree."""
        return ast.parse(self.text)

    @property
    def name(self) -> str:
        """The dotted name under which it is imported."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def is_package(self) -> bool:
        """Whether relative imports start at the module itself."""
        return self.path.endswith("/__init__.py")


@cache
def load_modules(*patterns: str) -> list[Module]:
    """Every module of the work tree that matches one of the glob patterns."""
    paths = sorted({p for pattern in patterns for p in ROOT.glob(pattern)})
    return [Module(p.relative_to(ROOT).as_posix(), p.read_text("utf-8")) for p in paths]


def product_modules() -> list[Module]:
    """The code that ships."""
    return load_modules("kimi_k3*.py", "kimi_k3_vl/**/*.py", "converters/**/*.py") + package()


def package() -> list[Module]:
    """The modules of the package `kimi_k3_mlx`."""
    return load_modules("kimi_k3_mlx/**/*.py")


def developer_modules() -> list[Module]:
    """Tests, tools and benchmarks."""
    return load_modules("tests/**/*.py", "tools/**/*.py", "benchmarks/**/*.py")


def imported_names(module: Module) -> Iterator[tuple[int, str]]:
    """Line and absolute name of every import, wherever it stands, `from a import b` as a.b."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute_base(module, node)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def absolute_base(module: Module, node: ast.ImportFrom) -> str:
    """The module that a `from … import` names, dots resolved."""
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    kept = parts[: len(parts) - node.level + module.is_package]
    return ".".join([*kept, node.module] if node.module else kept)


def part_of(name: str) -> str | None:
    """The part of the house to which a dotted name belongs; None if it is not ours."""
    pieces = name.split(".")
    for n in (2, 1):
        if ".".join(pieces[:n]) in RANKS:
            return ".".join(pieces[:n])
    return None


def import_findings(module: Module) -> Iterator[str]:
    """Imports that run upward, or sideways between neighbours from `convert` on."""
    own = part_of(module.name)
    if own is None:
        return
    for line, name in imported_names(module):
        other = part_of(name)
        if other is None or other == own or name == "kimi_k3_mlx.__version__":
            continue
        sideways = RANKS[other] == RANKS[own] >= 3
        if RANKS[other] > RANKS[own] or sideways:
            yield f"{module.path}:{line} imports {name}: {own} must not import {other}"


def purity_findings(module: Module) -> Iterator[str]:
    """mlx in the bytes layer, files or network in the converters, strangers in root files."""
    import sys

    own, rank = part_of(module.name), RANKS.get(part_of(module.name) or "", 9)
    for line, name in imported_names(module):
        top = name.split(".")[0]
        allowed = ROOT_FILE_IMPORTS | (VISION_IMPORTS if own == "kimi_k3_vl" else set())
        if rank == 0 and top not in allowed and top not in sys.stdlib_module_names:
            yield f"{module.path}:{line} imports {name}: a root file may not"
        if own == "kimi_k3_mlx.tensors" and top in {"mlx", "mlx_lm"}:
            yield f"{module.path}:{line} imports {name}: the bytes layer knows no arrays of mlx"
        if own == "converters" and top in PURE_FORBIDDEN:
            yield f"{module.path}:{line} imports {name}: converters are pure functions"


def functions(module: Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function and method."""
    return (node for node in ast.walk(module.tree) if isinstance(node, FUNCTIONS))


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the last one."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def long_findings(modules: Iterable[Module]) -> Iterator[str]:
    """Functions over 60 lines; files over 350 lines (kimi_k3.py: 1,100)."""
    for module in modules:
        n_lines = len(module.text.splitlines())
        limit = 1100 if module.path == "kimi_k3.py" else 350
        if n_lines > limit:
            yield f"{module.path} has {n_lines} lines, {limit} allowed"
        for function in functions(module):
            if length(function) > 60:
                yield f"{module.path}:{function.lineno} {function.name}: {length(function)} lines"


def budget(modules: Iterable[Module]) -> tuple[float, float]:
    """Median and 90th percentile of the function lengths."""
    lengths = [length(f) for module in modules for f in functions(module)]
    return statistics.median(lengths), statistics.quantiles(lengths, n=10)[-1]


def annotation_findings(module: Module) -> Iterator[str]:
    """Functions without a return annotation."""
    for function in functions(module):
        if function.returns is None:
            yield f"{module.path}:{function.lineno} {function.name} has no return annotation"


def docstring_findings(module: Module) -> Iterator[str]:
    """Modules that do not begin by saying what they are."""
    if module.tree.body and not ast.get_docstring(module.tree):
        yield f"{module.path} has no module docstring"


def call_findings(module: Module) -> Iterator[str]:
    """Printing and exiting, which only `cli/` may do."""
    if part_of(module.name) == "kimi_k3_mlx.cli" or module.name == "kimi_k3_mlx.__main__":
        return
    for node in ast.walk(module.tree):
        name = ast.unparse(node) if isinstance(node, (ast.Name, ast.Attribute)) else ""
        if name in {"print", "sys.exit", "os._exit", "SystemExit", "exit", "quit"}:
            yield f"{module.path}:{node.lineno} uses {name}: only cli/ talks and exits"


def guard_findings(module: Module) -> Iterator[str]:
    """`assert` in code that ships, and handlers that swallow everything."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Assert):
            yield f"{module.path}:{node.lineno} assert: gone under -O, raise KimiError instead"
        if isinstance(node, ast.ExceptHandler) and catches_everything(node) and not passes_on(node):
            yield f"{module.path}:{node.lineno} catches everything: name the exceptions"


def catches_everything(handler: ast.ExceptHandler) -> bool:
    """A bare `except`, or one that names Exception or BaseException."""
    if handler.type is None:
        return True
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(ast.unparse(kind) in {"Exception", "BaseException"} for kind in kinds)


def passes_on(handler: ast.ExceptHandler) -> bool:
    """Whether a handler only tidies up: it ends with a bare `raise` and cannot leave before."""
    last = handler.body[-1]
    leaves = any(
        isinstance(node, (ast.Return, ast.Break, ast.Continue)) for node in ast.walk(handler)
    )
    return isinstance(last, ast.Raise) and last.exc is None and not leaves


def side_effect_findings(module: Module) -> Iterator[str]:
    """Calls as statements, and environment writes, at import time."""
    for node in module.tree.body:
        called = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        targets = node.targets if isinstance(node, ast.Assign) else []
        environment = any(ast.unparse(t).startswith("os.environ") for t in targets)
        if called or environment:
            yield f"{module.path}:{node.lineno} acts at import: {ast.unparse(node)}"
