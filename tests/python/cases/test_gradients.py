"""Rows 9 and 35-37: gradients at zero distance, in double, of distances, and second ones."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import muvox
from cases.calls import ALL, CALLS, NEIGHBOURS, SETS, gradients, ragged, rows

each_call = pytest.mark.parametrize("name", CALLS)


# Gradient at zero distance


def test_gradient_of_identical_muons():
    """Row 9: two identical muons and self."""
    x = torch.tensor([[0.1, 0.2], [0.1, 0.2]], dtype=torch.double).requires_grad_()
    f = torch.randn(2, 3, dtype=torch.double).requires_grad_()
    dx, df = gradients(muvox.gravnet(x, f, 2, aggregates=ALL), [x, f])
    assert torch.equal(dx, torch.zeros_like(x)) and df.isfinite().all()
    assert torch.equal(gradients(muvox.knn(x, 2)[1], [x])[0], torch.zeros_like(x))


@pytest.mark.parametrize("name", NEIGHBOURS)
@pytest.mark.parametrize("dtype", [torch.half, torch.float])
def test_no_operator_moves_identical_muons(name, dtype):
    """Row 9: pairs of coincident muons: with two neighbours these are the pair, whose distance has the gradient 0."""
    x, f = rows(2, 6, dtype=dtype)
    x = x.detach().repeat_interleave(2, 1).requires_grad_()
    f = torch.randn(2, 12, 5).to(dtype).requires_grad_()
    results = NEIGHBOURS[name](x[:, :2], f[:, :2])
    assert all(y.isfinite().all() for y in results)
    dx, df = gradients(results, [x, f])
    assert torch.equal(dx, torch.zeros_like(x)) and df.isfinite().all()
    assert all(g.isfinite().all() for g in gradients(NEIGHBOURS[name](x, f), [x, f]))


@each_call
def test_equal_rows_have_finite_gradients(name):
    """Row 9: all rows the same, coordinates on a corner of the grid too."""
    x, f = torch.full((2, 6, 4), 0.5), torch.full((2, 6, 5), 0.25)
    x[..., 0] = -1.3 + 0.9 / 2  # the centre of a voxel of the grid
    x, f = x.requires_grad_(), f.requires_grad_()
    results = CALLS[name](x, f)
    assert all(y.isfinite().all() for y in (*results, *gradients(results, [x, f])))


POTENTIALS = {
    "exp(-d)": lambda d: (-d).exp(),
    "1 / (1 + d)": lambda d: 1 / (1 + d),
    "1 / d": lambda d: 1 / d.clamp(min=1e-3),
    "exp(-d²)": lambda d: (-d.square()).exp(),
    "d": lambda d: d,
}


@pytest.mark.parametrize("potential", POTENTIALS)
@pytest.mark.parametrize("use_sa", [False, True])
def test_gradient_of_a_potential_of_the_distance(potential, use_sa):
    """Row 9: the square root in the distance has no gradient at 0: rows 0 and 1 coincide, row 2 is apart."""
    x = torch.tensor([[0.5, 0.2], [0.5, 0.2], [0.3, 0.4]], dtype=torch.double)
    options = dict(cat_means=False, use_sa=use_sa, potential=POTENTIALS[potential])
    layer = muvox.nn.GravNetLayer(2, 2, 4, 3, ["mean"], 16, **options).double()
    x.requires_grad_()
    assert gradients(layer(x[None]), [x])[0].isfinite().all()
    only = x[:2].detach().requires_grad_()
    found = gradients(layer(only[None]), [only, *layer.parameters()])
    assert all(g.isfinite().all() for g in found)
    # Coincident rows: the weights that make coordinates (the first n_s = 2 rows of f_slr) have no gradient.
    slopes = [g for g, p in zip(found[1:], layer.parameters()) if any(p is q for q in layer.f_slr.parameters())]
    assert slopes and all(not g[:2].any() and (g[2:].any() or potential == "d") for g in slopes)


@pytest.mark.parametrize("power", [0.5, 1.0])
def test_gradient_of_given_weights_of_others(power):
    """Row 9: 1/d and 1/d² over other muons; a pair at distance 0 is left out by its distance, as a user would."""
    x = torch.tensor([[0.0], [0.0], [1.0], [3.0]], dtype=torch.double).requires_grad_()
    neighbours, distance2 = muvox.knn(x, 3, exclude_self=True)
    weights = torch.where(distance2 > 0, distance2.clamp(min=1e-30) ** -power, 0)
    dx = gradients(muvox.aggregate(torch.ones_like(x), neighbours, weights, aggregates="sum"), [x])[0]
    apart = x.detach().requires_grad_()
    d = (apart - apart.T).abs()
    right = gradients(torch.where(d > 0, d.clamp(min=1e-15) ** (-2 * power), 0).sum(), [apart])[0]
    torch.testing.assert_close(dx, right)


# Double, distances


@each_call
def test_gradients_of_double_are_double(name):
    """Row 35: gradcheck passes, which float arithmetic inside would not."""
    x, f = rows(2, 5, dtype=torch.double)
    results = CALLS[name](x, f)
    assert all(t.dtype == torch.double for t in (*results, *gradients(results, [x, f])))
    assert gradcheck(CALLS[name], (x, f), nondet_tol=0.0)


@pytest.mark.parametrize("name", SETS)
def test_gradients_of_ragged_double(name):
    """Row 35: sets of 3, 0, 1 and 5 rows."""
    splits = ragged(3, 0, 1, 5)
    assert gradcheck(lambda x, f: SETS[name](x, f, splits=splits), rows(9, dtype=torch.double), nondet_tol=0.0)


def test_distances_are_differentiable():
    """Row 36: Σ distance² over all pairs of a set has the gradient 4 Σ_j (x_i − x_j)."""
    x = torch.randn(3, 8, 2, dtype=torch.double).requires_grad_()
    neighbours, distance2 = muvox.knn(x, 8)
    assert not neighbours.requires_grad and distance2.requires_grad
    right = 4 * (8 * x - x.sum(1, keepdim=True))
    torch.testing.assert_close(gradients(distance2, [x])[0], right.detach(), rtol=1e-12, atol=1e-12)


def test_distances_of_queries_are_differentiable():
    """Row 36: in points and queries."""
    x, queries = (torch.randn(3, n, 2, dtype=torch.double).requires_grad_() for n in (8, 5))
    found = gradients(muvox.knn(x, 8, queries=queries)[1], [x, queries])
    right = gradients((queries[:, :, None] - x[:, None]).square(), [x, queries])
    torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)


# Second derivatives


@each_call
def test_second_derivatives(name):
    """Row 37: against finite differences of the first ones. The squares: where an operator is linear, they are not."""
    x, f = rows(2, 5, dtype=torch.double)

    def squares(x, f):
        return tuple(y.square() for y in CALLS[name](x, f))

    assert gradgradcheck(squares, (x, f), nondet_tol=0.0)


@each_call
def test_gradient_penalty_is_not_silently_zero(name):
    """Row 37: the slope of |∇y|² along a direction, against the difference of its values."""
    x, f = rows(2, 5, dtype=torch.double)
    names = {"pool": [f], "voxelize": [f], "trilinear_weights": [x], "knn": [x]}
    inputs = names.get(name, [x, f])

    def penalty():
        loss = sum(y.square().sum() for y in CALLS[name](x, f))
        return sum(g.square().sum() for g in torch.autograd.grad(loss, inputs, create_graph=True))

    found = gradients(penalty(), inputs)
    along, step = [torch.randn_like(t) for t in inputs], 1e-6
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            for t, a in zip(inputs, along):
                t += sign * step * a * (1 if sign == 1 else 2)
        values.append(penalty().item())
    slope = sum((g * a).sum() for g, a in zip(found, along)).item()
    assert all(g.any() for g in found)
    assert slope == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-4)


@each_call
def test_compiled_second_derivative_is_refused(name):
    """Row 37: a clear error, never silent zeros."""
    torch._dynamo.reset()
    x, f = rows(2, 5)
    results = torch.compile(CALLS[name], fullgraph=True, backend="aot_eager")(x, f)
    used = x if name in ("trilinear_weights", "knn") else f
    first = torch.autograd.grad(sum(y.square().sum() for y in results), used, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="double backward"):
        first.sum().backward()


@each_call
def test_third_derivatives_are_refused(name):
    """Row 37: a clear error, never silent zeros; what is linear in its input has the second derivative again."""
    x, f = rows(2, 5, dtype=torch.double)
    inputs = [x] if name in ("trilinear_weights", "knn") else [f]
    loss = sum((y**4).sum() for y in CALLS[name](x, f))
    for _ in range(2):
        loss = torch.autograd.grad(loss, inputs, create_graph=True)[0].square().sum()
    if name == "voxelize":
        assert torch.autograd.grad(loss, inputs)[0].any()
    else:
        with pytest.raises(NotImplementedError, match="third derivatives are not supported"):
            torch.autograd.grad(loss, inputs)
