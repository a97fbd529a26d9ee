"""What the tower takes is in the budget of the stream, and little more."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from kimi_k3_mlx.errors import DoesNotFitError
from kimi_k3_mlx.reap.calibrate import calibrate
from kimi_k3_mlx.reap.sight import Sight, embedder_of
from kimi_k3_mlx.stream.budget import make_batches
from kimi_k3_mlx.stream.layers import open_layers
from kimi_k3_mlx.tensors.local import open_source
from tests.reap.pictured import load, paint, write
from tests.tiny_k3 import TinyConfig, write_source

TOWERS = {
    "hidden": {"vision_hidden": 256, "vision_qkv": 48},
    "qkv": {"vision_qkv": 768, "vision_heads": 6},
    "heads": {"vision_heads": 12},
    "inner": {"vision_intermediate": 1024},
}


@pytest.mark.parametrize("shape", TOWERS)
def test_the_budget_holds_the_tower(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever of it is wide; two pictures of 225 tokens take no more than one."""
    config = TinyConfig(layers=2, experts=2, mla_layers=(1,), **TOWERS[shape])
    source = open_source(write_source(tmp_path / "source", config))
    names = [paint(tmp_path / f"{n}.png", 420, 420, n).name for n in range(2)]
    spec = write(tmp_path / "a.jsonl", [{"image": name, "text": "x"} for name in names])
    corpus = load(spec, source)
    layers, embedder = open_layers(source), embedder_of(source, corpus)
    group = tuple(make_batches([it.tokens for it in corpus.sequences], 256))
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for embedded in embedder(layers, group):
        mx.eval(embedded)
    found, ends = mx.get_peak_memory() - before, layers.n_bytes_ends
    assert 0.4 * embedder.n_bytes < found <= ends + embedder.n_bytes

    def least() -> int:
        with pytest.raises(DoesNotFitError) as caught:
            calibrate(source, corpus, memory=1)
        return int(caught.value.hint.split()[2].replace(",", ""))

    needed = least()
    assert needed > ends + embedder.n_bytes
    monkeypatch.setattr(Sight, "_needed", lambda *_: 0)
    assert least() < needed
