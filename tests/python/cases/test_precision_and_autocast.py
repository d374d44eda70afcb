"""Rows 11-15: dtypes, sums in half, autocast."""

import pytest
import torch

import muvox
from cases.calls import CALLS, DTYPES, POINTS, SETS, assert_same, gradients, rows

each_call = pytest.mark.parametrize("name", CALLS)
each_half = pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16])
WIDE = {"knn", "knn of queries", "trilinear_weights"}  # results are float, whatever the dtype of the coordinates


# Dtypes


@each_call
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_forward_and_backward(name, dtype):
    """Row 11: results have the dtype of the features, distances and statistics their own, gradients the input's."""
    x, f = rows(2, 9, dtype=dtype)
    wide = torch.double if dtype == torch.double else torch.float
    first, *statistics = results = CALLS[name](x, f)
    assert first.dtype == (wide if name in WIDE else dtype) and all(y.dtype == wide for y in statistics)
    assert all(y.isfinite().all() for y in results)
    for leaf, g in zip((x, f), gradients(results, [x, f])):
        assert g.dtype == dtype and g.shape == leaf.shape and g.isfinite().all()


@each_call
@each_half
def test_half_is_as_near_as_half_can_be(name, dtype):
    """Row 11: results of half inputs are those of the same numbers in double, rounded once or a little more."""
    x, f = (t.detach() for t in rows(2, 9, dtype=dtype))
    for found, right in zip(CALLS[name](x, f), CALLS[name](x.double(), f.double())):
        largest = right.abs().max()
        unit = torch.finfo(found.dtype).eps if found.dtype == dtype else 1e-5
        # neighbour_attention rounds the products of its layers
        assert (found.double() - right).abs().max() <= (4 if "neighbour" in name else 1) * unit * largest


@each_call
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.bool, torch.complex64])
def test_other_dtypes_are_refused(name, dtype):
    """Row 11: an error before any arithmetic, naming the operator."""
    x, f = (torch.ones(2, 4, width).to(dtype) for width in (4, 5))
    op = name.split(",")[0].split(" ")[0]
    with pytest.raises((ValueError, RuntimeError), match=f"muvox(::|.)({op}|knn: coords)"):
        CALLS[name](x, f)


def mixed(op, a, b):
    """A call of the operator with an argument of each dtype; where it takes both, None."""
    x, y, w = torch.randn(4, 3).to(a), torch.randn(4, 3).to(b), torch.randn(4, 2).to(b)
    index = torch.zeros(4, 2, dtype=torch.int32)
    layers = [torch.zeros(shape, dtype=b) for shape in [(3, 3), (3,)] * 4]
    return {
        "knn": lambda: muvox.knn(x, 2, queries=y),
        "gravnet": lambda: muvox.gravnet(x, y, 2),
        "aggregate": lambda: muvox.aggregate(x, index, w),
        "attention, k": lambda: muvox.attention(x, y, x),
        "attention, v": lambda: muvox.attention(x, x, y),
        "attention, bias": lambda: muvox.attention(x, x, x, bias=y[:, 0]),
        "offset_attention, k": lambda: muvox.offset_attention(x, y, x),
        "offset_attention, v": lambda: muvox.offset_attention(x, x, y),
        "neighbour_attention, layers": lambda: muvox.neighbour_attention(x, x, 2, layers),
        "pool, row_weights": lambda: muvox.pool(x, row_weights=y[:, 0].abs()),
        "devoxelize": lambda: muvox.devoxelize(x, index, w),
    }[op]


ALONE = (
    *("knn", "attention, k", "attention, v"),
    *("offset_attention, k", "offset_attention, v", "neighbour_attention, layers"),
)
BY_WIDTH = ("gravnet", "aggregate", "attention, bias", "pool, row_weights", "devoxelize")


@pytest.mark.parametrize("op", ALONE)
@pytest.mark.parametrize("a", DTYPES)
@pytest.mark.parametrize("b", DTYPES)
def test_mixed_dtypes_are_refused_naming_both(op, a, b):
    """Row 11: arguments that must be of one dtype."""
    if a == b:
        mixed(op, a, b)()
        return
    names = dict(zip(DTYPES, ("(half|float16)", "bfloat16", "float", "(double|float64)")))
    with pytest.raises((ValueError, RuntimeError), match=f"(?s)muvox(?=.*{names[a]})(?=.*{names[b]})"):
        mixed(op, a, b)()


@pytest.mark.parametrize("op", BY_WIDTH)
@pytest.mark.parametrize("a", DTYPES)
@pytest.mark.parametrize("b", DTYPES)
def test_weights_may_be_float_beside_half(op, a, b):
    """Row 11: what autocast brings together: half or bfloat16 beside float; double is beside double only."""
    if (a == torch.double) == (b == torch.double):
        assert mixed(op, a, b)().isfinite().all()
    else:
        with pytest.raises((ValueError, RuntimeError), match="(?s)muvox.*(float|half).*double|double.*(float|half)"):
            mixed(op, a, b)()


@pytest.mark.parametrize("op", (*ALONE, *BY_WIDTH))
@pytest.mark.parametrize("a", DTYPES[:3])
@pytest.mark.parametrize("b", DTYPES[:3])
@each_half
def test_no_mismatch_inside_autocast(op, a, b, dtype):
    """Row 11: one argument comes from a layer and is half, another comes from data and is float."""
    with torch.autocast(torch.get_default_device().type, dtype):
        found = mixed(op, a, b)()
    found = found[1] if isinstance(found, tuple) else found
    assert found.dtype == (torch.float if op == "knn" else dtype) and found.isfinite().all()


# Sums in half


MEANS = {
    "pool": lambda x, one: muvox.pool(x[None], aggregates=("mean",)),
    "pool, row weights": lambda x, one: muvox.pool(x[None], aggregates=("mean",), row_weights=torch.ones(1, len(x))),
    "voxelize": lambda x, one: muvox.voxelize(x, one, size=1),
    "voxelize, counts": lambda x, one: muvox.voxelize(x, one, one[:1] + len(x)),
    "devoxelize": lambda x, one: muvox.devoxelize(x, torch.arange(len(x))[None], torch.full((1, len(x)), 1 / len(x))),
    "gravnet": lambda x, one: muvox.gravnet(torch.zeros(2100, 1), x[:2100], 2100, aggregates=("mean",)),
    "aggregate": lambda x, one: muvox.aggregate(
        x[:2100], torch.arange(2100).int().expand(2100, -1), torch.ones(1).expand(2100, 2100), aggregates=("mean",)
    ),
    "attention": lambda x, one: muvox.attention(x[:, :1], x[:, :1] * 0, x),
    "offset_attention": lambda x, one: muvox.offset_attention(x[:, :1], x[:, :1] * 0, x),
}


@pytest.mark.parametrize("name", MEANS)
@pytest.mark.parametrize("value, right", [(1.0, 1.0), (0.1, torch.tensor(0.1).half().item())])
def test_mean_of_many_in_half(name, value, right):
    """Row 12: ten thousand halves in one voxel; half sums would stop at 2048, and give 0.25."""
    x = torch.full((10_000, 3), value, dtype=torch.half)
    mean = MEANS[name](x, torch.zeros(10_000, dtype=torch.int64))
    assert (mean.double() - right).abs().max() <= torch.finfo(torch.half).eps * value


def test_gradient_of_many_in_half():
    """Row 12: a voxel that ten thousand points read gets the sum of their gradients, and one muon that of all rows."""
    feats = torch.ones(1, 3, dtype=torch.half).requires_grad_()
    index, weights = torch.zeros(10_000, 1, dtype=torch.int64), torch.ones(10_000, 1)
    (grad,) = gradients(muvox.devoxelize(feats, index, weights), [feats])
    assert torch.equal(grad, torch.full((1, 3), 10_000.0).half())
    x, f = torch.zeros(5000, 1), torch.ones(5000, 1, dtype=torch.half).requires_grad_()
    df = gradients(muvox.gravnet(x, f, 1 + 4, aggregates=("sum",)), [f])[0]
    assert torch.equal(df[:5], torch.full((5, 1), 5000.0).half()) and not df[5:].any()


# Autocast


@each_half
def test_autocast_keeps_coordinates_in_float(dtype):
    """Row 13: the rows differ by less than half and bfloat16 resolve; features go to the autocast dtype."""
    x = (1 + 1e-5 * torch.randn(2, 50, 3)).requires_grad_()
    f = torch.randn(2, 50, 4).requires_grad_()
    none = [torch.zeros(shape) for shape in [(4, 4), (4,)] * 4]  # layers that leave the residual alone
    with torch.autocast(torch.get_default_device().type, dtype):
        out = muvox.gravnet(x, f, 5, scale=1e9)
        attended = muvox.neighbour_attention(x, f, 5, none, scale=1e9)
        neighbours, distance2 = muvox.knn(x, 5)
    assert out.dtype == dtype and distance2.dtype == torch.float
    torch.testing.assert_close(attended, out, rtol=torch.finfo(dtype).eps, atol=1e-6)
    assert torch.equal(neighbours, muvox.knn(x, 5)[0])
    assert torch.equal(out, muvox.gravnet(x, f.to(dtype), 5, scale=1e9))
    dx, df = gradients(out, [x, f])
    assert dx.dtype == df.dtype == torch.float and dx.abs().max() > 0 and dx.isfinite().all()


@each_call
@each_half
def test_autocast_casts_features_alone(name, dtype):
    """Row 13: within autocast come the bits of rounded features and of untouched coordinates and weights."""
    x, f = rows(2, 9)
    with torch.autocast(torch.get_default_device().type, dtype):
        found = CALLS[name](x, f)
    attends = name in ("attention", "offset_attention")
    rounded = x.to(dtype) if attends else x
    known = CALLS[name](rounded, f if name == "knn of queries" else f.to(dtype))
    if "neighbour_attention" in name:  # whose layers are rounded, too
        assert found[0].dtype == dtype and (found[0] - known[0]).abs().max() <= 8 * torch.finfo(dtype).eps
    else:
        assert_same(found, known)
    assert all(g.dtype == torch.float and g.isfinite().all() for g in gradients(found, [x, f]))


@each_half
@pytest.mark.parametrize("use_sa", [False, True])
def test_autocast_around_layers(dtype, use_sa):
    """Row 13: a GravNet layer and attention from linear layers inside autocast, forward and backward."""
    layer = muvox.nn.GravNetLayer(6, 3, 8, 5, ["mean", "max"], 10, use_sa=use_sa)
    linear = torch.nn.Linear(10, 3 * 10)
    x = torch.randn(4, 20, 6).requires_grad_()
    with torch.autocast(torch.get_default_device().type, dtype):
        h = layer(x)
        q, k, v = linear(h).chunk(3, -1)
        y = muvox.attention(q, k, v) + muvox.offset_attention(q, k, v)
    assert y.isfinite().all()
    found = gradients(y, [x, *layer.parameters(), *linear.parameters()])
    assert all(g.isfinite().all() and g.dtype == torch.float for g in found)


@each_half
@pytest.mark.parametrize("backward_inside", [False, True])
def test_voxelize_linear_devoxelize_inside_autocast(dtype, backward_inside):
    """Row 14: points to voxels, a layer, and back; weights stay float, at coordinates that half would not resolve."""
    points = (1000 + torch.rand(200, 3)).requires_grad_()
    feats, linear = torch.randn(200, 6).requires_grad_(), torch.nn.Linear(6, 7)
    grid = (1000.0, 1000.0, 1000.0), (0.25, 0.25, 0.25), (4, 4, 4)
    index, weights = muvox.trilinear_weights(points, *grid)
    with torch.autocast(torch.get_default_device().type, dtype):
        inside, inside_weights = muvox.trilinear_weights(points, *grid)
        means = muvox.voxelize(feats, inside[:, 0], size=64)
        out = muvox.devoxelize(linear(means), inside, inside_weights)
        if backward_inside:
            found = gradients(out, [feats, points, *linear.parameters()])
    assert torch.equal(inside, index) and torch.equal(inside_weights, weights) and inside_weights.dtype == torch.float
    assert means.dtype == out.dtype == dtype and out.isfinite().all()
    if not backward_inside:
        found = gradients(out, [feats, points, *linear.parameters()])
    right = muvox.devoxelize(linear(muvox.voxelize(feats, index[:, 0], size=64)), index, weights)
    known = gradients(right, [feats, points, *linear.parameters()])
    coarse = 16 * torch.finfo(dtype).eps
    for a, b in zip((out, *found), (right, *known)):
        assert (a - b).abs().max() <= coarse * b.abs().max()
    assert all(g.dtype == torch.float and g.any() for g in found)


def registered():
    """Names of the library's operators in torch's registry, without namespace."""
    names = torch._C._dispatch_get_all_op_names()
    return sorted(name.split("::")[1].split(".")[0] for name in names if name.startswith("muvox::"))


def operators():
    return [name for name in registered() if not name.endswith(("_backward", "_second"))]


def test_no_operator_is_without_an_autocast_rule():
    """Row 15: every one that a user calls, on both devices; and every one is among the calls of these tests."""
    assert len(operators()) >= 10
    for op in operators():
        for key in ("AutocastCPU", "AutocastCUDA"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"muvox::{op}", key), (op, key)
        assert op.removesuffix("_by_size") in CALLS


def test_no_operator_is_without_gradient_or_fake():
    """Row 15: nor without its backward, and the second derivative that belongs to it."""
    names = set(registered())
    for op in operators():
        # voxelize is linear: the derivative of its backward is voxelize, and the form by size shares that backward
        linear = {"voxelize_second", "voxelize_by_size_second", "voxelize_by_size_backward"}
        assert {f"{op}_backward", f"{op}_second"} - names <= linear
    for op in names:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"muvox::{op}", "Autograd"), op
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"muvox::{op}", "Meta"), op
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"muvox::{op}", "FuncTorchBatched"), op


@each_call
@each_half
def test_backward_and_second_derivative_inside_autocast(name, dtype):
    """Row 15: those need no rule: inside autocast they give the bits of outside."""
    x, f = rows(2, 6)

    def derivatives(inside):
        with torch.autocast(torch.get_default_device().type, dtype):
            results = CALLS[name](x, f)
            loss = sum(y.float().square().sum() for y in results)
        with torch.autocast(torch.get_default_device().type, dtype, enabled=inside):
            first = torch.autograd.grad(loss, [x, f], create_graph=True, materialize_grads=True)
            penalty = sum(g.square().sum() for g in first)
            return *first, *torch.autograd.grad(penalty, [x, f], materialize_grads=True)

    found = derivatives(inside=True)
    assert_same(found, derivatives(inside=False))
    assert all(g.dtype == torch.float and g.isfinite().all() for g in found)
    assert any(g.any() for g in found[2:])


def test_the_calls_are_all_there():
    assert set(CALLS) == set(SETS) | set(POINTS) and len(CALLS) == 12
