"""The report in words and tables: Markdown from the JSON value of `reap.report`, nothing computed.

Input: the value, the names of its figures. Output: text that says with every mass what it adds up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath

from kimi_k3_mlx.schema import Json

Rows = Sequence[Sequence[str]]


def markdown(report: Json, figures: Mapping[str, str]) -> str:
    """The whole page; `figures` maps paths, relative to it, to what they show."""
    sections = (
        head(report),
        short(report),
        retained(report),
        shown(figures, "retained"),
        covered(report),
        shown(figures, "coverage"),
        overlap_section(report),
        shown(figures, "overlap"),
        flip_section(report),
        layer_section(report),
        shown(figures, "layers"),
        source_section(report),
        warning_section(report),
        "## Not measured\n\n" + "\n".join(f"- {line}" for line in report["not_measured"]),
    )
    return "\n\n".join(section for section in sections if section) + "\n"


def head(report: Json) -> str:
    """Of what, and from what."""
    first, *others = report["statistics"]
    compared = f", compared with {', '.join(it['name'] for it in others)}" if others else ""
    total = sum(first["tokens"].values())
    return (
        "# What the plans retain\n\n"
        f"Model {report['model'][:12]}: {len(report['layers'])} MoE layers of "
        f"{report['n_experts']} experts, {report['top_k']} for a token. Measured by the statistics "
        f"{first['name']} ({total:,} tokens, runs: {first['runs']}, folds: {first['folds']})"
        f"{compared}.\n\n"
        "Retained mass says how much of a criterion's sum the kept experts had. It is not quality, "
        "and masses of different sums do not compare. What a plan costs in perplexity is measured "
        "by `kimi-k3 compare`."
    )


def short(report: Json) -> str:
    """A line for each plan: its worst source, and how sure its border is."""
    lines = []
    for plan in report["plans"]:
        worst = plan["retained"][plan["worst"]]
        lines.append(
            f"- **{plan['name']}** keeps {kept_text(plan['kept'])} of {report['n_experts']} "
            f"experts a layer by {criterion_text(plan)}. Worst covered source: {plan['worst']}, "
            f"{percent(worst['coverage'])} of what its own best choice of as many experts retains. "
            f"{ambiguous_text(plan['cut'])}{partners_text(plan['partners'])}"
        )
    return "## In short\n\n" + "\n".join(lines)


def retained(report: Json) -> str:
    """A plan × source matrix for each mass, on all tokens and held out."""
    parts = [
        "## Retained mass\n\n"
        "Mean over layers of kept/all. *All tokens*: those that the statistics are of, which for "
        "most plans are those that they were chosen from. *Held out*: experts are ranked with one "
        "fold and the mass is measured on the other, mean of both directions; this is what a "
        "choice from half of the data retains of the other half, without protections."
    ]
    for curve in report["curves"]:
        plans = [plan for plan in report["plans"] if plan["name"] in curve["plans"]]
        parts.append(f"### Mass of {curve['mass']}\n\n" + table(list(matrix(report, plans))))
    return "\n\n".join(parts)


def matrix(report: Json, plans: Sequence[Json]) -> Iterator[list[str]]:
    """Plans down, sources across."""
    names = [row["name"] for row in report["sources"]]
    yield ["plan", "criterion", "denominator", "measured on", *names]
    for plan in plans:
        by = plan["criterion"]
        what = [plan["name"], f"{by['name']} = {by['formula']}", by["denominator"]]
        for field, on in (("mass", "all tokens"), ("held_out_mass", "held out")):
            cells = [percent(plan["retained"].get(name, {}).get(field)) for name in names]
            yield [*what, on, *cells]
            what = ["", "", ""]


def covered(report: Json) -> str:
    """Coverage, each plan's worst source first."""
    rows = [["plan", "source", "coverage", "held out", "favoured experts dropped"]]
    for plan in report["plans"]:
        name = plan["name"]
        for source, row in sorted(plan["retained"].items(), key=lambda item: item[1]["coverage"]):
            dropped = f"{row['favoured_dropped']:,} of {row['favoured']:,}"
            shares = percent(row["coverage"]), percent(row["held_out_coverage"])
            rows.append([name, source, *shares, dropped])
            name = ""
    return (
        "## Coverage, worst source first\n\n"
        "Mass under the plan's own criterion, over what as many experts of the source's own best "
        "choice retain of it. That choice ranks by the sum itself, so that a criterion that "
        "divides by n stays below 100 % even of its only source. A source favours an expert to "
        "which it routes at least 1.5 times as often as the other sources do.\n\n" + table(rows)
    )


def shown(figures: Mapping[str, str], name: str) -> str:
    """The figures of a name, or of a name with an ending, each with what it shows."""
    return "\n\n".join(
        f"![{name}]({path})\n\n*{text}*"
        for path, text in figures.items()
        if PurePath(path).stem.partition("-")[0] == name
    )


def overlap_section(report: Json) -> str:
    """What the sources' own choices share, beside chance and beside the halves of each."""
    found = report["overlap"]
    names = list(found["split_half"])
    by_pair = {frozenset(pair["sources"]): pair for pair in found["pairs"]}
    rows = [["", *names]]
    for one in names:
        cells = [
            f"**{percent(found['split_half'][one])}**"
            if one == other
            else pair_text(by_pair.get(frozenset((one, other))))
            for other in names
        ]
        rows.append([one, *cells])
    return (
        "## Overlap between sources\n\n"
        f"Each source's own best {found['keep']} experts of a layer by {found['criterion']} = "
        f"{found['formula']} (as many as {found['after']} keeps); experts in common over all "
        f"layers. Chance is {percent(found['chance'])}; z counts standard deviations of random "
        "choices (hypergeometric). On the diagonal, in bold, the choices of two halves of the "
        "source's own tokens. Halves are half as large as what the pairs are of, and so noisier: "
        "the diagonal says how much is noise and is no upper bound for the pairs.\n\n" + table(rows)
    )


def flip_section(report: Json) -> str:
    """Slots that change between halves and between stores."""
    found = report["flips"]
    slots = found["slots"]
    own = [
        ["statistics", "tokens", "half against half", "against infinitely many", "twice as many"]
    ]
    for row in found["stores"]:
        values = (row["split_half"], row.get("from_infinite"), row.get("from_doubling"))
        own.append([row["name"], f"{row['tokens']:,}", *(flips_text(v, slots) for v in values)])
    text = (
        "## Flips\n\n"
        f"Kept slots, of {slots:,}, that hold another expert when the {found['keep']} best of a "
        f"layer by {found['criterion']} are chosen from other tokens. Flips of two halves are "
        "measured; those against infinitely many tokens of the same kind, and those that as many "
        "tokens again would bring, are scaled from them by √(1/T₁ + 1/T₂).\n\n" + table(own)
    )
    if not found["pairs"]:
        return text
    rows = [["statistics", "tokens shared", "flips", "expected of sampling", "ratio"]]
    for pair in found["pairs"]:
        ratio = "not measured" if pair["ratio"] is None else f"{pair['ratio']:.1f}"
        files = ", ".join(pair["shared_files"])
        shared = f"unknown: both read {files}" if files else "none known"
        nested = "one is inside the other" if pair["nested"] else shared
        counts = [flips_text(pair[what], slots) for what in ("flips", "noise")]
        rows.append([" and ".join(pair["stores"]), nested, *counts, ratio])
    return (
        f"{text}\n\nBetween statistics, sampling alone would flip c·√(1/T₁ + 1/T₂) slots, or "
        "c·√(1/T₁ − 1/T₂) when the first are inside the second; c is from the halves of the "
        "smaller ones. A ratio well above 1 is a difference of the texts.\n\n" + table(rows)
    )


def layer_section(report: Json) -> str:
    """The layers of each plan in ranges; every layer is in the JSON and in the figure."""
    rows = [["plan", "kept", "Gini of the scores", "mean crossing", "ambiguous experts"]]
    for plan in report["plans"]:
        layers = plan["by_layer"]
        crossing = spread([100 * share for share in layers["mean_crossing"]], "{:.0f} %")
        near = layers["ambiguous"]
        rows.append(
            [
                plan["name"],
                kept_text(plan["kept"]),
                spread(layers["gini"], "{:.2f}"),
                crossing,
                spread(near, "{:.0f}") if near else "not measured",
            ]
        )
    return (
        "## Layers\n\n"
        "Median of the layers, smallest to largest in brackets. Gini: 0 when all experts of a "
        "layer score alike. Mean crossing: the share of experts that score at least the layer's "
        "mean; a plan that keeps more has experts below it. Ambiguous: the 95 % interval of the "
        "score, clustered by sequence, holds the border. Curves of sorted mass are concave by "
        "construction, so that a bend in them is no sign of how many experts are enough.\n\n"
        + table(rows)
    )


def source_section(report: Json) -> str:
    """What was measured on."""
    total = max(sum(row["tokens"] for row in report["sources"]), 1)
    head = ["source", "tokens", "share", "sequences", "pairs per expert: mean",
            "min, 10 %, median, 90 %", "never routed", "scripts"]  # fmt: skip
    rows = [head]
    for row in report["sources"]:
        pairs = row["pairs"]
        quantiles = ", ".join(f"{pairs[at]:,.0f}" for at in ("min", "q10", "median", "q90"))
        scripts = sorted((row["scripts"] or {}).items(), key=lambda item: -item[1])
        rows.append(
            [
                row["name"],
                f"{row['tokens']:,}",
                percent(row["tokens"] / total),
                "not said" if row["sequences"] is None else f"{row['sequences']:,}",
                f"{pairs['mean']:,.0f}",
                quantiles,
                f"{pairs['dead']:,}",
                ", ".join(f"{name} {n:,}" for name, n in scripts) or "not said",
            ]
        )
    slots = len(report["layers"]) * report["n_experts"]
    return (
        "## Sources\n\n"
        f"Pairs of a token and an expert that it was routed to, over the {slots:,} experts of all "
        f"layers; {report['dead']:,} of them were never routed to by any source.\n\n" + table(rows)
    )


def warning_section(report: Json) -> str:
    """All warnings, or nothing."""
    if not report["warnings"]:
        return ""
    rows = [["level", "about", "what"]]
    rows += [[row["level"], row["about"], row["message"]] for row in report["warnings"]]
    return "## Warnings\n\n" + table(rows)


def table(rows: Rows) -> str:
    """A table whose first row is its head."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])


def criterion_text(plan: Json) -> str:
    """`reap = Σc/n (over n, the tokens that were routed to the expert)`."""
    by = plan["criterion"]
    return f"{by['name']} = {by['formula']} (over {by['denominator']})"


def kept_text(kept: Json) -> str:
    """`242`, or `242 on average (180 to 301)`."""
    if kept["min"] == kept["max"]:
        return f"{kept['min']}"
    return f"{kept['mean']:.4g} on average ({kept['min']} to {kept['max']})"


def ambiguous_text(cut: Json) -> str:
    """How many of the kept slots could as well be others."""
    if cut["ambiguous"] is None:
        return "Errors of this criterion were not measured."
    share = percent(cut["ambiguous_kept"] / cut["slots"])
    return (
        f"{cut['ambiguous_kept']:,} of its {cut['slots']:,} slots ({share}) are ambiguous at 95 %."
    )


def partners_text(partners: Json | None) -> str:
    """Who is left to take over from the dropped experts."""
    if partners is None:
        return ""
    return (
        f" Of the experts chosen for a token beside a dropped one, {percent(partners['kept'])} are "
        f"kept; beside any expert, {percent(partners['kept_of_all'])}."
    )


def pair_text(pair: Json | None) -> str:
    """`57.2 % (z +119)`."""
    if pair is None:
        return "not measured"
    return percent(pair["share"]) + ("" if pair["z"] is None else f" (z {pair['z']:+.1f})")


def flips_text(value: float | None, slots: int) -> str:
    """`615 (1.5 %)`, or `614.9 (1.5 %)` when it is an expectation."""
    if value is None:
        return "not measured"
    number = f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"
    return f"{number} ({percent(value / slots)})"


def spread(values: Sequence[float], form: str) -> str:
    """The median, and the ends in brackets."""
    ordered = sorted(values)
    ends = form.format(ordered[0]), form.format(ordered[-1])
    return f"{form.format(ordered[len(ordered) // 2])} ({ends[0]} to {ends[1]})"


def percent(share: float | None) -> str:
    """`57.2 %`."""
    return "not measured" if share is None else f"{100 * share:.1f} %"
