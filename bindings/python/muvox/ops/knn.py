"""Exact k nearest rows of the same set."""

import torch

from muvox.ops import _common as common


def knn(coords, k, *, splits=None, return_counts=False):
    """The k nearest rows of the same set by squared Euclidean distance, the row itself included, nearest first.

    Ties go to the lower row number, the same on every machine and in every run. A row with NaN is at distance NaN from
    all, and NaN ranks last.

    Args:
        coords: (…, M, d), or (N, d) with splits; half, bfloat16, float or double, d ≥ 1.
        k: at least 1; may exceed the number of rows.
        splits: int64 (S + 1): where the sets of a ragged batch begin and end.
        return_counts: give the number of valid places of each row too.

    Returns:
        neighbours: int32 (…, M, k) or (N, k), row numbers within the set; −1 past the end of the set.
        distance2: float (double for double coords) of the same shape, differentiable; +inf past the end.
        counts: int32 (…, M) or (N), only with return_counts.

    Raises:
        ValueError, RuntimeError: wrong dimensions, dtype, splits or k; the message names the argument.

    Memory: the results; nothing of size M². Saved for backward: coords and neighbours.

    Example:
        >>> neighbours, distance2 = muvox.knn(torch.tensor([[0.0], [1.0], [3.0]]), 2)
        >>> neighbours
        tensor([[0, 1],
                [1, 0],
                [2, 1]], dtype=torch.int32)
    """
    coords, splits, lead = common.flatten("knn", splits, coords=coords)
    distance2, neighbours, counts = torch.ops.muvox.knn(coords, splits, k)
    found = (neighbours, distance2, counts) if return_counts else (neighbours, distance2)
    return tuple(common.restore(x, lead) for x in found)


@torch.library.register_fake("muvox::knn")
def _fake(coords, splits, k):
    rows = common.check_rows("knn", splits, coords=coords)
    return (
        common.empty(coords, (*rows, k), common.wide(coords.dtype)),
        common.empty(coords, (*rows, k), torch.int32),
        common.empty(coords, rows, torch.int32),
    )


@torch.library.register_fake("muvox::knn_backward")
def _fake_backward(grad_distance2, coords, splits, neighbours):
    common.check_rows("knn", splits, coords=coords, grad_distance2=grad_distance2, neighbours=neighbours)
    return common.empty(coords, coords.shape)


def _setup(ctx, inputs, output):
    coords, splits, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(coords, splits, output[1])


def _backward(ctx, grad_distance2, _neighbours, _counts):
    if grad_distance2 is None or not ctx.needs_input_grad[0]:
        return None, None, None
    return torch.ops.muvox.knn_backward(grad_distance2, *ctx.saved_tensors), None, None


torch.library.register_autograd("muvox::knn", _backward, setup_context=_setup)
common.refuse_second_derivative("knn")
