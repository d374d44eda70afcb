"""Second derivatives: the gradient of each `op_backward`, by plain torch composites over a few rows at a time.

Second derivatives are rare (gradient penalties, Hessian-vector products), so they need no kernels, but they must not
cost the pair tensor either: a composite computes the outputs of a block of rows, is differentiated twice, and is
dropped before the next block. Memory stays linear in the rows (offset_attention, whose columns tie the rows of a set
together, has passes of its own for that). Eager mode only: torch.compile itself refuses to differentiate twice.

The composites are operators of their own, muvox::`op`_second, so that functorch's transforms and vmap go around them
and not through them.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from muvox.ops._register import operator, register_autograd
from muvox.ops._vmap import register_vmap

ELEMENTS = 1 << 20  # of the largest tensor that a block may hold

# A block: how its outputs come from its leaves, where these outputs lie in the whole output, and where each leaf lies
# in its input: functions from a whole tensor to its view, so that results can be added in place.
View = Callable[[Tensor], Tensor]
Block = tuple[Callable[[Sequence], Sequence[Tensor]], View, Sequence[View]]


def register(
    op: str,
    grads: Sequence[int],
    inputs: Sequence[int],
    blocks: Callable[..., Iterator[Block]] | None = None,
    derivatives: Callable[..., list[Tensor | None]] | None = None,
) -> None:
    """Gives muvox::`op`_backward a gradient, by `blocks` or, where no block of outputs stands alone, by `derivatives`.

    Args:
        grads: places of the outputs' gradients among the arguments of op_backward.
        inputs: places of the differentiable inputs, in the order of op_backward's results.
        blocks: blocks(*arguments) -> (forward, of_output, of_inputs) for one block of rows after the other:
            forward(leaves) the outputs of the block, in the order of `grads`, from the view of_input(x) of each input;
            of_output(g) the part of an output's gradient that belongs to them. An input that is not given is None.
        derivatives: derivatives(gs, xs, outer, *arguments) -> gradients in gs (the arguments at `grads`) and xs (those
            at `inputs`), in their order and at least in float, of Σ <op_backward's results, outer>; outer holds None
            for a result that is not asked for. Called below autograd.
    """

    name, schema = f"{op}_second", operator(f"{op}_backward")._schema
    count = len(schema.arguments)
    outer = [f"Tensor outer_{place}" for place in range(len(schema.returns))]
    signature = ", ".join([*(f"{x.type} {x.name}" for x in schema.arguments), *outer])
    torch.library.define(f"muvox::{name}", f"({signature}) -> ({', '.join(['Tensor'] * (len(grads) + len(inputs)))})")

    def kernel(*arguments):
        arguments, outer = arguments[:count], [x if given(x) else None for x in arguments[count:]]
        gs, xs = [arguments[p] for p in grads], [arguments[p] for p in inputs]
        # Called below autograd, which the composites need, and in whatever autocast the caller runs backward.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False):
            with torch.autocast(xs[0].device.type, enabled=False), torch.no_grad():
                if blocks is not None:
                    sums = _differentiate(gs, xs, outer, blocks(*arguments))
                else:
                    sums = derivatives(gs, xs, outer, *arguments)
        return tuple(x.new_empty(0) if total is None else total.to(x.dtype) for x, total in zip((*gs, *xs), sums))

    def fake(*arguments):
        return tuple(arguments[p].new_empty(arguments[p].shape) for p in (*grads, *inputs))

    def setup(ctx, arguments, output):
        ctx.set_materialize_grads(False)
        ctx.tensors = [place for place, x in enumerate(arguments) if isinstance(x, Tensor)]
        ctx.arguments = [None if isinstance(x, Tensor) else x for x in arguments]
        ctx.save_for_backward(*(arguments[place] for place in ctx.tensors))

    def backward(ctx, *outer):
        arguments = list(ctx.arguments)
        for place, x in zip(ctx.tensors, ctx.saved_tensors):
            arguments[place] = x
        none = arguments[grads[0]].new_empty(0)
        found = getattr(torch.ops.muvox, name)(*arguments, *(none if g is None else g for g in outer))
        result = [None] * count
        for place, gradient in zip((*grads, *inputs), found):
            result[place] = gradient if ctx.needs_input_grad[place] else None
        return tuple(result)

    def refuse(ctx, *gradients):
        raise NotImplementedError(f"muvox.{op}: third derivatives are not supported")

    torch.library.impl(f"muvox::{name}", "CompositeExplicitAutograd", kernel)
    torch.library.register_fake(f"muvox::{name}", fake)
    register_autograd(f"{op}_backward", backward, setup)
    register_autograd(name, refuse, lambda ctx, inputs, output: None)
    register_vmap(name, splits=[i for i, x in enumerate(schema.arguments) if x.name.endswith("splits")], sets=False)


def wide(x: Tensor) -> Tensor:
    """In the arithmetic of the composites: float, double for double."""
    return x if x.dtype in (torch.float32, torch.float64) or not x.is_floating_point() else x.float()


def given(x: Tensor) -> bool:
    """Not the empty tensor that stands for none."""
    return x.shape != (0,)


def zeros(x: Tensor) -> Tensor:
    """To add gradients of x in: contiguous, so that every view of it is one."""
    return torch.zeros(x.shape, dtype=wide(x).dtype, device=x.device)


def _differentiate(gs, xs, outer, blocks) -> list[Tensor | None]:
    """Gradients in gs and xs of Σ <op_backward's results, outer>."""
    sums = [zeros(x) if given(x) else None for x in (*gs, *xs)]
    for forward, of_output, of_inputs in blocks:
        with torch.enable_grad():
            g = [wide(of_output(x)).detach().requires_grad_() if given(x) else None for x in gs]
            x = [wide(of(x)).detach().requires_grad_() if given(x) else None for x, of in zip(xs, of_inputs)]
            ends = [None if y is None else wide(of(y)) for y, of in zip(outer, of_inputs)]
            twice = _twice(forward(x), g, x, ends)
        views = [of_output] * len(gs) + list(of_inputs)
        for total, of, gradient in zip(sums, views, twice):
            if gradient is not None:
                of(total).add_(gradient)
    return sums


def _twice(outputs, gs, xs, outer) -> list[Tensor | None]:
    """Gradients in gs and xs of Σ <d<outputs, gs>/dxs, outer>."""
    pairs = [(y, g) for y, g in zip(outputs, gs) if g is not None and y.requires_grad]
    leaves, wanted = [x for x in xs if x is not None], [x for x in (*gs, *xs) if x is not None]
    none = [None] * (len(gs) + len(xs))
    if not pairs:
        return none
    outputs, gradients = zip(*pairs)
    first = iter(torch.autograd.grad(outputs, leaves, gradients, create_graph=True, allow_unused=True))
    ends = [(None if x is None else next(first), y) for x, y in zip(xs, outer)]
    ends = [(d, y) for d, y in ends if d is not None and y is not None and d.requires_grad]
    if not ends:
        return none
    second = iter(torch.autograd.grad([d for d, _ in ends], wanted, [y for _, y in ends], allow_unused=True))
    return [None if x is None else next(second) for x in (*gs, *xs)]


# Blocks of sets, for operators whose rows meet all rows of their set


def over_sets(splits: Tensor, first: Tensor, cost: Callable[[int], int]) -> Iterator[tuple[Callable, Callable, int]]:
    """Some sets after others: (view of a tensor of rows as (sets, M, …), view of a tensor of sets as (sets, …), M).

    cost(M): elements that one set of M rows needs.
    """
    if splits.numel() == 0:
        S, M = first.shape[:2]
        step = max(1, ELEMENTS // max(1, cost(M)))
        for s in range(0, S if M else 0, step):
            part = slice(s, s + step)
            yield (lambda x, part=part: x[part]), (lambda x, part=part: x[part]), M
    else:
        borders = splits.tolist()
        for s, (begin, end) in enumerate(zip(borders, borders[1:])):
            if begin < end:
                rows, one = slice(begin, end), slice(s, s + 1)
                yield (lambda x, rows=rows: x[rows].unsqueeze(0)), (lambda x, one=one: x[one]), end - begin


def row_slices(M: int, cost: int) -> Iterator[slice]:
    """Slices of M rows, each of which needs `cost` elements."""
    step = max(1, ELEMENTS // max(1, cost))
    for begin in range(0, M, step):
        yield slice(begin, min(begin + step, M))


def masked(x, valid):
    """x (sets, M, …) with 0 in the rows that take no part; valid (sets, M) or None."""
    if x is None or valid is None:
        return x
    return torch.where(valid.reshape(*valid.shape, *(1,) * (x.dim() - 2)), x, 0)


# Rows of all sets in one, for operators whose rows meet only their neighbours


def flat(x: Tensor, splits: Tensor) -> Tensor:
    """A tensor of rows as (N, …)."""
    return x.flatten(0, 1) if splits.numel() == 0 else x


def row_numbers(neighbours: Tensor, splits: Tensor, into: Tensor | None = None, rows: int | None = None) -> Tensor:
    """Neighbours (…, k), rows within their set, as rows of all sets, (N, k) int64; −1 stays −1.

    splits: of the rows that have neighbours; into, rows: splits, or rows of one uniform set, of the rows that are
    neighbours, where these are others.
    """
    own = neighbours.long()
    if splits.numel() == 0:
        first = torch.arange(own.shape[0], device=own.device)[:, None, None] * (own.shape[1] if rows is None else rows)
        return torch.where(own < 0, -1, own + first).flatten(0, 1)
    begins = (splits if into is None else into)[:-1]
    first = torch.repeat_interleave(begins, splits.diff(), output_size=own.shape[0])
    return torch.where(own < 0, -1, own + first[:, None])


def neighbour_rows(x, numbers, found):
    """x at the neighbours of a block of rows, 0 where there is none; numbers and found (rows, k) -> (rows, k, …)."""
    near = x[numbers.clamp(min=0)]
    return torch.where(found.reshape(*found.shape, *(1,) * (near.dim() - 2)), near, 0)


def squared_distance(x, near, found):
    """|x_i − x_j|² (rows, k) of rows (rows, d) to their neighbours (rows, k, d), 0 where there is none."""
    return torch.where(found[..., None], x[:, None] - near, 0).square().sum(-1)


def aggregate(messages: Tensor, found: Tensor, winners: Tensor, aggregates: int, by_k: bool = False) -> Tensor:
    """Aggregates of messages (rows, k, F) where `found` (rows, k), max and absmax by the ranks that won."""
    messages = torch.where(found[..., None], messages, 0)
    count = found.sum(-1).clamp(min=1) if not by_k else torch.full_like(found[:, 0], found.shape[-1], dtype=torch.int64)
    F, outputs, block = messages.shape[-1], [], 0
    for kind in kinds(aggregates):
        if kind in (1, 4):
            total = messages.sum(1)
            outputs.append(total / count[:, None] if kind == 1 else total)
            continue
        rank = winners[:, block * F : (block + 1) * F].long()
        none = rank == (255 if winners.dtype == torch.uint8 else -1)
        won = torch.where(none, 0, messages.gather(1, rank.masked_fill(none, 0)[:, None]).squeeze(1))
        outputs.append(won if kind == 2 else won.abs())
        block += 1
    return torch.cat(outputs, -1)


def kinds(aggregates: int) -> Iterator[int]:
    while aggregates:
        yield aggregates & 15
        aggregates >>= 4
