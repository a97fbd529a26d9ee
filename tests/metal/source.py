"""From the source of a Metal kernel to a shared library.

Input: what a kernel was made from and the parameters of one instance. Output: its launch function.
The signature is the one that MLX generates (mlx/backend/common/metal_kernel.cpp), the compiler is
g++ with shim.h, and compiled kernels stay in a cache folder under the hash of all they depend on.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

HERE = Path(__file__).parent
SHIM = HERE / "shim.h"
CXX = ("g++", "-std=c++20", "-O2", "-fPIC", "-shared", "-w")
# Metal literals are float, and contraction would hide the difference to the ops twin.
CXX_FLAGS = ("-fsingle-precision-constant", "-ffp-contract=off", "-U_FORTIFY_SOURCE")
FORBIDDEN = "double goto new delete throw try catch virtual dynamic_cast typeid"

METAL_TYPES = {
    mx.bool_: "bool",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.float16: "float16_t",
    mx.bfloat16: "bfloat16_t",
    mx.float32: "float",
}

ATTRIBUTES = {
    "dispatch_threads_per_threadgroup": "uint3",
    "simdgroup_index_in_threadgroup": "uint",
    "simdgroups_per_threadgroup": "uint",
    "thread_execution_width": "uint",
    "thread_index_in_simdgroup": "uint",
    "thread_index_in_threadgroup": "uint",
    "thread_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
    "threads_per_grid": "uint3",
    "threads_per_simdgroup": "uint",
    "threads_per_threadgroup": "uint3",
}
"""What MLX turns into a kernel parameter when the source names it, as far as shim.h has it."""

Template = Sequence[tuple[str, Any]]


class EmulatorError(RuntimeError):
    """A kernel that does not compile, or that misbehaves while it runs."""


@dataclass(frozen=True)
class Parameter:
    """One buffer parameter of a kernel; a scalar is passed by reference, as in MLX."""

    type: str
    name: str
    scalar: bool = False

    @property
    def declaration(self) -> str:
        """As it stands in the kernel's signature."""
        return f"{self.type}{'&' if self.scalar else '*'} {self.name}"

    def argument(self, index: int) -> str:
        """As the launcher passes buffer number `index`."""
        return f"{'*' if self.scalar else ''}({self.type}*)buffers[{index}]"


def strip_comments(source: str) -> str:
    """The source without comments, every line still on its line."""
    source = re.sub(r"//[^\n]*", "", source)
    return re.sub(r"/\*.*?\*/", lambda m: "\n" * m[0].count("\n"), source, flags=re.DOTALL)


def translate(source: str) -> str:
    """MSL's address space words in a form that shim.h can define as macros."""

    def declare(match: re.Match[str]) -> str:
        if match["end"] == "=":
            raise EmulatorError(f"threadgroup variable '{match['name']}' has an initial value")
        return f"EMU_THREADGROUP {match['type']} {match['name']}{match['end']}"

    variable = r"\bthreadgroup\s+(?P<type>[\w:<>, ]+?)\s+(?P<name>\w+)\s*(?P<end>[\[;=,])"
    source = re.sub(variable, declare, strip_comments(source))
    source = re.sub(r"\bthreadgroup\b", "", source)
    return re.sub(r"\bconst\s+constant\b|\bconstant\s+const\b", "constant", source)


def template_definitions(template: Template) -> str:
    """Template arguments as constants and type names; the shim compiles one instance at a time."""
    lines = []
    for name, value in template:
        if isinstance(value, mx.Dtype):
            lines.append(f"typedef {METAL_TYPES[value]} {name};")
        elif isinstance(value, bool):
            lines.append(f"constexpr bool {name} = {str(value).lower()};")
        elif isinstance(value, int):
            lines.append(f"constexpr int {name} = {value};")
        else:
            raise ValueError(f"template argument {name!r} is a {type(value).__name__}")
    return "\n".join(lines)


def generate(
    name: str, header: str, source: str, template: Template, parameters: Sequence[Parameter]
) -> str:
    """The C++ file of one kernel instance: shim, header, kernel, launcher."""
    attributes = [(a, t) for a, t in ATTRIBUTES.items() if a in source]
    declared = [p.declaration for p in parameters] + [f"{t} {a}" for a, t in attributes]
    passed = [p.argument(i) for i, p in enumerate(parameters)]
    passed += [f"emu::{a}()" for a, _ in attributes]
    return f"""#include "shim.h"
#pragma GCC poison {FORBIDDEN}
#line 1 "{name} (header)"
{translate(header)}
{template_definitions(template)}
static void metal_kernel({", ".join(declared)}) {{
#line 1 "{name}"
{translate(source)}
}}
static void** buffers;
static void run_thread() {{ metal_kernel({", ".join(passed)}); }}
extern "C" const char* launch(void** arguments, const uint* sizes, int reverse) {{
  buffers = arguments;
  return emu::launch(run_thread, sizes, reverse);
}}
"""


def cache_folder() -> Path:
    """Where compiled kernels stay between runs."""
    folder = Path(tempfile.gettempdir()) / f"kimi-k3-metal-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    return folder


@functools.cache
def compile_kernel(name: str, code: str) -> Any:
    """The launch function of a generated file; compiles only what no earlier run has compiled."""
    shim = SHIM.read_text() + (HERE / "fibers.h").read_text()
    key = hashlib.sha256("\0".join((code, shim, *CXX, *CXX_FLAGS)).encode()).hexdigest()[:20]
    library = cache_folder() / f"{name}-{key}.so"
    if not library.exists():
        source, temporary = library.with_suffix(".cpp"), library.with_suffix(f".{os.getpid()}.tmp")
        source.write_text(code)
        command = [*CXX, *CXX_FLAGS, "-I", str(HERE), str(source), "-o", str(temporary)]
        english = os.environ | {"LC_ALL": "C"}
        result = subprocess.run(command, capture_output=True, text=True, check=False, env=english)
        if result.returncode:
            raise EmulatorError(f"kernel '{name}' does not compile:\n{result.stderr[:3000]}")
        temporary.replace(library)
    function = ctypes.CDLL(str(library)).launch
    function.restype = ctypes.c_char_p
    return function
