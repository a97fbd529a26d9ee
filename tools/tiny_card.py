"""The tiny K3's model card and licence note: results.json in words, no number of its own."""

from __future__ import annotations

from tiny_corpus import DOMAINS, EXCERPT_PACKAGES, PACKAGES, STDLIB_LICENCE


def table(header: list[str], rows: list[list[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def _data_rows(results: dict) -> list[list[object]]:
    corpus = results["corpus"]
    stdlib = f"Python {corpus['python']} standard library (no tests, no data tables)"
    rows: list[list[object]] = [["code", stdlib, STDLIB_LICENCE]]
    for package in PACKAGES:
        version = corpus["package_versions"][package.name].replace("%3a", ":")
        domains = ", ".join(package.pages)
        rows.append([domains, f"Debian `{package.name}` {version}", package.licence])
    return rows


def _corpus_rows(results: dict) -> list[list[object]]:
    train, held_out = results["corpus"]["train"], results["corpus"]["held_out"]
    return [
        [
            domain,
            train[domain]["documents"],
            f"{train[domain]['tokens']:,}",
            held_out[domain]["documents"],
            f"{held_out[domain]['bytes']:,}",
        ]
        for domain in DOMAINS
    ]


def _held_out_rows(results: dict) -> list[list[object]]:
    rows: list[list[object]] = []
    for domain in DOMAINS:
        for name, scores in results["held_out"][domain].items():
            if isinstance(scores, dict):
                rows.append([domain, name.replace("_", " "), *scores.values()])
    return rows


def _overlap_rows(results: dict) -> list[list[object]]:
    return [
        [pair, " ".join(map(str, found["overlap_per_layer"])), found["divergence_bits"]]
        for pair, found in results["specialisation"]["pairs"].items()
    ]


def _history_rows(results: dict) -> list[list[object]]:
    points = results["training"]["history"]
    return [[f"{p['tokens']:,}", *(p["held_out_nats"][d] for d in DOMAINS)] for p in points]


def _what_it_is(results: dict) -> str:
    parameters = results["parameters"]
    return (
        "A real Kimi K3 in every part (KDA, gated MLA, attention residuals, LatentMoE with a "
        "sigmoid router and correction bias, SiTU, shared experts), trained from scratch to be "
        "small. It holds nothing of Moonshot's weights. Its use is to try tools on: its text "
        "is only as good as its size.\n\n"
        f"{parameters['total']:,} parameters, of which {parameters['routed_experts']:,} in "
        f"routed experts; {parameters['active_per_token']:,} work on a token. The layout on disk "
        "is Moonshot's: one shard per layer, experts `mxfp4-pack-quantized`, the rest BF16 and "
        "F32. The vocabulary has 1,024 entries: a byte-level BPE and K3's control tokens in K3's "
        "order. There is no chat template."
    )


def _training(results: dict) -> str:
    training = results["training"]
    schedule = training["schedule"]
    return (
        f"{training['steps']:,} steps of {training['tokens_per_step']:,} tokens, "
        f"{training['tokens']:,} tokens in {training['minutes']} minutes "
        f"({training['tokens_per_second']:,} tokens a second; {training['machine']}, "
        f"torch {training['torch']}). AdamW, peak learning rate {schedule['peak_rate']}, cosine "
        f"by elapsed time; experts quantized to MXFP4 (straight-through) from "
        f"{schedule['quantize_from']:.0%} of the time on; the router's correction bias balanced "
        f"as in DeepSeek-V3 and frozen from {schedule['freeze_bias_from']:.0%} on.\n\n"
        f"```\n{training['command']}\n```\n\n"
        "Loss on the first held-out windows while training (nats per token; before MXFP4 "
        "sets in, of the unquantized model):\n\n"
        + table(["tokens seen", *DOMAINS], _history_rows(results))
    )


def _held_out(results: dict) -> str:
    return (
        "Documents that training never saw, split by document; prose lines that also occur in "
        "a held-out document were removed from training. Measured on this artifact, read back "
        "from its files (float32). Every document begins with `[BOS]`; context starts anew in "
        "every window. The unigram model has the training text's token frequencies. Excerpts "
        "are in `held_out/`, documents separated by a line with one form feed; `calibration/` has "
        "as much of training documents.\n\n"
        + table(
            ["domain", "model", "nats/token", "perplexity", "bits/byte"], _held_out_rows(results)
        )
    )


def _specialisation(results: dict) -> str:
    found = results["specialisation"]
    return (
        f"Of the {found['top']} busiest of {found['experts']} experts, how many two domains "
        f"share in each MoE layer (chance: {found['overlap_expected_by_chance']:g}), and the "
        "Jensen-Shannon divergence of the expert loads (bits, mean of the layers):\n\n"
        + table(["domains", "shared, layer by layer", "divergence"], _overlap_rows(results))
    )


def _greedy(results: dict) -> str:
    samples = results["greedy"].items()
    return "\n\n".join(f"```\n{prompt}⟶{text}\n```" for prompt, text in samples)


def _vision_rows(results: dict) -> list[list[object]]:
    names = {
        "held_out": "of other seeds than in training",
        "unseen": "of the pairs that training never showed",
        "swapped": "those of the first row, each shown for another",
    }
    return [[names[name], *scores.values()] for name, scores in results["vision"]["scores"].items()]


def _vision(results: dict) -> str:
    vision = results["vision"]
    smallest, largest = vision["pixels"]
    return (
        f"A MoonViT tower and a projector, {vision['parameters']:,} parameters, of the same parts "
        "as K3's; the text model's weights are as they were without them. Shown a picture of "
        f"{smallest} to {largest} pixels a side with one coloured shape, as "
        f"`tools/tiny_pictures.py` draws them, and the text `{vision['prompt']}`, it goes on with "
        "the colour and the shape. Of other pictures and other questions it knows nothing.\n\n"
        "Shares of right words in greedy answers, measured on this artifact, read back from its "
        f"files (float32). There are {vision['colours']} colours and {vision['shapes']} shapes: "
        f"chance is {vision['chance']['colour']} and {vision['chance']['shape']}. Pairs that "
        f"training never showed: {', '.join(vision['unseen_pairs'])}.\n\n"
        + table(["pictures", "number", "colour", "shape", "both"], _vision_rows(results))
        + "\n\n"
        + _vision_training(vision["training"])
    )


def _vision_training(training: dict) -> str:
    rows, copied, both, _ = training["phases"]
    resumed = " The run was stopped and resumed with more steps." if training["resumed"] else ""
    return (
        f"Trained in {training['cpu_minutes']} CPU minutes (one thread, torch "
        f"{training['torch']}), {training['batch']} pictures a step: {rows:,} steps to learn, "
        "without pictures, rows that make the text model say each colour and shape; "
        f"{copied - rows:,} steps in which tower and projector learn to give these rows; "
        f"{both - copied:,} with the text model's loss on the answers added; "
        f"{training['steps'] - both:,} with this loss and without the rows.{resumed}"
        f"\n\n```\n{training['command']}\n```"
    )


def _data(results: dict) -> str:
    header = ["domain", "training documents", "tokens", "held-out documents", "bytes"]
    return (
        table(["domain", "source", "licence"], _data_rows(results))
        + "\n\n"
        + table(header, _corpus_rows(results))
    )


def model_card(results: dict) -> str:
    sections = {
        "What it is": _what_it_is,
        "Held-out text": _held_out,
        "Experts": _specialisation,
        "Greedy continuations": _greedy,
        **({"Pictures": _vision} if "vision" in results else {}),
        "Training": _training,
        "Data": _data,
    }
    parts = [f"## {title}\n\n{write(results)}" for title, write in sections.items()]
    note = "Written by `tools/export_tiny*.py` from `results.json`; do not edit."
    return "\n\n".join(["# Tiny K3", note, *parts]) + "\n"


def licence_note() -> str:
    sources = "\n".join(f"* {package.name}: {package.licence}" for package in PACKAGES)
    return (
        "Tiny K3: what applies to what\n\n"
        "Weights, configuration and tokenizer: made by this project from scratch, under the\n"
        "Apache License 2.0 as far as rights in them are ours. They contain nothing of\n"
        "Moonshot AI's weights; the Kimi K3 License does not apply to them.\n\n"
        "Text in held_out/ and calibration/: excerpts that keep the licence of their source.\n"
        f"* code.txt: Python standard library, {STDLIB_LICENCE}\n"
        "* english.txt, chinese.txt: from the Debian packages\n"
        f"  {', '.join(EXCERPT_PACKAGES[:3])},\n  {', '.join(EXCERPT_PACKAGES[3:])}\n\n"
        "Licences of the training text, by Debian package (the authors and full texts are in\n"
        "/usr/share/doc/PACKAGE/copyright of each):\n"
        f"* Python standard library: {STDLIB_LICENCE}\n{sources}\n"
    )
