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
    """

    name: str
    function: Callable[..., tuple[Tensor, ...]]
    draw: Callable[[Case, torch.Generator], Inputs]
    reference: Callable[..., tuple[Tensor, ...]]
    margin: Callable[..., float]
    precise: tuple[str, ...] = ()


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


def knn_margin(coords: Tensor, *, k: int) -> float:
    """Every rank counts: a swap within the k nearest swaps two outputs. Coincident rows stay at a minimum of d²."""
    distance2 = references.nearest(coords, len(coords))[1][:, : k + 1]
    if k >= len(coords) and not distance2.any():
        return torch.inf
    return gap(distance2.flip(1))


def gravnet_margin(coords: Tensor, feats: Tensor, *, k: int, scale: float, aggregates: tuple[str, ...]) -> float:
    """Which rows are the k nearest, not their order; and who wins. Weights too small to be seen have no say."""
    rows, distance2 = references.nearest(coords, len(coords))
    selection = gap(distance2[:, k - 1 : k + 1].flip(1)) if k < len(coords) else torch.inf
    weights = torch.exp(-scale * distance2[:, :k])
    return min(selection, largest_gap(weights[..., None] * feats[rows[:, :k]], aggregates))


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


def run_knn(**arguments) -> tuple[Tensor, ...]:
    neighbours, distance2, counts = muvox.knn(**arguments, return_counts=True)
    return distance2, neighbours, counts


OPS = {
    op.name: op
    for op in (
        Op("knn", run_knn, draw_knn, references.knn, knn_margin),
        Op("gravnet", lambda **a: (muvox.gravnet(**a),), draw_gravnet, references.gravnet, gravnet_margin, ("coords",)),
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
        ),
        Op(
            "pool",
            lambda **a: (muvox.pool(**a),),
            draw_pool,
            references.pool,
            lambda x, aggregates: largest_gap(x[None], aggregates),
        ),
    )
}
