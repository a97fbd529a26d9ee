"""Train the tiny K3 on one CPU thread, against the clock.

Input: the corpus of tiny_corpus. Output: a run folder with checkpoints every few minutes and a log
of JSON lines. The schedule follows elapsed time, not steps: the learning rate falls as a cosine of
the used share of `--minutes`, experts are quantized to MXFP4 in the last part of it.
`--resume` goes on from the last checkpoint. export_tiny.py makes the artifact from any checkpoint.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import tiny_corpus
import torch
import torch.nn.functional as F
from tiny_corpus import DOMAINS, Corpus
from tiny_model import TinyK3, text_config
from torch import Tensor

CHECKPOINT = "checkpoint.pt"


@dataclass(frozen=True)
class Schedule:
    """What the used share of the time decides, all in one place."""

    minutes: float
    peak_rate: float = 3e-3
    warmup_steps: int = 100
    final_share: float = 0.02
    quantize_from: float = 0.7
    freeze_bias_from: float = 0.95

    def rate(self, step: int, share: float) -> float:
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, share)))
        decay = self.final_share + (1 - self.final_share) * cosine
        return self.peak_rate * min(1.0, (step + 1) / self.warmup_steps) * decay

    def bias_rate(self, step: int, share: float) -> float:
        """Fast at first, where a router collapses; zero at the end, where it must stand still."""
        if share >= self.freeze_bias_from:
            return 0.0
        return 1e-2 if step < 200 else 1e-3


class WindowSampler:
    """Batches of windows, a fixed number per domain; a domain's windows are shuffled per epoch."""

    def __init__(self, tokens: dict[str, np.ndarray], rows: dict[str, int], length: int) -> None:
        self.tokens, self.rows, self.length = tokens, rows, length
        self.rng = np.random.default_rng(0)
        self.queue: dict[str, list[int]] = {domain: [] for domain in rows}

    def _next_start(self, domain: str) -> int:
        if not self.queue[domain]:
            first = int(self.rng.integers(self.length))
            last = len(self.tokens[domain]) - self.length - 1
            starts = np.arange(first, last, self.length)
            self.queue[domain] = self.rng.permutation(starts).tolist()
        return self.queue[domain].pop()

    def batch(self) -> Tensor:
        windows = []
        for domain, count in self.rows.items():
            for _ in range(count):
                start = self._next_start(domain)
                windows.append(self.tokens[domain][start : start + self.length + 1])
        return torch.from_numpy(np.stack(windows).astype(np.int64))

    def state(self) -> dict:
        return {"rng": self.rng.bit_generator.state, "queue": self.queue}

    def restore(self, state: dict) -> None:
        self.rng.bit_generator.state = state["rng"]
        self.queue = state["queue"]


@dataclass
class Progress:
    """Everything about a run but its tensors."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    history: list[dict] = field(default_factory=list)


def make_optimizer(model: TinyK3) -> torch.optim.Optimizer:
    """AdamW; matrices decay, vectors do not."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)


def next_token_loss(logits: Tensor, window: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())


def held_out_windows(corpus: Corpus, length: int, n_windows: int = 24) -> dict[str, Tensor]:
    """The first windows of every domain's held-out documents, for the log."""
    windows = {}
    for domain in DOMAINS:
        encoded = tiny_corpus.encode_documents(corpus.tokenizer, corpus.held_out[domain])
        stream = np.concatenate(encoded)[: n_windows * (length + 1)]
        windows[domain] = torch.from_numpy(stream.astype(np.int64)).view(n_windows, -1)
    return windows


@torch.no_grad()
def held_out_nats(model: TinyK3, windows: dict[str, Tensor]) -> dict[str, float]:
    return {
        domain: round(next_token_loss(model(window[:, :-1]), window).item(), 4)
        for domain, window in windows.items()
    }


class Trainer:
    def __init__(self, corpus: Corpus, schedule: Schedule, batch: int, length: int) -> None:
        self.schedule = schedule
        self.model = TinyK3(text_config())
        self.optimizer = make_optimizer(self.model)
        rows = {"code": round(0.4 * batch), "english": round(0.3 * batch)}
        rows["chinese"] = batch - sum(rows.values())
        self.sampler = WindowSampler(corpus.train, rows, length)
        self.tokens_per_step = batch * length
        self.progress = Progress()

    @property
    def share(self) -> float:
        return self.progress.seconds / (60 * self.schedule.minutes)

    def step(self) -> float:
        started = time.perf_counter()
        share, progress = self.share, self.progress
        for moe in self.model.moes():
            moe.quantize = share >= self.schedule.quantize_from
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule.rate(progress.step, share)
        window = self.sampler.batch()
        loss = next_token_loss(self.model(window[:, :-1]), window)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for moe in self.model.moes():
            moe.balance(self.schedule.bias_rate(progress.step, share))
        progress.step += 1
        progress.tokens += self.tokens_per_step
        progress.seconds += time.perf_counter() - started
        return loss.item()

    def busiest_expert(self) -> float:
        """The highest load of an expert over the mean load, the worst of all layers."""
        return max(float(moe.load.max() / moe.load.mean()) for moe in self.model.moes())

    def save(self, folder: Path) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "sampler": self.sampler.state(),
            "torch_rng": torch.get_rng_state(),
            "progress": asdict(self.progress),
            "schedule": asdict(self.schedule),
        }
        torch.save(state, folder / (CHECKPOINT + ".tmp"))
        os.replace(folder / (CHECKPOINT + ".tmp"), folder / CHECKPOINT)

    def restore(self, folder: Path) -> None:
        state = torch.load(folder / CHECKPOINT, weights_only=False)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.sampler.restore(state["sampler"])
        torch.set_rng_state(state["torch_rng"])
        self.progress = Progress(**state["progress"])


class RunLog:
    """One JSON object a line, in the run folder and on stdout."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "log.jsonl"

    def write(self, **entry: object) -> None:
        line = json.dumps(entry)
        print(line, flush=True)
        with self.path.open("a") as file:
            file.write(line + "\n")


def run(
    trainer: Trainer, windows: dict[str, Tensor], log: RunLog, args: argparse.Namespace
) -> None:
    losses, saved, reported = [], time.monotonic(), time.monotonic()
    while trainer.share < 1:
        losses.append(trainer.step())
        if trainer.progress.step % 50 == 0:
            report(trainer, losses, time.monotonic() - reported, log)
            losses, reported = [], time.monotonic()
        if time.monotonic() - saved > 60 * args.checkpoint_minutes:
            record(trainer, windows, log, args.out)
            saved = reported = time.monotonic()
    record(trainer, windows, log, args.out)


def report(trainer: Trainer, losses: list[float], seconds: float, log: RunLog) -> None:
    progress = trainer.progress
    log.write(
        step=progress.step,
        minutes=round(progress.seconds / 60, 2),
        loss=round(sum(losses) / len(losses), 4),
        tokens=progress.tokens,
        tokens_per_second=round(len(losses) * trainer.tokens_per_step / seconds),
        busiest=round(trainer.busiest_expert(), 1),
    )


def record(trainer: Trainer, windows: dict[str, Tensor], log: RunLog, folder: Path) -> None:
    """Measure held-out loss, remember it in the history, save the checkpoint."""
    nats = held_out_nats(trainer.model, windows)
    progress = trainer.progress
    point = {"step": progress.step, "tokens": progress.tokens, "held_out_nats": nats}
    progress.history.append(point)
    log.write(**point, share=round(trainer.share, 3))
    trainer.save(folder)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="run folder")
    parser.add_argument("--cache", type=Path, default=Path("/tmp/tiny-corpus"))
    parser.add_argument("--minutes", type=float, default=90.0, help="time of training steps")
    parser.add_argument("--checkpoint-minutes", type=float, default=5.0)
    parser.add_argument("--batch", type=int, default=10, help="windows a step")
    parser.add_argument("--length", type=int, default=256, help="tokens a window, times 16")
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    args.out.mkdir(parents=True, exist_ok=True)
    corpus = tiny_corpus.build_corpus(args.cache)
    trainer = Trainer(corpus, Schedule(args.minutes, args.rate), args.batch, args.length)
    if args.resume:
        trainer.restore(args.out)
    else:
        command = "python tools/train_tiny.py " + shlex.join(sys.argv[1:])
        (args.out / "run.json").write_text(json.dumps({"command": command}) + "\n")
    run(trainer, held_out_windows(corpus, args.length), RunLog(args.out), args)


if __name__ == "__main__":
    main()
