"""What muvox is measured against: compositions of stock PyTorch, and the searches of other libraries."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

CDIST = "cdist + topk"


@cache
def importable(module: str) -> bool:
    """Whether a library is here and loads: one built for another torch is installed and does not."""
    try:
        importlib.import_module(module)
    except (ImportError, OSError):
        return False
    return True


@dataclass(frozen=True)
class Search:
    """A library's k nearest rows. `call(coords, k, sets)` is what is timed, all in whatever form the library has them;
    `rows` makes row numbers through all sets of its result, (N, k), and `distance2` picks the distances, if they can be
    differentiated."""

    module: str
    call: Callable
    rows: Callable
    distance2: Callable | None = None


class Sets:
    """Uniform sets in the forms that libraries want, made before anything is timed."""

    def __init__(self, S: int, M: int, device: torch.device):
        self.count, self.size = S, M
        self.splits = torch.arange(S + 1, device=device) * M
        self.of_row = torch.arange(S, device=device).repeat_interleave(M)


def _pytorch3d(coords, k, sets):
    from pytorch3d.ops import knn_points

    return knn_points(coords, coords, K=k)


def _pyg_lib(coords, k, sets):
    import pyg_lib

    rows = coords.flatten(0, 1)
    return pyg_lib.ops.knn(rows, rows, k, sets.splits, sets.splits)


def _torch_cluster(coords, k, sets):
    from torch_cluster import knn

    rows = coords.flatten(0, 1)
    return knn(rows, rows, k, sets.of_row, sets.of_row, batch_size=sets.count)


def _fast_graph_compute(coords, k, sets):
    from fastgraphcompute import binned_select_knn

    return binned_select_knn(k, coords.flatten(0, 1), sets.splits)


def _keops(coords, k, sets):
    from pykeops.torch import LazyTensor

    difference = LazyTensor(coords[:, :, None, :].contiguous()) - LazyTensor(coords[:, None, :, :].contiguous())
    return (difference**2).sum(-1).argKmin(k, dim=2)


def _through_all_sets(index, k, sets):
    return (index.long() + sets.splits[:-1, None, None]).reshape(-1, k)


def _of_edges(edges, k, sets):
    return edges[1].view(-1, k)


SEARCHES = {
    "PyTorch3D": Search("pytorch3d.ops", _pytorch3d, lambda got, k, sets: _through_all_sets(got.idx, k, sets),
                        lambda got: got.dists),
    "pyg-lib": Search("pyg_lib", _pyg_lib, _of_edges),
    "torch_cluster": Search("torch_cluster", _torch_cluster, _of_edges),
    "FastGraphCompute": Search("fastgraphcompute", _fast_graph_compute, lambda got, k, sets: got[0].long(),
                               lambda got: got[1]),
    "KeOps": Search("pykeops.torch", _keops, _through_all_sets),
}


def searches() -> dict[str, Search]:
    """Those that can be imported here."""
    return {name: search for name, search in SEARCHES.items() if importable(search.module)}


def missing() -> list[str]:
    return [name for name, search in SEARCHES.items() if not importable(search.module)]


def kdtree(coords: torch.Tensor, k: int) -> None:
    """scipy's tree, one query of all rows for each set, on all threads."""
    from scipy.spatial import cKDTree

    for rows in coords.float().numpy():
        cKDTree(rows).query(rows, k, workers=torch.get_num_threads())


def cdist_topk(coords: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """k nearest rows by the full distance matrix, as LUMIN-like code does."""
    distance = torch.cdist(coords, coords)
    return distance.topk(k, largest=False, sorted=True)


def gravnet_by_cdist(coords: torch.Tensor, feats: torch.Tensor, k: int) -> torch.Tensor:
    """GravNet's aggregation by cdist, topk and a gather, differentiable through cdist."""
    (S, M, F), (distance, index) = feats.shape, cdist_topk(coords, k)
    near = feats.gather(1, index.view(S, M * k, 1).expand(-1, -1, F)).view(S, M, k, F)
    message = near * torch.exp(-10 * distance**2)[..., None]
    return torch.cat([message.mean(2), message.amax(2)], -1)


def gravnet_by_rows(coords: torch.Tensor, feats: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The same once the neighbours are known: rows (N, k) through all sets."""
    coords, feats = coords.flatten(0, 1), feats.flatten(0, 1)
    near = coords.index_select(0, rows.flatten()).view(*rows.shape, -1)
    weight = torch.exp(-10 * ((coords[:, None] - near) ** 2).sum(-1))
    message = feats.index_select(0, rows.flatten()).view(*rows.shape, -1) * weight[..., None]
    return torch.cat([message.mean(1), message.amax(1)], -1)


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def pool_by_reductions(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x.mean(1), x.max(1).values], -1)


def voxelize_by_index_add(feats: torch.Tensor, index: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    return feats.new_zeros(len(counts), feats.shape[1]).index_add(0, index, feats) / counts[:, None]


def voxelize_by_scatter(feats: torch.Tensor, index: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    empty = feats.new_zeros(len(counts), feats.shape[1])
    return empty.scatter_reduce(0, index[:, None].expand_as(feats), feats, "mean", include_self=False)


def devoxelize_by_gather(feats: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    near = feats.index_select(0, index.flatten()).view(*index.shape, -1)
    return (near * weights[..., None]).sum(1)


def devoxelize_by_embedding_bag(feats: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.embedding_bag(index, feats, mode="sum", per_sample_weights=weights)


def compiled(function: Callable) -> Callable:
    """Through torch.compile, for the sizes of this case alone: after eight it would run uncompiled without a word."""
    torch.compiler.reset()
    return torch.compile(function, dynamic=False)
