"""Gradients on the device: finite differences in double, and what the CPU gives in training."""

import pytest
import torch

import muvox
from device.compare import log_normal_sizes, splits_of

pytestmark = pytest.mark.cuda


def leaves(*shapes, dtype=torch.double):
    return [torch.randn(*shape, dtype=dtype, device="cuda", requires_grad=True) for shape in shapes]


CALLS = {
    "knn": lambda x, f: muvox.knn(x, 6)[1],
    "gravnet": lambda x, f: muvox.gravnet(x, f, 6, aggregates=("mean", "max", "absmax", "sum"), scale=0.5),
    "pool": lambda x, f: muvox.pool(f, aggregates=("mean", "max", "absmax", "sum")),
    "voxelize": lambda x, f: muvox.voxelize(f.flatten(0, 1), torch.arange(12, device="cuda") % 5, size=5),
}


@pytest.mark.parametrize("op", CALLS)
@pytest.mark.parametrize("second", [False, True], ids=["first", "second"])
def test_gradcheck(op, second):
    x, f = leaves((2, 6, 3), (2, 6, 4))
    check = torch.autograd.gradgradcheck if second else torch.autograd.gradcheck
    assert check(CALLS[op], (x, f), nondet_tol=0.0)


@pytest.mark.parametrize("F", [1, 5, 16, 22, 48, 64, 130])
@pytest.mark.parametrize("k", [1, 8, 25, 70])
def test_gravnet_widths(F, k):
    """Any number of features and neighbours, against the CPU in double."""
    x, f = torch.randn(3, 100, 4).double(), torch.randn(3, 100, F).double()
    results = []
    for device in ("cpu", "cuda"):
        a, b = x.to(device).requires_grad_(), f.to(device).requires_grad_()
        out = muvox.gravnet(a, b, k, aggregates=("max", "mean", "absmax", "sum"))
        torch.manual_seed(4)
        g = torch.randn(out.shape).double().to(device)
        results.append([out.detach(), *torch.autograd.grad(out, (a, b), g)])
    for got, right in zip(results[1], results[0]):
        torch.testing.assert_close(got.cpu(), right, rtol=1e-11, atol=1e-11)


def test_gravnet_of_ragged_sets_with_everything():
    generator = torch.Generator().manual_seed(3)
    splits = splits_of(log_normal_sizes(30, generator, 1000))
    N = int(splits[-1])
    x, f, u = (torch.rand(N, n, generator=generator, dtype=torch.double) for n in (4, 22, 1))
    mask = torch.rand(N, generator=generator) < 0.8
    results = []
    for device in ("cpu", "cuda"):
        a, b, c = (t.to(device).requires_grad_() for t in (x, f, u.squeeze(-1)))
        out = muvox.gravnet(
            a, b, 12, splits=splits.to(device), mask=mask.to(device), row_weights=c, exclude_self=True, max_radius=0.4
        )
        results.append([out.detach(), *torch.autograd.grad(out.square().sum(), (a, b, c))])
    for got, right in zip(results[1], results[0]):
        torch.testing.assert_close(got.cpu(), right, rtol=1e-11, atol=1e-11)


def test_a_row_that_all_picked():
    """Rows in one place: all pick the first ones, and the sum over thousands of places is right."""
    M = 3000
    x = torch.zeros(1, M, 3, device="cuda", requires_grad=True)
    f = torch.randn(1, M, 6, device="cuda", requires_grad=True)
    out = muvox.gravnet(x, f, 4, aggregates=("mean",))
    dx, df = torch.autograd.grad(out, (x, f), torch.ones_like(out))
    assert not dx.any() and not df[:, 4:].any()
    torch.testing.assert_close(df[:, :4], torch.full_like(df[:, :4], M / 4))


def test_pool_of_large_sets():
    """Parts of larger sets are joined as if one had walked through."""
    splits = torch.tensor([0, 3, 515, 515, 1600, 21_600])
    x = torch.randint(-5, 6, (21_600, 7)).double()
    x[20_000, 2] = float("nan")
    for aggregates in (("mean", "max"), ("absmax", "sum")):
        right = muvox.pool(x, splits=splits, aggregates=aggregates)
        got = muvox.pool(x.cuda(), splits=splits.cuda(), aggregates=aggregates)
        torch.testing.assert_close(got.cpu(), right, rtol=1e-13, atol=1e-13, equal_nan=True)
    winners = [torch.ops.muvox.pool(t, s, e, e, 0x32, True)[1].cpu() for t, s, e in (
        (x, splits, torch.empty(0, dtype=torch.int64)),
        (x.cuda(), splits.cuda(), torch.empty(0, dtype=torch.int64, device="cuda")),
    )]
    assert torch.equal(*winners)
