"""What `benchmarks.pruning` measured, as added nats a token with intervals.

Input: its results.json. Output: values of recipes, averaged over their seeds and over domains.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from kimi_k3_mlx.reap.intervals import LEVEL, Resampled, resample

LADDER = ("random", "frequency", "weighted-ean", "reap", "loo")
LABELS = {
    "random": "random (5 seeds)",
    "frequency": "frequency, n/T",
    "weighted-ean": "weighted-ean, Σc/T",
    "reap": "reap, Σc/n",
    "loo": "loo, ΣΔ/n",
}
DOMAINS = ("code", "english", "chinese")
MIDDLE = (32, 16)


class Value(NamedTuple):
    """Nats a token, with the ends of its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"

    @property
    def differs(self) -> bool:
        """Whether 0 is outside."""
        return self.low > 0 or self.high < 0


class Results:
    """Added nats a token of recipes, averaged over their seeds and over the domains asked for."""

    def __init__(self, results: dict[str, Any]) -> None:
        self.raw = results
        documents = results["documents"]
        self.names = list(documents["plans"])
        self.keeps: list[int] = results["keeps"]
        self.n_experts: int = results["n_experts"]
        columns = [documents["tokens"], documents["parent"]]
        columns += [documents["plans"][name]["nll"] for name in self.names]
        groups = np.array([DOMAINS.index(domain) for domain in documents["domains"]])
        self.resampled: Resampled = resample(np.array(columns).T, groups, len(DOMAINS))

    @cached_property
    def replicas(self) -> np.ndarray:
        """Added nats [1 + resamples, domains, plans]; the first row is the measured one."""
        sums = np.concatenate([self.resampled.sums[None], self.resampled.replicas])[:, :-1]
        return (sums[:, :, 2:] - sums[:, :, 1:2]) / sums[:, :, :1]

    def seeds(self, recipe: str, keep: int) -> list[int]:
        """Where a recipe's plans are."""
        return [at for at, name in enumerate(self.names) if name.startswith(f"{recipe}/{keep}/")]

    def added(self, recipe: str, keep: int, domains: tuple[str, ...] = DOMAINS) -> Value:
        """Against the parent."""
        return interval(self._mean(recipe, keep, domains))

    def against(
        self, recipe: str, other: str, keep: int, domains: tuple[str, ...] = DOMAINS
    ) -> Value:
        """Against another recipe, on the same documents."""
        return interval(self._mean(recipe, keep, domains) - self._mean(other, keep, domains))

    def by_seed(self, recipe: str, keep: int) -> np.ndarray:
        """Each seed's added nats, mean of the domains."""
        return self.replicas[0][:, self.seeds(recipe, keep)].mean(0)

    def retained(self, recipe: str, keep: int, domain: str) -> float:
        """Share of a domain's Σc that a recipe keeps, mean of its seeds."""
        rows = self.raw["retained"]
        names = [self.names[at] for at in self.seeds(recipe, keep)]
        return float(np.mean([rows[name]["mass"][domain] for name in names]))

    def _mean(self, recipe: str, keep: int, domains: tuple[str, ...]) -> np.ndarray:
        where = [DOMAINS.index(domain) for domain in domains]
        return self.replicas[:, where][:, :, self.seeds(recipe, keep)].mean((1, 2))


def interval(replicas: np.ndarray) -> Value:
    """The measured value, and the quantiles of the others."""
    edge = (1 - LEVEL) / 2
    low, high = np.quantile(replicas[1:], (edge, 1 - edge))
    return Value(float(replicas[0]), float(low), float(high))


def share(results: Results, keep: int) -> str:
    """`50 %`."""
    return f"{100 * keep / results.n_experts:g} %"
