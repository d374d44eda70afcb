"""Rows 1-7, 29, 31 and 32: which rows are neighbours, and at what distance."""

import math
import time

import pytest
import torch

import muvox
from cases.calls import NEIGHBOURS, assert_same, gradients, leaves, ragged, rows
from muvox.gradcheck import references

# Fewer points than k, limits of k


def test_missing_neighbours_are_not_a_fake_row_zero():
    """Row 1: k = 32 over segments of 50, 31, 510 and 177 points."""
    lengths = 50, 31, 510, 177
    x = torch.randn(sum(lengths), 3)
    neighbours, distance2, counts = muvox.knn(x, 32, splits=ragged(*lengths), return_counts=True)
    for M, found, d2, count in zip(lengths, *(y.split(lengths) for y in (neighbours, distance2, counts))):
        n = min(32, M)
        assert (count == n).all()
        assert (found[:, :n].sort(1).values.diff() > 0).all() and found[:, :n].min() >= 0 and found.max() < M
        assert (found[:, n:] == -1).all() and (d2[:, n:] == math.inf).all()


def test_the_mean_divides_by_the_neighbours_there_are():
    """Row 1: one voxel of 3 muons, k = 5."""
    x, f = torch.zeros(1, 3, 2), torch.tensor([[[1.0], [2.0], [6.0]]])
    out = muvox.gravnet(x, f, 5, aggregates=("mean", "sum", "max"))
    assert torch.equal(out, torch.tensor([3.0, 9.0, 6.0]).expand(1, 3, 3))


@pytest.mark.parametrize("name", [name for name in NEIGHBOURS if name != "knn"])
@pytest.mark.parametrize("M", [1, 2, 3])
def test_fewer_muons_than_k_are_as_so_many(name, M, monkeypatch):
    """Row 1: k = 4 of M rows is k = M, forward and backward."""
    x, f = rows(2, M)
    many = NEIGHBOURS[name](x, f)
    monkeypatch.setattr("cases.calls.K", M)
    few = NEIGHBOURS[name](x, f)
    assert_same((*many, *gradients(many, [x, f])), (*few, *gradients(few, [x, f])))


def test_places_without_a_neighbour_are_not_in_the_mean():
    """Row 1: −1 among given neighbours, whatever its weight."""
    f, weights = torch.tensor([[1.0], [2.0], [6.0]]), torch.tensor([[1.0, math.nan, 1.0], [1.0] * 3, [math.inf] * 3])
    neighbours = torch.tensor([[2, -1, 0], [0, 1, 2], [-1, -1, -1]], dtype=torch.int32)
    assert muvox.aggregate(f, neighbours, weights, aggregates="mean").tolist() == [[3.5], [3.0], [0.0]]


@pytest.mark.parametrize("M, k", [(250, 101), (250, 125), (250, 128), (250, 200), (700, 257), (700, 513), (900, 899)])
def test_no_limit_on_k(M, k):
    """Row 2: large k is slower, never refused, and exact."""
    x = torch.randn(M, 3, dtype=torch.double)
    distance2, neighbours, _ = references.knn(x, k=k)
    found = muvox.knn(x, k)
    assert torch.equal(found[0], neighbours)
    torch.testing.assert_close(found[1], distance2, rtol=1e-14, atol=0)


@pytest.mark.parametrize("N, k", [(3000, 257), (3000, 2000), (5000, 4000)])
def test_thousands_of_neighbours_in_bounded_time(N, k):
    """Row 2: 200 queries; beyond any tuned size."""
    x, queries = torch.randn(N, 3, dtype=torch.double), torch.randn(200, 3, dtype=torch.double)
    begin = time.process_time()
    found = muvox.knn(x, k, queries=queries)
    assert time.process_time() - begin < 10
    assert torch.equal(found[0], references.knn(x, queries=queries, k=k)[1])


@pytest.mark.parametrize("k", [254, 255, 300])
@pytest.mark.parametrize("op", ["gravnet", "neighbour_attention"])
def test_winners_fit_their_dtype_at_large_k(op, k):
    """Row 2: the farthest neighbour wins although its rank does not fit a byte."""
    M = 300
    x = torch.arange(M, dtype=torch.double)[:, None].requires_grad_()
    f = torch.zeros(M, 1, dtype=torch.double)
    f[k - 1] = 1e6  # rank k − 1 of row 0
    f.requires_grad_()
    if op == "gravnet":
        out = muvox.gravnet(x, f, k, scale=1e-6, aggregates=("max",))
    else:  # layers of zeros leave the residual
        none = [torch.zeros(shape, dtype=torch.double) for shape in [(1, 1), (1,)] * 4]
        out = muvox.neighbour_attention(x, f, k, none, scale=1e-6, aggregates=("max",), activation="linear")
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


@pytest.mark.parametrize("far", [1e5, 1e18, 1e30])
def test_far_queries_find_points(far):
    """Row 3: the reported call, points and one query."""
    x = torch.tensor([[0.0, 0.0], [far, far]])
    assert muvox.knn(x, 2, queries=torch.tensor([[1.0, 1.0]]))[0].tolist() == [[0, 1]]
    assert muvox.knn(x, 2, queries=-x)[0][0].tolist() == [0, 1]


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_far_points_weigh_nothing(name):
    """Row 3: exp(−∞) is 0, and 0 · (a distance of ∞) makes no NaN in gradients."""
    x = torch.tensor([[0.0] * 4, [1e30] * 4, [1.0] * 4]).requires_grad_()
    f = torch.randn(3, 5).requires_grad_()
    out = NEIGHBOURS[name](x, f)
    if name == "knn":
        assert out[0].max() == math.inf
        return
    assert out[0].isfinite().all()
    dx, df = gradients(out, [x, f])
    assert df.isfinite().all() and dx.isfinite().all() and dx[0].any()


def test_double_points_are_not_compared_in_float():
    """Row 3: at 1e6 floats are 1/16 apart; the offsets of these points are far smaller."""
    x = 1e6 + 1e-6 * torch.randn(200, 3, dtype=torch.double)
    distance2, neighbours, _ = references.knn(x, k=9)
    found = muvox.knn(x, 9)
    assert torch.equal(found[0], neighbours) and found[1].dtype == torch.double
    assert found[1][:, 1:].min() > 0
    f = torch.randn(200, 4, dtype=torch.double)
    out = muvox.gravnet(x, f, 9, scale=1e11)
    torch.testing.assert_close(out, references.gravnet(x, f, k=9, scale=1e11, aggregates=("mean", "max"))[0])


# Ties, duplicates, self


def test_ties_on_a_lattice_go_to_the_lower_row():
    """Row 4: a regular detector; every query of the inside has ties at rank k."""
    axis = torch.arange(7.0)
    x = torch.cartesian_prod(axis, axis, axis)
    for k in (4, 8, 13, 20):
        distance2, neighbours, _ = references.knn(x.double(), k=k)
        found = muvox.knn(x, k)
        assert torch.equal(found[0], neighbours) and torch.equal(found[1].double(), distance2)
        apart = muvox.knn(x, k, queries=x)
        assert_same(apart, found)


def test_identical_points():
    """Rows 5 and 6: 2048 rows at one place: the lowest k, all distinct, weight 1, coordinate gradients 0."""
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


def others(M, k):
    """The lowest k rows of M but the row itself."""
    return torch.stack([torch.cat([torch.arange(i), torch.arange(i + 1, M)])[:k] for i in range(M)])


@pytest.mark.parametrize("radius", [None, 0.0, 0.5])
def test_self_is_excluded_by_number_not_by_distance(radius):
    """Row 5: 2048 rows at one place, each has 5 others."""
    x = torch.full((2048, 4), 0.7)
    expected = others(2048, 5)
    neighbours, distance2, counts = muvox.knn(x, 5, exclude_self=True, max_radius=radius, return_counts=True)
    assert torch.equal(neighbours.long(), expected) and (counts == 5).all() and not distance2.any()
    f = torch.randn(2048, 6)
    out = muvox.gravnet(x, f, 5, exclude_self=True, max_radius=radius, aggregates=("max", "sum"))
    torch.testing.assert_close(out, torch.cat([f[expected].max(1).values, f[expected].sum(1)], 1))
    assert torch.equal(out[:, :6], f[expected].max(1).values)


def test_edges_of_identical_points_are_not_loops():
    """Row 5: the graph of 2048 rows at one place, and of two such sets."""
    x = torch.full((4096, 2), 0.7)
    to = torch.arange(2048).repeat_interleave(5)
    expected = torch.stack([others(2048, 5).flatten(), to])
    assert torch.equal(muvox.edge_index(x[:2048], 5), expected)
    assert torch.equal(muvox.edge_index(x, 5, splits=ragged(2048, 2048)), torch.cat([expected, expected + 2048], 1))
    loops = muvox.edge_index(x[:2048], 5, exclude_self=False)
    assert torch.equal(loops, torch.stack([torch.arange(5).repeat(2048), to]))


@pytest.mark.parametrize("self_too", [True, False])
def test_constant_features(self_too):
    """Row 5: a constant feature map through relu, forward and backward: weight 1, coordinate gradients 0."""
    x, f = torch.ones(2, 300, 3).requires_grad_(), torch.ones(2, 300, 4).requires_grad_()
    out = muvox.gravnet(x.relu(), f.relu(), 5, exclude_self=not self_too)
    assert torch.equal(out, torch.ones(2, 300, 8))
    dx, df = gradients(out, [x, f])
    assert torch.equal(dx, torch.zeros_like(x))
    torch.testing.assert_close(df.sum((1, 2)), torch.full((2,), 300.0 * 8), rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ["neighbour_attention", "neighbour_attention, offset"])
def test_constant_features_in_attention(name):
    """Row 5: all rows get the same, and coordinates no gradient."""
    x, f = torch.ones(2, 50, 4).requires_grad_(), torch.ones(2, 50, 5).requires_grad_()
    (out,) = NEIGHBOURS[name](x.relu(), f.relu())
    assert torch.equal(out, out[:1, :1].expand(out.shape)) and out.isfinite().all()
    dx, df = gradients(out, [x, f])
    assert torch.equal(dx, torch.zeros_like(x)) and df.isfinite().all() and df[:, :4].all() and not df[:, 4:].any()


def test_one_coordinate():
    """Row 6: d = 1."""
    x = torch.randn(500, 1, dtype=torch.double)
    distance2, neighbours, _ = references.knn(x, k=7)
    found = muvox.knn(x, 7)
    assert torch.equal(found[0], neighbours) and torch.equal(found[1], distance2)


@pytest.mark.parametrize("d", [1, 4])
def test_collapsed_coordinates_are_not_slower_than_brute_force(d):
    """Row 6: every coordinate equal at initialisation, M = 2000; processor time, the best of three."""
    x = torch.full((2000, d), 0.3)

    def seconds(function):
        times = []
        for _ in range(3):
            begin = time.process_time()
            function()
            times.append(time.process_time() - begin)
        return min(times)

    ours = seconds(lambda: muvox.knn(x, 20))
    assert ours < seconds(lambda: (x[:, None] - x).square().sum(-1).topk(20, largest=False))


# Accuracy of distances


def test_offset_cloud():
    """Row 7: spread 1 at 4e6. The distance to itself is 0, none is negative, the order is that of exact arithmetic."""
    x = (torch.randn(400, 4, dtype=torch.double) + 4e6).float()
    distance2, neighbours, _ = references.knn(x.double(), k=30)
    for found in (muvox.knn(x, 30), muvox.knn(x, 30, queries=x)):
        assert torch.equal(found[0], neighbours) and torch.equal(found[1].double(), distance2)
        assert not found[1][:, 0].any()
        assert found[1].sqrt().isfinite().all()


@pytest.mark.parametrize("name", [name for name in NEIGHBOURS if name != "knn"])
def test_offset_cloud_is_weighed_as_at_the_origin(name):
    """Row 7: coordinates that are exact at both places give the same bits."""
    x = torch.randint(-3, 4, (40, 4)).float()
    f = leaves((40, 5))[0]
    assert_same(NEIGHBOURS[name](x + 2.0**22, f), NEIGHBOURS[name](x, f))


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


def test_last_queries_of_many():
    """Row 31: N = 131,072, d = 8; the last 8 rows."""
    x = torch.randn(131_072, 8, dtype=torch.double)
    assert torch.equal(muvox.knn(x, 33, queries=x[-8:])[0], references.knn(x, queries=x[-8:], k=33)[1])


@pytest.mark.parametrize("M", [128, 256, *range(380, 387), 512, 1023, 1024, 1025])
def test_no_mismatch_at_any_size(M):
    """Row 32: d = 5, k = 4."""
    x = torch.randn(M, 5, dtype=torch.double)
    assert torch.equal(muvox.knn(x, 4)[0], references.knn(x, k=4)[1])
