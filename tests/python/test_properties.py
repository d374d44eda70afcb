"""Properties that hold for all inputs: what order, layout, company and threads may and may not change."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import muvox
from property_cases import (
    OPS,
    PER_SET,
    SETLESS,
    equal,
    features,
    few,
    gradient,
    knn,
    ks,
    lengths,
    permutation,
    rows,
    seeds,
    sets,
    with_gradient,
)

each_op = pytest.mark.parametrize("name", OPS)
DTYPES = [torch.half, torch.bfloat16, torch.float, torch.double]


@few
@given(seeds, rows, ks)
def test_permuting_rows_permutes_neighbours(seed, M, k):
    x, order = features(seed, (M,)), permutation(seed, M)
    neighbours, distance2, counts = knn(x, None, k)
    permuted, permuted_distance2, permuted_counts = knn(x[order], None, k)
    named = torch.where(permuted >= 0, order[permuted.long().clamp(min=0)], -1)
    assert torch.equal(named, neighbours[order].long())
    assert torch.equal(permuted_distance2, distance2[order])  # the sum over columns does not see the order of rows
    assert torch.equal(permuted_counts, counts[order])


@pytest.mark.parametrize("name", [name for name in OPS if name not in ("knn", *PER_SET)])
@few
@given(seeds, rows, ks)
def test_permuting_rows_permutes_results(name, seed, M, k):
    """To rounding, as sums over rows run in row order; bit for bit where rows have nothing to do with each other."""
    x, order = features(seed, (M,), torch.double), permutation(seed, M)
    tolerance = 0 if name in SETLESS else 1e-12
    got, right = (with_gradient(OPS[name], y[None], None, k) for y in (x[order], x))
    for y, z in zip(got, right, strict=True):
        torch.testing.assert_close(y[0], z[0, order], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", PER_SET)
@few
@given(seeds, rows)
def test_permuting_rows_does_not_change_results_of_sets(name, seed, M):
    x, order = features(seed, (M,), torch.double), permutation(seed, M)
    *got, grad = with_gradient(OPS[name], x[order][None], None, 1)
    *right, right_grad = with_gradient(OPS[name], x[None], None, 1)
    torch.testing.assert_close(got[0], right[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad[0], right_grad[0][order], rtol=1e-12, atol=1e-12)


@each_op
@few
@given(seeds, sets, rows, ks, st.sampled_from(DTYPES))
def test_permuting_sets_permutes_sets(name, seed, S, M, k, dtype):
    x, order = features(seed, (S, M), dtype), permutation(seed, S)
    right = with_gradient(OPS[name], x, None, k)
    assert equal(with_gradient(OPS[name], x[order], None, k), [y[order] for y in right])


@each_op
@few
@given(seeds, sets, rows, ks, st.sampled_from(DTYPES))
def test_ragged_is_uniform(name, seed, S, M, k, dtype):
    x = features(seed, (S, M), dtype)
    splits = torch.arange(0, S * M + 1, M)
    uniform = with_gradient(OPS[name], x, None, k)
    ragged = with_gradient(OPS[name], x.flatten(0, 1), splits, k)
    assert equal([y.reshape(z.shape) for y, z in zip(ragged, uniform)], uniform)


@each_op
@few
@given(seeds, lengths, ks, st.sampled_from(DTYPES))
def test_a_batch_is_its_sets_one_by_one(name, seed, lengths, k, dtype):
    x = features(seed, (sum(lengths),), dtype)
    splits = torch.tensor([0, *lengths]).cumsum(0)
    together = with_gradient(OPS[name], x, splits, k)
    alone = [with_gradient(OPS[name], part, torch.tensor([0, len(part)]), k) for part in x.split(lengths)]
    assert equal(together, [torch.cat(parts) for parts in zip(*alone)])


@each_op
@few
@given(seeds, lengths, ks, st.sampled_from(DTYPES), st.lists(st.integers(0, 6), max_size=3))
def test_chunks_of_sets_equal_the_whole(name, seed, lengths, k, dtype, cuts):
    """Bit for bit, wherever the sets are divided."""
    x = features(seed, (sum(lengths),), dtype)
    cuts = [0, *sorted(min(cut, len(lengths)) for cut in cuts), len(lengths)]
    parts = [lengths[a:b] for a, b in zip(cuts, cuts[1:]) if a < b]
    found = [
        with_gradient(OPS[name], rows, torch.tensor([0, *part]).cumsum(0), k)
        for part, rows in zip(parts, x.split([sum(part) for part in parts]))
    ]
    whole = with_gradient(OPS[name], x, torch.tensor([0, *lengths]).cumsum(0), k)
    assert equal([torch.cat(pieces) for pieces in zip(*found)], whole)


@each_op
@few
@given(seeds, sets, rows, ks)
def test_many_copies_give_equal_results(name, seed, S, M, k):
    x = features(seed, (1, M))
    one = with_gradient(OPS[name], x, None, k)
    many = with_gradient(OPS[name], x.repeat(40 * S, 1, 1), None, k)
    assert all(torch.equal(y, z.expand_as(y)) for y, z in zip(many, one))


def strided(x, how):
    """The values of x in another layout."""
    if how == "padded columns":
        return torch.cat([x, torch.full_like(x, math.nan)], -1)[..., : x.shape[-1]]
    if how == "padded rows":
        return torch.cat([x, torch.full_like(x, math.nan)], -2)[..., : x.shape[-2], :]
    if how == "every other set":
        return x.repeat_interleave(2, 0)[::2]
    if how == "rows before sets":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    return x.mT.contiguous().mT


@pytest.mark.parametrize("how", ["padded columns", "padded rows", "every other set", "rows before sets", "transposed"])
@each_op
@few
@given(seeds, sets, rows, ks, st.sampled_from(DTYPES))
def test_strides_do_not_matter(name, how, seed, S, M, k, dtype):
    x = features(seed, (S, M), dtype)
    right = with_gradient(OPS[name], x, None, k)
    leaf = x.clone().requires_grad_()
    outputs = OPS[name](strided(leaf, how), None, k)
    assert equal((*outputs, gradient(outputs, leaf)), right)


@each_op
@few
@given(seeds, sets, rows, ks)
def test_threads_do_not_matter(name, seed, S, M, k):
    x = features(seed, (S, M))
    right = with_gradient(OPS[name], x, None, k)
    torch.set_num_threads(2)
    try:
        assert equal(with_gradient(OPS[name], x, None, k), right)
    finally:
        torch.set_num_threads(1)


@few
@given(seeds, st.integers(0, 200), st.integers(1, 30), st.sampled_from(DTYPES))
def test_renumbering_voxels(seed, points, voxels, dtype):
    """Bit for bit: means of voxels and gradients to voxels move along, what points read and their gradients stay."""
    x, feats = features(seed, (points,), dtype), features(seed + 1, (voxels,), dtype)
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(-1, voxels + 1, (points, 3), generator=generator)
    weights = x[:, :3] if dtype == torch.double else x[:, :3].float()
    number = permutation(seed, voxels)  # of voxel i
    moved = torch.cat([number, torch.tensor([voxels, -1])])[index]

    def run(index, feats):
        leaves = [y.clone().requires_grad_() for y in (x, feats, weights)]
        means = muvox.voxelize(leaves[0], index[:, 0], size=voxels)
        read = muvox.devoxelize(leaves[1], index, leaves[2])
        to_x, to_feats, to_weights = torch.autograd.grad([means, read], leaves, [feats, x])
        return [means, to_feats], [read, to_x, to_weights]

    of_voxels, of_points = run(moved, feats[number.argsort()])
    right_of_voxels, right_of_points = run(index, feats)
    assert equal([y[number] for y in of_voxels], right_of_voxels)
    assert equal(of_points, right_of_points)
