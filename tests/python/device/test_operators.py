"""Every operator with CUDA kernels: as on the CPU, forward and backward, and the same bits every time."""

import op_calls
import pytest
import torch

import muvox
from device.compare import OPS, arguments, assert_close, both_ways, on_device

pytestmark = pytest.mark.cuda
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("rows", [1, 6, 40, 300])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", op_calls.FORMS)
@pytest.mark.parametrize("op", OPS)
def test_as_on_the_cpu(op, form, dtype, rows):
    inputs = arguments(op, form, rows, dtype)
    right = op_calls.operator(op)(*inputs)
    assert_close(op_calls.operator(op)(*on_device(inputs)), right)
    backward = op_calls.OPS[op][1](inputs, right)
    function = op_calls.operator(f"{op}_backward")
    assert_close(function(*on_device(backward)), function(*backward))


@pytest.mark.parametrize("form", op_calls.FORMS)
@pytest.mark.parametrize("op", OPS)
def test_every_run_gives_the_same_bits(op, form):
    """100 runs of both directions."""
    inputs, into = both_ways(op, form, 300)
    forward, backward = op_calls.operator(op), op_calls.operator(f"{op}_backward")
    first, second = forward(*inputs), backward(*into)
    for _ in range(100):
        op_calls.assert_equal(op_calls.as_tuple(forward(*inputs)), op_calls.as_tuple(first))
        op_calls.assert_equal(op_calls.as_tuple(backward(*into)), op_calls.as_tuple(second))


@pytest.mark.parametrize("op", OPS)
def test_layouts(op):
    """Columns that are not next to each other, a set for all, and gradients of stride 0."""
    inputs, into = both_ways(op, "uniform", 40)
    right = op_calls.as_tuple(op_calls.operator(op)(*inputs))
    turned = [x.mT.contiguous().mT if isinstance(x, torch.Tensor) and x.dim() > 1 else x for x in inputs]
    op_calls.assert_equal(op_calls.as_tuple(op_calls.operator(op)(*turned)), right)
    function = op_calls.operator(f"{op}_backward")
    into[0] = into[0].flatten()[:1].expand(into[0].shape)
    strided = function(*into)
    into[0] = into[0].contiguous()
    op_calls.assert_equal(op_calls.as_tuple(strided), op_calls.as_tuple(function(*into)))


@pytest.mark.parametrize("op", OPS)
def test_opcheck(op):
    torch.library.opcheck(op_calls.operator(op), on_device(op_calls.arguments(op, ragged=True, options=True)))


@pytest.mark.parametrize("op", OPS)
def test_side_stream(op):
    """Work goes to the current stream: what it reads is made there, after a long wait."""
    inputs = on_device(arguments(op, "uniform with options", 300))
    right = op_calls.as_tuple(op_calls.operator(op)(*inputs))
    stream = torch.cuda.Stream()
    late = [torch.empty_like(x) if isinstance(x, torch.Tensor) else x for x in inputs]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        for to, x in zip(late, inputs):
            if isinstance(x, torch.Tensor):
                to.copy_(x)
        got = op_calls.as_tuple(op_calls.operator(op)(*late))
    stream.synchronize()
    op_calls.assert_equal(got, right)


@pytest.mark.parametrize("form", ["uniform", "ragged with options"])
@pytest.mark.parametrize("op", OPS)
def test_graph(op, form):
    """Captured once, replayed with other inputs."""
    torch.manual_seed(1)
    inputs, into = both_ways(op, form, 300)
    torch.manual_seed(2)
    others, other_into = both_ways(op, form, 300)
    forward, backward = op_calls.operator(op), op_calls.operator(f"{op}_backward")

    def run(arguments, into):
        return *op_calls.as_tuple(forward(*arguments)), *op_calls.as_tuple(backward(*into))

    run(inputs, into)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(inputs, into)
    for to, x in zip((*inputs, *into), (*others, *other_into)):
        if isinstance(x, torch.Tensor):
            to.copy_(x)
    graph.replay()
    torch.cuda.synchronize()
    op_calls.assert_equal(captured, run(others, other_into))


@pytest.mark.parametrize("op", OPS)
def test_no_call_waits_for_the_device(op):
    """A call returns while the device is still busy with what came before it, forward and backward."""
    inputs, into = both_ways(op, "ragged with options", 40)
    for function, arguments_ in ((op, inputs), (f"{op}_backward", into)):
        op_calls.operator(function)(*arguments_)
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)
        before = torch.cuda.Event()
        before.record()
        op_calls.operator(function)(*arguments_)
        assert not before.query()
        torch.cuda.synchronize()


@pytest.mark.parametrize("op", OPS)
def test_tensors_on_two_devices_are_refused(op):
    """The message names the operator; the next call is right."""
    inputs = on_device(arguments(op, "uniform", 6))
    place = next(n for n, x in enumerate(inputs[1:], 1) if isinstance(x, torch.Tensor) and x.numel()) if op not in (
        "knn", "pool", "trilinear_weights") else None
    if place is not None:
        wrong = [x.cpu() if n == place else x for n, x in enumerate(inputs)]
        with pytest.raises(RuntimeError, match=f"muvox::{op}: .*on another device"):
            op_calls.operator(op)(*wrong)
    op_calls.operator(op)(*inputs)
    torch.cuda.synchronize()


def test_memory_of_the_workspace_is_torchs():
    """What an operator needs beside its results shows in torch's statistics, and is given back."""
    x = torch.randn(64, 1000, 4, device="cuda")
    muvox.knn(x, 8)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = muvox.knn(x, 8, return_counts=True)
    kept = sum(t.numel() * t.element_size() for t in results)
    assert torch.cuda.memory_allocated() - before <= kept + 4 * 512
    # 4 coordinates, a row number and a place in the order for each row, and boxes.
    assert torch.cuda.max_memory_allocated() - before <= kept + 28 * x.shape[0] * x.shape[1] + (1 << 20)


LINEAR = {
    "knn": lambda x, f, near: muvox.knn(x, 8)[1],
    "knn of queries": lambda x, f, near: muvox.knn(x, 8, queries=f[:, :4])[1],
    "gravnet": lambda x, f, near: muvox.gravnet(x, f, 8),
    "aggregate": lambda x, f, near: muvox.aggregate(f, near, x.repeat(1, 2)),
}


@pytest.mark.parametrize("name", LINEAR)
def test_no_pair_tensor(name):
    """Forward and backward of one large set need what is proportional to N · (k + F), 2 kB a row; pairs take 400 kB."""
    N = 100_000
    x, f = (torch.randn(N, width, device="cuda", requires_grad=True) for width in (4, 8))
    near = torch.randint(0, N, (N, 8), dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = LINEAR[name](x, f, near)
    torch.autograd.grad(out, [x, f], torch.ones_like(out), materialize_grads=True)
    assert torch.cuda.max_memory_allocated() - before < 2000 * N
