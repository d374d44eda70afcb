"""Self-attention over the neighbours of each row, then aggregation: GravNet's layer with LUMIN's use_sa."""

import torch
import torch.nn.functional as F

from muvox.ops import _common as common
from muvox.ops import _register as register
from muvox.ops import _second_order as second
from muvox.ops._vmap import register_vmap

ACTIVATIONS = {"linear": 0, "relu": 1, "selu": 2, "sigmoid": 3, "swish": 4, "mish": 5}
_FUNCTIONS = (lambda z: z, torch.relu, F.selu, torch.sigmoid, F.silu, F.mish)  # by these numbers
LAYERS = tuple(f"{layer} {part}" for layer in ("q", "k", "v", "out") for part in ("weight", "bias"))


def neighbour_attention(
    coords,
    feats,
    k,
    layers,
    *,
    splits=None,
    scale=10.0,
    aggregates=("mean", "max"),
    activation="relu",
    offset=False,
    mask=None,
):
    """Attention over the k nearest rows j of each row i, i included, then aggregation over them.

    The features f = exp(−scale · |x_i − x_j|²) · feats_j of row i's neighbours pass through LUMIN's SelfAttention,
    y = f + act(out(softmax(q kᵀ / √A) v)), or its OffsetSelfAttention, y = f + act(out(f − B v)) with B the softmax of
    q kᵀ over the queries, each row then divided by its sum + 1e-17; and y is aggregated over the neighbours as in
    gravnet. A row without neighbours (masked) gives 0.

    Args:
        coords: (…, M, d), or (N, d) with splits, or jagged nested (S, j, d); half, bfloat16 or float, double exactly if
            feats is double.
        feats: (…, M, F), (N, F) or jagged nested (S, j, F), half, bfloat16, float or double.
        k: at least 1; may exceed the number of rows.
        layers: eight tensors, weight and bias of q (A, F), (A), k (A, F), (A), v (F, F), (F) and out (F, F), (F), as
            torch.nn.Linear has them; dtype of feats, under autocast any.
        splits: int64 (S + 1): where the sets of a ragged batch begin and end.
        scale: finite number.
        aggregates: one or more of "mean", "max", "absmax", "sum", in the order of the output.
        activation: act, one of "linear", "relu", "selu", "sigmoid", "swish", "mish".
        offset: OffsetSelfAttention instead of SelfAttention.
        mask: bool (…, M), (N) or jagged nested: rows that are False take no part, neither as i nor as j; their output
            is 0, and NaN in them has no effect.

    Returns:
        (…, M, n · F), (N, n · F) or jagged nested (S, j, n · F), dtype of feats: one block of F columns for each of the
        n aggregates. Differentiable in coords, feats and layers.

    Raises:
        ValueError, RuntimeError: wrong dimensions, dtype, splits, k, layers, … ; the message names the argument.

    Memory: the layers are applied to each row once, not to each of its neighbours: N · (2 A + F) values, with offset
    N · (2 A + 2 F). Saved for backward: these, coords, feats, neighbours (N · k · 4 bytes) and, for each of max and
    absmax, N · F winners of 1 byte (4 if k > 254). Nothing of size M² or N · k · F. Every run gives the same bits.

    Accuracy: against double arithmetic on the given inputs, given the neighbours, 2 units in the last place of the
    largest value in half and bfloat16, in which the layers give their results, 64 in float.

    Under autocast feats and the layers go to the autocast dtype, coords and biases stay as they are.

    Example:
        >>> layers = [p for n in (5, 5, 22, 22) for p in torch.nn.Linear(22, n).parameters()]
        >>> muvox.neighbour_attention(torch.randn(8, 100, 4), torch.randn(8, 100, 22), 20, layers).shape
        torch.Size([8, 100, 44])
    """
    op = "neighbour_attention"
    code, scale = common.encode(op, aggregates), common.finite(op, "scale", scale)
    if activation not in ACTIVATIONS:
        raise ValueError(f"muvox.{op}: activation is {activation!r}, expected one of {', '.join(ACTIVATIONS)}")
    masked = mask is not None
    rows, columns = {"coords": coords, "feats": feats}, {"mask": mask}
    coords, feats, mask, splits, layout = common.flatten(op, splits, rows, columns)
    if masked:  # NaN there would reach the layers' gradients, as 0 · NaN
        feats = feats.masked_fill(~mask.unsqueeze(-1), 0)
    projected = _project(feats, _checked(layers, feats), offset)
    save = common.needs_grad(coords, feats, *projected)
    results = torch.ops.muvox.neighbour_attention(
        coords, feats, *projected, splits, mask, k, scale, code, ACTIVATIONS[activation], offset, save
    )
    return common.restore(results[0], layout)


def _checked(layers, feats):
    """The layers, of the shapes that belong together and a dtype that goes with feats."""
    if feats.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):  # before the layers see it
        raise ValueError(f"muvox.neighbour_attention: feats is {feats.dtype}, expected half, bfloat16, float or double")
    layers = tuple(layers)
    if len(layers) != len(LAYERS):
        raise ValueError(
            f"muvox.neighbour_attention: layers has {len(layers)} tensors, expected {len(LAYERS)}: {', '.join(LAYERS)}"
        )
    named = dict(zip(LAYERS, layers))
    common.require_tensors("neighbour_attention", named)
    width, A = feats.shape[-1], layers[0].shape[0] if layers[0].dim() else 0
    heights = (A, A, A, A, width, width, width, width)
    autocast = torch.is_autocast_enabled(feats.device.type)
    for (name, x), height in zip(named.items(), heights):
        expected = (height, width) if name.endswith("weight") else (height,)
        if common.differ(x.shape, expected):
            raise ValueError(
                f"muvox.neighbour_attention: {name} has shape {tuple(x.shape)}, expected {expected} "
                f"for feats of width {width}"
            )
        common.check_device("neighbour_attention", name, x, "feats", feats)
        if x.dtype != feats.dtype and not autocast:
            raise ValueError(
                f"muvox.neighbour_attention: {name} is {x.dtype} and feats is {feats.dtype}, "
                "expected one dtype for both"
            )
    return layers


def _project(feats, layers, offset):
    """q, k, v and o of each row, the layers out and v as one, and the biases, (1, width)."""
    q_weight, q_bias, k_weight, k_bias, v_weight, v_bias, out_weight, out_bias = layers
    wide = common.wide(feats.dtype)
    with torch.autocast(feats.device.type, enabled=False):
        folded = (out_weight.to(wide) @ v_weight.to(wide)).to(v_weight.dtype)
        v_bias = out_weight.to(wide) @ v_bias.to(wide)
    q, k, v = F.linear(feats, q_weight), F.linear(feats, k_weight), F.linear(feats, folded)
    o = F.linear(feats, out_weight) if offset else common.empty(feats)
    return q, k, v, o, *(bias.to(wide).unsqueeze(0) for bias in (q_bias, k_bias, v_bias, out_bias))


def _check(splits, mask, rows, biases):
    """The fakes' check of (coords, feats, q, k, v, o), o perhaps none, and the biases; returns (S, M) or (N,)."""
    named = dict(zip(("coords", "feats", "q", "k", "v", "o"), rows))
    if common.is_none(named["o"]):
        del named["o"]
    shape = common.check_rows("neighbour_attention", splits, {"mask": mask}, **named)
    for name, x in zip(("bias_q", "bias_k", "bias_v", "bias_out"), biases):
        common.check_device("neighbour_attention", name, x, "coords", rows[0])
    return shape


@torch.library.register_fake("muvox::neighbour_attention")
def _fake(*arguments):
    rows, biases, splits, mask = arguments[:6], arguments[6:10], *arguments[10:12]
    k, _, aggregates, _, _, save = arguments[12:]
    shape, feats = _check(splits, mask, rows, biases), rows[1]
    width, winners = feats.shape[-1], common.winner_blocks(aggregates)
    return (
        common.empty(feats, (*shape, common.blocks(aggregates) * width)),
        common.empty(feats, (*shape, k) if save else None, torch.int32),
        common.empty(feats, (*shape, winners * width) if save and winners else None, common.rank_dtype(k)),
    )


@torch.library.register_fake("muvox::neighbour_attention_backward")
def _fake_backward(grad_out, *arguments):
    rows, biases, splits, wanted = arguments[:6], arguments[6:10], arguments[10], arguments[-1]
    _check(splits, splits.new_empty(0), rows, biases)
    coords, feats, q, k, v, o = rows
    return common.empty_gradients(wanted, coords, feats, q, k, v, feats if common.is_none(o) else o, *biases)


def _setup(ctx, inputs, output):
    _, ctx.scale, ctx.aggregates, ctx.activation, ctx.offset, _ = inputs[12:]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:11], output[1], output[2])


def _backward(ctx, grad_out, _neighbours, _winners):
    needed = ctx.needs_input_grad[:10]
    if grad_out is None or not any(needed):
        return (None,) * 18
    gradients = torch.ops.muvox.neighbour_attention_backward(
        grad_out, *ctx.saved_tensors, ctx.scale, ctx.aggregates, ctx.activation, ctx.offset, common.wanted(needed)
    )
    return *common.only(needed, gradients), *(None,) * 8


def _pairs_of_neighbours(feats, q, places, aggregates, offset):
    """Operations of the attention over `places` rows of k neighbours each, for one pass through the tiles."""
    rows, k = places
    A, width = q.shape[-1], feats.shape[-1]
    return 2 * rows * k * (k * (A + width) + 2 * A + (2 + offset) * width + width * common.blocks(aggregates))


def _flops(coords, feats, q, *others):
    splits, _, k, _, aggregates, _, offset, _ = others[7:]
    places = coords.shape[:-1].numel(), k
    return 3 * coords.shape[-1] * register.pairs(splits, coords) + _pairs_of_neighbours(
        feats, q, places, aggregates, offset
    )


def _flops_backward(grad_out, coords, feats, q, *others):
    neighbours, _, _, aggregates, _, offset, _ = others[8:]
    places = coords.shape[:-1].numel(), neighbours.shape[-1]
    # Forward again, then two products for each of its two.
    return 3 * _pairs_of_neighbours(feats, q, places, aggregates, offset) + 7 * coords.shape[-1] * neighbours.numel()


def _blocks(
    grad_out, coords, feats, q, k, v, o, bias_q, bias_k, bias_v, bias_out, splits, neighbours, winners, *numbers
):  # fmt: skip
    """The operator in plain torch for a block of rows, to be differentiated twice; neighbours, winners are constant."""
    scale, aggregates, activation, offset, _ = numbers
    numbers = second.row_numbers(neighbours, splits)
    ranks = second.flat(winners, splits) if second.given(winners) else None
    n, width = numbers.shape[1], feats.shape[-1]

    def flat(x):
        return second.flat(x, splits)

    for rows in second.row_slices(len(numbers), n * (n + coords.shape[-1] + 2 * q.shape[-1] + 4 * width)):
        j, found = numbers[rows], numbers[rows] >= 0

        def near(x, j=j, found=found):
            return second.neighbour_rows(x, j, found)

        def forward(x, rows=rows, near=near, found=found):
            coords, feats, q, k, v, o, bias_q, bias_k, bias_v, bias_out = x
            weight = torch.exp(-scale * second.squared_distance(coords[rows], near(coords), found))[..., None]
            score = (weight * near(q) + bias_q) @ (weight * near(k) + bias_k).mT
            lowest = torch.finfo(score.dtype).min  # finite: a row without neighbours has derivatives too, all 0
            if offset:
                share = score.masked_fill(~found[:, :, None], lowest).softmax(-2)
                share = torch.where(found[:, None], share, 0)
                share = -share / (share.sum(-1, keepdim=True) + 1e-17)
            else:
                share = (score * q.shape[-1] ** -0.5).masked_fill(~found[:, None], lowest).softmax(-1)
            z = share @ (weight * near(v) + bias_v) + bias_out
            y = weight * near(feats) + _FUNCTIONS[activation](z + weight * near(o) if offset else z)
            return [second.aggregate(y, found, None if ranks is None else ranks[rows], aggregates)]

        of_inputs = (flat,) * 6 + (lambda x: x,) * 4
        yield forward, (lambda g, rows=rows: flat(g)[rows]), of_inputs


register.register_autograd("neighbour_attention", _backward, _setup)
second.register("neighbour_attention", grads=(0,), inputs=range(1, 11), blocks=_blocks)
register.register_autocast("neighbour_attention", places=(1, 2, 3, 4, 5))
register.register_flops("neighbour_attention", _flops, _flops_backward)
# The biases belong to all sets, and their gradients are sums over all: the batch cannot become more sets.
register_vmap("neighbour_attention", splits=(10,), sets=False)
register_vmap("neighbour_attention_backward", splits=(11,), sets=False)
