"""Self-attention over the rows of each set."""

import math

import torch

from muvox.ops import _common as common
from muvox.ops import _second_order as second
from muvox.ops import _register as register
from muvox.ops._vmap import register_vmap


def attention(
    q, k, v, *, splits=None, scale=None, bias=None, mask=None, row_weights=None, return_lse=False
):
    """out_i = Σ_j P_ij v_j, P_ij ∝ w_j exp(scale · q_i·k_j + b_j), Σ_j P_ij = 1, over the rows j of row i's set, without
    the M × M matrix.

    Args:
        q, k: (…, M, A), or (N, A) with splits, or jagged nested (S, j, A); half, bfloat16, float or double, one dtype for
            q, k and v.
        v: (…, M, C), (N, C) or jagged nested (S, j, C).
        splits: int64 (S + 1): where the sets of a ragged batch begin and end.
        scale: finite number; None for 1/√A.
        bias: b, (…, M), (N) or jagged nested, float (double for double; half and bfloat16 are widened); 0 unless given.
        mask: bool of that shape: rows that are False take no part, neither as i nor as j; their output is 0, their lse
            −inf, and NaN in them has no effect.
        row_weights: w ≥ 0 of that shape and the dtype of bias; 1 unless given. A row of weight 0 is no key.
        return_lse: give lse_i = log Σ_j w_j exp(scale · q_i·k_j + b_j) too.

    Returns:
        out: (…, M, C), (N, C) or jagged nested (S, j, C), dtype of v. A row without keys gives 0.
        lse: float (double for double) (…, M), (N) or jagged nested, only with return_lse.
        Both are differentiable in q, k, v, bias and row_weights.

    Raises:
        ValueError, RuntimeError: wrong dimensions, dtypes, splits or scale; the message names the argument.

    Memory: the results. Saved for backward: inputs, out and lse. Nothing of size M². Every run gives the same bits.

    Accuracy: half and bfloat16 results are those of double arithmetic on the given inputs to one unit in the last
    place of each value, and like float ones to 16 of float at the largest.

    Under autocast q, k and v go to the autocast dtype, bias and row_weights stay as they are.

    Example:
        >>> q, k, v = torch.randn(8, 1000, 12 + 12 + 20).split([12, 12, 20], -1)   # slices are not copied
        >>> muvox.attention(q, k, v).shape
        torch.Size([8, 1000, 20])
    """
    scale = math.nan if scale is None else common.finite("attention", "scale", scale)
    columns = {"bias": common.widened(bias), "mask": mask, "row_weights": common.widened(row_weights)}
    q, k, v, bias, mask, weights, splits, layout = common.flatten(
        "attention", splits, {"q": q, "k": k, "v": v}, columns
    )
    out, lse = torch.ops.muvox.attention(q, k, v, splits, bias, mask, weights, scale)
    out = common.restore(out, layout)
    return (out, common.restore(lse, layout)) if return_lse else out


def _check(splits, bias, mask, row_weights, **tensors):
    columns = {"bias": bias, "mask": mask, "row_weights": row_weights}
    return common.check_rows("attention", splits, columns, **tensors)


@torch.library.register_fake("muvox::attention")
def _fake(q, k, v, splits, bias, mask, row_weights, scale):
    rows = _check(splits, bias, mask, row_weights, q=q, k=k, v=v)
    return common.empty(v, v.shape), common.empty(q, rows, common.wide(q.dtype))


@torch.library.register_fake("muvox::attention_backward")
def _fake_backward(grad_out, grad_lse, q, k, v, splits, bias, mask, row_weights, out, lse, scale, wanted):
    rows = _check(splits, bias, mask, row_weights, q=q, k=k, v=v, grad_out=grad_out, out=out)
    wide = common.wide(q.dtype)
    return (
        *common.empty_gradients(wanted, q, k, v),
        common.empty(q, rows if wanted & 8 else None, wide),
        common.empty(q, rows if wanted & 16 else None, wide),
    )


def _setup(ctx, inputs, output):
    *tensors, ctx.scale = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx, grad_out, grad_lse):
    needed = *ctx.needs_input_grad[:3], ctx.needs_input_grad[4], ctx.needs_input_grad[6]
    if (grad_out is None and grad_lse is None) or not any(needed):
        return (None,) * 8
    v, lse = ctx.saved_tensors[2], ctx.saved_tensors[-1]
    if grad_out is None:  # one row of zeros stands for all
        grad_out = v.new_zeros(v.shape[-1]).expand(v.shape)
    if grad_lse is None:
        grad_lse = common.empty(lse)
    gradients = torch.ops.muvox.attention_backward(
        grad_out, grad_lse, *ctx.saved_tensors, ctx.scale, common.wanted(needed)
    )
    grad_q, grad_k, grad_v, grad_bias, grad_row_weights = common.only(needed, gradients)
    return grad_q, grad_k, grad_v, None, grad_bias, None, grad_row_weights, None


def _flops(q, k, v, splits, *_):
    return 2 * (q.shape[-1] + v.shape[-1]) * register.pairs(splits, q)


def _flops_backward(grad_out, grad_lse, q, k, v, splits, *_):
    return 2 * (3 * q.shape[-1] + 2 * v.shape[-1]) * register.pairs(splits, q)


def _flops_second(grad_out, grad_lse, q, k, v, splits, *_):
    """Forward's two products, two for each of them in backward, and two for each of these six."""
    return 2 * 9 * (q.shape[-1] + v.shape[-1]) * register.pairs(splits, q)


def _blocks(
    grad_out, grad_lse, q, k, v, splits, bias, mask, row_weights, out, lse, scale, wanted
):
    scale = 1 / math.sqrt(q.shape[-1]) if math.isnan(scale) else scale
    for of_rows, _, M in second.over_sets(splits, q, lambda M: M * M):
        valid = of_rows(mask) if second.given(mask) else None
        for rows in second.row_slices(M, M):

            def forward(x, rows=rows, valid=valid):
                q, k, v, bias, weights = (second.masked(y, valid) for y in x)
                score = scale * q[:, rows] @ k.mT
                if bias is not None:
                    score = score + bias[:, None]
                factor = torch.ones_like(score) if weights is None else weights[:, None].expand_as(score)
                factor = factor if valid is None else torch.where(valid[:, None], factor, 0)
                top = score.detach().masked_fill(factor == 0, -math.inf).amax(-1, keepdim=True)
                top = torch.where(top == -math.inf, 0, top)
                share = factor * torch.exp(score - top)
                total = share.sum(-1)
                some = (total != 0) if valid is None else (total != 0) & valid[:, rows]
                total = torch.where(some, total, 1)
                return [
                    torch.where(some[..., None], share @ v / total[..., None], 0),
                    torch.where(some, top.squeeze(-1) + total.log(), 0),
                ]

            yield forward, (lambda g, of_rows=of_rows, rows=rows: of_rows(g)[:, rows]), (of_rows,) * 5


register.register_autograd("attention", _backward, _setup)
second.register("attention", grads=(0, 1), inputs=(2, 3, 4, 6, 8), blocks=_blocks)
register.register_autocast("attention", places=(0, 1, 2))
register.register_flops("attention", _flops, _flops_backward, _flops_second)
register_vmap("attention", splits=(3,))
register_vmap("attention_backward", splits=(5,))
