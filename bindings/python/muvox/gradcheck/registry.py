"""What the gradient check runs: one entry per operator.

A new operator joins by one `Op` in `OPS`: its function, how to draw its inputs, and a plain double reference.
"""

import torch
from torch import Tensor

import muvox

from . import references
from .cases import ALL, CASES, Case, Inputs, Op, border_gap, gap, largest_gap, normal, points


def knn_margin(coords: Tensor, queries: Tensor | None = None, *, k: int, max_radius=None, **options) -> float:
    """Every rank counts: a swap within the k nearest swaps two outputs. Coincident rows stay at a minimum of d²."""
    if options or queries is not None or max_radius is not None:
        _, distance2, found = references.search(coords, len(coords), queries=queries, **options)
        seen = distance2.masked_fill(~found, torch.inf)
        return min(gap(seen[:, : k + 1].flip(1)), border_gap(distance2, max_radius))
    distance2 = references.nearest(coords, len(coords))[1][:, : k + 1]
    if k >= len(coords) and not distance2.any():
        return torch.inf
    return gap(distance2.flip(1))


def gravnet_margin(
    coords: Tensor,
    feats: Tensor,
    row_weights: Tensor | None = None,
    *,
    k: int,
    scale: float,
    aggregates: tuple[str, ...],
    exclude_self: bool = False,
    max_radius: float | None = None,
    **options,
) -> float:
    """Which rows are the k nearest, not their order; and who wins. Weights too small to be seen have no say."""
    rows, distance2, found = references.search(coords, len(coords), exclude_self, max_radius)
    seen = distance2.masked_fill(~found, torch.inf)
    selection = gap(seen[:, k - 1 : k + 1].flip(1)) if k < len(coords) else torch.inf
    weights = torch.exp(-scale * distance2[:, :k])
    feats = feats if row_weights is None else row_weights * feats
    winners = largest_gap(weights[..., None] * feats[rows[:, :k]], aggregates, found[:, :k])
    return min(selection, winners, border_gap(distance2, max_radius))


def aggregate_margin(feats: Tensor, weights: Tensor, neighbours: Tensor, *, aggregates: tuple[str, ...]) -> float:
    m = weights[..., None] * feats[neighbours.long().clamp(min=0)]
    return largest_gap(m, aggregates, neighbours >= 0)


def draw_knn(case: Case, generator: torch.Generator) -> Inputs:
    coords = points(case, 11 if case.wide else 3, generator)
    return Inputs({"coords": coords * case.size**2}, {"k": case.k})


def draw_gravnet(case: Case, generator: torch.Generator) -> Inputs:
    coords, feats = points(case, 4, generator), normal(case, 19 if case.wide else 5, generator)
    options = {"k": case.k, "scale": 10.0 * case.size, "aggregates": case.aggregates}
    # Rows come closer as the scale grows, so that some weights still matter.
    return Inputs({"coords": coords * case.size**-0.25, "feats": feats * case.size}, options)


def draw_aggregate(case: Case, generator: torch.Generator) -> Inputs:
    """Distinct neighbours in any order; the second place of each set's first row is empty, as are those past M."""
    feats, weights = normal(case, 19 if case.wide else 5, generator), normal(case, case.k, generator)
    if case.points == "coincident":
        weights = torch.ones_like(weights)
    rows = []
    for M in case.lengths:
        order = torch.stack([torch.randperm(M, generator=generator) for _ in range(M)]) if M else torch.zeros(0, 0)
        chosen = torch.nn.functional.pad(order[:, : case.k], (0, max(0, case.k - M)), value=-1).int()
        chosen[:1, 1:2] = -1
        rows.append(chosen)
    inputs = {"feats": feats * case.size, "weights": weights * case.size}
    return Inputs(inputs, {"aggregates": case.aggregates}, {"neighbours": torch.cat(rows)})


def draw_attention(case: Case, generator: torch.Generator) -> Inputs:
    A, C = (12, 19) if case.wide else (3, 4)
    q, k, v = (normal(case, width, generator) for width in (A, A, C))
    return Inputs({"q": q * case.size, "k": k * case.size, "v": v}, {"scale": 0.5} if case.alone else {})


def draw_offset_attention(case: Case, generator: torch.Generator) -> Inputs:
    inputs = draw_attention(case, generator)
    # Its rows with small weights are divided by their sum: scores grow once, not twice, with the size.
    return Inputs(inputs.floating, {"scale": 0.5 / case.size, "eps": 1e-3})


LAYERS = tuple(f"{layer}_{part}" for layer in ("q", "k", "v", "out") for part in ("weight", "bias"))
SMOOTH = ("linear", "sigmoid", "swish", "mish")
KINKED = ("relu", "selu")


def draw_neighbour_attention(case: Case, generator: torch.Generator, offset: bool) -> Inputs:
    """One activation in one case, the next in the next.

    Equal rows of features give equal results only without the layers' say: on a lattice the last of them is 0."""
    A, F = (12, 19) if case.wide else (2, 3)
    inputs = {"coords": points(case, 4, generator), "feats": normal(case, F, generator) * case.size}
    shapes = (A, F), (A,), (A, F), (A,), (F, F), (F,), (F, F), (F,)
    layers = {name: torch.randn(s, dtype=torch.double, generator=generator) for name, s in zip(LAYERS, shapes)}
    for name in layers:
        layers[name] *= F**-0.5
        if case.points == "lattice" and name.startswith("out"):
            layers[name].zero_()
        if name[0] in "qk":  # scores grow by its root with the size, not by its square
            layers[name] *= case.size**-0.75
    activations = SMOOTH if case.smooth else SMOOTH + KINKED
    number = [c.name for c in CASES].index(case.name)
    aggregates = tuple(a for a in case.aggregates if not case.smooth or a in ("mean", "sum"))
    options = {"k": case.k, "aggregates": aggregates, "activation": activations[number % len(activations)]}
    return Inputs(inputs, options | {"offset": offset, "scale": 10.0}, shared=layers)


def neighbour_attention_margin(
    coords: Tensor, feats: Tensor, *, k: int, aggregates: tuple[str, ...], activation: str, **options
) -> float:
    """Which rows are the k nearest, who wins among their outputs, and how far any is from a kink of the activation."""
    distance2 = references.nearest(coords, len(coords))[1]
    selection = gap(distance2[:, k - 1 : k + 1].flip(1)) if k < len(coords) else torch.inf
    z, y = references.attended(coords, feats, k=k, activation=activation, **options)
    kink = (z.abs().min() / z.abs().max()).item() if activation in KINKED else torch.inf
    return min(selection, kink, largest_gap(y, aggregates))


def run_neighbour_attention(coords, feats, *, k, splits, **arguments) -> tuple[Tensor, ...]:
    layers = [arguments.pop(name) for name in LAYERS]
    return (muvox.neighbour_attention(coords, feats, k, layers, splits=splits, **arguments),)


def neighbour_attention(name: str, offset: bool) -> Op:
    return Op(
        name,
        run_neighbour_attention,
        lambda case, generator: draw_neighbour_attention(case, generator, offset),
        references.neighbour_attention,
        neighbour_attention_margin,
        ("coords",),
        options=("mask",),
        blank=(0,),
        rounds=True,
    )


def draw_pool(case: Case, generator: torch.Generator) -> Inputs:
    x = normal(case, 19 if case.wide else 5, generator)
    return Inputs({"x": x * case.size**2}, {"aggregates": case.aggregates})


def within_sets(case: Case, width: int, past: int, generator: torch.Generator) -> Tensor:
    """(N, width) rows of the set, −1 and `past` ones after its last among them."""
    sets = [torch.randint(-1, max(M + past, 0), (M, width), generator=generator) for M in case.lengths if M]
    return torch.cat(sets) if sets else torch.zeros(0, width, dtype=torch.int64)


def draw_voxelize(case: Case, generator: torch.Generator) -> Inputs:
    """As many voxels in a set as it has rows; some rows in none, some voxels with counts of 0."""
    index = within_sets(case, 1, 1, generator)
    counts = torch.randint(0, 4, (sum(case.lengths), 1), generator=generator)
    feats = normal(case, 19 if case.wide else 5, generator) * case.size**2
    return Inputs({"feats": feats}, fixed={"index": index, "counts": counts})


def draw_devoxelize(case: Case, generator: torch.Generator) -> Inputs:
    index = within_sets(case, 8, 0, generator)
    feats = normal(case, 19 if case.wide else 5, generator) * case.size
    return Inputs({"feats": feats, "weights": normal(case, 8, generator)}, fixed={"index": index.int()})


def draw_trilinear_weights(case: Case, generator: torch.Generator) -> Inputs:
    options = {"origin": (-0.9, -0.4, -0.2), "voxel_size": (0.3, 0.21, 0.4), "shape": (6, 4, 1)}
    return Inputs({"points": points(case, 3, generator)}, options)


def trilinear_margin(points: Tensor, *, origin, voxel_size, shape) -> float:
    """How far any point is from where the voxels around it change."""
    u = (points - torch.tensor(origin, dtype=points.dtype)) / torch.tensor(voxel_size, dtype=points.dtype) - 0.5
    return (u - u.round()).abs().min().item()


def all_rows(splits: Tensor | None, **tensors: Tensor) -> tuple[Tensor, list[Tensor]]:
    """(N, 1) number of the first row of each row's set, its end, and the tensors as (N, …)."""
    first = next(iter(tensors.values()))
    if splits is None:
        splits = torch.arange(first.shape[0] + 1, device=first.device) * first.shape[1]
        tensors = {name: t.flatten(0, 1) for name, t in tensors.items()}
    begins = torch.repeat_interleave(splits[:-1], splits.diff())[:, None]
    ends = torch.repeat_interleave(splits[1:], splits.diff())[:, None]
    return begins, ends, list(tensors.values())


def run_voxelize(feats, index, counts, splits) -> tuple[Tensor, ...]:
    """With voxels numbered on from set to set; what is past a set's last voxel is past all of them."""
    begins, ends, (feats, index, counts) = all_rows(splits, feats=feats, index=index, counts=counts)
    index = torch.where(index < 0, -1, index + begins)
    index = torch.where(index >= ends, len(feats) + 3, index)
    return (muvox.voxelize(feats, index.squeeze(-1), counts.squeeze(-1)),)


def run_devoxelize(feats, weights, index, splits) -> tuple[Tensor, ...]:
    begins, _, (feats, weights, index) = all_rows(splits, feats=feats, weights=weights, index=index)
    return (muvox.devoxelize(feats, torch.where(index < 0, -1, index + begins).int(), weights),)


def run_trilinear_weights(points, splits, **options) -> tuple[Tensor, ...]:
    _, _, (points,) = all_rows(splits, points=points)
    index, weights = muvox.trilinear_weights(points, **options)
    return weights, index


def run_knn(**arguments) -> tuple[Tensor, ...]:
    if "queries" in arguments:
        arguments["query_splits"] = arguments["splits"]
    neighbours, distance2, counts = muvox.knn(**arguments, return_counts=True)
    return distance2, neighbours, counts


OPS = {
    op.name: op
    for op in (
        Op(
            "knn",
            run_knn,
            draw_knn,
            references.knn,
            knn_margin,
            options=("mask", "exclude_self", "max_radius", "queries"),
            blank=(torch.inf, -1, 0),
        ),
        Op(
            "gravnet",
            lambda **a: (muvox.gravnet(**a),),
            draw_gravnet,
            references.gravnet,
            gravnet_margin,
            ("coords",),
            options=("mask", "row_weights", "exclude_self", "max_radius", "mean"),
            blank=(0,),
        ),
        Op(
            "aggregate",
            lambda **a: (muvox.aggregate(**a),),
            draw_aggregate,
            references.aggregate,
            aggregate_margin,
            ("weights",),
        ),
        Op(
            "attention",
            lambda **a: muvox.attention(**a, return_lse=True),
            draw_attention,
            references.attention,
            lambda **a: torch.inf,
            options=("mask", "row_weights", "bias"),
            blank=(0, -torch.inf),
        ),
        Op(
            "offset_attention",
            lambda **a: (muvox.offset_attention(**a),),
            draw_offset_attention,
            references.offset_attention,
            lambda **a: torch.inf,
            options=("mask",),
            blank=(0,),
        ),
        neighbour_attention("neighbour_attention", False),
        neighbour_attention("neighbour_attention, offset", True),
        Op(
            "pool",
            lambda **a: (muvox.pool(**a),),
            draw_pool,
            references.pool,
            lambda x, aggregates, **a: largest_gap(x[None], aggregates),
            options=("mask", "row_weights"),
        ),
        Op("voxelize", run_voxelize, draw_voxelize, references.voxelize, lambda **a: torch.inf),
        Op("devoxelize", run_devoxelize, draw_devoxelize, references.devoxelize, lambda **a: torch.inf, ("weights",)),
        Op(
            "trilinear_weights",
            run_trilinear_weights,
            draw_trilinear_weights,
            references.trilinear_weights,
            trilinear_margin,
        ),
    )
}
