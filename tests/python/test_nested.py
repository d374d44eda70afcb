"""Jagged nested tensors in and out: they are ragged sets whose splits are the offsets."""

import pytest
import torch

import muvox

SIZES = [3, 0, 5, 1]
OFFSETS = torch.tensor([0, 3, 3, 8, 9])


def jagged(*shape, dtype=torch.float32, offsets=OFFSETS, requires_grad=True):
    values = torch.randn(9, *shape, dtype=dtype, requires_grad=requires_grad)
    return torch.nested.nested_tensor_from_jagged(values, offsets), values


def problem():
    """Nested arguments by name, and the tensors (N, …) that they are made of."""
    found = {"x": jagged(2), "q": jagged(3), "k": jagged(3), "v": jagged(4), "w": jagged()}
    nested, plain = ({name: pair[at] for name, pair in found.items()} for at in (0, 1))
    weights = plain["w"].detach().abs()
    for given in (nested, plain):
        del given["w"]
    mask = torch.rand(9) < 0.7
    for name, x in (("weights", weights), ("mask", mask), ("neighbours", torch.zeros(9, 2, dtype=torch.int32))):
        plain[name], nested[name] = x, torch.nested.nested_tensor_from_jagged(x, OFFSETS)
    return nested, plain


# One line per operator and set of arguments: the call from the tensors by name, and splits.
CALLS = {
    "gravnet": lambda t, **s: muvox.gravnet(t["x"], t["v"], 3, mask=t["mask"], row_weights=t["weights"], **s),
    "gravnet alone": lambda t, **s: muvox.gravnet(t["x"], t["v"], 3, **s),
    "attention": lambda t, **s: muvox.attention(
        t["q"], t["k"], t["v"], bias=t["weights"], mask=t["mask"], row_weights=t["weights"], **s
    ),
    "offset_attention": lambda t, **s: muvox.offset_attention(t["q"], t["k"], t["v"], mask=t["mask"], **s),
    "distance2": lambda t, **s: muvox.knn(t["x"], 1, **s)[1],
    "aggregate": lambda t, **s: muvox.aggregate(t["v"], t["neighbours"], t["x"], **s),
    "lse": lambda t, **s: muvox.attention(t["q"], t["k"], t["v"], return_lse=True, **s)[1],
}


@pytest.mark.parametrize("call", CALLS)
def test_rows_come_back_nested(call):
    nested, plain = problem()
    out, expected = CALLS[call](nested), CALLS[call](plain, splits=OFFSETS)
    assert out.is_nested and out.layout == torch.jagged and out.offsets() is OFFSETS
    assert out.shape[:2] == nested["x"].shape[:2]
    assert torch.equal(out.values(), expected)
    g = torch.randn(expected.shape)
    leaves = [x for x in plain.values() if x.requires_grad]
    found = torch.autograd.grad(out.values(), leaves, g, allow_unused=True)
    known = torch.autograd.grad(expected, leaves, g, allow_unused=True)
    assert any(g is not None for g in known)
    for a, b in zip(found, known):
        assert (a is None and b is None) or torch.equal(a, b)


def test_knn_gives_all_results_nested():
    x, values = jagged(2)
    found = muvox.knn(x, 3, return_counts=True)
    for a, b in zip(found, muvox.knn(values, 3, splits=OFFSETS, return_counts=True)):
        assert a.is_nested and torch.equal(a.values(), b)
    assert torch.equal(muvox.edge_index(x, 3), muvox.edge_index(values, 3, splits=OFFSETS))


def test_queries_have_their_own_offsets():
    x, values = jagged(2)
    offsets = torch.tensor([0, 2, 4, 4, 6])
    rows = torch.randn(6, 2)
    queries = torch.nested.nested_tensor_from_jagged(rows, offsets)
    found = muvox.knn(x, 3, queries=queries, return_counts=True)
    expected = muvox.knn(values, 3, splits=OFFSETS, queries=rows, query_splits=offsets, return_counts=True)
    for a, b in zip(found, expected):
        assert a.offsets() is offsets and torch.equal(a.values(), b)


def test_pool_gives_one_row_per_set():
    nested, plain = problem()
    out = muvox.pool(nested["v"], mask=nested["mask"], row_weights=nested["weights"])
    expected = muvox.pool(plain["v"], splits=OFFSETS, mask=plain["mask"], row_weights=plain["weights"])
    assert not out.is_nested and out.shape == (4, 8) and torch.equal(out, expected)


def test_results_go_on_in_torch():
    """The result has the very same rows as the argument for torch, so that both can be added; gradients come back nested."""
    x = torch.nested.nested_tensor([torch.randn(n, 4) for n in SIZES], layout=torch.jagged, requires_grad=True)
    layer = torch.nn.Linear(4, 4)
    out = x + layer(muvox.attention(x, x, x))
    grad = torch.autograd.grad(out.sum(), x)[0]
    assert grad.is_nested and grad.shape == x.shape
    for part in out.unbind():
        assert torch.isfinite(part).all()
    for whole, part in zip(muvox.attention(x, x, x).unbind(), x.unbind()):  # sets do not mix
        assert torch.equal(whole, muvox.attention(part, part, part))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    nested, plain = problem()
    with torch.autocast("cpu", dtype):
        out = CALLS["attention"](nested)
        assert out.dtype == dtype
        assert torch.equal(out.values(), CALLS["attention"](plain, splits=OFFSETS))


@pytest.mark.parametrize("call", CALLS)
def test_compiled(call):
    torch._dynamo.reset()
    nested, plain = problem()
    compiled = torch.compile(lambda t: CALLS[call](t).values(), fullgraph=True, backend="aot_eager")
    found, expected = compiled(nested), CALLS[call](nested).values()
    assert torch.equal(found, expected)
    leaves = [x for x in plain.values() if x.requires_grad]
    for a, b in zip(*(torch.autograd.grad(y.sum(), leaves, allow_unused=True) for y in (found, expected))):
        assert b is None and (a is None or not a.any()) or torch.equal(a, b)


X, _ = jagged(2, requires_grad=False)
V, VALUES = jagged(2, requires_grad=False)
OTHER, _ = jagged(2, offsets=torch.tensor([0, 1, 2, 3, 9]), requires_grad=False)
SAME, _ = jagged(2, offsets=OFFSETS.clone(), requires_grad=False)
STRIDED = torch.nested.nested_tensor([torch.randn(n, 2) for n in SIZES], layout=torch.strided)
HOLES = torch.nested.nested_tensor_from_jagged(torch.randn(9, 2), OFFSETS, lengths=torch.tensor([1, 0, 2, 1]))
BAD = {
    "v and q are nested with different offsets": lambda: muvox.attention(X, X, OTHER),
    "v and q are nested with different offsets, expected": lambda: muvox.attention(X, X, SAME),
    "v is not nested": lambda: muvox.attention(X, X, VALUES),
    "q is not nested": lambda: muvox.attention(VALUES, X, X),
    "mask is not nested": lambda: muvox.attention(X, X, V, mask=torch.ones(9, dtype=torch.bool)),
    "q is not nested, expected all tensors nested": lambda: muvox.attention(VALUES, VALUES, VALUES, mask=X),
    "splits is given beside nested tensors": lambda: muvox.attention(X, X, V, splits=OFFSETS),
    "q is nested with layout torch.strided": lambda: muvox.attention(STRIDED, STRIDED, STRIDED),
    "q is nested with holes": lambda: muvox.attention(HOLES, HOLES, HOLES),
    "q is nested with holes or transposed": lambda: muvox.attention(*[X.transpose(1, 2)] * 3),
    "q has 3 dimensions": lambda: muvox.attention(*[X.unsqueeze(-1)] * 3),
}


@pytest.mark.parametrize("message", BAD)
def test_errors_name_operator_and_argument(message):
    with pytest.raises((ValueError, RuntimeError), match=rf"^muvox(\.|::)attention: ({message})"):
        BAD[message]()


def test_nested_and_plain_queries():
    with pytest.raises(ValueError, match="^muvox.knn: one of coords and queries is ragged"):
        muvox.knn(X, 2, queries=VALUES)
    with pytest.raises(ValueError, match="^muvox.knn: query_splits is given beside nested tensors"):
        muvox.knn(X, 2, queries=OTHER, query_splits=OFFSETS)
