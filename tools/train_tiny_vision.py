"""Train the tiny K3's vision on one CPU thread: the text model of the artifact stays as it is.

Input: the artifact that export_tiny.py wrote. Output: a run folder with a checkpoint and a log of
JSON lines. Four phases: rows that make the text model say each colour and shape are learnt as
plain parameters; tower and projector learn to give these rows for pictures; the text model's own
loss on the answers is added; then the rows are forgotten. Pictures come from seeds: the same steps
give the same weights on the same machine. `--resume` goes on, and the card then says so;
export_tiny_vision.py puts the last checkpoint into the artifact.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tiny_corpus import PAD_ID
from tiny_layers import RMSNorm
from tiny_layout import load_artifact
from tiny_pictures import (
    COLOURS,
    N_ROWS,
    SHAPES,
    TRAINING_SEEDS,
    Drawn,
    Size,
    draw,
    picture_size,
)
from tiny_vision import Reader, TinyVision, patches, vision_config
from tokenizers import Tokenizer
from torch import Tensor, nn

CHECKPOINT = "vision.pt"
WARMUP_STEPS, FINAL_SHARE = 50, 0.02
ROW_RATE, RATE = 2e-2, 2e-3
"""Peak learning rates of the rows, and of tower and projector."""


def open_reader(artifact: Path) -> Reader:
    """The artifact's text model and tokenizer."""
    tokenizer = Tokenizer.from_file(str(artifact / "tokenizer.json"))
    return Reader(load_artifact(artifact), tokenizer)


def make_optimizer(*modules: nn.Module) -> torch.optim.Optimizer:
    """AdamW; matrices decay, vectors and positions do not."""
    parameters = [p for module in modules for p in module.parameters()]
    matrices = [p for p in parameters if p.ndim in (2, 4)]
    others = [p for p in parameters if p.ndim in (1, 3)]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def indices(drawn: Sequence[Drawn]) -> tuple[Tensor, Tensor]:
    """Numbers of the colours and shapes."""
    colours = torch.tensor([list(COLOURS).index(d.colour) for d in drawn])
    return colours, torch.tensor([SHAPES.index(d.shape) for d in drawn])


class Rows(nn.Module):
    """What the text model has to read instead of a picture: a sum for each colour and shape."""

    def __init__(self, width: int, scale: float) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.randn(N_ROWS, width) * 0.3)
        self.colour = nn.Parameter(torch.randn(len(COLOURS), N_ROWS, width) * 0.2)
        self.shape = nn.Parameter(torch.randn(len(SHAPES), N_ROWS, width) * 0.2)
        self.norm = RMSNorm(width, 1e-5)
        nn.init.constant_(self.norm.weight, scale)

    def forward(self, drawn: Sequence[Drawn]) -> Tensor:
        colours, shapes = indices(drawn)
        return self.norm(self.base + self.colour[colours] + self.shape[shapes])


class Heads(nn.Module):
    """Colour and shape from the mean of a picture's rows; only training has them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.colour, self.shape = nn.Linear(width, len(COLOURS)), nn.Linear(width, len(SHAPES))

    def loss(self, features: Tensor, drawn: Sequence[Drawn]) -> Tensor:
        mean, (colours, shapes) = features.mean(1), indices(drawn)
        colour_loss = F.cross_entropy(self.colour(mean), colours)
        return colour_loss + F.cross_entropy(self.shape(mean), shapes)


class Trainer:
    def __init__(self, reader: Reader, args: argparse.Namespace) -> None:
        self.reader, self.batch = reader, args.batch
        phases = (args.row_steps, args.copy_steps, args.both_steps, args.read_steps)
        self.ends = np.cumsum(phases).tolist()
        self.step, self.seconds, self.resumed = 0, 0.0, False
        width = reader.text.config["hidden_size"]
        # Rows begin as large as the embeddings of text.
        self.rows = Rows(width, reader.text.embed.weight.square().mean().sqrt().item())
        self.vision, self.heads = TinyVision(vision_config(width)), Heads(width)
        self.row_optimizer = make_optimizer(self.rows)
        self.optimizer = make_optimizer(self.vision, self.heads)

    def rate(self) -> float:
        """A cosine for the rows; constant while they are copied, then another cosine."""
        rows, _, copied, read = self.ends
        if self.step < rows:
            return ROW_RATE * cosine(self.step, rows)
        warm = min(1.0, (self.step - rows + 1) / WARMUP_STEPS)
        return RATE * warm * cosine(max(0, self.step - copied), read - copied)

    def losses(self) -> list[Tensor]:
        """Of the heads, of the rows' copy, of the text model per token; the phase decides which."""
        rows, copied, both, _ = self.ends
        first = TRAINING_SEEDS + self.step * self.batch
        size = picture_size(np.random.default_rng(first))
        drawn = [draw(seed, size=size) for seed in range(first, first + self.batch)]
        if self.step < rows:
            return [self.read(self.rows(drawn), size, drawn)]
        if self.step == rows:
            self.vision.mm_projector.post_norm.load_state_dict(self.rows.norm.state_dict())
        features = self.vision(patches(d.image for d in drawn))
        losses = [self.heads.loss(features, drawn)]
        if self.step < both:
            wanted = self.rows(drawn).detach()
            losses.append(F.mse_loss(features, wanted) / wanted.var())
        if self.step >= copied:
            losses.append(self.read(features, size, drawn))
        return losses

    def read(self, features: Tensor, size: Size, drawn: list[Drawn]) -> Tensor:
        targets = self.reader.targets(d.answer for d in drawn)
        logits = self.reader.logits(features, size, targets[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PAD_ID)

    def train_step(self) -> list[float]:
        started = time.process_time()
        losses = self.losses()
        torch.stack(losses).sum().backward()
        nn.utils.clip_grad_norm_(self.vision.parameters(), 1.0)
        optimizer = self.row_optimizer if self.step < self.ends[0] else self.optimizer
        for group in optimizer.param_groups:
            group["lr"] = self.rate()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.seconds += time.process_time() - started
        return [loss.item() for loss in losses]

    def parts(self) -> dict[str, Any]:
        """What a checkpoint has the state of."""
        names = ("vision", "heads", "rows", "optimizer", "row_optimizer")
        return {name: getattr(self, name) for name in names}

    def save(self, folder: Path, command: str) -> None:
        state = {name: part.state_dict() for name, part in self.parts().items()}
        state["run"] = {
            "command": command,
            "steps": self.step,
            "phases": self.ends,
            "batch": self.batch,
            "resumed": self.resumed,
            "cpu_minutes": round(self.seconds / 60, 1),
        }
        torch.save(state, folder / (CHECKPOINT + ".tmp"))
        os.replace(folder / (CHECKPOINT + ".tmp"), folder / CHECKPOINT)

    def restore(self, folder: Path) -> None:
        state = torch.load(folder / CHECKPOINT, weights_only=True)
        for name, part in self.parts().items():
            part.load_state_dict(state[name])
        self.step, self.seconds = state["run"]["steps"], 60 * state["run"]["cpu_minutes"]
        self.resumed = True


def cosine(step: int, steps: int) -> float:
    """From 1 to FINAL_SHARE."""
    return FINAL_SHARE + (1 - FINAL_SHARE) * 0.5 * (1 + math.cos(math.pi * step / steps))


def run(trainer: Trainer, folder: Path, command: str) -> None:
    losses: list[list[float]] = []
    while trainer.step < trainer.ends[-1]:
        losses.append(trainer.train_step())
        if trainer.step % 50 and trainer.step not in trainer.ends:
            continue
        means = np.mean(losses, 0).round(4).tolist()
        minutes = round(trainer.seconds / 60, 2)
        line = json.dumps({"step": trainer.step, "losses": means, "cpu_minutes": minutes})
        print(line, flush=True)
        with (folder / "vision.jsonl").open("a") as log:
            log.write(line + "\n")
        trainer.save(folder, command)
        losses = []


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--artifact", type=Path, required=True, help="folder with the text model")
    parser.add_argument("--out", type=Path, required=True, help="run folder")
    parser.add_argument("--row-steps", type=int, default=350, help="of rows, without a picture")
    parser.add_argument("--copy-steps", type=int, default=2200, help="of the tower, to these rows")
    parser.add_argument("--both-steps", type=int, default=400, help="with the text model, too")
    parser.add_argument("--read-steps", type=int, default=700, help="with the text model alone")
    parser.add_argument("--batch", type=int, default=32, help="pictures a step, of one size")
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    args.out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(open_reader(args.artifact), args)
    if args.resume:
        trainer.restore(args.out)
    given = shlex.join(word for word in sys.argv[1:] if word != "--resume")
    run(trainer, args.out, f"python tools/train_tiny_vision.py {given}")


if __name__ == "__main__":
    main()
