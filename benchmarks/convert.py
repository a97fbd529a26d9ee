"""Measure the converter against cp, its memory against the number of layers, and its planning.

Output: three tables. Speed: a full passthrough and a prune to 27 % of the experts, alternating with
cp of as many bytes, on a source with K3's expert sizes; all with fsync, all from a cold page cache,
ours with SHA-256. Memory: peak of a passthrough over that of a bare interpreter with numpy.
Planning: opening and planning all of K3, from sparse files that hold nothing but headers.

Speed depends on what else the machine does: the ratio of a round is with the cp of that round. A
copy of less than about 2 GB ends in caches below the system's own, and measures these.

    python -m benchmarks.convert [--dir DIR] [--gb 8] [--rounds 3] [--only TABLE]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil, prod
from pathlib import Path
from typing import NamedTuple

from converters.config import read_dims
from converters.names import TABLE, TRUNK
from kimi_k3_mlx.convert.plan import plan_build
from kimi_k3_mlx.convert.profiles import load_profile
from kimi_k3_mlx.convert.run import run
from kimi_k3_mlx.prune_plan import keep_first
from kimi_k3_mlx.schema import DTYPE_BYTES, TensorInfo
from kimi_k3_mlx.tensors.header import encode_header
from kimi_k3_mlx.tensors.local import open_source
from kimi_k3_mlx.tensors.source import CONFIG, INDEX
from kimi_k3_mlx.tensors.writer import sync
from tests.convert.test_full_scale import occurrences
from tests.tiny_k3 import TinyConfig, shards, write_json, write_shard, write_sidecars, write_source

ROOT = Path(__file__).parents[1]
K3_CONFIG = ROOT / "tests/golden/k3_config.json"
PROFILE = "mxfp4"
EXPERTS, KEPT = 26, 7
"""Experts of a layer of the big source, and how many a prune keeps: 27 %."""
LAYER_BYTES = EXPERTS * 17_547_264
LAYERS = (4, 24, 93)
AFTER_LAYERS = {"global": 0, "projector": 1, "vision": 2, "block": 2}
SPEED_BAR, MEMORY_BAR, PLAN_SECONDS_BAR, PLAN_MEMORY_BAR = 0.8, 300e6, 15, 600e6

CHILD = """
import json, resource, sys, time
from pathlib import Path
import numpy
begin, cpu = time.perf_counter(), time.process_time()
{body}
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
if sys.platform == "linux":  # there ru_maxrss starts from the size of the parent
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    peak = int(status["VmHWM"].split()[0]) * 1024
print(json.dumps([time.perf_counter() - begin, time.process_time() - cpu, peak]))
"""
OPEN = """
from kimi_k3_mlx.convert.plan import plan_build
from kimi_k3_mlx.convert.profiles import load_profile
from kimi_k3_mlx.convert.run import run
from kimi_k3_mlx.tensors.local import open_source
begin, cpu = time.perf_counter(), time.process_time()
source = open_source(Path(sys.argv[1]))
"""
PLAN = f"plan = plan_build(source, load_profile({PROFILE!r}))\nplan.sha256\n"
CONVERT = "run(plan, source, Path(sys.argv[2]))\n"


class Cost(NamedTuple):
    """What something took; `peak` in bytes, where it was measured."""

    seconds: float
    cpu: float
    peak: int = 0


@dataclass(frozen=True)
class Task:
    """Something whose throughput is measured, and whose cp it is compared with."""

    name: str
    n_bytes: int
    work: Callable[[Path], object]
    twin: str = ""


def measure_speed(folder: Path, n_layers: int, rounds: int) -> Iterator[str]:
    """The table of throughputs."""
    source, piece = folder / "source", folder / "piece"
    write_big_source(source, n_layers)
    tasks = list(speed_tasks(source, piece))
    costs: dict[str, list[Cost]] = defaultdict(list)
    for _ in range(rounds):
        for task in tasks:
            costs[task.name].append(timed(task, folder))
    yield row("", "GB", "MB/s median", "least", "of cp median", "least", "cpu-s/GB")
    for task in tasks:
        yield speed_row(task, costs[task.name], costs.get(task.twin, []))


def speed_row(task: Task, costs: list[Cost], copies: list[Cost]) -> str:
    """One task beside the copies of the same rounds, if it is not the copy itself."""
    rates = [task.n_bytes / cost.seconds / 1e6 for cost in costs]
    ratios = [cp.seconds / cost.seconds for cost, cp in zip(costs, copies, strict=False)]
    middle, least = (statistics.median(ratios), min(ratios)) if ratios else (0.0, 0.0)
    return row(
        task.name,
        f"{task.n_bytes / 1e9:.2f}",
        f"{statistics.median(rates):.0f}",
        f"{min(rates):.0f}",
        f"{middle:.2f}" if ratios else "",
        f"{least:.2f}" if ratios else "",
        f"{statistics.median(cost.cpu for cost in costs) / task.n_bytes * 1e9:.2f}",
        verdict(middle >= SPEED_BAR, f">= {SPEED_BAR}") if ratios else "",
    )


def speed_tasks(source: Path, piece: Path) -> Iterator[Task]:
    """Two conversions, each after the copy that it is compared with."""
    opened = open_source(source)
    some = keep_first(KEPT, EXPERTS, read_dims(opened.config).moe_layers)
    whole = plan_build(opened, load_profile(PROFILE))
    pruned = plan_build(opened, load_profile(PROFILE), some)
    write_piece(source, piece, pruned.n_bytes)
    for name, plan, copied in (
        ("full passthrough", whole, source),
        (f"{KEPT / EXPERTS:.0%} prune", pruned, piece),
    ):
        n_bytes = sum(path.stat().st_size for path in copied.iterdir())
        cp = Task(f"cp for {name}", n_bytes, partial(copy, copied))
        yield cp
        yield Task(name, plan.n_bytes, partial(run, plan, opened), cp.name)


def timed(task: Task, folder: Path) -> Cost:
    """Do it once, from a cold page cache and with nothing left to be written."""
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    os.sync()
    forget(folder)
    before, begin = os.times(), time.perf_counter()
    task.work(out)
    seconds, after = time.perf_counter() - begin, os.times()
    shutil.rmtree(out)
    return Cost(seconds, sum(after[:4]) - sum(before[:4]))


def copy(source: Path, out: Path) -> None:
    """What cp does, and fsync."""
    subprocess.run(["cp", "-r", source, out], check=True)
    for path in out.iterdir():
        file = os.open(path, os.O_RDONLY)
        sync(file)
        os.close(file)


def forget(folder: Path) -> None:
    """Take every file in the folder out of the page cache."""
    if not hasattr(os, "posix_fadvise"):
        return
    paths = [path for path in folder.rglob("*") if path.is_file()]
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)
    if shutil.which("fincore"):
        command = ["fincore", "--bytes", "--noheadings", "--output", "RES", *paths]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        if (n_cached := sum(map(int, found.split()))) > 1e6:
            raise RuntimeError(f"{n_cached:,} bytes of {folder} are still in the page cache")


def measure_memory(folder: Path) -> Iterator[str]:
    """The table of peaks by number of layers."""
    bare = child("").peak
    yield row("layers", "tensors", "GB", "peak MB", "over bare MB")
    for n_layers in LAYERS:
        sizes = TinyConfig(
            layers=n_layers, experts=16, latent=256, moe_intermediate=256, vision=False
        )
        source = write_source(folder / f"source-{n_layers}", sizes)
        n_bytes = sum(path.stat().st_size for path in source.iterdir())
        peak = child(OPEN + PLAN + CONVERT, source, folder / f"out-{n_layers}").peak
        over = peak - bare
        yield row(
            str(n_layers),
            f"{len(open_source(source).tensors):,}",
            f"{n_bytes / 1e9:.2f}",
            f"{peak / 1e6:.0f}",
            f"{over / 1e6:.0f}",
            verdict(over <= MEMORY_BAR, f"<= {MEMORY_BAR / 1e6:.0f} MB"),
        )


def measure_planning(folder: Path) -> Iterator[str]:
    """The table of opening and planning the whole K3."""
    source = folder / "k3"
    n_tensors = write_k3_headers(source)
    yield row(f"K3, {n_tensors:,} tensors", "seconds", "cpu-s", "peak MB")
    for what, program in (("open", OPEN), ("open and plan", OPEN + PLAN)):
        cost = child(program, source)
        fits = cost.cpu <= PLAN_SECONDS_BAR and cost.peak <= PLAN_MEMORY_BAR
        yield row(
            what,
            f"{cost.seconds:.1f}",
            f"{cost.cpu:.1f}",
            f"{cost.peak / 1e6:.0f}",
            verdict(fits, f"<= {PLAN_SECONDS_BAR} s, {PLAN_MEMORY_BAR / 1e6:.0f} MB"),
        )


def child(body: str, *arguments: Path) -> Cost:
    """Run a program in an interpreter of its own."""
    command = [sys.executable, "-c", CHILD.format(body=body), *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=ROOT)
    return Cost(*json.loads(done.stdout))


def write_big_source(path: Path, n_layers: int) -> None:
    """A source with K3's expert sizes and little else, one shard in memory at a time."""
    config = TinyConfig(
        layers=n_layers + 1, experts=EXPERTS, latent=3584, moe_intermediate=3072, vision=False
    )
    path.mkdir()
    weight_map: dict[str, str] = {}
    total_size = 0
    for number, shard in enumerate(shards(config), 1):
        name = f"model-{number:05d}-of-{config.layers + 1:06d}.safetensors"
        tensors = list(shard)
        total_size += write_shard(path / name, tensors)
        weight_map |= {tensor[0]: name for tensor in tensors}
    write_index(path, weight_map, total_size)
    write_sidecars(path, config)


def write_piece(source: Path, piece: Path, n_bytes: int) -> None:
    """Files that have so many of the source's bytes in all, as equal parts of its shards."""
    piece.mkdir()
    big = [path for path in sorted(source.iterdir()) if path.stat().st_size > LAYER_BYTES]
    for path in big:
        with path.open("rb") as file:
            (piece / path.name).write_bytes(file.read(n_bytes // len(big)))


def write_k3_headers(path: Path) -> int:
    """All of K3's headers, in files of full size without content; return how many tensors."""
    config = json.loads(K3_CONFIG.read_text("utf-8"))
    dims = read_dims(config)
    by_shard: dict[int, list[tuple[str, str, tuple[int, ...]]]] = defaultdict(list)
    for entry in TABLE:
        dtype = "BF16" if entry.dtype == TRUNK else entry.dtype
        for numbers in occurrences(entry, dims):
            after = AFTER_LAYERS.get(entry.scope)
            shard = numbers[0] if after is None else dims.n_layers + after
            tensor = (entry.source.format(*numbers), dtype, dims.shapes(entry.shape)[0])
            by_shard[shard].append(tensor)
    path.mkdir()
    weight_map: dict[str, str] = {}
    total_size = 0
    for number, tensors in sorted(by_shard.items()):
        name = f"model-{number + 1:05d}-of-{len(by_shard):06d}.safetensors"
        infos, begin = [], 0
        for tensor, dtype, shape in sorted(tensors):
            end = begin + prod(shape) * DTYPE_BYTES[dtype]
            infos.append(TensorInfo(tensor, dtype, shape, begin, end))
            begin = end
        header = encode_header(infos, {"format": "pt"})
        (path / name).write_bytes(header)
        os.truncate(path / name, len(header) + begin)
        weight_map |= {info.name: name for info in infos}
        total_size += begin
    write_index(path, weight_map, total_size)
    write_json(path / CONFIG, config)
    return len(weight_map)


def write_index(path: Path, weight_map: dict[str, str], total_size: int) -> None:
    """The index of a source."""
    write_json(path / INDEX, {"metadata": {"total_size": total_size}, "weight_map": weight_map})


def verdict(is_good: bool, bar: str) -> str:
    """Whether a bar was reached."""
    return f"  {'ok' if is_good else 'MISSED'}, bar {bar}"


def row(name: str, *cells: str) -> str:
    """A line of a table."""
    return f"{name:28}" + "".join(f"{cell:>14}" for cell in cells)


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the sources, measure, print, remove everything."""
    parser = argparse.ArgumentParser(description="The converter's speed and memory.")
    parser.add_argument("--dir", type=Path, help="where to make sources and builds")
    parser.add_argument("--gb", type=float, default=8.0, help="size of the source for speed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("speed", "memory", "planning"), help="one table")
    args = parser.parse_args(arguments)
    n_layers = ceil(args.gb * 1e9 / LAYER_BYTES)
    tables: dict[str, Callable[[Path], Iterator[str]]] = {
        "speed": lambda folder: measure_speed(folder, n_layers, args.rounds),
        "memory": measure_memory,
        "planning": measure_planning,
    }
    for name in [args.only] if args.only else tables:
        with tempfile.TemporaryDirectory(prefix="kimi-convert-", dir=args.dir) as folder:
            for line in tables[name](Path(folder)):
                print(line, flush=True)
        print()


if __name__ == "__main__":
    main()
