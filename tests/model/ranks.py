"""Run by mlx.launch on two ranks: golden models, split both ways, against one process.

mlx.launch -n 2 --backend ring -- python -m tests.model.ranks mm_a text_eps
"""

import itertools
import json
import sys

import mlx.core as mx

from tests.model.golden import build, error, read_golden, widen
from tests.model.graded import quantize_trunk, split_model


def logits(model, ids: mx.array) -> mx.array:
    """Prefill in two parts, then three tokens one by one."""
    cache, n = model.make_cache(), ids.shape[1]
    cuts = [0, n // 2, n - 3, n - 2, n - 1, n]
    parts = [model(ids[:, a:b], cache) for a, b in itertools.pairwise(cuts)]
    result = mx.concatenate(parts, 1)
    mx.eval(result, [c.state for c in cache])
    return result


def compare(split: str, name: str, group: mx.distributed.Group) -> dict:
    name, _, change = name.partition("/")
    golden = read_golden(name)
    weights = {k: widen(v) for k, v in golden.weights.items()}
    model = split_model(name, 0.5) if change == "banks" else build(golden.config, weights)
    if change == "quantized":
        quantize_trunk(model, {"group_size": 32, "bits": 6, "mode": "affine"})
    whole = logits(model, golden.vectors["input_ids"])
    if split == "pipeline":
        model.model.pipeline(group)
    else:
        model.shard(group)
    found = logits(model, golden.vectors["input_ids"])
    return {
        "ranks": group.size(),
        "layers": len(model.layers),
        "difference": error(found, whole),
        "error": error(found, golden.vectors["logits_prefill"]),
    }


def main(*names: str) -> None:
    group = mx.distributed.init(strict=True)
    for name in names:
        for split in ("pipeline", "tensor"):
            found = compare(split, name, group)
            if group.rank() == 0:
                line = json.dumps({"split": split, "name": name, **found})
                sys.stdout.write(line + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
