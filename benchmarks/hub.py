"""Reading a prune's ranges from a Hub against a plain download, over a local server.

A shard with the experts of one K3 layer lies on a Hub on localhost (`tests.fake_hub`, in a process
of its own): pieces of 5,505,024 and 344,064 bytes, scattered as in the published file. `HubReader`
reads 27 % of the experts in the order in which a build stores them: six ranges an expert, none
beside another. A plain download is one request for the whole file through the same session, and its
bytes are thrown away as well. Both alternate; the best of the rounds counts, for the machine may be
shared. The server and the client have to share it, too: on a fast network read the fractions only.

    python -m benchmarks.hub [--experts N] [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import inf
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from kimi_k3_mlx.schema import Span, TensorInfo
from kimi_k3_mlx.tensors.header import encode_header
from kimi_k3_mlx.tensors.hub import HubSource, open_repository
from kimi_k3_mlx.units import format_bytes, format_rate
from tests.fake_hub import FakeHub

NAME = "moonshotai/One-Layer"
SHARD = "model-00001-of-000001.safetensors"
PLAIN = "plain download"
PIECES = {"weight_scale": (3072, 112), "weight_packed": (3072, 1792)}
KEPT = 0.27
PREFIX = "language_model.model.layers.1.block_sparse_moe.experts"


class Network(NamedTuple):
    """What lies between the client and the server."""

    name: str
    latency: float
    """Seconds before the first byte of every answer."""
    bytes_per_second: float
    """Of all connections together."""


NETWORKS = (
    Network("unlimited", 0.0, inf),
    Network("30 ms a request", 0.03, inf),
    Network("30 ms, 1 Gbit/s", 0.03, 125e6),
    Network("100 ms, 1 Gbit/s", 0.1, 125e6),
)


def write_layer(folder: Path, n_experts: int) -> None:
    """A sparse shard in the published order: last expert first, scales before codes."""
    tensors, position = [], 0
    for expert in reversed(range(n_experts)):
        for matrix in ("w3", "w2", "w1"):
            for part, shape in PIECES.items():
                end = position + shape[0] * shape[1]
                name = f"{PREFIX}.{expert}.{matrix}.{part}"
                tensors.append(TensorInfo(name, "U8", shape, position, end))
                position = end
    header = encode_header(tensors)
    (folder / SHARD).write_bytes(header)
    os.truncate(folder / SHARD, len(header) + position)
    index = {"weight_map": {tensor.name: SHARD for tensor in tensors}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")


def kept_spans(source: HubSource, n_experts: int) -> list[Span]:
    """The kept experts as a build stores them: matrix by matrix, all codes, then all scales."""
    kept = sorted(random.Random(0).sample(range(n_experts), round(KEPT * n_experts)))
    names = [
        f"{PREFIX}.{expert}.{matrix}.{part}"
        for matrix in ("w1", "w2", "w3")
        for part in ("weight_packed", "weight_scale")
        for expert in kept
    ]
    return [Span(name, 0, source.tensors[name].n_bytes) for name in names]


def serve(folder: Path, pipe: Connection) -> None:
    """A Hub in a process of its own; takes networks from the pipe until it gets None."""
    with FakeHub() as hub:
        hub.add(NAME, folder)
        pipe.send(hub.url)
        while network := pipe.recv():
            hub.latency, hub.bytes_per_second = network.latency, network.bytes_per_second
            pipe.send(True)


@contextmanager
def serving(folder: Path, home: Path) -> Iterator[Connection]:
    """The server's pipe; huggingface_hub, not imported yet, will find the server."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(folder, theirs))
    process.start()
    flags = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_OFFLINE": "0", "HF_TOKEN": ""}
    os.environ |= flags | {"HF_HOME": str(home), "HF_ENDPOINT": ours.recv()}
    yield ours
    ours.send(None)
    process.join()


def read_plain(source: HubSource, n_wanted: float) -> int:
    """Download the shard in one request, or the beginning of it; return the bytes that came."""
    from huggingface_hub import get_hf_file_metadata, get_session, hf_hub_url

    url = hf_hub_url(source.repository, SHARD, revision=source.commit)
    location = get_hf_file_metadata(url).location
    n_bytes = 0
    with get_session().stream("GET", location, headers={"accept-encoding": "identity"}) as answer:
        for chunk in answer.iter_raw():
            n_bytes += len(chunk)
            if n_bytes >= n_wanted:
                break
    return n_bytes


def read_spans(source: HubSource, spans: Sequence[Span]) -> int:
    """Read spans with our reader; return their bytes."""
    with source.reader() as reader:
        return sum(map(len, reader.blocks(spans)))


def rate(read: Callable[[], int]) -> float:
    """Bytes a second."""
    begin = time.perf_counter()
    n_bytes = read()
    return n_bytes / (time.perf_counter() - begin)


def peak_bytes() -> int:
    """Peak resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << (10 * (sys.platform == "linux"))


def best_rates(
    source: HubSource, jobs: dict[str, list[Span]], network: Network, rounds: int
) -> dict[str, float]:
    """The best rate of each job and of a plain download, one after the other in every round."""
    limit = min(source.total_size, 3 * network.bytes_per_second)
    works: dict[str, Callable[[], int]] = {PLAIN: partial(read_plain, source, limit)}
    works |= {name: partial(read_spans, source, spans) for name, spans in jobs.items()}
    rates: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            rates[name].append(rate(work))
    return {name: max(values) for name, values in rates.items()}


def jobs_of(source: HubSource, n_experts: int) -> dict[str, list[Span]]:
    """What is read, by its name in the table."""
    kept = kept_spans(source, n_experts)
    small = [span for span in kept if span.tensor.endswith("scale")]
    every = sorted(source.tensors.values(), key=lambda tensor: tensor.begin)
    whole = [Span(tensor.name, 0, tensor.n_bytes) for tensor in every]
    return {"27 % of the experts": kept, "their scales alone": small, "the whole shard": whole}


def report(folder: Path, n_experts: int, rounds: int) -> None:
    """Measure and print."""
    layer = folder / "layer"
    layer.mkdir()
    write_layer(layer, n_experts)
    with serving(layer, folder / "home") as server:
        source = open_repository(NAME)
        jobs = jobs_of(source, n_experts)
        n_kept = sum(span.n_bytes for span in jobs["27 % of the experts"])
        print(f"shard {format_bytes(source.total_size)}, 27 % is {format_bytes(n_kept)}")
        before = peak_bytes()
        for network in NETWORKS:
            server.send(network)
            server.recv()
            print(f"\n{network.name:28}{'rate':>12}{'of plain':>10}")
            rates = best_rates(source, jobs, network, rounds)
            for name, value in rates.items():
                print(f"  {name:26}{format_rate(value):>12}{value / rates[PLAIN]:>10.2f}")
        print(
            f"\npeak RSS {format_bytes(peak_bytes())}, {format_bytes(before)} of it before reading"
        )


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", type=int, default=112, help="in the layer: 17.5 MB each")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report(Path(folder), options.experts, options.rounds)


if __name__ == "__main__":
    main()
