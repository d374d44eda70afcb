"""muvox.gravnet against the formula in plain torch, its gradients, rules and errors."""

import pytest
import torch

import muvox
import op_cases as cases


def compare(x, f, splits=None, k=3, views=(lambda x: x, lambda x: x), dtype=torch.float64, **options):
    def op(x, f):
        return muvox.gravnet(views[0](x), views[1](f), k, splits=splits, **options)

    def formula(x, f):
        return cases.per_set(lambda x, f: cases.gravnet(x, f, k, **options), splits, views[0](x), views[1](f))

    cases.compare(op, formula, (x, f), dtype)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_layouts(layout, dtype):
    x, f, splits = cases.layout(layout, 3, 5, dtype=dtype)
    compare(x, f, splits, dtype=dtype, scale=0.7)


@pytest.mark.parametrize("view", cases.VIEWS)
@pytest.mark.parametrize("other", ["contiguous", "columns apart"])
def test_strides(view, other):
    x, f, _ = cases.layout("uniform", 4, 5)
    views = cases.VIEWS[view], cases.VIEWS[other]
    coords_tie = view.startswith("one row") or view.startswith("one column")
    if not coords_tie:  # among coincident rows another winner would do
        compare(x, f, views=views, scale=0.5)
    compare(x, f, views=views[::-1], scale=0.5, aggregates=("mean", "sum"))


@pytest.mark.parametrize("aggregates", [("mean",), ("max",), ("absmax",), ("sum",), cases.ALL, cases.ALL[::-1]])
def test_aggregates(aggregates):
    compare(*cases.layout("ragged", 2, 3), aggregates=aggregates, scale=0.3)


def test_one_name_is_an_aggregate():
    x, f, _ = cases.layout("uniform", 2, 3)
    assert torch.equal(muvox.gravnet(x, f, 2, aggregates="max"), muvox.gravnet(x, f, 2, aggregates=("max",)))


@pytest.mark.parametrize("k", [1, 2, 6, 7, 40])
def test_k(k):
    compare(*cases.layout("uniform", 2, 3), k=k, scale=0.3)


@pytest.mark.parametrize("k", [254, 255, 300])
def test_many_neighbours(k):
    """Winners are bytes up to k = 254 and int32 above."""
    x, f = torch.randn(260, 2, dtype=torch.float64), torch.randn(260, 1, dtype=torch.float64)
    compare(x.requires_grad_(), f.requires_grad_(), k=k, scale=0.01, aggregates=("max", "absmax"))


@pytest.mark.parametrize("scale", [0.0, -0.2, 10.0])
def test_scale(scale):
    x, f, splits = cases.layout("ragged", 2, 3)
    compare(x, f, splits, scale=scale, aggregates=("mean", "sum"))


@pytest.mark.parametrize("coords", cases.DTYPES[:3])
@pytest.mark.parametrize("feats", cases.DTYPES[:3])
def test_mixed_dtypes(coords, feats):
    x, f, _ = cases.layout("uniform", 3, 4)
    x, f = x.detach().to(coords).requires_grad_(), f.detach().to(feats).requires_grad_()
    out = muvox.gravnet(x, f, 3, scale=0.5, aggregates=("mean", "sum"))
    exact = [y.detach().double().requires_grad_() for y in (x, f)]
    expected = cases.per_set(lambda x, f: cases.gravnet(x, f, 3, 0.5, ("mean", "sum")), None, *exact)
    cases.assert_near(out, expected, feats)
    found = torch.autograd.grad(out.sum(), (x, f))
    assert found[0].dtype == coords and found[1].dtype == feats
    for g, e, dtype in zip(found, torch.autograd.grad(expected.sum(), exact), (coords, feats)):
        cases.assert_near(g, e, dtype)


@pytest.mark.parametrize("layout", ["uniform", "ragged", "one row"])
def test_gradcheck(layout):
    x, f, splits = cases.layout(layout, 2, 3)

    def op(x, f):
        return muvox.gravnet(x, f, 3, splits=splits, scale=0.5, aggregates=cases.ALL)

    assert torch.autograd.gradcheck(op, (x, f), nondet_tol=0)


def test_coincident_rows_have_no_coordinate_gradient():
    x = torch.ones(5, 2, dtype=torch.float64, requires_grad=True)
    f = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    out = muvox.gravnet(x, f, 9)
    assert torch.allclose(out[:, :3], f.mean(0).expand(5, 3)) and torch.equal(out[:, 3:], f.max(0).values.expand(5, 3))
    assert not torch.autograd.grad(out.sum(), x)[0].any()


def test_ties_go_to_the_nearest():
    x = torch.tensor([[0.0], [1.0], [2.0]], requires_grad=True)
    f = torch.tensor([[1.0], [1.0], [1.0]], requires_grad=True)
    grad = torch.autograd.grad(muvox.gravnet(x, f, 3, scale=0.0, aggregates="max").sum(), f)[0]
    assert torch.equal(grad, torch.ones(3, 1))  # each row won its own maximum


def test_nan_is_not_hidden():
    x, f, _ = cases.layout("one set", 2, 2, dtype=torch.float32)
    f = f.detach().clone()
    f[3, 1] = float("nan")
    out = muvox.gravnet(x.detach(), f, 7, aggregates=cases.ALL)
    assert out[:, 1::2].isnan().all() and not out[:, ::2].isnan().any()


def test_saves_what_it_says():
    x, f, _ = cases.layout("uniform", 3, 4, dtype=torch.float32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        muvox.gravnet(x, f, 2, aggregates=("mean", "max"))
    assert [(tuple(t.shape), t.dtype) for t in saved] == [
        ((3, 6, 3), torch.float32),
        ((3, 6, 4), torch.float32),
        ((0,), torch.int64),
        ((3, 6, 2), torch.int32),
        ((3, 6, 4), torch.uint8),
    ]


def test_nothing_is_saved_without_gradients():
    x, f, _ = cases.layout("uniform", 3, 4)
    no_splits = torch.empty(0, dtype=torch.int64)
    _, neighbours, winners = torch.ops.muvox.gravnet(x, f, no_splits, 2, 1.0, 0x21, False)
    assert neighbours.shape == winners.shape == (0,)
    with torch.no_grad():
        assert not muvox.gravnet(x, f, 2).requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    x, f, _ = cases.layout("uniform", 3, 4, dtype=torch.float32)
    with torch.autocast("cpu", dtype):
        out = muvox.gravnet(x, f, 3)
        assert muvox.gravnet(x.double(), f.double(), 3).dtype == torch.float64
    assert torch.equal(out, muvox.gravnet(x, f.to(dtype), 3))  # coords were not rounded
    grads = torch.autograd.grad(out.sum(), (x, f))
    assert [g.dtype for g in grads] == [torch.float32, torch.float32]


X, F = torch.randn(2, 5, 3), torch.randn(2, 5, 4)
BAD = {
    "k is 0": lambda: muvox.gravnet(X, F, 0),
    "k is -3": lambda: muvox.gravnet(X, F, -3),
    "scale is nan": lambda: muvox.gravnet(X, F, 2, scale=float("nan")),
    "scale is -inf": lambda: muvox.gravnet(X, F, 2, scale=-float("inf")),
    "aggregates is empty": lambda: muvox.gravnet(X, F, 2, aggregates=()),
    "aggregates has 'median'": lambda: muvox.gravnet(X, F, 2, aggregates=("mean", "median")),
    "aggregates has 'max'": lambda: muvox.gravnet(X, F, 2, aggregates=("max", "max")),
    "coords is int64": lambda: muvox.gravnet(X.long(), F, 2),
    "feats is int32": lambda: muvox.gravnet(X, F.int(), 2),
    "coords is double and feats is float": lambda: muvox.gravnet(X.double(), F, 2),
    "coords is float and feats is double": lambda: muvox.gravnet(X, F.double(), 2),
    "coords has 1 dimensions": lambda: muvox.gravnet(X[0, 0], F[0, 0], 2),
    r"feats has shape \(2, 4, 4\)": lambda: muvox.gravnet(X, F[:, :4], 2),
    r"feats has shape \(5, 4\)": lambda: muvox.gravnet(X, F[0], 2),
    "coords has width 0": lambda: muvox.gravnet(X[..., :0], F, 2),
    "feats has width 0": lambda: muvox.gravnet(X, F[..., :0], 2),
    "feats is list": lambda: muvox.gravnet(X, [1.0], 2),
    "coords has 3 dimensions": lambda: muvox.gravnet(X, F, 2, splits=torch.tensor([0, 5])),
    "splits is empty": lambda: muvox.gravnet(X[0], F[0], 2, splits=torch.tensor([], dtype=torch.int64)),
    "splits decrease": lambda: muvox.gravnet(X[0], F[0], 2, splits=torch.tensor([0, 4, 3, 5])),
    "splits begin at 1": lambda: muvox.gravnet(X[0], F[0], 2, splits=torch.tensor([1, 5])),
    "splits end at 4": lambda: muvox.gravnet(X[0], F[0], 2, splits=torch.tensor([0, 4])),
    "splits is int32": lambda: muvox.gravnet(X[0], F[0], 2, splits=torch.tensor([0, 5], dtype=torch.int32)),
    "splits has 2 dimensions": lambda: muvox.gravnet(X[0], F[0], 2, splits=torch.tensor([[0, 5]])),
    "feats is on meta": lambda: muvox.gravnet(X, F.to("meta"), 2),
    "splits is on meta": lambda: muvox.gravnet(X[0], F[0], 2, splits=torch.tensor([0, 5], device="meta")),
}


@pytest.mark.parametrize("message", BAD)
def test_errors_name_operator_and_argument(message):
    before = muvox.gravnet(X, F, 2)
    with pytest.raises((ValueError, RuntimeError), match=rf"^muvox(\.|::)gravnet: {message}"):
        BAD[message]()
    assert torch.equal(muvox.gravnet(X, F, 2), before)
