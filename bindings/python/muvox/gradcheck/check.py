"""The check of one operator in one case and dtype.

Outputs and gradients, at the inputs as the dtype holds them, are compared with the plain double reference. An error is
counted in ulps of the dtype at the largest value of the tensor concerned: |got − right| / (eps · max |right|). A tensor
of another dtype than the features (a float lse, distance or coordinate beside half) is held to its own dtype's limit;
its error enters the table as the same share of the limit.

| dtype    | limit | why                                                                                        |
| -------- | ----- | ------------------------------------------------------------------------------------------ |
| double   | 64    | some ten roundings in a row, an exponential among them, and g·v − g·out cancels            |
| float    | 64    | the same                                                                                   |
| half     | 4     | arithmetic in float, one rounding (1/2), and attention's backward reads its rounded output |
| bfloat16 | 4     | the same                                                                                   |

Over many seeds the worst are half of these; a gradient wrong by a thousandth is at 8000 in float.
A case may multiply the limit of float and double (`Case.slack`), and it is doubled in half and bfloat16 for an operator
that rounds inner results to them (`Op.rounds`). Every backward runs twice and must give the same bits.
In double, torch.autograd.gradcheck compares with finite differences too (nondet_tol = 0), where no choice hangs on the
step.
"""

import contextlib
import math
import time
import zlib
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

from . import references
from .cases import COLUMNS, Case, Inputs, Op, add_options

DTYPES = {"double": torch.double, "float": torch.float, "half": torch.half, "bfloat16": torch.bfloat16}
LIMITS = {torch.double: 64.0, torch.float: 64.0, torch.half: 4.0, torch.bfloat16: 4.0}
STABLE = 1e-3  # relative margin that no finite difference crosses
RESOLVED = 2e-5  # relative margin that no rounding of float arithmetic crosses
ROUNDED = 4e-3  # relative margin that no rounding of a result to half crosses


@dataclass
class Result:
    """A row of the table: the largest error and its limit in ulps, and what failed ("" = nothing)."""

    op: str
    case: str
    dtype: str
    error: float
    limit: float
    seconds: float
    failure: str

    @property
    def passed(self) -> bool:
        return not self.failure


def applies(op: Op, case: Case, dtype: torch.dtype) -> bool:
    """Float coordinates beside other features are a case of reduced precision only, and of operators that have both;
    options one of operators that have them."""
    if not set(case.options) <= set(op.options):
        return False
    return not case.mixed or (bool(op.precise) and dtype in (torch.half, torch.bfloat16))


def seeded(*key) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))


def arrange(case: Case, tensors: list[Tensor]) -> list[Tensor]:
    """The layout of the case. tensors (S, M, F), or (N, F) of ragged sets; differentiable."""
    if case.layout == "sliced":
        matrix = torch.cat([t.to(tensors[0].dtype) for t in tensors] + [torch.ones_like(tensors[0])], -1)
        return list(matrix.split([t.shape[-1] for t in tensors] + [tensors[0].shape[-1]], -1)[:-1])
    if case.layout == "transposed":
        return [t.transpose(-1, -2).contiguous().transpose(-1, -2) for t in tensors]
    if case.layout == "shared":
        return [tensors[0][:1].expand_as(tensors[0]), *tensors[1:]]
    return tensors


def arrange_shared(case: Case, inputs: Inputs, tensors: list[Tensor]) -> dict[str, Tensor]:
    """The shared tensors by name, every other column of their memory where rows are sliced or transposed."""
    if case.layout in ("sliced", "transposed"):
        tensors = [torch.stack([t, torch.ones_like(t)], -1)[..., 0] for t in tensors]
    return dict(zip(inputs.shared, tensors))


def to_sets(case: Case, rows: Tensor) -> Tensor:
    return rows if case.ragged else rows.view(len(case.lengths), case.lengths[0], rows.shape[-1])


def call(op: Op, case: Case, inputs: Inputs, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    """The operator's outputs, on its device; the layouts are made there."""
    leaves = [leaf.to(op.device) for leaf in leaves]
    rows, shared = leaves[: len(inputs.floating)], leaves[len(inputs.floating) :]
    arguments = dict(zip(inputs.floating, arrange(case, rows))) | arrange_shared(case, inputs, shared)
    arguments |= {name: to_sets(case, t).to(op.device) for name, t in inputs.fixed.items()}
    arguments |= {name: arguments[name].squeeze(-1) for name in COLUMNS if name in arguments}
    splits = torch.tensor((0, *case.lengths)).cumsum(0).to(op.device) if case.ragged else None
    return op.function(**arguments, splits=splits, **inputs.options)


def rows_of(case: Case, inputs: Inputs, leaves: list[Tensor]) -> dict[str, Tensor]:
    """All tensors of the operator as (N, …) rows in the order that references take them."""
    arranged = zip(inputs.floating, arrange(case, leaves[: len(inputs.floating)]))
    return {name: t.flatten(0, -2) for name, t in arranged} | inputs.fixed


def reference(op: Op, case: Case, inputs: Inputs, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    """The plain outputs, from double leaves."""
    options = inputs.options | dict(zip(inputs.shared, leaves[len(inputs.floating) :]))
    return references.set_by_set(op.reference, rows_of(case, inputs, leaves), list(case.lengths), options, op.blank)


def margin(op: Op, case: Case, inputs: Inputs, leaves: list[Tensor]) -> float:
    parts = [t.split(list(case.lengths)) for t in rows_of(case, inputs, leaves).values()]
    names = [*inputs.floating, *inputs.fixed]
    options = inputs.options | dict(zip(inputs.shared, leaves[len(inputs.floating) :]))
    margins = [torch.inf]
    for rows in zip(*parts):
        named = dict(zip(names, rows))
        mask = named.pop("mask", None)
        if mask is not None:
            named = {name: t[mask.squeeze(-1)] for name, t in named.items()}
        if len(next(iter(named.values()))):
            margins.append(op.margin(**named, **options))
    return min(margins)


def draw(op: Op, case: Case, dtype: torch.dtype, seed: int) -> tuple[Inputs, list[Tensor]]:
    """Inputs, and their floating tensors rounded to the dtype and laid out as sets.

    Distinct points are drawn again until no choice of neighbours or maxima is within rounding of another (or, where
    finite differences will be taken, within their step). Where an operator rounds inner results too coarsely for that,
    its case becomes a smooth one."""
    needed = 0.0 if case.points != "distinct" or not sum(case.lengths) else RESOLVED
    if needed and dtype == torch.double and case.finite:
        needed = STABLE
    if op.rounds and (dtype == torch.bfloat16 or dtype == torch.half and case.wide):
        case = replace(case, smooth=True)
    elif op.rounds and dtype == torch.half and case.points != "lattice" and sum(case.lengths):
        needed = ROUNDED
    for attempt in range(500):
        generator = seeded(seed, op.name, case.name, str(dtype), attempt)
        inputs = add_options(case, op.draw(case, generator), generator)
        leaves = []
        for name, values in inputs.floating.items():
            precise = name in COLUMNS or case.mixed and name in op.precise
            leaves.append(to_sets(case, values.to(torch.float if precise and dtype != torch.double else dtype)))
        leaves += [values.to(dtype) for values in inputs.shared.values()]
        if not needed or margin(op, case, inputs, [leaf.double() for leaf in leaves]) > needed:
            return inputs, leaves
    raise RuntimeError(f"{op.name}: no inputs of case {case.name} without near ties in 500 draws")


def is_floating(outputs: tuple[Tensor, ...]) -> list[Tensor]:
    return [y for y in outputs if y.is_floating_point()]


def gradient_of(case: Case, y: Tensor, generator: torch.Generator) -> Tensor:
    """The gradient that enters the output y, in the case's layout."""
    if case.gradient == "expanded":
        return torch.ones((), dtype=y.dtype, device=y.device).expand(y.shape)
    g = torch.randn(y.shape, dtype=torch.double, generator=generator).to(y.device, y.dtype)
    return g.transpose(-1, -2).contiguous().transpose(-1, -2) if case.gradient == "transposed" and y.dim() > 1 else g


def gradients(outputs: list[Tensor], leaves: list[Tensor], entering: list[Tensor]) -> list[Tensor | None]:
    """Gradients of the leaves that require one; None for the others. Outputs that depend on none are left out."""
    pairs = [(y, g) for y, g in zip(outputs, entering) if y.requires_grad]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not pairs:
        found = [torch.zeros_like(leaf) for leaf in wanted]
    else:
        ys, gs = zip(*pairs)
        found = torch.autograd.grad(ys, wanted, gs, retain_graph=True, allow_unused=True)
    rest = iter(found)
    return [None if not x.requires_grad else torch.zeros_like(x) if (g := next(rest)) is None else g for x in leaves]


def ulps(got: Tensor, right: Tensor, dtype: torch.dtype | None = None, least: float = 0.0) -> float:
    """Largest error of got in ulps of dtype (its own) at right's largest value, or at `least`, if that is larger; equal
    infinities are no error."""
    if got.shape != right.shape:
        raise AssertionError(f"shape {tuple(got.shape)}, expected {tuple(right.shape)}")
    if not got.numel():
        return 0.0
    info = torch.finfo(dtype or got.dtype)
    finite = right.isfinite()
    largest = max(right[finite].abs().max().item() if finite.any() else 0.0, least)
    unit = max(info.eps * largest, info.tiny * info.eps)
    error = torch.where(got.double() == right, 0.0, (got.double() - right).abs() / unit)
    return math.inf if error.isnan().any() else error.max().item()


def limit_of(op: Op, case: Case, dtype: torch.dtype) -> float:
    """The limit in ulps. Half and bfloat16 need no slack: their arithmetic is in float, but where inner results are
    rounded to them."""
    return LIMITS[dtype] * (case.slack if dtype in (torch.float, torch.double) else 2.0 if op.rounds else 1.0)


def share(
    op: Op, case: Case, got: Tensor, right: Tensor, dtype: torch.dtype | None = None, least: float = 0.0
) -> float:
    return ulps(got, right, dtype, least) / limit_of(op, case, dtype or got.dtype)


def compare(op: Op, case: Case, inputs: Inputs, leaves: list[Tensor], wanted: list[int], outputs_used: list[int],
            generator: torch.Generator) -> tuple[float, str]:
    """Largest error of outputs and of the wanted gradients in shares of their limits, and what went wrong besides."""
    leaves = [leaf.detach().requires_grad_(i in wanted) for i, leaf in enumerate(leaves)]
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    got, right = call(op, case, inputs, leaves), reference(op, case, inputs, doubles)
    if len(got) != len(right):
        return math.inf, f"{len(got)} outputs, expected {len(right)}"
    for y, z in zip(got, right):
        if not y.is_floating_point() and not torch.equal(y.flatten().cpu(), z.flatten().to(y.dtype)):
            return math.inf, "integer output differs"
    got, right = is_floating(got), is_floating(right)
    errors = [share(op, case, y.detach().flatten().cpu(), z.detach().flatten()) for y, z in zip(got, right)]
    entering = [gradient_of(case, y, generator) for y in got]
    used = [[ys[i] for i in outputs_used] for ys in (got, right, entering)]
    shaped = [g.cpu().double().reshape(z.shape) for g, z in zip(used[2], used[1])]
    grads = gradients(used[0], leaves, used[2])
    again = gradients(used[0], leaves, used[2])
    exact = gradients(used[1], doubles, shaped)
    # Some gradients of shared tensors are 0 by cancellation: those are held to the largest of all.
    largest = max((d.abs().max().item() for d in exact[len(inputs.floating) :]), default=0.0)
    for name, g, h, d, leaf in zip((*inputs.floating, *inputs.shared), grads, again, exact, leaves):
        if g is None:
            continue
        if g.dtype != leaf.dtype:
            return math.inf, f"gradient in {g.dtype}, expected {leaf.dtype}"
        if not torch.equal(g, h) and not g.isnan().any():
            return math.inf, "gradient differs from run to run"
        # Gradients of row weights and biases are made from outputs that were rounded to the features' dtype; those of
        # an operator that rounds, all of them, from inner results.
        dtype = got[0].dtype if name in COLUMNS or op.rounds else g.dtype
        errors.append(share(op, case, g, d, dtype, largest if name in inputs.shared else 0.0))
    return max(errors), ""


def finite_outputs(op: Op, case: Case, inputs: Inputs, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    """The floating outputs on the CPU, 0 where they are not finite."""
    return tuple(torch.where(y.isfinite(), y, 0.0).cpu() for y in is_floating(call(op, case, inputs, leaves)))


def finite_differences(op: Op, case: Case, inputs: Inputs, leaves: list[Tensor]) -> str:
    """torch.autograd.gradcheck in double; what it found, in one line."""
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]

    def function(*xs: Tensor) -> tuple[Tensor, ...]:
        return finite_outputs(op, case, inputs, list(xs))

    largest = max((y.detach().abs().max().item() for y in function(*leaves) if y.numel()), default=0.0)
    try:
        # Rounding of the outputs, divided by the step, is what a difference cannot resolve.
        torch.autograd.gradcheck(function, leaves, eps=1e-6, atol=1e-6 * (1 + largest), rtol=1e-5, nondet_tol=0.0)
    except RuntimeError as error:
        return "finite differences: " + " ".join(str(error).split())[:300]
    return ""


def second_order(op: Op, case: Case, inputs: Inputs, leaves: list[Tensor]) -> str:
    """torch.autograd.gradgradcheck in double; what it found, in one line."""
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]

    def function(*xs: Tensor) -> tuple[Tensor, ...]:
        return finite_outputs(op, case, inputs, list(xs))

    generator = seeded(op.name, case.name, "second order")
    entering = [torch.randn(y.shape, dtype=y.dtype, generator=generator).requires_grad_() for y in function(*leaves)]
    first = torch.autograd.grad(function(*leaves), leaves, entering, create_graph=True)
    try:
        sums = [g.sum() for g in first if g.requires_grad]
        twice = torch.autograd.grad(sums, [*leaves, *entering], retain_graph=True, allow_unused=True) if sums else ()
    except RuntimeError as error:
        return "second derivatives are not supported: " + " ".join(str(error).split())[:300]
    if all(g is None for g in twice):  # first derivatives always depend on the gradient that enters
        return "second derivatives are not supported"
    largest = max(g.detach().abs().max().item() for g in first)
    try:
        torch.autograd.gradgradcheck(
            function, leaves, entering, eps=1e-6, atol=1e-6 * (1 + largest), rtol=1e-4, fast_mode=True, nondet_tol=0.0
        )
    except GradcheckError as error:
        return "second derivatives: " + " ".join(str(error).split())[:300]
    return ""


def differentiates_twice(case: Case) -> bool:
    """Whether second derivatives are checked in this case: its inputs are few and no choice hangs on a step."""
    return case.finite and case.points == "distinct" and 0 < sum(case.lengths) < 20 and not case.mixed


def subsets(case: Case, inputs: int, outputs: int) -> list[tuple[list[int], list[int]]]:
    """Which gradients are wanted, and of which outputs."""
    if case.alone:
        return [([i], [o]) for i in range(inputs) for o in range(outputs)]
    return [(list(range(inputs)), list(range(outputs)))]


def verify(op: Op, case: Case, dtype: torch.dtype, seed: int) -> tuple[float, float, str]:
    """Largest error, its limit, and what failed ("" = nothing)."""
    limit = limit_of(op, case, dtype)
    inputs, leaves = draw(op, case, dtype, seed)
    outputs = len(is_floating(call(op, case, inputs, leaves)))
    worst = 0.0
    for wanted, used in subsets(case, len(leaves), outputs):
        generator = seeded(seed, op.name, case.name, str(dtype), "gradient", wanted, used)
        error, failure = compare(op, case, inputs, leaves, wanted, used, generator)
        worst = max(worst, error * limit)
        if failure:
            return worst, limit, failure
    if worst > limit:
        return worst, limit, "differs from the double reference"
    rows = sum(case.lengths)
    if dtype == torch.double and case.finite and rows and margin(op, case, inputs, leaves) > STABLE:
        return worst, limit, finite_differences(op, case, inputs, leaves)
    return worst, limit, ""


@contextlib.contextmanager
def threads_for(case: Case):
    """One thread but for the wide case: in thousands of tiny calls, waiting for others takes most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(threads if case.wide else 1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def check_second_order(op: Op, case: Case, seed: int = 0) -> Result:
    """One row of the table: second derivatives in double against finite differences of the first."""
    begin = time.perf_counter()
    try:
        with threads_for(case):
            failure = second_order(op, case, *draw(op, case, torch.double, seed))
    except Exception as problem:  # as below
        failure = f"{type(problem).__name__}: {' '.join(str(problem).split())[:300]}"
    error = math.inf if failure else 0.0
    return Result(op.name, f"{case.name}, second order", "double", error, 0.0, time.perf_counter() - begin, failure)


def check(op: Op, case: Case, dtype: str, seed: int = 0) -> Result:
    """One row of the table. An operator that raises has failed; the check goes on."""
    begin = time.perf_counter()
    try:
        with threads_for(case):
            error, limit, failure = verify(op, case, DTYPES[dtype], seed)
    except Exception as problem:  # whatever it is, the table names the operator and the case
        error, limit = math.inf, limit_of(op, case, DTYPES[dtype])
        failure = f"{type(problem).__name__}: {' '.join(str(problem).split())[:300]}"
    return Result(op.name, case.name, dtype, error, limit, time.perf_counter() - begin, failure)
