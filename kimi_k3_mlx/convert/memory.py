"""What a build needs in memory when it runs, and on which Macs that is there.

Input: the config's sizes and the bytes of the weights. Output: `Running` and one `MacFit` per size
of Mac. A model, not a measurement; weights must be wired, or decoding is many times slower.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import ceil

from converters.config import Dims
from kimi_k3_mlx.schema import Json

MIB, GIB = 1 << 20, 1 << 30
MACS = (64, 96, 128, 192, 256, 512)
"""Unified memory of Macs that are sold, in GiB."""
SYSTEM_RESERVE = 16 * GIB
DEFAULT_WIRED = 0.75  # of RAM; 0.66 to 0.81 by machine, which kimi-k3 doctor reads
WIRED_WEIGHTS = 0.9  # mlx-lm warns when weights are more than this share of the limit
ACTIVATIONS = 2 * 10**9  # a prefill step of 2,048 tokens
CACHE_BYTES = 2  # BF16
STATE_BYTES = 4  # F32


@dataclass(frozen=True)
class MacFit:
    """Whether a Mac holds the build: `yes`, `raise` (the wired limit), `tight` or `no`."""

    ram_gib: int
    verdict: str
    wired_limit_mb: int
    """What `iogpu.wired_limit_mb` has to be, in MiB."""


@dataclass(frozen=True)
class Running:
    """Bytes that a running build holds, for one sequence."""

    context: int
    n_weights: int
    n_cache: int
    """Latent cache of the MLA layers, for the whole context."""
    n_state: int
    """KDA states and convolution inputs."""
    n_activations: int = ACTIVATIONS

    @property
    def n_bytes(self) -> int:
        """All of it."""
        return self.n_weights + self.n_cache + self.n_state + self.n_activations

    def on(self, ram_gib: int) -> MacFit:
        """How it fits on a Mac."""
        ram = ram_gib * GIB
        quiet = ceil(max(self.n_weights / WIRED_WEIGHTS, self.n_bytes) / MIB)
        most = (ram - SYSTEM_RESERVE) // MIB
        if quiet <= DEFAULT_WIRED * ram / MIB:
            return MacFit(ram_gib, "yes", quiet)
        if quiet <= most:
            return MacFit(ram_gib, "raise", quiet)
        return MacFit(ram_gib, "tight" if self.n_bytes <= most * MIB else "no", most)

    def to_json(self) -> Json:
        """A JSON object, with every Mac."""
        return asdict(self) | {
            "n_bytes": self.n_bytes,
            "macs": [asdict(self.on(ram)) for ram in MACS],
        }


def running(dims: Dims, n_weights: int, context: int) -> Running:
    """Memory of a running build: 27,648 bytes a token and 0.45 GB of state for the real K3."""
    n_kda = dims.n_layers - len(dims.mla_layers)
    head_dim, width = dims.sizes["head_dim"], dims.sizes["kda"]
    recurrent = width * head_dim * STATE_BYTES
    conv = 3 * width * (dims.sizes["conv"] - 1) * CACHE_BYTES
    latent = dims.sizes["mla_kv_a"] * CACHE_BYTES
    return Running(
        context=context,
        n_weights=n_weights,
        n_cache=len(dims.mla_layers) * latent * context,
        n_state=n_kda * (recurrent + conv),
    )
