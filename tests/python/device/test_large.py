"""More than 2³¹ elements in what comes in, in what goes out, and in the lists of neighbours, and many sets; on sampled
rows."""

import pytest
import torch

import muvox
from device.compare import assert_close, same_bits

pytestmark = pytest.mark.cuda


@pytest.fixture(autouse=True)
def memory():
    """What earlier tests hold in torch's cache goes back to the device, and so does what this one held."""
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


def need(gigabytes):
    if torch.cuda.mem_get_info()[0] < gigabytes * 1e9:
        pytest.skip(f"needs {gigabytes} GB of device memory")


def training(call, inputs, g):
    """Result and gradients."""
    inputs = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    out = call(*inputs)
    return out.detach(), *torch.autograd.grad(out, [x for x in inputs if x.requires_grad], g)


def assert_sampled_sets(call, *inputs):
    """Sets (S, M, ·), forward and backward: a few have the bits that they have alone, and are as on the CPU. Returns
    the number of elements of the largest result or gradient."""
    S = len(inputs[0])
    sampled = [0, 1, S // 3, S // 2, 2 * S // 3, S - 2, S - 1]
    with torch.no_grad():
        g = torch.randn_like(call(*inputs))
    found = training(call, inputs, g)
    largest = max(x.numel() for x in found)
    few = [torch.stack([x[s] for s in sampled]) for x in (*found, *inputs, g)]
    found, inputs, g = few[: len(found)], few[len(found) : -1], few[-1]
    assert all(same_bits(a, b) for a, b in zip(found, training(call, inputs, g), strict=True))
    assert_close(found, training(call, [x.cpu() for x in inputs], g.cpu()))
    return largest


def test_gravnet_of_many_voxels():
    """1,280,000 muons in 80,000 voxels of 16, which are all neighbours."""
    x, f = (torch.randn(80_000, 16, width, device="cuda") for width in (4, 22))
    assert_sampled_sets(lambda x, f: muvox.gravnet(x, f, 16, scale=0.3, aggregates=("mean", "max")), x, f)


# Sets, rows, neighbours. The second: more rows than lists of 32-bit places can number.
MANY_NEIGHBOURS = pytest.mark.parametrize("S, M, k", [(225_000, 100, 96), (510_000, 66, 65)])


@MANY_NEIGHBOURS
def test_knn_with_many_neighbours(S, M, k):
    """N · k distances, and their gradients."""
    need(115)
    assert assert_sampled_sets(lambda x: muvox.knn(x, k)[1], torch.randn(S, M, 4, device="cuda")) > 2**31


@MANY_NEIGHBOURS
def test_gravnet_with_many_neighbours(S, M, k):
    """N · k neighbours are saved, and the backward pass keeps as many numbers."""
    need(110)
    x, f = (torch.randn(S, M, width, device="cuda") for width in (3, 2))
    assert S * M * k > 2**31
    assert_sampled_sets(lambda x, f: muvox.gravnet(x, f, k, scale=0.3, aggregates=("mean", "sum")), x, f)


@MANY_NEIGHBOURS
def test_aggregate_with_many_neighbours(S, M, k):
    """N · k weights and their gradients; neighbours that are drawn, some of them −1."""
    need(115)
    f, weights = torch.randn(S, M, 2, device="cuda"), torch.rand(S, M, k, device="cuda")
    neighbours = torch.randint(-1, M, (S, M, k), dtype=torch.int32, device="cuda")

    def call(f, neighbours, weights):
        return muvox.aggregate(f, neighbours, weights, aggregates=("mean", "max"))

    assert assert_sampled_sets(call, f, neighbours, weights) > 2**31


def test_gravnet_of_many_features():
    """N · F features and their gradients, and twice as many results."""
    need(50)
    x, f = torch.randn(850_000, 40, 2, device="cuda"), torch.randn(850_000, 40, 64, dtype=torch.half, device="cuda")
    assert f.numel() > 2**31
    assert_sampled_sets(lambda x, f: muvox.gravnet(x, f, 4, scale=0.3, aggregates=("max", "mean")), x, f)


def test_pool_of_many_features():
    """N · F features and their gradients."""
    need(30)
    f = torch.randn(850_000, 40, 64, dtype=torch.half, device="cuda")
    assert assert_sampled_sets(lambda f: muvox.pool(f, aggregates=("max", "mean", "sum")), f) > 2**31


C = 128
VOXELS = 2**24 + 3  # times C is just over 2³¹


def sampled_voxels():
    """The first, those on both sides of element 2³¹, the last, and some between."""
    edges = torch.tensor([0, 1, 2**23, 2**24 - 1, 2**24, 2**24 + 1, VOXELS - 1], device="cuda")
    return torch.cat([edges, torch.randint(0, VOXELS, (1000,), device="cuda")])


@pytest.mark.parametrize("integer", [torch.int32, torch.int64], ids=str)
def test_voxelize_of_33_million_points(integer):
    """S · C results, N = 2 S: two points in each voxel, S rows apart."""
    need(40)
    feats = torch.randn(2 * VOXELS, C, dtype=torch.half, device="cuda").requires_grad_()
    index = (torch.arange(2 * VOXELS, device="cuda") % VOXELS).to(integer)
    out = muvox.voxelize(feats, index, torch.full((VOXELS,), 2, dtype=integer, device="cuda"))
    g, at = torch.randn_like(out), sampled_voxels()
    assert min(out.numel(), feats.numel()) > 2**31
    found = torch.autograd.grad(out, feats, g)[0]
    with torch.no_grad():
        assert torch.equal(out[at], ((feats[at].float() + feats[at + VOXELS].float()) / 2).half())
        assert torch.equal(found[at], g[at] / 2) and torch.equal(found[at + VOXELS], g[at] / 2)


def test_voxelize_into_few_voxels():
    """N · C features; the points of a voxel are spread over all of them, and those of one voxel are few and last."""
    need(20)
    S = 1000
    feats = torch.ones(VOXELS, C, dtype=torch.half, device="cuda")
    index = torch.arange(VOXELS, device="cuda") % S
    index[-3:] = S
    feats[-3:] = torch.tensor([2.0, 4.0, 9.0], dtype=torch.half, device="cuda")[:, None]
    out = muvox.voxelize(feats.requires_grad_(), index, size=S + 1)
    g = torch.arange(S + 1, dtype=torch.half, device="cuda")[:, None].expand(S + 1, C)
    found = torch.autograd.grad(out, feats, g)[0]
    assert torch.equal(out[:S], torch.ones_like(out[:S])) and torch.equal(out[S], torch.full_like(out[S], 5.0))
    at = sampled_voxels()
    known = (g[index[at]].double() / torch.bincount(index)[index[at]][:, None]).half()
    torch.testing.assert_close(found[at], known, rtol=2e-3, atol=1e-6)


def test_devoxelize_of_17_million_points():
    """N · C results from S · C voxels, S = N: each is read twice, by points far from each other."""
    need(40)
    voxel = torch.arange(VOXELS, device="cuda")
    index, weights = torch.stack([VOXELS - 1 - voxel, voxel], 1), torch.tensor([0.5, 0.25], device="cuda")
    weights = weights.repeat(VOXELS, 1).requires_grad_()
    feats = torch.randn(VOXELS, C, dtype=torch.half, device="cuda").requires_grad_()
    out = muvox.devoxelize(feats, index, weights)
    g, at = torch.randn_like(out), sampled_voxels()
    other = VOXELS - 1 - at
    assert min(out.numel(), feats.numel()) > 2**31
    dfeats, dweights = torch.autograd.grad(out, [feats, weights], g)
    with torch.no_grad():
        near, far, mine = feats[at].float(), feats[other].float(), g[at].float()
        assert torch.equal(out[at], (0.25 * near + 0.5 * far).half())
        assert torch.equal(dfeats[at], (0.25 * mine + 0.5 * g[other].float()).half())
        known = torch.stack([(mine * far).sum(1), (mine * near).sum(1)], 1)
    torch.testing.assert_close(dweights[at], known, rtol=1e-4, atol=1e-3)
