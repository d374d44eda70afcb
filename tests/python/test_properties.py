"""Properties that hold for all inputs: what order, layout, company and rounding may and may not change."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import muvox
from muvox.gradcheck import references

ALL = ("mean", "max", "absmax", "sum")
EPS = {torch.half: 2.0**-10, torch.bfloat16: 2.0**-7, torch.float: 2.0**-23}

# The same examples in every run; the drawn integers pick sizes and seed the tensors.
few = settings(max_examples=12, deadline=None, derandomize=True, database=None)
seeds = st.integers(0, 2**31 - 1)
rows = st.integers(1, 90)  # past every vector and block of the kernels
sets = st.integers(1, 5)
ks = st.integers(1, 50)
lengths = st.lists(st.integers(0, 90), min_size=1, max_size=6)


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


def pool(x, splits, k):
    return (muvox.pool(x, splits=splits, aggregates=ALL),)


OPS = {"knn": knn, "gravnet": gravnet, "aggregate": aggregate, "attention": attention, "pool": pool}
PER_ROW = {name: op for name, op in OPS.items() if name != "pool"}


def with_gradient(op, x, splits, k):
    """Outputs, then the gradient of x for fixed gradients of the floating outputs (ones: every row counts alike)."""
    x = x.detach().requires_grad_()
    outputs = op(x, splits, k)
    floating = [y for y in outputs if y.is_floating_point()]
    return *outputs, torch.autograd.grad(floating, x, [torch.ones_like(y) for y in floating])[0]


def equal(got, right):
    return len(got) == len(right) and all(torch.equal(a, b) for a, b in zip(got, right))


def features(seed, shape, dtype=torch.float):
    """Random rows at distinct distances from each other, 10 columns wide."""
    generator = torch.Generator().manual_seed(seed)
    return (0.5 * torch.randn(*shape, 10, dtype=torch.double, generator=generator)).to(dtype)


def permutation(seed, n):
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))


@few
@given(seeds, rows, ks)
def test_permuting_rows_permutes_neighbours(seed, M, k):
    x, order = features(seed, (M,)), permutation(seed, M)
    neighbours, distance2, counts = knn(x, None, k)
    permuted, permuted_distance2, permuted_counts = knn(x[order], None, k)
    named = torch.where(permuted >= 0, order[permuted.long().clamp(min=0)], -1)
    assert torch.equal(named, neighbours[order].long())
    assert torch.equal(permuted_distance2, distance2[order])  # the sum over columns does not see the order of rows
    assert torch.equal(permuted_counts, counts[order])


@pytest.mark.parametrize("name", ["gravnet", "aggregate", "attention"])
@few
@given(seeds, rows, ks)
def test_permuting_rows_permutes_results(name, seed, M, k):
    """To rounding: sums over rows run in row order."""
    x, order = features(seed, (M,), torch.double), permutation(seed, M)
    for got, right in zip(with_gradient(OPS[name], x[order], None, k), with_gradient(OPS[name], x, None, k)):
        torch.testing.assert_close(got, right[order], rtol=1e-12, atol=1e-12)


@few
@given(seeds, rows)
def test_permuting_rows_does_not_change_pool(seed, M):
    x, order = features(seed, (M,), torch.double), permutation(seed, M)
    *got, grad = with_gradient(pool, x[order][None], None, 1)
    *right, right_grad = with_gradient(pool, x[None], None, 1)
    torch.testing.assert_close(got[0], right[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad[0], right_grad[0][order], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", OPS)
@few
@given(seeds, sets, rows, ks, st.sampled_from([torch.half, torch.float, torch.double]))
def test_permuting_sets_permutes_sets(name, seed, S, M, k, dtype):
    x, order = features(seed, (S, M), dtype), permutation(seed, S)
    right = with_gradient(OPS[name], x, None, k)
    assert equal(with_gradient(OPS[name], x[order], None, k), [y[order] for y in right])


@pytest.mark.parametrize("name", OPS)
@few
@given(seeds, sets, rows, ks, st.sampled_from([torch.bfloat16, torch.float, torch.double]))
def test_ragged_is_uniform(name, seed, S, M, k, dtype):
    x = features(seed, (S, M), dtype)
    splits = torch.arange(0, S * M + 1, M)
    uniform = with_gradient(OPS[name], x, None, k)
    ragged = with_gradient(OPS[name], x.flatten(0, 1), splits, k)
    assert equal([y.reshape(z.shape) for y, z in zip(ragged, uniform)], uniform)


@pytest.mark.parametrize("name", OPS)
@few
@given(seeds, lengths, ks, st.sampled_from([torch.half, torch.float, torch.double]))
def test_a_batch_is_its_sets_one_by_one(name, seed, lengths, k, dtype):
    x = features(seed, (sum(lengths),), dtype)
    splits = torch.tensor([0, *lengths]).cumsum(0)
    together = with_gradient(OPS[name], x, splits, k)
    alone = [with_gradient(OPS[name], part, torch.tensor([0, len(part)]), k) for part in x.split(lengths)]
    assert equal(together, [torch.cat(parts) for parts in zip(*alone)])


@pytest.mark.parametrize("name", OPS)
@few
@given(seeds, sets, rows, ks)
def test_many_copies_give_equal_results(name, seed, S, M, k):
    x = features(seed, (1, M))
    one = with_gradient(OPS[name], x, None, k)
    many = with_gradient(OPS[name], x.repeat(40 * S, 1, 1), None, k)
    assert all(torch.equal(y, z.expand_as(y)) for y, z in zip(many, one))


def strided(x, how):
    """The values of x in another layout."""
    if how == "padded columns":
        return torch.cat([x, torch.full_like(x, math.nan)], -1)[..., : x.shape[-1]]
    if how == "padded rows":
        return torch.cat([x, torch.full_like(x, math.nan)], -2)[..., : x.shape[-2], :]
    if how == "every other set":
        return x.repeat_interleave(2, 0)[::2]
    if how == "rows before sets":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    return x.mT.contiguous().mT


@pytest.mark.parametrize("how", ["padded columns", "padded rows", "every other set", "rows before sets", "transposed"])
@pytest.mark.parametrize("name", OPS)
@few
@given(seeds, sets, rows, ks, st.sampled_from([torch.half, torch.float, torch.double]))
def test_strides_do_not_matter(name, how, seed, S, M, k, dtype):
    x = features(seed, (S, M), dtype)
    right = with_gradient(OPS[name], x, None, k)
    leaf = x.clone().requires_grad_()
    outputs = OPS[name](strided(leaf, how), None, k)
    floating = [y for y in outputs if y.is_floating_point()]
    grad = torch.autograd.grad(floating, leaf, [torch.ones_like(y) for y in floating])[0]
    assert equal((*outputs, grad), right)


@pytest.mark.parametrize("name", OPS)
@few
@given(seeds, sets, rows, ks)
def test_threads_do_not_matter(name, seed, S, M, k):
    x = features(seed, (S, M))
    right = with_gradient(OPS[name], x, None, k)
    torch.set_num_threads(2)
    try:
        assert equal(with_gradient(OPS[name], x, None, k), right)
    finally:
        torch.set_num_threads(1)


def double_reference(name, x, M, k):
    """The plain formula in double at the values of x (S, M, 10)."""
    flat, S = x.double().flatten(0, 1), len(x)
    if name == "attention":
        tensors, options = {"q": flat[:, :3], "k": flat[:, 3:6], "v": flat[:, 6:]}, {}
    elif name == "gravnet":
        tensors = {"coords": flat[:, :4], "feats": flat[:, 4:]}
        options = {"k": k, "scale": 10.0, "aggregates": ALL}
    else:
        tensors, options = {"x": flat}, {"aggregates": ALL}
    return references.set_by_set(getattr(references, name), tensors, [M] * S, options)


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("name", ["gravnet", "attention", "pool"])
@few
@given(seeds, sets, rows)
def test_rounding(name, dtype, seed, S, M):
    """Outputs in half and bfloat16 are the double result at the rounded inputs to one ulp of each value (half of it
    from the last rounding), and to what float arithmetic loses: 16 ulps of float at the largest value.

    k ≥ M, so that rounding chooses no neighbours."""
    x = features(seed, (S, M), dtype)
    for got, right in zip(OPS[name](x, None, M), double_reference(name, x, M, M)):
        right = right.reshape(got.shape)
        arithmetic = 16 * EPS[torch.float] * right.abs().max()
        rounding = EPS[got.dtype] * right.abs() if got.dtype != torch.float else 0.0
        assert ((got.double() - right).abs() <= rounding + arithmetic).all()


@pytest.mark.parametrize("dtype", EPS)
@few
@given(seeds, rows, ks)
def test_distances_in_float_are_correctly_rounded_sums(dtype, seed, M, k):
    """Every distance² to (d + 1) / 2 ulps of float, and the neighbours in its own order with ties to the lower row."""
    x = features(seed, (M,), dtype)
    neighbours, distance2, _ = knn(x, None, k)
    n = min(k, M)
    pairs = x[:, None, :4].double() - x[neighbours[:, :n].long(), :4].double()
    right = pairs.square().sum(-1)
    assert ((distance2[:, :n] - right).abs() <= 3.5 * EPS[torch.float] * right).all()
    assert_sorted(neighbours[:, :n], distance2[:, :n])


def assert_sorted(neighbours, distance2):
    nearer, further = distance2[:, :-1], distance2[:, 1:]
    assert ((nearer < further) | (nearer == further) & (neighbours[:, :-1] < neighbours[:, 1:])).all()


@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16, torch.float, torch.double])
@few
@given(seeds, st.integers(1, 120), ks, st.integers(1, 9), st.integers(1, 3))
def test_ties_on_a_lattice_go_to_the_lower_row(dtype, seed, M, k, d, steps):
    """Lattice points and duplicates: every distance is exact, so the brute force decides every tie."""
    x = torch.randint(-steps, steps + 1, (M, d), generator=torch.Generator().manual_seed(seed)).to(dtype)
    neighbours, distance2, counts = muvox.knn(x, k, return_counts=True)
    right = references.knn(x.double(), k=k)
    assert torch.equal(distance2.double(), right[0])
    assert torch.equal(neighbours, right[1])
    assert torch.equal(counts, right[2])


@few
@given(seeds, st.integers(1, 60), ks, st.integers(1, 9))
def test_neighbours_in_double_are_those_of_brute_force(seed, M, k, d):
    x = torch.randn(M, d, dtype=torch.double, generator=torch.Generator().manual_seed(seed))
    distance2, neighbours, counts = references.knn(x, k=k)
    got = muvox.knn(x, k, return_counts=True)
    assert torch.equal(got[0], neighbours) and torch.equal(got[2], counts)
    torch.testing.assert_close(got[1], distance2, rtol=1e-14, atol=0)


@pytest.mark.parametrize("size", [1e18, 1e19, 1e25])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float])
@few
@given(seeds, rows, ks)
def test_far_points_are_not_lost(dtype, size, seed, M, k):
    """At 1e18 distances² are near the end of float, past it +inf: every row is still found once, itself first."""
    generator = torch.Generator().manual_seed(seed)
    x = (size * torch.randn(M, 3, dtype=torch.double, generator=generator)).to(dtype)
    neighbours, distance2, counts = muvox.knn(x, k, return_counts=True)
    n = min(k, M)
    assert (counts == n).all() and (neighbours[:, n:] == -1).all()
    found = neighbours[:, :n].long()
    assert torch.equal(found[:, 0], torch.arange(M)) and not distance2[:, 0].any()
    assert (found.sort(1).values.diff() > 0).all() and found.min() >= 0 and found.max() < M
    assert_sorted(found, distance2[:, :n])


@few
@given(seeds, st.integers(2, 60), st.integers(1, 8))
def test_an_offset_cloud_keeps_its_distances(seed, M, d):
    """A cloud of spread 1 around 4e6, where floats are 0.25 apart: differences are exact, and so are ties."""
    cloud = torch.randn(M, d, dtype=torch.double, generator=torch.Generator().manual_seed(seed))
    x = (cloud + 4e6).float()
    neighbours, distance2 = muvox.knn(x, M)
    assert torch.equal(distance2[:, 0], torch.zeros(M))
    assert (distance2 >= 0).all()
    own = torch.take_along_dim(distance2, (neighbours == torch.arange(M)[:, None]).int().argmax(1, keepdim=True), 1)
    assert not own.any()
    right = references.knn(x.double(), k=M)
    assert torch.equal(distance2.double(), right[0]) and torch.equal(neighbours, right[1])


@few
@given(seeds, rows, ks)
def test_gravnet_is_knn_then_aggregate(seed, M, k):
    x = features(seed, (M,), torch.double)
    neighbours, distance2 = muvox.knn(x[:, :4], k)
    composed = muvox.aggregate(x[:, 4:], neighbours, torch.exp(-10 * distance2), aggregates=ALL)
    torch.testing.assert_close(gravnet(x, None, k)[0], composed, rtol=1e-13, atol=1e-13)


MASKED = {
    "knn": lambda x, splits, k, **mask: muvox.knn(
        x[..., :4].contiguous(), k, splits=splits, max_radius=1.5, return_counts=True, **mask
    ),
    "gravnet": lambda x, splits, k, **mask: (
        muvox.gravnet(x[..., :4], x[..., 4:9], k, splits=splits, aggregates=ALL, **mask, **weighed(x, 9)),
    ),
    "attention": lambda x, splits, k, **mask: muvox.attention(
        x[..., :3], x[..., 3:6], x[..., 6:9], splits=splits, return_lse=True, **mask, **weighed(x, 9)
    ),
    "offset_attention": lambda x, splits, k, **mask: (
        muvox.offset_attention(x[..., :3], x[..., 3:6], x[..., 6:], splits=splits, **mask),
    ),
    "pool": lambda x, splits, k, **mask: (
        muvox.pool(x[..., :9], splits=splits, aggregates=ALL, **mask, **weighed(x, 9)),
    ),
}


def weighed(x, column):
    """Row weights from a column of x, in float at least."""
    return {"row_weights": x[..., column].abs().to(torch.promote_types(x.dtype, torch.float))}


def masked_gradient(op, x, splits, k, **mask):
    """As with_gradient; distances that are +inf take none."""
    x = x.detach().requires_grad_()
    outputs = op(x, splits, k, **mask)
    sums = [torch.where(y.isfinite(), y, 0).sum() for y in outputs if y.is_floating_point() and y.requires_grad]
    return *outputs, torch.autograd.grad(sums, x)[0]


@pytest.mark.parametrize("dtype", [torch.half, torch.float, torch.double])
@pytest.mark.parametrize("name", MASKED)
@few
@given(seeds, lengths, ks)
def test_masked_rows_equal_removed_rows(name, dtype, seed, lengths, k):
    """Rows of NaN under the mask: to rounding the results of the others without them, and nothing in their place."""
    N = sum(lengths)
    x = features(seed, (N,), dtype)
    mask = torch.rand(N, generator=torch.Generator().manual_seed(seed)) < 0.6
    splits = torch.tensor([0, *lengths]).cumsum(0)
    shorter = torch.cat([torch.zeros(1, dtype=torch.int64), mask.cumsum(0)])[splits]
    got = masked_gradient(MASKED[name], x.masked_fill(~mask[:, None], math.nan), splits, k, mask=mask)
    right = masked_gradient(MASKED[name], x[mask], shorter, k)
    for n, (y, z) in enumerate(zip(got, right)):
        per_row = name != "pool" or n == len(got) - 1
        kept = y[mask] if per_row else y
        if name == "knn" and n == 0:  # rows of the whole set: numbered without the masked ones
            before = mask.cumsum(0) - mask.long()
            first = torch.repeat_interleave(splits[:-1], splits.diff())[mask][:, None]
            whole = (kept + first).clamp(min=0)
            kept = torch.where(kept >= 0, (before[whole] - before[first]).to(kept.dtype), -1)
        torch.testing.assert_close(kept, z, rtol=4 * tolerance(y.dtype), atol=4 * tolerance(y.dtype))
        if per_row:
            blank = {("knn", 0): -1, ("knn", 1): math.inf, ("attention", 1): -math.inf}.get((name, n), 0)
            assert (y[~mask] == blank).all()


def tolerance(dtype):
    """Sums may run in other blocks: exact for integers."""
    return 2 * torch.finfo(dtype).eps if dtype.is_floating_point else 0
