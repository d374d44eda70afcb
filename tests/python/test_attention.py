"""muvox.attention against the formula in plain torch, its gradients, rules and errors."""

import pytest
import torch

import muvox
import op_cases as cases


def compare(q, k, v, splits=None, views=(lambda x: x,) * 3, dtype=torch.float64, scale=None, units=4):
    def op(*inputs):
        return muvox.attention(*(view(x) for view, x in zip(views, inputs)), splits=splits, scale=scale)

    def expected(*inputs):
        found = cases.per_set(
            lambda *s: cases.attention(*s, scale=scale), splits, *(view(x) for view, x in zip(views, inputs))
        )
        return None if found is None else found[..., :-1]

    cases.compare(op, expected, (q, k, v), dtype, units)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_layouts(layout, dtype):
    q, k, v, splits = cases.layout(layout, 3, 3, 5, dtype=dtype)
    compare(q, k, v, splits, dtype=dtype)


@pytest.mark.parametrize("view", cases.VIEWS)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_strides(view, place):
    views = [cases.VIEWS["contiguous"]] * 3
    views[place] = cases.VIEWS[view]
    compare(*cases.layout("uniform", 4, 4, 3), views=views)


@pytest.mark.parametrize("widths", [(1, 1), (7, 2), (12, 20), (16, 16), (33, 65), (130, 3)])
@pytest.mark.parametrize("rows", [1, 17, 130])
def test_sizes(widths, rows):
    A, C = widths
    inputs = [torch.randn(2, rows, w, dtype=torch.float64, requires_grad=True) for w in (A, A, C)]
    compare(*inputs)


@pytest.mark.parametrize("scale", [None, 0.0, -0.5, 3.0])
def test_scale(scale):
    compare(*cases.layout("ragged", 2, 2, 3), scale=scale)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("layout", ["uniform", "ragged", "leading dimensions"])
def test_lse(layout, dtype):
    """Values and gradients of lse alone, and of both."""
    q, k, v, splits = cases.layout(layout, 3, 3, 5, dtype=dtype)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out, lse = muvox.attention(q, k, v, splits=splits, return_lse=True)
    both = cases.per_set(cases.attention, splits, *exact)
    wide = torch.promote_types(dtype, torch.float32)
    assert lse.dtype == wide and lse.shape == q.shape[:-1]
    cases.assert_near(lse, both[..., -1], wide)
    g = torch.randn(both.shape, dtype=torch.float64)
    for actual, expected, inputs in (
        ((lse,), both[..., -1:], 2),
        ((out, lse), both, 3),
    ):
        gradients = [g[..., :-1].to(dtype), g[..., -1].to(wide)][-len(actual) :]
        rounded = torch.cat([x.double().reshape(*x.shape[: q.dim() - 1], -1) for x in gradients], -1)
        found = torch.autograd.grad(actual, (q, k, v)[:inputs], gradients, retain_graph=True)
        known = torch.autograd.grad(expected, exact[:inputs], rounded, retain_graph=True)
        for a, e in zip(found, known):
            cases.assert_near(a, e, dtype, units=16)


def test_lse_alone_has_no_gradient_of_v():
    q, k, v, _ = cases.layout("uniform", 3, 3, 5)
    lse = muvox.attention(q, k, v, return_lse=True)[1]
    assert not torch.autograd.grad(lse.sum(), v)[0].any()


@pytest.mark.parametrize("layout", ["uniform", "ragged", "one row"])
def test_gradcheck(layout):
    q, k, v, splits = cases.layout(layout, 2, 2, 3)

    def op(q, k, v):
        return muvox.attention(q, k, v, splits=splits, return_lse=True)

    assert torch.autograd.gradcheck(op, (q, k, v), nondet_tol=0)


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_some_gradients(needed):
    inputs = cases.layout("uniform", 2, 2, 3)[:3]
    everything = torch.autograd.grad(muvox.attention(*inputs).square().sum(), inputs)
    some = [x if i in needed else x.detach() for i, x in enumerate(inputs)]
    found = torch.autograd.grad(muvox.attention(*some).square().sum(), [inputs[i] for i in needed])
    for i, g in zip(needed, found):
        assert torch.equal(g, everything[i])


def test_slices_of_one_matrix():
    x = torch.randn(3, 20, 12 + 12 + 20, dtype=torch.float64, requires_grad=True)
    q, k, v = x.split([12, 12, 20], -1)
    expected = muvox.attention(q.contiguous(), k.contiguous(), v.contiguous())
    assert torch.equal(muvox.attention(q, k, v), expected)


def test_large_scores():
    """Softmax of scores far beyond the exponent's range; what is left is their own rounding, 1e-4 in float."""
    q, k, v, _ = cases.layout("uniform", 3, 3, 5, dtype=torch.float32)
    compare((40 * q.detach()).requires_grad_(), (40 * k.detach()).requires_grad_(), v, dtype=torch.float32, units=200)


def test_saves_what_it_says():
    q, k, v, _ = cases.layout("uniform", 3, 3, 5, dtype=torch.float32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        muvox.attention(q, k, v)
    assert [tuple(t.shape) for t in saved] == [(3, 6, 3), (3, 6, 3), (3, 6, 5), (0,), (3, 6, 5), (3, 6)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    q, k, v, _ = cases.layout("uniform", 3, 3, 5, dtype=torch.float32)
    with torch.autocast("cpu", dtype):
        out, lse = muvox.attention(q, k.to(dtype), v, return_lse=True)
        assert muvox.attention(*(x.double() for x in (q, k, v))).dtype == torch.float64
    expected = muvox.attention(q.to(dtype), k.to(dtype), v.to(dtype), return_lse=True)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1]) and lse.dtype == torch.float32
    assert [g.dtype for g in torch.autograd.grad(out.sum(), (q, k, v))] == [torch.float32] * 3


Q, K, V = torch.randn(2, 5, 3), torch.randn(2, 5, 3), torch.randn(2, 5, 4)
BAD = {
    "k is half and q is float": lambda: muvox.attention(Q, K.half(), V),
    "v is double and q is float": lambda: muvox.attention(Q, K, V.double()),
    "q is int64": lambda: muvox.attention(Q.long(), K.long(), V.long()),
    "scale is nan": lambda: muvox.attention(Q, K, V, scale=float("nan")),
    "scale is inf": lambda: muvox.attention(Q, K, V, scale=float("inf")),
    "k has width 2": lambda: muvox.attention(Q, K[..., :2], V),
    "q has width 0": lambda: muvox.attention(Q[..., :0], K[..., :0], V),
    "v has width 0": lambda: muvox.attention(Q, K, V[..., :0]),
    r"v has shape \(2, 4, 4\)": lambda: muvox.attention(Q, K, V[:, :4]),
    "q has 3 dimensions": lambda: muvox.attention(Q, K, V, splits=torch.tensor([0, 5])),
    "splits decrease": lambda: muvox.attention(Q[0], K[0], V[0], splits=torch.tensor([0, 4, 3, 5])),
    "splits end at 3": lambda: muvox.attention(Q[0], K[0], V[0], splits=torch.tensor([0, 3])),
    "v is on meta": lambda: muvox.attention(Q, K, V.to("meta")),
}


@pytest.mark.parametrize("message", BAD)
def test_errors_name_operator_and_argument(message):
    before = muvox.attention(Q, K, V)
    with pytest.raises((ValueError, RuntimeError), match=rf"^muvox(\.|::)attention: {message}"):
        BAD[message]()
    assert torch.equal(muvox.attention(Q, K, V), before)
