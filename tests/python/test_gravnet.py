"""muvox.gravnet against the formula in plain torch, its gradients, rules and errors."""

import math

import pytest
import torch

import muvox
import op_cases as cases


AGGREGATES = ("mean", "max", "sum", "absmax")


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
    assert [(tuple(t.shape), t.dtype) for t in saved if t.numel()] == [
        ((3, 6, 3), torch.float32),
        ((3, 6, 4), torch.float32),
        ((3, 6, 2), torch.int32),
        ((3, 6, 4), torch.uint8),
    ]


def test_nothing_is_saved_without_gradients():
    x, f, _ = cases.layout("uniform", 3, 4)
    none = torch.empty(0, dtype=torch.int64)
    _, neighbours, winners = torch.ops.muvox.gravnet(
        x, f, none, none, none, 2, 1.0, 0x21, False, False, math.inf, False
    )
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


# Options of the search, masks, row weights


def compare_with_options(layout, dtype, weights=True, mask=False, k=4, **options):
    x, f, splits = cases.layout(layout, 3, 5, dtype=dtype)
    keep, w = cases.columns(layout, dtype=torch.promote_types(dtype, torch.float32))
    keep = keep if mask else torch.ones_like(keep)
    options = dict(scale=0.7, aggregates=AGGREGATES) | options

    def op(x, f, *w):
        if mask:
            x, f, w = cases.with_nan(x, keep), cases.with_nan(f, keep), [u.masked_fill(~keep, math.nan) for u in w]
        return muvox.gravnet(
            x, f, k, splits=splits, mask=keep if mask else None, row_weights=w[0] if w else None, **options
        )

    def one_set(x, f, w, keep):
        return cases.kept(lambda x, f, w: cases.gravnet_by_rows(x, f, w, k, **options), keep, x, f, w)

    def formula(x, f, *w):
        w = w[0] if w else x.new_ones(x.shape[:-1])
        return cases.per_set(one_set, splits, x, f, w, keep)

    cases.compare(op, formula, (x, f, w) if weights else (x, f), dtype)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_row_weights(layout, dtype):
    """About a third of them are 0."""
    compare_with_options(layout, dtype)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_mask_removes_rows(layout, dtype):
    compare_with_options(layout, dtype, mask=True)


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        dict(exclude_self=True),
        dict(max_radius=1.0),
        dict(max_radius=0.0, exclude_self=True),
        dict(mean="k"),
        dict(mean="k", max_radius=1.0, k=9),
        dict(mean="k", aggregates=("max", "mean"), exclude_self=True, k=1),
    ],
)
@pytest.mark.parametrize("layout", ["leading dimensions", "ragged"])
def test_options(layout, options, mask):
    compare_with_options(layout, torch.float64, mask=mask, **options)
    compare_with_options(layout, torch.float32, mask=mask, weights=False, **options)


@pytest.mark.parametrize("options", [{}, dict(exclude_self=True, mean="k"), dict(max_radius=1.3)])
def test_gradcheck_with_options(options):
    x, f, splits = cases.layout("ragged", 2, 3)
    mask, w = cases.columns("ragged")
    w = (w.detach() + 0.1).requires_grad_()  # a weight is not negative: no two-sided difference at 0

    def op(x, f, w):
        return muvox.gravnet(
            x, f, 3, splits=splits, scale=0.5, aggregates=cases.ALL, mask=mask, row_weights=w, **options
        )

    assert torch.autograd.gradcheck(op, (x, f, w), nondet_tol=0)


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_some_gradients(needed):
    x, f, _ = cases.layout("uniform", 2, 3)
    inputs = x, f, cases.columns("uniform")[1]

    def op(x, f, w):
        return muvox.gravnet(x, f, 3, row_weights=w, aggregates=cases.ALL)

    everything = torch.autograd.grad(op(*inputs).square().sum(), inputs)
    some = [x if i in needed else x.detach() for i, x in enumerate(inputs)]
    found = torch.autograd.grad(op(*some).square().sum(), [inputs[i] for i in needed])
    for i, g in zip(needed, found):
        assert torch.equal(g, everything[i])


def test_row_without_neighbours():
    """All others are out of the radius: 0 and no gradient, for any aggregate."""
    x = (torch.arange(4.0)[:, None] * 10).requires_grad_()
    f = torch.randn(4, 2, requires_grad=True)
    w = torch.rand(4, requires_grad=True)
    for mean in ("count", "k"):
        out = muvox.gravnet(
            x, f, 3, exclude_self=True, max_radius=1.0, aggregates=cases.ALL, row_weights=w, mean=mean
        )
        assert torch.equal(out, torch.zeros(4, 8))
        assert not any(g.any() for g in torch.autograd.grad(out.sum(), (x, f, w)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_row_weights_are_widened(dtype):
    x, f, _ = cases.layout("uniform", 2, 3, dtype=torch.float32)
    w = torch.rand(3, 6).to(dtype).requires_grad_()
    out = muvox.gravnet(x, f, 3, row_weights=w)
    assert torch.equal(out, muvox.gravnet(x, f, 3, row_weights=w.float()))
    assert torch.autograd.grad(out.sum(), w)[0].dtype == dtype


X, F = torch.randn(2, 5, 3), torch.randn(2, 5, 4)
NEGATIVE = torch.ones(2, 5)
NEGATIVE[1, 3] = -1
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
    "mean is 'n', expected 'count' or 'k'": lambda: muvox.gravnet(X, F, 2, mean="n"),
    "max_radius is -0.5, expected 0 or more": lambda: muvox.gravnet(X, F, 2, max_radius=-0.5),
    "mask is torch.float32, expected bool": lambda: muvox.gravnet(X, F, 2, mask=X[..., 0]),
    r"mask has shape \(5,\)": lambda: muvox.gravnet(X, F, 2, mask=X[0, :, 0] > 0),
    r"row_weights has shape \(2, 5, 3\)": lambda: muvox.gravnet(X, F, 2, row_weights=X),
    "row_weights is double, expected float": lambda: muvox.gravnet(X, F, 2, row_weights=torch.rand(2, 5).double()),
    "row_weights is int64, expected float": lambda: muvox.gravnet(X, F, 2, row_weights=torch.ones(2, 5).long()),
    "row_weights has -1 in row 3 of set 1": lambda: muvox.gravnet(X, F, 2, row_weights=NEGATIVE),
    "row_weights is float, expected a tensor": lambda: muvox.gravnet(X, F, 2, row_weights=1.0),
    "row_weights is on meta": lambda: muvox.gravnet(X, F, 2, row_weights=NEGATIVE.to("meta")),
    "feats is on meta": lambda: muvox.gravnet(X, F.to("meta"), 2),
    "splits is on meta": lambda: muvox.gravnet(X[0], F[0], 2, splits=torch.tensor([0, 5], device="meta")),
}


@pytest.mark.parametrize("message", BAD)
def test_errors_name_operator_and_argument(message):
    before = muvox.gravnet(X, F, 2)
    with pytest.raises((ValueError, RuntimeError), match=rf"^muvox(\.|::)gravnet: {message}"):
        BAD[message]()
    assert torch.equal(muvox.gravnet(X, F, 2), before)
