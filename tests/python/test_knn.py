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
    assert [tuple(t.shape) for t in saved if t.numel()] == [(3, 6, 3), (3, 6, 2)]


def test_autocast_leaves_coords_alone():
    x = torch.randn(2, 9, 3)
    with torch.autocast("cpu", torch.bfloat16):
        neighbours, distance2 = muvox.knn(x, 3)
    assert torch.equal(distance2, muvox.knn(x, 3)[1]) and torch.equal(neighbours, muvox.knn(x, 3)[0])


# Options: exclude_self, max_radius, mask, queries

OPTIONS = {
    "exclude_self": dict(exclude_self=True),
    "max_radius": dict(max_radius=1.2),
    "radius 0": dict(max_radius=0.0),
    "both": dict(exclude_self=True, max_radius=1.5),
    "infinite radius": dict(max_radius=INF, exclude_self=True),
}


def padded(rows, k):
    """Neighbours, distance2 and counts of one set as columns, from what cases.search finds."""
    found = torch.full((len(rows), 2 * k + 1), INF, dtype=torch.float64)
    found[:, :k] = -1
    for i, (order, distance2) in enumerate(rows):
        found[i, : len(order)] = order.double()
        found[i, k : k + len(order)] = distance2.detach()
        found[i, -1] = len(order)
    return found


def split_columns(found, k):
    return found[..., :k].int(), found[..., k : 2 * k], found[..., -1].int()


def assert_found(actual, expected, dtype):
    """Neighbours and counts are equal; distances to rounding."""
    for a, e in zip((actual[0], actual[2]), (expected[0], expected[2])):
        assert torch.equal(a, e)
    filled = expected[0] >= 0
    assert actual[1][~filled].isposinf().all()
    cases.assert_near(actual[1][filled], expected[1][filled], torch.promote_types(dtype, torch.float32), units=1)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("layout", ["one set", "leading dimensions", "one row", "ragged"])
def test_options(layout, dtype, options):
    """On a lattice, where rows coincide, distances tie and some are exactly the radius."""
    x, splits = cases.layout(layout, 3)
    x = (x.detach() * 1.3).round().to(dtype)
    options = OPTIONS[options] | ({"max_radius": 2.0} if OPTIONS[options].get("max_radius") == 1.5 else {})
    k = 4
    actual = muvox.knn(x, k, splits=splits, return_counts=True, **options)
    expected = cases.per_set(lambda x: padded(cases.search(x, k, **options), k), splits, x.double())
    assert_found(actual, split_columns(expected, k), dtype)


@pytest.mark.parametrize("k", [1, 3, 40, 70])
def test_options_in_larger_sets(k):
    x = torch.randint(0, 4, (150, 3)).float()
    for options in OPTIONS.values():
        expected = split_columns(padded(cases.search(x.double(), k, **options), k), k)
        assert_found(muvox.knn(x, k, return_counts=True, **options), expected, torch.float32)


def test_masked_set_of_nan_inside_a_radius():
    """NaN is never within a radius, and the last without one."""
    x = torch.tensor([[0.0], [NAN], [1.0]])
    assert muvox.knn(x, 3, max_radius=9.0)[0].tolist() == [[0, 2, -1], [-1, -1, -1], [2, 0, -1]]
    assert muvox.knn(x, 3, exclude_self=True)[0].tolist() == [[2, 1, -1], [0, 2, -1], [0, 1, -1]]


def masked(x, mask, k, **options):
    """Search among the rows of one set that the mask leaves, numbered as before."""
    numbers = torch.cat([mask.nonzero()[:, 0], torch.tensor([-1])])

    def function(x):
        found = padded(cases.search(x, k, **options), k)
        found[:, :k] = numbers[found[:, :k].long()].double()
        return found

    found = cases.kept(function, mask, x, fill=INF)
    found[~mask, :k], found[~mask, -1] = -1, 0
    return found


@pytest.mark.parametrize("options", [{}, dict(exclude_self=True), dict(max_radius=1.5)])
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_mask_removes_rows(layout, dtype, options):
    x, splits = cases.layout(layout, 3, dtype=dtype)
    mask, _ = cases.columns(layout)
    x, k = cases.with_nan(x.detach(), mask), 4
    actual = muvox.knn(x, k, splits=splits, mask=mask, return_counts=True, **options)
    expected = cases.per_set(lambda x, m: masked(x, m, k, **options), splits, x.double(), mask)
    if expected is not None:
        assert_found(actual, split_columns(expected, k), dtype)


@pytest.mark.parametrize("queries, query_splits", [((3, 4), None), ((3, 0), None), ((9,), [0, 0, 2, 9]), ((0,), [0] * 4)])
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_queries(queries, query_splits, dtype):
    ragged = query_splits is not None
    x = torch.randn(*((11,) if ragged else (3, 6)), 3).to(dtype)
    splits = torch.tensor([0, 5, 5, 11]) if ragged else None  # no row to find in the second set
    q = torch.randn(*queries, 3).to(dtype)
    query_splits = torch.tensor(query_splits) if ragged else None
    how = dict(splits=splits, queries=q, query_splits=query_splits, return_counts=True, max_radius=1.5)
    mask = torch.rand(x.shape[:-1]) < 0.7
    actual = muvox.knn(cases.with_nan(x, mask), 4, mask=mask, **how)
    assert actual[0].shape == (*q.shape[:-1], 4) and actual[2].shape == q.shape[:-1]
    parts = (x, mask, q) if not ragged else (
        x.tensor_split(splits[1:-1]), mask.tensor_split(splits[1:-1]), q.tensor_split(query_splits[1:-1])
    )
    for xs, ms, qs, *found in zip(*parts, *(y if not ragged else y.tensor_split(query_splits[1:-1]) for y in actual)):
        numbers = torch.cat([ms.nonzero()[:, 0], torch.tensor([-1])])
        rows = padded(cases.search(xs[ms].double(), 4, queries=qs.double(), max_radius=1.5), 4)
        rows[:, :4] = numbers[rows[:, :4].long()].double()
        assert_found(found, split_columns(rows, 4), dtype)


def test_queries_equal_to_coords_find_what_coords_find():
    x = torch.randn(2, 40, 3)
    for a, b in zip(muvox.knn(x, 5, queries=x, return_counts=True), muvox.knn(x, 5, return_counts=True)):
        assert torch.equal(a, b)


def distances(x, k, **options):
    """distance2 of one set, 0 in unfilled places."""
    rows = [torch.cat([d, d.new_zeros(k - len(d))]) for _, d in cases.search(x, k, **options)]
    return torch.stack(rows) if rows else x.new_zeros(0, k)


def filled_distances(x, k, **options):
    neighbours, distance2 = muvox.knn(x, k, **options)
    return distance2.masked_fill(neighbours < 0, 0)


@pytest.mark.parametrize("options", [dict(exclude_self=True), dict(max_radius=1.5)])
@pytest.mark.parametrize("layout", ["leading dimensions", "ragged"])
def test_gradient_with_options(layout, options):
    x, splits = cases.layout(layout, 2)
    mask, _ = cases.columns(layout)
    actual = filled_distances(cases.with_nan(x, mask), 4, splits=splits, mask=mask, **options)
    expected = cases.per_set(
        lambda x, m: cases.kept(lambda x: distances(x, 4, **options), m, x), splits, x, mask
    )
    g = torch.randn(actual.shape, dtype=torch.float64)
    for a, e in zip(
        (actual, *torch.autograd.grad(actual, x, g)), (expected, *torch.autograd.grad(expected, x, g))
    ):
        assert torch.allclose(a, e, rtol=1e-12, atol=1e-12)


def queries_problem(ragged):
    x, splits = cases.layout("ragged" if ragged else "uniform", 2)
    if ragged:
        return x, splits, torch.randn(7, 2, dtype=torch.float64, requires_grad=True), torch.tensor([0, 3, 3, 3, 7])
    return x, splits, torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True), None


@pytest.mark.parametrize("ragged", [False, True])
def test_gradcheck_of_queries(ragged):
    x, splits, q, query_splits = queries_problem(ragged)

    def op(x, q):
        return filled_distances(x, 3, splits=splits, queries=q, query_splits=query_splits)

    assert torch.autograd.gradcheck(op, (x, q), nondet_tol=0)


def test_gradient_of_one_side_only():
    x, _, q, _ = queries_problem(False)
    dx, dq = torch.autograd.grad(filled_distances(x, 3, queries=q).sum(), (x, q))
    assert torch.equal(torch.autograd.grad(filled_distances(x, 3, queries=q.detach()).sum(), x)[0], dx)
    assert torch.equal(torch.autograd.grad(filled_distances(x.detach(), 3, queries=q).sum(), q)[0], dq)


# edge_index


@pytest.mark.parametrize("exclude_self", [True, False])
@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_edge_index(layout, exclude_self):
    x, splits = cases.layout(layout, 3)
    edges = muvox.edge_index(x, 4, splits=splits, exclude_self=exclude_self)
    assert edges.dtype == torch.int64 and not edges.requires_grad
    sizes = [x.shape[-2]] * math.prod(x.shape[:-2]) if splits is None else splits.diff().tolist()
    expected, first = [], 0
    for rows in x.reshape(-1, 3).split(sizes):
        for i, (order, _) in enumerate(cases.search(rows, 4, exclude_self=exclude_self)):
            expected += [[first + j, first + i] for j in order.tolist()]
        first += len(rows)
    assert edges.shape == (2, len(expected)) and edges.T.tolist() == expected


def test_edge_index_leaves_self_out_by_default():
    assert muvox.edge_index(torch.zeros(3, 1), 2).tolist() == [[1, 2, 0, 2, 0, 1], [0, 0, 1, 1, 2, 2]]


X = torch.randn(5, 3)
Q, S = torch.randn(4, 3), torch.tensor([0, 5])
BAD = {
    "k is 0": lambda: muvox.knn(X, 0),
    "k is 68719476736": lambda: muvox.knn(X, 1 << 36),
    "coords is bool": lambda: muvox.knn(X > 0, 2),
    "coords has 1 dimensions": lambda: muvox.knn(X[0], 2),
    "coords has width 0": lambda: muvox.knn(X[:, :0], 2),
    "splits decrease": lambda: muvox.knn(X, 2, splits=torch.tensor([0, 4, 3, 5])),
    "splits reach 6 at set 0": lambda: muvox.knn(X, 2, splits=torch.tensor([0, 6, 5])),
    "splits end at 6": lambda: muvox.knn(X, 2, splits=torch.tensor([0, 6])),
    "splits is float": lambda: muvox.knn(X, 2, splits=torch.tensor([0.0, 5.0])),
    "max_radius is -1, expected 0 or more": lambda: muvox.knn(X, 2, max_radius=-1.0),
    "max_radius is nan": lambda: muvox.knn(X, 2, max_radius=NAN),
    "mask is torch.uint8, expected bool": lambda: muvox.knn(X, 2, mask=torch.ones(5, dtype=torch.uint8)),
    r"mask has shape \(4,\)": lambda: muvox.knn(X, 2, mask=torch.ones(4, dtype=torch.bool)),
    r"mask has shape \(5, 1\)": lambda: muvox.knn(X, 2, mask=torch.ones(5, 1, dtype=torch.bool)),
    "mask is list, expected a tensor": lambda: muvox.knn(X, 2, mask=[True] * 5),
    "mask is on meta": lambda: muvox.knn(X, 2, mask=torch.ones(5, dtype=torch.bool, device="meta")),
    "exclude_self is set together with queries": lambda: muvox.knn(X, 2, queries=Q, exclude_self=True),
    "query_splits is given without queries": lambda: muvox.knn(X, 2, query_splits=S),
    "queries has width 2, expected 3": lambda: muvox.knn(X, 2, queries=Q[:, :2]),
    "queries is double and coords is float": lambda: muvox.knn(X, 2, queries=Q.double()),
    "queries is on meta": lambda: muvox.knn(X, 2, queries=Q.to("meta")),
    "queries is list": lambda: muvox.knn(X, 2, queries=[1.0]),
    r"queries has leading dimensions \(2,\)": lambda: muvox.knn(X[None], 2, queries=Q.expand(2, 4, 3)),
    "one of coords and queries is ragged": lambda: muvox.knn(X, 2, splits=S, queries=Q),
    "queries has 2 sets, expected 1": lambda: muvox.knn(
        X, 2, splits=S, queries=Q, query_splits=torch.tensor([0, 2, 4])
    ),
    "query_splits end at 3": lambda: muvox.knn(X, 2, splits=S, queries=Q, query_splits=torch.tensor([0, 3])),
    "query_splits is float, expected int64": lambda: muvox.knn(
        X, 2, splits=S, queries=Q, query_splits=torch.tensor([0.0, 4.0])
    ),
    "query_splits is list": lambda: muvox.knn(X, 2, splits=S, queries=Q, query_splits=[0, 4]),
    "out of memory for distance2": lambda: muvox.knn(torch.zeros(1, 1).expand(1 << 36, 1), 1 << 20),
}


@pytest.mark.parametrize("message", BAD)
def test_errors_name_operator_and_argument(message):
    before = muvox.knn(X, 2)[1]
    with pytest.raises((ValueError, RuntimeError), match=rf"^muvox(\.|::)knn: {message}"):
        BAD[message]()
    assert torch.equal(muvox.knn(X, 2)[1], before)
