"""muvox.offset_attention against the formula in plain torch, its gradients, rules and errors."""

import pytest
import torch

import muvox
import op_cases as cases


def compare(q, k, v, splits=None, views=(lambda x: x,) * 3, dtype=torch.float64, units=4, **options):
    def op(*inputs):
        return muvox.offset_attention(*(view(x) for view, x in zip(views, inputs)), splits=splits, **options)

    def expected(*inputs):
        return cases.per_set(
            lambda *s: cases.offset_attention(*s, **options), splits, *(view(x) for view, x in zip(views, inputs))
        )

    cases.compare(op, expected, (q, k, v), dtype, units)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_layouts(layout, dtype):
    q, k, v, splits = cases.layout(layout, 3, 3, 5, dtype=dtype)
    compare(q, k, v, splits, dtype=dtype, units=8)


@pytest.mark.parametrize("view", cases.VIEWS)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_strides(view, place):
    views = [cases.VIEWS["contiguous"]] * 3
    views[place] = cases.VIEWS[view]
    compare(*cases.layout("uniform", 4, 4, 3), views=views)


@pytest.mark.parametrize("widths", [(1, 1), (7, 2), (12, 20), (33, 65), (130, 3)])
@pytest.mark.parametrize("rows", [1, 17, 130])
def test_sizes(widths, rows):
    A, C = widths
    compare(*(torch.randn(2, rows, w, dtype=torch.float64, requires_grad=True) for w in (A, A, C)), scale=A**-0.5)


@pytest.mark.parametrize("scale", [0.0, -0.5, 2.0])
@pytest.mark.parametrize("eps", [0.0, 0.1])
def test_scale_and_eps(scale, eps):
    compare(*cases.layout("ragged", 2, 2, 3), scale=scale, eps=eps)


def test_the_softmax_runs_over_the_queries():
    """Exchanging q and k gives another result, and so does a softmax over the keys."""
    q, k, v, _ = cases.layout("uniform", 3, 3, 5)
    out = muvox.offset_attention(q, k, v)
    assert not torch.allclose(out, muvox.offset_attention(k, q, v), atol=1e-2)
    assert not torch.allclose(out, muvox.attention(q, k, v, scale=1.0), atol=1e-2)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_mask_removes_rows(layout, dtype):
    q, k, v, splits = cases.layout(layout, 3, 3, 5, dtype=dtype)
    mask, _ = cases.columns(layout)

    def op(*inputs):
        return muvox.offset_attention(*(cases.with_nan(x, mask) for x in inputs), splits=splits, mask=mask)

    def expected(*inputs):
        return cases.per_set(lambda *s: cases.kept(cases.offset_attention, s[-1], *s[:-1]), splits, *inputs, mask)

    cases.compare(op, expected, (q, k, v), dtype, units=8)


def test_all_rows_masked():
    q, k, v, _ = cases.layout("uniform", 3, 3, 5)
    out = muvox.offset_attention(q, k, v, mask=torch.zeros(3, 6, dtype=torch.bool))
    assert not out.any() and not any(g.any() for g in torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("layout", ["uniform", "ragged", "one row"])
def test_gradcheck(layout, masked):
    q, k, v, splits = cases.layout(layout, 2, 2, 3)
    mask = cases.columns(layout)[0] if masked else None

    def op(q, k, v):
        return muvox.offset_attention(q, k, v, splits=splits, mask=mask)

    assert torch.autograd.gradcheck(op, (q, k, v), nondet_tol=0)


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_some_gradients(needed):
    inputs = cases.layout("uniform", 2, 2, 3)[:3]
    everything = torch.autograd.grad(muvox.offset_attention(*inputs).square().sum(), inputs)
    some = [x if i in needed else x.detach() for i, x in enumerate(inputs)]
    found = torch.autograd.grad(muvox.offset_attention(*some).square().sum(), [inputs[i] for i in needed])
    for i, g in zip(needed, found):
        assert torch.equal(g, everything[i])


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_rows_whose_shares_underflow(dtype):
    """Row 0 gets exp(-300) of every column, far below eps: 0, with finite gradients."""
    q = torch.tensor([[-300.0], [0.0], [0.0]]).to(dtype)
    k, v = torch.ones(3, 1).to(dtype), torch.tensor([[1.0], [2.0], [6.0]]).to(dtype)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = muvox.offset_attention(*inputs)
    assert out[1:].flatten().tolist() == [3.0, 3.0] and abs(out[0].item()) < 1e-100
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(out.sum(), inputs))
    if dtype == torch.float64:  # without eps it is the quotient of two small numbers
        assert muvox.offset_attention(*inputs, eps=0.0)[0].item() == pytest.approx(3.0, rel=1e-12)


def test_saves_what_it_says():
    q, k, v, _ = cases.layout("uniform", 3, 3, 5, dtype=torch.float32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        muvox.offset_attention(q, k, v)
    assert [tuple(t.shape) for t in saved if t.numel()] == [
        (3, 6, 3),
        (3, 6, 3),
        (3, 6, 5),
        (3, 6, 5),
        (3, 6),
        (3, 6),
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    q, k, v, _ = cases.layout("uniform", 3, 3, 5, dtype=torch.float32)
    with torch.autocast("cpu", dtype):
        out = muvox.offset_attention(q, k.to(dtype), v)
        assert muvox.offset_attention(*(x.double() for x in (q, k, v))).dtype == torch.float64
    assert torch.equal(out, muvox.offset_attention(q.to(dtype), k.to(dtype), v.to(dtype)))
    assert [g.dtype for g in torch.autograd.grad(out.sum(), (q, k, v))] == [torch.float32] * 3


Q, K, V = torch.randn(2, 5, 3), torch.randn(2, 5, 3), torch.randn(2, 5, 4)
BAD = {
    "k is half and q is float": lambda: muvox.offset_attention(Q, K.half(), V),
    "v is double and q is float": lambda: muvox.offset_attention(Q, K, V.double()),
    "q is int64": lambda: muvox.offset_attention(Q.long(), K.long(), V.long()),
    "scale is nan": lambda: muvox.offset_attention(Q, K, V, scale=float("nan")),
    "eps is -1": lambda: muvox.offset_attention(Q, K, V, eps=-1.0),
    "eps is inf": lambda: muvox.offset_attention(Q, K, V, eps=float("inf")),
    "k has width 2": lambda: muvox.offset_attention(Q, K[..., :2], V),
    "q has width 0": lambda: muvox.offset_attention(Q[..., :0], K[..., :0], V),
    r"v has shape \(2, 4, 4\)": lambda: muvox.offset_attention(Q, K, V[:, :4]),
    "mask is torch.int64, expected bool": lambda: muvox.offset_attention(Q, K, V, mask=torch.ones(2, 5).long()),
    r"mask has shape \(2, 4\)": lambda: muvox.offset_attention(Q, K, V, mask=Q[:, :4, 0] > 0),
    "splits decrease": lambda: muvox.offset_attention(Q[0], K[0], V[0], splits=torch.tensor([0, 4, 3, 5])),
    "splits end at 3": lambda: muvox.offset_attention(Q[0], K[0], V[0], splits=torch.tensor([0, 3])),
    "v is on meta": lambda: muvox.offset_attention(Q, K, V.to("meta")),
}


@pytest.mark.parametrize("message", BAD)
def test_errors_name_operator_and_argument(message):
    before = muvox.offset_attention(Q, K, V)
    with pytest.raises((ValueError, RuntimeError), match=rf"^muvox(\.|::)offset_attention: {message}"):
        BAD[message]()
    assert torch.equal(muvox.offset_attention(Q, K, V), before)
