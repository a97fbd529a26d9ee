"""Which builds of Kimi-K3 a Mac holds, and the most tokens a second that its memory allows.

Input: a Mac's memory and chip, a context. Output: `Row`s. All of it is a model but `RECORD`, a
measurement that others published. Sizes are the converter's own, of a K3 that has no files: the
config in `assets/` and the table of names say every tensor.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from itertools import product
from math import prod
from typing import NamedTuple

from converters.config import Dims, read_dims
from converters.names import TABLE, TRUNK, Entry
from kimi_k3_mlx.convert.memory import MacFit, Running, running
from kimi_k3_mlx.convert.plan import plan_build
from kimi_k3_mlx.convert.profiles import load_profile
from kimi_k3_mlx.reap.planner import FLOOR
from kimi_k3_mlx.reap.sizes import RUNS
from kimi_k3_mlx.runtime.chips import Chip
from kimi_k3_mlx.schema import DTYPE_BYTES, Json, SourceId, TensorInfo
from kimi_k3_mlx.tensors.local import LocalSource

PROFILES = ("mxfp4-q4", "mxfp4-q6", "mxfp4-q8", "mxfp4")
PUBLISHED = (
    (179, "mxfp4-q8"), (242, "mxfp4-q8"), (242, "mxfp4"),
    (320, "mxfp4"), (448, "mxfp4"), (896, "mxfp4"),
)  # fmt: skip
"""Experts a layer of builds on the Hub; from 320 on they are in Moonshot's layout there."""
N_EXPERTS, TOP_K = 896, 16
FEW = FLOOR * TOP_K
"""Fewer experts than this a plan keeps only when told to."""
NOT_READ = ("vision", "projector", "embedding", "expert")
"""Roles of which a decoded token reads nothing, one row, or only the chosen experts."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that go over the memory bus for one decoded token of one sequence."""

    trunk: int
    """Every text weight but the experts and the embedding, of which one row is read."""
    experts: int
    """The routed experts of a token, in all layers."""
    cache: int
    """The MLA latents of the whole context."""
    state: int
    """KDA's states and convolution inputs, read and written."""

    @property
    def total(self) -> int:
        """All of it."""
        return sum(asdict(self).values())

    def to_json(self) -> Json:
        """A JSON object."""
        return asdict(self) | {"total": self.total}


@dataclass(frozen=True)
class RoleSizes:
    """Bytes of K3 under a profile, by role, with as many experts as a token uses."""

    dims: Dims
    roles: Counter[str]

    def n_weights(self, keep: int) -> int:
        """Tensor bytes of the build with so many experts a layer: `BuildPlan.total_size`."""
        return sum(self._role(role, keep) for role in self.roles)

    def running(self, keep: int, context: int) -> Running:
        """What it holds in memory when it runs."""
        return running(self.dims, self.n_weights(keep), context)

    def traffic(self, keep: int, context: int) -> Traffic:
        """Bytes per decoded token."""
        memory = self.running(keep, context)
        return Traffic(
            trunk=sum(self._role(role, keep) for role in self.roles if role not in NOT_READ),
            experts=self.roles["expert"],
            cache=memory.n_cache,
            state=2 * memory.n_state,
        )

    def largest(self, ram_gib: int, context: int) -> int:
        """Most experts a layer with which a Mac runs it without a warning of mlx-lm.

        Where none fit, as many as a token uses, which is too many.
        """

        def too_many(keep: int) -> bool:
            return self.running(keep, context).on(ram_gib).verdict not in RUNS

        keeps = range(self.dims.top_k, N_EXPERTS + 1)
        return keeps[max(0, bisect_right(keeps, False, key=too_many) - 1)]

    def _role(self, role: str, keep: int) -> int:
        """Experts and the router's rows are as many as experts stay."""
        n_bytes = self.roles[role]
        return n_bytes // self.dims.top_k * keep if role in ("expert", "router") else n_bytes


class Record(NamedTuple):
    """A speed that somebody measured."""

    tokens_per_second: float
    chip: str
    keep: int
    profile: str
    source: str


RECORD = Record(5.5, "M3 Ultra", 242, "mxfp4-q8", "published by PipeNetwork/kimi-k3-mlx, not ours")
RECORD_CONTEXT = 128  # 96 tokens after short prompts
RECORD_BANDWIDTH = 819e9


@dataclass(frozen=True)
class Row:
    """One build on one Mac."""

    profile: str
    keep: int
    """Experts a layer."""
    published: bool
    """Whether it is on the Hub; else it is the largest that can be planned for this Mac."""
    memory: Running
    fit: MacFit
    traffic: Traffic
    ceiling: float | None
    """Tokens a second when nothing but memory takes time: bandwidth over bytes; a model. None for
    an unknown chip, and for what doesn't fit: unwired weights have no speed worth the name."""
    measured: Record | None
    """A measurement of this very build on this chip."""

    def to_json(self) -> Json:
        """A JSON object; each speed says what it is."""
        return {
            "profile": self.profile,
            "keep": self.keep,
            "published": self.published,
            "n_weights": self.memory.n_weights,
            "running": self.memory.n_bytes,
            "verdict": self.fit.verdict,
            "wired_limit_mb": self.fit.wired_limit_mb,
            "bytes_per_token": self.traffic.to_json(),
            "tokens_per_second": {
                "ceiling": self.ceiling,
                "expected": self.expected,
                "kind": "model",
            },
            "measured": self.measured and self.measured._asdict(),
        }

    @property
    def expected(self) -> float | None:
        """The ceiling times the share of it that the published measurement reached; a model."""
        return self.ceiling and self.ceiling * record_share()


def rows(ram_gib: int, chip: Chip | None, context: int) -> list[Row]:
    """The largest build of every profile that a Mac runs, then the published ones."""
    largest = [(sizes(name).largest(ram_gib, context), name) for name in PROFILES]
    builds = [(*build, False) for build in largest] + [(*build, True) for build in PUBLISHED]
    return [_row(keep, name, published, ram_gib, chip, context) for keep, name, published in builds]


def _row(
    keep: int, name: str, published: bool, ram_gib: int, chip: Chip | None, context: int
) -> Row:
    memory, traffic = sizes(name).running(keep, context), sizes(name).traffic(keep, context)
    fit = memory.on(ram_gib)
    is_record = chip is not None and (chip.name, keep, name) == RECORD[1:4]
    return Row(
        profile=name,
        keep=keep,
        published=published,
        memory=memory,
        fit=fit,
        traffic=traffic,
        ceiling=chip.bandwidth / traffic.total if chip and fit.verdict != "no" else None,
        measured=RECORD if is_record else None,
    )


def record_share() -> float:
    """How much of its ceiling the published measurement reached, with a short context: 0.57."""
    traffic = sizes(RECORD.profile).traffic(RECORD.keep, RECORD_CONTEXT)
    return RECORD.tokens_per_second * traffic.total / RECORD_BANDWIDTH


@cache
def sizes(name: str) -> RoleSizes:
    """Sizes of K3 under a profile that comes with the package, from one plan of 9,000 tensors."""
    source = nominal_source(k3_config())
    roles: Counter[str] = Counter()
    for tensor in plan_build(source, load_profile(name)).tensors:
        roles[tensor.role] += tensor.n_bytes
    return RoleSizes(read_dims(source.config), roles)


def k3_config(n_experts: int = TOP_K) -> Json:
    """The config.json of moonshotai/Kimi-K3, with another number of experts a layer."""
    path = resources.files("kimi_k3_mlx") / "assets" / "k3_config.json"
    config: Json = json.loads(path.read_text("utf-8"))
    config["text_config"]["num_experts"] = n_experts
    return config


def nominal_source(config: Json) -> LocalSource:
    """A checkpoint that has every tensor's description, as config and table say, and no file."""
    dims = read_dims(config)
    tensors = {}
    for entry in TABLE:
        shape = dims.shapes(entry.shape)[0]
        dtype = "BF16" if entry.dtype == TRUNK else entry.dtype
        n_bytes = prod(shape) * DTYPE_BYTES[dtype]
        for numbers in occurrences(entry, dims):
            name = entry.source.format(*numbers)
            tensors[name] = TensorInfo(name, dtype, shape, 0, n_bytes)
    nowhere = dict.fromkeys(tensors, "")
    return LocalSource("Kimi-K3", SourceId(None, ""), config, {}, nowhere, tensors)


def occurrences(entry: Entry, dims: Dims) -> Iterator[tuple[int, ...]]:
    """The numbers of layer and expert, or of block, under which a row of the table occurs."""
    every = frozenset(range(dims.n_layers))
    layers = {
        "layer": every,
        "kda": every - dims.mla_layers,
        "mla": dims.mla_layers,
        "dense": every - dims.moe_layers,
        "moe": dims.moe_layers,
        "block": range(dims.n_blocks),
    }
    if entry.scope == "expert":
        return product(dims.moe_layers, range(dims.n_experts))
    return ((number,) for number in layers[entry.scope]) if entry.scope in layers else iter([()])
