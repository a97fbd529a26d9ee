"""What pruning costs the trained tiny K3: criteria, sizes, languages, allocation.

Input: the texts that `tools/tiny_texts.py` writes. Output: `results.json` with sums for each plan
and held-out document, from which `benchmarks.pruning_page` makes tables and figures. The parent and
all plans go through the model in one stream; a killed run continues.

    python -m benchmarks.pruning --texts DIR --work DIR [--out docs/evidence] [--tokens N]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.pruning_page import write_page
from kimi_k3_mlx.cli._output import progress
from kimi_k3_mlx.prune_plan import LayerPlan, PrunePlan
from kimi_k3_mlx.reap.calibrate import calibrate
from kimi_k3_mlx.reap.compare import Evaluation, evaluate
from kimi_k3_mlx.reap.corpus import Corpus, load_corpus, parse_specs
from kimi_k3_mlx.reap.criteria import CRITERIA, Criterion, Masses
from kimi_k3_mlx.reap.overlap import best, flips, overlap, source_scores
from kimi_k3_mlx.reap.planner import Planner, Recipe
from kimi_k3_mlx.reap.saliency import Saliency, load_saliency
from kimi_k3_mlx.runtime.load import load_tokenizer
from kimi_k3_mlx.tensors.local import open_source

MODEL = Path("kimi_k3_mlx/assets/tiny-k3")
DOMAINS = ("code", "english", "chinese")
KEEPS = (48, 32, 24, 16, 8)
CRITERIA_TRIED = ("frequency", "weighted-ean", "reap", "loo")
SEEDS, RANDOM_SEEDS = (0, 1, 2), (0, 1, 2, 3, 4)
SEQ_LEN, PER_DOCUMENT, HELD_OUT_PER_DOCUMENT = 512, 1024, 256
MEMORY = 4 << 30
SHARED = 16
EQUAL: dict[str, float] = {}
"""Every source weighs 1, whatever its tokens."""


def texts(folder: Path, part: str, tokens: int, per_document: int, seed: int) -> Corpus:
    """So many tokens of each domain, from documents that the seed chooses."""
    specs = ",".join(f"{folder / part / domain}.jsonl={domain}" for domain in DOMAINS)
    return load_corpus(
        parse_specs(specs),
        load_tokenizer(MODEL, None),
        seq_len=SEQ_LEN,
        tokens_per_source=tokens,
        tokens_per_document=per_document,
        seed=seed,
        bos=True,
    )


def measured(args: argparse.Namespace, seed: int) -> Saliency:
    """The statistics of one draw of the training texts."""
    path = args.work / f"stats-{seed}.safetensors"
    if not path.is_file():
        corpus = texts(args.texts, "train", args.tokens, PER_DOCUMENT, seed)
        with progress(False) as shown:
            folder = path.with_suffix(".run")
            store = calibrate(
                open_source(MODEL), corpus, memory=MEMORY, folder=folder, progress=shown
            )
        store.save(path)
    return load_saliency(path)


def all_plans(stores: dict[int, Saliency]) -> dict[str, PrunePlan]:
    """Every plan by its name: `recipe/keep/seed`."""
    plans = {}
    for seed, store in stores.items():
        for name, recipe, keeps in recipes(store.top_k):
            planner = Planner(store, recipe)
            plans |= {f"{name}/{keep}/{seed}": planner.cut(keep) for keep in keeps}
    for seed in RANDOM_SEEDS:
        plans |= {f"random/{keep}/{seed}": random_plan(stores[0], keep, seed) for keep in KEEPS}
    return plans


def recipes(top_k: int) -> Iterator[tuple[str, Recipe, tuple[int, ...]]]:
    """What is compared, and at which sizes."""
    middle = (32, 16)
    for name in CRITERIA_TRIED:
        yield name, Recipe(criterion=name, weights=EQUAL, floor=top_k), KEEPS
    yield "reap-per-layer", Recipe(weights=EQUAL, floor=top_k, mode="per-layer"), middle
    blind = Recipe(weights=EQUAL, floor=top_k, masked=("chinese",))
    yield "reap-without-chinese", blind, middle
    only = Recipe(weights=EQUAL, floor=top_k, masked=("english", "chinese"))
    yield "reap-code-only", only, middle


def random_plan(store: Saliency, keep: int, seed: int) -> PrunePlan:
    """Experts that nothing chose."""
    rng = np.random.default_rng([seed, keep])
    layers = {}
    for layer in store.layers:
        kept = rng.choice(store.n_experts, keep, replace=False)
        layers[layer] = LayerPlan(tuple(sorted(map(int, kept))))
    return PrunePlan(store.n_experts, layers)


def plan_facts(stores: dict[int, Saliency], plans: dict[str, PrunePlan]) -> dict[str, Any]:
    """What each plan retains of each domain's Σc, on the tokens that chose it."""
    masses = {seed: Masses(store, CRITERIA["reap"]) for seed, store in stores.items()}
    found = {}
    for name, plan in plans.items():
        seed = int(name.rsplit("/", 1)[1]) if not name.startswith("random") else 0
        kept = mask(stores[seed], plan)
        shares = masses[seed].retained(kept), masses[seed].coverage(kept)
        found[name] = {
            key: dict(zip(DOMAINS, row.tolist(), strict=True))
            for key, row in zip(("mass", "coverage"), shares, strict=True)
        }
    return found


def mask(store: Saliency, plan: PrunePlan) -> np.ndarray:
    """The plan's experts [layers, experts]."""
    kept = np.zeros((len(store.layers), store.n_experts), bool)
    for row, layer in zip(kept, store.layers, strict=True):
        row[list(plan.layers[layer].keep)] = True
    return kept


def choices(stores: dict[int, Saliency], plans: dict[str, PrunePlan]) -> dict[str, Any]:
    """What domains share at a quarter of the experts, and what leaving Chinese out changes."""
    return {
        "keep": SHARED,
        "overlap": {name: overlaps(stores, CRITERIA[name]) for name in ("reap", "frequency")},
        "flips": {str(keep): changes(stores, plans, keep) for keep in (32, 16)},
    }


def overlaps(stores: dict[int, Saliency], criterion: Criterion) -> dict[str, Any]:
    """Of the best of each pair of domains, and of a domain in two draws."""
    chosen, again = (
        [best(scores, SHARED) for scores in source_scores(stores[seed], criterion)]
        for seed in SEEDS[:2]
    )
    pairs = {
        f"{DOMAINS[one]} / {DOMAINS[other]}": overlap(chosen[one], chosen[other])
        for one, other in combinations(range(len(DOMAINS)), 2)
    }
    pairs |= {
        f"{name}, two draws": overlap(one, other)
        for name, one, other in zip(DOMAINS, chosen, again, strict=True)
    }
    return {name: found and found._asdict() for name, found in pairs.items()}


def changes(stores: dict[int, Saliency], plans: dict[str, PrunePlan], keep: int) -> dict[str, Any]:
    """Flips of REAP's choice without Chinese, beside those of other draws."""
    aware, blind = (
        [mask(stores[seed], plans[f"{name}/{keep}/{seed}"]) for seed in SEEDS]
        for name in ("reap", "reap-without-chinese")
    )
    return {
        "slots": int(aware[0].sum()),
        "without_chinese": [flips(*pair) for pair in zip(aware, blind, strict=True)],
        "other_draw": [flips(aware[0], other) for other in aware[1:]],
    }


def rows(evaluation: Evaluation) -> dict[str, Any]:
    """Sums of each document: of the parent and of each plan."""
    plans = {
        name: {
            "nll": evaluation.nll[1 + number].round(4).tolist(),
            "kl": evaluation.kl[number].round(4).tolist(),
            "agree": evaluation.agree[number].tolist(),
        }
        for number, name in enumerate(evaluation.plans)
    }
    domains = [evaluation.corpus.sources[source] for source in evaluation.document_sources]
    return {
        "domains": domains,
        "tokens": evaluation.tokens.tolist(),
        "parent": evaluation.nll[0].round(4).tolist(),
        "plans": plans,
    }


def main() -> None:
    """Calibrate, plan, evaluate, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("docs/evidence"))
    parser.add_argument("--tokens", type=int, default=30_000, help="to calibrate on, a domain")
    parser.add_argument("--held-out", type=int, default=6_144, help="to measure on, a domain")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    stores = {seed: measured(args, seed) for seed in SEEDS}
    plans = all_plans(stores)
    corpus = texts(args.texts, "held_out", args.held_out, HELD_OUT_PER_DOCUMENT, 0)
    with progress(False) as shown:
        evaluation = evaluate(
            open_source(MODEL), corpus, plans, memory=MEMORY, folder=args.work / "eval",
            progress=shown,
        )  # fmt: skip
    results = {
        "model": evaluation.model,
        "n_experts": stores[0].n_experts,
        "keeps": list(KEEPS),
        "calibrated_on": {str(seed): store.provenance()["runs"] for seed, store in stores.items()},
        "held_out": corpus.to_json(),
        "documents": rows(evaluation),
        "retained": plan_facts(stores, plans),
        "choices": choices(stores, plans),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "results.json").write_text(json.dumps(results) + "\n")
    write_page(results, args.out)


if __name__ == "__main__":
    main()
