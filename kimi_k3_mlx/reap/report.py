"""What plans retain, source by source, and how far the statistics behind them can be trusted.

Input: saliency stores, the first of which measures, and the plans to judge. Output: one JSON value
with every number of the report; `report_text` says it in words, `figures` draws it. No number here
is about the quality of a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kimi_k3_mlx.errors import UsageError
from kimi_k3_mlx.reap.agree import NamedStore, all_flips, overlaps
from kimi_k3_mlx.reap.corpus_warnings import (
    AMBER_PAIRS,
    LEVELS,
    RED_PAIRS,
    SKEW,
    folds_text,
    one_sided,
)
from kimi_k3_mlx.reap.judge import NamedPlan, curves, judge, object_in, plan_json
from kimi_k3_mlx.reap.saliency import FOLD_TOKENS, Saliency
from kimi_k3_mlx.reap.shape import support
from kimi_k3_mlx.schema import Json

KIND = "kimi_k3_mlx.report"
VERSION = 1


def make_report(stores: Sequence[NamedStore], plans: Sequence[NamedPlan]) -> Json:
    """Everything measured: the first store judges the plans, the others are compared with it.

    Overlaps and flips follow the first plan's criterion and its mean number of kept experts. Raises
    UsageError for stores of different models, and for a plan that is not for theirs.
    """
    check_same(stores)
    store = stores[0].store
    judged = [judge(store, item) for item in plans]
    criterion, keep = judged[0].criterion, round(float(judged[0].kept.sum(1).mean()))
    found: Json = {
        "kind": KIND,
        "version": VERSION,
        "model": store.model,
        "layers": list(store.layers),
        "n_experts": store.n_experts,
        "top_k": store.top_k,
        "statistics": [statistics(item) for item in stores],
        "sources": sources(store),
        "dead": int((np.asarray(store.arrays["pairs"]).sum(axis=0) == 0).sum()),
        "plans": [plan_json(store, item) for item in judged],
        "curves": curves(store, judged),
        "overlap": overlaps(store, criterion, keep) | {"after": judged[0].name},
        "flips": all_flips(stores, criterion, keep) | {"after": judged[0].name},
    }
    return found | {"warnings": list(warnings(found)), "not_measured": list(not_measured(found))}


def check_same(stores: Sequence[NamedStore]) -> None:
    """Stores are compared only over one model."""
    first = stores[0]
    for name, other in stores[1:]:
        for what in ("model", "layers", "n_experts", "top_k"):
            one, two = getattr(first.store, what), getattr(other, what)
            if one != two:
                raise UsageError(
                    f"statistics {first.name} and {name} differ in {what}: {one} and {two}.",
                    "compare statistics of one model.",
                )
    for name, store in stores:
        if not store.tokens.any():
            raise UsageError(
                f"statistics {name} have no tokens.", "measure some: kimi-k3 calibrate"
            )


def statistics(item: NamedStore) -> Json:
    """A store in one line."""
    name, store = item
    return {
        "name": name,
        "tokens": dict(zip(store.sources, map(int, store.tokens), strict=True)),
        "runs": len(store.runs),
        "folds": store.n_folds if FOLD_TOKENS in store.arrays else 0,
    }


def sources(store: Saliency) -> list[Json]:
    """Each source: tokens, bytes and scripts of its corpora, pairs per expert."""
    corpora = [object_in(run.get("corpus")) for run in store.runs]
    known = all("counts" in corpus for corpus in corpora) and bool(corpora)
    drawn = store.arrays.get("sequences")
    folds = store.arrays.get(FOLD_TOKENS)
    found = []
    for number, name in enumerate(store.sources):
        scripts: dict[str, int] = {}
        for corpus in corpora if known else ():
            for script, n in corpus["counts"].get(name, {}).items():
                scripts[script] = scripts.get(script, 0) + int(n)
        found.append(
            {
                "name": name,
                "tokens": int(store.tokens[number]),
                "sequences": None if drawn is None else int(drawn[number, 0]),
                "folds": [] if folds is None else folds[:, number, 0].astype(int).tolist(),
                "bytes": sum(object_in(corpus.get("n_bytes")).get(name, 0) for corpus in corpora),
                "scripts": scripts if known else None,
                "pairs": support(np.asarray(store.arrays["pairs"][number])),
            }
        )
    return found


def warnings(report: Json) -> Iterator[Json]:
    """What makes the numbers weaker than they look, the worst level first."""
    found = [*source_warnings(report), *plan_warnings(report)]
    yield from sorted(found, key=lambda warning: LEVELS.index(warning["level"]))


def source_warnings(report: Json) -> Iterator[Json]:
    """Sources with too few tokens, with one-sided folds, with many tokens for their bytes."""
    rows = [row for row in report["sources"] if row["tokens"]]
    all_tokens = sum(row["tokens"] - image_tokens(row) for row in rows)
    all_bytes = sum(row["bytes"] for row in rows)
    for row in rows:
        about, pairs = row["name"], row["pairs"]["mean"]
        if pairs < AMBER_PAIRS:
            message = f"{pairs:,.0f} pairs for the average expert, {AMBER_PAIRS:,} wanted"
            yield warning("red" if pairs < RED_PAIRS else "amber", about, message)
        if one_sided(row["folds"]):
            yield warning("amber", about, folds_text(row["folds"]))
        of_bytes = row["bytes"] / max(all_bytes, 1)
        of_tokens = (row["tokens"] - image_tokens(row)) / max(all_tokens, 1)
        if of_bytes and not 1 / SKEW < of_tokens / of_bytes < SKEW:
            message = f"{of_bytes:.1%} of the bytes are {of_tokens:.1%} of the tokens"
            yield warning("amber", about, message)


def image_tokens(row: Json) -> int:
    """Tokens of a source that stood for pictures, as far as its corpora say."""
    return int((row["scripts"] or {}).get("image", 0))


def plan_warnings(report: Json) -> Iterator[Json]:
    """Plans whose numbers do not mean what they seem to."""
    for plan in report["plans"]:
        if plan["chosen_from"] != "these runs":
            message = f"was chosen from {plan['chosen_from']}, and is judged by these"
            yield warning("note", plan["name"], message)
        if not plan["criterion_is_its_own"]:
            by = plan["criterion"]["name"]
            yield warning("note", plan["name"], f"says no known criterion: it is judged by {by}")


def warning(level: str, about: str, message: str) -> Json:
    """A warning as JSON."""
    return {"level": level, "about": about, "message": message}


def not_measured(report: Json) -> Iterator[str]:
    """What a reader might take for granted, and should not."""
    yield "Perplexity, KL and agreement with the unpruned model: measure them with kimi-k3 compare."
    yield "Generation: loops and endings do not show in retained mass, see kimi-k3 probe."
    if not any(map(image_tokens, report["sources"])):
        yield "Images: no image token is on record, so that vision experts are unmeasured."
    for row in report["sources"]:
        if not row["tokens"]:
            yield f"Source {row['name']}: it has no tokens."
        elif report["overlap"]["split_half"].get(row["name"]) is None:
            yield f"Agreement of {row['name']} with itself: it has no two halves, or no folds."
    for plan in report["plans"]:
        by = plan["criterion"]["name"]
        if all(row["held_out_mass"] is None for row in plan["retained"].values()):
            yield f"Held-out mass of {plan['name']}: the statistics have no folds of {by}."
        if plan["cut"]["ambiguous"] is None:
            yield f"Ambiguous slots of {plan['name']}: the statistics have no errors of {by}."
    if all(plan["partners"] is None for plan in report["plans"]):
        yield "Who takes over from dropped experts: no counts of experts chosen together."
    if any(row["split_half"] is None for row in report["flips"]["stores"]):
        yield f"Noise of the flips: no folds of {report['flips']['criterion']}."
    if any(row["scripts"] is None for row in report["sources"]):
        yield "Scripts: the statistics do not say which their corpora hold."
