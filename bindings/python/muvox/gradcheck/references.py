"""Plain double references of every operator, one set at a time, written as the formulas read.

Autograd through them gives the reference gradient. Ties are explicit: neighbours go to the lower row (a stable sort),
maxima to the first place (the lowest rank or row), and the sign of zero is zero, so the subgradient is defined too.
"""

import torch
from torch import Tensor
from torch.nn import functional


def first_largest(score: Tensor, dim: int) -> Tensor:
    """Index of the largest score along dim, kept as a dimension of size 1; equal ones go to the first."""
    return score.detach().argmax(dim, keepdim=True)  # documented to return the first of equal values


def combine(m: Tensor, valid: Tensor, aggregates: tuple[str, ...], weights: Tensor | None = None) -> Tensor:
    """Aggregate m (n, k, F) over its places k where valid (n, k) holds: (n, len(aggregates) · F); 0 where none does.

    weights (n, k): of mean and sum alone."""
    n, k, F = m.shape
    m = torch.where(valid[..., None], m, 0.0)
    count = valid.sum(1)
    weights = valid.to(m.dtype) if weights is None else weights
    total = weights.sum(1, keepdim=True)
    safe = torch.where(total == 0, 1.0, total)
    if k == 0:
        return torch.cat([m.sum(1)] * len(aggregates), 1)

    def picked(score: Tensor) -> Tensor:
        score = score.masked_fill(~valid[..., None], -torch.inf)
        return m.gather(1, first_largest(score, 1)).squeeze(1) * (count > 0)[:, None]

    parts = {
        "sum": lambda: (weights[..., None] * m).sum(1),
        "mean": lambda: (weights[..., None] * m).sum(1) / safe,
        "max": lambda: picked(m),
        "absmax": lambda: picked(m.abs()).abs(),
    }
    return torch.cat([parts[name]() for name in aggregates], 1)


def nearest(coords: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Rows (M, min(k, M)) of the nearest first, ties to the lower row, and their squared distances."""
    distance2 = (coords[:, None] - coords[None]).square().sum(-1)
    order = distance2.detach().sort(dim=1, stable=True).indices[:, :k]  # NaN after +inf
    return order, distance2.gather(1, order)


def search(
    coords: Tensor, k: int, exclude_self: bool = False, max_radius: float | None = None, queries: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """As nearest, with the options of knn, and which of the rows are neighbours: the others come last."""
    if not exclude_self and max_radius is None and queries is None:
        rows, distance2 = nearest(coords, k)
        return rows, distance2, torch.ones_like(rows, dtype=torch.bool)
    distance2 = ((coords if queries is None else queries)[:, None] - coords[None]).square().sum(-1)
    out = torch.zeros_like(distance2, dtype=torch.bool)
    if exclude_self:
        out.fill_diagonal_(True)
    if max_radius is not None:
        out |= ~(distance2 <= max_radius**2)
    rows = distance2.detach().masked_fill(out, torch.inf).sort(dim=1, stable=True).indices[:, :k]
    return rows, distance2.gather(1, rows), ~out.gather(1, rows)


def knn(coords: Tensor, queries: Tensor | None = None, *, k: int, **options) -> tuple[Tensor, ...]:
    """coords (M, d): distance2 (M, k), neighbours (M, k), counts (M); −1 and +inf where there is no neighbour."""
    rows, distance2, found = search(coords, k, queries=queries, **options)
    missing = (0, k - rows.shape[1])
    neighbours = torch.nn.functional.pad(torch.where(found, rows, -1), missing, value=-1).int()
    distance2 = torch.nn.functional.pad(torch.where(found, distance2, torch.inf), missing, value=torch.inf)
    return distance2, neighbours, found.sum(1).int()


def gravnet(
    coords: Tensor,
    feats: Tensor,
    row_weights: Tensor | None = None,
    *,
    k: int,
    scale: float,
    aggregates: tuple[str, ...],
    mean: str = "count",
    **options,
) -> tuple[Tensor, ...]:
    """coords (M, d), feats (M, F): Σ, max, … of exp(−scale d²) · row_weights · feats over the k nearest rows."""
    rows, distance2, found = search(coords, k, **options)
    m = torch.exp(-scale * distance2)[..., None] * (feats if row_weights is None else row_weights * feats)[rows]
    out = combine(m, found, aggregates)
    if mean == "k":
        F = feats.shape[1]
        count = found.sum(1, keepdim=True).to(out.dtype)
        by_k = [count / k if name == "mean" else torch.ones_like(count) for name in aggregates]
        out = out * torch.cat([share.expand(-1, F) for share in by_k], 1)
    return (out,)


def aggregate(feats: Tensor, weights: Tensor, neighbours: Tensor, *, aggregates: tuple[str, ...]) -> tuple[Tensor, ...]:
    """feats (M, F), weights and neighbours (M, k): Σ, max, … of weights · feats over the neighbours ≥ 0."""
    m = weights[..., None] * feats[neighbours.long().clamp(min=0)]
    return (combine(m, neighbours >= 0, aggregates),)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    row_weights: Tensor | None = None,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """q, k (M, A), v (M, C), bias, row_weights (M, 1): softmax(scale q kᵀ + bias) v, weighted, and lse (M)."""
    scores = q @ k.T * (q.shape[1] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + bias.T
    if row_weights is None:
        return scores.softmax(1) @ v, scores.logsumexp(1)
    largest = scores.detach().amax(1, keepdim=True) if len(q) else scores[:, :1]
    weights = torch.exp(scores - largest) * row_weights.T
    total = weights.sum(1, keepdim=True)
    return weights @ v / torch.where(total == 0, 1.0, total), (largest + total.log()).squeeze(1)


def offset_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, eps: float) -> tuple[Tensor, ...]:
    """q, k (M, A), v (M, C): the softmax of scale q kᵀ over the queries, each row divided by its sum + eps, times v."""
    weights = (scale * q @ k.T).softmax(0)
    return (weights @ v / (weights.sum(1, keepdim=True) + eps),)


ACTIVATIONS = {
    "linear": lambda z: z,
    "relu": torch.relu,
    "selu": functional.selu,
    "sigmoid": torch.sigmoid,
    "swish": functional.silu,
    "mish": functional.mish,
}


def attended(
    coords: Tensor,
    feats: Tensor,
    *,
    k: int,
    scale: float,
    activation: str,
    offset: bool,
    q_weight: Tensor,
    q_bias: Tensor,
    k_weight: Tensor,
    k_bias: Tensor,
    v_weight: Tensor,
    v_bias: Tensor,
    out_weight: Tensor,
    out_bias: Tensor,
) -> tuple[Tensor, Tensor]:
    """z (M, n, F), what the activation takes, and y (M, n, F), what the attention gives to each of the n neighbours."""
    rows, distance2 = nearest(coords, k)
    f = torch.exp(-scale * distance2)[..., None] * feats[rows]
    q, key, v = f @ q_weight.T + q_bias, f @ k_weight.T + k_bias, f @ v_weight.T + v_bias
    if offset:
        weights = (q @ key.mT).softmax(1)
        attention = f - weights @ v / (weights.sum(2, keepdim=True) + 1e-17)
    else:
        attention = (q @ key.mT / q.shape[-1] ** 0.5).softmax(2) @ v
    z = attention @ out_weight.T + out_bias
    return z, f + ACTIVATIONS[activation](z)


def neighbour_attention(
    coords: Tensor, feats: Tensor, *, aggregates: tuple[str, ...], **options
) -> tuple[Tensor, ...]:
    """coords (M, d), feats (M, F): LUMIN's attention over the k nearest rows of each, then Σ, max, … over them."""
    _, y = attended(coords, feats, **options)
    return (combine(y, torch.ones_like(y[..., 0], dtype=torch.bool), aggregates),)


def pool(x: Tensor, row_weights: Tensor | None = None, *, aggregates: tuple[str, ...]) -> tuple[Tensor, ...]:
    """x (M, F), row_weights (M, 1): Σ, max, … over all rows, (1, n · F)."""
    weights = None if row_weights is None else row_weights.T
    return (combine(x[None], torch.ones(1, len(x), dtype=torch.bool), aggregates, weights),)


def voxelize(feats: Tensor, index: Tensor, counts: Tensor) -> tuple[Tensor, ...]:
    """feats (M, C), index and counts (M, 1): Σ feats / counts of the rows with each index, 0 for counts below 1."""
    picked = (index.T == torch.arange(len(feats))[:, None]).to(feats.dtype)
    return (torch.where(counts > 0, picked @ feats / counts.clamp(min=1), 0.0),)


def devoxelize(feats: Tensor, weights: Tensor, index: Tensor) -> tuple[Tensor, ...]:
    """feats (M, C), weights and index (M, 8): Σ weights · feats over the index that are rows."""
    inside = (index >= 0) & (index < len(feats))
    m = weights[..., None] * feats[torch.where(inside, index, 0).long()]
    return (torch.where(inside[..., None], m, 0.0).sum(1),)


def trilinear_weights(points: Tensor, *, origin, voxel_size, shape) -> tuple[Tensor, ...]:
    """points (M, 3): weights and index (M, 8) of the voxels around each."""
    u = (points - torch.tensor(origin, dtype=points.dtype)) / torch.tensor(voxel_size, dtype=points.dtype) - 0.5
    low = u.detach().floor()
    weights, index, inside = [], [], []
    for corner in range(8):
        up = torch.tensor([corner >> 2, corner >> 1 & 1, corner & 1])
        i = low.long() + up
        weights.append(torch.where(up > 0, u - low, 1 - (u - low)).prod(1))
        index.append((i[:, 0] * shape[1] + i[:, 1]) * shape[2] + i[:, 2])
        inside.append(((i >= 0) & (i < torch.tensor(shape))).all(1))
    weights, index, inside = (torch.stack(parts, 1) for parts in (weights, index, inside))
    return torch.where(inside, weights, 0.0), torch.where(inside, index, -1).int()


def set_by_set(reference, tensors: dict[str, Tensor], lengths: list[int], options: dict, blank=None):
    """The reference on every set of tensors (N, …) that hold lengths[s] rows of set s after each other.

    A `mask` (N, 1) among the tensors takes rows out of their set; their rows of output n hold blank[n], and integers of
    the others count the rows of the whole set. blank = None: outputs have no rows."""
    parts = [t.split(lengths) for t in tensors.values()]
    outputs = []
    for rows in zip(*parts):
        named = dict(zip(tensors, rows))
        mask = named.pop("mask", None)
        if mask is None:
            outputs.append(reference(**named, **options))
            continue
        kept = mask.squeeze(-1).nonzero().squeeze(-1)
        short = reference(**{name: t[kept] for name, t in named.items()}, **options)
        if blank is not None:
            short = [put_back(y, kept, len(mask), nothing) for y, nothing in zip(short, blank)]
        outputs.append(short)
    return tuple(torch.cat(pieces) for pieces in zip(*outputs))


def put_back(y: Tensor, kept: Tensor, rows: int, nothing: float) -> Tensor:
    """y (len(kept), …) as rows `kept` of (rows, …), the others filled; row numbers in it (nothing = −1) follow."""
    if nothing == -1 and len(kept):
        y = torch.where(y >= 0, kept[y.long().clamp(min=0)].to(y.dtype), -1)
    whole = torch.full((rows, *y.shape[1:]), nothing, dtype=y.dtype)
    return whole.index_copy(0, kept, y)
