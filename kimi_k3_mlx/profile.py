"""A published build as data: how it stores the experts and each part of the trunk.

Input: nothing, or a JSON object. Output: `Profile`, and what it says about one module.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase

from kimi_k3_mlx.errors import UsageError
from kimi_k3_mlx.schema import MXFP4, Json, Quantization

EXPERT_BITS, EXPERT_GROUPS = (2, 3), (32, 64, 128)
Formats = tuple[tuple[str, Quantization | None], ...]


@dataclass(frozen=True)
class Profile:
    """How a build stores experts and trunk; read from `profiles/*.toml`."""

    name: str
    summary: str
    layout: str = "mlx"
    """`mlx`, or `moonshot`: the source's own names and files."""
    experts: Quantization = MXFP4
    """MXFP4: the source's bytes."""
    trunk: Quantization | None = None
    """None: the source's values."""
    roles: Formats = ()
    """What differs from `trunk`, by role."""
    overrides: Formats = ()
    """What differs from that, by a glob pattern of module paths; the last match counts."""
    narrow: tuple[str, ...] = ()
    """Modules of KDA whose F32 weight becomes BF16, for stock loaders: `qkv_conv`, `o_norm`."""
    version: int = 1

    def format_of(self, module: str, role: str) -> Quantization | None:
        """How a trunk matrix that may be quantized is stored; None: as it is."""
        matching = [value for pattern, value in self.overrides if fnmatchcase(module, pattern)]
        return matching[-1] if matching else dict(self.roles).get(role, self.trunk)

    def to_json(self) -> Json:
        """A JSON object."""
        return asdict(self) | {
            "experts": self.experts.to_json(),
            "trunk": _to_json(self.trunk),
            "roles": {role: _to_json(value) for role, value in self.roles},
            "overrides": {pattern: _to_json(value) for pattern, value in self.overrides},
            "narrow": list(self.narrow),
        }

    @classmethod
    def from_json(cls, value: Json) -> Profile:
        """Read `to_json`'s object; raise AttributeError, KeyError or TypeError when damaged."""
        formats = {
            name: tuple((key, _from_json(item)) for key, item in value[name].items())
            for name in ("roles", "overrides")
        }
        single = {name: _from_json(value[name]) for name in ("experts", "trunk")}
        return cls(**value | formats | single | {"narrow": tuple(value["narrow"])})


def affine(value: Json, what: str, bits: tuple[int, ...], groups: tuple[int, ...]) -> Quantization:
    """An affine format from `bits` and `group_size`; raise UsageError unless both are allowed."""
    for field, allowed in (("bits", bits), ("group_size", groups)):
        if type(value.get(field)) is not int or value[field] not in allowed:
            choices = ", ".join(map(str, allowed))
            raise UsageError(f"{what}: {field} is {value.get(field)!r}, expected one of {choices}.")
    if extra := sorted(value.keys() - {"bits", "group_size"}):
        raise UsageError(f"{what}: unknown field {extra[0]!r}.", "known fields: bits, group_size.")
    return Quantization("affine", value["bits"], value["group_size"])


def _to_json(value: Quantization | None) -> Json | None:
    return value.to_json() if value else None


def _from_json(value: Json | None) -> Quantization | None:
    return Quantization(**value) if value else None
