"""Prompt lookup: tokens per forward pass on code edits, and what it costs where nothing repeats.

Input: none; the files are Python's own. An edit is replayed: the prompt holds a file, and the
choices of the model are the tokens of the file after one small change, for a tiny model can't edit.
The cost is the process time of the tiny K3 decoding random tokens, of which nothing can be
foreseen, without lookup over that with it, in turns. Output: a table, or JSON.

    python -m benchmarks.lookup [--tokens N] [--repeats N] [--json]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step

from kimi_k3_mlx.runtime.load import load
from kimi_k3_mlx.runtime.lookup import MAX_DRAFT, Lookahead

TINY_K3 = Path(__file__).parents[1] / "kimi_k3_mlx" / "assets" / "tiny-k3"
PREFILL_STEP = 4096
PROMPT = 64


class Edit(NamedTuple):
    """One change of one file."""

    module: str
    before: str
    after: str


EDITS = (
    Edit("textwrap", "tabsize=8,", "tabsize=4,"),
    Edit("shlex", "def split(s, comments=False, posix=True):", "def split(text, comments=False):"),
    Edit(
        "bisect", "lo = mid + 1", "# Everything up to mid is smaller.\n                lo = mid + 1"
    ),
    Edit("queue", "class Empty", "class Drained"),
    Edit("fnmatch", "import os\n", "import os\nimport sys\n"),
    Edit("colorsys", "def rgb_to_hls(r, g, b):", "def hls_of_rgb(r, g, b):"),
    Edit("sched", "_time", "_clock"),
)


class Position:
    """The cache of a model that only has to know where it is."""

    def __init__(self) -> None:
        self.offset = 0
        self.state = ()

    def is_trimmable(self) -> bool:
        """Always."""
        return True

    def trim(self, n: int) -> int:
        """Step back n tokens."""
        self.offset -= n
        return n


class Script:
    """A model that wants to write one text: its logits are 1 at the token that comes next."""

    def __init__(self, tokens: list[int], vocabulary: int) -> None:
        self.next = mx.array([*tokens[1:], tokens[0]])
        self.vocabulary = vocabulary
        self.layers: list[Any] = []

    def make_cache(self) -> list[Position]:
        """One entry."""
        return [Position()]

    def __call__(self, inputs: mx.array, cache: list[Position], **_: Any) -> mx.array:
        """Logits [1, T, vocabulary]."""
        first, n = cache[0].offset, inputs.shape[1]
        cache[0].offset += n
        return 10 * (self.next[first : first + n, None] == mx.arange(self.vocabulary))[None]


class Replay(NamedTuple):
    """One edit, written by a scripted model."""

    module: str
    tokens: int
    passes: int

    @property
    def tokens_per_pass(self) -> float:
        """1 without lookup."""
        return self.tokens / self.passes


def replay(edit: Edit, tokenizer: Any, max_draft: int) -> Replay:
    """Write the file after the edit, the file before it in the prompt; the text is checked."""
    path = importlib.util.find_spec(edit.module).origin
    before = Path(path).read_text("utf-8")
    if edit.before not in before:
        raise SystemExit(f"{path} has no {edit.before!r}: another version of Python.")
    prompt = tokenizer.encode(f"Change one thing in this file:\n{before}\nThe file:\n")
    wanted = tokenizer.encode(before.replace(edit.before, edit.after))
    vocabulary = max([*prompt, *wanted]) + 1
    model = Lookahead(Script(prompt + wanted, vocabulary), max_draft)
    steps = generate_step(
        mx.array(prompt), model, max_tokens=len(wanted), prefill_step_size=PREFILL_STEP
    )
    if [token for token, _ in steps] != wanted:
        raise SystemExit(f"{edit.module}: lookup changed the text.")
    return Replay(edit.module, len(wanted), model.passes)


def seconds(model: Any, tokens: np.ndarray) -> float:
    """Process time of decoding, the next token being whatever `tokens` says."""
    following = iter(tokens[PROMPT:].tolist())

    def sampler(logprobs: mx.array) -> mx.array:
        return mx.depends(mx.array([next(following)]), logprobs)

    steps = generate_step(
        mx.array(tokens[:PROMPT]), model, max_tokens=len(tokens) - PROMPT - 1, sampler=sampler
    )
    next(steps)
    start = time.process_time()
    for _ in steps:
        pass
    return time.process_time() - start


def cost(model: Any, n_tokens: int, repeats: int) -> float:
    """Speed with lookup over speed without: the median of short runs in turns, a warm-up first."""
    ratios = []
    for seed in range(repeats + 1):
        tokens = np.random.default_rng(seed).integers(0, 1000, PROMPT + n_tokens)
        order = [model, Lookahead(model)][:: 1 if seed % 2 else -1]
        times = [seconds(candidate, tokens) for candidate in order]
        plain, looked_up = times if seed % 2 else times[::-1]
        ratios.append(plain / looked_up)
    return median(ratios[1:])


def main() -> None:
    """Replay, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=70, help="random tokens of a run")
    parser.add_argument("--repeats", type=int, default=25, help="runs of each kind")
    parser.add_argument("--max-draft", type=int, default=MAX_DRAFT)
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    mx.disable_compile()
    build = load(TINY_K3)
    rows = [replay(edit, build.tokenizer, args.max_draft) for edit in EDITS]
    ratio = cost(build.model, args.tokens, args.repeats)
    if args.json:
        edits = [row._asdict() | {"tokens_per_pass": row.tokens_per_pass} for row in rows]
        print(json.dumps({"edits": edits, "speed_where_nothing_repeats": ratio}))
        return
    for row in rows:
        print(f"{row.module:10} {row.tokens:6} tokens  {row.tokens_per_pass:5.2f} a pass")
    print(f"speed where nothing repeats: {ratio:.3f} of plain decoding")


if __name__ == "__main__":
    main()
