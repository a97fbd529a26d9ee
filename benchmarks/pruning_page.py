"""Tables and figures of what `benchmarks.pruning` measured.

Input: its results.json. Output: README.md and figures beside it. Every number is computed here from
the sums of each plan and document; intervals are of documents drawn again, within each domain.

    python -m benchmarks.pruning_page [docs/evidence]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.pruning_figures import figure_ladder, figure_languages
from benchmarks.pruning_results import DOMAINS, LABELS, LADDER, MIDDLE, Results, share
from kimi_k3_mlx.reap.criteria import Z95


def table(head: list[str], rows: list[list[str]]) -> str:
    """Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def ladder(results: Results) -> str:
    """Criteria by size."""
    keeps = results.keeps
    rows = [
        [LABELS[name], *(f"{results.added(name, keep).value:.3f}" for keep in keeps)]
        for name in LADDER
    ]
    spread = [results.by_seed("random", keep) for keep in keeps]
    rows.insert(
        1, ["— its least and most", *(f"{one.min():.3f} to {one.max():.3f}" for one in spread)]
    )
    return table(["kept", *(share(results, keep) for keep in keeps)], rows)


def paired(results: Results) -> str:
    """Each criterion against REAP, on the same documents."""
    rows = []
    for name in LADDER:
        if name != "reap":
            values = [results.against(name, "reap", keep) for keep in results.keeps]
            cells = [f"**{value}**" if value.differs else str(value) for value in values]
            rows.append([LABELS[name], *cells])
    return table(["minus reap", *(share(results, keep) for keep in results.keeps)], rows)


def seeds(results: Results) -> str:
    """How much the draw of the calibration text moves the result."""
    rows = []
    for name in LADDER[1:]:
        values = [results.by_seed(name, keep) for keep in results.keeps]
        rows.append([LABELS[name], *(f"{np.ptp(one):.3f}" for one in values)])
    return table(["most − least", *(share(results, keep) for keep in results.keeps)], rows)


def languages(results: Results) -> str:
    """With and without Chinese."""
    rows = []
    for keep in MIDDLE:
        for recipe, what in (
            ("reap", "all three"),
            ("reap-without-chinese", "without Chinese"),
            ("reap-code-only", "code only"),
        ):
            added = [str(results.added(recipe, keep, (domain,))) for domain in DOMAINS]
            masses = [results.retained(recipe, keep, name) for name in DOMAINS]
            mass = " / ".join(f"{one:.3f}" for one in masses)
            rows.append([share(results, keep), what, *added, mass, f"{np.mean(masses):.3f}"])
    return table(["kept", "chosen from", *DOMAINS, "retained Σc of each", "mean"], rows)


def allocation(results: Results) -> str:
    """One number of experts a layer against as many where they seem needed."""
    rows = [
        [share(results, keep), str(results.against("reap-per-layer", "reap", keep))]
        for keep in MIDDLE
    ]
    return table(["kept", "reap, per-layer minus uniform"], rows)


def overlaps(results: Results) -> str:
    """What domains share."""
    found = results.raw["choices"]["overlap"]
    rows = [
        [pair, f"{row['chance']:.3f}", shared(row), shared(found["frequency"][pair])]
        for pair, row in found["reap"].items()
    ]
    return table(["best 16 of", "chance", "by reap", "by frequency"], rows)


def shared(overlap: dict[str, float]) -> str:
    """A share with its distance from chance."""
    return f"{overlap['share']:.3f} (z {overlap['z']:+.1f})"


def flipped(results: Results) -> str:
    """What leaving Chinese out changes, beside what another draw of the same texts changes."""
    rows = [
        [
            share(results, int(keep)),
            str(row["slots"]),
            ", ".join(map(str, row["without_chinese"])),
            ", ".join(map(str, row["other_draw"])),
        ]
        for keep, row in results.raw["choices"]["flips"].items()
    ]
    return table(["kept", "slots", "flips without Chinese", "flips of another draw"], rows)


def knee(results: Results) -> str:
    """What each further step of pruning adds."""
    rows = []
    for name in ("reap", "loo"):
        values = [results.added(name, keep).value for keep in results.keeps]
        kept = [results.n_experts, *results.keeps]
        steps = np.diff([0.0, *values]) / (-np.diff(kept) / results.n_experts * 100)
        rows.append([LABELS[name], *(f"{step:.4f}" for step in steps)])
    return table(
        ["nats a percent", *(f"to {share(results, keep)}" for keep in results.keeps)], rows
    )


def verdicts(results: Results) -> str:
    """Published claims, each judged by its interval."""
    chinese = ("chinese",)
    claims = [
        ("Frequency loses more than REAP (REAP's paper)", "frequency", "reap", DOMAINS),
        ("Random loses more than REAP", "random", "reap", DOMAINS),
        ("Σc/T (the MLX port's REAP) loses more than Σc/n", "weighted-ean", "reap", DOMAINS),
        ("Leave-one-out loses less than REAP (pilot)", "reap", "loo", DOMAINS),
        ("Frequency loses more than random on Chinese (pilot)", "frequency", "random", chinese),
        ("Calibrating without Chinese hurts Chinese", "reap-without-chinese", "reap", chinese),
    ]
    rows = []
    for text, worse, better, domains in claims:
        cells = []
        for keep in MIDDLE:
            value = results.against(worse, better, keep, domains)
            word = "yes" if value.low > 0 else "no: the reverse" if value.high < 0 else "not shown"
            cells.append(f"{word}: {value}")
        rows.append([text, *cells])
    pair = results.raw["choices"]["overlap"]
    for name, found in pair.items():
        row = found["code / chinese"]
        word = "yes" if row["z"] < -Z95 else "no" if row["z"] > Z95 else "not shown"
        rows.append(
            [f"Code and Chinese share fewer experts than chance, by {name} (card C)", "",
             f"{word}: {shared(row)}"]
        )  # fmt: skip
    return table(["claim", *(f"{share(results, keep)} kept" for keep in MIDDLE)], rows)


PAGE = """# Pruning, measured on the tiny K3

Written by `python -m benchmarks.pruning_page` from `results.json`; do not edit.

The model is the trained tiny K3 that comes with the package ({n_layers} MoE layers of
{n_experts} experts, 4 a token; its card says what it is). {n_seeds} draws of {tokens:,}
calibration tokens from its training texts, equal weights of code, English and Chinese; measured on
{held_out:,} tokens of {n_documents} documents it never saw, parent and {n_plans} plans in one
stream. All numbers are added nats a token against the parent
({parent}), mean of the three domains and of the draws
unless said; brackets are 95 % intervals of documents drawn again; in differences both sides are of
the same documents.
**One small model: directions, not magnitudes. Nothing here was measured on the real K3.**

## Criteria

![added nats by criterion and size](ladder.svg)

{ladder}

Against REAP, paired (bold: the interval excludes 0):

{paired}

The draw of the calibration text alone moves a result by:

{seeds}

## Languages

![with and without Chinese](languages.svg)

{languages}

{flipped}

`code only` and `without Chinese` are the same statistics with sources masked. Flips are experts
that change places over all layers; three numbers are three draws.

## What domains share

{overlaps}

## Allocation

{allocation}

`per-layer` gives each layer as many as its own shares of the score ask for, uniform one number to
all.

## Is there a knee?

Added nats for each percent of the experts that goes, from one size to the next:

{knee}

## Which published claims reproduce here

{verdicts}
"""


def write_page(raw: dict[str, Any], out: Path) -> None:
    """README.md and figures."""
    results = Results(raw)
    figure_ladder(results, out / "ladder")
    figure_languages(results, out / "languages")
    (out / "README.md").write_text(page(results), encoding="utf-8")


def page(results: Results) -> str:
    """README.md."""
    raw, sums = results.raw, results.resampled.sums
    parent = ", ".join(f"{name} {sums[at, 1] / sums[at, 0]:.3f}" for at, name in enumerate(DOMAINS))
    runs = next(iter(raw["calibrated_on"].values()))
    parts = (ladder, paired, seeds, languages, flipped, overlaps, allocation, knee, verdicts)
    return PAGE.format(
        n_layers=int(raw["choices"]["flips"]["32"]["slots"]) // 32,
        n_experts=results.n_experts,
        n_seeds=len(raw["calibrated_on"]),
        tokens=runs[0]["corpus"]["n_tokens"],
        held_out=int(sums[-1, 0]),
        n_documents=len(raw["documents"]["domains"]),
        n_plans=len(results.names),
        parent=parent,
        **{part.__name__: part(results) for part in parts},
    )


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/evidence")
    write_page(json.loads((folder / "results.json").read_text()), folder)
