"""Plain double references of every operator, one set at a time, written as the formulas read.

Autograd through them gives the reference gradient. Ties are explicit: neighbours go to the lower row (a stable sort),
maxima to the first place (the lowest rank or row), and the sign of zero is zero, so the subgradient is defined too.
"""

import torch
from torch import Tensor


def first_largest(score: Tensor, dim: int) -> Tensor:
    """Index of the largest score along dim, kept as a dimension of size 1; equal ones go to the first."""
    return score.detach().argmax(dim, keepdim=True)  # documented to return the first of equal values


def combine(m: Tensor, valid: Tensor, aggregates: tuple[str, ...]) -> Tensor:
    """Aggregate m (n, k, F) over its places k where valid (n, k) holds: (n, len(aggregates) · F); 0 where none does."""
    n, k, F = m.shape
    m = torch.where(valid[..., None], m, 0.0)
    count = valid.sum(1)
    if k == 0:
        return torch.cat([m.sum(1)] * len(aggregates), 1)

    def picked(score: Tensor) -> Tensor:
        score = score.masked_fill(~valid[..., None], -torch.inf)
        return m.gather(1, first_largest(score, 1)).squeeze(1) * (count > 0)[:, None]

    parts = {
        "sum": lambda: m.sum(1),
        "mean": lambda: m.sum(1) / count.clamp(min=1)[:, None],
        "max": lambda: picked(m),
        "absmax": lambda: picked(m.abs()).abs(),
    }
    return torch.cat([parts[name]() for name in aggregates], 1)


def nearest(coords: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Rows (M, min(k, M)) of the nearest first, ties to the lower row, and their squared distances."""
    distance2 = (coords[:, None] - coords[None]).square().sum(-1)
    order = distance2.detach().sort(dim=1, stable=True).indices[:, :k]  # NaN after +inf
    return order, distance2.gather(1, order)


def knn(coords: Tensor, *, k: int) -> tuple[Tensor, ...]:
    """coords (M, d): distance2 (M, k), neighbours (M, k), counts (M); −1 and +inf where there is no neighbour."""
    M = len(coords)
    rows, distance2 = nearest(coords, k)
    missing = (0, k - rows.shape[1])
    neighbours = torch.nn.functional.pad(rows, missing, value=-1).int()
    counts = torch.full((M,), min(k, M), dtype=torch.int32)
    return torch.nn.functional.pad(distance2, missing, value=torch.inf), neighbours, counts


def gravnet(coords: Tensor, feats: Tensor, *, k: int, scale: float, aggregates: tuple[str, ...]) -> tuple[Tensor, ...]:
    """coords (M, d), feats (M, F): Σ, max, … of exp(−scale d²) · feats over the k nearest rows."""
    rows, distance2 = nearest(coords, k)
    m = torch.exp(-scale * distance2)[..., None] * feats[rows]
    return (combine(m, torch.ones_like(rows, dtype=torch.bool), aggregates),)


def aggregate(feats: Tensor, weights: Tensor, neighbours: Tensor, *, aggregates: tuple[str, ...]) -> tuple[Tensor, ...]:
    """feats (M, F), weights and neighbours (M, k): Σ, max, … of weights · feats over the neighbours ≥ 0."""
    m = weights[..., None] * feats[neighbours.long().clamp(min=0)]
    return (combine(m, neighbours >= 0, aggregates),)


def attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> tuple[Tensor, ...]:
    """q, k (M, A), v (M, C): softmax(scale q kᵀ) v and lse (M)."""
    scores = q @ k.T * (q.shape[1] ** -0.5 if scale is None else scale)
    return scores.softmax(1) @ v, scores.logsumexp(1)


def pool(x: Tensor, *, aggregates: tuple[str, ...]) -> tuple[Tensor, ...]:
    """x (M, F): Σ, max, … over all rows, (1, n · F)."""
    return (combine(x[None], torch.ones(1, len(x), dtype=torch.bool), aggregates),)


def set_by_set(reference, tensors: dict[str, Tensor], lengths: list[int], options: dict) -> tuple[Tensor, ...]:
    """The reference on every set of tensors (N, …) that hold lengths[s] rows of set s after each other."""
    parts = [t.split(lengths) for t in tensors.values()]
    outputs = [reference(**dict(zip(tensors, rows)), **options) for rows in zip(*parts)]
    return tuple(torch.cat(pieces) for pieces in zip(*outputs))
