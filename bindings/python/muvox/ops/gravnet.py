"""GravNet's layer between its linear layers: neighbours, distance weight and aggregation in one."""

import torch

from muvox.ops import _common as common
from muvox.ops import _second_order as second
from muvox.ops import _register as register
from muvox.ops._vmap import register_vmap


def gravnet(
    coords,
    feats,
    k,
    *,
    splits=None,
    scale=10.0,
    aggregates=("mean", "max"),
    mean="count",
    exclude_self=False,
    max_radius=None,
    mask=None,
    row_weights=None,
):
    """Aggregates m_ij = exp(−scale · |x_i − x_j|²) · w_j · feats_j over the k nearest rows j of row i's set, i included.

    mean divides by the number of neighbours found; ties of max and absmax go to the nearest; absmax is max |m|. A row
    without neighbours (excluded, out of the radius, masked) gives 0.

    Args:
        coords: (…, M, d), or (N, d) with splits, or jagged nested (S, j, d); half, bfloat16 or float, double exactly if
            feats is double.
        feats: (…, M, F), (N, F) or jagged nested (S, j, F), half, bfloat16, float or double.
        k: at least 1; may exceed the number of rows.
        splits: int64 (S + 1): where the sets of a ragged batch begin and end.
        scale: finite number.
        aggregates: one or more of "mean", "max", "absmax", "sum", in the order of the output.
        mean: "count" divides by the neighbours found, "k" by k even where there are fewer.
        exclude_self: leave each row out of its own neighbours.
        max_radius: only rows with |x_i − x_j| ≤ max_radius.
        mask: bool (…, M), (N) or jagged nested: rows that are False take no part, neither as i nor as j; their output is
            0, and NaN in them has no effect.
        row_weights: w ≥ 0, (…, M), (N) or jagged nested, float (double exactly if feats is double; half and bfloat16 are
            widened); 1 unless given.

    Returns:
        (…, M, n · F), (N, n · F) or jagged nested (S, j, n · F), dtype of feats: one block of F columns for each of the n
        aggregates. Differentiable in coords, feats and row_weights.

    Raises:
        ValueError, RuntimeError: wrong dimensions, dtype, splits, k, scale, … ; the message names the argument.

    Memory: the output. Saved for backward: inputs, neighbours (N · k · 4 bytes) and, for each of max and absmax, N · F
    winners of 1 byte (4 if k > 254). Nothing of size M² or N · k · F. Every run gives the same bits.

    Accuracy: half and bfloat16 results are those of double arithmetic on the given inputs to one unit in the last
    place of each value, and like float ones to 16 of float at the largest, given the neighbours.

    Under autocast feats goes to the autocast dtype, coords and the weights stay as they are.

    Example:
        >>> out = muvox.gravnet(torch.randn(8, 100, 4), torch.randn(8, 100, 22), 20)
        >>> out.shape
        torch.Size([8, 100, 44])
    """
    code, scale = common.encode("gravnet", aggregates), common.finite("gravnet", "scale", scale)
    if mean not in ("count", "k"):
        raise ValueError(f"muvox.gravnet: mean is {mean!r}, expected 'count' or 'k'")
    coords, feats, mask, weights, splits, layout = common.flatten(
        "gravnet",
        splits,
        {"coords": coords, "feats": feats},
        {"mask": mask, "row_weights": common.widened(row_weights)},
    )
    save = common.needs_grad(coords, feats, weights)
    radius = common.radius(max_radius)
    results = torch.ops.muvox.gravnet(
        coords, feats, splits, mask, weights, k, scale, code, mean == "k", exclude_self, radius, save
    )
    return common.restore(results[0], layout)


@torch.library.register_fake("muvox::gravnet")
def _fake(coords, feats, splits, mask, row_weights, k, scale, aggregates, mean_by_k, exclude_self, max_radius, save):
    columns = {"mask": mask, "row_weights": row_weights}
    rows = common.check_rows("gravnet", splits, columns, coords=coords, feats=feats)
    width, winners = feats.shape[-1], common.winner_blocks(aggregates)
    return (
        common.empty(feats, (*rows, common.blocks(aggregates) * width)),
        common.empty(feats, (*rows, k) if save else None, torch.int32),
        common.empty(feats, (*rows, winners * width) if save and winners else None, common.rank_dtype(k)),
    )


@torch.library.register_fake("muvox::gravnet_backward")
def _fake_backward(
    grad_out, coords, feats, splits, row_weights, neighbours, winners, scale, aggregates, mean_by_k, wanted
):
    rows = common.check_rows(
        "gravnet", splits, {"row_weights": row_weights}, coords=coords, feats=feats, grad_out=grad_out
    )
    return (
        *common.empty_gradients(wanted, coords, feats),
        common.empty(feats, rows if wanted & 4 else None, common.wide(feats.dtype)),
    )


def _setup(ctx, inputs, output):
    coords, feats, splits, _, row_weights, _, ctx.scale, ctx.aggregates, ctx.mean_by_k, *_ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(coords, feats, splits, row_weights, output[1], output[2])


def _backward(ctx, grad_out, _neighbours, _winners):
    needed = *ctx.needs_input_grad[:2], ctx.needs_input_grad[4]
    if grad_out is None or not any(needed):
        return (None,) * 12
    gradients = torch.ops.muvox.gravnet_backward(
        grad_out, *ctx.saved_tensors, ctx.scale, ctx.aggregates, ctx.mean_by_k, common.wanted(needed)
    )
    grad_coords, grad_feats, grad_row_weights = common.only(needed, gradients)
    return grad_coords, grad_feats, None, None, grad_row_weights, *(None,) * 7


def _flops(coords, feats, splits, mask, row_weights, k, scale, aggregates, *_):
    places = coords.shape[:-1].numel() * k
    return 3 * coords.shape[-1] * register.pairs(splits, coords) + places * feats.shape[-1] * (
        1 + common.blocks(aggregates)
    )


def _flops_backward(grad_out, coords, feats, splits, row_weights, neighbours, winners, scale, aggregates, *_):
    return neighbours.numel() * (7 * coords.shape[-1] + feats.shape[-1] * (4 + common.blocks(aggregates)))


def _blocks(grad_out, coords, feats, splits, row_weights, neighbours, winners, scale, aggregates, mean_by_k, wanted):
    numbers, ranks = second.row_numbers(neighbours, splits), second.flat(winners, splits)
    k = numbers.shape[1]
    for rows in second.row_slices(len(numbers), k * (coords.shape[-1] + feats.shape[-1])):
        j, found = numbers[rows], numbers[rows] >= 0

        def forward(x, rows=rows, j=j, found=found):
            coords, feats, row_weights = x
            weight = torch.exp(-scale * second.squared_distance(coords[rows], second.neighbour_rows(coords, j, found), found))
            if row_weights is not None:
                weight = weight * second.neighbour_rows(row_weights, j, found)
            messages = weight[..., None] * second.neighbour_rows(feats, j, found)
            won = ranks[rows] if second.given(winners) else ranks
            return [second.aggregate(messages, found, won, aggregates, mean_by_k)]

        yield forward, (lambda g, rows=rows: second.flat(g, splits)[rows]), (lambda x: second.flat(x, splits),) * 3


register.register_autograd("gravnet", _backward, _setup)
second.register("gravnet", grads=(0,), inputs=(1, 2, 4), blocks=_blocks)
register.register_autocast("gravnet", places=(1,))
register.register_flops("gravnet", _flops, _flops_backward)
register_vmap("gravnet", splits=(2,))
register_vmap("gravnet_backward", splits=(3,))
