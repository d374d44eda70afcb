"""Row 10: NaN and infinity in what comes in."""

import math

import pytest
import torch

import muvox
from cases.calls import ALL, CALLS, NEIGHBOURS, SETS, assert_same, gradients, ragged, rows, run

VALUES = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("place", [0, 40, 99])
@pytest.mark.parametrize("value", VALUES)
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


@pytest.mark.parametrize("value", VALUES)
def test_query_of_nan_finds_the_lowest_rows(value):
    """Row 10: a query at no place: the lowest row numbers, at distance NaN or infinity; the other queries as before."""
    x, queries = torch.randn(100, 3), torch.randn(5, 3)
    before = muvox.knn(x, 8, queries=queries)
    queries[2, 1] = value
    neighbours, distance2 = muvox.knn(x, 8, queries=queries)
    others = [0, 1, 3, 4]
    assert_same((neighbours[others], distance2[others]), [y[others] for y in before])
    assert neighbours[2].tolist() == list(range(8)) and not distance2[2].isfinite().any()


@pytest.mark.parametrize("value", VALUES)
def test_radius_leaves_out_what_is_nowhere(value):
    """Row 10: NaN is in no radius, and infinity in no finite one: no neighbours, −1, and no edge of gravnet."""
    x = torch.randn(50, 3)
    x[7, 0] = value
    neighbours, distance2, counts = muvox.knn(x, 4, max_radius=100.0, return_counts=True)
    assert neighbours[7].tolist() == [-1] * 4 and counts[7] == 0 and (distance2[7] == math.inf).all()
    assert not (neighbours == 7).any()
    out = muvox.gravnet(x, torch.ones(50, 2), 4, max_radius=100.0)
    assert not out[7].any() and out.isfinite().all()


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", [name for name in NEIGHBOURS if name != "knn"])
def test_others_do_not_see_a_coordinate_of_nan(name, value):
    """Row 10: of 20 rows the 19 others have neighbours enough without it. Its own neighbours, the lowest rows, get its
    gradient, as 0 · NaN is NaN; no other row does."""
    x, f = rows(20)
    without = [t.detach()[1:].requires_grad_() for t in (x, f)]
    with torch.no_grad():
        x[0, 2] = value
    g = torch.randn(19, 20)
    (out,), (right,) = NEIGHBOURS[name](x, f), NEIGHBOURS[name](*without)
    assert_same((out[1:],), (right,))
    found, known = gradients(out[1:], [x, f], [g]), gradients(right, without, [g])
    assert_same([t[5:] for t in found], [t[4:] for t in known])


def test_nan_features_are_not_hidden():
    """Row 10: NaN reaches the rows that have the muon as a neighbour and no other."""
    x, f = torch.tensor([[0.0], [1.0], [10.0], [11.0]]), torch.ones(4, 1)
    f[0] = math.nan
    out = muvox.gravnet(x, f, 2, aggregates=ALL)
    assert out[:2].isnan().all() and out[2:].isfinite().all()


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("dtype", [torch.half, torch.float, torch.double])
@pytest.mark.parametrize("value", VALUES)
def test_nan_stays_in_its_set(name, dtype, value):
    """Row 10: first, middle or last row of the set in the middle; the others' results and gradients keep their bits."""
    splits = ragged(5, 6, 5)
    for place in (5, 8, 10):
        torch.manual_seed(place)
        x, f = rows(16, dtype=dtype)
        clean = run(SETS[name], x, f, splits=splits)
        with torch.no_grad():
            x[place, 1] = f[place, 2] = value
        spoiled = run(SETS[name], x, f, splits=splits)
        for a, b in zip(spoiled, clean):
            sets = [0, 2] if len(a) == 3 else [*range(5), *range(11, 16)]
            assert_same((a[sets],), (b[sets],))


@pytest.mark.parametrize("value", [*VALUES, 3e38, -3e38])
@pytest.mark.parametrize("name", CALLS)
def test_no_value_leads_out_of_bounds(name, value):
    """Row 10: everything the same bad number; a memory fault or a hang would end the run. Shapes stay."""
    x, f = (torch.full(shape, value).requires_grad_() for shape in ((2, 7, 4), (2, 7, 5)))
    found = run(CALLS[name], x, f)
    assert [t.shape for t in found[-2:]] == [x.shape, f.shape]
    clean = rows(2, 7)
    assert all(y.isfinite().all() for y in run(CALLS[name], *clean))


@pytest.mark.parametrize("value", [*VALUES, 1e30, -1e30])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_points_that_are_in_no_voxel(value, axis):
    """Row 10: index −1, weight 0 and gradient 0, the other points as before."""
    points = torch.rand(3, 3)
    right = muvox.trilinear_weights(points, (0, 0, 0), (0.5, 0.5, 0.5), (2, 2, 2))
    points[1, axis] = value
    points.requires_grad_()
    index, weights = muvox.trilinear_weights(points, (0, 0, 0), (0.5, 0.5, 0.5), (2, 2, 2))
    assert (index[1] == -1).all() and not weights[1].any()
    assert_same((index[[0, 2]], weights[[0, 2]]), [y[[0, 2]] for y in right])
    grad = gradients(weights.square(), [points])[0]
    assert not grad[1].any() and grad[[0, 2]].any()
    assert not muvox.devoxelize(torch.full((8, 2), math.nan), index, weights)[1].any()
