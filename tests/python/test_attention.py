"""muvox.attention against the formula in plain torch, its gradients, rules and errors."""

import math

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
    assert [tuple(t.shape) for t in saved if t.numel()] == [(3, 6, 3), (3, 6, 3), (3, 6, 5), (3, 6, 5), (3, 6)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    q, k, v, _ = cases.layout("uniform", 3, 3, 5, dtype=torch.float32)
    with torch.autocast("cpu", dtype):
        out, lse = muvox.attention(q, k.to(dtype), v, return_lse=True)
        assert muvox.attention(*(x.double() for x in (q, k, v))).dtype == torch.float64
    expected = muvox.attention(q.to(dtype), k.to(dtype), v.to(dtype), return_lse=True)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1]) and lse.dtype == torch.float32
    assert [g.dtype for g in torch.autograd.grad(out.sum(), (q, k, v))] == [torch.float32] * 3


# Bias, mask, row weights


def problem(layout, dtype, names):
    """Inputs (q, k, v, then of bias and row_weights those named), splits, and a mask."""
    q, k, v, splits = cases.layout(layout, 3, 3, 5, dtype=dtype)
    mask, weights = cases.columns(layout, dtype=torch.promote_types(dtype, torch.float32))
    bias = torch.randn_like(weights).requires_grad_()
    given = {"bias": bias, "row_weights": weights}
    return [q, k, v, *(given[name] for name in names)], splits, mask


def one_set(q, k, v, bias, weights):
    return cases.attention(q, k, v, bias=bias, weights=weights)


def exact(inputs, names, splits, mask):
    """out and, as the last column, lse, where masked rows are left out."""
    q, k, v, *others = inputs
    given = dict(zip(names, others))
    bias, weights = given.get("bias", q.new_zeros(q.shape[:-1])), given.get("row_weights", q.new_ones(q.shape[:-1]))
    return cases.per_set(
        lambda *s: cases.kept(one_set, s[-1], *s[:-1]), splits, q, k, v, bias, weights, mask
    )


NAMES = [("bias",), ("row_weights",), ("bias", "row_weights")]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("names", [(), *NAMES])
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("layout", ["one set", "leading dimensions", "one row", "no rows", "ragged", "ragged, no rows"])
def test_bias_weights_and_mask(layout, dtype, names, masked):
    inputs, splits, mask = problem(layout, dtype, names)
    mask = mask if masked else torch.ones_like(mask)

    def op(*inputs):
        q, k, v, *others = (cases.with_nan(x, mask) for x in inputs) if masked else inputs
        how = dict(zip(names, others)) | ({"mask": mask} if masked else {})
        return muvox.attention(q, k, v, splits=splits, **how)

    cases.compare(op, lambda *inputs: exact(inputs, names, splits, mask)[..., :-1], inputs, dtype, units=8)


@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("rows", [40, 130])
def test_bias_and_weights_in_larger_sets(names, rows):
    q, k, v = (torch.randn(2, rows, w, dtype=torch.float64, requires_grad=True) for w in (7, 7, 9))
    mask = torch.rand(2, rows) < 0.8
    given = {"bias": torch.randn(2, rows, dtype=torch.float64), "row_weights": torch.rand(2, rows).double().round(decimals=1)}
    inputs = [q, k, v, *(given[name].requires_grad_() for name in names)]

    def op(q, k, v, *others):
        return muvox.attention(q, k, v, mask=mask, **dict(zip(names, others)))

    cases.compare(op, lambda *i: exact(i, names, None, mask)[..., :-1], inputs, torch.float64)


@pytest.mark.parametrize("layout", ["leading dimensions", "ragged"])
def test_lse_with_bias_weights_and_mask(layout):
    """Of rows that have a key; the others are -inf."""
    names = ("bias", "row_weights")
    inputs, splits, mask = problem(layout, torch.float64, names)

    def op(q, k, v, bias, weights):
        return muvox.attention(
            q, k, v, splits=splits, mask=mask, bias=bias, row_weights=weights, return_lse=True
        )[1]

    expected = exact(inputs, names, splits, mask)[..., -1]
    actual = op(*inputs)
    has_keys = mask & expected.isfinite()
    assert actual[~has_keys].isneginf().all()
    assert torch.allclose(actual[has_keys], expected[has_keys], rtol=1e-12)
    gradient = torch.randn(actual.shape, dtype=torch.float64)
    found = torch.autograd.grad(actual, inputs, gradient, allow_unused=True)
    known = torch.autograd.grad(expected[has_keys], inputs, gradient[has_keys], allow_unused=True)
    for a, e, x in zip(found, known, inputs):
        assert torch.allclose(a, torch.zeros_like(x) if e is None else e, rtol=1e-12, atol=1e-12)


def test_gradcheck_with_everything():
    (q, k, v, bias, w), splits, mask = problem("ragged", torch.float64, ("bias", "row_weights"))
    w = (w.detach() + 0.1).requires_grad_()  # a weight is not negative: no two-sided difference at 0

    def op(q, k, v, bias, w):
        out, lse = muvox.attention(
            q, k, v, splits=splits, bias=bias, mask=mask, row_weights=w, scale=0.6, return_lse=True
        )
        return out, lse.masked_fill(~mask, 0)

    assert torch.autograd.gradcheck(op, (q, k, v, bias, w), nondet_tol=0)


@pytest.mark.parametrize("needed", [(3,), (4,), (0, 4), (2, 3)])
def test_some_gradients_of_bias_and_weights(needed):
    inputs, _, _ = problem("uniform", torch.float64, ("bias", "row_weights"))

    def op(q, k, v, bias, w):
        return muvox.attention(q, k, v, bias=bias, row_weights=w).square().sum()

    everything = torch.autograd.grad(op(*inputs), inputs)
    some = [x if i in needed else x.detach() for i, x in enumerate(inputs)]
    for i, g in zip(needed, torch.autograd.grad(op(*some), [inputs[i] for i in needed])):
        assert torch.equal(g, everything[i])


def test_no_key_at_all():
    """All masked, or all of weight 0: 0, -inf, and no gradient."""
    q, k, v, _ = cases.layout("uniform", 3, 3, 5)
    weights = torch.zeros(3, 6, dtype=torch.float64, requires_grad=True)
    for how in (dict(mask=torch.zeros(3, 6, dtype=torch.bool)), dict(row_weights=weights)):
        out, lse = muvox.attention(q, k, v, return_lse=True, **how)
        assert not out.any() and lse.isneginf().all()
        leaves = [q, k, v, *([weights] if "row_weights" in how else [])]
        found = torch.autograd.grad([out, lse], leaves, [torch.ones_like(out), torch.ones_like(lse)])
        assert all(torch.equal(g, torch.zeros_like(g)) for g in found)


def test_infinite_bias_is_a_mask_of_keys():
    q, k, v, _ = cases.layout("uniform", 3, 3, 5)
    bias = torch.zeros(3, 6, dtype=torch.float64)
    bias[:, 2] = -math.inf
    kept = torch.arange(6) != 2
    expected = cases.per_set(lambda q, k, v: cases.attention(q, k[kept], v[kept])[:, :-1], None, q, k, v)
    assert torch.allclose(muvox.attention(q, k, v, bias=bias), expected, rtol=1e-12)


def test_half_bias_and_weights_are_widened():
    inputs, _, _ = problem("uniform", torch.bfloat16, ("bias", "row_weights"))
    q, k, v, *others = inputs
    bias, w = (x.detach().bfloat16().requires_grad_() for x in others)
    out = muvox.attention(q, k, v, bias=bias, row_weights=w)
    assert torch.equal(out, muvox.attention(q, k, v, bias=bias.float(), row_weights=w.float()))
    assert [g.dtype for g in torch.autograd.grad(out.sum(), (bias, w))] == [torch.bfloat16] * 2


def test_autocast_leaves_bias_and_weights_alone():
    (q, k, v, bias, w), _, _ = problem("uniform", torch.float32, ("bias", "row_weights"))
    with torch.autocast("cpu", torch.bfloat16):
        out = muvox.attention(q, k, v, bias=bias, row_weights=w)
    small = (x.bfloat16() for x in (q, k, v))
    assert torch.equal(out, muvox.attention(*small, bias=bias, row_weights=w))
    assert [g.dtype for g in torch.autograd.grad(out.sum(), (q, bias, w))] == [torch.float32] * 3


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
    r"bias has shape \(5,\)": lambda: muvox.attention(Q, K, V, bias=torch.zeros(5)),
    "bias is double, expected float": lambda: muvox.attention(Q, K, V, bias=torch.zeros(2, 5).double()),
    "bias is int64, expected float": lambda: muvox.attention(Q, K, V, bias=torch.zeros(2, 5).long()),
    "mask is torch.uint8, expected bool": lambda: muvox.attention(Q, K, V, mask=torch.ones(2, 5).byte()),
    r"row_weights has shape \(2, 5, 1\)": lambda: muvox.attention(Q, K, V, row_weights=Q[..., :1]),
    "row_weights is double, expected float": lambda: muvox.attention(Q, K, V, row_weights=torch.ones(2, 5).double()),
    "row_weights has -1 in row 0 of set 0": lambda: muvox.attention(Q, K, V, row_weights=-torch.ones(2, 5)),
    "bias is on meta": lambda: muvox.attention(Q, K, V, bias=torch.zeros(2, 5, device="meta")),
    "v is on meta": lambda: muvox.attention(Q, K, V.to("meta")),
}


@pytest.mark.parametrize("message", BAD)
def test_errors_name_operator_and_argument(message):
    before = muvox.attention(Q, K, V)
    with pytest.raises((ValueError, RuntimeError), match=rf"^muvox(\.|::)attention: {message}"):
        BAD[message]()
    assert torch.equal(muvox.attention(Q, K, V), before)
