"""What the tests of the operators share: formulas in plain torch that know nothing of muvox, layouts of sets, comparison."""

import math

import torch

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
UNITS = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24, torch.float64: 2.0**-53}
ALL = ("mean", "max", "absmax", "sum")

# Rows of uniform sets by their dimensions, of ragged ones by splits.
LAYOUTS = {
    "one set": ((7,), None),
    "uniform": ((3, 6), None),
    "leading dimensions": ((2, 3, 5), None),
    "one row": ((4, 1), None),
    "no rows": ((3, 0), None),
    "no sets": ((0, 4), None),
    "leading dimensions, no sets": ((2, 0, 4), None),
    "ragged": ((12,), [0, 5, 5, 6, 12]),
    "ragged, one set": ((5,), [0, 5]),
    "ragged, no rows": ((0,), [0, 0, 0]),
    "ragged, no sets": ((0,), [0]),
}

# From a tensor of the test to one of the same shape with other strides.
VIEWS = {
    "contiguous": lambda x: x,
    "columns apart": lambda x: x.mT.contiguous().mT,
    "sliced": lambda x: torch.cat([x, x, x], -1)[..., x.shape[-1] : 2 * x.shape[-1]],
    "sets innermost": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "every other row": lambda x: x.repeat_interleave(2, -2)[..., ::2, :],
    "one set for all": lambda x: x[:1].expand(x.shape),
    "one row for all": lambda x: x[:, :1].expand(x.shape),
    "one column for all": lambda x: x[..., :1].expand(x.shape),
}


def layout(name, *widths, dtype=torch.float64):
    """Tensors of these widths that require gradients, and splits."""
    rows, splits = LAYOUTS[name]
    tensors = [torch.randn(*rows, width).to(dtype).requires_grad_() for width in widths]
    return *tensors, None if splits is None else torch.tensor(splits)


def columns(name, *, dtype=torch.float64):
    """Mask and row weights for a layout: about a third of the rows masked, and a third of weight 0."""
    rows = LAYOUTS[name][0]
    mask = torch.rand(rows) < 0.7
    return mask, (torch.rand(rows).to(dtype) * (torch.rand(rows) < 0.7)).requires_grad_()


def with_nan(x, mask):
    """x with NaN in the rows that the mask leaves out."""
    return x.masked_fill(~mask[..., None] if x.dim() > mask.dim() else ~mask, math.nan)


def per_set(function, splits, *tensors):
    """The results of function(rows, ...) for each set, in the layout of the first tensor, which has a width."""
    if splits is not None:
        sizes = splits.diff().tolist()
        found = [function(*rows) for rows in zip(*(x.split(sizes) for x in tensors))]
        return torch.cat(found) if found else None
    lead = tensors[0].shape[:-2]
    sets = zip(*(x.reshape(math.prod(lead), *x.shape[len(lead) :]) for x in tensors))
    found = [function(*rows) for rows in sets]
    return torch.stack(found).reshape(*lead, *found[0].shape) if found else None


def kept(function, mask, *rows, fill=0.0):
    """function of the rows where the mask is True, its result in their places among all rows."""
    found = function(*(x[mask] for x in rows))
    return found.new_full((len(mask), *found.shape[1:]), fill).index_put((mask,), found)


# The formulas, for one set in double


def nearest(x, k):
    """Row numbers (M, n), n = min(k, M), nearest first and ties to the lower number, and the squared distances."""
    distance2 = (x[:, None] - x[None]).square().sum(-1)
    order = distance2.detach().argsort(dim=-1, stable=True)[:, :k]
    return order, distance2.gather(1, order)


def combine(m, dim, aggregates):
    """Aggregates of m over a dimension; none of it gives 0."""
    if m.shape[dim] == 0:
        return torch.cat([m.sum(dim)] * len(aggregates), -1)
    index = {"max": m.max(dim, keepdim=True).indices, "absmax": m.abs().max(dim, keepdim=True).indices}
    found = {"mean": m.mean(dim), "sum": m.sum(dim), "max": m.gather(dim, index["max"]).squeeze(dim)}
    found["absmax"] = m.gather(dim, index["absmax"]).squeeze(dim).abs()
    return torch.cat([found[name] for name in aggregates], -1)


def search(x, k, queries=None, exclude_self=False, max_radius=math.inf):
    """For each query (each row of x) the numbers of its neighbours, nearest first, and the squared distances."""
    found = []
    for i, query in enumerate(x if queries is None else queries):
        distance2 = (query - x).square().sum(-1)
        order = distance2.detach().argsort(stable=True)
        order = order[(distance2[order] <= max_radius**2) & ~((order == i) & exclude_self)][:k]
        found.append((order, distance2[order]))
    return found


def gravnet(x, f, k, scale=10.0, aggregates=("mean", "max")):
    order, distance2 = nearest(x, k)
    return combine(torch.exp(-scale * distance2)[..., None] * f[order], 1, aggregates)


def gravnet_by_rows(x, f, w, k, scale=10.0, aggregates=("mean", "max"), mean="count", **options):
    """With row weights and the options of the search; row by row, as rows differ in their number of neighbours."""
    rows = []
    for order, distance2 in search(x, k, **options):
        m = (torch.exp(-scale * distance2) * w[order])[:, None] * f[order]
        row = combine(m, 0, aggregates)
        if mean == "k" and "mean" in aggregates:
            at = aggregates.index("mean") * f.shape[1]
            row = torch.cat([row[:at], m.sum(0) / k, row[at + f.shape[1] :]])
        rows.append(row)
    return torch.stack(rows) if rows else f.new_zeros(0, len(aggregates) * f.shape[1])


def attention(q, k, v, scale=None, bias=0.0, weights=None):
    """Output and, as the last column, lse; a key of weight 0 is none, and without keys the output is 0."""
    scores = q @ k.T * (q.shape[-1] ** -0.5 if scale is None else scale) + bias
    if weights is None:
        return torch.cat([scores.softmax(-1) @ v, scores.logsumexp(-1, keepdim=True)], -1)
    if not (weights > 0).any():
        return torch.cat([torch.zeros_like(v) * v, scores.new_full((len(q), 1), -math.inf)], -1)
    largest = scores.masked_fill(weights == 0, -math.inf).max(-1, keepdim=True).values.detach()
    shares = weights * torch.exp(scores - largest)  # differentiable in a weight of 0 too
    sums = shares.sum(-1, keepdim=True)
    return torch.cat([shares @ v / sums, sums.log() + largest], -1)


def offset_attention(q, k, v, scale=1.0, eps=1e-17):
    a = (q @ k.T * scale).softmax(0)
    return (a @ v) / (a.sum(1, keepdim=True) + eps)


def pool(x, w, aggregates=("mean", "max")):
    """Weighted mean and sum; max and absmax do not look at the weights."""
    if w.sum() == 0:
        mean = torch.zeros_like(x).sum(0)
    else:
        mean = (w[:, None] * x).sum(0) / w.sum()
    found = {"mean": mean, "sum": (w[:, None] * x).sum(0)}
    return torch.cat([found[name] if name in found else combine(x, 0, (name,)) for name in aggregates])


# Comparison


def rounding(dtype, units):
    """So many units of rounding of dtype, and a hundred times more in float and double."""
    return units * UNITS[dtype] * (1 if dtype in (torch.float16, torch.bfloat16) else 100)


def assert_near(actual, expected, dtype, units=4, least=0.0):
    """To so many units of rounding of dtype (or of the coarsest of several) of the largest value."""
    assert actual.shape == expected.shape and torch.isfinite(actual).all()
    if expected.numel() == 0:
        return
    dtypes = (dtype,) if isinstance(dtype, torch.dtype) else dtype
    limit = max(rounding(d, units) for d in dtypes) * max(expected.abs().max().item(), least)
    assert (actual.double() - expected.double()).abs().max().item() <= limit


def compare(op, formula, inputs, dtype, units=4):
    """Values, and gradients of all inputs for a random gradient, against the formula in double at the same inputs."""
    actual = op(*inputs)
    gradient = torch.randn(actual.shape).to(dtype)
    found = torch.autograd.grad(actual, inputs, gradient)
    assert actual.dtype == dtype
    assert [(g.shape, g.dtype) for g in found] == [(x.shape, x.dtype) for x in inputs]
    if not any(x.numel() for x in inputs):
        assert not actual.any()  # nothing, or a zero for each empty set
        return
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = formula(*exact)
    assert_near(actual, expected, dtype, units)
    expected = expected + sum(0 * x.sum() for x in exact)  # a formula may leave an input out, or all
    known = torch.autograd.grad(expected, exact, gradient.double())
    largest = max(e.abs().max().item() for e in known if e.numel())
    for g, x, e in zip(found, inputs, known):  # what is zero by cancellation is compared with the other gradients
        assert_near(g, e, (x.dtype, dtype), 4 * units, least=largest / 10)
