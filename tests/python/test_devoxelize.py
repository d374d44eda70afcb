"""muvox.devoxelize against the sum in plain torch, its gradients, rules and errors."""

import pytest
import torch

import muvox
import op_cases as cases


def formula(feats, index, weights):
    """Place by place; a zero row after the last voxel stands for those that are skipped."""
    padded = torch.cat([feats, feats.new_zeros(1, feats.shape[1])])
    valid = (index >= 0) & (index < len(feats))
    found = torch.where(valid, weights, 0)[..., None] * padded[torch.where(valid, index.long(), len(feats))]
    return found.sum(1)


def problem(points=20, voxels=7, places=8, width=5, dtype=torch.float64, integer=torch.int32):
    feats = torch.randn(voxels, width).to(dtype).requires_grad_()
    index = torch.randint(-3, voxels + 3, (points, places)).to(integer)
    weights = torch.randn(points, places).to(dtype).requires_grad_()
    return feats, index, weights


def compare(feats, index, weights, views=(lambda x: x,) * 2, dtype=torch.float64):
    cases.compare(
        lambda f, w: muvox.devoxelize(views[0](f), index, views[1](w)),
        lambda f, w: formula(views[0](f), index, views[1](w)),
        (feats, weights),
        dtype,
        units=2,
    )


@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("points, voxels, places", [(20, 7, 8), (5, 1, 1), (9, 4, 3), (0, 3, 8), (3, 0, 8)])
def test_sums(points, voxels, places, dtype, integer):
    compare(*problem(points, voxels, places, dtype=dtype, integer=integer), dtype=dtype)


@pytest.mark.parametrize("weights", cases.DTYPES[:3])
@pytest.mark.parametrize("feats", cases.DTYPES[:3])
def test_mixed_dtypes(feats, weights):
    f, index, w = problem()
    compare(f.detach().to(feats).requires_grad_(), index, w.detach().to(weights).requires_grad_(), dtype=feats)


@pytest.mark.parametrize("view", ["columns apart", "sliced", "every other row"])
@pytest.mark.parametrize("place", [0, 1])
def test_strides(view, place):
    views = [lambda x: x] * 2
    views[place] = cases.VIEWS[view]
    compare(*problem(), views=views)


def test_gradcheck():
    feats, index, weights = problem(6, 4, 3, 2)
    assert torch.autograd.gradcheck(lambda f, w: muvox.devoxelize(f, index, w), (feats, weights), nondet_tol=0)


@pytest.mark.parametrize("needed", [0, 1])
def test_one_gradient_of_two(needed):
    feats, index, weights = problem()
    inputs = feats, weights
    everything = torch.autograd.grad(muvox.devoxelize(feats, index, weights).square().sum(), inputs)
    some = [x if i == needed else x.detach() for i, x in enumerate(inputs)]
    found = torch.autograd.grad(muvox.devoxelize(some[0], index, some[1]).square().sum(), inputs[needed])
    assert torch.equal(found[0], everything[needed])


def test_nan_is_read_where_it_is_asked_for_only():
    feats = torch.tensor([[float("nan")], [2.0]])
    index = torch.tensor([[1, -1], [1, 0]])
    out = muvox.devoxelize(feats, index, torch.full((2, 2), 0.5))
    assert out[0].item() == 1.0 and out[1].isnan()


def test_autocast():
    feats, index, weights = problem(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = muvox.devoxelize(feats, index, weights)
    assert torch.equal(out, muvox.devoxelize(feats.bfloat16(), index, weights))  # weights were not rounded
    assert [g.dtype for g in torch.autograd.grad(out.sum(), (feats, weights))] == [torch.float32] * 2


def test_voxelize_linear_devoxelize_under_autocast():
    """The round trip of a voxel branch, with the coordinates in float throughout."""
    points = torch.rand(50, 3, requires_grad=True)
    feats = torch.randn(50, 4, requires_grad=True)
    layer = torch.nn.Linear(4, 6)
    with torch.autocast("cpu", torch.bfloat16):
        index, weights = muvox.trilinear_weights(points, (0, 0, 0), (0.25, 0.25, 0.25), (4, 4, 4))
        voxels = layer(muvox.voxelize(feats, index[:, 0], size=64))
        out = muvox.devoxelize(voxels, index, weights)
    assert weights.dtype == torch.float32 and out.dtype == torch.bfloat16
    for g in torch.autograd.grad(out.float().square().sum(), (points, feats, layer.weight)):
        assert g.dtype == torch.float32 and torch.isfinite(g).all() and g.any()


F, I, W = torch.randn(3, 2), torch.tensor([[0, 1], [2, -1]]), torch.rand(2, 2)
BAD = {
    "index is float": lambda: muvox.devoxelize(F, I.float(), W),
    "index is int16": lambda: muvox.devoxelize(F, I.short(), W),
    "index has 1 dimensions": lambda: muvox.devoxelize(F, I[0], W),
    "index has width 0": lambda: muvox.devoxelize(F, I[:, :0], W[:, :0]),
    r"weights has shape \(2, 1\) and index \(2, 2\)": lambda: muvox.devoxelize(F, I, W[:, :1]),
    "weights is double and feats is float": lambda: muvox.devoxelize(F, I, W.double()),
    "weights is int64": lambda: muvox.devoxelize(F, I, I),
    "feats is int64": lambda: muvox.devoxelize(F.long(), I, W),
    "feats has 3 dimensions": lambda: muvox.devoxelize(F[None], I, W),
    "feats has width 0": lambda: muvox.devoxelize(F[:, :0], I, W),
    "weights is list": lambda: muvox.devoxelize(F, I, [1.0]),
    "weights is on meta": lambda: muvox.devoxelize(F, I, W.to("meta")),
}


@pytest.mark.parametrize("message", BAD)
def test_errors_name_operator_and_argument(message):
    before = muvox.devoxelize(F, I, W)
    with pytest.raises((ValueError, RuntimeError), match=rf"^muvox(\.|::)devoxelize: {message}"):
        BAD[message]()
    assert torch.equal(muvox.devoxelize(F, I, W), before)
