"""Loading: only finished builds, only the index's shards, only our own code."""

from __future__ import annotations

import json
import shutil
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_k3_mlx.errors import CheckpointError, DoesNotFitError, UsageError
from kimi_k3_mlx.runtime.build import FINISH, MAKE_AGAIN, check_build
from kimi_k3_mlx.runtime.load import (
    installed_classes,
    load,
    load_weights,
    parameters,
    pieces,
    read_weights,
)
from tests.runtime.fake_mac import FakeMac
from tests.tiny_k3 import write_json


@pytest.fixture
def copy(tiny_source: Path, tmp_path: Path) -> Path:
    """A checkpoint to damage; our model reads source names as well."""
    return shutil.copytree(tiny_source, tmp_path / "copy")


def edit(path: Path, **fields: object) -> None:
    write_json(path, json.loads(path.read_text()) | fields)


def edit_text(folder: Path, **fields: object) -> None:
    text = json.loads((folder / "config.json").read_text())["text_config"]
    edit(folder / "config.json", text_config=text | fields)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def leave_out(folder: Path) -> None:
    """Take the last norm out of shard and index."""
    import mlx.core as mx

    name = "language_model.model.norm.weight"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shard = folder / index["weight_map"].pop(name)
    tensors = dict(mx.load(str(shard)))
    del tensors[name], index["metadata"]
    mx.save_safetensors(str(shard), tensors)
    write_json(folder / "model.safetensors.index.json", index)


def test_loads_with_the_installed_model(tiny_source: Path) -> None:
    import kimi_k3

    loaded = load(tiny_source, lazy=True)
    assert type(loaded.model) is kimi_k3.Model
    assert loaded.tokenizer.eos_token_ids == {loaded.config["eos_token_id"]}


def test_code_in_the_folder_is_never_executed(copy: Path) -> None:
    edit(copy / "config.json", model_file="evil.py")
    (copy / "evil.py").write_text("raise RuntimeError('executed')")
    load(copy, lazy=True)


DAMAGE = {
    "nothing there": (lambda p: shutil.rmtree(p), UsageError, "is not a folder"),
    "unfinished": (
        lambda p: (p / "config.json").unlink(),
        CheckpointError,
        "config.json is missing in ",
    ),
    "another model": (
        lambda p: edit(p / "config.json", model_type="llama"),
        CheckpointError,
        "has model_type 'llama', expected 'kimi_k3'",
    ),
    "no index": (
        lambda p: (p / "model.safetensors.index.json").unlink(),
        CheckpointError,
        "model.safetensors.index.json is missing in ",
    ),
    "index cut off": (
        lambda p: (p / "model.safetensors.index.json").write_text('{"weight_map"'),
        CheckpointError,
        "is not JSON",
    ),
    "index is a list": (
        lambda p: (p / "model.safetensors.index.json").write_text("[]"),
        CheckpointError,
        "is not a JSON object",
    ),
    "empty index": (
        lambda p: write_json(p / "model.safetensors.index.json", {}),
        CheckpointError,
        "has no weight_map",
    ),
    "one shard missing": (
        lambda p: (p / "model-00002-of-000008.safetensors").unlink(),
        CheckpointError,
        "shard model-00002-of-000008.safetensors is named by .* but missing in ",
    ),
    "two shards missing": (
        lambda p: [(p / f"model-0000{i}-of-000008.safetensors").unlink() for i in (3, 2)],
        CheckpointError,
        "shard model-00002-of-000008.safetensors and 1 more is named by .* but missing",
    ),
    "a shard cut off": (
        lambda p: truncate(p / "model-00002-of-000008.safetensors"),
        CheckpointError,
        r"model-00002-of-000008.safetensors is truncated: [\d,]+ bytes expected",
    ),
    "no text_config": (
        lambda p: edit(p / "config.json", text_config=None),
        CheckpointError,
        r"config\.json: text_config is missing",
    ),
    "another activation": (
        lambda p: edit_text(p, hidden_act="silu"),
        CheckpointError,
        r"config\.json: text_config.hidden_act is 'silu'; only 'situ' is supported\.$",
    ),
    "more experts than there are": (
        lambda p: edit_text(p, num_experts=16),
        CheckpointError,
        r"the weights in .* don't fit its config\.json: Expected shape \(16, .*gate\.weight\.$",
    ),
    "tensors left out": (
        leave_out,
        CheckpointError,
        r"don't fit its config\.json: Missing 1 parameters: language_model\.model\.norm\.weight\.$",
    ),
    "tokenizer cut off": (
        lambda p: (p / "tokenizer.json").write_text("{"),
        CheckpointError,
        r"tokenizer\.json is not JSON: ",
    ),
    "tokenizer of nothing": (
        lambda p: (p / "tokenizer.json").write_text("{}"),
        CheckpointError,
        r"tokenizer\.json or tokenizer_config\.json is no tokenizer: 'added_tokens'",
    ),
    "tokenizer_config cut off": (
        lambda p: (p / "tokenizer_config.json").write_text("{"),
        CheckpointError,
        r"tokenizer_config\.json is not JSON: ",
    ),
    "generation_config is a list": (
        lambda p: (p / "generation_config.json").write_text("[]"),
        CheckpointError,
        r"generation_config\.json is not a JSON object",
    ),
    "a stale shard": (
        lambda p: shutil.copy(p / "model-00001-of-000008.safetensors", p / "model.safetensors"),
        CheckpointError,
        "holds model.safetensors that the index does not name",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_one_sentence(case: str, copy: Path) -> None:
    damage, kind, fact = DAMAGE[case]
    damage(copy)
    with pytest.raises(kind, match=fact):
        load(copy)


@pytest.mark.parametrize(
    ("case", "hint"),
    [
        ("unfinished", FINISH),
        ("index cut off", MAKE_AGAIN),
        ("a shard cut off", MAKE_AGAIN),
        ("another activation", MAKE_AGAIN),
        ("more experts than there are", MAKE_AGAIN),
        ("tokenizer cut off", MAKE_AGAIN),
        ("tokenizer of nothing", MAKE_AGAIN),
    ],
)
def test_a_build_is_made_again_not_downloaded(case: str, hint: str, copy: Path) -> None:
    edit(copy / "config.json", quantization={"group_size": 32, "bits": 4, "mode": "mxfp4"})
    damage, kind, _ = DAMAGE[case]
    damage(copy)
    with pytest.raises(kind) as caught:
        load(copy)
    assert caught.value.hint == hint


def test_a_config_that_is_not_json_may_be_a_build(copy: Path) -> None:
    (copy / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is not JSON") as caught:
        check_build(copy)
    assert caught.value.hint == MAKE_AGAIN


def test_a_source_is_downloaded_again(copy: Path) -> None:
    truncate(copy / "model-00002-of-000008.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load(copy)
    assert caught.value.hint == "re-download it: kimi-k3 download --include model-00002*"


def test_no_tokenizer_is_found_before_the_weights_are_read(copy: Path) -> None:
    (copy / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        load(copy)


PIECES = [1, 1 << 14, 1 << 40]


def stock(path: Path) -> dict[str, Any]:
    """Parameters as mlx-lm loads them, all in one evaluation."""
    from mlx_lm.utils import load_model

    model, _ = load_model(path, get_model_classes=installed_classes)
    return dict(parameters(model))


@pytest.mark.parametrize("piece_bytes", PIECES)
def test_pieces_are_what_mlx_lm_loads_at_once(piece_bytes: int, tiny_source: Path) -> None:
    import mlx.core as mx

    model, _ = load_weights(tiny_source, lazy=True)
    read_weights(tiny_source, model, piece_bytes=piece_bytes)
    want, got = stock(tiny_source), dict(parameters(model))
    assert list(got) == list(want)
    for name, array in got.items():
        assert array.dtype == want[name].dtype
        assert mx.array_equal(array, want[name], equal_nan=True).item(), name


@pytest.mark.parametrize("piece_bytes", PIECES)
def test_no_evaluation_is_of_more_than_a_piece(
    piece_bytes: int, tiny_source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlx.core as mx

    model, _ = load_weights(tiny_source, lazy=True)
    calls: list[list[int]] = []
    monkeypatch.setattr(mx, "eval", lambda arrays: calls.append([x.nbytes for x in arrays]))
    read_weights(tiny_source, model, piece_bytes=piece_bytes)
    assert all(sum(call) <= piece_bytes or len(call) == 1 for call in calls)
    assert sum(map(sum, calls)) == sum(array.nbytes for _, array in parameters(model))


@given(st.lists(st.integers(0, 100)), st.integers(1, 200))
def test_pieces_keep_order_and_are_as_few_as_their_order_allows(
    sizes: list[int], n_bytes: int
) -> None:
    arrays = [SimpleNamespace(nbytes=size) for size in sizes]
    cut = list(pieces([(f"w{i}", array) for i, array in enumerate(arrays)], n_bytes))
    assert [array for _, piece in cut for array in piece] == arrays
    for (_, piece), (_, following) in pairwise(cut):
        assert sum(x.nbytes for x in [*piece, following[0]]) > n_bytes
    ends = accumulate(len(piece) for _, piece in cut)
    assert [name for name, _ in cut] == [f"w{end - 1}" for end in ends]


def test_progress_counts_every_byte(tiny_source: Path) -> None:
    model, _ = load_weights(tiny_source, lazy=True)
    calls: list[tuple[int, int, str]] = []
    read_weights(tiny_source, model, lambda *call: calls.append(call), piece_bytes=1 << 14)
    total = sum(array.nbytes for _, array in parameters(model))
    assert [done for done, _, _ in calls] == sorted(done for done, _, _ in calls)
    assert calls[0][0] == 0
    assert calls[-1] == (total, total, "weights")
    assert {what for _, _, what in calls} == {"weights", *(f"layer {n}/5" for n in range(1, 6))}


def test_a_weight_is_in_memory_once(tiny_source: Path) -> None:
    import mlx.core as mx

    model, _ = load_weights(tiny_source, lazy=True)
    sizes = [array.nbytes for _, array in parameters(model)]
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    read_weights(tiny_source, model, piece_bytes=1)
    assert mx.get_peak_memory() - before <= sum(sizes) + 2 * max(sizes) < 1.5 * sum(sizes)


def test_lazy_reads_nothing(tiny_source: Path) -> None:
    import mlx.core as mx

    before = mx.get_active_memory()
    mx.reset_peak_memory()
    load(tiny_source, lazy=True, progress=never)
    assert mx.get_peak_memory() - before < 10_000


def never(done: int, total: int, what: str) -> None:
    raise AssertionError("a weight was read")


def test_a_bad_tokenizer_is_found_before_the_weights_are_read(copy: Path) -> None:
    (copy / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is no tokenizer"):
        load(copy, progress=never)


def test_a_shard_that_fails_while_it_is_read_is_one_sentence(copy: Path) -> None:
    model, _ = load_weights(copy, lazy=True)
    truncate(copy / "model-00003-of-000008.safetensors")
    with pytest.raises(CheckpointError, match=r"the weights up to .* can't be read: \[read\]"):
        read_weights(copy, model)


def test_a_mac_that_is_too_small_is_refused_before_the_weights_are_read(tiny_source: Path) -> None:
    fact = (
        r"source takes 322 GB with 1,000,000,000 tokens, but of 64 GB at most 51\.5 GB can be wired"
    )
    with pytest.raises(DoesNotFitError, match=fact):
        load(tiny_source, progress=never, context=10**9, probes=FakeMac(ram_gib=64))
    load(tiny_source, lazy=True, context=10**9, probes=FakeMac(ram_gib=64), force=True)
    load(tiny_source, lazy=True, context=10**8, probes=FakeMac(ram_gib=64))


def test_other_systems_are_not_judged(tiny_source: Path) -> None:
    load(tiny_source, lazy=True, context=10**15)
