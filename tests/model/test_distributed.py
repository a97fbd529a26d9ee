"""Two processes give what one gives, and every split of the layers tiles the model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

import kimi_k3
from tests.model.golden import TOLERANCE, build, error, float32_model, read_golden, widen

ROOT = Path(__file__).parents[2]


# text_calm splits at a residual block, text_eps inside one, and variant_nonk3 has none.
# "/banks": half of every layer's experts lie in the low bank; "/quantized": the trunk has 6 bits.
NAMES = ["text_calm", "text_eps", "variant_nonk3", "mm_a/banks", "mm_a/quantized"]


def n_layers(name: str) -> int:
    return read_golden(name.partition("/")[0]).n_layers


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, str], dict]:
    """Rank 0's findings by split and configuration, from one launch."""
    command = [
        *(str(Path(sys.executable).parent / "mlx.launch"), "-n", "2", "--backend", "ring", "--"),
        *(sys.executable, "-m", "tests.model.ranks", *NAMES),
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 2 * len(NAMES), done.stdout[-3000:] + done.stderr[-3000:]
    return {(line["split"], line["name"]): line for line in lines}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_pipeline_is_bit_identical(found, name):
    run = found["pipeline", name]
    assert run["ranks"] == 2
    assert run["layers"] == -(-n_layers(name) // 2), "rank 0 has the later, larger half"
    assert run["difference"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_tensor_parallel(found, name):
    run = found["tensor", name]
    assert run["ranks"] == 2
    assert run["layers"] == n_layers(name)
    assert run["difference" if "quantized" in name else "error"] < TOLERANCE


class Rank:
    """A group of which only rank and size are asked."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = lambda: rank, lambda: size


@pytest.mark.parametrize("size", range(1, 9))
def test_pipeline_ranges_tile_93_layers(size):
    config = dict(read_golden("mm_a").config["text_config"])
    kda = [n for n in range(1, 94) if n % 4 and n != 93]
    config |= {"num_hidden_layers": 93, "num_experts": 4}
    config["linear_attn_config"] = config["linear_attn_config"] | {"kda_layers": kda}
    whole = kimi_k3.TextModel(kimi_k3.TextArgs.from_dict(config))
    layers, seen = whole.layers, []
    for rank in reversed(range(size)):
        whole.layers = list(layers)
        whole.pipeline(Rank(rank, size))
        seen += whole.pipeline_layers
        assert whole.layers[: whole.start_idx] == [None] * whole.start_idx
    assert len(seen) == 93
    assert all(a is b for a, b in zip(seen, layers, strict=True))


@pytest.mark.parametrize("cut", range(1, n_layers("text_eps")))
def test_the_open_blocks_and_the_prefix_travel(cut, monkeypatch):
    """In one process, for every place of the border: what one rank sends, the other gets."""
    golden, whole = read_golden("text_eps"), float32_model("text_eps")
    weights = {k: widen(v) for k, v in golden.weights.items()}
    first, last = (build(golden.config, weights) for _ in range(2))
    ids = golden.vectors["input_ids"]
    size = whole.args.text_config.attn_res_block_size
    first.model.pipeline(Rank(1, 2), split=[len(whole.layers) - cut, cut])
    last.model.pipeline(Rank(0, 2), split=[len(whole.layers) - cut, cut])
    sent = []
    monkeypatch.setattr(mx.distributed, "send", lambda x, rank: sent.append(x) or x)
    monkeypatch.setattr(mx.distributed, "recv", lambda shape, *_: sent[-1].reshape(shape))
    monkeypatch.setattr(mx.distributed, "all_gather", lambda x: x)
    first(ids, first.make_cache())
    assert len(sent[0]) == -(-cut // size) + 1
    assert error(last(ids), whole(ids)) == 0


def test_one_rank_shards_nothing():
    model = float32_model("mm_a")
    before = model.layers[0].self_attn.qkv_proj
    model.shard(Rank(0, 1))
    assert model.layers[0].self_attn.qkv_proj is before
