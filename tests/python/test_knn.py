"""muvox.knn against a stable sort of all distances, its order, gradient and errors."""

import math

import pytest
import torch

import muvox
import op_cases as cases

INF, NAN = math.inf, math.nan


def expected(x, k, splits=None):
    """neighbours, distance2 and counts by sorting; all in double."""

    def padded(x):
        order, distance2 = cases.nearest(x, k)
        places = len(x), k - order.shape[1]
        filled = torch.full((len(x), 1), order.shape[1])
        return torch.cat([order, order.new_full(places, -1), distance2, distance2.new_full(places, INF), filled], -1)

    found = cases.per_set(padded, splits, x.double())
    if found is None:
        return None
    return found[..., :k].int(), found[..., k : 2 * k], found[..., -1].int()


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_layouts(layout, dtype):
    x, splits = cases.layout(layout, 3, dtype=dtype)
    neighbours, distance2, counts = muvox.knn(x, 3, splits=splits, return_counts=True)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert (neighbours.dtype, distance2.dtype, counts.dtype) == (torch.int32, wide, torch.int32)
    assert neighbours.shape == distance2.shape == (*x.shape[:-1], 3) and counts.shape == x.shape[:-1]
    if x.numel() == 0:
        return
    order, exact, valid = expected(x.detach(), 3, splits)
    assert torch.equal(neighbours, order) and torch.equal(counts, valid)
    assert torch.equal(distance2.isinf(), neighbours < 0)
    filled = neighbours >= 0
    cases.assert_near(distance2[filled], exact[filled], wide, units=1)


@pytest.mark.parametrize("view", cases.VIEWS)
def test_strides(view):
    x = cases.VIEWS[view](torch.randn(3, 8, 4, dtype=torch.float64))
    for found, exact in zip(muvox.knn(x, 5, return_counts=True), expected(x, 5)):
        assert torch.allclose(found, exact, rtol=1e-14, atol=0)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("k", [1, 5, 30, 31, 64, 100])
def test_k_and_ties(k, dtype):
    """Rows on a small lattice: many distances are equal, and exact in every dtype."""
    x = torch.randint(0, 3, (2, 30, 3)).to(dtype)
    for found, exact in zip(muvox.knn(x, k, return_counts=True), expected(x, k)):
        assert torch.equal(found.double(), exact.double())


def test_widths():
    for d in (1, 2, 3, 4, 5, 8, 17, 40):
        x = torch.randn(37, d, dtype=torch.float64)
        assert torch.equal(muvox.knn(x, 6)[0], expected(x[None], 6)[0][0])


def test_large_offset_does_not_cost_accuracy():
    x = torch.randn(50, 3) + 1e4
    assert torch.equal(muvox.knn(x, 4)[0], muvox.knn(x.double(), 4)[0])


def test_nan_ranks_last_and_infinity_before():
    x = torch.tensor([[0.0], [NAN], [1.0], [INF], [3e38]])
    neighbours, distance2, counts = muvox.knn(x, 6, return_counts=True)
    assert neighbours[0].tolist() == [0, 2, 3, 4, 1, -1]  # inf by row number, then NaN
    assert torch.equal(distance2[0], torch.tensor([0.0, 1.0, INF, INF, NAN, INF])) or distance2[0, 4].isnan()
    assert neighbours[1].tolist() == [0, 1, 2, 3, 4, -1] and distance2[1, :5].isnan().all()
    assert counts.tolist() == [5] * 5


@pytest.mark.parametrize("layout", ["uniform", "ragged", "one row"])
def test_gradcheck(layout):
    x, splits = cases.layout(layout, 2)

    def op(x):  # unfilled places are +inf, whose finite differences mean nothing
        neighbours, distance2 = muvox.knn(x, 4, splits=splits)
        return distance2.masked_fill(neighbours < 0, 0)

    assert torch.autograd.gradcheck(op, (x,), nondet_tol=0)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_gradient(dtype):
    x, _ = cases.layout("uniform", 3, dtype=dtype)
    exact = x.detach().double().requires_grad_()
    g = torch.randn(3, 6, 4, dtype=torch.float64)
    actual = torch.autograd.grad(muvox.knn(x, 4)[1], x, g.to(torch.promote_types(dtype, torch.float32)))[0]
    cases.assert_near(actual, torch.autograd.grad(expected_distance2(exact), exact, g)[0], dtype)


def expected_distance2(x):
    return cases.per_set(lambda x: cases.nearest(x, 4)[1], None, x)


def test_no_gradient_through_unfilled_places():
    x = torch.randn(3, 2, requires_grad=True)
    distance2 = muvox.knn(x, 5)[1]
    some = torch.autograd.grad(distance2, x, torch.ones(3, 5), retain_graph=True)[0]
    g = torch.ones(3, 5)
    g[:, 3:] = INF
    assert torch.equal(torch.autograd.grad(distance2, x, g)[0], some)


def test_saves_coords_and_neighbours():
    x, _ = cases.layout("uniform", 3, dtype=torch.float32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        muvox.knn(x, 2)
    assert [tuple(t.shape) for t in saved] == [(3, 6, 3), (0,), (3, 6, 2)]


def test_autocast_leaves_coords_alone():
    x = torch.randn(2, 9, 3)
    with torch.autocast("cpu", torch.bfloat16):
        neighbours, distance2 = muvox.knn(x, 3)
    assert torch.equal(distance2, muvox.knn(x, 3)[1]) and torch.equal(neighbours, muvox.knn(x, 3)[0])


X = torch.randn(5, 3)
BAD = {
    "k is 0": lambda: muvox.knn(X, 0),
    "k is 68719476736": lambda: muvox.knn(X, 1 << 36),
    "coords is bool": lambda: muvox.knn(X > 0, 2),
    "coords has 1 dimensions": lambda: muvox.knn(X[0], 2),
    "coords has width 0": lambda: muvox.knn(X[:, :0], 2),
    "splits decrease": lambda: muvox.knn(X, 2, splits=torch.tensor([0, 4, 3, 5])),
    "splits end at 6": lambda: muvox.knn(X, 2, splits=torch.tensor([0, 6])),
    "splits is float": lambda: muvox.knn(X, 2, splits=torch.tensor([0.0, 5.0])),
    "out of memory for distance2": lambda: muvox.knn(torch.zeros(1, 1).expand(1 << 36, 1), 1 << 20),
}


@pytest.mark.parametrize("message", BAD)
def test_errors_name_operator_and_argument(message):
    before = muvox.knn(X, 2)[1]
    with pytest.raises((ValueError, RuntimeError), match=rf"^muvox(\.|::)knn: {message}"):
        BAD[message]()
    assert torch.equal(muvox.knn(X, 2)[1], before)
