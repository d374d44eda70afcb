"""Second derivatives: against finite differences of the first ones, and without the pair tensor."""

import subprocess
import sys
import textwrap

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import muvox

SPLITS = torch.tensor([0, 4, 4, 9])
MASK = torch.tensor([[1, 1, 0, 1, 1, 1], [1, 0, 1, 1, 1, 1]], dtype=torch.bool)
ALL = ("mean", "max", "absmax", "sum")
NEAR = muvox.knn(torch.arange(12.0).reshape(2, 6, 1), 3)[0]


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def positive(*shape):
    return (torch.rand(*shape, dtype=torch.float64) + 0.5).requires_grad_()


def finite(x):
    return torch.where(torch.isinf(x), 0, x)


CASES = {
    "knn": (lambda c: muvox.knn(c, 3)[1], lambda: [normal(2, 6, 3)]),
    "knn, ragged, k > M": (lambda c: finite(muvox.knn(c, 6, splits=SPLITS)[1]), lambda: [normal(9, 3)]),
    "knn, queries": (lambda c, q: muvox.knn(c, 3, queries=q)[1], lambda: [normal(2, 6, 3), normal(2, 4, 3)]),
    "gravnet": (
        lambda c, f: muvox.gravnet(c, f, 4, scale=0.5, aggregates=ALL), lambda: [normal(2, 6, 2), normal(2, 6, 3)],
    ),
    "gravnet, mask, weights, mean by k": (
        lambda c, f, w: muvox.gravnet(c, f, 4, scale=0.5, mask=MASK, row_weights=w, mean="k"),
        lambda: [normal(2, 6, 2), normal(2, 6, 3), positive(2, 6)],
    ),
    "gravnet, ragged, self excluded": (
        lambda c, f: muvox.gravnet(c, f, 3, splits=SPLITS, scale=0.5, exclude_self=True),
        lambda: [normal(9, 2), normal(9, 3)],
    ),
    "aggregate": (
        lambda f, w: muvox.aggregate(f, NEAR, w, aggregates=ALL), lambda: [normal(2, 6, 3), normal(2, 6, 3)],
    ),
    "attention": (
        lambda q, k, v: muvox.attention(q, k, v, return_lse=True), lambda: [normal(2, 6, 2), normal(2, 6, 2), normal(2, 6, 3)],
    ),
    "attention, bias, mask, weights": (
        lambda q, k, v, b, w: muvox.attention(q, k, v, bias=b, row_weights=w, mask=MASK),
        lambda: [normal(2, 6, 2), normal(2, 6, 2), normal(2, 6, 3), normal(2, 6), positive(2, 6)],
    ),
    "attention, ragged": (
        lambda q, k, v: muvox.attention(q, k, v, splits=SPLITS), lambda: [normal(9, 2), normal(9, 2), normal(9, 3)],
    ),
    "offset attention": (
        lambda q, k, v: muvox.offset_attention(q, k, v), lambda: [normal(2, 6, 2), normal(2, 6, 2), normal(2, 6, 3)],
    ),
    "offset attention, mask": (
        lambda q, k, v: muvox.offset_attention(q, k, v, mask=MASK),
        lambda: [normal(2, 6, 2), normal(2, 6, 2), normal(2, 6, 3)],
    ),
    "pool, mask, weights": (
        lambda x, w: muvox.pool(x, row_weights=w, mask=MASK, aggregates=ALL), lambda: [normal(2, 6, 3), positive(2, 6)],
    ),
    "pool, ragged": (lambda x: muvox.pool(x, splits=SPLITS), lambda: [normal(9, 3)]),
    "voxelize": (
        lambda f: muvox.voxelize(f, torch.tensor([0, 2, 2, -1, 1]), size=3) ** 2, lambda: [normal(5, 3)],
    ),
    "devoxelize": (
        lambda f, w: muvox.devoxelize(f, torch.tensor([[0, 2], [1, -1], [2, 2]]), w),
        lambda: [normal(3, 2), normal(3, 2)],
    ),
    "trilinear weights": (
        lambda p: muvox.trilinear_weights(p, (0, 0, 0), (1, 1, 1), (3, 3, 3))[1] ** 2, lambda: [positive(4, 3)],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_both_derivatives_equal_finite_differences(case):
    torch.manual_seed(0)
    function, draw = CASES[case]
    inputs = draw()
    assert gradcheck(function, inputs, nondet_tol=0)
    assert gradgradcheck(function, inputs, nondet_tol=0)


@pytest.mark.parametrize("case", ["gravnet, mask, weights, mean by k", "attention, bias, mask, weights", "pool, mask, weights"])
def test_nan_in_masked_rows_has_no_effect(case):
    torch.manual_seed(0)
    function, draw = CASES[case]
    inputs = draw()
    spoiled = [x.detach().masked_fill(~MASK.reshape(2, 6, *(1,) * (x.dim() - 2)), torch.nan).requires_grad_() for x in inputs]

    def penalty(xs):
        first = torch.autograd.grad(function(*xs).square().sum(), xs, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), xs)

    for clean, found in zip(penalty(inputs), penalty(spoiled)):
        valid = MASK.reshape(2, 6, *(1,) * (clean.dim() - 2)).expand_as(clean)
        assert torch.equal(clean[valid], found[valid]) and not found[~valid].any()


def test_compiled_code_refuses_a_second_derivative():
    x = torch.randn(1, 5, 3, requires_grad=True)
    out = torch.compile(muvox.pool, fullgraph=True, backend="aot_eager")(x)
    first = torch.autograd.grad(out.square().sum(), x, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="double backward"):
        first.sum().backward()


MEMORY = """
    import resource, torch, muvox

    def penalty(M):
        q, k, v = (torch.randn(1, M, width, requires_grad=True) for width in (4, 4, 8))
        first = torch.autograd.grad(CALL.square().sum(), [q, k, v], create_graph=True, materialize_grads=True)
        torch.autograd.grad(sum(g.square().sum() for g in first), [q, k, v])

    penalty(8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    penalty(8000)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("call", ["muvox.attention(q, k, v)", "muvox.gravnet(q + k, v, 8)"])
def test_memory_does_not_hold_the_pairs(call):
    """One pair tensor of 8000 rows would be 244 MiB, and twice differentiated attention would hold several."""
    script = textwrap.dedent(MEMORY).replace("CALL", call)
    grown = int(subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout)
    assert grown < 150 * 1024, f"{grown / 1024:.0f} MiB"
