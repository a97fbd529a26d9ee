"""What a tiny K3 has learnt: held-out loss against a unigram model, expert use, greedy text.

Input: a model, a corpus. Output: plain numbers for results.json; nothing is written here.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from tiny_corpus import (
    BOS_ID,
    DOMAINS,
    EOS_ID,
    PAD_ID,
    VOCAB_SIZE,
    Corpus,
    Document,
    encode_documents,
)
from tiny_kda import CHUNK
from tiny_model import TinyK3
from tokenizers import Tokenizer
from torch import Tensor

N_TOP_EXPERTS = 8
PROMPTS = (
    "import os\n\n\ndef read_file(path):\n",
    "class Queue:\n    def __init__(self",
    "The following function returns ",
    "使用此命令",
)


def document_windows(documents: list[np.ndarray], length: int) -> Tensor:
    """Every document cut into windows of `length` predictions, padded; context starts anew."""
    rows = []
    for ids in documents:
        for start in range(0, len(ids) - 1, length):
            piece = ids[start : start + length + 1].astype(np.int64)
            rows.append(np.pad(piece, (0, length + 1 - len(piece)), constant_values=PAD_ID))
    return torch.from_numpy(np.stack(rows))


@torch.no_grad()
def sum_of_nats(model: TinyK3, windows: Tensor, rows_at_once: int = 4096) -> float:
    total = 0.0
    for batch in windows.split(max(1, rows_at_once // windows.shape[1])):
        logits = model(batch[:, :-1]).flatten(0, 1)
        target = batch[:, 1:].flatten()
        total += F.cross_entropy(logits, target, ignore_index=PAD_ID, reduction="sum").item()
    return total


def unigram_log_probabilities(train: dict[str, np.ndarray]) -> np.ndarray:
    """Add-one smoothed token frequencies of all the training text."""
    counts = np.ones(VOCAB_SIZE)
    for tokens in train.values():
        counts += np.bincount(tokens, minlength=VOCAB_SIZE)
    return np.log(counts / counts.sum())


def _scores(nats: float, n_tokens: int, n_bytes: int) -> dict[str, float]:
    return {
        "nats_per_token": round(nats / n_tokens, 4),
        "perplexity": round(math.exp(nats / n_tokens), 2),
        "bits_per_byte": round(nats / math.log(2) / n_bytes, 4),
    }


def first_documents(documents: list[Document], n_bytes: int = 240_000) -> list[Document]:
    """Whole documents until there are enough bytes."""
    sizes = np.cumsum([len(d.text.encode()) for d in documents])
    return documents[: int(np.searchsorted(sizes, n_bytes)) + 1]


def held_out_results(model: TinyK3, corpus: Corpus, lengths: tuple[int, ...]) -> dict:
    """Per domain, on the same tokens: the model at several window lengths, the unigram model."""
    unigram, results = unigram_log_probabilities(corpus.train), {}
    for domain in DOMAINS:
        documents = first_documents(corpus.held_out[domain])
        encoded = encode_documents(corpus.tokenizer, documents)
        targets = np.concatenate([ids[1:] for ids in encoded])
        n_bytes = sum(len(d.text.encode()) for d in documents)
        results[domain] = {
            "documents": len(documents),
            "bytes": n_bytes,
            "tokens": len(targets),
            "unigram": _scores(-float(unigram[targets].sum()), len(targets), n_bytes),
        }
        for length in lengths:
            nats = sum_of_nats(model, document_windows(encoded, length))
            results[domain][f"windows_of_{length}"] = _scores(nats, len(targets), n_bytes)
    return results


@torch.no_grad()
def expert_shares(model: TinyK3, windows: Tensor) -> np.ndarray:
    """[layers, experts]: the share of a text's routed tokens that each expert got."""
    loads = 0.0
    for batch in windows.split(16):
        model(batch[:, :-1])
        loads = loads + torch.stack([moe.load for moe in model.moes()])
    return (loads / loads.sum(-1, keepdim=True)).numpy()


def top_overlap(first: np.ndarray, second: np.ndarray) -> list[int]:
    """Per layer, how many of the busiest experts two texts share."""

    def top(shares: np.ndarray) -> set[int]:
        return set(np.argsort(-shares)[:N_TOP_EXPERTS].tolist())

    return [len(top(a) & top(b)) for a, b in zip(first, second, strict=True)]


def divergence_bits(first: np.ndarray, second: np.ndarray) -> float:
    """Jensen-Shannon divergence of two expert distributions, mean over the layers."""
    middle = (first + second) / 2

    def relative_entropy(p: np.ndarray) -> np.ndarray:
        return np.where(p > 0, p * np.log2(np.maximum(p, 1e-12) / middle.clip(1e-12)), 0).sum(-1)

    return round(float((relative_entropy(first) + relative_entropy(second)).mean() / 2), 4)


def specialisation_results(model: TinyK3, corpus: Corpus, length: int, n_windows: int = 64) -> dict:
    shares = {}
    for domain in DOMAINS:
        encoded = encode_documents(corpus.tokenizer, corpus.held_out[domain])
        full = document_windows([ids for ids in encoded if len(ids) > length], length)
        full = full[(full != PAD_ID).all(-1)]
        spread = full[:: max(1, len(full) // n_windows)][:n_windows]
        shares[domain] = expert_shares(model, spread)
    experts = shares["code"].shape[-1]
    pairs = (("code", "chinese"), ("code", "english"), ("english", "chinese"))
    return {
        "experts": experts,
        "top": N_TOP_EXPERTS,
        "overlap_expected_by_chance": N_TOP_EXPERTS**2 / experts,
        "pairs": {
            f"{a} / {b}": {
                "overlap_per_layer": top_overlap(shares[a], shares[b]),
                "divergence_bits": divergence_bits(shares[a], shares[b]),
            }
            for a, b in pairs
        },
    }


@torch.no_grad()
def greedy_text(model: TinyK3, tokenizer: Tokenizer, prompt: str, n_tokens: int = 100) -> str:
    """The most likely continuation, without a cache: a check, not a way to generate."""
    ids = [BOS_ID, *tokenizer.encode(prompt).ids]
    n_prompt = len(ids)
    while len(ids) < n_prompt + n_tokens:
        padded = ids + [PAD_ID] * (-len(ids) % CHUNK)
        ids.append(int(model(torch.tensor([padded]))[0, len(ids) - 1].argmax()))
        if ids[-1] == EOS_ID:
            break
    return tokenizer.decode(ids[n_prompt:], skip_special_tokens=False)
