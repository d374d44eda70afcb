"""What the tests of properties share: every operator as a function of rows (…, 10), and how to draw them.

op(x, splits, k) gives a tuple of results. x holds all that has a row; what has none is made from constants.
"""

import torch
from hypothesis import settings
from hypothesis import strategies as st

import muvox
from muvox.nn.sets import row_sets

ALL = ("mean", "max", "absmax", "sum")

# The same examples in every run; the drawn integers pick sizes and seed the tensors.
few = settings(max_examples=12, deadline=None, derandomize=True, database=None)
seeds = st.integers(0, 2**31 - 1)
rows = st.integers(1, 90)  # past every vector and block of the kernels
sets = st.integers(1, 5)
ks = st.integers(1, 50)
lengths = st.lists(st.integers(0, 90), min_size=1, max_size=6)


def constants(*shape, seed=5, dtype=torch.double):
    return (0.5 * torch.randn(*shape, dtype=torch.double, generator=torch.Generator().manual_seed(seed))).to(dtype)


# Operators on sets


def knn(x, splits, k):
    return muvox.knn(x[..., :4].contiguous(), k, splits=splits, return_counts=True)


def gravnet(x, splits, k):
    return (muvox.gravnet(x[..., :4], x[..., 4:], k, splits=splits, aggregates=ALL),)


def aggregate(x, splits, k):
    neighbours, distance2 = muvox.knn(x[..., :4], k, splits=splits)
    return (muvox.aggregate(x[..., 4:], neighbours, torch.exp(-distance2).to(x.dtype), splits=splits, aggregates=ALL),)


def attention(x, splits, k):
    q, key, v = x[..., :3], x[..., 3:6], x[..., 6:]
    return muvox.attention(q, key, v, splits=splits, return_lse=True)


def offset_attention(x, splits, k):
    return (muvox.offset_attention(x[..., :3], x[..., 3:6], x[..., 6:], splits=splits),)


def neighbour_attention(x, splits, k, offset=False):
    """The operator on rows that the layers were applied to; torch's products, which apply them, round otherwise for
    another number of rows."""
    none = x.new_empty(0, dtype=torch.int64)
    wide = torch.promote_types(x.dtype, torch.float)
    biases = [constants(1, width, seed=width, dtype=wide) for width in (2, 2, 3, 3)]
    o = x[..., 6:9] if offset else none
    values = x[..., :2], x[..., 2:5], x[..., 5:7], x[..., 7:9], x[..., 7:10], o
    arguments = none if splits is None else splits, none, k, 0.5, 0x4321, 4, offset, True
    return (torch.ops.muvox.neighbour_attention(*values, *biases, *arguments)[0],)


def neighbour_offset_attention(x, splits, k):
    return neighbour_attention(x, splits, k, offset=True)


def pool(x, splits, k):
    return (muvox.pool(x, splits=splits, aggregates=ALL),)


# Operators on voxels: a set is a voxel, or a row a point


def voxelize(x, splits, k):
    """The mean of each set, and the same of every second row over half their number."""
    if splits is None:
        index = torch.arange(x.shape[:-2].numel()).repeat_interleave(x.shape[-2])
        counts = torch.full((x.shape[:-2].numel(),), x.shape[-2])
        (out,) = voxelize_rows(x.flatten(0, -2), index, counts)
        return (out.view(*x.shape[:-2], -1),)
    return voxelize_rows(x, row_sets(splits, len(x)), splits.diff())


def voxelize_rows(x, index, counts):
    first = x[:, :5].contiguous()
    return (torch.cat([muvox.voxelize(first, index, counts), muvox.voxelize(x[:, 5:], index.int(), counts.int())], 1),)


def trilinear_weights(x, splits, k):
    index, weights = muvox.trilinear_weights(x[..., :3], *GRID)
    return index, weights


GRID = (-1.0, -1.5, -1.0), (0.75, 0.5, 1.0), (3, 5, 2)


def devoxelize(x, splits, k):
    """Each row is read at eight of twelve voxels, some of them nowhere, which its own values number."""
    feats = constants(12, 7, dtype=x.dtype)
    index = (40 * x.detach()[..., 2:].float().nan_to_num()).long() % 15 - 2
    flat = x[..., :8].reshape(-1, 8)
    weights = flat if x.dtype == torch.double else flat.float()
    return (muvox.devoxelize(feats, index.reshape(-1, 8), weights).view(*x.shape[:-1], 7),)


OPS = {
    "knn": knn,
    "gravnet": gravnet,
    "aggregate": aggregate,
    "attention": attention,
    "offset_attention": offset_attention,
    "neighbour_attention": neighbour_attention,
    "neighbour_attention, offset": neighbour_offset_attention,
    "pool": pool,
    "voxelize": voxelize,
    "devoxelize": devoxelize,
    "trilinear_weights": trilinear_weights,
}
PER_SET = ("pool", "voxelize")  # results have one row for each set, the others one for each row
SETLESS = ("devoxelize", "trilinear_weights")


def floating(outputs):
    return [y for y in outputs if y.is_floating_point()]


def gradient(outputs, x):
    """For ones as gradient of the floating outputs: every row counts alike."""
    outputs = floating(outputs)
    return torch.autograd.grad(outputs, x, [torch.ones_like(y) for y in outputs])[0]


def with_gradient(op, x, splits, k):
    """Outputs, then the gradient of x."""
    x = x.detach().requires_grad_()
    outputs = op(x, splits, k)
    return *outputs, gradient(outputs, x)


def equal(got, right):
    return len(got) == len(right) and all(torch.equal(a, b) for a, b in zip(got, right))


def features(seed, shape, dtype=torch.float):
    """Random rows at distinct distances from each other, 10 columns wide."""
    return constants(*shape, 10, seed=seed, dtype=dtype)


def permutation(seed, n):
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))
