"""Layers from a source and from builds are those of the model that is loaded whole."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Event

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from kimi_k3_mlx.errors import CheckpointError
from kimi_k3_mlx.runtime.load import load_weights
from kimi_k3_mlx.stream.layers import open_layers
from kimi_k3_mlx.tensors.hub import open_repository
from kimi_k3_mlx.tensors.local import LocalReader, open_source
from tests.fake_hub import FakeHub, use_hub
from tests.stream.conftest import convert


def same(found, expected) -> None:
    found, expected = (dict(tree_flatten(module.parameters())) for module in (found, expected))
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        assert mx.array_equal(found[name].view(mx.uint8), array.view(mx.uint8)), name


@pytest.mark.parametrize("profile", ["source", "mxfp4", "mxfp4-q8", "mxfp4-mxfp8", "q3-q8"])
def test_every_layer_and_both_ends_are_the_models(
    profile: str, tiny_text_source: Path, build: Path, tmp_path: Path
) -> None:
    path = build
    if profile not in ("source", "mxfp4"):
        path = convert(tiny_text_source, tmp_path / "out", profile)
    model, _ = load_weights(path, lazy=False)
    layers = open_layers(open_source(tiny_text_source if profile == "source" else path))
    for number, layer in layers.stream(range(layers.n_layers)):
        same(layer, model.layers[number])
        assert sum(a.nbytes for _, a in tree_flatten(layer.parameters())) <= layers.n_bytes(number)
    same(layers.layer(3), model.layers[3])
    ids = mx.array([[1, 2, 511]])
    assert mx.array_equal(layers.embed(ids), model.model.embed_tokens(ids))


def test_a_layer_number_can_come_again_and_a_stream_can_be_left(build: Path) -> None:
    layers = open_layers(open_source(build))
    assert [number for number, _ in layers.stream([2, 0, 0])] == [2, 0, 0]
    assert next(layers.stream([4, 1]))[0] == 4
    assert list(layers.stream([])) == []


def test_a_missing_tensor_is_named(tiny_text_source: Path, build: Path, tmp_path: Path) -> None:
    for path, name in (
        (
            tiny_text_source,
            "language_model.model.layers.2.block_sparse_moe.experts.5.w2.weight_scale",
        ),
        (build, "language_model.model.layers.0.mlp.up_proj.weight"),
    ):
        source = open_source(path)
        tensors = {key: info for key, info in source.tensors.items() if key != name}
        object.__setattr__(source, "tensors", tensors)
        with pytest.raises(CheckpointError, match=name):
            open_layers(source).layer(0)


def test_other_models_are_refused(tiny_text_source: Path) -> None:
    source = open_source(tiny_text_source)
    config = json.loads(json.dumps(source.config))
    config["text_config"]["hidden_act"] = "silu"
    object.__setattr__(source, "config", config)
    with pytest.raises(CheckpointError, match="hidden_act"):
        open_layers(source)


def test_a_read_error_in_the_thread_surfaces(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(build)
    layers = open_layers(source)
    stream = layers.stream(range(5))
    next(stream)
    monkeypatch.setattr("kimi_k3_mlx.tensors.local.fill", lambda *_: 0)
    with pytest.raises(CheckpointError, match="became shorter"):
        list(stream)


def test_memory_is_filled_in_place(build: Path) -> None:
    """What the reader writes through NumPy is what MLX computes with."""
    layer = open_layers(open_source(build)).layer(1)
    assert np.array(layer.mlp.switch_mlp.up_proj.weight).any()


def test_a_stream_that_is_left_stops_reading(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C doesn't wait for gigabytes."""
    layers = open_layers(open_source(build))
    go_on, filled = Event(), []

    class Slow(LocalReader):
        def blocks(self, spans):
            for block in super().blocks(spans):
                if len(filled) > len(layers.tensors[0]) + 1:
                    go_on.wait(0.5)
                filled.append(len(block))
                yield block

    monkeypatch.setattr("kimi_k3_mlx.tensors.local.LocalReader", Slow)
    stream = layers.stream(range(5))
    next(stream)
    stream.close()
    assert layers.n_bytes(0) <= sum(filled) < layers.n_bytes(0) + layers.n_bytes(1)


@pytest.mark.hub
def test_layers_from_the_hub(tiny_text_source: Path, tmp_path: Path) -> None:
    with FakeHub() as hub, use_hub(hub, tmp_path / "home"):
        hub.add("moonshotai/Tiny-K3", tiny_text_source)
        remote = open_layers(open_repository("moonshotai/Tiny-K3"))
        local = open_layers(open_source(tiny_text_source))
        for number, layer in remote.stream(range(5)):
            same(layer, local.layer(number))
        ids = mx.array([[3, 4]])
        assert mx.array_equal(remote.embed(ids), local.embed(ids))
