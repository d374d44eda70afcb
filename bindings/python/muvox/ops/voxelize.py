"""Means of the features of the points in each voxel."""

import torch

from muvox.ops import _common as common
from muvox.ops import _register as register
from muvox.ops._vmap import register_vmap


def voxelize(feats, index, counts=None, *, size=None):
    """out_s = 1/counts_s · Σ feats_n over the points n with index_n = s: the mean, if counts is how often s is in index.

    Points with an index below 0 or past the last voxel are skipped; a voxel with counts 0 or less gives 0.

    Args:
        feats: (N, C); half, bfloat16, float or double.
        index: (N) int32 or int64.
        counts: (S) int32 or int64; for S = size voxels computed from index, unless given.
        size: number of voxels, instead of counts.

    Returns:
        (S, C), dtype of feats, differentiable in feats. Sums are in float (double for double), in the order of the points:
        every run gives the same bits.

    Raises:
        ValueError, RuntimeError: wrong dimensions or dtype, or not exactly one of counts and size; the message names the
        argument.

    Memory: the output, and 8 bytes for each point and voxel while it runs. Saved for backward: index and counts.

    Accuracy: half and bfloat16 results are those of double arithmetic on the given inputs to one unit in the last
    place of each value, and like float ones to 16 of float at the largest.

    Under autocast feats goes to the autocast dtype; sums are in float all the same.

    Example:
        >>> muvox.voxelize(torch.tensor([[1.0], [3.0], [5.0]]), torch.tensor([2, 2, 0]), size=3)
        tensor([[5.],
                [0.],
                [2.]])
    """
    if (counts is None) == (size is None):
        raise ValueError("muvox.voxelize: counts and size are both " + ("given" if size is not None else "missing"))
    common.require_tensors("voxelize", {"feats": feats, "index": index} | ({} if counts is None else {"counts": counts}))
    if counts is None:
        _check_size(index, size)
        _check(feats, index)
        return torch.ops.muvox.voxelize_by_size(feats, index, size)[0]
    _check(feats, index, counts)
    return torch.ops.muvox.voxelize(feats, index, counts)


def _check_size(index, size):
    if index.dim() != 1 or index.is_floating_point():
        raise ValueError(f"muvox.voxelize: index is {index.dtype} with {index.dim()} dimensions, expected integers with 1")
    if size < 0:
        raise ValueError(f"muvox.voxelize: size is {size}, expected 0 or more")


def _check(feats, index, counts=None, name="feats"):
    given = {"index": index} if counts is None else {"index": index, "counts": counts}
    for other, x in given.items():
        common.check_device("voxelize", other, x, name, feats)
    for what, x, dims in ((name, feats, 2), *((other, x, 1) for other, x in given.items())):
        if x.dim() != dims:
            raise ValueError(f"muvox.voxelize: {what} has {x.dim()} dimensions, expected {dims}")


@torch.library.register_fake("muvox::voxelize")
def _fake(feats, index, counts):
    _check(feats, index, counts)
    return common.empty(feats, (counts.shape[0], feats.shape[1]))


@torch.library.register_fake("muvox::voxelize_by_size")
def _fake_by_size(feats, index, size):
    _check(feats, index)
    return common.empty(feats, (size, feats.shape[1])), common.empty(feats, (size,), torch.int64)


@torch.library.register_fake("muvox::voxelize_backward")
def _fake_backward(grad_out, index, counts):
    _check(grad_out, index, counts, "grad_out")
    return common.empty(grad_out, (index.shape[0], grad_out.shape[1]))


def _setup(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[1:])


def _setup_by_size(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(inputs[1], output[1])


def _backward(ctx, grad_out, _counts=None):
    if grad_out is None or not ctx.needs_input_grad[0]:
        return None, None, None
    return torch.ops.muvox.voxelize_backward(grad_out, *ctx.saved_tensors), None, None


def _twice(ctx, outer):
    """voxelize_backward is linear in grad_out, and voxelize is its transpose."""
    if outer is None or not ctx.needs_input_grad[0]:
        return None, None, None
    return torch.ops.muvox.voxelize(outer, *ctx.saved_tensors), None, None


register.register_autograd("voxelize", _backward, _setup)
register.register_autograd("voxelize_by_size", _backward, _setup_by_size)
register.register_autograd("voxelize_backward", _twice, _setup)
register.register_autocast("voxelize", places=(0,))
register.register_autocast("voxelize_by_size", places=(0,))
register.register_flops(
    "voxelize",
    lambda feats, index, counts: feats.numel() + counts.shape[0] * feats.shape[1],
    lambda grad_out, index, counts: index.shape[0] * grad_out.shape[1],
)
register.register_flops("voxelize_by_size", lambda feats, index, size: feats.numel() + size * feats.shape[1])
register_vmap("voxelize", sets=False)
register_vmap("voxelize_by_size", sets=False)
register_vmap("voxelize_backward", sets=False)
