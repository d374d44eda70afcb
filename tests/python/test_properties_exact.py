"""Properties of results against exact arithmetic: rounding, ties, far points; and rows under a mask."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import muvox
from muvox.gradcheck import references
from property_cases import ALL, GRID, OPS, constants, features, few, gravnet, knn, ks, lengths, rows, seeds, sets

EPS = {torch.half: 2.0**-10, torch.bfloat16: 2.0**-7, torch.float: 2.0**-23}


def neighbour_attention(coords, feats, *, k, scale, layers, offset):
    """The plain formula for one set, with swish."""
    order, distance2 = references.nearest(coords, k)
    f = torch.exp(-scale * distance2)[..., None] * feats[order]
    q, key, v = (f @ weight.T + bias for weight, bias in zip(layers[0:6:2], layers[1:6:2]))
    score = q @ key.mT
    if offset:
        share = score.softmax(1)
        mixed = f - share @ v / (share.sum(2, keepdim=True) + 1e-17)
    else:
        mixed = (score / q.shape[-1] ** 0.5).softmax(2) @ v
    y = f + torch.nn.functional.silu(mixed @ layers[6].T + layers[7])
    return (references.combine(y, torch.ones(y.shape[:2], dtype=torch.bool), ALL),)


def layers(dtype):
    shapes = [shape for width in (2, 2, 6, 6) for shape in ((width, 6), (width,))]
    return [constants(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]


def attended(x, splits, k, offset=False, **options):
    """All of neighbour_attention, with its layers."""
    shared = dict(splits=splits, activation="swish", offset=offset, aggregates=ALL)
    return (muvox.neighbour_attention(x[..., :4], x[..., 4:], k, layers(x.dtype), **shared, **options),)


# The function, and its formula in double: flat rows x, k -> tensors of one set and options.
ROUNDED = {
    "gravnet": (
        OPS["gravnet"],
        references.gravnet,
        lambda x, k: ({"coords": x[:, :4], "feats": x[:, 4:]}, {"k": k, "scale": 10.0, "aggregates": ALL}),
    ),
    "attention": (
        OPS["attention"],
        references.attention,
        lambda x, k: ({"q": x[:, :3], "k": x[:, 3:6], "v": x[:, 6:]}, {}),
    ),
    "offset_attention": (
        OPS["offset_attention"],
        references.offset_attention,
        lambda x, k: ({"q": x[:, :3], "k": x[:, 3:6], "v": x[:, 6:]}, {"scale": 1.0, "eps": 1e-17}),
    ),
    "pool": (OPS["pool"], references.pool, lambda x, k: ({"x": x}, {"aggregates": ALL})),
    "voxelize": (OPS["voxelize"], lambda x: (x.mean(0, keepdim=True),), lambda x, k: ({"x": x}, {})),
}


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("name", ROUNDED)
@few
@given(seeds, sets, rows)
def test_rounding(name, dtype, seed, S, M):
    """Results in half and bfloat16 are the double result at the given inputs to one ulp of each value (half of it from
    the last rounding), and to what float arithmetic loses: 16 ulps of float at the largest value.

    k ≥ M, so that rounding chooses no neighbours."""
    function, reference, arguments = ROUNDED[name]
    x = features(seed, (S, M), dtype)
    right = references.set_by_set(reference, *arguments(x.double().flatten(0, 1), M)[:1], [M] * S, arguments(x, M)[1])
    for got, exact in zip(function(x, None, M), right, strict=True):
        assert_rounded(got, exact.reshape(got.shape), 16)


def assert_rounded(got, right, ulps):
    """To one ulp of each value in half and bfloat16, and to so many of float at the largest."""
    arithmetic = ulps * EPS[torch.float] * right.abs().max()
    rounding = EPS[got.dtype] * right.abs() if got.dtype != torch.float else 0.0
    assert ((got.double() - right).abs() <= rounding + arithmetic).all()


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("offset", [False, True])
@few
@given(seeds, sets, rows)
def test_rounding_of_neighbour_attention(offset, dtype, seed, S, M):
    """Its layers' results are rounded to the dtype before they enter the softmax: 2 ulps of the largest value in half
    and bfloat16, 64 in float."""
    x = features(seed, (S, M), dtype)
    options = dict(k=M, scale=10.0, layers=layers(dtype), offset=offset)
    options["layers"] = [layer.double() for layer in options["layers"]]
    flat = x.double().flatten(0, 1)
    tensors = {"coords": flat[:, :4], "feats": flat[:, 4:]}
    (right,) = references.set_by_set(neighbour_attention, tensors, [M] * S, options)
    (got,) = attended(x, None, M, offset)
    error = (got.double() - right.reshape(got.shape)).abs().max() / right.abs().max()
    assert error <= (64 if dtype == torch.float else 2) * EPS[dtype]


@pytest.mark.parametrize("dtype", EPS)
@few
@given(seeds, rows, ks)
def test_rounding_of_aggregate(dtype, seed, M, k):
    x = features(seed, (M,), dtype)
    neighbours, distance2 = muvox.knn(x[:, :4], k)
    feats, weights = x[:, 4:], torch.exp(-distance2).to(dtype)
    (right,) = references.aggregate(feats.double(), weights.double(), neighbours, aggregates=ALL)
    assert_rounded(muvox.aggregate(feats, neighbours, weights, aggregates=ALL), right, 16)


@pytest.mark.parametrize("dtype", EPS)
@few
@given(seeds, st.integers(1, 300))
def test_rounding_of_devoxelize(dtype, seed, N):
    x, feats = features(seed, (N,), torch.float), constants(12, 7, dtype=dtype)
    index = torch.randint(-1, 13, (N, 8), generator=torch.Generator().manual_seed(seed))
    found = (index >= 0) & (index < 12)
    near = feats.double()[index.clamp(0, 11)]
    right = (torch.where(found, x[:, :8].double(), 0)[..., None] * near).sum(1)
    assert_rounded(muvox.devoxelize(feats, index, x[:, :8]), right, 16)


@pytest.mark.parametrize("dtype", EPS)
@few
@given(seeds, st.integers(1, 300))
def test_rounding_of_trilinear_weights(dtype, seed, N):
    """Weights, which are float, to 16 ulps of 1, where points lie as many cells from the origin as here."""
    points = features(seed, (N,), dtype)[:, :3]
    exact, right = references.trilinear_weights(
        points.double(), **dict(zip(("origin", "voxel_size", "shape"), GRID))
    )
    index, weights = muvox.trilinear_weights(points, *GRID)
    assert torch.equal(index, right) and weights.dtype == torch.float
    assert ((weights - exact).abs() <= 16 * EPS[torch.float]).all()


@pytest.mark.parametrize("dtype", EPS)
@few
@given(seeds, rows, ks)
def test_distances_in_float_are_correctly_rounded_sums(dtype, seed, M, k):
    """Every distance² to (d + 3) / 2 ulps of float, and the neighbours in its own order with ties to the lower row."""
    x = features(seed, (M,), dtype)
    neighbours, distance2, _ = knn(x, None, k)
    n = min(k, M)
    pairs = x[:, None, :4].double() - x[neighbours[:, :n].long(), :4].double()
    right = pairs.square().sum(-1)
    assert ((distance2[:, :n] - right).abs() <= 3.5 * EPS[torch.float] * right).all()
    assert_sorted(neighbours[:, :n], distance2[:, :n])


def assert_sorted(neighbours, distance2):
    nearer, further = distance2[:, :-1], distance2[:, 1:]
    assert ((nearer < further) | (nearer == further) & (neighbours[:, :-1] < neighbours[:, 1:])).all()


@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16, torch.float, torch.double])
@few
@given(seeds, st.integers(1, 120), ks, st.integers(1, 9), st.integers(1, 3))
def test_ties_on_a_lattice_go_to_the_lower_row(dtype, seed, M, k, d, steps):
    """Lattice points and duplicates: every distance is exact, so the brute force decides every tie."""
    x = torch.randint(-steps, steps + 1, (M, d), generator=torch.Generator().manual_seed(seed)).to(dtype)
    neighbours, distance2, counts = muvox.knn(x, k, return_counts=True)
    right = references.knn(x.double(), k=k)
    assert torch.equal(distance2.double(), right[0])
    assert torch.equal(neighbours, right[1])
    assert torch.equal(counts, right[2])


@few
@given(seeds, st.integers(1, 60), ks, st.integers(1, 9))
def test_neighbours_in_double_are_those_of_brute_force(seed, M, k, d):
    x = torch.randn(M, d, dtype=torch.double, generator=torch.Generator().manual_seed(seed))
    distance2, neighbours, counts = references.knn(x, k=k)
    got = muvox.knn(x, k, return_counts=True)
    assert torch.equal(got[0], neighbours) and torch.equal(got[2], counts)
    torch.testing.assert_close(got[1], distance2, rtol=1e-14, atol=0)


@pytest.mark.parametrize("size", [1e18, 1e19, 1e25])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float])
@few
@given(seeds, rows, ks)
def test_far_points_are_not_lost(dtype, size, seed, M, k):
    """At 1e18 distances² are near the end of float, past it +inf: every row is still found once, itself first."""
    generator = torch.Generator().manual_seed(seed)
    x = (size * torch.randn(M, 3, dtype=torch.double, generator=generator)).to(dtype)
    neighbours, distance2, counts = muvox.knn(x, k, return_counts=True)
    n = min(k, M)
    assert (counts == n).all() and (neighbours[:, n:] == -1).all()
    found = neighbours[:, :n].long()
    assert torch.equal(found[:, 0], torch.arange(M)) and not distance2[:, 0].any()
    assert (found.sort(1).values.diff() > 0).all() and found.min() >= 0 and found.max() < M
    assert_sorted(found, distance2[:, :n])


@few
@given(seeds, st.integers(2, 60), st.integers(1, 8))
def test_an_offset_cloud_keeps_its_distances(seed, M, d):
    """A cloud of spread 1 around 4e6, where floats are 0.25 apart: differences are exact, and so are ties."""
    cloud = torch.randn(M, d, dtype=torch.double, generator=torch.Generator().manual_seed(seed))
    x = (cloud + 4e6).float()
    neighbours, distance2 = muvox.knn(x, M)
    assert torch.equal(distance2[:, 0], torch.zeros(M))
    assert (distance2 >= 0).all()
    own = torch.take_along_dim(distance2, (neighbours == torch.arange(M)[:, None]).int().argmax(1, keepdim=True), 1)
    assert not own.any()
    right = references.knn(x.double(), k=M)
    assert torch.equal(distance2.double(), right[0]) and torch.equal(neighbours, right[1])


@few
@given(seeds, rows, ks)
def test_gravnet_is_knn_then_aggregate(seed, M, k):
    x = features(seed, (M,), torch.double)
    neighbours, distance2 = muvox.knn(x[:, :4], k)
    composed = muvox.aggregate(x[:, 4:], neighbours, torch.exp(-10 * distance2), aggregates=ALL)
    torch.testing.assert_close(gravnet(x, None, k)[0], composed, rtol=1e-13, atol=1e-13)


MASKED = {
    "knn": lambda x, splits, k, **mask: muvox.knn(
        x[..., :4].contiguous(), k, splits=splits, max_radius=1.5, return_counts=True, **mask
    ),
    "gravnet": lambda x, splits, k, **mask: (
        muvox.gravnet(x[..., :4], x[..., 4:9], k, splits=splits, aggregates=ALL, **mask, **weighed(x, 9)),
    ),
    "attention": lambda x, splits, k, **mask: muvox.attention(
        x[..., :3], x[..., 3:6], x[..., 6:9], splits=splits, return_lse=True, **mask, **weighed(x, 9)
    ),
    "offset_attention": lambda x, splits, k, **mask: (
        muvox.offset_attention(x[..., :3], x[..., 3:6], x[..., 6:], splits=splits, **mask),
    ),
    "neighbour_attention": attended,
    "neighbour_attention, offset": partial(attended, offset=True),
    "pool": lambda x, splits, k, **mask: (
        muvox.pool(x[..., :9], splits=splits, aggregates=ALL, **mask, **weighed(x, 9)),
    ),
}


def weighed(x, column):
    """Row weights from a column of x, in float at least."""
    return {"row_weights": x[..., column].abs().to(torch.promote_types(x.dtype, torch.float))}


def masked_gradient(op, x, splits, k, **mask):
    """As with_gradient; distances that are +inf take none."""
    x = x.detach().requires_grad_()
    outputs = op(x, splits, k, **mask)
    sums = [torch.where(y.isfinite(), y, 0).sum() for y in outputs if y.is_floating_point() and y.requires_grad]
    return *outputs, torch.autograd.grad(sums, x)[0]


@pytest.mark.parametrize("dtype", [torch.half, torch.float, torch.double])
@pytest.mark.parametrize("name", MASKED)
@few
@given(seeds, lengths, ks)
def test_masked_rows_equal_removed_rows(name, dtype, seed, lengths, k):
    """Rows of NaN under the mask: to rounding the results of the others without them, and nothing in their place."""
    N = sum(lengths)
    x = features(seed, (N,), dtype)
    mask = torch.rand(N, generator=torch.Generator().manual_seed(seed)) < 0.6
    splits = torch.tensor([0, *lengths]).cumsum(0)
    shorter = torch.cat([torch.zeros(1, dtype=torch.int64), mask.cumsum(0)])[splits]
    got = masked_gradient(MASKED[name], x.masked_fill(~mask[:, None], math.nan), splits, k, mask=mask)
    right = masked_gradient(MASKED[name], x[mask], shorter, k)
    for n, (y, z) in enumerate(zip(got, right)):
        per_row = name != "pool" or n == len(got) - 1
        kept = y[mask] if per_row else y
        if name == "knn" and n == 0:  # rows of the whole set: numbered without the masked ones
            before = mask.cumsum(0) - mask.long()
            first = torch.repeat_interleave(splits[:-1], splits.diff())[mask][:, None]
            whole = (kept + first).clamp(min=0)
            kept = torch.where(kept >= 0, (before[whole] - before[first]).to(kept.dtype), -1)
        torch.testing.assert_close(kept, z, rtol=4 * tolerance(y.dtype), atol=4 * tolerance(y.dtype))
        if per_row:
            blank = {("knn", 0): -1, ("knn", 1): math.inf, ("attention", 1): -math.inf}.get((name, n), 0)
            assert (y[~mask] == blank).all()


def tolerance(dtype):
    """Sums may run in other blocks: exact for integers."""
    return 2 * torch.finfo(dtype).eps if dtype.is_floating_point else 0


@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16, torch.float, torch.double])
@few
@given(seeds, st.integers(0, 200), st.integers(1, 30))
def test_points_nowhere_equal_removed_points(dtype, seed, N, voxels):
    """Bit for bit: points of NaN, and numbers of voxels that do not exist, leave voxels and other points alone."""
    x, feats = features(seed, (N,), dtype), constants(voxels, 10, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(N, generator=generator) < 0.6
    index = torch.randint(0, voxels, (N, 3), generator=generator)
    nowhere = torch.tensor([-1, voxels, -(2**31), 2**31 - 1])[torch.randint(0, 4, (N, 3), generator=generator)]

    def run(x, index):
        wide = x.to(torch.promote_types(x.dtype, torch.float))
        leaves = [x.clone().requires_grad_(), feats.clone().requires_grad_(), wide[:, :3].clone().requires_grad_()]
        means = muvox.voxelize(leaves[0], index[:, 0], size=voxels)
        read = muvox.devoxelize(leaves[1], index, leaves[2])
        places, weights = muvox.trilinear_weights(leaves[0][:, :3], *GRID)
        outputs, ones = [means, read, weights], [torch.ones_like(y) for y in (means, read, weights)]
        to_x, to_feats, to_weights = torch.autograd.grad(outputs, leaves, ones)
        return [means, to_feats], [read, places, weights, to_x, to_weights]

    voxels_of, points_of = run(
        x.masked_fill(~kept[:, None], math.nan), torch.where(kept[:, None], index, nowhere)
    )
    right_voxels, right_points = run(x[kept], index[kept])
    assert all(torch.equal(y, z) for y, z in zip(voxels_of, right_voxels, strict=True))
    for place, (y, z) in enumerate(zip(points_of, right_points, strict=True)):
        assert torch.equal(y[kept], z) and (y[~kept] == (-1 if place == 1 else 0)).all()
