"""Self-attention over the rows of each set."""

import math

import torch

from muvox.ops import _common as common


def attention(q, k, v, *, splits=None, scale=None, return_lse=False):
    """out_i = Σ_j softmax_j(scale · q_i·k_j) v_j over the rows j of row i's set, without the M × M matrix.

    Args:
        q, k: (…, M, A), or (N, A) with splits; half, bfloat16, float or double, one dtype for q, k and v.
        v: (…, M, C) or (N, C).
        splits: int64 (S + 1): where the sets of a ragged batch begin and end.
        scale: finite number; None for 1/√A.
        return_lse: give lse_i = log Σ_j exp(scale · q_i·k_j) too.

    Returns:
        out: (…, M, C) or (N, C), dtype of v.
        lse: float (double for double) (…, M) or (N), only with return_lse.
        Both are differentiable in q, k and v.

    Raises:
        ValueError, RuntimeError: wrong dimensions, dtypes, splits or scale; the message names the argument.

    Memory: the results. Saved for backward: q, k, v, out and lse. Nothing of size M². Every run gives the same bits.

    Under autocast q, k and v go to the autocast dtype.

    Example:
        >>> q, k, v = torch.randn(8, 1000, 12 + 12 + 20).split([12, 12, 20], -1)   # slices are not copied
        >>> muvox.attention(q, k, v).shape
        torch.Size([8, 1000, 20])
    """
    scale = math.nan if scale is None else common.finite("attention", "scale", scale)
    q, k, v, splits, lead = common.flatten("attention", splits, q=q, k=k, v=v)
    out, lse = torch.ops.muvox.attention(q, k, v, splits, scale)
    out = common.restore(out, lead)
    return (out, common.restore(lse, lead)) if return_lse else out


@torch.library.register_fake("muvox::attention")
def _fake(q, k, v, splits, scale):
    rows = common.check_rows("attention", splits, q=q, k=k, v=v)
    return common.empty(v, v.shape), common.empty(q, rows, common.wide(q.dtype))


@torch.library.register_fake("muvox::attention_backward")
def _fake_backward(grad_out, grad_lse, q, k, v, splits, out, lse, scale, wanted):
    common.check_rows("attention", splits, q=q, k=k, v=v, grad_out=grad_out, out=out)
    return common.empty_gradients(wanted, q, k, v)


def _setup(ctx, inputs, output):
    q, k, v, splits, ctx.scale = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, splits, *output)


def _backward(ctx, grad_out, grad_lse):
    needed = ctx.needs_input_grad[:3]
    if (grad_out is None and grad_lse is None) or not any(needed):
        return (None,) * 5
    v, lse = ctx.saved_tensors[2], ctx.saved_tensors[-1]
    if grad_out is None:  # one row of zeros stands for all
        grad_out = v.new_zeros(v.shape[-1]).expand(v.shape)
    if grad_lse is None:
        grad_lse = common.empty(lse)
    gradients = torch.ops.muvox.attention_backward(
        grad_out, grad_lse, *ctx.saved_tensors, ctx.scale, common.mask(needed)
    )
    return *common.only(needed, gradients), None, None


torch.library.register_autograd("muvox::attention", _backward, setup_context=_setup)
common.refuse_second_derivative("attention")
common.register_autocast("attention", places=(0, 1, 2))
