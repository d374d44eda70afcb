"""What users of comparable libraries ran into, as small tries with the right value; each test names its fault, its
docstring the number of the report. Rows on masks, radius, vmap, second derivatives and CUDA are not here."""

import math

import pytest
import torch

import muvox
from muvox.gradcheck import references

ALL = ("mean", "max", "absmax", "sum")
DTYPES = [torch.half, torch.bfloat16, torch.float, torch.double]


def ragged(*lengths):
    return torch.tensor((0, *lengths)).cumsum(0)


def gradients(outputs, inputs, entering=None):
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return torch.autograd.grad(outputs, inputs, entering or [torch.ones_like(y) for y in outputs])


def leaves(*shapes, dtype=torch.float):
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


# Fewer points than k, limits of k


def test_missing_neighbours_are_not_a_fake_row_zero():
    """Row 1: k = 32 over segments of 50, 31, 510 and 177 points."""
    lengths = 50, 31, 510, 177
    x = torch.randn(sum(lengths), 3)
    neighbours, distance2, counts = muvox.knn(x, 32, splits=ragged(*lengths), return_counts=True)
    for M, rows, d2, count in zip(lengths, *(y.split(lengths) for y in (neighbours, distance2, counts))):
        n = min(32, M)
        assert (count == n).all()
        assert (rows[:, :n].sort(1).values.diff() > 0).all() and rows[:, :n].min() >= 0 and rows.max() < M
        assert (rows[:, n:] == -1).all() and (d2[:, n:] == math.inf).all()


def test_the_mean_divides_by_the_neighbours_there_are():
    """Row 1: one voxel of 3 muons, k = 5."""
    x, f = torch.zeros(1, 3, 2), torch.tensor([[[1.0], [2.0], [6.0]]])
    out = muvox.gravnet(x, f, 5, aggregates=("mean", "sum", "max"))
    assert torch.equal(out, torch.tensor([3.0, 9.0, 6.0]).expand(1, 3, 3))


@pytest.mark.parametrize("M, k", [(250, 101), (250, 125), (250, 128), (250, 200), (700, 257), (700, 513), (900, 899)])
def test_no_limit_on_k(M, k):
    """Row 2: large k is slower, never refused, and exact."""
    x = torch.randn(M, 3, dtype=torch.double)
    distance2, neighbours, _ = references.knn(x, k=k)
    found = muvox.knn(x, k)
    assert torch.equal(found[0], neighbours)
    torch.testing.assert_close(found[1], distance2, rtol=1e-14, atol=0)


@pytest.mark.parametrize("k", [254, 255, 300])
def test_winners_fit_their_dtype_at_large_k(k):
    """Row 2: the farthest neighbour wins although its rank does not fit a byte."""
    M = 300
    x = torch.arange(M, dtype=torch.double)[:, None].requires_grad_()
    f = torch.zeros(M, 1, dtype=torch.double)
    f[k - 1] = 1e6  # rank k − 1 of row 0
    f.requires_grad_()
    out = muvox.gravnet(x, f, k, scale=1e-6, aggregates=("max",))
    assert gradients(out[0, 0], [f])[0].nonzero().tolist() == [[k - 1, 0]]


# Far points and magic infinities


@pytest.mark.parametrize("far", [1e5, 1e18, 1e30])
def test_far_points_are_found(far):
    """Row 3: no magic infinity; at 1e30 the squared distance itself is +inf, and the row is still a neighbour."""
    x = torch.tensor([[0.0, 0.0], [far, far], [1.0, 1.0]])
    neighbours, distance2, counts = muvox.knn(x, 3, return_counts=True)
    # At 1e18 rows 0 and 2 are at the same float distance from row 1: the lower one first.
    assert neighbours.tolist() == [[0, 2, 1], [1, 2, 0] if far == 1e5 else [1, 0, 2], [2, 0, 1]]
    assert counts.tolist() == [3, 3, 3]
    assert distance2[0, 1] == 2 and distance2[0, 2] == (math.inf if far == 1e30 else torch.tensor(far).square() * 2)


def test_double_points_are_not_compared_in_float():
    """Row 3: at 1e6 floats are 1/16 apart; the offsets of these points are far smaller."""
    x = 1e6 + 1e-6 * torch.randn(200, 3, dtype=torch.double)
    distance2, neighbours, _ = references.knn(x, k=9)
    found = muvox.knn(x, 9)
    assert torch.equal(found[0], neighbours) and found[1].dtype == torch.double
    assert found[1][:, 1:].min() > 0


# Ties, duplicates, self


def test_ties_on_a_lattice_go_to_the_lower_row():
    """Row 4: a regular detector; every query of the inside has ties at rank k."""
    axis = torch.arange(7.0)
    x = torch.cartesian_prod(axis, axis, axis)
    for k in (4, 8, 13, 20):
        distance2, neighbours, _ = references.knn(x.double(), k=k)
        found = muvox.knn(x, k)
        assert torch.equal(found[0], neighbours) and torch.equal(found[1].double(), distance2)


def test_identical_points():
    """Row 5 and 6: 2048 rows at one place: the lowest k, all distinct, weight 1, coordinate gradients 0."""
    x = torch.full((2048, 4), 0.7).requires_grad_()
    f = torch.randn(2048, 6).requires_grad_()
    neighbours, distance2 = muvox.knn(x, 5)
    assert torch.equal(neighbours, torch.arange(5, dtype=torch.int32).expand(2048, 5)) and not distance2.any()
    out = muvox.gravnet(x, f, 5, aggregates=("max", "sum"))
    assert torch.equal(out[:, :6], f[:5].max(0).values.expand(2048, 6))
    torch.testing.assert_close(out[:, 6:], f[:5].sum(0).expand(2048, 6))
    dx, df = gradients(out, [x, f])
    assert torch.equal(dx, torch.zeros_like(x))
    assert not df[5:].any() and (df[:5] >= 2048).all()


def test_constant_features():
    """Row 5: a constant feature map through relu, forward and backward: all sets equal, finite gradients."""
    x, f = torch.ones(2, 300, 3).requires_grad_(), torch.ones(2, 300, 4).requires_grad_()
    out = muvox.gravnet(x.relu(), f.relu(), 5)
    assert torch.equal(out, torch.ones(2, 300, 8))
    dx, df = gradients(out, [x, f])
    assert not dx.any()
    torch.testing.assert_close(df.sum((1, 2)), torch.full((2,), 300.0 * 8), rtol=1e-5, atol=0)


def test_one_coordinate():
    """Row 6: d = 1."""
    x = torch.randn(500, 1, dtype=torch.double)
    distance2, neighbours, _ = references.knn(x, k=7)
    found = muvox.knn(x, 7)
    assert torch.equal(found[0], neighbours) and torch.equal(found[1], distance2)


# Accuracy of distances and scores


def test_offset_cloud():
    """Row 7: spread 1 at 4e6. The distance to itself is 0, none is negative, the order is that of exact arithmetic."""
    x = (torch.randn(400, 4, dtype=torch.double) + 4e6).float()
    distance2, neighbours, _ = references.knn(x.double(), k=30)
    found = muvox.knn(x, 30)
    assert torch.equal(found[0], neighbours) and torch.equal(found[1].double(), distance2)
    assert not found[1][:, 0].any()
    assert found[1].sqrt().isfinite().all()


def test_attention_with_large_logits():
    """Row 8: logits of standard deviation 10 in float."""
    q, k, v = (torch.randn(3, 200, width) for width in (12, 12, 48))
    q, k = q * 10**0.5, k * 10**0.5
    scores = q.double() @ k.double().mT / 12**0.5
    assert 9 < scores.std() < 11
    out = muvox.attention(q, k, v)
    assert (out - scores.softmax(-1) @ v.double()).abs().max() < 1e-5


# Gradient at zero distance, NaN and infinity


def test_gradient_of_identical_muons():
    """Row 9: two identical muons and self."""
    x = torch.tensor([[0.1, 0.2], [0.1, 0.2]], dtype=torch.double).requires_grad_()
    f = torch.randn(2, 3, dtype=torch.double).requires_grad_()
    dx, df = gradients(muvox.gravnet(x, f, 2, aggregates=ALL), [x, f])
    assert torch.equal(dx, torch.zeros_like(x)) and df.isfinite().all()
    assert torch.equal(gradients(muvox.knn(x, 2)[1], [x])[0], torch.zeros_like(x))


@pytest.mark.parametrize("potential", [lambda d: (-d).exp(), lambda d: 1 / (1 + d), lambda d: (-d.square()).exp()])
def test_gradient_of_a_potential_of_the_distance(potential):
    """Row 9: the square root in the distance has no gradient at 0: rows 0 and 1 coincide, row 2 is apart."""
    x = torch.tensor([[0.5, 0.2], [0.5, 0.2], [0.3, 0.4]], dtype=torch.double)
    layer = muvox.nn.GravNetLayer(2, 2, 3, 3, ["mean"], 16, cat_means=False, potential=potential).double()
    x.requires_grad_()
    assert gradients(layer(x[None]), [x])[0].isfinite().all()
    only = x[:2].detach().requires_grad_()
    found = gradients(layer(only[None]), [only, *layer.parameters()])
    assert all(g.isfinite().all() for g in found)
    # Coincident rows: the weights that make coordinates (the first n_s = 2 rows of f_slr) have no gradient.
    slopes = [g for g, p in zip(found[1:], layer.f_slr.parameters())]
    assert all(not g[:2].any() and g[2:].any() for g in slopes)


@pytest.mark.parametrize("place", [0, 40, 99])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_never_displaces_a_neighbour(place, value):
    """Row 10: NaN or infinity in one coordinate: that row ranks last, the others have the neighbours they had."""
    x = torch.randn(100, 3)
    kept = torch.cat([torch.arange(place), torch.arange(place + 1, 100)])
    without = muvox.knn(x[kept], 8)
    x[place, 1] = value
    neighbours, distance2, counts = muvox.knn(x, 8, return_counts=True)
    assert torch.equal(neighbours[kept].long(), kept[without[0].long()])
    assert torch.equal(distance2[kept], without[1])
    assert (counts == 8).all()
    # Its own distances are NaN (∞ − ∞ too, to itself), +inf to others for an infinite one: infinity before NaN.
    first = list(range(9))
    expected = first[:8] if math.isnan(value) else [row for row in first if row != place][:8]
    assert neighbours[place].tolist() == expected
    full = muvox.knn(x, 100)
    assert (full[0][kept, -1] == place).all()
    assert full[1][kept, -1].isnan().all() if math.isnan(value) else (full[1][kept, -1] == math.inf).all()


def test_nan_features_are_not_hidden():
    """Row 10: NaN reaches the rows that have the muon as a neighbour and no other."""
    x, f = torch.tensor([[0.0], [1.0], [10.0], [11.0]]), torch.ones(4, 1)
    f[0] = math.nan
    out = muvox.gravnet(x, f, 2, aggregates=ALL)
    assert out[:2].isnan().all() and out[2:].isfinite().all()


# Half precision, dtypes, autocast


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_forward_and_backward(dtype):
    """Row 11: results have the dtype of the features, neighbours and distances their own, gradients the input's."""
    x, f, q, v = leaves((2, 9, 3), (2, 9, 5), (2, 9, 4), (2, 9, 6), dtype=dtype)
    neighbours, distance2 = muvox.knn(x, 4)
    wide = torch.double if dtype == torch.double else torch.float
    assert neighbours.dtype == torch.int32 and distance2.dtype == wide
    weights = torch.exp(-distance2.detach()).to(dtype).requires_grad_()
    out, lse = muvox.attention(q, q, v, return_lse=True)
    assert lse.dtype == wide
    for y in (muvox.gravnet(x, f, 4), muvox.aggregate(f, neighbours, weights), out, muvox.pool(f)):
        assert y.dtype == dtype and y.isfinite().all()
    sums = muvox.gravnet(x, f, 4).sum() + muvox.aggregate(f, neighbours, weights).sum() + muvox.pool(f).sum()
    for leaf, g in zip((x, f, weights, q, v), gradients((sums, out, lse), [x, f, weights, q, v])):
        assert g.dtype == dtype and g.shape == leaf.shape and g.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.bool, torch.complex64])
def test_other_dtypes_are_refused(dtype):
    """Row 11: an error before any arithmetic, naming what was given."""
    x = torch.ones(2, 4, 3).to(dtype)
    calls = {
        "knn": lambda: muvox.knn(x, 2),
        "gravnet": lambda: muvox.gravnet(x, x, 2),
        "attention": lambda: muvox.attention(x, x, x),
        "pool": lambda: muvox.pool(x),
        "aggregate": lambda: muvox.aggregate(x, torch.zeros(2, 4, 2, dtype=torch.int32), torch.ones(2, 4, 2)),
    }
    for name, call in calls.items():
        with pytest.raises((ValueError, RuntimeError), match=name):
            call()


def test_mixed_dtypes_are_refused_naming_both():
    """Row 11: q in float, k in half."""
    q, k = torch.randn(1, 4, 3), torch.randn(1, 4, 3).half()
    with pytest.raises((ValueError, RuntimeError), match="(?s)half.*float|float.*half"):
        muvox.attention(q, k, q)


@pytest.mark.parametrize("value, right", [(1.0, 1.0), (0.1, torch.tensor(0.1).half().item())])
def test_mean_of_many_in_half(value, right):
    """Row 12: ten thousand halves in one voxel; half sums would stop at 2048."""
    x = torch.full((10_000, 3), value, dtype=torch.half)
    unit = torch.finfo(torch.half).eps * value
    assert (muvox.pool(x[None], aggregates=("mean",)).double() - right).abs().max() <= unit
    out = muvox.gravnet(torch.zeros(2100, 1), x[:2100], 2100, aggregates=("mean",))
    assert (out.double() - right).abs().max() <= unit


@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16])
def test_autocast_keeps_coordinates_in_float(dtype):
    """Row 13: the rows differ by less than half and bfloat16 resolve; features go to the autocast dtype."""
    x = (1 + 1e-5 * torch.randn(2, 50, 3)).requires_grad_()
    f = torch.randn(2, 50, 4).requires_grad_()
    with torch.autocast("cpu", dtype):
        out = muvox.gravnet(x, f, 5, scale=1e9)
        neighbours, distance2 = muvox.knn(x, 5)
    assert out.dtype == dtype and distance2.dtype == torch.float
    assert torch.equal(neighbours, muvox.knn(x, 5)[0])
    assert torch.equal(out, muvox.gravnet(x, f.to(dtype), 5, scale=1e9))
    dx, df = gradients(out, [x, f])
    assert dx.dtype == df.dtype == torch.float and dx.abs().max() > 0 and dx.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16])
def test_autocast_around_layers(dtype):
    """Row 13: a GravNet layer and attention from linear layers inside autocast, forward and backward."""
    layer = muvox.nn.GravNetLayer(6, 3, 8, 5, ["mean", "max"], 10)
    linear = torch.nn.Linear(10, 3 * 10)
    x = torch.randn(4, 20, 6).requires_grad_()
    with torch.autocast("cpu", dtype):
        h = layer(x)
        y = muvox.attention(*linear(h).chunk(3, -1))
    assert y.isfinite().all()
    found = gradients(y, [x, *layer.parameters(), *linear.parameters()])
    assert all(g.isfinite().all() and g.dtype == torch.float for g in found)


# Empty sets


@pytest.mark.parametrize("lengths", [(0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 7), (0, 0), (0,), ()])
def test_empty_segments(lengths):
    """Row 16: no rows first, in the middle, last, everywhere; no sets. The others are as if those were not there."""
    splits, full = ragged(*lengths), ragged(*(n for n in lengths if n))
    x, f = leaves((sum(lengths), 3), (sum(lengths), 5))
    calls = {
        "knn": lambda s: muvox.knn(x, 2, splits=s)[1],
        "gravnet": lambda s: muvox.gravnet(x, f, 2, splits=s, aggregates=ALL),
        "attention": lambda s: muvox.attention(x, x, f, splits=s),
    }
    for name, call in calls.items():
        got, right = call(splits), call(full)
        assert torch.equal(got, right), name
        used = [x] if name == "knn" else [x, f]
        assert all(torch.equal(a, b) for a, b in zip(gradients(got, used), gradients(right, used))), name
    out = muvox.pool(f, splits=splits, aggregates=ALL)
    filled = torch.tensor([n > 0 for n in lengths], dtype=torch.bool)
    assert out.shape == (len(lengths), 20) and not out[~filled].any()
    assert torch.equal(out[filled], muvox.pool(f, splits=full, aggregates=ALL))
    assert gradients(out, [f])[0].shape == f.shape


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0), (2, 0, 4)])
def test_no_voxels_and_no_muons(shape):
    """Row 17: results of the right width, and backward runs."""
    x, f = leaves((*shape, 3), (*shape, 4))
    neighbours, distance2 = muvox.knn(x, 6)
    assert neighbours.shape == distance2.shape == (*shape, 6)
    assert muvox.pool(f).shape == (*shape[:-1], 8) and not muvox.pool(f).any()
    for y, used, width in (
        (distance2, [x], 6),
        (muvox.gravnet(x, f, 6), [x, f], 8),
        (muvox.aggregate(f, neighbours, distance2.detach()), [f], 8),
        (muvox.attention(x, x, f), [x, f], 4),
    ):
        assert y.shape == (*shape, width)
        assert all(g.shape == leaf.shape for g, leaf in zip(gradients(y, used), used))
    assert gradients(muvox.pool(f), [f])[0].shape == f.shape


def test_many_small_voxels():
    """Row 21: 70,000 voxels of 4 muons, more than a grid's second dimension; the last ones are right too."""
    S, M = 70_000, 4
    q, k, v = leaves((S, M, 2), (S, M, 2), (S, M, 3))
    out = muvox.attention(q, k, v)
    found = gradients(out, [q, k, v])
    last = [t.detach()[-3:].requires_grad_() for t in (q, k, v)]
    alone = muvox.attention(*last)
    assert torch.equal(out[-3:], alone)
    assert all(torch.equal(g[-3:], h) for g, h in zip(found, gradients(alone, last)))
    torch.testing.assert_close(out[-3:], torch.nn.functional.scaled_dot_product_attention(*last))


# Strides and views


def test_slices_of_one_tensor_and_transposed_views():
    """Row 23: slr[:, :, :S] as LUMIN takes them, and .t() views."""
    slr = torch.randn(3, 20, 26).requires_grad_()
    x, f = slr[:, :, :4], slr[:, :, 4:]
    plain = [t.detach().contiguous().requires_grad_() for t in (x, f)]
    out, right = muvox.gravnet(x, f, 6), muvox.gravnet(*plain, 6)
    assert torch.equal(out, right)
    assert torch.equal(gradients(out, [slr])[0], torch.cat(gradients(right, plain), -1))
    columns = [t.detach()[0].t().contiguous().requires_grad_() for t in (x, f)]
    turned = muvox.gravnet(columns[0].t(), columns[1].t(), 6)
    one = muvox.gravnet(*(t[:1] for t in plain), 6)[0]
    assert torch.equal(turned, one)
    for g, h in zip(gradients(turned, columns), gradients(one, plain)):
        assert torch.equal(g.t(), h[0])


@pytest.mark.parametrize("name", ["knn", "gravnet", "attention", "pool"])
def test_gradients_of_any_stride(name):
    """Row 24: a transposed and a stride-0 gradient give what contiguous ones give."""
    x, f = leaves((3, 12, 4), (3, 12, 5))
    out, used = {
        "knn": lambda: (muvox.knn(x, 4)[1], [x]),
        "gravnet": lambda: (muvox.gravnet(x, f, 4), [x, f]),
        "attention": lambda: (muvox.attention(x, x, f), [x, f]),
        "pool": lambda: (muvox.pool(f), [f]),
    }[name]()

    def back(g):
        return torch.autograd.grad(out, used, g, retain_graph=True)

    g = torch.randn(out.shape)
    turned = g.transpose(-1, -2).contiguous().transpose(-1, -2)
    assert not turned.is_contiguous()
    assert all(torch.equal(a, b) for a, b in zip(back(turned), back(g)))
    expanded = torch.tensor(0.5).expand(out.shape)
    assert all(torch.equal(a, b) for a, b in zip(back(expanded), back(torch.full(out.shape, 0.5))))
    summed = torch.autograd.grad(0.5 * out.sum(), used, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(summed, back(expanded)))


# Widths that are no multiple of 8, underflow, distances


@pytest.mark.parametrize("M", [1, 2, 65])
@pytest.mark.parametrize("C", [48, 22, 1])
@pytest.mark.parametrize("A", [12, 5, 1])
def test_attention_of_odd_widths(A, C, M):
    """Row 25: any width, one row too; gradients as the formula's."""
    q, k, v = leaves((2, M, A), (2, M, A), (2, M, C), dtype=torch.double)
    out, lse = muvox.attention(q, k, v, return_lse=True)
    scores = q @ k.mT / A**0.5
    right = scores.softmax(-1) @ v, scores.logsumexp(-1)
    entering = [torch.randn_like(y) for y in right]
    torch.testing.assert_close((out, lse), right, rtol=1e-13, atol=1e-13)
    found, expected = gradients((out, lse), [q, k, v], entering), gradients(right, [q, k, v], entering)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float])
@pytest.mark.parametrize("M", [63, 64, 65, 192, 320])
@pytest.mark.parametrize("sign", [-1, 1])
def test_attention_of_logits_near_200(M, dtype, sign):
    """Row 27: exp(200) overflows and exp(−200) vanishes; keys past the set's end take no part in either."""
    q, k, v = torch.full((2, M, 4), 10.0), torch.full((2, M, 4), sign * 10.0), torch.randn(2, M, 6)
    k = k + 0.1 * torch.randn_like(k)
    q, k, v = (t.to(dtype).requires_grad_() for t in (q, k, v))
    out, lse = muvox.attention(q, k, v, return_lse=True)
    assert 150 < sign * lse.mean() < 250
    doubles = [t.detach().double().requires_grad_() for t in (q, k, v)]
    right = (doubles[0] @ doubles[1].mT / 2).softmax(-1) @ doubles[2]
    unit = torch.finfo(dtype).eps if dtype == torch.bfloat16 else 1e-4  # exponents of 200 cost float 200 ulps
    assert (out.double() - right).abs().max() <= unit * right.abs().max()
    entering = torch.randn(2, M, 6).to(dtype)
    # D = g·out is read from the rounded out: in dq its error meets keys that are all alike, where dS sums to zero.
    shifted = 0.5 * (entering.double() * right).abs().sum(-1).max() * k.double().abs().max()
    found, expected = gradients(out, [q, k, v], [entering]), gradients(right, doubles, [entering.double()])
    for g, h, spread in zip(found, expected, (shifted, 0, 0)):
        assert (g.double() - h).abs().max() <= unit * (2 * h.abs().max() + spread)


def test_distances_are_squared():
    """Row 29: a 3-4-5 triangle gives 25, in a result that is called distance2."""
    assert muvox.knn(torch.tensor([[0.0, 0.0], [3.0, 4.0]]), 2)[1].tolist() == [[0, 25], [0, 25]]
    assert "squared" in muvox.knn.__doc__ and "distance2" in muvox.knn.__doc__


# Tile edges


@pytest.mark.parametrize("k", [31, 32, 33, 63, 64, 65])
def test_neighbours_at_tile_edges(k):
    """Row 31: sizes at and around multiples of 256, all queries."""
    for M in (255, 256, 257, 511, 513):
        x = torch.randn(M, 8, dtype=torch.double)
        assert torch.equal(muvox.knn(x, k)[0], references.knn(x, k=k)[1]), M


@pytest.mark.parametrize("M", [128, 256, *range(380, 387), 512, 1023, 1024, 1025])
def test_no_mismatch_at_any_size(M):
    """Row 32: d = 5, k = 4."""
    x = torch.randn(M, 5, dtype=torch.double)
    assert torch.equal(muvox.knn(x, 4)[0], references.knn(x, k=4)[1])


def test_tiny_segments():
    """Row 33: k = 1 and segments of one row: every row is its own neighbour, and attention copies v."""
    lengths = 1, 1, 2, 1, 3, 1
    x, v = torch.randn(9, 3), torch.randn(9, 4)
    splits = ragged(*lengths)
    neighbours, distance2 = muvox.knn(x, 1, splits=splits)
    assert neighbours[:, 0].tolist() == [0, 0, 0, 1, 0, 0, 1, 2, 0] and not distance2.any()
    assert torch.equal(muvox.gravnet(x, v, 1, splits=splits), torch.cat([v, v], 1))
    out = muvox.attention(x, x, v, splits=splits)
    single = [0, 1, 4, 8]
    assert torch.equal(out[single], v[single])
    assert torch.equal(muvox.pool(v, splits=splits, aggregates=("max",))[[0, 1, 3, 5]], v[single])


# Determinism, gradients


@pytest.mark.parametrize("threads", [1, 2])
def test_every_run_gives_the_same_bits(threads):
    """Row 34: repeats under use_deterministic_algorithms, on a lattice, where many rows pick the same neighbour."""
    x, f = torch.randint(0, 3, (4, 120, 3)).float().requires_grad_(), torch.randn(4, 120, 9).requires_grad_()
    g = torch.randn(4, 120, 27)

    def run():
        out = muvox.gravnet(x, f, 12)
        y = muvox.attention(x, x, f)
        return out, y, *gradients((out, y), [x, f], [g[..., :18], g[..., 18:]])

    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(threads)
    try:
        first = run()
        for _ in range(30):
            assert all(torch.equal(a, b) for a, b in zip(run(), first))
    finally:
        torch.use_deterministic_algorithms(False)


def test_gradients_of_double_are_double():
    """Row 35: gradcheck passes, which float arithmetic inside would not."""
    x, f = leaves((2, 6, 3), (2, 6, 4), dtype=torch.double)
    assert all(g.dtype == torch.double for g in gradients(muvox.gravnet(x, f, 6), [x, f]))
    assert torch.autograd.gradcheck(lambda a, b: muvox.gravnet(a, b, 6), (x, f), nondet_tol=0.0)
    assert torch.autograd.gradcheck(lambda a, b: muvox.attention(a, a, b), (x, f), nondet_tol=0.0)


def test_distances_are_differentiable():
    """Row 36: Σ distance² over all pairs of a set has the gradient 4 Σ_j (x_i − x_j)."""
    x = torch.randn(3, 8, 2, dtype=torch.double).requires_grad_()
    neighbours, distance2 = muvox.knn(x, 8)
    assert not neighbours.requires_grad and distance2.requires_grad
    right = 4 * (8 * x - x.sum(1, keepdim=True))
    torch.testing.assert_close(gradients(distance2, [x])[0], right.detach(), rtol=1e-12, atol=1e-12)


# Ragged layout


@pytest.mark.parametrize("lengths", [(5, 9), (64, 64), (1, 130), (67, 3)])
def test_no_leak_between_voxels(lengths):
    """Row 50: two voxels with distinct constants: every result of a voxel is its own constant."""
    v = torch.cat([torch.full((n, 4), float(value)) for n, value in zip(lengths, (1, 1000))])
    x = torch.randn(sum(lengths), 3)
    splits = ragged(*lengths)
    torch.testing.assert_close(muvox.attention(x, x, v, splits=splits), v, rtol=1e-6, atol=0)
    assert torch.equal(muvox.gravnet(x, v, 3, splits=splits, scale=0.0), torch.cat([v, v], 1))
    assert muvox.pool(v, splits=splits, aggregates=("max",)).tolist() == [[1.0] * 4, [1000.0] * 4]
    leaf = v.clone().requires_grad_()
    grad = gradients(muvox.attention(x, x, leaf, splits=splits)[: lengths[0]], [leaf])[0]
    assert not grad[lengths[0] :].any()


@pytest.mark.parametrize(
    "splits", [[0, 5, 3, 8], [1, 5, 8], [0, 5, 7], [0, 5, 9], [0, -2, 8], [0, 2**40, 8], [3, 3], [8, 0]]
)
@pytest.mark.parametrize("name", ["knn", "gravnet", "aggregate", "attention", "pool"])
def test_bad_offsets_are_refused(name, splits):
    """Row 51: decreasing, not from 0, not to N, far outside: an error that says so, and the next call is right."""
    x, s = torch.randn(8, 3), torch.tensor(splits)
    neighbours, weights = torch.zeros(8, 2, dtype=torch.int32), torch.ones(8, 2)
    call = {
        "knn": lambda s: muvox.knn(x, 2, splits=s)[1],
        "gravnet": lambda s: muvox.gravnet(x, x, 2, splits=s),
        "aggregate": lambda s: muvox.aggregate(x, neighbours, weights, splits=s),
        "attention": lambda s: muvox.attention(x, x, x, splits=s),
        "pool": lambda s: muvox.pool(x, splits=s),
    }[name]
    with pytest.raises((ValueError, RuntimeError), match=f"(?s){name}.*(splits|a set of)"):
        call(s)
    assert torch.equal(call(ragged(8)), call(ragged(8))) and call(ragged(3, 5)).isfinite().all()
