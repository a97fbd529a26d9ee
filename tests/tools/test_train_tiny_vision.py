"""The tiny K3's vision trainer: its tower and prompts against the product's, phases, files."""

# ruff: noqa: E402 (the programs import torch, so the skip must come first)

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the trainer is a developers' extra")
pytest.importorskip("tokenizers")

import export_tiny_vision
import tiny_vision
import tiny_vision_measure
from tiny_pictures import PROMPT, SEEN, UNSEEN, draw
from tiny_vision import MEDIA_BEGIN, MEDIA_CONTENT, MEDIA_END, Reader, TinyVision
from train_tiny_vision import Trainer, open_reader

import kimi_k3_mlx
import kimi_k3_vision
from kimi_k3_vl.processing import ImageRules

ARTIFACT = Path(kimi_k3_mlx.__file__).parent / "assets" / "tiny-k3"
CONFIG = tiny_vision.vision_config(128)
SIZES = [(85, 112), (112, 90), (30, 57)]


@pytest.fixture(autouse=True)
def _one_thread_one_seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def reader() -> Reader:
    return open_reader(ARTIFACT)


@pytest.mark.parametrize("size", SIZES)
def test_patches_are_those_of_the_product(size: tuple[int, int]) -> None:
    images = [draw(seed, size=size).image for seed in range(2)]
    found = tiny_vision.patches(images).flatten(1, 2).numpy()
    rules = ImageRules.from_config({"media_proc_cfg": tiny_vision.RULES})
    assert rules == ImageRules()
    for ours, image in zip(found, images, strict=True):
        np.testing.assert_allclose(ours, rules.patches(image), atol=1e-6)


@pytest.mark.parametrize("size", SIZES)
def test_the_tower_is_that_of_the_product(size: tuple[int, int]) -> None:
    vision = TinyVision(CONFIG)
    cells = tiny_vision.patches([draw(seed, size=size).image for seed in range(2)])
    with torch.no_grad():
        found = vision(cells)
    other = kimi_k3_vision.Vision(kimi_k3_vision.VisionArgs.from_dict(CONFIG))
    other.load_weights([(name, mx.array(w.numpy())) for name, w in vision.state_dict().items()])
    grid = (1, *cells.shape[1:3])
    wanted = other.see(mx.array(cells.flatten(0, 2).numpy()), [grid] * 2)
    for ours, rows in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours.numpy(), np.array(rows), atol=2e-5)


def test_the_text_model_reads_markup_rows_prompt_and_answer(reader: Reader) -> None:
    """With embeddings of text as rows, it is the text model on these ids."""
    inside, answer = reader.encode("def __init__"), reader.encode(" red circle.")
    features = reader.text.embed(torch.tensor([inside]))
    found = reader.logits(features, (90, 100), torch.tensor([answer]))
    before = [MEDIA_BEGIN, *reader.encode("image 90x100"), MEDIA_CONTENT]
    ids = [*before, *inside, MEDIA_END, *reader.encode(PROMPT), *answer]
    padded = torch.tensor([ids + [0] * (-len(ids) % 16)])
    wanted = reader.text(padded)[:, len(ids) - len(answer) - 1 : len(ids)]
    assert torch.allclose(found, wanted, atol=1e-4)


def test_greedy_text_is_the_most_likely_token_each_time(reader: Reader) -> None:
    features = reader.text.embed(torch.tensor([reader.encode("def __init__")]))
    text = reader.greedy(features, (90, 100), 4)[0]
    ids = torch.tensor([reader.encode(text)])
    best = reader.logits(features, (90, 100), ids)[0, :-1].argmax(-1)
    assert best.tolist() == ids[0].tolist()


def test_each_phase_trains_its_own_part_and_never_the_text_model(
    reader: Reader, tmp_path: Path
) -> None:
    steps = {"row_steps": 1, "copy_steps": 1, "both_steps": 1, "read_steps": 2}
    args = argparse.Namespace(batch=2, **steps)
    trainer = Trainer(reader, args)

    def snapshot() -> dict[str, torch.Tensor]:
        parts = {"rows": trainer.rows, "vision": trainer.vision, "text": reader.text}
        return {
            name: torch.cat([p.detach().flatten() for p in part.parameters()]).clone()
            for name, part in parts.items()
        }

    changed, losses = [], []
    for _ in range(4):
        before = snapshot()
        losses.append(len(trainer.train_step()))
        after = snapshot()
        changed.append([name for name in before if not torch.equal(before[name], after[name])])
    assert changed == [["rows"], ["vision"], ["vision"], ["vision"]]
    assert losses == [1, 2, 3, 2]
    trainer.save(tmp_path, "the command")
    resumed = Trainer(reader, args)
    resumed.restore(tmp_path)
    assert resumed.train_step() == trainer.train_step()


def test_shares_of_right_words() -> None:
    drawn = [draw(seed, pairs=(("red", "ring"),)) for seed in range(4)]
    texts = [" red ring.", " red star.", " blue ring.", ""]
    assert tiny_vision_measure.shares(drawn, texts) == {
        "pictures": 4,
        "colour": 0.5,
        "shape": 0.5,
        "both": 0.25,
    }


def test_a_seed_is_a_picture_and_training_leaves_pairs_out() -> None:
    one, again, other = draw(7), draw(7), draw(8)
    assert one.image.tobytes() == again.image.tobytes() != other.image.tobytes()
    assert not set(SEEN) & set(UNSEEN)
    assert {c for c, _ in SEEN} >= {c for c, _ in UNSEEN}
    assert {s for _, s in SEEN} >= {s for _, s in UNSEEN}


def test_shards_of_the_text_model_keep_their_bytes(tmp_path: Path) -> None:
    shutil.copytree(ARTIFACT, tmp_path, dirs_exist_ok=True)
    before = [path.read_bytes() for path in sorted(tmp_path.glob("*.safetensors"))[:7]]
    vision = TinyVision(CONFIG)
    for _ in range(2):
        export_tiny_vision.write_vision(vision, tmp_path)
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert [path.read_bytes() for path in shards[:7]] == before
    assert shards[-1].name == "model-00009-of-000009.safetensors"
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"]["mm_projector.proj.0.weight"] == shards[7].name
    assert set(index["weight_map"].values()) == {path.name for path in shards}
    read = export_tiny_vision.load_vision(tmp_path)
    for ours, stored in zip(vision.parameters(), read.parameters(), strict=True):
        assert torch.equal(ours.bfloat16().float(), stored)
