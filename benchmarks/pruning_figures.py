"""The figures of `benchmarks.pruning_page`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.pruning_results import DOMAINS, LABELS, LADDER, MIDDLE, Results, share

COLOURS = dict(zip(LADDER, ("#999999", "#D55E00", "#E69F00", "#0072B2", "#009E73"), strict=True))


def figure_ladder(results: Results, path: Path) -> None:
    """Added nats by size."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.2), layout="constrained")
    for axes, domains, title in zip(
        figure.subplots(1, 2, sharey=True), (DOMAINS, ("chinese",)),
        ("mean of code, English and Chinese", "Chinese"), strict=True,
    ):  # fmt: skip
        for name in LADDER:
            values = [results.added(name, keep, domains) for keep in results.keeps]
            below = [one.value - one.low for one in values]
            above = [one.high - one.value for one in values]
            axes.errorbar(
                [100 * keep / results.n_experts for keep in results.keeps],
                [one.value for one in values], yerr=[below, above], label=LABELS[name],
                color=COLOURS[name], marker="o", markersize=4, capsize=2, linewidth=1.4,
                linestyle="--" if name == "random" else "-",
            )  # fmt: skip
        axes.invert_xaxis()
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("experts kept, %")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("added nats a token")
    figure.axes[0].legend(frameon=False, fontsize=8)
    save(figure, path)


def figure_languages(results: Results, path: Path) -> None:
    """What is lost in each language, and how little the retained mass says of it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    recipes = {"reap": "all three", "reap-without-chinese": "without Chinese"}
    for number, (recipe, label) in enumerate(recipes.items()):
        places = np.arange(len(DOMAINS)) + 0.38 * (number - 0.5)
        values = [results.added(recipe, MIDDLE[0], (domain,)) for domain in DOMAINS]
        errors = [[one.value - one.low for one in values], [one.high - one.value for one in values]]
        colour = ("#0072B2", "#D55E00")[number]
        left.bar(places, [one.value for one in values], 0.36, yerr=errors, color=colour,
                 capsize=3, label=f"calibrated on {label}" if not number else label)  # fmt: skip
        masses = [results.retained(recipe, MIDDLE[0], domain) for domain in DOMAINS]
        right.bar(places, masses, 0.36, color=colour)
    for axes, title in ((left, "added nats a token"), (right, "retained share of Σc")):
        axes.set_xticks(range(len(DOMAINS)), DOMAINS)
        axes.set_title(f"{title}, {share(results, MIDDLE[0])} kept", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False, fontsize=8)
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    """The same bytes for the same numbers."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": path.stem}):
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    figure.savefig(path.with_suffix(".png"), dpi=110)
