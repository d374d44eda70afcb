"""Row 34: the same bits in every run."""

import pytest
import torch

from cases.calls import CALLS, SETS, assert_same, ragged, rows, run


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def lattice(*shape, dtype):
    """Rows of which many pick the same neighbour, at the same distance."""
    x, f = rows(*shape, dtype=dtype)
    return torch.randint(0, 3, x.shape).to(dtype).requires_grad_(), f


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.half, torch.float])
@pytest.mark.parametrize("threads", [1, 2])
def test_every_run_gives_the_same_bits(name, dtype, threads, deterministic):
    """Row 34: 30 repeats, forward and backward."""
    x, f = lattice(4, 60, dtype=dtype)
    torch.set_num_threads(threads)
    first = run(CALLS[name], x, f)
    for _ in range(30):
        assert_same(run(CALLS[name], x, f), first)


@pytest.mark.parametrize("name", CALLS)
def test_threads_do_not_change_bits(name, deterministic):
    """Row 34: one thread, two, three."""
    x, f = lattice(7, 130, dtype=torch.float)
    first = run(CALLS[name], x, f)
    for threads in (2, 3):
        torch.set_num_threads(threads)
        assert_same(run(CALLS[name], x, f), first)


@pytest.mark.parametrize("name", SETS)
def test_other_sets_do_not_change_bits(name, deterministic):
    """Row 34: a set alone, among others, and with splits."""
    x, f = lattice(5, 33, dtype=torch.float)
    together = SETS[name](x, f)
    alone = SETS[name](x[2:3], f[2:3])
    assert_same([y[2:3] for y in together], alone)
    packed = SETS[name](x.flatten(0, 1), f.flatten(0, 1), splits=ragged(*[33] * 5))
    assert_same([y.flatten(0, 1) if name != "pool" else y for y in together], packed)
