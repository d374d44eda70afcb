"""GravNet's layer between its linear layers: neighbours, distance weight and aggregation in one."""

import torch

from muvox.ops import _common as common


def gravnet(coords, feats, k, *, splits=None, scale=10.0, aggregates=("mean", "max")):
    """Aggregates m_ij = exp(−scale · |x_i − x_j|²) · feats_j over the k nearest rows j of row i's set, i itself included.

    mean divides by the number of neighbours found; ties of max and absmax go to the nearest; absmax is max |m|.

    Args:
        coords: (…, M, d), or (N, d) with splits; half, bfloat16 or float, double exactly if feats is double.
        feats: (…, M, F) or (N, F), half, bfloat16, float or double.
        k: at least 1; may exceed the number of rows.
        splits: int64 (S + 1): where the sets of a ragged batch begin and end.
        scale: finite number.
        aggregates: one or more of "mean", "max", "absmax", "sum", in the order of the output.

    Returns:
        (…, M, n · F) or (N, n · F), dtype of feats: one block of F columns for each of the n aggregates.
        Differentiable in coords and feats.

    Raises:
        ValueError, RuntimeError: wrong dimensions, dtype, splits, k, scale or aggregates; the message names it.

    Memory: the output. Saved for backward: inputs, neighbours (N · k · 4 bytes) and, for each of max and absmax, N · F
    winners of 1 byte (4 if k > 254). Nothing of size M² or N · k · F. Every run gives the same bits.

    Under autocast feats goes to the autocast dtype, coords and the weights stay as they are.

    Example:
        >>> out = muvox.gravnet(torch.randn(8, 100, 4), torch.randn(8, 100, 22), 20)
        >>> out.shape
        torch.Size([8, 100, 44])
    """
    code, scale = common.encode("gravnet", aggregates), common.finite("gravnet", "scale", scale)
    coords, feats, splits, lead = common.flatten("gravnet", splits, coords=coords, feats=feats)
    save = common.needs_grad(coords, feats)
    return common.restore(torch.ops.muvox.gravnet(coords, feats, splits, k, scale, code, save)[0], lead)


@torch.library.register_fake("muvox::gravnet")
def _fake(coords, feats, splits, k, scale, aggregates, save):
    rows = common.check_rows("gravnet", splits, coords=coords, feats=feats)
    width, winners = feats.shape[-1], common.winner_blocks(aggregates)
    return (
        common.empty(feats, (*rows, common.blocks(aggregates) * width)),
        common.empty(feats, (*rows, k) if save else None, torch.int32),
        common.empty(feats, (*rows, winners * width) if save and winners else None, common.rank_dtype(k)),
    )


@torch.library.register_fake("muvox::gravnet_backward")
def _fake_backward(grad_out, coords, feats, splits, neighbours, winners, scale, aggregates, wanted):
    common.check_rows("gravnet", splits, coords=coords, feats=feats, grad_out=grad_out)
    return common.empty_gradients(wanted, coords, feats)


def _setup(ctx, inputs, output):
    coords, feats, splits, _, ctx.scale, ctx.aggregates, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(coords, feats, splits, output[1], output[2])


def _backward(ctx, grad_out, _neighbours, _winners):
    needed = ctx.needs_input_grad[:2]
    if grad_out is None or not any(needed):
        return (None,) * 7
    gradients = torch.ops.muvox.gravnet_backward(
        grad_out, *ctx.saved_tensors, ctx.scale, ctx.aggregates, common.mask(needed)
    )
    return *common.only(needed, gradients), None, None, None, None, None


torch.library.register_autograd("muvox::gravnet", _backward, setup_context=_setup)
common.refuse_second_derivative("gravnet")
common.register_autocast("gravnet", places=(1,))
