"""What the gradient check runs: the cases, and one entry per operator.

A new operator joins by one `Op` in `OPS`: its function, how to draw its inputs, and a plain double reference.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

import muvox

from . import references

ALL = ("mean", "max", "absmax", "sum")


@dataclass(frozen=True)
class Case:
    """One edge case. Sets have `lengths` rows each; how tensors are laid out and drawn does not depend on the operator.

    points: "distinct" (drawn again until no choice of neighbours or maxima hangs on rounding), "coincident" (all rows
    of a set at one place) or "lattice" (multiples of 1/4, exact in every dtype, so that ties are exact).
    layout: "contiguous", "sliced" (all inputs are columns of one matrix), "transposed" (column stride > 1), "shared"
    (the first input has set stride 0). gradient: "dense", "expanded" (stride 0) or "transposed".
    """

    name: str
    lengths: tuple[int, ...] = (7, 7)
    ragged: bool = False
    k: int = 3
    points: str = "distinct"
    layout: str = "contiguous"
    gradient: str = "dense"
    size: float = 1.0  # scale of the inputs: 1 = regular, else large
    aggregates: tuple[str, ...] = ALL
    wide: bool = False  # feature widths past the kernels' vector and block sizes
    alone: bool = False  # each gradient wanted alone, of each output alone
    mixed: bool = False  # coordinates and weights in float beside features in half or bfloat16
    finite: bool = True  # finite differences in double, wherever no choice hangs on the step
    slack: float = 1.0  # factor on the limit
    options: tuple[str, ...] = ()  # of the operator; the case is for operators that have them all
    zeros: bool = False  # row weights of 0 among the others


CASES = (
    Case("regular", aggregates=("mean", "max")),
    Case("wide", lengths=(20, 20), k=8, wide=True, finite=False),
    Case("k > M", lengths=(3, 3), k=5),
    Case("one row", lengths=(1, 1, 1), k=2),
    Case("empty sets", lengths=(0, 4, 0, 5, 0), ragged=True),
    Case("no rows", lengths=(0, 0)),
    Case("coincident", lengths=(4, 4), k=4, points="coincident"),
    Case("coincident, k > M", lengths=(4, 3), k=6, points="coincident", ragged=True),
    Case("lattice ties", lengths=(12, 12), k=4, points="lattice"),
    Case("ragged", lengths=(3, 1, 8), ragged=True),
    Case("sliced", layout="sliced"),
    Case("transposed", layout="transposed"),
    Case("shared set", layout="shared"),
    Case("stride-0 gradient", gradient="expanded"),
    Case("transposed gradient", gradient="transposed"),
    Case("alone", alone=True),
    Case("float coordinates", mixed=True),
    # Exponents of some hundred: their rounding, a relative one, is that much larger in the exponential.
    Case("large scale", size=8.0, slack=16.0),
    Case("masked", options=("mask",)),
    Case("masked, ragged", lengths=(5, 0, 1, 8), ragged=True, options=("mask",)),
    Case("row weights", options=("row_weights",)),
    Case("row weights of 0", options=("row_weights",), zeros=True, finite=False),
    Case("masked row weights", options=("mask", "row_weights")),
    Case("bias", options=("bias",)),
    Case("masked bias", options=("mask", "bias", "row_weights")),
    Case("exclude self", options=("exclude_self",)),
    Case("radius", options=("max_radius",), k=5),
    Case("radius without self", lengths=(6, 1, 9), ragged=True, options=("exclude_self", "max_radius", "mask")),
    Case("mean by k", options=("mean", "max_radius"), k=5),
    Case("queries", options=("queries",)),
    Case("queries, radius", lengths=(4, 0, 7), ragged=True, options=("queries", "max_radius")),
)


@dataclass
class Inputs:
    """floating: gradients are checked, in the order of the function's arguments; fixed: integers. All are (N, …)."""

    floating: dict[str, Tensor]
    options: dict = field(default_factory=dict)
    fixed: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Op:
    """One operator.

    function: muvox's operator, called with named tensors, `splits` and the options; returns a tuple of outputs.
    draw: inputs for a case, in double. reference: the same outputs from the rows of one set, in plain double torch.
    margin: how far (relatively) any choice of neighbour or maximum is from another one, from the rows of one set.
    precise: the inputs that stay float beside features in half or bfloat16.
    options: what it takes of mask, row_weights, bias, exclude_self, max_radius, mean and queries.
    blank: what a masked row of each output holds; None: outputs have no rows.
    """

    name: str
    function: Callable[..., tuple[Tensor, ...]]
    draw: Callable[[Case, torch.Generator], Inputs]
    reference: Callable[..., tuple[Tensor, ...]]
    margin: Callable[..., float]
    precise: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    blank: tuple[float, ...] | None = None


COLUMNS = ("mask", "row_weights", "bias")  # one number for each row, in float at least
RADIUS = 0.6


def add_options(case: Case, inputs: Inputs, generator: torch.Generator) -> Inputs:
    """Inputs with the options of the case: NaN in masked rows, weights from 1/4 to 2."""
    N = sum(case.lengths)
    if "queries" in case.options:
        inputs.floating["queries"] = points(case, inputs.floating["coords"].shape[1], generator)
    if "bias" in case.options:
        inputs.floating["bias"] = torch.randn(N, 1, dtype=torch.double, generator=generator)
    if "row_weights" in case.options:
        weights = 0.25 + 1.75 * torch.rand(N, 1, dtype=torch.double, generator=generator)
        keep = torch.rand(N, 1, generator=generator) < 0.7 if case.zeros else True
        inputs.floating["row_weights"] = torch.where(torch.as_tensor(keep), weights, 0.0)
    if "mask" in case.options:
        mask = torch.rand(N, 1, generator=generator) < 0.7
        inputs.fixed["mask"] = mask
        inputs.floating = {name: x.masked_fill(~mask, torch.nan) for name, x in inputs.floating.items()}
    values = {"exclude_self": True, "max_radius": RADIUS, "mean": "k"}
    inputs.options |= {name: values[name] for name in case.options if name in values}
    return inputs


def normal(case: Case, width: int, generator: torch.Generator) -> Tensor:
    """(N, width) values: normal, or multiples of 1/2 for a lattice."""
    shape = (sum(case.lengths), width)
    if case.points == "lattice":
        return torch.randint(-2, 3, shape, generator=generator).double() / 2
    return torch.randn(shape, dtype=torch.double, generator=generator)


def points(case: Case, width: int, generator: torch.Generator) -> Tensor:
    """(N, width) coordinates: a cloud, multiples of 1/4 for a lattice, or one place for each set."""
    N = sum(case.lengths)
    if case.points == "lattice":
        return torch.randint(0, 3, (N, width), generator=generator).double() / 4
    if case.points == "coincident":
        one = torch.randn(len(case.lengths), width, dtype=torch.double, generator=generator)
        return one.repeat_interleave(torch.tensor(case.lengths), 0)
    return 0.3 * torch.randn(N, width, dtype=torch.double, generator=generator)


def gap(values: Tensor) -> float:
    """Smallest relative difference between values that follow each other along the last dimension, sorted downwards."""
    above, below = values[..., :-1], values[..., 1:]
    gaps = ((above - below) / above.abs().clamp(min=1e-300)).nan_to_num(torch.inf)  # −inf twice: no choice at all
    return gaps.min().item() if gaps.numel() else torch.inf


def largest_gap(m: Tensor, aggregates: tuple[str, ...], valid: Tensor | None = None) -> float:
    """gap between the largest and the second of m (n, k, F) along k, for max and absmax, among the valid (n, k)."""
    if m.shape[1] < 2:
        return torch.inf
    scores = [m] * ("max" in aggregates) + [m.abs()] * ("absmax" in aggregates)
    if valid is not None:
        scores = [score.masked_fill(~valid[..., None], -torch.inf) for score in scores]
    return min((gap(score.topk(2, 1).values.movedim(1, -1)) for score in scores), default=torch.inf)


def border_gap(distance2: Tensor, max_radius: float | None) -> float:
    """How far any distance is from the radius."""
    if max_radius is None or not distance2.numel():
        return torch.inf
    return (distance2 / max_radius**2 - 1).abs().min().item()


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


def draw_pool(case: Case, generator: torch.Generator) -> Inputs:
    x = normal(case, 19 if case.wide else 5, generator)
    return Inputs({"x": x * case.size**2}, {"aggregates": case.aggregates})


def draw_offset_attention(case: Case, generator: torch.Generator) -> Inputs:
    inputs = draw_attention(case, generator)
    # Its rows with small weights are divided by their sum: scores grow once, not twice, with the size.
    return Inputs(inputs.floating, {"scale": 0.5 / case.size, "eps": 1e-3})


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
        splits = torch.arange(first.shape[0] + 1) * first.shape[1]
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
