"""Show what a checkpoint holds: layers, experts, and the bytes of each part.

Reads headers only: no tensor byte, no MLX. Sources and builds look alike.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from kimi_k3_mlx.cli._options import Parser, common_options, opened
from kimi_k3_mlx.cli._output import table, write, write_json
from kimi_k3_mlx.units import format_bytes

if TYPE_CHECKING:
    from kimi_k3_mlx.convert.inventory import Inventory

USAGE = "PATH|REPO [options]"
EXAMPLES = (
    "kimi-k3 inspect ./Kimi-K3",
    "kimi-k3 inspect moonshotai/Kimi-K3",
    "kimi-k3 inspect ./Kimi-K3 --tensors '*.layers.17.*.gate.*'",
    "kimi-k3 inspect ./Kimi-K3-mlx-mxfp4 --json",
)
KINDS = {"source": "source in Moonshot's layout", "build": "MLX build"}


def add_options(parser: Parser) -> None:
    """Declare the options."""
    group = parser.add_argument_group("checkpoint")
    group.add_argument(
        "path",
        metavar="PATH|REPO",
        help="folder of a source or a build, or a repository on the Hub",
    )
    group.add_argument("--revision", metavar="NAME", help="branch, tag or commit on the Hub")
    group.add_argument("--tensors", metavar="GLOB", help="list the tensors with matching names")
    common_options(parser, quiet=False)


def run(args: argparse.Namespace) -> None:
    """Show it."""
    from kimi_k3_mlx.convert.inventory import take_inventory
    from kimi_k3_mlx.runtime.build import explained

    path = Path(args.path)
    with explained(path) if path.is_dir() else nullcontext():
        inventory = take_inventory(opened(args.path, args.revision))
    listed = tensors(inventory, args.tensors) if args.tensors else []
    if args.json:
        write_json(inventory.to_json() | ({"tensors": listed} if args.tensors else {}))
    elif args.tensors:
        write(tensor_table(listed) if listed else f"no tensor matches {args.tensors}")
    else:
        write(f"{facts(inventory)}\n\n{parts(inventory)}")


def facts(inventory: Inventory) -> str:
    """What it is, in a few lines."""
    rows = [
        ("checkpoint", f"{inventory.path}  ({KINDS[inventory.kind]})"),
        ("commit", inventory.commit or "unknown"),
        ("layers", layers(inventory)),
        ("experts", experts(inventory)),
        ("parameters", f"{inventory.parameters:,}"),
        ("tensors", f"{inventory.n_tensors:,} in {inventory.n_shards} shards"),
        ("size", format_bytes(inventory.n_bytes)),
    ]
    if inventory.profile:
        rows.append(("profile", f"{inventory.profile}  (plan {str(inventory.plan_sha256)[:12]})"))
    return table(rows)


def layers(inventory: Inventory) -> str:
    """`93: 69 KDA and 24 MLA, 1 dense and 92 MoE`."""
    return (
        f"{inventory.kda_layers + inventory.mla_layers}: {inventory.kda_layers} KDA and "
        f"{inventory.mla_layers} MLA, {inventory.dense_layers} dense and "
        f"{inventory.moe_layers} MoE"
    )


def experts(inventory: Inventory) -> str:
    """`896 in each MoE layer, 16 chosen per token`, or the range when layers differ."""
    low, high = min(inventory.experts, default=0), max(inventory.experts, default=0)
    kept = f"{low} in each MoE layer" if low == high else f"{low} to {high} in a MoE layer"
    return f"{kept}, {inventory.experts_per_token} chosen per token"


def parts(inventory: Inventory) -> str:
    """Tensors and bytes of each part, most bytes first."""
    rows = [("part", "tensors", "bytes", "share", "dtypes")]
    for part in inventory.parts:
        share, size = f"{part.n_bytes / inventory.n_bytes:.1%}", format_bytes(part.n_bytes)
        rows.append((part.role, f"{part.n_tensors:,}", size, share, " ".join(part.dtypes)))
    return table(rows)


def tensors(inventory: Inventory, pattern: str) -> list[dict[str, object]]:
    """The matching tensors as JSON objects; offsets count from the start of the shard's file."""
    return [
        {
            "name": tensor.name,
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "n_bytes": tensor.n_bytes,
            "shard": inventory.source.weight_map[tensor.name],
            "offset": tensor.begin,
        }
        for tensor in inventory.tensors(pattern)
    ]


def tensor_table(listed: list[dict[str, object]]) -> str:
    """One line for each tensor."""
    columns = ("name", "dtype", "shape", "n_bytes", "shard")
    return table([columns, *(tuple(str(row[key]) for key in columns) for row in listed)])
