"""muvox.pool against the formula in plain torch, its gradient, rules and errors."""

import pytest
import torch

import muvox
import op_cases as cases


def compare(x, splits=None, view=lambda x: x, dtype=torch.float64, **options):
    names = options.get("aggregates", ("mean", "max"))

    def op(x):
        return muvox.pool(view(x), splits=splits, **options)

    def expected(x):
        found = cases.per_set(lambda x: cases.combine(x, 0, names)[None], splits, view(x))
        return found if splits is not None or found is None else found.squeeze(-2)

    cases.compare(op, expected, (x,), dtype)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_layouts(layout, dtype):
    compare(*cases.layout(layout, 5, dtype=dtype), dtype=dtype)


@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_shape(layout):
    x, splits = cases.layout(layout, 5)
    sets = x.shape[:-2] if splits is None else (len(splits) - 1,)
    assert muvox.pool(x, splits=splits, aggregates=cases.ALL).shape == (*sets, 20)


@pytest.mark.parametrize("aggregates", [("mean",), ("max",), ("absmax",), ("sum",), cases.ALL, cases.ALL[::-1]])
@pytest.mark.parametrize("layout", ["uniform", "ragged", "no rows"])
def test_aggregates(aggregates, layout):
    compare(*cases.layout(layout, 3), aggregates=aggregates)


@pytest.mark.parametrize("view", cases.VIEWS)
def test_strides(view):
    x, _ = cases.layout("uniform", 4)
    aggregates = ("mean", "sum") if view == "one row for all" else cases.ALL  # among equal rows another winner would do
    compare(x, view=cases.VIEWS[view], aggregates=aggregates)


def test_large_sets_in_half():
    """Sums beyond what half can count are still right, as they are in float."""
    x = torch.full((1, 5000, 1), 0.1, dtype=torch.float16)
    assert muvox.pool(x).tolist() == [[x[0, 0, 0].item()] * 2]
    ones = torch.ones(1, 5000, 1, dtype=torch.bfloat16)
    assert muvox.pool(ones, aggregates="sum").item() == torch.tensor(5000.0).bfloat16().item()


@pytest.mark.parametrize("layout", ["uniform", "ragged", "one row"])
def test_gradcheck(layout):
    x, splits = cases.layout(layout, 3)
    assert torch.autograd.gradcheck(
        lambda x: muvox.pool(x, splits=splits, aggregates=cases.ALL), (x,), nondet_tol=0
    )


def test_ties_go_to_the_first_row():
    x = torch.ones(1, 3, 1, requires_grad=True)
    for name in ("max", "absmax"):
        assert torch.autograd.grad(muvox.pool(x, aggregates=name).sum(), x)[0].flatten().tolist() == [1.0, 0.0, 0.0]


def test_absmax_of_zero_has_no_gradient():
    x = torch.zeros(1, 3, 1, requires_grad=True)
    assert not torch.autograd.grad(muvox.pool(x, aggregates="absmax").sum(), x)[0].any()


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_nan_is_not_hidden(dtype):
    x = torch.randn(3, 6, 2).to(dtype)
    x[1, 3, 0] = float("nan")
    bad = muvox.pool(x, aggregates=cases.ALL).isnan().nonzero().tolist()
    assert bad == [[1, 0], [1, 2], [1, 4], [1, 6]]


def test_infinity():
    x = torch.full((1, 3, 1), -float("inf"), requires_grad=True)
    out = muvox.pool(x, aggregates=("max", "absmax"))
    assert out.tolist() == [[-float("inf"), float("inf")]]
    assert torch.autograd.grad(out[0, 0], x)[0].flatten().tolist() == [1.0, 0.0, 0.0]


def test_saves_what_it_says():
    x, _ = cases.layout("uniform", 5, dtype=torch.float32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        muvox.pool(x)
    assert [(tuple(t.shape), t.dtype) for t in saved] == [
        ((3, 6, 5), torch.float32),
        ((0,), torch.int64),
        ((3, 5), torch.int32),
    ]


def test_autocast():
    x, _ = cases.layout("uniform", 5, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = muvox.pool(x)
    assert torch.equal(out, muvox.pool(x.bfloat16()))
    assert torch.autograd.grad(out.sum(), x)[0].dtype == torch.float32


X = torch.randn(5, 3)
BAD = {
    "x is uint8": lambda: muvox.pool(X.byte()),
    "x has 1 dimensions": lambda: muvox.pool(X[0]),
    "x has width 0": lambda: muvox.pool(X[:, :0]),
    "aggregates has 'mean'": lambda: muvox.pool(X, aggregates=("mean", "mean")),
    "aggregates has 3": lambda: muvox.pool(X, aggregates=(3,)),
    "splits decrease": lambda: muvox.pool(X, splits=torch.tensor([0, 4, 3, 5])),
    "splits begin at -1": lambda: muvox.pool(X, splits=torch.tensor([-1, 5])),
    "splits is list": lambda: muvox.pool(X, splits=[0, 5]),
}


@pytest.mark.parametrize("message", BAD)
def test_errors_name_operator_and_argument(message):
    before = muvox.pool(X)
    with pytest.raises((ValueError, RuntimeError), match=rf"^muvox(\.|::)pool: {message}"):
        BAD[message]()
    assert torch.equal(muvox.pool(X), before)
