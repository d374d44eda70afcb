"""What is measured: sizes, targets and inputs of every operator.

A target was set as a ratio to what a peer took on the same machine (`published`), so it carries over to another machine
as that ratio; its milliseconds are for an H200.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

import muvox

from . import peers
from .measure import Calls, forward_backward
from .peers import CDIST

FORWARD, BOTH, ALONE = "forward", "f+b", "forward − knn"
GATHER, COMPILED, PLAIN = f"{CDIST}, gather", ", compiled", "muvox on the plain cloud"
SEED = 0

# sets × rows of the published CPU table (216 × 128 is a 6 × 6 × 6 volume, 600 × 250 TomOpt's usual one)
CPU_SIZES = ((216, 128), (600, 250), (64, 1000))
CPU_LARGE = (1, 20_000)

# sets, rows, d, k, target in ms, and the ms that peers took when it was set
KNN = (
    (600, 250, 4, 8, 0.07, {CDIST: 2.29, "pyg-lib": 1.39, "FastGraphCompute": 3.87, "PyTorch3D": 0.190}),
    (600, 1000, 4, 8, 0.35, {CDIST: 20.0, "pyg-lib": 6.26, "FastGraphCompute": 12.0, "PyTorch3D": 1.54}),
    (600, 2000, 4, 8, 0.9, {CDIST: 62.9, "pyg-lib": 18.5, "FastGraphCompute": 25.5, "PyTorch3D": 5.41}),
    (64, 4000, 4, 8, 0.4, {CDIST: 20.4, "pyg-lib": 8.66, "FastGraphCompute": 12.6, "PyTorch3D": 2.20}),
    (10_000, 100, 4, 8, 0.25, {CDIST: 7.38, "pyg-lib": 5.21, "FastGraphCompute": 11.7, "PyTorch3D": 0.752}),
    (1, 20_000, 4, 8, 0.35, {CDIST: 6.97, "pyg-lib": 12.7, "FastGraphCompute": 10.7, "PyTorch3D": 2.55}),
    (1, 100_000, 4, 8, 2.5, {CDIST: 174, "FastGraphCompute": 20.6, "PyTorch3D": 25.3}),
    (600, 1000, 4, 25, 0.9, {CDIST: 20.4, "pyg-lib": 55.7, "FastGraphCompute": 14.2, "PyTorch3D": 4.73}),
    (600, 2000, 4, 25, 2.2, {CDIST: 63.7, "pyg-lib": 134, "FastGraphCompute": 31.8, "PyTorch3D": 15.2}),
    (600, 1000, 8, 16, 1.1, {"pyg-lib": 20.3, "FastGraphCompute": 29.4, "PyTorch3D": 3.10}),
    (1, 100_000, 8, 16, 12, {"FastGraphCompute": 122, "PyTorch3D": 50.2}),
)
# sets, rows, k, F, target in ms and MiB, and the ms that cdist, PyTorch3D, and PyTorch3D with torch.compile took
GRAVNET = (
    (600, 250, 8, 16, 0.35, 40, (3.51, 1.49, 0.96)),
    (600, 250, 25, 22, 0.65, 60, (6.47, 4.46, 1.98)),
    (600, 1000, 8, 16, 1.0, 160, (24.6, 5.69, 2.77)),
    (600, 1000, 25, 22, 2.5, 240, (36.0, 19.7, 9.54)),
    (600, 2000, 8, 16, 2.6, 320, (71.9, 13.5, 7.78)),
    (600, 2000, 25, 22, 6, 480, (94.8, 45.5, 25.8)),
)
ALONE_SIZE = (600, 1000, 25, 22, 0.5)  # sets, rows, k, F, target in ms of what gravnet takes beside knn
POOL = ((600, 250, 48), (600, 1000, 48), (600, 2000, 48))
# points, columns, voxels of a grid, target in ms (and MiB), and the ms of the best composition
VOXELIZE = ((400_000, 64, (50, 40, 25), 0.18, None, 0.54),)
DEVOXELIZE = ((400_000, 64, (50, 40, 25), 1.0, 160, 5.46),)
# clouds that a search is tempted to be slow on: name, sizes, target as a ratio
CLOUDS = (("1 % at 1e3 σ", 1.3), ("half at 0", 1.5), ("all equal", 1.0))
CLOUD_SIZES = ((600, 1000), (1, 100_000))
RAGGED = (600, 1.3)  # sets, target as a ratio


@dataclass(frozen=True)
class Target:
    """`published` is what the target was set against: peers' milliseconds, under "" the best of all. `ratio` is given
    where no milliseconds are."""

    ms: float | None = None
    mib: float | None = None
    ratio: float | None = None
    published: dict[str, float] = field(default_factory=dict)

    def ratio_to(self, peer: str | None) -> float | None:
        published = self.published.get(peer, self.published.get(""))
        return self.ms / published if self.ms and published else self.ratio


@dataclass
class Setup:
    """Where and in what a case is measured, and its own random numbers: the same whatever else is run."""

    device: torch.device
    dtype: torch.dtype
    compile: bool = True

    def __post_init__(self):
        self.random = torch.Generator(self.device).manual_seed(SEED)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.random, device=self.device).to(self.dtype)

    def uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self.random, device=self.device)

    def integers(self, below: int, *shape: int) -> torch.Tensor:
        return torch.randint(below, shape, generator=self.random, device=self.device)


@dataclass(frozen=True)
class Case:
    op: str
    size: str
    options: str
    direction: str
    build: Callable[[Setup], Calls]
    target: Target = Target()
    dtype: torch.dtype = torch.float32  # of the target, and measured unless another is asked for


def label(*sizes: int) -> str:
    return " × ".join(f"{n:,}" if n >= 10_000 else str(n) for n in sizes)


def knn(S: int, M: int, d: int, k: int, direction: str = FORWARD, target: Target = Target()) -> Case:
    def build(setup: Setup) -> Calls:
        coords, sets = setup.normal(S, M, d), peers.Sets(S, M, setup.device)
        found = {CDIST: lambda c: peers.cdist_topk(c, k)[0]}
        for name, search in peers.searches().items():
            if direction == FORWARD:
                found[name] = partial(search.call, k=k, sets=sets)
            elif search.distance2:
                found[name] = lambda c, search=search: search.distance2(search.call(c, k, sets))
        if direction == FORWARD:
            found[CDIST] = partial(peers.cdist_topk, k=k)
            if setup.device.type == "cpu" and peers.importable("scipy.spatial"):
                found["scipy cKDTree"] = partial(peers.kdtree, k=k)
        return in_direction(direction, lambda c: muvox.knn(c, k)[1], found, [coords])

    return Case("knn", label(S, M), f"d {d}, k {k}", direction, build, target)


def in_direction(direction: str, ours: Callable, found: dict[str, Callable], inputs: list, *fixed) -> Calls:
    """Calls of functions of the inputs, forward or with gradients to them; the fixed arguments have none."""
    if direction == FORWARD:
        return Calls(partial(ours, *inputs, *fixed), {name: partial(f, *inputs, *fixed) for name, f in found.items()})
    return Calls(forward_backward(ours, inputs, *fixed),
                 {name: forward_backward(f, inputs, *fixed) for name, f in found.items()})


def gravnet(S: int, M: int, k: int, F: int, direction: str = BOTH, target: Target = Target()) -> Case:
    def build(setup: Setup) -> Calls:
        inputs, sets = [setup.normal(S, M, 4), setup.normal(S, M, F)], peers.Sets(S, M, setup.device)
        found = {GATHER: partial(peers.gravnet_by_cdist, k=k)}
        if setup.compile:
            found[GATHER + COMPILED] = partial(peers.compiled(peers.gravnet_by_cdist), k=k)
            by_rows = peers.compiled(peers.gravnet_by_rows)
        for name, search in peers.searches().items():
            found[f"{name}, gather"] = partial(_search_and_gather, search, peers.gravnet_by_rows, k, sets)
            if setup.compile:
                found[f"{name}, gather" + COMPILED] = partial(_search_and_gather, search, by_rows, k, sets)
        return in_direction(direction, lambda c, f: muvox.gravnet(c, f, k), found, inputs)

    return Case("gravnet", label(S, M), f"k {k}, F {F}", direction, build, target)


def _search_and_gather(search, gather, k, sets, coords, feats):
    return gather(coords, feats, search.rows(search.call(coords.detach(), k, sets), k, sets))


def gravnet_alone(S: int, M: int, k: int, F: int, target: Target = Target()) -> Case:
    """What is left of gravnet without the search; its peers are given the neighbours."""

    def build(setup: Setup) -> Calls:
        coords, feats = setup.normal(S, M, 4), setup.normal(S, M, F)
        first = torch.arange(S, device=setup.device)[:, None, None] * M
        rows = (muvox.knn(coords, k)[0].clamp(min=0) + first).view(-1, k)
        found = {"gather": partial(peers.gravnet_by_rows, coords, feats, rows)}
        if setup.compile:
            found["gather" + COMPILED] = partial(peers.compiled(peers.gravnet_by_rows), coords, feats, rows)
        return Calls(lambda: muvox.gravnet(coords, feats, k), found, minus=lambda: muvox.knn(coords, k))

    return Case("gravnet", label(S, M), f"k {k}, F {F}, aggregation alone", ALONE, build, target)


def attention(S: int, M: int, A: int, C: int, direction: str) -> Case:
    def build(setup: Setup) -> Calls:
        inputs = [setup.normal(S, M, A), setup.normal(S, M, A), setup.normal(S, M, C)]
        return in_direction(direction, muvox.attention, {"SDPA": peers.sdpa}, inputs)

    return Case("attention", label(S, M), f"{A}/{C}", direction, build)


def pool(S: int, M: int, F: int, direction: str = BOTH) -> Case:
    def build(setup: Setup) -> Calls:
        found = {"mean, max": peers.pool_by_reductions}
        if setup.compile:
            found["mean, max" + COMPILED] = peers.compiled(peers.pool_by_reductions)
        return in_direction(direction, muvox.pool, found, [setup.normal(S, M, F)])

    return Case("pool", label(S, M), f"F {F}", direction, build)


def voxelize(N: int, C: int, grid: tuple, direction: str = BOTH, target: Target = Target()) -> Case:
    S = math.prod(grid)

    def build(setup: Setup) -> Calls:
        index = setup.integers(S, N)
        counts = torch.bincount(index, minlength=S).clamp(min=1)
        found = {"index_add": peers.voxelize_by_index_add, "scatter_reduce": peers.voxelize_by_scatter}
        return in_direction(direction, muvox.voxelize, found, [setup.normal(N, C)], index, counts)

    return Case("voxelize", f"{N:,} → {S:,}", f"C {C}", direction, build, target, torch.float16)


def devoxelize(N: int, C: int, grid: tuple, direction: str = BOTH, target: Target = Target()) -> Case:
    S = math.prod(grid)

    def build(setup: Setup) -> Calls:
        size = torch.tensor(grid, device=setup.device, dtype=torch.float32)
        points = 0.5 + setup.uniform(N, 3) * (size - 1)  # all eight voxels are there
        index, weights = muvox.trilinear_weights(points, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), grid)
        index, weights = index.clamp(min=0).long(), weights.to(setup.dtype)
        found = {"gather": peers.devoxelize_by_gather, "embedding_bag": peers.devoxelize_by_embedding_bag}
        inputs = [setup.normal(S, C), weights]
        ordered = {name: (lambda f, w, peer=peer: peer(f, index, w)) for name, peer in found.items()}
        if setup.compile:
            gather = peers.compiled(peers.devoxelize_by_gather)
            ordered["gather" + COMPILED] = lambda f, w: gather(f, index, w)
        return in_direction(direction, lambda f, w: muvox.devoxelize(f, index, w), ordered, inputs)

    return Case("devoxelize", f"{N:,} ← {S:,}", f"C {C}, 8 corners", direction, build, target, torch.float16)


def cloud(S: int, M: int, name: str, ratio: float) -> Case:
    """A cloud that is hard to search, against the plain one of the same size (all equal: against brute force)."""

    def build(setup: Setup) -> Calls:
        plain, k = setup.normal(S, M, 4), 8
        if name == "all equal":
            coords = torch.ones_like(plain)
            return Calls(partial(muvox.knn, coords, k), {CDIST: partial(peers.cdist_topk, coords, k)})
        if name == "half at 0":
            coords = torch.where(setup.uniform(S, M, 1) < 0.5, 0, plain)
        else:
            coords = torch.where(setup.uniform(S, M, 1) < 0.01, 1e3 * plain, plain)
        return Calls(partial(muvox.knn, coords, k), {PLAIN: partial(muvox.knn, plain, k)})

    return Case("knn", label(S, M), f"d 4, k 8, {name}", FORWARD, build, Target(ratio=ratio))


def ragged_sizes(S: int, largest: int = 4000) -> torch.Tensor:
    """Log-normal around 400 rows, 1 to `largest`; 5 % of the sets are empty. On the host: no size waits for a GPU."""
    random = torch.Generator().manual_seed(SEED)
    sizes = torch.exp(math.log(400) + torch.randn(S, generator=random)).long().clamp(1, largest)
    sizes[torch.randperm(S, generator=random)[: round(0.05 * S)]] = 0
    return sizes


def ragged(op: str, S: int, ratio: float, largest: int = 4000) -> Case:
    """Ragged sets against as many uniform ones with the same Σ M², the number of pairs."""
    sizes = ragged_sizes(S, largest)
    N, M = int(sizes.sum()), max(1, round(math.sqrt(int((sizes**2).sum()) / S)))

    def build(setup: Setup) -> Calls:
        splits = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)]).to(setup.device)
        peer = f"muvox on {label(S, M)}"
        ragged_rows, uniform_rows = setup.normal(N, 4), setup.normal(S, M, 4)
        if op == "knn":
            return Calls(partial(muvox.knn, ragged_rows, 8, splits=splits), {peer: partial(muvox.knn, uniform_rows, 8)})
        ours = forward_backward(lambda c, f: muvox.gravnet(c, f, 8, splits=splits), [ragged_rows, setup.normal(N, 16)])
        uniform = forward_backward(lambda c, f: muvox.gravnet(c, f, 8), [uniform_rows, setup.normal(S, M, 16)])
        return Calls(ours, {peer: uniform})

    options, direction = ("d 4, k 8", FORWARD) if op == "knn" else ("k 8, F 16", BOTH)
    return Case(op, f"{S} of 0–{largest}", f"{options}, ragged", direction, build, Target(ratio=ratio))


def cpu_cases(large: bool = True) -> list[Case]:
    found = [knn(S, M, 4, 8) for S, M in (*CPU_SIZES, CPU_LARGE)[: None if large else -1]]
    found += [gravnet(S, M, 8, 22) for S, M in CPU_SIZES]
    found += [attention(S, M, A, C, direction) for S, M in CPU_SIZES for A, C in ((8, 64), (12, 48))
              for direction in (FORWARD, BOTH)]
    return found + [pool(S, M, 48) for S, M in CPU_SIZES]


def cuda_cases() -> list[Case]:
    found = []
    for S, M, d, k, ms, published in KNN:
        found += [knn(S, M, d, k, FORWARD, Target(ms, published=published)), knn(S, M, d, k, BOTH)]
    found += [cloud(S, M, name, ratio) for S, M in CLOUD_SIZES for name, ratio in CLOUDS]
    found.append(ragged("knn", *RAGGED))
    names = (GATHER, "PyTorch3D, gather", "PyTorch3D, gather" + COMPILED)
    for S, M, k, F, ms, mib, published in GRAVNET:
        target = Target(ms, mib, published=dict(zip(names, published, strict=True)))
        found += [gravnet(S, M, k, F, FORWARD), gravnet(S, M, k, F, BOTH, target)]
    found += [gravnet_alone(*ALONE_SIZE[:4], Target(ALONE_SIZE[4])), ragged("gravnet", *RAGGED)]
    found += [pool(*size, direction) for size in POOL for direction in (FORWARD, BOTH)]
    for case, sizes in ((voxelize, VOXELIZE), (devoxelize, DEVOXELIZE)):
        for N, C, grid, ms, mib, best in sizes:
            found += [case(N, C, grid, FORWARD), case(N, C, grid, BOTH, Target(ms, mib, published={"": best}))]
    return found
