"""Put the vision of any checkpoint of train_tiny_vision.py into the tiny K3 artifact.

Input: a run folder and the artifact with the text model that it was trained for. Output: two
shards more, projector and tower, as K3 has them; index, config, rules for pictures, an example,
results.json and card. Shards of the text model get other names, not other bytes. What is measured
is what was written, read back.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_card import model_card
from tiny_pictures import COLOURS, LARGEST, PROMPT, SHAPES, SMALLEST, UNSEEN, draw
from tiny_vision import RULES, TinyVision, vision_config
from tiny_vision_measure import score_pictures
from torch import Tensor
from train_tiny_vision import CHECKPOINT, open_reader

VISION = ("mm_projector.", "vision_tower.")
"""One shard each, in this order, after the text model's."""
INDEX = "model.safetensors.index.json"
EXAMPLE = ("red", "circle")


def read_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def write_json(path: Path, value: object, indent: int = 2) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8")


def write_vision(vision: TinyVision, folder: Path) -> None:
    """Shards, index and config; a vision that was there before is replaced."""
    weight_map = read_json(folder / INDEX)["weight_map"]
    text = sorted({file for name, file in weight_map.items() if not name.startswith(VISION)})
    for file in set(weight_map.values()) - set(text):
        (folder / file).unlink()
    count = len(text) + len(VISION)
    names = [f"model-{number:05d}-of-{count:06d}.safetensors" for number in range(1, count + 1)]
    for old, new in zip(text, names[: len(text)], strict=True):
        (folder / old).rename(folder / new)
    stored = {name: tensor.bfloat16() for name, tensor in vision.state_dict().items()}
    for prefix, file in zip(VISION, names[len(text) :], strict=True):
        shard = {name: tensor for name, tensor in stored.items() if name.startswith(prefix)}
        save_file(shard, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)
    write_index(folder, names)
    config = read_json(folder / "config.json")
    config["vision_config"] = vision_config(config["text_config"]["hidden_size"])
    write_json(folder / "config.json", config)
    write_json(folder / "preprocessor_config.json", {"media_proc_cfg": RULES})


def write_index(folder: Path, names: list[str]) -> None:
    weight_map, total = {}, 0
    for file in names:
        with safe_open(folder / file, "pt") as shard:
            weight_map |= dict.fromkeys(shard.keys(), file)
        total += data_bytes(folder / file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / INDEX, index)


def data_bytes(path: Path) -> int:
    """Bytes of the tensors in a shard: all but the header and its length."""
    with path.open("rb") as file:
        return path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")


def load_vision(folder: Path) -> TinyVision:
    """What the files hold, in float32."""
    config = read_json(folder / "config.json")["vision_config"]
    stored: dict[str, Tensor] = {}
    for file in sorted(set(read_json(folder / INDEX)["weight_map"].values())):
        stored |= load_file(folder / file)
    vision = TinyVision(config)
    vision.load_state_dict({k: t.float() for k, t in stored.items() if k.startswith(VISION)})
    return vision.eval()


def vision_results(folder: Path, run: dict) -> dict:
    vision = load_vision(folder)
    return {
        "parameters": sum(p.numel() for p in vision.parameters()),
        "prompt": PROMPT,
        "pixels": [SMALLEST, LARGEST],
        "colours": len(COLOURS),
        "shapes": len(SHAPES),
        "unseen_pairs": [" ".join(pair) for pair in UNSEEN],
        "chance": {"colour": round(1 / len(COLOURS), 3), "shape": round(1 / len(SHAPES), 3)},
        "scores": score_pictures(vision, open_reader(folder)),
        "training": {**run, "torch": torch.__version__},
    }


def write_example(folder: Path) -> None:
    """A picture for the demo, with a seed that training did not draw."""
    (folder / "pictures").mkdir(exist_ok=True)
    drawn = draw(0, pairs=(EXAMPLE,), size=(96, 96))
    drawn.image.save(folder / "pictures" / "{}-{}.png".format(*EXAMPLE), optimize=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="folder of train_tiny_vision.py")
    parser.add_argument("--artifact", type=Path, required=True, help="folder to add to")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)
    state = torch.load(args.run / CHECKPOINT, weights_only=True)
    text_config = read_json(args.artifact / "config.json")["text_config"]
    vision = TinyVision(vision_config(text_config["hidden_size"]))
    vision.load_state_dict(state["vision"])
    write_vision(vision, args.artifact)
    write_example(args.artifact)
    results = read_json(args.artifact / "results.json")
    results["vision"] = vision_results(args.artifact, state["run"])
    write_json(args.artifact / "results.json", results, indent=1)
    (args.artifact / "README.md").write_text(model_card(results), encoding="utf-8")
    print(json.dumps(results["vision"]["scores"], indent=1))


if __name__ == "__main__":
    main()
