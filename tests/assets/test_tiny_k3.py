"""The committed tiny K3: small, laid out as K3 is, and it has learnt something.

Nothing here trusts results.json: what is claimed is measured again, with stock mlx-lm.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_map
from mlx_lm.generate import generate_step

import kimi_k3_mlx
from kimi_k3_mlx.tensors.header import read_header
from tests.tiny_k3 import TinyConfig, write_source

ARTIFACT = Path(kimi_k3_mlx.__file__).parent / "assets" / "tiny-k3"
DOMAINS = ("code", "english", "chinese")
BASE, VOCAB, EXPERTS = 992, 1024, 64
WINDOW, ROWS, TOP = 256, 8, 8

SIZES = TinyConfig(
    layers=6,
    mla_layers=(3, 5),
    hidden=128,
    intermediate=384,
    heads=4,
    q_lora=64,
    experts=EXPERTS,
    top_k=4,
    block_size=3,
    vocab=VOCAB,
    vision_layers=3,
    vision_hidden=64,
    vision_qkv=96,
    vision_intermediate=256,
)
CONTROL_OFFSETS = {
    "[BOS]": 0,
    "[EOS]": 1,
    "<|end_of_msg|>": 2,
    "<|open|>": 3,
    "<|close|>": 4,
    "<|sep|>": 5,
    "[start_header_id]": 6,
    "[end_header_id]": 7,
    "<|reserved_token_1000|>": 8,
    "[EOT]": 9,
    "<|media_begin|>": 18,
    "<|media_content|>": 19,
    "<|media_end|>": 20,
    "<|media_pad|>": 21,
    "[UNK]": 30,
    "[PAD]": 31,
}
PYTHON_PROMPTS = (
    "class Error(Exception):\n",
    "def main():\n",
    "if __name__ == '__main__':\n",
    "def test(value):\n    if value is None:\n",
)
STATEMENT = re.compile(
    r"""
    (?:def|class|if|elif|else|for|while|try|except|finally|with)\b .* [:,(\\]$
  | (?:return|raise|import|from|pass|break|continue|assert|del|global|yield|@|\#) (?:\W|$) .*
  | [\w.\[\], '"]+ \s* [-+*/|&%]?= .*
  | [\w.]+\( .*
  | [rbfu]?["'] .*
  | [)\]}] .*
    """,
    re.VERBOSE,
)


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def tensors(folder: Path) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """name -> (dtype, shape, shard), from the shards' own headers."""
    return {
        tensor.name: (tensor.dtype, tuple(tensor.shape), path.name)
        for path in sorted(folder.glob("*.safetensors"))
        for tensor in read_header(path).tensors
    }


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights of the same sizes, from the test suite's own builder."""
    return write_source(tmp_path_factory.mktemp("same_sizes") / "source", SIZES)


class TestFiles:
    def test_all_of_it_is_at_most_8_mb(self) -> None:
        assert sum(p.stat().st_size for p in ARTIFACT.rglob("*") if p.is_file()) <= 8_000_000

    def test_tensors_are_those_of_a_source_of_its_sizes(self, source: Path) -> None:
        assert tensors(ARTIFACT) == tensors(source)

    def test_config_is_that_of_a_source_of_its_sizes(self, source: Path) -> None:
        config, wanted = read_json(ARTIFACT / "config.json"), read_json(source / "config.json")
        text = wanted["text_config"]
        differing = {k for k in text if config["text_config"].get(k) != text[k]}
        assert differing <= {"bos_token_id", "eos_token_id"}
        assert config["vision_config"] == wanted["vision_config"]

    def test_index_lists_every_tensor_and_its_bytes(self) -> None:
        index = read_json(ARTIFACT / "model.safetensors.index.json")
        item = {"BF16": 2, "F32": 4, "U8": 1}
        found = tensors(ARTIFACT)
        total = sum(item[dtype] * math.prod(shape) for dtype, shape, _ in found.values())
        assert index["metadata"] == {"total_size": total}
        assert index["weight_map"] == {name: shard for name, (_, _, shard) in found.items()}

    def test_padding_of_a_log_is_zero(self) -> None:
        shard = mx.load(str(ARTIFACT / "model-00001-of-000009.safetensors"))
        a_log = shard["language_model.model.layers.0.self_attn.A_log"]
        assert mx.all(a_log[:4] != 0)
        assert mx.all(a_log[4:] == 0)

    def test_card_shows_the_measured_perplexities(self) -> None:
        card = (ARTIFACT / "README.md").read_text(encoding="utf-8")
        for scores in read_json(ARTIFACT / "results.json")["held_out"].values():
            assert f"| {scores[f'windows_of_{WINDOW}']['perplexity']} |" in card
            assert f"| {scores['unigram']['perplexity']} |" in card


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    """Stock mlx-lm's model, in f32 where a CPU is fast, and its tokenizer."""
    model, tokenizer = mlx_lm.load(str(ARTIFACT))

    def widened(x: mx.array) -> mx.array:
        return x.astype(mx.float32) if x.dtype == mx.bfloat16 else x

    model.update(tree_map(widened, model.parameters()))
    return model, tokenizer


class TestTokenizer:
    def test_control_tokens_have_the_ids_of_k3(self, loaded: tuple[Any, Any]) -> None:
        found = {name: loaded[1].convert_tokens_to_ids(name) for name in CONTROL_OFFSETS}
        assert found == {name: BASE + offset for name, offset in CONTROL_OFFSETS.items()}

    def test_config_names_the_same_ids(self, loaded: tuple[Any, Any]) -> None:
        config, tokenizer = read_json(ARTIFACT / "config.json"), loaded[1]
        ids = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
        assert ids == (BASE, BASE + 1, BASE + 31)
        assert ids == tuple(config[f"{name}_token_id"] for name in ("bos", "eos", "pad"))

    @pytest.mark.parametrize("text", ["def f(x):\n\treturn x\n", "café ✓ 你好，世界\r\n", " a  b "])
    def test_round_trip(self, loaded: tuple[Any, Any], text: str) -> None:
        ids = loaded[1].encode(text, add_special_tokens=False)
        assert max(ids) < BASE
        assert loaded[1].decode(ids) == text

    @pytest.mark.parametrize("domain", DOMAINS)
    def test_held_out_text_round_trips(self, loaded: tuple[Any, Any], domain: str) -> None:
        text = held_out(domain)
        assert loaded[1].decode(loaded[1].encode(text, add_special_tokens=False)) == text


def held_out(domain: str) -> str:
    with (ARTIFACT / "held_out" / f"{domain}.txt").open(encoding="utf-8", newline="") as file:
        return file.read()


def windows(tokenizer: Any, domain: str) -> np.ndarray:
    """The first full windows of the held-out documents; a document begins with [BOS]."""
    rows: list[list[int]] = []
    for document in held_out(domain).split("\f\n"):
        ids = [BASE, *tokenizer.encode(document, add_special_tokens=False)]
        starts = range(0, len(ids) - WINDOW, WINDOW)
        rows += [ids[start : start + WINDOW + 1] for start in starts]
    return np.array(rows[:ROWS])


class Counter:
    """Stands before the experts of one layer and counts the tokens that each one gets."""

    def __init__(self, experts: Any) -> None:
        self.experts = experts
        self.counts = np.zeros(EXPERTS)

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        self.counts += np.bincount(np.array(indices).ravel(), minlength=EXPERTS)
        return self.experts(x, indices)


@pytest.fixture(scope="module")
def measured(loaded: tuple[Any, Any]) -> dict[str, tuple[float, np.ndarray]]:
    """domain -> (nats per token, tokens per layer and expert) on held-out windows."""
    model, tokenizer = loaded
    return {domain: measure(model, windows(tokenizer, domain)) for domain in DOMAINS}


def measure(model: Any, rows: np.ndarray) -> tuple[float, np.ndarray]:
    moes = [layer.mlp for layer in model.layers if hasattr(layer.mlp, "switch_mlp")]
    counters = [Counter(moe.switch_mlp) for moe in moes]
    for moe, counter in zip(moes, counters, strict=True):
        moe.switch_mlp = counter
    try:
        logits = model(mx.array(rows[:, :-1])).astype(mx.float32)
        scores = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        chosen = mx.take_along_axis(scores, mx.array(rows[:, 1:, None]), axis=-1)
        nats = -float(chosen.mean())
    finally:
        for moe, counter in zip(moes, counters, strict=True):
            moe.switch_mlp = counter.experts
    return nats, np.stack([counter.counts for counter in counters])


def entropy(ids: np.ndarray) -> float:
    """Nats per token of the best unigram model there can be for exactly this text."""
    shares = np.bincount(ids.ravel(), minlength=VOCAB) / ids.size
    return -float(sum(p * math.log(p) for p in shares if p > 0))


def top_experts(counts: np.ndarray) -> list[set[int]]:
    return [set(np.argsort(-layer)[:TOP].tolist()) for layer in counts]


class TestWhatItLearnt:
    @pytest.mark.parametrize("domain", DOMAINS)
    def test_perplexity_is_well_under_any_unigram(
        self, loaded: tuple[Any, Any], measured: dict[str, Any], domain: str
    ) -> None:
        unigram = entropy(windows(loaded[1], domain)[:, 1:])
        assert measured[domain][0] < unigram - 1.5  # a fifth of the unigram's perplexity

    def test_code_and_chinese_use_other_experts(self, measured: dict[str, Any]) -> None:
        code, chinese = (top_experts(measured[domain][1]) for domain in ("code", "chinese"))
        overlap = np.mean([len(a & b) for a, b in zip(code, chinese, strict=True)])
        assert overlap < TOP**2 / EXPERTS

    def test_every_expert_works(self, measured: dict[str, Any]) -> None:
        total = sum(measured[domain][1] for domain in DOMAINS)
        assert np.mean(total > 0) > 0.95
        assert total.max() < 0.25 * total.sum(-1).max()

    def test_greedy_continuations_look_like_python(self, loaded: tuple[Any, Any]) -> None:
        lines = [line for prompt in PYTHON_PROMPTS for line in greedy_lines(*loaded, prompt)]
        assert len(set(lines)) >= 8
        assert python_share(lines) >= 0.6

    def test_only_code_looks_like_python(self) -> None:
        shares = {domain: python_share(held_out(domain).splitlines()) for domain in DOMAINS}
        assert shares["code"] >= 0.6
        assert max(shares["english"], shares["chinese"]) <= 0.1


def greedy_lines(model: Any, tokenizer: Any, prompt: str, n_tokens: int = 64) -> list[str]:
    """The continuation's lines, without the blank ones and without the last one, which is cut."""
    ids = mx.array([BASE, *tokenizer.encode(prompt, add_special_tokens=False)])
    tokens = [int(token) for token, _ in generate_step(ids, model, max_tokens=n_tokens)]
    return [line for line in tokenizer.decode(tokens).splitlines()[:-1] if line.strip()]


def python_share(lines: list[str]) -> float:
    """The share of lines that are, by their look, one Python statement or a piece of one."""
    filled = [line.strip() for line in lines if line.strip()]
    return sum(bool(STATEMENT.fullmatch(line)) for line in filled) / len(filled)
