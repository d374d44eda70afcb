"""Exact k nearest rows of the same set."""

import math

import torch

from muvox.ops import _common as common
from muvox.ops import _second_order as second
from muvox.ops import _register as register
from muvox.ops._vmap import register_vmap


def knn(
    coords,
    k,
    *,
    splits=None,
    queries=None,
    query_splits=None,
    exclude_self=False,
    max_radius=None,
    mask=None,
    return_counts=False,
):
    """The k nearest rows of the same set by squared Euclidean distance, the row itself included, nearest first.

    Ties go to the lower row number, the same on every machine and in every run. A row with NaN is at distance NaN from
    all, and NaN ranks last.

    Args:
        coords: (…, M, d), or (N, d) with splits, or jagged nested (S, j, d); half, bfloat16, float or double, d ≥ 1.
        k: at least 1; may exceed the number of rows.
        splits: int64 (S + 1): where the sets of a ragged batch begin and end.
        queries: (…, Q, d), or (NQ, d) with query_splits, or jagged nested: rows of as many sets that look for neighbours
            in coords, instead of the rows of coords themselves; dtype of coords.
        query_splits: the splits of queries, int64 (S + 1).
        exclude_self: leave each row out of its own neighbours, by its number; without queries only.
        max_radius: only rows with distance2 ≤ max_radius².
        mask: bool (…, M), (N) or jagged nested: rows of coords that are False are nobody's neighbour and have none, and
            NaN in them has no effect.
        return_counts: give the number of valid places of each row too.

    Returns:
        neighbours: int32 (…, M, k) or (N, k) or jagged nested (S, j, k), row numbers within the set; −1 past the last
            neighbour. One row for each of the queries, if there are.
        distance2: float (double for double coords) of the same shape, differentiable in coords and queries; +inf past
            the last neighbour.
        counts: int32 (…, M) or (N) or jagged nested, only with return_counts.

    Raises:
        ValueError, RuntimeError: wrong dimensions, dtype, splits, k or max_radius; the message names the argument.

    Memory: the results; nothing of size M². Saved for backward: coords, queries and neighbours.

    Accuracy: distances² to (d + 3) / 2 units in the last place of each value in float (double for double), and
    neighbours in exactly their order.

    Under autocast half and bfloat16 become float, so that coords and queries may come from different layers.

    Example:
        >>> neighbours, distance2 = muvox.knn(torch.tensor([[0.0], [1.0], [3.0]]), 2)
        >>> neighbours
        tensor([[0, 1],
                [1, 0],
                [2, 1]], dtype=torch.int32)
    """
    coords, mask, splits, layout = common.flatten("knn", splits, {"coords": coords}, {"mask": mask})
    none = splits.new_empty(0)
    cross = queries is not None
    if cross:
        lead = layout.lead
        queries, query_splits, layout = common.flatten("knn", query_splits, {"queries": queries}, None, "query_splits")
        check_queries(lead, layout.lead, queries, coords)
    elif query_splits is not None:
        raise ValueError("muvox.knn: query_splits is given without queries")
    else:
        queries, query_splits = none, none
    distance2, neighbours, counts = torch.ops.muvox.knn(
        coords, queries, splits, query_splits, mask, k, exclude_self, common.radius(max_radius), cross
    )
    found = (neighbours, distance2, counts) if return_counts else (neighbours, distance2)
    return tuple(common.restore(x, layout) for x in found)


def check_queries(lead, query_lead, queries, coords):
    if (lead is None) != (query_lead is None):
        raise ValueError("muvox.knn: one of coords and queries is ragged, expected both (with splits and query_splits)")
    if lead is not None and common.differ(query_lead, lead):
        raise ValueError(
            f"muvox.knn: queries has leading dimensions {tuple(query_lead)} and coords {tuple(lead)}, expected the same"
        )
    common.check_device("knn", "queries", queries, "coords", coords)


def edge_index(coords, k, *, splits=None, exclude_self=True):
    """The edges from the k nearest rows of the same set to each row, as graph libraries want them (torch_cluster.knn_graph).

    Args:
        coords: (…, M, d), or (N, d) with splits, or jagged nested (S, j, d); half, bfloat16, float or double, d ≥ 1.
        k: at least 1; may exceed the number of rows.
        splits: int64 (S + 1): where the sets of a ragged batch begin and end.
        exclude_self: no edge from a row to itself.

    Returns:
        int64 (2, E): neighbours, and the rows that they are neighbours of, in ascending order and nearest first. Rows are
        numbered through all sets. E depends on the data, so on a GPU this waits for the result. Not differentiable.

    Raises:
        ValueError, RuntimeError: wrong dimensions, dtype, splits or k; the message names the argument.

    Example:
        >>> muvox.edge_index(torch.tensor([[0.0], [1.0], [3.0]]), 1)
        tensor([[1, 0, 1],
                [0, 1, 2]])
    """
    coords, splits, _ = common.flatten("edge_index", splits, {"coords": coords})
    none = splits.new_empty(0)
    _, neighbours, _ = torch.ops.muvox.knn(
        coords.detach(), none, splits, none, none, k, exclude_self, math.inf, False
    )
    rows = torch.arange(neighbours.shape[:-1].numel(), device=coords.device)
    if common.is_none(splits):
        first = rows - rows % max(coords.shape[1], 1)
    else:
        first = splits[:-1].repeat_interleave(splits.diff(), output_size=len(rows))
    neighbours = neighbours.reshape(len(rows), k).long()
    found = neighbours >= 0
    return torch.stack([(neighbours + first[:, None])[found], rows[:, None].expand_as(found)[found]])


@torch.library.register_fake("muvox::knn")
def _fake(coords, queries, splits, query_splits, mask, k, exclude_self, max_radius, cross):
    rows = common.check_rows("knn", splits, {"mask": mask}, coords=coords)
    common.check_device("knn", "queries", queries, "coords", coords)
    common.check_device("knn", "query_splits", query_splits, "coords", coords)
    if cross:
        rows = common.check_rows("knn", query_splits, splits_name="query_splits", queries=queries)
    return (
        common.empty(coords, (*rows, k), common.wide(coords.dtype)),
        common.empty(coords, (*rows, k), torch.int32),
        common.empty(coords, rows, torch.int32),
    )


@torch.library.register_fake("muvox::knn_backward")
def _fake_backward(grad_distance2, coords, queries, splits, query_splits, neighbours, cross, wanted):
    common.check_rows("knn", splits, coords=coords)
    found = {"grad_distance2": grad_distance2, "neighbours": neighbours}
    if cross:
        common.check_rows("knn", query_splits, splits_name="query_splits", queries=queries, **found)
    else:
        common.check_rows("knn", splits, coords=coords, **found)
    return (
        *common.empty_gradients(wanted, coords),
        common.empty(coords, queries.shape if cross and wanted & 2 else None),
    )


def _setup(ctx, inputs, output):
    coords, queries, splits, query_splits, *_, ctx.cross = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(coords, queries, splits, query_splits, output[1])


def _backward(ctx, grad_distance2, _neighbours, _counts):
    needed = ctx.needs_input_grad[:2]
    if grad_distance2 is None or not any(needed):
        return (None,) * 9
    gradients = torch.ops.muvox.knn_backward(grad_distance2, *ctx.saved_tensors, ctx.cross, common.wanted(needed))
    return *common.only(needed, gradients), *(None,) * 7


def _flops(coords, queries, splits, query_splits, mask, k, exclude_self, max_radius, cross):
    cross = (query_splits, queries) if cross else ()
    return 3 * coords.shape[-1] * register.pairs(splits, coords, *cross)


def _flops_backward(grad_distance2, coords, *_):
    return 4 * coords.shape[-1] * grad_distance2.numel()


def _blocks(grad_distance2, coords, queries, splits, query_splits, neighbours, cross, wanted):
    own = query_splits if cross else splits
    rows_of_set = coords.shape[1] if splits.numel() == 0 else None
    numbers = second.row_numbers(neighbours, own, splits, rows_of_set)
    inputs = (lambda x: second.flat(x, splits)), (lambda x: second.flat(x, own))
    for rows in second.row_slices(len(numbers), numbers.shape[1] * coords.shape[-1]):
        j, found = numbers[rows], numbers[rows] >= 0

        def forward(x, rows=rows, j=j, found=found):
            asking = (x[1] if cross else x[0])[rows]
            return [second.squared_distance(asking, second.neighbour_rows(x[0], j, found), found)]

        yield forward, (lambda g, rows=rows: second.flat(g, own)[rows]), inputs


register.register_autograd("knn", _backward, _setup)
second.register("knn", grads=(0,), inputs=(1, 2), blocks=_blocks)
register.register_autocast("knn", places=(0, 1), dtype=torch.float32)
register.register_flops("knn", _flops, _flops_backward)
register_vmap("knn", splits=(2, 3))
register_vmap("knn_backward", splits=(3, 4))
