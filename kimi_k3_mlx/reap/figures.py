"""The figures of the report, as bytes of SVG and PNG.

Input: the JSON value of `reap.report`. Output: files by name, each with one line that says what it
shows. Colours are told apart by people who see few (Okabe and Ito's, cividis). Nothing is computed
here, and matplotlib is imported only when something is drawn.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kimi_k3_mlx.schema import Json

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKERS = "osD^vPX"
DASHES = ("-", (0, (4, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
WIDTH, DPI = 9.0, 200
"""Inches, and dots per inch of the PNG: sharp at 900 pixels on a display of twice as many."""
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "legend.frameon": False,
    "text.parse_math": False,
    "svg.hashsalt": "kimi-k3-mlx",
}


class Drawing(NamedTuple):
    """One figure."""

    name: str
    text: str
    svg: bytes
    png: bytes


def draw(report: Json) -> list[Drawing]:
    """All figures; the same report gives the same bytes."""
    import matplotlib as mpl

    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(STYLE)
        return [_rendered(*item) for item in _figures(report)]


def _figures(report: Json) -> Iterator[tuple[str, str, Figure]]:
    yield "coverage", COVERAGE_TEXT, coverage(report)
    for found in report["curves"]:
        text = (
            f"Retained mass of {found['mass']} by source. Line: what as many experts of the "
            "source's own best choice retain (sorted, so concave by construction). Marks: what the "
            "plans retain of it, below the line by what other sources and the criterion cost it."
        )
        yield f"retained-{found['total']}", text, retained(report, found)
    if report["overlap"]["pairs"]:
        yield "overlap", overlap_text(report["overlap"]), overlap(report["overlap"])
    yield "layers", LAYERS_TEXT, layers(report)


COVERAGE_TEXT = (
    "Coverage: mass that a plan retains of a source, over what the source's own best choice of as "
    "many experts retains; each plan under its own criterion, the worst source on the left."
)
LAYERS_TEXT = (
    "Layer by layer: experts that each plan keeps, how unevenly its criterion's scores are spread, "
    "and experts whose 95 % interval holds the border of the cut."
)


def coverage(report: Json) -> Figure:
    """Plans down, sources across, the worst on the left."""
    plans = report["plans"]
    worst: dict[str, float] = {}
    for plan in plans:
        for name, row in plan["retained"].items():
            worst[name] = min(worst.get(name, 1.0), row["coverage"])
    names = sorted(worst, key=lambda name: worst[name])
    values = [[100 * plan["retained"][name]["coverage"] for name in names] for plan in plans]
    labels = [f"{plan['name']}\nby {plan['criterion']['name']} = {plan['criterion']['formula']}"
              for plan in plans]  # fmt: skip
    figure, axes = _sheet(1.3 + 0.55 * len(plans))
    low = 5 * (min(map(min, values)) // 5)
    _heat(axes, values, labels, names, _scale(min(low, 95), 100), "coverage (%)")
    axes.set_title("What plans retain, of the best that as many experts could of each source")
    return figure


def overlap_text(found: Json) -> str:
    """What the overlap figure shows."""
    return (
        f"Experts that two sources' own best {found['keep']} of a layer have in common, by "
        f"{found['criterion']} = {found['formula']}; chance is {100 * found['chance']:.0f} %. On "
        "the diagonal, two halves of one source's tokens: noisier than the pairs, since halves are "
        "half as large, and no upper bound."
    )


def overlap(found: Json) -> Figure:
    """Sources by sources; on the diagonal halves against each other."""
    names = list(found["split_half"])
    shares = {frozenset(pair["sources"]): 100 * pair["share"] for pair in found["pairs"]}
    for name, share in found["split_half"].items():
        shares[frozenset((name,))] = float("nan") if share is None else 100 * share
    values = [[shares.get(frozenset((a, b)), float("nan")) for b in names] for a in names]
    figure, axes = _sheet(1.6 + 0.5 * len(names), 3.6 + 0.62 * len(names))
    scale = _scale(0, 100, 100 * found["chance"])
    _heat(axes, values, names, names, scale, "experts in common (%)")
    for at in range(len(names)):
        axes.add_patch(_frame(at))
    axes.set_title(
        f"Experts that two sources both choose; white: chance ({100 * found['chance']:.0f} %)\n"
        "framed: a source's two halves (half as many tokens: no upper bound)"
    )
    return figure


def retained(report: Json, found: Json) -> Figure:
    """A panel for each source: its own best choices as a line, the plans as marks."""
    names = list(found["by_source"])
    columns = min(len(names), 4 if len(names) > 4 else 3)
    rows = -(-len(names) // columns)
    figure, grid = _grid(rows, columns, 1.0 + 2.3 * rows)
    plans = [plan for plan in report["plans"] if plan["name"] in found["plans"]]
    for axes, name in zip(grid, names, strict=False):
        axes.plot(
            found["experts"], [100 * share for share in found["by_source"][name]],
            color="#555555", linewidth=1.6, label="the source's own best choice",
        )  # fmt: skip
        for number, plan in enumerate(plans):
            at, mass = plan["kept"]["mean"], 100 * plan["retained"][name]["mass"]
            best = 100 * float(np.interp(at, found["experts"], found["by_source"][name]))
            axes.plot([at, at], [mass, best], color="#999999", linewidth=1, zorder=1)
            label = f"{plan['name']} ({plan['criterion']['name']})"
            axes.plot(at, mass, linestyle="none", label=label, **_mark(number))
        axes.set(title=name, xlim=(0, report["n_experts"]), ylim=(0, 102))
    for axes in grid[len(names) :]:
        axes.set_axis_off()
    figure.supxlabel(f"experts kept in a layer, of {report['n_experts']}", fontsize=9)
    figure.supylabel(f"retained mass of {found['mass']} (%)", fontsize=9)
    _legend(figure, grid[0], 1 + len(plans))
    return figure


def layers(report: Json) -> Figure:
    """Three panels over the layers, a line for each plan."""
    from matplotlib.ticker import MaxNLocator

    figure, grid = _grid(3, 1, 6.6)
    numbers = report["layers"]
    for number, plan in enumerate(report["plans"]):
        said = plan["by_layer"]
        style = _line(number, len(numbers)) | {"label": plan["name"]}
        grid[0].plot(numbers, said["kept"], drawstyle="steps-mid", **style)
        crossing = [share * report["n_experts"] for share in said["mean_crossing"]]
        grid[0].plot(numbers, crossing, color=style["color"], linewidth=0.7)
        grid[1].plot(numbers, said["gini"], **style)
        if said["ambiguous"]:
            grid[2].plot(numbers, said["ambiguous"], **style)
    grid[0].set(
        title="Experts kept (thick), and experts that score at least the layer's mean (thin)",
        ylabel="experts",
        ylim=(0, None),
    )
    grid[1].set(
        title="How unevenly scores are spread (0: all experts alike)",
        ylabel="Gini coefficient", ylim=(0, None),
    )  # fmt: skip
    grid[2].set(
        title="How unsure the border is: 95 % interval holds it", ylabel="ambiguous experts",
        xlabel="layer", ylim=(0, None),
    )  # fmt: skip
    for axis in (grid[2].xaxis, grid[0].yaxis, grid[2].yaxis):
        axis.set_major_locator(MaxNLocator("auto", integer=True))
    _legend(figure, grid[0], len(report["plans"]))
    return figure


def _sheet(height: float, width: float = WIDTH) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(min(width, WIDTH), height), layout="constrained")
    return figure, figure.subplots()


def _grid(rows: int, columns: int, height: float) -> tuple[Figure, Sequence[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, sharey=columns > 1, squeeze=False)
    return figure, grid.ravel().tolist()


def _heat(
    axes: Axes,
    values: list[list[float]],
    rows: Sequence[str],
    columns: Sequence[str],
    colours: tuple[Normalize, str],
    unit: str,
) -> None:
    """Squares with their numbers in them; what was not measured stays empty."""
    import matplotlib as mpl

    norm, name = colours
    image = axes.imshow(values, cmap=name, norm=norm, aspect="auto")
    for y, line in enumerate(values):
        for x, value in enumerate(line):
            if value == value:
                red, green, blue, _ = mpl.colormaps[name](float(norm(value)))
                bright = 0.3 * red + 0.6 * green + 0.1 * blue > 0.5
                axes.text(
                    x, y, f"{value:.1f}", ha="center", va="center",
                    color="black" if bright else "white",
                )  # fmt: skip
    long = max(map(len, columns)) * len(columns) > 80
    axes.set_xticks(range(len(columns)), columns, rotation=35 if long else 0,
                    ha="right" if long else "center")  # fmt: skip
    axes.set_yticks(range(len(rows)), rows)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    figure = axes.get_figure()
    if figure:
        figure.colorbar(image, ax=axes, label=unit, pad=0.02)


def _scale(low: float, high: float, middle: float | None = None) -> tuple[Normalize, str]:
    """From dark to bright, or from blue over white in the middle to red: a range and its map."""
    from matplotlib.colors import Normalize, TwoSlopeNorm

    if middle is None or not low < middle < high:
        return Normalize(low, high), "cividis"
    return TwoSlopeNorm(middle, low, high), "RdBu_r"


def _frame(at: int) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(
        (at - 0.46, at - 0.46), 0.92, 0.92, fill=False, edgecolor="black", linewidth=1.6
    )


def _mark(number: int) -> dict[str, Any]:
    at = number % len(COLOURS)
    return {
        "color": COLOURS[at],
        "marker": MARKERS[at],
        "markersize": 6.5,
        "markeredgecolor": "white",
    }


def _line(number: int, n_points: int) -> dict[str, Any]:
    """Broken differently for each plan, so that lines on top of each other are both seen."""
    style = _mark(number) | {"linewidth": 1.8, "linestyle": DASHES[number % len(DASHES)]}
    return style | {"markersize": 5} | ({} if n_points < 30 else {"marker": "none"})


def _legend(figure: Figure, axes: Axes, n_items: int) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=min(n_items, 3))


def _rendered(name: str, text: str, figure: Figure) -> Drawing:
    svg, png = io.BytesIO(), io.BytesIO()
    # Laid out once: each of the two formats would do it again, for most of the time.
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    figure.savefig(png, format="png", dpi=DPI, metadata={"Software": None})
    return Drawing(name, text, svg.getvalue(), png.getvalue())
