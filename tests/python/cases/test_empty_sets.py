"""Rows 16 and 17: sets without rows, no sets, nothing at all."""

import pytest
import torch

import muvox
from cases.calls import ALL, CALLS, SETS, assert_same, gradients, ragged, rows, run

LENGTHS = [(0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 7), (0, 0), (0,), ()]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("name", [name for name in SETS if name != "pool"])
def test_empty_segments(name, lengths):
    """Row 16: no rows first, in the middle, last, everywhere; no sets. The others are as if those were not there."""
    x, f = rows(sum(lengths))
    found = run(SETS[name], x, f, splits=ragged(*lengths))
    assert_same(found, run(SETS[name], x, f, splits=ragged(*(n for n in lengths if n))))
    assert found[0].shape[0] == sum(lengths)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_empty_segments_are_zero_in_pools(lengths):
    """Row 16: one row for each set, 0 where there is nothing."""
    x, f = rows(sum(lengths))
    out, _, df = run(SETS["pool"], x, f, splits=ragged(*lengths))
    filled = torch.tensor([n > 0 for n in lengths], dtype=torch.bool)
    assert out.shape == (len(lengths), 20) and not out[~filled].any()
    assert torch.equal(out[filled], muvox.pool(f, splits=ragged(*(n for n in lengths if n)), aggregates=ALL))
    assert df.shape == f.shape


@pytest.mark.parametrize("points", [(0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 0)])
@pytest.mark.parametrize("queries", [(0, 2, 5), (2, 0, 5), (2, 5, 0), (0, 0, 0)])
def test_empty_on_either_side(points, queries):
    """Row 16: sets without points, without queries, without both."""
    x = torch.randn(sum(points), 3).requires_grad_()
    q = torch.randn(sum(queries), 3).requires_grad_()
    how = dict(splits=ragged(*points), queries=q, query_splits=ragged(*queries))
    neighbours, distance2, counts = muvox.knn(x, 3, **how, return_counts=True)
    assert neighbours.shape == distance2.shape == (sum(queries), 3)
    available = torch.tensor([min(3, n) for n in points]).repeat_interleave(torch.tensor(queries))
    assert torch.equal(counts.long(), available)
    assert torch.equal((neighbours >= 0).sum(1), available)
    shapes = [g.shape for g in gradients(distance2.masked_fill(neighbours < 0, 0), [x, q])]
    assert shapes == [x.shape, q.shape]
    for s, (found, of) in enumerate(zip(neighbours.split(queries), x.split(points))):
        alone = muvox.knn(of, 3, queries=q.split(queries)[s])[0]
        assert torch.equal(found, alone)


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0), (0, 0), (2, 0, 4), (2, 3, 0)])
@pytest.mark.parametrize("name", CALLS)
def test_no_voxels_and_no_muons(name, shape):
    """Row 17: results of the right shape, and backward runs."""
    x, f = rows(*shape)
    full = CALLS[name](*rows(*(n or 2 for n in shape)))
    found = run(CALLS[name], x, f)
    for y, other in zip(found, full):
        assert y.dtype == other.dtype and y.dim() == other.dim()
        if name != "pool" and name != "voxelize":
            assert y.shape[-1:] == other.shape[-1:] or y.dim() == len(shape)
        assert not y.any()
    assert [g.shape for g in found[-2:]] == [x.shape, f.shape]
    if name == "pool":
        assert found[0].shape == (*shape[:-1], 20)
    elif name == "voxelize":
        assert found[0].shape == (5, 5)
    elif name != "devoxelize":
        assert all(y.shape[: len(shape)] == shape for y in found[:-2])


def test_no_rows_have_k_columns():
    """Row 17: (0, k) and (0, 2F)."""
    x, f = rows(0)
    assert [tuple(y.shape) for y in muvox.knn(x, 6, return_counts=True)] == [(0, 6), (0, 6), (0,)]
    assert muvox.gravnet(x, f, 6).shape == (0, 10) and muvox.edge_index(x, 6).shape == (2, 0)
    assert muvox.aggregate(f, torch.empty(0, 6, dtype=torch.int32), torch.empty(0, 6)).shape == (0, 10)


def test_no_voxels_no_points():
    """Row 17: S = 0, N = 0, and both; what is read or summed then is nothing."""
    none, some = torch.empty(0, dtype=torch.int64), torch.tensor([0, 1])
    for S, N in ((0, 2), (3, 0), (0, 0)):
        feats = torch.ones(N, 4).requires_grad_()
        out = muvox.voxelize(feats, some[:N], size=S)
        assert out.shape == (S, 4) and not out.any()
        assert gradients(out, [feats])[0].shape == (N, 4)
        voxels, weights = torch.ones(S, 4).requires_grad_(), torch.ones(N, 8).requires_grad_()
        out = muvox.devoxelize(voxels, torch.zeros(N, 8, dtype=torch.int64), weights)
        assert out.shape == (N, 4) and not out.any()
        assert [g.shape for g in gradients(out, [voxels, weights])] == [(S, 4), (N, 8)]
    assert muvox.voxelize(torch.empty(0, 4), none, none).shape == (0, 4)
    index, weights = muvox.trilinear_weights(torch.rand(2, 3), (0, 0, 0), (1, 1, 1), (0, 4, 4))
    assert (index == -1).all() and not weights.any()


@pytest.mark.parametrize("name", CALLS)
def test_no_columns_are_refused(name):
    """Row 17: an error that says so, in place of results without a column."""
    x, f = rows(2, 5)
    with pytest.raises((ValueError, RuntimeError), match=r"muvox(::|\.).* (has width 0|has shape|has 0 columns|width)"):
        CALLS[name](x[..., :0], f[..., :0])
