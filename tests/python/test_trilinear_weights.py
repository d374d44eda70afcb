"""muvox.trilinear_weights against the product of hat functions in plain torch, its gradient, rules and errors."""

import itertools
import math

import pytest
import torch

import muvox
import op_cases as cases

GRID = dict(origin=(-0.2, 0.1, 3.0), voxel_size=(0.5, 0.25, 0.1), shape=(3, 4, 5))


def points(count=200, dtype=torch.float64, **grid):
    """In the grid and up to a voxel around it."""
    origin, size, shape = (torch.tensor(grid[name], dtype=torch.float64) for name in ("origin", "voxel_size", "shape"))
    return (origin + (torch.rand(count, 3, dtype=torch.float64) * (shape + 2) - 1) * size).to(dtype).requires_grad_()


def hat(x, origin, size, number):
    """Weight of one voxel along one axis: falls from 1 at its centre to 0 at its neighbours'."""
    return (1 - ((x - origin) / size - 0.5 - number).abs()).clamp(min=0)


def dense(x, origin, voxel_size, shape):
    """(N, nx · ny · nz): how much of every voxel is read at every point."""
    axes = [
        torch.stack([hat(x[:, a], origin[a], voxel_size[a], n) for n in range(shape[a])], 1)
        if shape[a]
        else x.new_zeros(len(x), 0)
        for a in range(3)
    ]
    return torch.einsum("ni,nj,nk->nijk", *axes).flatten(1)


def spread(index, weights, voxels):
    """The same from what muvox found."""
    valid = index >= 0
    assert (weights[~valid] == 0).all() and (index < voxels).all()
    found = weights.new_zeros(len(index), voxels + 1)
    return found.scatter_add(1, torch.where(valid, index.long(), voxels), weights)[:, :voxels]


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("shape", [(3, 4, 5), (1, 1, 1), (2, 1, 3), (0, 4, 5), (3, 4, 0)])
def test_is_the_product_of_hat_functions(shape, dtype):
    grid = GRID | {"shape": shape}
    x = points(dtype=dtype, **grid)
    index, weights = muvox.trilinear_weights(x, **grid)
    wide = torch.promote_types(dtype, torch.float32)
    assert (index.dtype, weights.dtype, index.shape, weights.shape) == (torch.int32, wide, (200, 8), (200, 8))
    voxels = math.prod(shape)
    exact = x.detach().double().requires_grad_()
    actual, expected = spread(index, weights, voxels), dense(exact, **grid)
    # The place in the grid is known to its rounding, in voxels: coordinates are up to 4, voxels down to 0.1.
    limit = 1e-13 if dtype == torch.float64 else 2e-5
    assert (actual.double() - expected).abs().max() <= limit if voxels else actual.numel() == 0
    # Weights have a kink where a point lies level with a centre: there any slope between the two is right.
    place = (exact.detach() - torch.tensor(GRID["origin"])) / torch.tensor(GRID["voxel_size"]) - 0.5
    smooth = ((place - place.round()).abs() > 1e-3).all(1)
    gradient = torch.randn(actual.shape, dtype=torch.float64)
    found = torch.autograd.grad(actual, x, gradient.to(wide))[0]
    known = torch.autograd.grad(expected, exact, gradient)[0]
    assert found.dtype == dtype and smooth.sum() > 50
    cases.assert_near(found[smooth], known[smooth], dtype, units=8)


def test_places_of_the_corners():
    x = torch.tensor([[1.3, 0.8, 0.6]], dtype=torch.float64)
    index, weights = muvox.trilinear_weights(x, (0, 0, 0), (1, 1, 1), (3, 2, 2))
    t = [0.8, 0.3, 0.1]
    for a, b, c in itertools.product((0, 1), repeat=3):
        at = 4 * a + 2 * b + c
        assert index[0, at] == ((0 + a) * 2 + b) * 2 + c
        share = math.prod(u if corner else 1 - u for u, corner in zip(t, (a, b, c)))
        assert weights[0, at].item() == pytest.approx(share, rel=1e-12)


def test_centre_of_a_voxel_reads_it_alone():
    index, weights = muvox.trilinear_weights(torch.tensor([[0.5, 1.5, 2.5]]), (0, 0, 0), (1, 1, 1), (1, 2, 3))
    assert index[0, 0] == 5 and weights[0].tolist() == [1.0] + [0.0] * 7
    assert index[0].tolist() == [5] + [-1] * 7


def test_inside_the_grid_weights_sum_to_one_and_outside_to_less():
    x = torch.tensor([[1.0, 1.0, 1.0], [0.25, 1.0, 1.0], [-0.25, 1.0, 1.0], [-0.6, 1.0, 1.0]])
    weights = muvox.trilinear_weights(x, (0, 0, 0), (1, 1, 1), (2, 2, 2))[1]
    assert weights.sum(1).tolist() == pytest.approx([1.0, 0.75, 0.25, 0.0])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e300])
def test_points_that_are_nowhere(bad):
    x = torch.tensor([[0.5, bad, 0.5]], dtype=torch.float64, requires_grad=True)
    index, weights = muvox.trilinear_weights(x, (0, 0, 0), (1, 1, 1), (2, 2, 2))
    assert (index == -1).all() and not weights.any()
    assert not torch.autograd.grad(weights.sum(), x)[0].any()


def test_gradcheck():
    x = points(10, **GRID)
    assert torch.autograd.gradcheck(lambda x: muvox.trilinear_weights(x, **GRID)[1], (x,), nondet_tol=0)


@pytest.mark.parametrize("shape", [(3,), (2, 4, 3), (0, 3), (2, 0, 3)])
def test_leading_dimensions(shape):
    x = points(math.prod(shape[:-1]), **GRID).detach()
    index, weights = muvox.trilinear_weights(x.reshape(shape), **GRID)
    assert index.shape == weights.shape == (*shape[:-1], 8)
    for found, flat in zip((index, weights), muvox.trilinear_weights(x, **GRID)):
        assert torch.equal(found.reshape(-1, 8), flat)


@pytest.mark.parametrize("view", ["columns apart", "sliced", "every other row"])
def test_strides(view):
    x = points(**GRID).detach()
    for a, b in zip(muvox.trilinear_weights(cases.VIEWS[view](x), **GRID), muvox.trilinear_weights(x, **GRID)):
        assert torch.equal(a[: len(x)], b)


def test_autocast_leaves_points_alone():
    x = points(dtype=torch.float32, **GRID)
    with torch.autocast("cpu", torch.bfloat16):
        found = muvox.trilinear_weights(x, **GRID)
    for a, b in zip(found, muvox.trilinear_weights(x, **GRID)):
        assert torch.equal(a, b)


def test_a_field_that_is_linear_is_read_exactly():
    shape, size = (4, 5, 6), (0.5, 0.4, 0.3)
    centres = torch.stack(torch.meshgrid(*(torch.arange(n) + 0.5 for n in shape), indexing="ij"), -1).reshape(-1, 3)
    field = lambda x: x @ torch.tensor([[1.0, -2.0], [0.5, 3.0], [-1.5, 0.25]], dtype=torch.float64) + 0.7  # noqa: E731
    centres = centres.double() * torch.tensor(size, dtype=torch.float64)
    x = 0.3 + torch.rand(50, 3, dtype=torch.float64)  # at least half a voxel inside
    index, weights = muvox.trilinear_weights(x, (0, 0, 0), size, shape)
    assert torch.allclose(muvox.devoxelize(field(centres), index, weights), field(x), rtol=1e-12)


X = torch.rand(5, 3)
O, D, N = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), (2, 2, 2)
BAD = {
    "points has width 2, expected 3": lambda: muvox.trilinear_weights(X[:, :2], O, D, N),
    "points has 0 dimensions": lambda: muvox.trilinear_weights(torch.tensor(1.0), O, D, N),
    "points is int64": lambda: muvox.trilinear_weights(X.long(), O, D, N),
    "points is list": lambda: muvox.trilinear_weights([1.0, 2.0, 3.0], O, D, N),
    r"origin is \(0.0, 0.0\), expected three numbers": lambda: muvox.trilinear_weights(X, O[:2], D, N),
    "origin is 0.0, expected three numbers": lambda: muvox.trilinear_weights(X, 0.0, D, N),
    "origin has nan": lambda: muvox.trilinear_weights(X, (0.0, math.nan, 0.0), D, N),
    "voxel_size has 0, expected finite numbers above 0": lambda: muvox.trilinear_weights(X, O, (1.0, 1.0, 0.0), N),
    "voxel_size has inf": lambda: muvox.trilinear_weights(X, O, (math.inf, 1.0, 1.0), N),
    "shape has -1": lambda: muvox.trilinear_weights(X, O, D, (2, -1, 2)),
    "shape has 2, expected 0 or more with a product below": lambda: muvox.trilinear_weights(
        X, O, D, (1 << 15, 1 << 15, 2)
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_errors_name_operator_and_argument(message):
    before = muvox.trilinear_weights(X, O, D, N)[1]
    with pytest.raises((ValueError, RuntimeError), match=rf"^muvox(\.|::)trilinear_weights: {message}"):
        BAD[message]()
    assert torch.equal(muvox.trilinear_weights(X, O, D, N)[1], before)
