"""Mean, maximum and sum over each set."""

import torch

from muvox.ops import _common as common
from muvox.ops import _second_order as second
from muvox.ops import _register as register
from muvox.ops._vmap import register_vmap


def pool(x, *, splits=None, aggregates=("mean", "max"), mask=None, row_weights=None):
    """Aggregates the rows of each set. Ties of max and absmax go to the first row; absmax is max |x|; NaN is never hidden.
    An empty set gives 0.

    Args:
        x: (…, M, F), or (N, F) with splits, or jagged nested (S, j, F); half, bfloat16, float or double.
        splits: int64 (S + 1): where the sets of a ragged batch begin and end.
        aggregates: one or more of "mean", "max", "absmax", "sum", in the order of the output.
        mask: bool (…, M), (N) or jagged nested: rows that are False take no part, and NaN in them has no effect.
        row_weights: w ≥ 0, (…, M), (N) or jagged nested, float (double exactly if x is double; half and bfloat16 are
            widened): the mean is Σ w x / Σ w, 0 if no weight is left, and the sum Σ w x; max and absmax do not look at
            them.

    Returns:
        (…, n · F), or (S, n · F) with splits or nested x, dtype of x: one block of F columns for each of the n aggregates.
        Differentiable in x and row_weights.

    Raises:
        ValueError, RuntimeError: wrong dimensions, dtype, splits or aggregates; the message names the argument.

    Memory: the output. Saved for backward: inputs and, for each of max and absmax, S · F winners of 4 bytes.

    Accuracy: half and bfloat16 results are those of double arithmetic on the given inputs to one unit in the last
    place of each value, and like float ones to 16 of float at the largest.

    Under autocast x goes to the autocast dtype; sums are in float all the same.

    Example:
        >>> muvox.pool(torch.randn(8, 100, 22), aggregates=("mean", "max")).shape
        torch.Size([8, 44])
    """
    code = common.encode("pool", aggregates)
    x, mask, weights, splits, layout = common.flatten(
        "pool", splits, {"x": x}, {"mask": mask, "row_weights": common.widened(row_weights)}
    )
    save = common.needs_grad(x, weights)
    return common.restore_sets(torch.ops.muvox.pool(x, splits, mask, weights, code, save)[0], layout)


@torch.library.register_fake("muvox::pool")
def _fake(x, splits, mask, row_weights, aggregates, save):
    common.check_rows("pool", splits, {"mask": mask, "row_weights": row_weights}, x=x)
    sets, width, winners = common.set_count(splits, x), x.shape[-1], common.winner_blocks(aggregates)
    return (
        common.empty(x, (sets, common.blocks(aggregates) * width)),
        common.empty(x, (sets, winners * width) if save and winners else None, torch.int32),
    )


@torch.library.register_fake("muvox::pool_backward")
def _fake_backward(grad_out, x, splits, mask, row_weights, winners, aggregates, wanted):
    rows = common.check_rows("pool", splits, {"mask": mask, "row_weights": row_weights}, x=x)
    return (
        *common.empty_gradients(wanted, x),
        common.empty(x, rows if wanted & 2 else None, common.wide(x.dtype)),
    )


def _setup(ctx, inputs, output):
    *tensors, ctx.aggregates, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, output[1])


def _backward(ctx, grad_out, _winners):
    needed = ctx.needs_input_grad[0], ctx.needs_input_grad[3]
    if grad_out is None or not any(needed):
        return (None,) * 6
    gradients = torch.ops.muvox.pool_backward(grad_out, *ctx.saved_tensors, ctx.aggregates, common.wanted(needed))
    grad_x, grad_row_weights = common.only(needed, gradients)
    return grad_x, None, None, grad_row_weights, None, None


def _flops(x, splits, mask, row_weights, aggregates, save):
    return x.numel() * common.blocks(aggregates)


def _flops_backward(grad_out, x, splits, mask, row_weights, winners, aggregates, wanted):
    return x.numel() * common.blocks(aggregates)


def _blocks(grad_out, x, splits, mask, row_weights, winners, aggregates, wanted):
    F = x.shape[-1]
    for of_rows, of_sets, M in second.over_sets(splits, x, lambda M: M * F):
        valid = of_rows(mask) if second.given(mask) else None
        rank = of_sets(winners) if second.given(winners) else None

        def forward(y, valid=valid, rank=rank):
            x, weights = second.masked(y[0], valid), second.masked(y[1], valid)
            if weights is None:
                weights = torch.ones_like(x[..., 0]) if valid is None else valid.to(x.dtype)
            outputs, block = [], 0
            for kind in second.kinds(aggregates):
                if kind in (1, 4):
                    sums, total = (weights[..., None] * x).sum(1), weights.sum(1)[:, None]
                    mean = torch.where(total == 0, 0, sums / torch.where(total == 0, 1, total))
                    outputs.append(mean if kind == 1 else sums)
                    continue
                row = rank[:, block * F : (block + 1) * F].long()
                won = torch.where(row < 0, 0, x.gather(1, row.clamp(min=0)[:, None]).squeeze(1))
                outputs.append(won if kind == 2 else won.abs())
                block += 1
            return [torch.cat(outputs, -1)]

        yield forward, of_sets, (of_rows,) * 2


register.register_autograd("pool", _backward, _setup)
second.register("pool", grads=(0,), inputs=(1, 4), blocks=_blocks)
register.register_autocast("pool", places=(0,))
register.register_flops("pool", _flops, _flops_backward)
register_vmap("pool", splits=(1,))
register_vmap("pool_backward", splits=(2,))
