"""The tiny source checkpoints: exact layout, deterministic bytes, and stock mlx-lm runs them."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path

import numpy as np
import pytest

from tests.tiny_k3 import REAL_EXPERT_COUNT, TinyConfig, to_bf16, write_source
from tests.tiny_tokenizer import control_ids


def header(path: Path) -> dict[str, dict]:
    with path.open("rb") as file:
        (n,) = struct.unpack("<Q", file.read(8))
        return json.loads(file.read(n))


def headers(source: Path) -> dict[str, dict[str, dict]]:
    return {p.name: header(p) for p in sorted(source.glob("model-*.safetensors"))}


def tensors(source: Path) -> dict[str, dict]:
    every = {k: v for shard in headers(source).values() for k, v in shard.items()}
    every.pop("__metadata__")
    return every


def test_one_shard_per_layer_then_globals_projector_vision(tiny_source: Path) -> None:
    kinds = []
    for number, (name, shard) in enumerate(headers(tiny_source).items(), 1):
        assert name == f"model-{number:05d}-of-000008.safetensors"
        stems = {re.sub(r"(layers\.\d+|tower|projector)\..*", r"\1", k) for k in shard}
        kinds.append(stems - {"__metadata__"})
    layers = [{f"language_model.model.layers.{i}"} for i in range(5)]
    assert kinds[:5] == layers
    assert "language_model.lm_head.weight" in kinds[5]
    assert kinds[6:] == [{"mm_projector"}, {"vision_tower"}]


def test_index_names_every_tensor_and_their_bytes(tiny_source: Path) -> None:
    index = json.loads((tiny_source / "model.safetensors.index.json").read_text())
    shards = headers(tiny_source)
    assert set(index["weight_map"]) == set(tensors(tiny_source))
    assert all(name in shards[file] for name, file in index["weight_map"].items())
    spans = [v["data_offsets"] for v in tensors(tiny_source).values()]
    assert index["metadata"] == {"total_size": sum(b - a for a, b in spans)}


def test_names_and_dtypes_are_those_of_the_published_index(tiny_source: Path) -> None:
    """Every K3 name pattern occurs and no other; F32 and U8 exactly where K3 has them."""
    counts: dict[tuple[str, str], int] = {}
    for name, info in tensors(tiny_source).items():
        key = re.sub(r"\.\d+\.(?!weight)", ".N.", name).replace("experts.N", "experts.E")
        counts[key, info["dtype"]] = counts.get((key, info["dtype"]), 0) + 1
    single = {"proj.0.weight", "proj.2.weight"}
    assert len(counts) == 5 + 6 + 8 + 3 + 6 + 20 + 1 + len(single) + 9
    f32 = {k.rsplit("N.", 1)[1] for k, dtype in counts if dtype == "F32"}
    conv = {f"self_attn.{c}_conv1d.weight" for c in "qkv"}
    kda = {f"self_attn.{name}" for name in ("A_log", "dt_bias", "o_norm.weight")}
    assert f32 == conv | kda | {"block_sparse_moe.gate.e_score_correction_bias"}
    u8 = {k.rsplit(".", 1)[1] for k, dtype in counts if dtype == "U8"}
    assert u8 == {"weight_packed", "weight_scale"}


def test_moe_layers_have_as_many_tensors_as_in_k3(tmp_path: Path) -> None:
    source = write_source(tmp_path, REAL_EXPERT_COUNT)
    sizes = [len(shard) - 1 for shard in headers(source).values()]
    assert sizes == [23, 5404, 5404, 5398, 5]


def test_a_log_is_padded_with_zeros_to_head_dim(tiny_source: Path) -> None:
    path = tiny_source / "model-00001-of-000008.safetensors"
    name = "language_model.model.layers.0.self_attn.A_log"
    raw = path.read_bytes()
    (n,) = struct.unpack("<Q", raw[:8])
    begin, end = header(path)[name]["data_offsets"]
    values = np.frombuffer(raw[8 + n + begin : 8 + n + end], np.float32)
    assert values.shape == (32,)
    assert (values[:2] > 0).all()
    assert not values[2:].any()


def test_same_config_same_bytes_other_seed_other_bytes(tmp_path: Path) -> None:
    first, second, third = (
        write_source(tmp_path / str(i), TinyConfig(layers=2, seed=seed))
        for i, seed in enumerate((0, 0, 1))
    )
    names = sorted(p.name for p in first.iterdir())
    assert names == sorted(p.name for p in second.iterdir())
    assert all((first / n).read_bytes() == (second / n).read_bytes() for n in names)
    shard = "model-00001-of-000005.safetensors"
    assert (first / shard).read_bytes() != (third / shard).read_bytes()


def test_more_layers_leave_the_first_ones_alone(tmp_path: Path) -> None:
    short = write_source(tmp_path / "2", TinyConfig(layers=2, mla_layers=(1,)))
    tall = write_source(tmp_path / "4", TinyConfig(layers=4, mla_layers=(1, 3)))
    one = (short / "model-00001-of-000005.safetensors").read_bytes()
    assert one == (tall / "model-00001-of-000007.safetensors").read_bytes()


def test_bf16_rounds_to_nearest_even() -> None:
    bits = np.array([0x3F800000, 0x3F808000, 0x3F818000, 0x3F808001, 0xBF807FFF], np.uint32)
    want = [0x3F80, 0x3F80, 0x3F82, 0x3F81, 0xBF80]
    assert to_bf16(bits.view(np.float32)).tolist() == want


@pytest.mark.parametrize("field", ["latent", "moe_intermediate"])
def test_widths_that_do_not_fill_groups_are_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} must be a multiple of 32"):
        TinyConfig(**{field: 48})


def test_control_tokens_end_the_vocabulary_as_in_k3() -> None:
    ids = control_ids(163840)
    assert (ids["[BOS]"], ids["<|end_of_msg|>"], ids["<|media_pad|>"]) == (163584, 163586, 163605)
    assert (ids["[UNK]"], ids["[PAD]"]) == (163838, 163839)
    assert len(ids) == 256


def test_stock_mlx_lm_loads_and_runs_it(tiny_source: Path) -> None:
    import mlx.core as mx
    from mlx_lm.utils import load_model

    model, _ = load_model(tiny_source)
    logits = model(mx.array([[104, 105, 32, 258, 511]])).astype(mx.float32)
    assert logits.shape == (1, 5, 512)
    assert mx.isfinite(logits).all().item()
    assert 0.1 < mx.std(logits).item() < 10


def test_the_tokenizer_gives_bytes_and_control_tokens_back(tiny_source: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tiny_source / "tokenizer.json"))
    text = "def f(x):\n    return 'é 世界'\n"
    ids = tokenizer.encode(text + "<|open|>").ids
    assert ids == [*text.encode(), control_ids(512)["<|open|>"]]
    assert tokenizer.decode(ids) == text
