"""The eight voxels around a point and their trilinear weights."""

import torch

from muvox.ops import _common as common
from muvox.ops import _second_order as second
from muvox.ops import _register as register
from muvox.ops._vmap import register_vmap


def trilinear_weights(points, origin, voxel_size, shape):
    """Where muvox.devoxelize has to read at points of a regular grid, and how much of it.

    Voxel (i, j, k) has its centre at origin + (i + ½, j + ½, k + ½) · voxel_size and number (i · ny + j) · nz + k. Corners
    outside the grid have index −1 and weight 0, the others are not rescaled, so what is read fades out over half a voxel;
    a point with NaN or infinity has index −1 throughout.

    Args:
        points: (…, 3); half, bfloat16, float or double.
        origin: three numbers, the lower corner of the grid, in the unit of the points.
        voxel_size: three numbers above 0.
        shape: three integers nx, ny, nz ≥ 0 with a product below 2^31.

    Returns:
        index: int32 (…, 8), corner (a, b, c) ∈ {0, 1}³ at place 4a + 2b + c.
        weights: float (double for double) (…, 8), differentiable in points.

    Raises:
        ValueError, RuntimeError: wrong dimensions, dtype or grid; the message names the argument.

    Memory: the results. Saved for backward: points.

    Accuracy: float weights to 16 units in the last place of 1 for points within eight cells of the origin, further out
    to the rounding of the points' distance from it in cells.

    Under autocast half and bfloat16 points become float, weights are float anyway.

    Example:
        >>> index, weights = muvox.trilinear_weights(torch.tensor([[0.5, 0.5, 1.0]]), (0, 0, 0), (1, 1, 1), (1, 1, 2))
        >>> index[0, :2], weights[0, :2]
        (tensor([0, 1], dtype=torch.int32), tensor([0.5000, 0.5000]))
    """
    common.require_tensors("trilinear_weights", {"points": points})
    grid = (
        *common.three("trilinear_weights", "origin", origin),
        *common.three("trilinear_weights", "voxel_size", voxel_size),
        *common.three("trilinear_weights", "shape", shape, int),
    )
    if points.dim() < 1:
        raise ValueError("muvox.trilinear_weights: points has 0 dimensions, expected (…, 3)")
    flat = points.unsqueeze(0) if points.dim() == 1 else points.flatten(0, -2)
    weights, index = torch.ops.muvox.trilinear_weights(flat, *grid)
    if points.dim() != 2:
        index, weights = (x.reshape(*points.shape[:-1], 8) for x in (index, weights))
    return index, weights


@torch.library.register_fake("muvox::trilinear_weights")
def _fake(points, *grid):
    common.check_alike("trilinear_weights", {"points": points}, 2, "(points, 3)", most=2)
    rows = points.shape[0]
    return common.empty(points, (rows, 8), common.wide(points.dtype)), common.empty(points, (rows, 8), torch.int32)


@torch.library.register_fake("muvox::trilinear_weights_backward")
def _fake_backward(grad_weights, points, *grid):
    common.check_alike("trilinear_weights", {"points": points, "grad_weights": grad_weights}, 2, "(points, 3)", most=2)
    return common.empty(points, points.shape)


def _setup(ctx, inputs, output):
    points, *ctx.grid = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(points)


def _backward(ctx, grad_weights, _index):
    if grad_weights is None or not ctx.needs_input_grad[0]:
        return (None,) * 10
    return torch.ops.muvox.trilinear_weights_backward(grad_weights, *ctx.saved_tensors, *ctx.grid), *(None,) * 9


def _blocks(grad_weights, points, *grid):
    origin, size, shape = (torch.tensor(grid[a : a + 3], dtype=torch.float64, device=points.device) for a in (0, 3, 6))
    upper = torch.tensor([[c >> 2, c >> 1 & 1, c & 1] for c in range(8)], device=points.device)
    for rows in second.row_slices(len(points), 24):

        def forward(x, rows=rows):
            u = (x[0][rows] - origin.to(x[0])) / size.to(x[0]) - 0.5
            low = u.detach().floor()
            t, corner = (u - low)[:, None], low[:, None] + upper
            inside = ((corner >= 0) & (corner < shape.to(x[0]))).all(-1)
            return [torch.where(inside, torch.where(upper == 1, t, 1 - t).prod(-1), 0)]

        yield forward, (lambda g, rows=rows: g[rows]), (lambda x: x,)


register.register_autograd("trilinear_weights", _backward, _setup)
second.register("trilinear_weights", grads=(0,), inputs=(1,), blocks=_blocks)
register.register_autocast("trilinear_weights", places=(0,), dtype=torch.float32)
register.register_flops(
    "trilinear_weights",
    lambda points, *grid: 25 * points.shape[0],
    lambda grad_weights, points, *grid: 57 * points.shape[0],
)
register_vmap("trilinear_weights")
register_vmap("trilinear_weights_backward")
