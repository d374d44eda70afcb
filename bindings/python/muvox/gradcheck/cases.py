"""The cases of the gradient check, what an operator says of itself, and how its inputs are drawn."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

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
    smooth: bool = False  # no choice within the operator: neither maxima nor kinks of an activation


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
    """floating: gradients are checked, in the order of the function's arguments; fixed: integers. All are (N, …).

    shared: gradients are checked too, of tensors without rows, the same for all sets."""

    floating: dict[str, Tensor]
    options: dict = field(default_factory=dict)
    fixed: dict[str, Tensor] = field(default_factory=dict)
    shared: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Op:
    """One operator.

    function: muvox's operator, called with named tensors, `splits` and the options; returns a tuple of outputs.
    draw: inputs for a case, in double. reference: the same outputs from the rows of one set, in plain double torch.
    margin: how far (relatively) any choice of neighbour or maximum is from another one, from the rows of one set.
    precise: the inputs that stay float beside features in half or bfloat16.
    options: what it takes of mask, row_weights, bias, exclude_self, max_radius, mean and queries.
    blank: what a masked row of each output holds; None: outputs have no rows.
    rounds: in half and bfloat16, results on which choices and gradients hang are rounded to them within the operator.
    device: where the function runs; the reference is on the CPU.
    """

    name: str
    function: Callable[..., tuple[Tensor, ...]]
    draw: Callable[[Case, torch.Generator], Inputs]
    reference: Callable[..., tuple[Tensor, ...]]
    margin: Callable[..., float]
    precise: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    blank: tuple[float, ...] | None = None
    rounds: bool = False
    device: str = "cpu"


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
