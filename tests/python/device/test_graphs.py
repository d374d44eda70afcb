"""CUDA graphs of forward and backward, replayed with other splits, other inputs, or both."""

import pytest
import torch

import muvox
from device.compare import assert_close, same_bits, splits_of

pytestmark = pytest.mark.cuda

N = 6000  # rows, of 12 sets
SIZES = {
    "equal": [500] * 12,
    "the last": [0] * 11 + [N],
    "round the edges of tiles": [0, 1, 31, 32, 33, 256, 257, 0, 4097, 0, 1293, 0],
    "the first": [N] + [0] * 11,
    "single rows": [1] * 11 + [N - 11],
    "three": [0, 0, 0, 2000, 0, 3999, 0, 1, 0, 0, 0, 0],
}
ALL = ("mean", "max", "absmax", "sum")


def knn(x, f, splits):
    neighbours, distance2, counts = muvox.knn(x, 9, splits=splits, return_counts=True)
    return distance2.masked_fill(neighbours < 0, 0), neighbours, counts


def knn_of_queries(x, f, splits):
    """Sets of queries in the other order: large beside small and empty ones."""
    turned = (splits[-1] - splits).flip(0)
    queries = f[:, 1:]
    neighbours, distance2, counts = muvox.knn(
        x, 9, splits=splits, queries=queries, query_splits=turned, max_radius=1.5, return_counts=True
    )
    return distance2.masked_fill(neighbours < 0, 0), neighbours, counts


def gravnet(x, f, splits):
    return (muvox.gravnet(x, f, 12, splits=splits, scale=0.5, aggregates=ALL),)


def gravnet_with_options(x, f, splits):
    how = dict(mask=f.detach()[:, 0] > -1, row_weights=f[:, 1].abs(), exclude_self=True, max_radius=1.5, mean="k")
    return (muvox.gravnet(x, f, 12, splits=splits, scale=0.5, aggregates=ALL, **how),)


def aggregate(x, f, splits):
    neighbours, distance2 = muvox.knn(x, 9, splits=splits)
    return muvox.aggregate(f, neighbours, (-distance2).exp(), splits=splits, aggregates=ALL), neighbours


def pool(x, f, splits):
    return (muvox.pool(f, splits=splits, row_weights=x[:, 0].abs(), aggregates=ALL),)


CALLS = {call.__name__: call for call in (knn, knn_of_queries, gravnet, gravnet_with_options, aggregate, pool)}


def values(turn):
    generator = torch.Generator().manual_seed(turn)
    return [torch.randn(N, width, generator=generator) for width in (4, 5)]


def step(op, x, f, splits):
    """Results, and the gradients of half the sum of squares of the first one."""
    results = CALLS[op](x, f, splits)
    gradients = torch.autograd.grad(results[0], [x, f], results[0].detach(), materialize_grads=True)
    return *(y.detach() for y in results), *gradients


def capture(function):
    """The graph, and the results that each replay overwrites."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    return graph, results


@pytest.mark.parametrize("captured", ["equal", "the first"])
@pytest.mark.parametrize("op", CALLS)
def test_replay_with_other_splits(op, captured):
    """As many rows and sets as captured, otherwise divided: the bits of an eager call, the neighbours of the CPU.
    Inputs change in every second replay, and the captured splits come again at the end."""
    x, f = (t.cuda().requires_grad_() for t in values(0))
    splits = splits_of(torch.tensor(SIZES[captured])).cuda()
    graph, found = capture(lambda: step(op, x, f, splits))
    for turn, sizes in enumerate([*SIZES.values(), SIZES[captured]]):
        here = [t.requires_grad_() for t in values(turn // 2)]
        divided = splits_of(torch.tensor(sizes))
        with torch.no_grad():
            for to, t in zip((x, f, splits), (*here, divided)):
                to.copy_(t)
        graph.replay()
        eager = step(op, *(t.detach().clone().requires_grad_() for t in (x, f)), splits.clone())
        assert all(same_bits(a, b) for a, b in zip(found, eager, strict=True)), sizes
        right = CALLS[op](*here, divided)
        if "knn" in op:
            assert all(same_bits(a, b) for a, b in zip(found, right)), sizes
        else:  # not the gradients: where rounding chooses a winner, the other row has it
            assert_close(found[: len(right)], [y.detach() for y in right])
