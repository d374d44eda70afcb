"""`muvox bench`: time of every operator beside its peers, in the same run, on the same inputs.

A row is an operator at a size, in one direction; a peer is what a user would write with stock PyTorch (and scipy's
cKDTree where it is installed). The peers and muvox take turns, and the medians and their ratio are printed.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial

import click
import torch
from rich.console import Console
from rich.table import Table

import muvox
from muvox import _library

# sets × rows of the published CPU table (216 × 128 is a 6 × 6 × 6 volume, 600 × 250 TomOpt's usual one)
SIZES = ((216, 128), (600, 250), (64, 1000))
LARGE = (1, 20_000)


@dataclass
class Row:
    """One measured line: times in milliseconds, `ratio` of muvox's time to the peer's (below 1 is faster)."""

    op: str
    size: str
    direction: str
    peer: str
    muvox_ms: float
    peer_ms: float

    @property
    def ratio(self) -> float:
        return self.muvox_ms / self.peer_ms


def cdist_topk(coords: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """k nearest rows by the full distance matrix, as LUMIN-like code does."""
    distance = torch.cdist(coords, coords)
    return distance.topk(k, largest=False, sorted=True)


def gravnet_composition(coords: torch.Tensor, feats: torch.Tensor, k: int) -> torch.Tensor:
    """GravNet's aggregation by cdist, topk and a gather."""
    distance, index = cdist_topk(coords, k)
    sets = torch.arange(len(feats))[:, None, None]
    message = feats[sets, index] * torch.exp(-10 * distance**2)[..., None]
    return torch.cat([message.mean(2), message.amax(2)], -1)


def kdtree(coords: torch.Tensor, k: int) -> None:
    """scipy's tree, one query of all rows for each set, on all threads."""
    from scipy.spatial import cKDTree

    for rows in coords.numpy():
        cKDTree(rows).query(rows, k, workers=torch.get_num_threads())


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def pool_composition(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x.mean(1), x.max(1).values], -1)


def has_scipy() -> bool:
    try:
        import scipy.spatial  # noqa: F401
    except ImportError:
        return False
    return True


def both_ways(function: Callable, inputs: list[torch.Tensor]) -> Callable[[], object]:
    """Forward and backward with a gradient to every input."""
    grad = torch.randn_like(function(*inputs))
    leaves = [x.detach().requires_grad_() for x in inputs]
    return lambda: torch.autograd.grad(function(*leaves), leaves, grad)


def cases(op: str, size: tuple[int, int]) -> list[tuple[str, str, Callable, str, Callable]]:
    """(label, direction, muvox, peer's name, peer) of one operator at one size."""
    S, M = size
    found = []
    if op == "knn":
        coords = torch.randn(S, M, 4)
        ours = partial(muvox.knn, coords, 8)
        if M <= 4000:
            found.append(("d 4, k 8", "forward", ours, "cdist + topk", partial(cdist_topk, coords, 8)))
        if has_scipy():
            found.append(("d 4, k 8", "forward", ours, "scipy cKDTree", partial(kdtree, coords, 8)))
    elif op == "gravnet" and M <= 4000:
        inputs = [torch.randn(S, M, 4), torch.randn(S, M, 22)]
        ours, peer = (lambda c, f: muvox.gravnet(c, f, 8)), (lambda c, f: gravnet_composition(c, f, 8))
        found.append(("k 8, F 22", "f+b", both_ways(ours, inputs), "cdist, topk, gather", both_ways(peer, inputs)))
    elif op == "attention" and M <= 4000:
        for A, C in ((8, 64), (12, 48)):
            inputs = [torch.randn(S, M, A), torch.randn(S, M, A), torch.randn(S, M, C)]
            label, ours, peer = f"{A}/{C}", muvox.attention, sdpa
            found.append((label, "forward", partial(ours, *inputs), "SDPA", partial(peer, *inputs)))
            found.append((label, "f+b", both_ways(ours, inputs), "SDPA", both_ways(peer, inputs)))
    elif op == "pool" and M <= 4000:
        inputs = [torch.randn(S, M, 48)]
        found.append(("F 48", "f+b", both_ways(muvox.pool, inputs), "mean, max", both_ways(pool_composition, inputs)))
    return found


def measure(ours: Callable, peer: Callable, repeats: int) -> tuple[float, float]:
    """Median milliseconds of both, in turn, after one warm-up each."""
    times: tuple[list[float], list[float]] = ([], [])
    ours(), peer()
    for _ in range(repeats):
        for function, taken in zip((ours, peer), times, strict=True):
            start = time.perf_counter()
            function()
            taken.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[0]), statistics.median(times[1])


def processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


@click.command()
@click.option("--op", "ops", multiple=True, type=click.Choice(["knn", "gravnet", "attention", "pool"]),
              help="Only these operators (may be given several times).")
@click.option("--threads", type=click.IntRange(1), help="CPU threads; default: torch's.")
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True, help="Timed runs of each.")
@click.option("--large/--no-large", default=True, show_default=True, help="The single set of 20,000 rows too.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, writable=True), help="Write the rows to a file.")
def bench(ops: tuple[str, ...], threads: int | None, repeats: int, large: bool, json_file: str | None) -> None:
    """Time the operators on the CPU beside stock PyTorch and scipy, in one run."""
    if threads:
        torch.set_num_threads(threads)
    torch.manual_seed(0)
    where = (f"{processor()}, {torch.get_num_threads()} threads, {_library.simd_name()} kernels, "
             f"muvox {muvox.__version__}, torch {torch.__version__}, {date.today()}")
    table = Table(title=f"float, median of {repeats}; {where}")
    for column in ("op", "sets × rows", "", "direction", "muvox ms", "peer", "peer ms", "ratio"):
        table.add_column(column, justify="right" if "ms" in column or column == "ratio" else "left")
    rows = []
    for op in ops or ("knn", "gravnet", "attention", "pool"):
        for size in (*SIZES, LARGE) if large else SIZES:
            for label, direction, ours, peer_name, peer in cases(op, size):
                row = Row(op, f"{size[0]} × {size[1]}, {label}", direction, peer_name, *measure(ours, peer, repeats))
                rows.append(row)
                table.add_row(op, f"{size[0]} × {size[1]}", label, direction, f"{row.muvox_ms:.1f}", peer_name,
                              f"{row.peer_ms:.1f}", f"{row.ratio:.3f}")
    Console(width=130).print(table)
    if json_file:
        with open(json_file, "w") as file:
            json.dump({"where": where, "rows": [asdict(row) | {"ratio": row.ratio} for row in rows]}, file, indent=1)
