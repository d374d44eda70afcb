"""Rows 18-22: many voxels, offsets beyond 32 bits, sizes that cannot be."""

import mmap

import pytest
import torch

import muvox
from cases.calls import CALLS, SETS, assert_as, assert_same, gradients, leaves, rows, run

# Integer overflow


def sparse(elements, dtype):
    """So many zeros in address space alone: a page takes memory once it is written to."""
    size = elements * torch.empty(0, dtype=dtype).element_size()
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    return torch.frombuffer(pages, dtype=dtype)


NORESERVE = 0x4000  # Linux: such pages are not counted as promised; mmap has the name from Python 3.13 on
APART = 2**30  # elements from row to row: the third one begins at 2³¹


@pytest.mark.parametrize("name", CALLS)
def test_rows_beyond_32_bits(name):
    """Rows 18, 19 and 20: rows more than 2³¹ elements apart, as in large tensors, forward and backward."""
    plain = rows(1, 5, dtype=torch.half)
    far = [sparse(4 * APART + t.shape[-1], t.dtype).as_strided(t.shape, (0, APART, 1)) for t in plain]
    for t, p in zip(far, plain):
        t.copy_(p.detach())
    far = [t.requires_grad_() for t in far]
    assert_as(name, run(CALLS[name], *far), run(CALLS[name], *plain))


@pytest.mark.parametrize("name", SETS)
def test_sets_beyond_32_bits(name):
    """Rows 18, 19 and 20: the same for whole sets."""
    plain = rows(3, 4, dtype=torch.half)
    far = [sparse(2 * 2**31 + 4 * t.shape[-1], t.dtype).as_strided(t.shape, (2**31, t.shape[-1], 1)) for t in plain]
    for t, p in zip(far, plain):
        t.copy_(p.detach())
    far = [t.requires_grad_() for t in far]
    assert_as(name, run(SETS[name], *far), run(SETS[name], *plain))


def test_voxelize_of_17_million_points():
    """Row 20: N · C just over 2³¹; the last rows are right."""
    N, C = 2**24 + 5, 128
    feats, index = sparse(N * C, torch.half).view(N, C), torch.full((N,), -1, dtype=torch.int32)
    feats[-3:] = right = torch.tensor([1.0, 2.0, 6.0], dtype=torch.half)[:, None].expand(3, C)
    index[-3:] = torch.tensor([1, 1, 0], dtype=torch.int32)
    assert feats.numel() > 2**31
    counts = torch.tensor([1, 2], dtype=torch.int32)
    assert torch.equal(muvox.voxelize(feats, index, counts), torch.stack([right[2], right[:2].mean(0)]))


def test_devoxelize_of_17_million_voxels():
    """Row 20: the last voxels are read, and each gets its gradient."""
    S, C = 2**24 + 5, 128
    feats = sparse(S * C, torch.half).view(S, C)
    feats[-2:] = torch.tensor([3.0, 5.0], dtype=torch.half)[:, None].expand(2, C)
    index, weights = torch.tensor([[S - 1, S - 2], [S, -1]]), torch.tensor([[1.0, 0.5], [1.0, 1.0]]).requires_grad_()
    out = muvox.devoxelize(feats, index, weights)
    assert torch.equal(out, torch.tensor([[6.5], [0.0]], dtype=torch.half).expand(2, C))
    assert gradients(out, [weights])[0].tolist() == [[5.0 * C, 3.0 * C], [0.0, 0.0]]


def test_gravnet_of_two_billion_messages():
    """Row 20: V · M · k · F > 2³¹ of one shared set; the last voxels are as one alone."""
    S, M, F = 2**13 + 1, 64, 64
    x, f = torch.randn(1, M, 2), torch.randn(1, M, F).half()
    out = muvox.gravnet(x.expand(S, M, 2), f.expand(S, M, F), M, aggregates=("mean",))
    assert S * M * M * F > 2**31
    assert torch.equal(out[-2:], muvox.gravnet(x, f, M, aggregates=("mean",)).expand(2, M, F))


def test_grid_of_two_billion_voxels():
    """Row 20: numbers of voxels are right up to 2³¹ − 1."""
    shape = 2**31 - 1, 1, 1
    point = torch.tensor([[2.0**31 - 1.5, 0.5, 0.5]], dtype=torch.double)
    index, weights = muvox.trilinear_weights(point, (0, 0, 0), (1, 1, 1), shape)
    assert index[0].tolist() == [2**31 - 2, *[-1] * 7] and weights[0].tolist() == [1.0] + [0.0] * 7


# Grid limits


@pytest.mark.parametrize("name", ["attention", "offset_attention"])
def test_many_small_voxels(name):
    """Row 21: 70,000 voxels of 4 muons, more than a grid's second dimension; the last ones are right too."""
    S, M = 70_000, 4
    q, k, v = leaves((S, M, 2), (S, M, 2), (S, M, 3))
    function = getattr(muvox, name)
    out = function(q, k, v)
    found = gradients(out, [q, k, v])
    last = [t.detach()[-3:].requires_grad_() for t in (q, k, v)]
    alone = function(*last)
    assert torch.equal(out[-3:], alone)
    assert all(torch.equal(g[-3:], h) for g, h in zip(found, gradients(alone, last)))
    if name == "attention":
        torch.testing.assert_close(out[-3:], torch.nn.functional.scaled_dot_product_attention(*last))


@pytest.mark.parametrize("name", [name for name in SETS if "attention" not in name or "neighbour" in name])
def test_many_small_voxels_of_the_others(name):
    """Row 21: 70,000 sets."""
    x, f = rows(70_000, 2)
    found = run_with_ones(name, x, f)
    last = [t.detach()[-3:].requires_grad_() for t in (x, f)]
    assert_as(name, [y[-3:] for y in found], run_with_ones(name, *last))


def run_with_ones(name, x, f):
    results = SETS[name](x, f)
    return *results, *gradients(results, [x, f])


# Sizes that cannot be

HUGE = 2**45  # sets: their results have no room in any address space


@pytest.mark.parametrize("name", SETS)
def test_impossible_numbers_of_voxels_are_refused(name):
    """Row 22: one set seen 2⁴⁵ times: an error that says so, and the next call is right."""
    x, f = (t.detach() for t in rows(1, 3))
    before = SETS[name](x, f)
    with pytest.raises(RuntimeError, match="muvox::.*: out of memory for|can't allocate memory"):
        SETS[name](x.expand(HUGE, 3, 4), f.expand(HUGE, 3, 5))
    assert_same(SETS[name](x, f), before)


x, f, first = torch.randn(3, 4), torch.randn(3, 5), torch.arange(3)
grid = (0, 0, 0), (1, 1, 1)
IMPOSSIBLE = {
    "muvox::pool: a set of 2147483648 rows": lambda: muvox.pool(f[:1].expand(2**31, 5)),
    f"muvox::knn: k is {2**40}": lambda: muvox.knn(x, 2**40),
    f"muvox::gravnet: k is {2**31}": lambda: muvox.gravnet(x, f, 2**31),
    "muvox::knn: out of memory": lambda: muvox.knn(x[:1].expand(2**16, 4), 2**31 - 1),
    "^muvox::voxelize: out of memory": lambda: muvox.voxelize(f, first, size=2**50),
    "^muvox::voxelize: out of memory for": lambda: muvox.voxelize(f, first, size=2**62),
    "muvox::voxelize: out of memory for out": lambda: muvox.voxelize(f, first, first[1:2].expand(HUGE)),
    "muvox::devoxelize: out of memory for out": lambda: muvox.devoxelize(
        f, torch.zeros(1, 8).long().expand(HUGE, 8), torch.ones(1, 8).expand(HUGE, 8)
    ),
    "muvox::trilinear_weights: shape has": lambda: muvox.trilinear_weights(x[:, :3], *grid, (2**11, 2**10, 2**10)),
    "muvox::trilinear_weights: shape .*2.31": lambda: muvox.trilinear_weights(x[:, :3], *grid, (2**32, 2**32, 2**32)),
    "muvox::trilinear_weights: out of memory": lambda: muvox.trilinear_weights(
        x[:1, :3].expand(HUGE, 3), *grid, (2, 2, 2)
    ),
}


@pytest.mark.parametrize("message", IMPOSSIBLE)
def test_impossible_sizes_are_refused(message):
    """Row 22: never silent wrong values."""
    with pytest.raises((RuntimeError, ValueError), match=message):
        IMPOSSIBLE[message]()
