"""muvox.voxelize against the mean in plain torch, its gradient, rules and errors."""

import pytest
import torch
import torch._dynamo.testing

import muvox
import op_cases as cases


def formula(feats, index, counts):
    rows = []
    for s, count in enumerate(counts.tolist()):
        rows.append(feats[index == s].sum(0) / count if count > 0 else feats.new_zeros(feats.shape[1]))
    return torch.stack(rows) if rows else feats.new_zeros(0, feats.shape[1])


def problem(points=40, voxels=7, width=5, dtype=torch.float64, integer=torch.int64):
    """Points of which some are in no voxel; voxel 2 has none."""
    feats = torch.randn(points, width).to(dtype).requires_grad_()
    index = torch.randint(-2, voxels + 2, (points,))
    index[index == 2] = 3
    return feats, index.to(integer)


@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("points, voxels", [(40, 7), (1, 1), (0, 3), (3, 0), (0, 0)])
def test_mean(points, voxels, dtype, integer):
    feats, index = problem(points, voxels, dtype=dtype, integer=integer)
    counts = torch.tensor([(index == s).sum() for s in range(voxels)], dtype=integer)
    for how in (dict(counts=counts), dict(size=voxels)):
        cases.compare(
            lambda x: muvox.voxelize(x, index, **how), lambda x: formula(x, index, counts), (feats,), dtype, units=2
        )
    with torch.no_grad():
        assert torch.equal(muvox.voxelize(feats, index, counts), muvox.voxelize(feats, index, size=voxels))


def test_other_counts():
    """They are divided by as they are; 0 and less give 0 and no gradient."""
    feats, index = problem()
    counts = torch.tensor([10, 0, 3, -1, 1, 2, 7], dtype=torch.int32)
    cases.compare(lambda x: muvox.voxelize(x, index, counts), lambda x: formula(x, index, counts), (feats,), torch.float64)


@pytest.mark.parametrize("view", ["columns apart", "sliced", "every other row", "one column for all"])
def test_strides(view):
    feats, index = problem()
    apart = index.repeat_interleave(2)[::2]
    cases.compare(
        lambda x: muvox.voxelize(cases.VIEWS[view](x), apart, size=7),
        lambda x: formula(cases.VIEWS[view](x), index, index.new_tensor([(index == s).sum() for s in range(7)])),
        (feats,),
        torch.float64,
    )


@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
def test_operator_that_counts(integer):
    """What voxelize calls for a size: registered, differentiable and batched like the others."""
    feats, index = problem(integer=integer)
    by_size = torch.ops.muvox.voxelize_by_size.default
    torch.library.opcheck(by_size, (feats, index, 7))
    out, counts = by_size(feats, index, 7)
    assert counts.dtype == torch.int64 and not counts.requires_grad
    assert counts.tolist() == [(index == s).sum() for s in range(7)]
    assert torch.equal(out, muvox.voxelize(feats, index, counts))
    batch, others = torch.randn(3, *feats.shape).double(), torch.stack([index, index.flip(0), index])
    found = torch.vmap(by_size, in_dims=(0, 0, None))(batch, others, 7)
    for b in range(3):
        assert all(torch.equal(x[b], y) for x, y in zip(found, by_size(batch[b], others[b], 7)))


def test_compiled_for_all_sizes():
    feats, index = problem()
    calls = torch._dynamo.testing.CompileCounter()
    function = torch.compile(lambda f, i, size: muvox.voxelize(f, i, size=size), backend=calls, dynamic=True)
    for size in (7, 12, 40):
        assert torch.equal(function(feats, index, size), muvox.voxelize(feats, index, size=size))
    assert calls.frame_count == 1


def test_gradcheck():
    feats, index = problem(12, 4, 2)
    assert torch.autograd.gradcheck(lambda x: muvox.voxelize(x, index, size=4), (feats,), nondet_tol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_are_in_float(dtype):
    """A mean of 10,000 ones, and of 0.1: half alone would give 0.25 for the ones."""
    index = torch.zeros(10000, dtype=torch.int64)
    for value in (1.0, 0.1):
        x = torch.full((10000, 1), value, dtype=dtype)
        assert muvox.voxelize(x, index, size=1).item() == x[0].item()


def test_saves_index_and_counts_only():
    feats, index = problem()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        muvox.voxelize(feats, index, size=7)
    assert [tuple(t.shape) for t in saved] == [(40,), (7,)]


def test_autocast():
    feats, index = problem(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = muvox.voxelize(feats, index, size=7)
    assert torch.equal(out, muvox.voxelize(feats.bfloat16(), index, size=7))
    assert torch.autograd.grad(out.sum(), feats)[0].dtype == torch.float32


X, I, C = torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 2]), torch.tensor([2, 2, 1])
BAD = {
    "counts and size are both missing": lambda: muvox.voxelize(X, I),
    "counts and size are both given": lambda: muvox.voxelize(X, I, C, size=3),
    "size is -1": lambda: muvox.voxelize(X, I, size=-1),
    "index has 4 rows, expected 5": lambda: muvox.voxelize(X, I[:4], C),
    "index is float": lambda: muvox.voxelize(X, I.float(), C),
    "index is torch.float32": lambda: muvox.voxelize(X, I.float(), size=3),
    "index has 2 dimensions": lambda: muvox.voxelize(X, I[:, None], C),
    "index is torch.int64 with 2 dimensions": lambda: muvox.voxelize(X, I[:, None], size=3),
    "index is uint8, expected int32 or int64": lambda: muvox.voxelize(X, I.byte(), C),
    "counts is float": lambda: muvox.voxelize(X, I, C.float()),
    "counts has 2 dimensions": lambda: muvox.voxelize(X, I, C[None]),
    "feats is int64": lambda: muvox.voxelize(X.long(), I, C),
    "feats has 3 dimensions": lambda: muvox.voxelize(X[None], I, C),
    "feats has width 0": lambda: muvox.voxelize(X[:, :0], I, C),
    "feats is list": lambda: muvox.voxelize([1.0], I, C),
    "index is on meta": lambda: muvox.voxelize(X, I.to("meta"), C),
    "counts is on meta": lambda: muvox.voxelize(X, I, C.to("meta")),
}


@pytest.mark.parametrize("message", BAD)
def test_errors_name_operator_and_argument(message):
    before = muvox.voxelize(X, I, C)
    with pytest.raises((ValueError, RuntimeError), match=rf"^muvox(\.|::)voxelize: {message}"):
        BAD[message]()
    assert torch.equal(muvox.voxelize(X, I, C), before)
