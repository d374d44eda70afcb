"""Second derivatives: against finite differences of the first ones, and without the pair tensor."""

import importlib

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.flop_counter import FlopCounterMode

import muvox
import op_calls
from muvox.ops import _second_order
from test_memory import fresh_process

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
        lambda q, k, v: muvox.attention(q, k, v, return_lse=True),
        lambda: [normal(2, 6, 2), normal(2, 6, 2), normal(2, 6, 3)],
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


def penalty(function, inputs):
    """A gradient penalty's gradient."""
    outputs = function(*inputs)
    value = sum(y.square().sum() for y in (outputs if isinstance(outputs, tuple) else (outputs,)))
    first = torch.autograd.grad(value, inputs, create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in first), inputs)


@pytest.mark.parametrize("case", CASES)
def test_both_derivatives_equal_finite_differences(case):
    torch.manual_seed(0)
    function, draw = CASES[case]
    inputs = draw()
    assert gradcheck(function, inputs, nondet_tol=0)
    assert gradgradcheck(function, inputs, nondet_tol=0)


@pytest.mark.parametrize("case", [case for case in CASES if "mask" in case])
def test_nan_in_masked_rows_has_no_effect(case):
    torch.manual_seed(0)
    function, draw = CASES[case]
    inputs = draw()
    masks = [MASK.reshape(2, 6, *(1,) * (x.dim() - 2)) for x in inputs]
    spoiled = [x.detach().masked_fill(~mask, torch.nan).requires_grad_() for x, mask in zip(inputs, masks)]

    for clean, found in zip(penalty(function, inputs), penalty(function, spoiled)):
        valid = MASK.reshape(2, 6, *(1,) * (clean.dim() - 2)).expand_as(clean)
        assert torch.equal(clean[valid], found[valid]) and not found[~valid].any()


def test_compiled_code_refuses_a_second_derivative():
    x = torch.randn(1, 5, 3, requires_grad=True)
    out = torch.compile(muvox.pool, fullgraph=True, backend="aot_eager")(x)
    first = torch.autograd.grad(out.square().sum(), x, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="double backward"):
        first.sum().backward()


@pytest.mark.parametrize("case", CASES)
def test_blocks_of_any_size_give_the_same(case, monkeypatch):
    """A row or two in each block, where all rows of these small sets would be in one."""
    torch.manual_seed(0)
    function, draw = CASES[case]
    inputs = draw()
    whole = penalty(function, inputs)
    monkeypatch.setattr(_second_order, "ELEMENTS", 13)
    for x, y in zip(whole, penalty(function, inputs)):
        assert (x - y).abs().max() <= 1e-13 * x.abs().max()


def test_offset_attention_of_rows_whose_weights_underflow():
    """One query takes all keys to itself. What is left for the others, e^-200, is 0 in float, but without eps their
    shares of it count. Forward and the first derivatives need not see that: the second is called alone."""
    torch.manual_seed(0)
    inputs = [torch.rand(1, 5, width) + 1 for width in (2, 2, 3)]
    inputs[0][0, 0] *= 100
    outer, gradient = [torch.randn_like(x) for x in inputs], torch.randn(1, 5, 3)
    none, unused = [torch.empty(0, dtype=torch.int64)] * 2, [torch.empty(0)] * 3
    found = torch.ops.muvox.offset_attention_second(gradient, *inputs, *none, *unused, 1.0, 0.0, 7, *outer)
    g, *exact = (x.double().requires_grad_() for x in (gradient, *inputs))
    exponent = exact[0][0] @ exact[1][0].T
    out = (exponent - exponent.logsumexp(0)).softmax(1) @ exact[2][0]
    first = torch.autograd.grad(out, exact, g[0], create_graph=True)
    known = torch.autograd.grad(first, [g, *exact], [y.double() for y in outer])
    for x, y in zip(found, known):  # the exponents of some hundred are rounded
        assert (x - y).abs().max() <= 0.02 * max(y.abs().max() for y in known)


SECOND = [op for op in op_calls.OPS if hasattr(torch.ops.muvox, f"{op}_second")]


def second_arguments(op, **how):
    arguments = op_calls.backward_arguments(op, **how)
    results = op_calls.as_tuple(op_calls.operator(f"{op}_backward")(*arguments))
    return *arguments, *(torch.randn_like(x) for x in results)


def flops(function, *arguments):
    with FlopCounterMode(display=False) as counter:
        function(*arguments)
    return counter.get_total_flops()


@pytest.mark.parametrize("op", SECOND)
@pytest.mark.parametrize("form", op_calls.FORMS)
def test_every_second_derivative_has_a_flop_count(op, form):
    """More than that of the first derivative; with real, fake and meta tensors."""
    arguments, function = second_arguments(op, **op_calls.FORMS[form]), op_calls.operator(f"{op}_second")
    backward = len(op_calls.operator(f"{op}_backward")._schema.arguments)
    first = flops(op_calls.operator(f"{op}_backward"), *arguments[:backward])
    assert flops(function, *arguments) > first > 0
    meta = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in arguments]
    assert flops(function, *meta) > 0
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in arguments]
        assert flops(function, *fake) > 0


def test_flop_counts_of_the_attentions_are_those_of_their_products():
    for op, grads, inputs in (("attention", (0, 1), (2, 3, 4, 6, 8)), ("offset_attention", (0,), (1, 2, 3))):
        arguments = second_arguments(op, ragged=False)
        count = len(op_calls.operator(f"{op}_backward")._schema.arguments)
        gs, xs = [arguments[p] for p in grads], [arguments[p] for p in inputs]
        outer = [y if _second_order.given(y) else None for y in arguments[count:]]
        module = importlib.import_module(f"muvox.ops.{op}")

        def plain():
            if op == "attention":
                _second_order._differentiate(gs, xs, outer, module._blocks(*arguments[:count]))
            else:
                module._derivatives(gs, xs, outer, *arguments[:count])

        assert flops(op_calls.operator(f"{op}_second"), *arguments) == flops(plain) > 0


def test_flop_count_of_a_gradient_penalty():
    x = torch.randn(2, 7, 3, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        penalty(lambda x: muvox.attention(x, x, x), [x])
    counts = counter.get_flop_counts()["Global"]
    assert counts[torch.ops.muvox.attention_second] == 2 * 2 * 49 * 9 * 6


LARGE = {  # (widths of the inputs, call)
    "attention": ((4, 4, 8), "muvox.attention(*inputs)"),
    "offset attention": ((4, 4, 8), "muvox.offset_attention(*inputs)"),
    "gravnet": ((4, 8), "muvox.gravnet(*inputs, 8)"),
    "knn": ((4,), "muvox.knn(*inputs, 8)[1]"),
    "neighbour attention": (
        (4, 8), "muvox.neighbour_attention(*inputs, 8, [torch.ones(s) for s in 4 * [(8, 8), (8,)]])",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LARGE)
def test_memory_does_not_hold_the_pairs(case):
    """One pair tensor of 8000 rows would be 256 MB, and attention differentiated twice would hold several."""
    widths, call = LARGE[case]
    parts = dict(
        make=f"inputs = [torch.randn(sets, rows, width, requires_grad=True) for width in {widths}]",
        forward=f"value = ({call}).square().sum(); first = torch.autograd.grad(value, inputs, create_graph=True)",
        backward="torch.autograd.grad(sum(g.square().sum() for g in first), inputs)",
    )
    grown = fresh_process(parts, 1, 8000)["growth"]
    assert 8000 * 4 * sum(widths) < grown < 200e6, f"{grown / 1e6:.0f} MB"
