"""Norms: LUMIN's running sums, the running norm that is sound at any batch, their state, chunks and processes."""

import copy
import os
import socket

import pytest
import torch
import torch.multiprocessing as multiprocessing

import muvox.nn as mnn
from muvox.nn import norms

DOUBLE = torch.float64
SHAPES = {1: (6, 3, 4), 2: (6, 3, 4, 2), 3: (6, 3, 2, 2, 2)}


def lumin_norm(dimension, **arguments):
    return getattr(mnn, f"RunningBatchNorm{dimension}d")(3, **arguments).double()


def reference(state, x, weight, bias, mom=0.1, n_warmup=20, eps=1e-5):
    """One training step of the running sums, written out; `state` is [sums, squares, count, samples]."""
    dims = [d for d in range(x.dim()) if d != 1]
    share = 1 - (1 - mom) / (x.shape[0] - 1 + eps) ** 0.5
    new = [x.sum(dims), (x * x).sum(dims), x.numel() / x.shape[1]]
    for place in range(3):
        state[place] = state[place] + share * (new[place] - state[place])
    state[3] += x.shape[0]
    mean = state[0] / state[2]
    variance = state[1] / state[2] - mean * mean
    if state[3] < n_warmup:
        variance = variance.clamp_min(0.01)
    shape = [1, -1] + [1] * (x.dim() - 2)
    factor = weight.flatten() / (variance + eps).sqrt()
    return x * factor.view(shape) + (bias.flatten() - mean * factor).view(shape)


@pytest.mark.parametrize("dimension", [1, 2, 3])
def test_running_batch_norm_over_several_steps(dimension):
    """Outputs, gradients through this batch's share, and state, over the warm-up and beyond."""
    norm = lumin_norm(dimension)
    with torch.no_grad():
        norm.weight.copy_(torch.randn_like(norm.weight))
        norm.bias.copy_(torch.randn_like(norm.bias))
    state = [torch.zeros(3, dtype=DOUBLE), torch.zeros(3, dtype=DOUBLE), 0.0, 0]
    for step in range(5):
        scale = torch.tensor([3.0, 0.02, 1.0], dtype=DOUBLE).view(-1, *[1] * dimension)  # the second below the clamp
        x = (torch.randn(SHAPES[dimension], dtype=DOUBLE) * scale + step).requires_grad_()
        out, want = norm(x), reference([*state], x, norm.weight, norm.bias)
        torch.testing.assert_close(out, want, rtol=1e-9, atol=1e-9)
        inputs = [x, norm.weight, norm.bias]
        weights = torch.randn_like(out)
        for got, expected in zip(*(torch.autograd.grad((y * weights).sum(), inputs) for y in (out, want))):
            torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-8)
        reference(state, x.detach(), norm.weight, norm.bias)
        for got, expected in zip((norm.sums, norm.sqrs, norm.count, norm.batch), state):
            torch.testing.assert_close(got.flatten(), torch.as_tensor(expected, dtype=DOUBLE).view(-1))
    assert not norm.sums.requires_grad  # no graph stays on the state
    norm.eval()
    before = copy.deepcopy(norm.state_dict())
    norm(x)
    assert all(torch.equal(value, before[key]) for key, value in norm.state_dict().items())


def test_running_batch_norm_without_affine_and_of_two_dimensions():
    norm, other = lumin_norm(1, affine=False), lumin_norm(1)
    assert set(norm.state_dict()) == {"sums", "sqrs", "batch", "count"}
    x = torch.randn(6, 3, dtype=DOUBLE)
    torch.testing.assert_close(norm(x), other(x[..., None])[..., 0])


@pytest.mark.parametrize("norm", [lumin_norm(2), mnn.RunningNorm(3).double()])
def test_before_the_first_batch_a_norm_leaves_its_input(norm):
    x = torch.randn(2, 3, 4, 3, dtype=DOUBLE)
    torch.testing.assert_close(norm.eval()(x), x, rtol=1e-4, atol=1e-4)


def test_squares_in_chunks(monkeypatch):
    x = torch.randn(5, 7, 3, dtype=DOUBLE, requires_grad=True)
    centre = torch.randn(3, dtype=DOUBLE)
    want = (x - centre).square().sum((0, 1))
    monkeypatch.setattr(norms, "CHUNK", 6)
    got = norms.column_squares(x, centre)
    torch.testing.assert_close(got, want)
    weights = torch.randn(3, dtype=DOUBLE)
    gradients = [torch.autograd.grad((y * weights).sum(), x)[0] for y in (got, want)]
    torch.testing.assert_close(*gradients)
    assert torch.autograd.gradgradcheck(lambda t: norms.column_squares(t, centre), x)


@pytest.mark.parametrize("norm", [mnn.RunningBatchNorm2d(3), mnn.RunningNorm(3)], ids=lambda norm: type(norm).__name__)
def test_state_stays_float(norm):
    """Sums beyond 65,504 in a half model: finite, and as in float."""
    x = torch.randn(4, 3, 300, 3) * 30 + 5
    norm = copy.deepcopy(norm)
    half = copy.deepcopy(norm).half()
    state = dict(half.named_buffers())
    assert state and all(not b.is_floating_point() or b.dtype == torch.float32 for b in state.values())
    out, want = half(x.half()), norm(x)
    assert out.dtype == torch.float16 and out.isfinite().all()
    torch.testing.assert_close(out.float(), want, rtol=1e-2, atol=2e-2)
    assert all(b.dtype == torch.float64 for b in half.double().buffers() if b.is_floating_point())


# RunningNorm


def test_running_norm_of_one_batch():
    """The first batch is taken whole: mean 0 and variance 1 afterwards."""
    norm, x = mnn.RunningNorm(3).double(), torch.randn(1, 1, 50, 3, dtype=DOUBLE) * 4 + 100
    out = norm(x).reshape(-1, 3)
    torch.testing.assert_close(out.mean(0), torch.zeros(3, dtype=DOUBLE), rtol=0, atol=1e-9)
    torch.testing.assert_close(out.var(0, correction=0), torch.ones(3, dtype=DOUBLE), rtol=1e-5, atol=0)


def test_running_norm_tends_to_the_statistics_of_all_batches():
    """Batches of a single row: the running values come from the rows' spread, which no batch has in itself."""
    norm = mnn.RunningNorm(2, momentum=0.01).double()
    for _ in range(100):
        norm(torch.randn(1, 2, dtype=DOUBLE) * torch.tensor([1.0, 5.0]) + torch.tensor([0.0, 7.0]))
    rows = torch.tensor([[0.0, 7.0], [1.0, 5.0]], dtype=DOUBLE)
    assert (norm.running_mean - rows[0]).abs().max() < 1.5
    torch.testing.assert_close(norm.running_var.sqrt(), rows[1], rtol=0.3, atol=0)


def test_running_norm_weighs_early_batches_alike():
    """Until 1/t falls to the momentum the running values are those of all rows so far."""
    norm, x = mnn.RunningNorm(3, momentum=0.1).double(), torch.randn(8, 20, 3, dtype=DOUBLE) * 2 + 3
    for batch in x:
        norm(batch)
    torch.testing.assert_close(norm.running_mean, x.mean((0, 1)))
    torch.testing.assert_close(norm.running_var, x.reshape(-1, 3).var(0, correction=0))


def test_running_norm_gradients():
    norm = mnn.RunningNorm(3).double()
    norm(torch.randn(5, 3, dtype=DOUBLE))
    norm(torch.randn(5, 3, dtype=DOUBLE))
    x = torch.randn(4, 2, 3, dtype=DOUBLE, requires_grad=True)
    parameters = [torch.randn(3, dtype=DOUBLE, requires_grad=True) for _ in range(2)]

    def forward(x, weight, bias):
        return torch.func.functional_call(copy.deepcopy(norm), {"weight": weight, "bias": bias}, (x,))

    assert torch.autograd.gradcheck(forward, (x, *parameters))


@pytest.mark.parametrize("norm", [lumin_norm(1), mnn.RunningNorm(4).double()], ids=lambda norm: type(norm).__name__)
def test_two_steps_before_one_backward(norm):
    """The state changes in place; the first step's gradient does not notice."""
    x = torch.randn(6, 3, 4, dtype=DOUBLE, requires_grad=True)
    norm = copy.deepcopy(norm)
    other = copy.deepcopy(norm)
    (want,) = torch.autograd.grad(other(x).square().sum(), x)
    first = norm(x).square().sum()
    norm(x)
    torch.testing.assert_close(torch.autograd.grad(first, x)[0], want)


def test_running_norm_takes_an_empty_batch():
    norm = mnn.RunningNorm(3)
    norm(torch.randn(5, 3))
    before = copy.deepcopy(norm.state_dict())
    assert norm(torch.zeros(0, 3)).shape == (0, 3)
    assert all(torch.equal(value, before[key]) for key, value in norm.state_dict().items())


def test_wrong_number_of_channels():
    with pytest.raises(ValueError, match=r"RunningNorm: x has shape \(2, 4\)"):
        mnn.RunningNorm(3)(torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"RunningNorm: x has shape \(3,\)"):
        mnn.RunningNorm(3)(torch.zeros(3))
    with pytest.raises(ValueError, match=r"RunningBatchNorm2d: x has shape \(2, 4, 3, 3\)"):
        mnn.RunningBatchNorm2d(3)(torch.zeros(2, 4, 3, 3))


def process(rank, port, x, results):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    norm = mnn.RunningNorm(3).double()
    part = (x[:5] if rank == 0 else x[5:]).clone().requires_grad_()
    for _ in range(2):
        out = norm(part)
    (gradient,) = torch.autograd.grad((out * torch.arange(3.0)).square().sum(), part)
    results.put((rank, out.detach().numpy(), gradient.numpy(), norm.running_var.numpy()))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    os._exit(0)  # gloo's threads now and then abort a process that ends in the ordinary way, after all is done


def test_running_norm_is_synchronised_over_processes():
    """Two processes with 5 and 2 rows as one process with 7: outputs, gradients and state."""
    x = torch.randn(7, 3, dtype=DOUBLE)
    norm, whole = mnn.RunningNorm(3).double(), x.clone().requires_grad_()
    for _ in range(2):
        out = norm(whole)
    (gradient,) = torch.autograd.grad((out * torch.arange(3.0)).square().sum(), whole)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn = multiprocessing.get_context("spawn")
    results = spawn.SimpleQueue()
    workers = [spawn.Process(target=process, args=(rank, port, x, results)) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
        assert worker.exitcode == 0
    for rank, one, its_gradient, variance in sorted((results.get() for _ in workers), key=lambda r: r[0]):
        rows = slice(0, 5) if rank == 0 else slice(5, 7)
        torch.testing.assert_close(torch.from_numpy(one), out[rows].detach())
        torch.testing.assert_close(torch.from_numpy(its_gradient), gradient[rows])
        torch.testing.assert_close(torch.from_numpy(variance), norm.running_var)
