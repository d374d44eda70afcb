"""Mean, maximum and sum over each set."""

import torch

from muvox.ops import _common as common


def pool(x, *, splits=None, aggregates=("mean", "max")):
    """Aggregates the rows of each set. Ties of max and absmax go to the first row; absmax is max |x|; NaN is never hidden.
    An empty set gives 0.

    Args:
        x: (…, M, F), or (N, F) with splits; half, bfloat16, float or double.
        splits: int64 (S + 1): where the sets of a ragged batch begin and end.
        aggregates: one or more of "mean", "max", "absmax", "sum", in the order of the output.

    Returns:
        (…, n · F), or (S, n · F) with splits, dtype of x: one block of F columns for each of the n aggregates.
        Differentiable.

    Raises:
        ValueError, RuntimeError: wrong dimensions, dtype, splits or aggregates; the message names the argument.

    Memory: the output. Saved for backward: x and, for each of max and absmax, S · F winners of 4 bytes.

    Under autocast x goes to the autocast dtype; sums are in float all the same.

    Example:
        >>> muvox.pool(torch.randn(8, 100, 22), aggregates=("mean", "max")).shape
        torch.Size([8, 44])
    """
    code = common.encode("pool", aggregates)
    x, splits, lead = common.flatten("pool", splits, x=x)
    save = common.needs_grad(x)
    return common.restore(torch.ops.muvox.pool(x, splits, code, save)[0], lead)


@torch.library.register_fake("muvox::pool")
def _fake(x, splits, aggregates, save):
    common.check_rows("pool", splits, x=x)
    sets, width, winners = common.set_count(splits, x), x.shape[-1], common.winner_blocks(aggregates)
    return (
        common.empty(x, (sets, common.blocks(aggregates) * width)),
        common.empty(x, (sets, winners * width) if save and winners else None, torch.int32),
    )


@torch.library.register_fake("muvox::pool_backward")
def _fake_backward(grad_out, x, splits, winners, aggregates, wanted):
    common.check_rows("pool", splits, x=x)
    return common.empty_gradients(wanted, x)[0]


def _setup(ctx, inputs, output):
    x, splits, ctx.aggregates, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, splits, output[1])


def _backward(ctx, grad_out, _winners):
    if grad_out is None or not ctx.needs_input_grad[0]:
        return (None,) * 4
    return torch.ops.muvox.pool_backward(grad_out, *ctx.saved_tensors, ctx.aggregates, 1), None, None, None


torch.library.register_autograd("muvox::pool", _backward, setup_context=_setup)
common.refuse_second_derivative("pool")
common.register_autocast("pool", places=(0,))
