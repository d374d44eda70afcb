"""Offset attention over the rows of each set: softmax over the queries, then each row divided by its sum."""

import math

import torch

from muvox.ops import _common as common
from muvox.ops import _second_order as second
from muvox.ops import _register as register
from muvox.ops._vmap import register_vmap


def offset_attention(q, k, v, *, splits=None, scale=1.0, eps=1e-17, mask=None):
    """out_i = Σ_j A_ij v_j / (Σ_j A_ij + eps), A_ij = exp(scale · q_i·k_j) / Σ_i' exp(scale · q_i'·k_j), over the rows
    j of row i's set, without the M × M matrix (LUMIN's OffsetSelfAttention between its layers).

    The softmax runs over the queries i of each key j: exchanging q and k gives another result.

    Args:
        q, k: (…, M, A), or (N, A) with splits, or jagged nested (S, j, A); half, bfloat16, float or double, one dtype
            for q, k and v.
        v: (…, M, C), (N, C) or jagged nested (S, j, C).
        splits: int64 (S + 1): where the sets of a ragged batch begin and end.
        scale: finite number.
        eps: finite number, at least 0.
        mask: bool (…, M), (N) or jagged nested: rows that are False take no part, neither as i nor as j; their output
            is 0, and NaN in them has no effect.

    Returns:
        (…, M, C), (N, C) or jagged nested (S, j, C), dtype of v. Differentiable in q, k and v.

    Raises:
        ValueError, RuntimeError: wrong dimensions, dtypes, splits, scale or eps; the message names the argument.

    Memory: the output. Saved for backward: inputs, output and two numbers for each row. Nothing of size M². Every run
    gives the same bits.

    Accuracy: half and bfloat16 results are those of double arithmetic on the given inputs to one unit in the last
    place of each value, and like float ones to 16 of float at the largest.

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


def _flops_second(grad_out, q, k, v, splits, *_):
    """Of the columns 3, 3 again and 4 for their gradients; of the rows 3 + 3 and 4 + 5 for theirs."""
    return 2 * (17 * q.shape[-1] + 8 * v.shape[-1]) * register.pairs(splits, q)


# The second derivative. Σ <backward's results, outer> is the derivative of <o, grad_out>, o the output, in the
# direction `outer` of (q, k, v). With a dot for such derivatives, S_ij = scale · q_i·k_j and A_ij = exp(S_ij − L_j):
#
#     L_j = log Σ_i exp S_ij,                L̇_j = Σ_i A_ij Ṡ_ij                        (_columns)
#     r_i = Σ_j A_ij + eps,                  ṙ_i = Σ_j Ȧ_ij,    Ȧ_ij = A_ij (Ṡ_ij − L̇_j)
#     o_i = Σ_j A_ij v_j / r_i,              ȯ_i = (Σ_j (Ȧ_ij v_j + A_ij v̇_j) − ṙ_i o_i) / r_i   (_along)
#
# Columns tie all rows of a set together, but only through L and L̇: one pass over columns makes them, one over rows the
# gradients of Σ <ȯ_i, grad_out_i> with L and L̇ as leaves, and one more over columns passes on what arrived at these.


def _columns(q, k, dq, dk, scale, valid):
    """L and L̇ (sets, columns) of the columns k (sets, columns, A) among all rows q (sets, M, A)."""
    score = scale * q @ k.mT
    if valid is not None:
        score = score.masked_fill(~valid[..., None], -math.inf)
    lse = score.logsumexp(-2)
    return lse, (torch.exp(score - lse[:, None]) * (scale * (dq @ k.mT + q @ dk.mT))).sum(-2)


def _along(q, k, v, lse, dlse, dq, dk, dv, scale, eps, valid):
    """ȯ (sets, rows, C) of the rows q (sets, rows, A)."""
    exponent = scale * q @ k.mT - lse[:, None]
    if valid is not None:
        exponent = exponent.masked_fill(~valid[:, None], -math.inf)
    top = exponent.detach().amax(-1, keepdim=True)  # a factor of both A and eps: no row is lost to underflow
    share = torch.exp(exponent - top)
    dshare = share * (scale * (dq @ k.mT + q @ dk.mT) - dlse[:, None])
    total = share.sum(-1, keepdim=True) + torch.exp((math.log(eps) if eps else -math.inf) - top)
    return (dshare @ v + share @ dv - dshare.sum(-1, keepdim=True) * (share @ v / total)) / total


def _of_sets(g, q, k, v, dq, dk, dv, scale, eps, valid):
    """Gradients in g, q, k and v, all (sets, M, …) and 0 where not valid."""
    M = q.shape[1]
    # Whatever outlives a pass has its place before: small tensors left between the blocks would break up the heap.
    lse, dlse, *ends = torch.zeros(4, *q.shape[:2], dtype=q.dtype, device=q.device)
    for at in second.row_slices(M, M):
        lse[:, at], dlse[:, at] = _columns(q, k[:, at], dq, dk[:, at], scale, valid)
    sums = *(torch.zeros_like(x) for x in (g, q, k, v)), *ends
    for at in second.row_slices(M, M):
        leaves = [x.detach().requires_grad_() for x in (q[:, at], k, v, lse, dlse)]
        with torch.enable_grad():
            along = _along(*leaves, dq[:, at], dk, dv, scale, eps, valid)
            found = torch.autograd.grad(along, leaves, g[:, at])
        for total, x in zip((sums[0][:, at], sums[1][:, at], *sums[2:]), (along.detach(), *found)):
            total.add_(x)
    for at in second.row_slices(M, M):
        leaves = [x.detach().requires_grad_() for x in (q, k[:, at])]
        with torch.enable_grad():
            both = _columns(*leaves, dq, dk[:, at], scale, valid)
            found = torch.autograd.grad(both, leaves, (sums[4][:, at], sums[5][:, at]))
        sums[1].add_(found[0])
        sums[2][:, at].add_(found[1])
    return sums[:4]


def _derivatives(gs, xs, outer, *arguments):
    splits, mask, (scale, eps, _) = arguments[4], arguments[5], arguments[9:]
    sums = [second.zeros(x) for x in (*gs, *xs)]
    outer = [torch.zeros_like(x) if y is None else y for x, y in zip(xs, outer)]
    for of_rows, _, M in second.over_sets(splits, xs[0], lambda M: M * M):
        valid = of_rows(mask) if second.given(mask) else None
        rows = (second.masked(second.wide(of_rows(x)), valid) for x in (*gs, *xs, *outer))
        # A set without valid rows holds zeros; it may as well keep all of them, which spares the case of an empty sum.
        among = None if valid is None else valid | ~valid.any(-1, keepdim=True)
        for total, x in zip(sums, _of_sets(*rows, scale, eps, among)):
            of_rows(total).add_(second.masked(x, valid))
    return sums


register.register_autograd("offset_attention", _backward, _setup)
second.register("offset_attention", grads=(0,), inputs=(1, 2, 3), derivatives=_derivatives)
register.register_autocast("offset_attention", places=(0, 1, 2))
register.register_flops("offset_attention", _flops, _flops_backward, _flops_second)
register_vmap("offset_attention", splits=(3,))
register_vmap("offset_attention_backward", splits=(4,))
