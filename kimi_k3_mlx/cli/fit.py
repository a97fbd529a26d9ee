"""Say which builds a Mac runs from memory, and the most tokens a second that its memory allows.

For every profile the largest number of experts that fits, then the builds that are on the Hub.
Sizes are exact; memory and speeds are a model, but for one measurement that others published.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from kimi_k3_mlx.cli._estimate import CONTEXT
from kimi_k3_mlx.cli._options import Parser, common_options, positive
from kimi_k3_mlx.cli._output import table, write, write_json
from kimi_k3_mlx.cli.plan import ram_gib
from kimi_k3_mlx.errors import UsageError
from kimi_k3_mlx.units import format_bytes, format_rate

if TYPE_CHECKING:
    from kimi_k3_mlx.runtime.chips import Chip
    from kimi_k3_mlx.runtime.roofline import Row

USAGE = "[--ram SIZE] [--chip NAME] [options]"
EXAMPLES = (
    "kimi-k3 fit",
    "kimi-k3 fit --ram 512GB --chip 'M3 Ultra' --context 131072",
    "kimi-k3 fit --ram 128GB --chip 'M5 Max' --json",
)
VERDICTS = {"yes": "yes", "raise": "with the limit raised", "tight": "only just", "no": "no"}


def add_options(parser: Parser) -> None:
    """Declare the options."""
    group = parser.add_argument_group("Mac")
    group.add_argument("--ram", metavar="SIZE", type=ram_gib, help="its memory; else this one's")
    group.add_argument("--chip", metavar="NAME", help="its chip, for the speed; else this one's")
    group.add_argument(
        "--context", metavar="N", type=positive, default=CONTEXT, help="tokens of context"
    )
    common_options(parser, quiet=False)


def run(args: argparse.Namespace) -> None:
    """Work it out."""
    from kimi_k3_mlx.runtime import machine, roofline

    here = machine.Machine.read(Path.cwd(), machine.Probes())
    ram = args.ram or here.ram_gib
    own_chip = here.chip if args.ram is None else None
    chip = chosen_chip(args.chip, own_chip, ram)
    rows = roofline.rows(ram, chip, args.context)
    if args.json:
        shown = {"ram_gib": ram, "chip": chip and chip._asdict(), "context": args.context}
        write_json({"version": 1} | shown | {"builds": [row.to_json() for row in rows]})
        return
    name = chip.name if chip else own_chip or "a Mac"
    if args.ram is None and not here.is_mac:
        name = f"not a Mac: {here}; {name}"
    speed = f"memory up to {format_rate(chip.bandwidth)}" if chip else "speed unknown: give --chip"
    head = f"{name} with {ram} GB, {speed}, {args.context:,} tokens of context"
    write(f"{head}\n\n{text(rows)}")


def chosen_chip(asked: str | None, own: str | None, ram: int) -> Chip | None:
    """The chip that is asked for, which must be in the table and sold with so much, or this one."""
    from kimi_k3_mlx.runtime.chips import CHIPS, find_chip

    chip = find_chip(asked or own or "")
    if asked and not chip:
        known = ", ".join(chip.name for chip in CHIPS)
        raise UsageError(f"there is no chip {asked!r} in the table.", f"known: {known}")
    if asked and chip and ram > chip.ram_gib:
        raise UsageError(f"no Mac with {chip.name} has {ram} GB: at most {chip.ram_gib}.")
    return chip


def text(rows: list[Row]) -> str:
    """The builds, and what kind of number each is."""
    from kimi_k3_mlx.runtime.roofline import FEW, RECORD, record_share

    head = ("build", "experts", "weights", "wired", "fits", "wired_limit_mb", "GB/token")
    lines = [(*head, "tok/s at most", "expected", "measured"), *map(cells, rows)]
    has_few = any(row.keep < FEW and row.fit.verdict != "no" for row in rows)
    few = (
        f"\nunder {FEW}        kimi-k3 plan keeps so few experts only with --floor"
        if has_few
        else ""
    )
    return (
        f"{table(lines)}\n\n"
        "weights         exact: what convert writes\n"
        "wired           model: weights, cache and state of one sequence, activations\n"
        "GB/token        model: trunk, 16 experts a layer, cache of the whole context, state\n"
        "tok/s at most   model: the chip's bandwidth over that, if the weights are wired\n"
        f"expected        model: {record_share():.0%} of it, as much as the measurement reached\n"
        f"measured        {RECORD.tokens_per_second} tok/s on {RECORD.chip}, {RECORD.source}{few}"
    )


def cells(row: Row) -> tuple[str, ...]:
    """A line of the table."""
    return (
        f"{row.profile}{' (on the Hub)' if row.published else ''}",
        f"{row.keep}",
        format_bytes(row.memory.n_weights),
        format_bytes(row.memory.n_bytes),
        VERDICTS[row.fit.verdict],
        f"{row.fit.wired_limit_mb}" if row.fit.verdict in ("raise", "tight") else "-",
        f"{row.traffic.total / 1e9:.1f}",
        f"{row.ceiling:.1f}" if row.ceiling else "-",
        f"{row.expected:.1f}" if row.expected else "-",
        f"{row.measured.tokens_per_second}" if row.measured else "-",
    )
