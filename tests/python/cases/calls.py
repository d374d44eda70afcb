"""Every operator under one signature, so that what one of them could get wrong is tried on all.

call(x, f, **how): rows x (…, M, 4) and f (…, M, 5) of the same sets, or (N, 4) and (N, 5) with splits=. Returns a tuple
of floating results, 0 where there is no neighbour.
"""

import torch

import muvox

ALL = ("mean", "max", "absmax", "sum")
DTYPES = [torch.half, torch.bfloat16, torch.float, torch.double]
K = 4


def knn(x, f, **how):
    neighbours, distance2 = muvox.knn(x, K, **how)
    return (distance2.masked_fill(neighbours < 0, 0),)


def knn_of_queries(x, f, splits=None, **how):
    """The features of a row look for coordinates."""
    queries = f[..., 1:].to(x.dtype)
    neighbours, distance2 = muvox.knn(x, K, splits=splits, queries=queries, query_splits=splits, **how)
    return (distance2.masked_fill(neighbours < 0, 0),)


def gravnet(x, f, **how):
    return (muvox.gravnet(x, f, K, scale=0.5, aggregates=ALL, **how),)


def aggregate(x, f, splits=None):
    neighbours = muvox.knn(x.detach(), K, splits=splits)[0]
    return (muvox.aggregate(f, neighbours, x, splits=splits, aggregates=ALL),)


def attention(x, f, **how):
    out, lse = muvox.attention(f[..., :4].to(x.dtype), x, f.to(x.dtype), return_lse=True, **how)
    return out, lse.masked_fill(lse == -torch.inf, 0)


def offset_attention(x, f, **how):
    return (muvox.offset_attention(f[..., :4].to(x.dtype), x, f.to(x.dtype), scale=0.5, **how),)


# Of neighbour_attention for features of width 5; query and key differ.
_generator = torch.Generator().manual_seed(5)
_shapes = (2, 5), (2,), (2, 5), (2,), (5, 5), (5,), (5, 5), (5,)
LAYERS = [0.6 * torch.randn(shape, generator=_generator, dtype=torch.double) for shape in _shapes]


def neighbour_attention(x, f, offset=False, **how):
    options = dict(scale=0.5, aggregates=ALL, activation="swish", offset=offset)
    return (muvox.neighbour_attention(x, f, K, [w.to(f.dtype) for w in LAYERS], **options, **how),)


def neighbour_attention_offset(x, f, **how):
    return neighbour_attention(x, f, offset=True, **how)


def pool(x, f, **how):
    return (muvox.pool(f, aggregates=ALL, **how),)


def voxelize(x, f):
    """Seven indices for five voxels: one before the first, one past the last."""
    f = f.flatten(0, -2)
    return (muvox.voxelize(f, torch.arange(f.shape[0]) % 7 - 1, size=5),)


def devoxelize(x, f):
    """Rows of f are voxels too; some places hold none."""
    x, f = x.flatten(0, -2), f.flatten(0, -2)
    places = torch.arange(f.shape[0])[:, None] * torch.tensor([1, 3, 5, 7]) % (f.shape[0] + 2) - 1
    return (muvox.devoxelize(f, places, x),)


def trilinear_weights(x, f):
    return (muvox.trilinear_weights(x[..., :3], (-1.3, -1.2, -1.1), (0.9, 0.8, 0.7), (3, 3, 4))[1],)


NEIGHBOURS = {
    "knn": knn,
    "gravnet": gravnet,
    "neighbour_attention": neighbour_attention,
    "neighbour_attention, offset": neighbour_attention_offset,
}
MASKED = NEIGHBOURS | {"attention": attention, "offset_attention": offset_attention, "pool": pool}
SETS = MASKED | {"knn of queries": knn_of_queries, "aggregate": aggregate}
POINTS = {"voxelize": voxelize, "devoxelize": devoxelize, "trilinear_weights": trilinear_weights}
CALLS = SETS | POINTS


def ragged(*lengths):
    return torch.tensor((0, *lengths)).cumsum(0)


def leaves(*shapes, dtype=torch.float):
    return [torch.randn(shape, dtype=torch.double).to(dtype).requires_grad_() for shape in shapes]


def rows(*shape, dtype=torch.float):
    """x and f."""
    return leaves((*shape, 4), (*shape, 5), dtype=dtype)


def gradients(outputs, inputs, entering=None, **how):
    """Of outputs, where each gradient is 1 unless given; zeros for an input that is not used."""
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    entering = entering or [torch.ones_like(y) for y in outputs]
    return torch.autograd.grad(outputs, inputs, entering, materialize_grads=True, **how)


def entering(y):
    """A gradient for y, the same each time."""
    return torch.linspace(-1, 1, y.numel(), dtype=torch.double).reshape(y.shape).to(y.dtype)


def run(call, x, f, **how):
    """Results, and the gradients of x and f."""
    results = call(x, f, **how)
    return *results, *gradients(results, [x, f], [entering(y) for y in results])


def assert_as(name, found, expected):
    """As assert_same; but neighbour_attention's layers are torch's, whose bits depend on strides and on other rows."""
    if "neighbour_attention" not in name:
        return assert_same(found, expected)
    assert len(found) == len(expected)
    for a, b in zip(found, expected):
        unit = torch.finfo(a.dtype).eps if a.numel() else 0
        torch.testing.assert_close(a, b, rtol=16 * unit, atol=32 * unit, equal_nan=True)


def assert_same(found, expected):
    """Bit for bit; NaN equals NaN."""
    assert len(found) == len(expected)
    for a, b in zip(found, expected):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
