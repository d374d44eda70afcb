"""muvox.aggregate against the formula in plain torch, its gradients, rules and errors."""

import pytest
import torch

import muvox
import op_cases as cases


def formula(f, n, w, aggregates=("mean", "max")):
    """One set, row by row over the places that hold a neighbour."""
    rows = []
    for i in range(len(n)):
        valid = n[i] >= 0
        rows.append(cases.combine(w[i, valid, None] * f[n[i, valid].long()], 0, aggregates))
    return torch.stack(rows) if rows else f.new_zeros(0, len(aggregates) * f.shape[1])


def problem(layout, width=3, k=4, dtype=torch.float64, holes=True):
    """feats, neighbours of which some are missing, weights, splits."""
    f, w, splits = cases.layout(layout, width, k, dtype=dtype)

    def draw(rows):
        n = torch.randint(0, max(len(rows), 1), (len(rows), k), dtype=torch.int32)
        return n.masked_fill(torch.rand(n.shape) < 0.3, -1) if holes else n

    n = cases.per_set(draw, splits, f)
    return f, torch.empty(*w.shape, dtype=torch.int32) if n is None else n, w, splits


def compare(f, n, w, splits=None, views=(lambda x: x,) * 3, dtype=torch.float64, **options):
    def op(f, w):
        return muvox.aggregate(views[0](f), views[1](n), views[2](w), splits=splits, **options)

    def expected(f, w):
        return cases.per_set(lambda *s: formula(*s, **options), splits, views[0](f), views[1](n), views[2](w))

    cases.compare(op, expected, (f, w), dtype)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_layouts(layout, dtype):
    compare(*problem(layout, dtype=dtype), dtype=dtype)


@pytest.mark.parametrize("aggregates", [("mean",), ("max",), ("absmax",), ("sum",), cases.ALL, cases.ALL[::-1]])
@pytest.mark.parametrize("layout", ["uniform", "ragged"])
def test_aggregates(aggregates, layout):
    compare(*problem(layout), aggregates=aggregates)


@pytest.mark.parametrize("view", cases.VIEWS)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_strides(view, place):
    views = [cases.VIEWS["contiguous"]] * 3
    views[place] = cases.VIEWS[view]
    compare(*problem("uniform", holes=False), views=views, aggregates=("mean", "sum"))


@pytest.mark.parametrize("k", [1, 254, 255, 300])
def test_k(k):
    """Winners are bytes up to k = 254 and int32 above."""
    compare(*problem("one set", k=k, holes=False), aggregates=("max", "absmax"))


@pytest.mark.parametrize("weights", cases.DTYPES[:3])
@pytest.mark.parametrize("feats", cases.DTYPES[:3])
def test_mixed_dtypes(feats, weights):
    f, n, w, _ = problem("uniform")
    f, w = f.detach().to(feats).requires_grad_(), w.detach().to(weights).requires_grad_()
    compare(f, n, w, dtype=feats, aggregates=("sum", "mean"))


@pytest.mark.parametrize("layout", ["uniform", "ragged"])
def test_gradcheck(layout):
    f, n, w, splits = problem(layout)

    def op(f, w):
        return muvox.aggregate(f, n, w, splits=splits, aggregates=cases.ALL)

    assert torch.autograd.gradcheck(op, (f, w), nondet_tol=0)


def test_row_without_neighbours():
    f, w = torch.randn(3, 2, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    out = muvox.aggregate(f, torch.full((3, 4), -1, dtype=torch.int32), w, aggregates=cases.ALL)
    assert torch.equal(out, torch.zeros(3, 8))
    assert not any(g.any() for g in torch.autograd.grad(out.sum(), (f, w)))


def test_ties_go_to_the_first_place():
    f, w = torch.ones(1, 1, requires_grad=True), torch.ones(1, 3, requires_grad=True)
    n = torch.tensor([[-1, 0, 0]], dtype=torch.int32)
    for name in ("max", "absmax"):
        out = muvox.aggregate(f, n, w, aggregates=name)
        assert torch.autograd.grad(out, w)[0].tolist() == [[0.0, 1.0, 0.0]]


def test_gravnet_is_knn_and_aggregate():
    x, f, splits = cases.layout("ragged", 2, 3)
    neighbours, distance2 = muvox.knn(x, 4, splits=splits)
    out = muvox.aggregate(f, neighbours, torch.exp(-2 * distance2), splits=splits, aggregates=cases.ALL)
    expected = muvox.gravnet(x, f, 4, splits=splits, scale=2, aggregates=cases.ALL)
    assert torch.allclose(out, expected, rtol=1e-13)
    g = torch.randn(out.shape, dtype=torch.float64)
    for a, b in zip(torch.autograd.grad(out, (x, f), g), torch.autograd.grad(expected, (x, f), g)):
        assert torch.allclose(a, b, rtol=1e-12)


def test_saves_what_it_says():
    f, n, w, _ = problem("uniform", dtype=torch.float32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        muvox.aggregate(f, n, w)
    assert [(tuple(t.shape), t.dtype) for t in saved] == [
        ((3, 6, 3), torch.float32),
        ((3, 6, 4), torch.int32),
        ((3, 6, 4), torch.float32),
        ((0,), torch.int64),
        ((3, 6, 3), torch.uint8),
    ]


def test_autocast():
    f, n, w, _ = problem("uniform", dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = muvox.aggregate(f, n, w)
    assert torch.equal(out, muvox.aggregate(f.bfloat16(), n, w))  # weights were not rounded
    assert [g.dtype for g in torch.autograd.grad(out.sum(), (f, w))] == [torch.float32] * 2


F, N, W = torch.randn(2, 5, 3), torch.zeros(2, 5, 4, dtype=torch.int32), torch.randn(2, 5, 4)
BAD = {
    "neighbours is int64": lambda: muvox.aggregate(F, N.long(), W),
    "neighbours is float": lambda: muvox.aggregate(F, N.float(), W),
    "neighbours has .*5": lambda: muvox.aggregate(F, N + 5, W),
    r"weights has (width|shape)": lambda: muvox.aggregate(F, N, W[..., :3]),
    r"weights has shape \(1, 5, 4\)": lambda: muvox.aggregate(F, N, W[:1]),
    r"neighbours has shape \(5, 4\)": lambda: muvox.aggregate(F, N[0], W),
    "weights is double and feats is float": lambda: muvox.aggregate(F, N, W.double()),
    "weights is int32": lambda: muvox.aggregate(F, N, N),
    "feats is int16": lambda: muvox.aggregate(F.short(), N, W),
    "aggregates has 'min'": lambda: muvox.aggregate(F, N, W, aggregates="min"),
    "splits decrease": lambda: muvox.aggregate(F[0], N[0], W[0], splits=torch.tensor([0, 4, 3, 5])),
    "neighbours is on meta": lambda: muvox.aggregate(F, N.to("meta"), W),
}


@pytest.mark.parametrize("message", BAD)
def test_errors_name_operator_and_argument(message):
    before = muvox.aggregate(F, N, W)
    with pytest.raises((ValueError, RuntimeError), match=rf"^muvox(\.|::)aggregate: {message}"):
        BAD[message]()
    assert torch.equal(muvox.aggregate(F, N, W), before)


@pytest.mark.parametrize("bad", [-2, 3, 2**31 - 1, -(2**31)])
def test_neighbour_outside_its_set(bad):
    """Row 3 exists, but in the next set."""
    n = torch.zeros(5, 2, dtype=torch.int32)
    n[1, 1] = bad
    with pytest.raises(RuntimeError, match=f"^muvox::aggregate: neighbours has .*{bad}"):
        muvox.aggregate(torch.ones(5, 1), n, torch.ones(5, 2), splits=torch.tensor([0, 3, 5]))
