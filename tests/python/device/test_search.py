"""knn on the device: the same neighbours as on the CPU, bit for bit, whatever the rows are like."""

import pytest
import torch

import muvox
from device.compare import log_normal_sizes, same_bits, splits_of

pytestmark = pytest.mark.cuda


def assert_same_neighbours(x, k, **options):
    right = muvox.knn(x, k, return_counts=True, **options)
    there = {name: v.cuda() if isinstance(v, torch.Tensor) else v for name, v in options.items()}
    got = muvox.knn(x.cuda(), k, return_counts=True, **there)
    for name, a, b in zip(("neighbours", "distance2", "counts"), got, right):
        assert same_bits(a, b), name


SIZES = [1, 2, 31, 32, 33, 127, 128, 255, 256, 257, 511, 512, 513, 1000, 1024, 1025, 2049, 4096, 4097, 5000]


@pytest.mark.parametrize("M", SIZES)
@pytest.mark.parametrize("k", [1, 7, 8, 9, 16, 17, 25, 32, 33, 64, 65, 100])
def test_sizes(M, k):
    assert_same_neighbours(torch.randn(2, M, 4), k)


@pytest.mark.parametrize("d", [1, 2, 3, 5, 6, 7, 8, 9, 20])
def test_widths(d):
    for M in (40, 300, 2000):
        assert_same_neighbours(torch.randn(2, M, d), 10)


CLOUDS = {
    "lattice": lambda S, M: torch.randint(0, 4, (S, M, 3)).float(),
    "one place": lambda S, M: torch.zeros(S, M, 4),
    "half at 0": lambda S, M: torch.where(torch.rand(S, M, 1) < 0.5, 0.0, torch.randn(S, M, 4)),
    "far rows": lambda S, M: torch.where(torch.rand(S, M, 1) < 0.01, 1e3, 1.0) * torch.randn(S, M, 4),
    "far away": lambda S, M: 4e6 + torch.randn(S, M, 4),
    "overflowing": lambda S, M: 1e25 * torch.randn(S, M, 4),
    "denormal": lambda S, M: 1e-40 * torch.randn(S, M, 4),
    "NaN": lambda S, M: torch.where(torch.rand(S, M, 1) < 0.1, float("nan"), torch.randn(S, M, 4)),
    "infinite": lambda S, M: torch.where(torch.rand(S, M, 4) < 0.05, float("inf"), torch.randn(S, M, 4)),
    "all NaN": lambda S, M: torch.full((S, M, 4), float("nan")),
    "negative zeros": lambda S, M: -torch.zeros(S, M, 2),
}


@pytest.mark.parametrize("cloud", CLOUDS)
@pytest.mark.parametrize("M", [1, 40, 300, 1500, 4500])
@pytest.mark.parametrize("k", [8, 40, 70])
def test_clouds(cloud, M, k):
    assert_same_neighbours(CLOUDS[cloud](2, M), k)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("M", [40, 300, 2000])
def test_dtypes(dtype, M):
    for k in (8, 30, 70):
        assert_same_neighbours(torch.randn(2, M, 4).to(dtype), k)


@pytest.mark.parametrize("M", [1, 40, 300, 1500, 4500])
def test_options(M):
    x, mask = torch.randn(2, M, 4), torch.rand(2, M) < 0.5
    for k in (5, 30, 70):
        assert_same_neighbours(x, k, exclude_self=True)
        assert_same_neighbours(x, k, max_radius=0.6)
        assert_same_neighbours(x, k, exclude_self=True, max_radius=0.6, mask=mask)
        assert_same_neighbours(torch.where(mask[..., None], x, float("nan")), k, mask=mask)
        assert_same_neighbours(x, k, queries=torch.randn(2, 77, 4))
        assert_same_neighbours(x, k, queries=torch.randn(2, 700, 4), max_radius=1.0, mask=mask)


@pytest.mark.parametrize("seed", range(20))
def test_ragged(seed):
    """Sets of 0 to 4000 rows in one call, cross-set too."""
    generator = torch.Generator().manual_seed(seed)
    splits = splits_of(log_normal_sizes(30, generator))
    N = int(splits[-1])
    x, mask = torch.randn(N, 4, generator=generator), torch.rand(N, generator=generator) < 0.7
    assert_same_neighbours(x, 8, splits=splits)
    assert_same_neighbours(x, 8, splits=splits, mask=mask, exclude_self=True, max_radius=0.8)
    others = splits_of(log_normal_sizes(30, generator, 500))
    queries = torch.randn(int(others[-1]), 4, generator=generator)
    assert_same_neighbours(x, 8, splits=splits, queries=queries, query_splits=others)


def test_ten_thousand_random_cases():
    """Small sets of every kind: 100 calls of 100 sets each, of which some are ragged."""
    generator = torch.Generator().manual_seed(5)

    def below(n):
        return int(torch.randint(0, n, (), generator=generator))

    for turn in range(100):
        d, k = 1 + below(9), 1 + below(40)
        if turn % 2:
            splits = splits_of(torch.randint(0, 200, (100,), generator=generator))
            x = torch.randn(int(splits[-1]), d, generator=generator)
        else:
            splits, x = None, torch.randn(100, below(400), d, generator=generator)
        if turn % 3 == 0:
            x = (2 * x).round() / 2
        assert_same_neighbours(x, k, splits=splits, exclude_self=bool(turn % 5 == 0))


def test_one_large_set():
    """100,000 rows, and the hardest to cut into tiles: a line, and clusters."""
    line = torch.rand(100_000, 1)
    clusters = torch.randn(50, 3)[torch.randint(0, 50, (100_000,))] + 0.01 * torch.randn(100_000, 3)
    for x in (torch.randn(100_000, 4), line, clusters):
        neighbours, distance2 = muvox.knn(x.cuda(), 8)
        rows = torch.randint(0, len(x), (200,))
        exact = (x[rows, None].double() - x[None].double()).square().sum(-1).topk(8, largest=False).values
        torch.testing.assert_close(distance2[rows].cpu().double(), exact, rtol=1e-5, atol=0)
        assert (neighbours[:, 0].cpu() <= torch.arange(len(x))).all()  # itself, or a lower row in the same place


@pytest.mark.parametrize("N", [131_071, 131_072, 131_073])
@pytest.mark.parametrize("k", [31, 32, 33, 63, 64, 65])
def test_last_rows_of_one_large_set(N, k):
    """Round the edges of all tiles there are: the last eight rows have the neighbours that the CPU finds."""
    x = torch.randn(N, 8)
    got, right = muvox.knn(x.cuda(), k), muvox.knn(x, k, queries=x[-8:])
    assert same_bits(got[0][-8:], right[0]) and same_bits(got[1][-8:], right[1])


def test_many_sets():
    """70,000 sets: more than a grid's second dimension."""
    assert_same_neighbours(torch.randn(70_000, 6, 4), 4)
    splits = splits_of(torch.randint(0, 9, (70_000,)))
    assert_same_neighbours(torch.randn(int(splits[-1]), 4), 4, splits=splits)


def test_more_than_two_billion_results():
    """25 million rows with 96 neighbours each; the last sets are right."""
    S, M, k = 500_000, 50, 96
    if torch.cuda.mem_get_info()[0] < 40e9:
        pytest.skip("needs 40 GB of device memory")
    x = torch.randn(S, M, 4, device="cuda")
    neighbours, distance2 = muvox.knn(x, k)
    assert neighbours.numel() > 2**31
    right = muvox.knn(x[-3:].cpu(), k)
    assert same_bits(neighbours[-3:], right[0]) and same_bits(distance2[-3:], right[1])


@pytest.mark.parametrize("splits", [[0, 5, 3, 8], [1, 5, 8], [0, 5, 7], [0, 5, 9], [0, -2, 8], [0, 2**40, 8]])
def test_wrong_splits(splits, monkeypatch):
    """Refused where they are looked at, and no memory fault where not; the next call is right."""
    x, wrong = torch.randn(8, 3), torch.tensor(splits)
    muvox.knn(x.cuda(), 2, splits=wrong.cuda())
    torch.cuda.synchronize()
    monkeypatch.setenv("MUVOX_CHECK", "1")
    with pytest.raises(RuntimeError, match="muvox::knn: splits"):
        muvox.knn(x.cuda(), 2, splits=wrong.cuda())
    assert_same_neighbours(x, 2, splits=torch.tensor([0, 3, 8]))
