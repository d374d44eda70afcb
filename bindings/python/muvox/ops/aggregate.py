"""Weighted aggregation over given neighbours."""

import torch

from muvox.ops import _common as common
from muvox.ops import _second_order as second
from muvox.ops import _register as register
from muvox.ops._vmap import register_vmap


def aggregate(feats, neighbours, weights, *, splits=None, aggregates=("mean", "max")):
    """Aggregates m_ir = weights_ir · feats_j, j = neighbours_ir, over the places r of row i that hold a neighbour.

    mean divides by the number of neighbours; ties of max and absmax go to the lowest place; absmax is max |m|. A row
    without neighbours gives 0.

    Args:
        feats: (…, M, F), or (N, F) with splits, or jagged nested (S, j, F); half, bfloat16, float or double.
        neighbours: int32 (…, M, k), (N, k) or jagged nested (S, j, k), row numbers within the set; −1 = none.
        weights: of the same shape, half, bfloat16 or float, double exactly if feats is double; read where there is a
            neighbour.
        splits: int64 (S + 1): where the sets of a ragged batch begin and end.
        aggregates: one or more of "mean", "max", "absmax", "sum", in the order of the output.

    Returns:
        (…, M, n · F), (N, n · F) or jagged nested (S, j, n · F), dtype of feats: one block of F columns for each of the n
        aggregates. Differentiable in feats and weights.

    Raises:
        ValueError, RuntimeError: wrong dimensions, dtype, splits or aggregates, or a neighbour outside its set.

    Memory: the output. Saved for backward: inputs and, for each of max and absmax, N · F winners of 1 byte (4 if
    k > 254). Nothing of size N · k · F. Every run gives the same bits.

    Accuracy: half and bfloat16 results are those of double arithmetic on the given inputs to one unit in the last
    place of each value, and like float ones to 16 of float at the largest.

    Under autocast feats goes to the autocast dtype, weights stay as they are.

    Example:
        >>> neighbours, distance2 = muvox.knn(coords, 20)
        >>> out = muvox.aggregate(feats, neighbours, torch.exp(-distance2))
    """
    code = common.encode("aggregate", aggregates)
    feats, neighbours, weights, splits, layout = common.flatten(
        "aggregate", splits, {"feats": feats, "neighbours": neighbours, "weights": weights}
    )
    save = common.needs_grad(feats, weights)
    return common.restore(torch.ops.muvox.aggregate(feats, neighbours, weights, splits, code, save)[0], layout)


@torch.library.register_fake("muvox::aggregate")
def _fake(feats, neighbours, weights, splits, aggregates, save):
    rows = common.check_rows("aggregate", splits, feats=feats, neighbours=neighbours, weights=weights)
    width, winners = feats.shape[-1], common.winner_blocks(aggregates)
    return (
        common.empty(feats, (*rows, common.blocks(aggregates) * width)),
        common.empty(
            feats,
            (*rows, winners * width) if save and winners else None,
            common.rank_dtype(neighbours.shape[-1]),
        ),
    )


@torch.library.register_fake("muvox::aggregate_backward")
def _fake_backward(grad_out, feats, neighbours, weights, splits, winners, aggregates, wanted):
    common.check_rows(
        "aggregate", splits, feats=feats, neighbours=neighbours, weights=weights, grad_out=grad_out
    )
    return common.empty_gradients(wanted, feats, weights)


def _setup(ctx, inputs, output):
    feats, neighbours, weights, splits, ctx.aggregates, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(feats, neighbours, weights, splits, output[1])


def _backward(ctx, grad_out, _winners):
    needed = (ctx.needs_input_grad[0], ctx.needs_input_grad[2])
    if grad_out is None or not any(needed):
        return (None,) * 6
    gradients = torch.ops.muvox.aggregate_backward(grad_out, *ctx.saved_tensors, ctx.aggregates, common.wanted(needed))
    grad_feats, grad_weights = common.only(needed, gradients)
    return grad_feats, None, grad_weights, None, None, None


def _flops(feats, neighbours, weights, splits, aggregates, save):
    return neighbours.numel() * feats.shape[-1] * (1 + common.blocks(aggregates))


def _flops_backward(grad_out, feats, neighbours, weights, splits, winners, aggregates, wanted):
    return neighbours.numel() * feats.shape[-1] * (4 + common.blocks(aggregates))


def _blocks(grad_out, feats, neighbours, weights, splits, winners, aggregates, wanted):
    numbers, ranks = second.row_numbers(neighbours, splits), second.flat(winners, splits)
    for rows in second.row_slices(len(numbers), numbers.shape[1] * feats.shape[-1]):
        j, found = numbers[rows], numbers[rows] >= 0

        def forward(x, rows=rows, j=j, found=found):
            feats, weights = x
            messages = torch.where(found, weights[rows], 0)[..., None] * second.neighbour_rows(feats, j, found)
            return [second.aggregate(messages, found, ranks[rows] if second.given(winners) else ranks, aggregates)]

        yield forward, (lambda g, rows=rows: second.flat(g, splits)[rows]), (lambda x: second.flat(x, splits),) * 2


register.register_autograd("aggregate", _backward, _setup)
second.register("aggregate", grads=(0,), inputs=(1, 3), blocks=_blocks)
register.register_autocast("aggregate", places=(0,))
register.register_flops("aggregate", _flops, _flops_backward)
register_vmap("aggregate", splits=(3,))
register_vmap("aggregate_backward", splits=(4,))
