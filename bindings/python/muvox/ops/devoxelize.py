"""Features of voxels read at points."""

import torch

from muvox.ops import _common as common
from muvox.ops import _second_order as second
from muvox.ops import _register as register
from muvox.ops._vmap import register_vmap


def devoxelize(feats, index, weights):
    """out_n = Σ_k weights_nk · feats_j, j = index_nk, over the places k of point n that hold a voxel.

    Args:
        feats: (S, C); half, bfloat16, float or double.
        index: (N, K) int32 or int64, K ≥ 1; places below 0 or past the last voxel are skipped.
        weights: (N, K), half, bfloat16 or float, double exactly if feats is double.

    Returns:
        (N, C), dtype of feats, differentiable in feats and weights. Sums are in float (double for double): every run gives
        the same bits.

    Raises:
        ValueError, RuntimeError: wrong dimensions or dtype; the message names the argument.

    Memory: the output. Saved for backward: inputs.

    Accuracy: half and bfloat16 results are those of double arithmetic on the given inputs to one unit in the last
    place of each value, and like float ones to 16 of float at the largest.

    Under autocast feats goes to the autocast dtype, weights stay as they are.

    Example:
        >>> index, weights = muvox.trilinear_weights(points, (0.0, 0.0, 0.0), (0.1, 0.1, 0.1), (10, 10, 6))
        >>> out = muvox.devoxelize(feats, index, weights)
    """
    common.require_tensors("devoxelize", {"feats": feats, "index": index, "weights": weights})
    _check(feats, index, weights)
    return torch.ops.muvox.devoxelize(feats, index, weights)


def _check(feats, index, weights):
    for name, x in (("feats", feats), ("index", index), ("weights", weights)):
        common.check_device("devoxelize", name, x, "feats", feats)
        if x.dim() != 2:
            raise ValueError(f"muvox.devoxelize: {name} has {x.dim()} dimensions, expected 2")
    if common.differ(weights.shape, index.shape):
        raise ValueError(
            f"muvox.devoxelize: weights has shape {tuple(weights.shape)} and index {tuple(index.shape)}, expected the same"
        )


@torch.library.register_fake("muvox::devoxelize")
def _fake(feats, index, weights):
    _check(feats, index, weights)
    return common.empty(feats, (index.shape[0], feats.shape[1]))


@torch.library.register_fake("muvox::devoxelize_backward")
def _fake_backward(grad_out, feats, index, weights, wanted):
    _check(feats, index, weights)
    return common.empty_gradients(wanted, feats, weights)


def _setup(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad_out):
    needed = ctx.needs_input_grad[0], ctx.needs_input_grad[2]
    if grad_out is None or not any(needed):
        return None, None, None
    gradients = torch.ops.muvox.devoxelize_backward(grad_out, *ctx.saved_tensors, common.wanted(needed))
    grad_feats, grad_weights = common.only(needed, gradients)
    return grad_feats, None, grad_weights


def _blocks(grad_out, feats, index, weights, wanted):
    S = feats.shape[0]
    for rows in second.row_slices(len(index), index.shape[1] * feats.shape[1]):
        number = index[rows].long()
        found = (number >= 0) & (number < S)
        number = torch.where(found, number, -1)

        def forward(x, rows=rows, number=number, found=found):
            feats, weights = x
            near = second.neighbour_rows(feats, number, found) if S else feats.new_zeros(*number.shape, feats.shape[1])
            return [(torch.where(found, weights[rows], 0)[..., None] * near).sum(1)]

        yield forward, (lambda g, rows=rows: g[rows]), (lambda x: x,) * 2


register.register_autograd("devoxelize", _backward, _setup)
second.register("devoxelize", grads=(0,), inputs=(1, 3), blocks=_blocks)
register.register_autocast("devoxelize", places=(0,))
register.register_flops(
    "devoxelize",
    lambda feats, index, weights: 2 * index.numel() * feats.shape[1],
    lambda grad_out, feats, index, weights, wanted: 4 * index.numel() * feats.shape[1],
)
register_vmap("devoxelize", sets=False)
register_vmap("devoxelize_backward", sets=False)
