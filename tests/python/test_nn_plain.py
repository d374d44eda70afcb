"""The modules where an operator has no CUDA kernels: the plain compositions compute the same, a few sets at a time."""

import pytest
import torch

from muvox import nn
from muvox.nn import _plain

SPLITS = torch.tensor([0, 3, 3, 9, 15, 16, 40])
MODULES = {
    "SelfAttention": lambda: nn.SelfAttention(6, 3),
    "OffsetSelfAttention": lambda: nn.OffsetSelfAttention(6, 3),
    "GravNetLayer": lambda: nn.GravNetLayer(6, 3, 8, 4, ("mean", "max"), 5, use_sa=True),
    "GravNetLayer, offset": lambda: nn.GravNetLayer(
        6, 3, 8, 4, ("mean", "absmax"), 5, use_sa=True, sa_class=nn.OffsetSelfAttention
    ),
}
OPERATORS = {
    "SelfAttention": "attention",
    "OffsetSelfAttention": "offset_attention",
    "GravNetLayer": "neighbour_attention",
    "GravNetLayer, offset": "neighbour_attention",
}
each_module = pytest.mark.parametrize("name", MODULES)


@pytest.fixture
def on_cuda(monkeypatch):
    """As if all tensors were on a CUDA device; what was asked for."""
    asked = []
    monkeypatch.setattr(_plain, "needed", lambda op, x: asked.append(op) or True)
    return asked


def results(module, x, splits):
    """Output, and gradients of the input and all parameters."""
    x = x.clone().requires_grad_()
    out = module(x, splits=splits)
    return out, *torch.autograd.grad(out.square().sum(), [x, *module.parameters()])


@each_module
@pytest.mark.parametrize(
    "shape, splits",
    [((40, 6), SPLITS), ((7, 9, 6), None), ((2, 3, 4, 6), None), ((9, 6), None), ((0, 5, 6), None), ((4, 0, 6), None),
     ((0, 6), torch.tensor([0, 0, 0]))],
)  # fmt: skip
@pytest.mark.parametrize("values", [1, 1 << 25])
def test_plain_is_as_the_operator(name, shape, splits, values, request, monkeypatch):
    module, x = MODULES[name]().double(), torch.randn(shape, dtype=torch.double)
    expected = results(module, x, splits)
    asked = request.getfixturevalue("on_cuda")
    monkeypatch.setattr(_plain, "VALUES", values)
    for got, right in zip(results(module, x, splits), expected, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-9, atol=1e-10)
    assert asked[0] == OPERATORS[name]


@each_module
def test_cpu_tensors_go_to_the_operator(name, monkeypatch):
    def refused(*arguments):
        raise AssertionError("the plain composition was called")

    monkeypatch.setattr(_plain, "by_sets", refused)
    MODULES[name]()(torch.randn(7, 9, 6))


@pytest.mark.parametrize("op, expected", [("attention", True), ("gravnet", False)])
def test_plain_only_on_a_device_and_without_kernels(op, expected, monkeypatch):
    class Tensor:
        is_cuda = True

    monkeypatch.setattr(_plain, "WITHOUT_CUDA", {"attention"})
    assert _plain.needed(op, Tensor()) == expected and not _plain.needed(op, torch.zeros(1))


@pytest.mark.parametrize("name", ["SelfAttention", "OffsetSelfAttention"])
def test_half_and_autocast(name, on_cuda):
    """The rows' shares of an offset attention may be far below the least half."""
    module, x = MODULES[name](), 4 * torch.randn(5, 30, 6)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.isfinite(module(x)).all()
    assert torch.isfinite(module.half()(x.half())).all()


def test_a_few_sets_at_a_time(monkeypatch):
    """No tensor over the pairs of more sets than allowed, in either direction, and none is kept for backward."""
    kept, seen = [], []
    softmax = torch.Tensor.softmax
    monkeypatch.setattr(torch.Tensor, "softmax", lambda x, dim: seen.append(tuple(x.shape)) or softmax(x, dim))
    monkeypatch.setattr(_plain, "VALUES", 2 * 20 * 20)
    q, k, v = (torch.randn(5, 20, width, requires_grad=True) for width in (3, 3, 4))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        out = _plain.offset_attention(q, k, v, None)
    assert seen == [(2, 20, 20), (2, 20, 20), (1, 20, 20)] and max(kept, default=0) <= v.numel()
    out.sum().backward()
    assert len(seen) == 6 and max(seen) == (2, 20, 20)
