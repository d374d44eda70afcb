"""Offset attention over the rows of each set: softmax over the queries, then each row divided by its sum."""

import math

import torch

from muvox.ops import _common as common
from muvox.ops import _second_order as second
from muvox.ops import _register as register
from muvox.ops._vmap import register_vmap


def offset_attention(q, k, v, *, splits=None, scale=1.0, eps=1e-17, mask=None):
    """out_i = Σ_j A_ij v_j / (Σ_j A_ij + eps), A_ij = exp(scale · q_i·k_j) / Σ_i' exp(scale · q_i'·k_j), over the rows j of
    row i's set, without the M × M matrix (LUMIN's OffsetSelfAttention between its layers).

    The softmax runs over the queries i of each key j: exchanging q and k gives another result.

    Args:
        q, k: (…, M, A), or (N, A) with splits, or jagged nested (S, j, A); half, bfloat16, float or double, one dtype for
            q, k and v.
        v: (…, M, C), (N, C) or jagged nested (S, j, C).
        splits: int64 (S + 1): where the sets of a ragged batch begin and end.
        scale: finite number.
        eps: finite number, at least 0.
        mask: bool (…, M), (N) or jagged nested: rows that are False take no part, neither as i nor as j; their output is
            0, and NaN in them has no effect.

    Returns:
        (…, M, C), (N, C) or jagged nested (S, j, C), dtype of v. Differentiable in q, k and v.

    Raises:
        ValueError, RuntimeError: wrong dimensions, dtypes, splits, scale or eps; the message names the argument.

    Memory: the output. Saved for backward: inputs, output and two numbers for each row. Nothing of size M². Every run
    gives the same bits.

    Under autocast q, k and v go to the autocast dtype.

    Example:
        >>> q, k, v = torch.randn(8, 1000, 12 + 12 + 20).split([12, 12, 20], -1)   # slices are not copied
        >>> muvox.offset_attention(q, k, v).shape
        torch.Size([8, 1000, 20])
    """
    scale = common.finite("offset_attention", "scale", scale)
    q, k, v, mask, splits, layout = common.flatten(
        "offset_attention", splits, {"q": q, "k": k, "v": v}, {"mask": mask}
    )
    return common.restore(torch.ops.muvox.offset_attention(q, k, v, splits, mask, scale, float(eps))[0], layout)


@torch.library.register_fake("muvox::offset_attention")
def _fake(q, k, v, splits, mask, scale, eps):
    rows = common.check_rows("offset_attention", splits, {"mask": mask}, q=q, k=k, v=v)
    wide = common.wide(q.dtype)
    return common.empty(v, v.shape), common.empty(q, rows, wide), common.empty(q, rows, wide)


@torch.library.register_fake("muvox::offset_attention_backward")
def _fake_backward(grad_out, q, k, v, splits, mask, out, column_lse, log_sum, scale, eps, wanted):
    common.check_rows("offset_attention", splits, {"mask": mask}, q=q, k=k, v=v, grad_out=grad_out, out=out)
    return common.empty_gradients(wanted, q, k, v)


def _setup(ctx, inputs, output):
    *tensors, ctx.scale, ctx.eps = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx, grad_out, _column_lse, _log_sum):
    needed = ctx.needs_input_grad[:3]
    if grad_out is None or not any(needed):
        return (None,) * 7
    gradients = torch.ops.muvox.offset_attention_backward(
        grad_out, *ctx.saved_tensors, ctx.scale, ctx.eps, common.wanted(needed)
    )
    return *common.only(needed, gradients), *(None,) * 4


def _flops(q, k, v, splits, *_):
    return 2 * (2 * q.shape[-1] + v.shape[-1]) * register.pairs(splits, q)  # the scores are computed twice


def _flops_backward(grad_out, q, k, v, splits, *_):
    return 2 * (4 * q.shape[-1] + 3 * v.shape[-1]) * register.pairs(splits, q)


def _blocks(grad_out, q, k, v, splits, mask, out, column_lse, log_sum, scale, eps, wanted):
    # Columns tie all rows of a set together: the block is the set.
    for of_rows, _, M in second.over_sets(splits, q, lambda M: M * M):
        valid = of_rows(mask) if second.given(mask) else None

        def forward(x, valid=valid):
            q, k, v = (second.masked(y, valid) for y in x)
            score = scale * q @ k.mT
            if valid is not None:
                score = score.masked_fill(~valid[..., None], -math.inf)
            top = score.detach().amax(-2, keepdim=True)
            top = torch.where(top == -math.inf, 0, top)
            share = torch.exp(score - top)
            share = share / torch.where(share.sum(-2, keepdim=True) == 0, 1, share.sum(-2, keepdim=True))
            if valid is not None:
                share = torch.where(valid[:, None], share, 0)
            total = share.sum(-1, keepdim=True) + eps
            return [torch.where(total == 0, 0, share @ v / torch.where(total == 0, 1, total))]

        yield forward, of_rows, (of_rows,) * 3


register.register_autograd("offset_attention", _backward, _setup)
second.register("offset_attention", grads=(0,), inputs=(1, 2, 3), blocks=_blocks)
register.register_autocast("offset_attention", places=(0, 1, 2))
register.register_flops("offset_attention", _flops, _flops_backward)
register_vmap("offset_attention", splits=(3,))
register_vmap("offset_attention_backward", splits=(4,))
