"""Packs reference checkpoints and vectors into tests/golden/, small enough to commit.

One `NAME.safetensors.xz` for each configuration: the weights under their source names, the
vectors under `golden/`, config.json and meta.json in the metadata. Lossless for what is kept.
Left out: the embedding rows of tokens that no vector uses and seven rows in eight of the head, with
the logits that they give (all zeroed); inner vectors, bfloat16 runs but those of the tower
(`golden/bf16/`), and the tower of text configurations. A vector that exists in float64 and float32
is kept once, as the float64 value rounded to float32.

`preproc.safetensors.xz`: the pictures of the preprocessing vectors as files, and their patches in
the 256 steps that a float32 value came from; sizes and prompts in the metadata. Left out: a picture
of 470 KB.

python tools/copy_golden.py ../shared/golden tests/golden mm_a text_c … preproc
"""

import json
import lzma
import struct
import sys
from math import prod
from pathlib import Path

import numpy as np

# Four-byte alignment for the literal coder: floats compress by their exponent bytes.
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9, "lc": 2, "lp": 2, "pb": 2}]
# Inner vectors that the layer outputs, router, norms, states and caches already pin down.
LEFT_OUT = (
    "attn_in.",
    "attn_out.",
    "mlp_in.",
    "mlp_out.",
    "latent_in.",
    "latent_mix.",
    "final_mix",
    "logits_prefill_then_decode",
)
VISION_LEFT_OUT = (".patch_embed", ".block.0", ".block.1", ".final_layernorm")
EMBEDDING = "language_model.model.embed_tokens.weight"
HEAD = "language_model.lm_head.weight"
HEAD_STEP = 8
TOO_LARGE = "rgb_7400x21_downscaled"
Tensors = dict[str, tuple[str, list[int], bytes]]


def read(path: Path) -> Tensors:
    """Every tensor of a safetensors file as (dtype, shape, bytes)."""
    raw = path.read_bytes()
    start = 8 + struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8:start])
    header.pop("__metadata__", None)
    tensors = {}
    for name, info in header.items():
        begin, end = info["data_offsets"]
        tensors[name] = (info["dtype"], info["shape"], raw[start + begin : start + end])
    return tensors


def pack(tensors: Tensors, metadata: dict[str, str]) -> bytes:
    """A safetensors file in memory."""
    header: dict[str, object] = {"__metadata__": metadata}
    offset = 0
    for name, (dtype, shape, data) in tensors.items():
        span = [offset, offset + len(data)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": span}
        offset += len(data)
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    return struct.pack("<Q", len(head)) + head + b"".join(t[2] for t in tensors.values())


def sees(folder: Path) -> bool:
    """Whether the configuration has vectors of the tower."""
    return (folder / "golden" / "vision_f32.safetensors").is_file()


def weights(folder: Path, used: set[int]) -> Tensors:
    """The weights; embedding rows outside `used` are zeroed."""
    tensors: Tensors = {}
    kept = ("language_model.", "vision_tower.", "mm_projector.")[: 3 if sees(folder) else 1]
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= {k: v for k, v in read(path).items() if k.startswith(kept)}
    dtype, shape, data = tensors[EMBEDDING]
    rows = np.frombuffer(data, np.uint8).reshape(shape[0], -1).copy()
    rows[[i for i in range(shape[0]) if i not in used]] = 0
    tensors[EMBEDDING] = (dtype, shape, rows.tobytes())
    return tensors


def thinned(tensors: Tensors) -> Tensors:
    """Zeroes all but every HEAD_STEP-th token in the head and in all logits."""
    for name, (dtype, shape, data) in tensors.items():
        if name == HEAD or "logits" in name:
            n_tokens = shape[0] if name == HEAD else shape[-1]
            before = 1 if name == HEAD else prod(shape[:-1])
            cells = np.frombuffer(data, np.uint8).reshape(before, n_tokens, -1).copy()
            cells[:, np.arange(n_tokens) % HEAD_STEP > 0] = 0
            tensors[name] = (dtype, shape, cells.tobytes())
    return tensors


def vectors(folder: Path) -> Tensors:
    """The reference vectors of the text model, and those with pictures if there are any."""
    tensors = {k: v for k, v in runs(folder, "text").items() if not k.startswith(LEFT_OUT)}
    if sees(folder.parent):
        tower = runs(folder, "vision") | runs(folder, "mm")
        tensors |= {k: v for k, v in tower.items() if not k.endswith(VISION_LEFT_OUT)}
        bfloat16 = read(folder / "vision_bf16.safetensors")
        tensors |= {f"bf16/{k}": v for k, v in bfloat16.items() if k.endswith(".projected")}
    return tensors


def runs(folder: Path, kind: str) -> Tensors:
    """The float32 run, with the values of the float64 run, rounded, where it has them."""
    tensors = read(folder / f"{kind}_f32.safetensors")
    for name, (_, shape, data) in read(folder / f"{kind}_f64.safetensors").items():
        tensors[name] = ("F32", shape, np.frombuffer(data, "<f8").astype("<f4").tobytes())
    return tensors


def token_ids(tensors: Tensors) -> set[int]:
    """Every token that some vector feeds to the model."""
    kinds = {"I32": "<i4", "I64": "<i8"}
    return {
        int(i)
        for name, (dtype, _, data) in tensors.items()
        if name.endswith("_ids") and dtype in kinds
        for i in np.frombuffer(data, kinds[dtype])
    }


def configuration(folder: Path) -> bytes:
    """Weights, vectors and config of one configuration."""
    golden = vectors(folder / "golden")
    packed = weights(folder, token_ids(golden))
    packed |= {f"golden/{k}": v for k, v in golden.items()}
    metadata = {
        "config": (folder / "config.json").read_text(),
        "meta": (folder / "golden" / "meta.json").read_text(),
    }
    return pack(thinned(packed), metadata)


def preprocessing(source: Path) -> bytes:
    """Pictures and patches; a float32 value x is (step / 255 - 0.5) · 2, exactly invertible."""
    tensors = read(source / "preproc.safetensors")
    kept = {k: v for k, v in tensors.items() if not k.startswith(TOO_LARGE)}
    for name, (dtype, shape, data) in kept.items():
        if dtype == "F32":
            steps = np.rint((np.frombuffer(data, "<f4") / 2 + 0.5) * 255).astype(np.uint8)
            kept[name] = ("U8", shape, steps.tobytes())
    return pack(kept, {"rules": (source / "preproc.json").read_text()})


def main(source: Path, target: Path, names: list[str]) -> None:
    for name in names:
        packed = preprocessing(source) if name == "preproc" else configuration(source / name)
        data = lzma.compress(packed, format=lzma.FORMAT_XZ, filters=FILTERS)
        (target / f"{name}.safetensors.xz").write_bytes(data)
        print(f"{name}: {len(data):,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
