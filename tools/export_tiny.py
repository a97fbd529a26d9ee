"""Make the tiny K3 artifact from any checkpoint of a training run.

Input: a run folder of train_tiny.py and the same corpus cache. Output: weights, config and
tokenizer in Moonshot's layout, held-out text, results.json, and a card and licence note
whose numbers all come from results.json. What is measured is the written artifact, read back.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path

import numpy as np
import tiny_corpus
import torch
from tiny_card import licence_note, model_card
from tiny_corpus import DOMAINS, EXCERPT_PACKAGES, Corpus, Document
from tiny_layout import load_artifact, write_tokenizer, write_weights
from tiny_measure import PROMPTS, greedy_text, held_out_results, specialisation_results
from tiny_model import TinyK3, text_config

EXCERPT_BYTES = 24_000
EXCERPT_PER_DOCUMENT = 4_000


def _package(document: Document) -> str:
    return "" if document.domain == "code" else document.name.split("/")[0]


def _excerpt(document: Document, n_bytes: int) -> str:
    """Whole lines from the document's beginning."""
    lines: list[str] = []
    for line in document.text.splitlines(keepends=True):
        n_bytes -= len(line.encode())
        if n_bytes < 0:
            break
        lines.append(line)
    return "".join(lines)


def _in_turns(documents: list[Document]) -> list[Document]:
    """The packages take turns, so that the largest does not fill the excerpts."""
    ranks: dict[str, int] = {}
    ranked = []
    for document in documents:
        package = _package(document)
        ranks[package] = ranks.get(package, 0) + 1
        ranked.append((ranks[package], document))
    return [document for _, document in sorted(ranked, key=lambda pair: pair[0])]


def excerpts(documents: list[Document]) -> str:
    """About 24 KB of excerpts, documents separated by a line with one form feed."""
    wanted = [d for d in documents if d.domain == "code" or _package(d) in EXCERPT_PACKAGES]
    parts, left = [], EXCERPT_BYTES
    for document in _in_turns(wanted):
        text = _excerpt(document, min(left, EXCERPT_PER_DOCUMENT))
        if len(text.encode()) >= 400:
            parts.append(text)
            left -= len(text.encode()) + 2
    return "\f\n".join(parts)


def write_excerpts(corpus: Corpus, folder: Path) -> None:
    """Of held-out documents to measure on, and of training documents to calibrate on."""
    parts = {"held_out": corpus.held_out, "calibration": corpus.train_documents}
    for name, documents in parts.items():
        (folder / name).mkdir(exist_ok=True)
        for domain in DOMAINS:
            path = folder / name / f"{domain}.txt"
            path.write_text(excerpts(documents[domain]), encoding="utf-8", newline="\n")


def load_trained(checkpoint: Path) -> tuple[TinyK3, dict]:
    state = torch.load(checkpoint, weights_only=False)
    model = TinyK3(text_config())
    model.load_state_dict(state["model"])
    return model, state


def training_results(state: dict, run: dict) -> dict:
    progress, schedule = state["progress"], state["schedule"]
    return {
        "command": run["command"],
        "steps": progress["step"],
        "tokens": progress["tokens"],
        "tokens_per_step": progress["tokens"] // progress["step"],
        "minutes": round(progress["seconds"] / 60, 1),
        "tokens_per_second": round(progress["tokens"] / progress["seconds"]),
        "schedule": schedule,
        "history": progress["history"],
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, 1 thread",
    }


def parameter_results(model: TinyK3) -> dict[str, int]:
    experts = sum(moe.w13.numel() + moe.w2.numel() for moe in model.moes())
    total = sum(p.numel() for p in model.parameters())
    top_k, n_experts = model.config["num_experts_per_token"], model.config["num_experts"]
    active = total - experts + experts * top_k // n_experts
    return {"total": total, "routed_experts": experts, "active_per_token": active}


def measure(folder: Path, corpus: Corpus, length: int) -> dict:
    """Everything that is said about the artifact, from the artifact."""
    model = load_artifact(folder)
    return {
        "parameters": parameter_results(model),
        "held_out": held_out_results(model, corpus, (length, 4 * length)),
        "specialisation": specialisation_results(model, corpus, length),
        "greedy": {p: greedy_text(model, corpus.tokenizer, p) for p in PROMPTS},
    }


def save_reference(folder: Path, corpus: Corpus, target: Path) -> None:
    """Token ids and float32 logits of the artifact, to compare another implementation with."""
    encoded = tiny_corpus.encode_documents(corpus.tokenizer, corpus.held_out["code"])[0]
    ids = torch.from_numpy(encoded[:128].astype(np.int64))[None]
    with torch.no_grad():
        logits = load_artifact(folder)(ids)
    target.mkdir(parents=True, exist_ok=True)
    np.save(target / "ids.npy", ids.numpy())
    np.save(target / "logits.npy", logits.numpy())


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="run folder of train_tiny.py")
    parser.add_argument("--artifact", type=Path, required=True, help="folder to write")
    parser.add_argument("--cache", type=Path, default=Path("/tmp/tiny-corpus"))
    parser.add_argument("--length", type=int, default=256, help="window of the evaluation")
    parser.add_argument("--reference", type=Path, help="also write ids.npy and logits.npy here")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)
    args.artifact.mkdir(parents=True, exist_ok=True)
    corpus = tiny_corpus.build_corpus(args.cache)
    model, state = load_trained(args.run / "checkpoint.pt")
    run = json.loads((args.run / "run.json").read_text())
    write_weights(model, args.artifact)
    write_tokenizer(corpus.tokenizer, args.artifact)
    write_excerpts(corpus, args.artifact)
    results = {
        "training": training_results(state, run),
        "corpus": corpus.facts,
        **measure(args.artifact, corpus, args.length),
    }
    text = json.dumps(results, indent=1, ensure_ascii=False) + "\n"
    (args.artifact / "results.json").write_text(text, encoding="utf-8")
    (args.artifact / "README.md").write_text(model_card(results), encoding="utf-8")
    (args.artifact / "LICENSE").write_text(licence_note(), encoding="utf-8")
    if args.reference:
        save_reference(args.artifact, corpus, args.reference)
    print(json.dumps(results["held_out"], indent=1))


if __name__ == "__main__":
    main()
