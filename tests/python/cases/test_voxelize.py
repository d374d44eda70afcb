"""Row 43: voxels by index; −1 and numbers past the last voxel."""

import pytest
import torch

import muvox
from cases.calls import gradients

each_integer = pytest.mark.parametrize("integer", [torch.int32, torch.int64])


def points(N=500, S=20, dtype=torch.float, integer=torch.int64):
    """Features, and an index of which a part is −1, far below, S and far above."""
    index = torch.randint(-3, S + 3, (N,))
    index[::50] = torch.tensor([-(2**31), 2**31 - 1, -1, S, -2, 2**31 - 1, S + 1, -(2**31), -1, S])
    return torch.randn(N, 6).to(dtype).requires_grad_(), index.to(integer)


@each_integer
@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16, torch.float, torch.double])
def test_points_outside_are_skipped(dtype, integer):
    """Row 43: the mean over the points inside, no gradient to the others."""
    S = 20
    feats, index = points(dtype=dtype, integer=integer)
    out = muvox.voxelize(feats, index, size=S)
    inside = (index >= 0) & (index < S)
    where, double = index[inside].long(), feats.detach().double()
    counts = torch.bincount(where, minlength=S)
    right = torch.zeros(S, 6, dtype=torch.double).index_add(0, where, double[inside]) / counts.clamp(min=1)[:, None]
    assert 0 < inside.sum() < len(index)
    assert (out.double() - right).abs().max() <= 2 * torch.finfo(dtype).eps * right.abs().max()
    g = torch.randn_like(out)
    found = gradients(out, [feats], [g])[0]
    assert not found[~inside].any()
    known = (g.double() / counts.clamp(min=1)[:, None])[where]
    assert (found[inside].double() - known).abs().max() <= torch.finfo(dtype).eps * known.abs().max()


@pytest.mark.parametrize("dtype", [torch.half, torch.float])
def test_a_mean_is_between_its_inputs(dtype):
    """Row 43: mean ≤ max, and ≥ min, of a voxel's points, whatever lies outside."""
    feats, index = points(dtype=dtype)
    feats = feats.detach().masked_fill(((index < 0) | (index >= 20))[:, None], 1e4)
    out = muvox.voxelize(feats, index, size=20)
    for s in range(20):
        mine = feats[index == s]
        assert (out[s] <= mine.max(0).values).all() and (out[s] >= mine.min(0).values).all()


@each_integer
@pytest.mark.parametrize("other", [torch.int32, torch.int64])
def test_counts_by_bincount_are_those_of_size(integer, other):
    """Row 43: counted by the caller as the reported library wants it."""
    feats, index = points(integer=integer)
    kept = index[(index >= 0) & (index < 20)].long()
    out = muvox.voxelize(feats, index, torch.bincount(kept, minlength=20).to(other))
    assert torch.equal(out, muvox.voxelize(feats, index, size=20))


def test_counts_that_do_not_match_divide_all_the_same():
    """Row 43: they are a divisor, as documented; 0 and less gives 0."""
    feats, index = torch.tensor([[2.0], [4.0], [8.0], [16.0]]).requires_grad_(), torch.tensor([0, 0, 1, 2])
    out = muvox.voxelize(feats, index, torch.tensor([4, 0, -3, 7]))
    assert out.tolist() == [[1.5], [0.0], [0.0], [0.0]]
    assert gradients(out, [feats])[0].tolist() == [[0.25], [0.25], [0.0], [0.0]]
    for promise in ("1/counts_s · Σ", "counts 0 or less gives 0", "skipped"):
        assert promise in muvox.voxelize.__doc__


@each_integer
def test_corners_outside_are_skipped(integer):
    """Row 43: the other way too: no value and no gradient through −1 or S, whose weights do not matter."""
    feats = torch.randn(5, 3, dtype=torch.double).requires_grad_()
    index = torch.tensor([[0, -1, 5, 4], [-1, -1, 5, 6], [2, 2, -(2**31), 2**31 - 1]])
    weights = torch.randn(3, 4, dtype=torch.double).requires_grad_()
    out = muvox.devoxelize(feats, index.to(integer), weights)
    inside = (index >= 0) & (index < 5)
    right = (torch.where(inside, weights, 0)[..., None] * feats[index * inside]).sum(1)
    torch.testing.assert_close(out, right, rtol=1e-14, atol=1e-14)
    found, known = gradients(out, [feats, weights]), gradients(right, [feats, weights])
    torch.testing.assert_close(found, known, rtol=1e-14, atol=1e-14)
    assert not found[1][~inside].any() and not found[0][[1, 3]].any()


def test_there_and_back():
    """Row 43: points at voxel centres read the means of their own voxels."""
    shape = 3, 4, 2
    number = torch.randint(0, 24, (200,))
    place = torch.stack([number // 8, number // 2 % 4, number % 2], 1)
    index, weights = muvox.trilinear_weights(place + 0.5, (0, 0, 0), (1, 1, 1), shape)
    assert torch.equal(index[:, 0].long(), number) and torch.equal(weights[:, 0], torch.ones(200))
    feats = torch.randn(200, 3)
    means = muvox.voxelize(feats, index[:, 0], size=24)
    assert torch.equal(muvox.devoxelize(means, index, weights), means[number])
