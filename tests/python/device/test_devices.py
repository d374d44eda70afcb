"""Two devices: tensors on one that is not the current one, and on both at once."""

import op_calls
import pytest
import torch
from op_calls import as_tuple, operator

import muvox
from device.compare import OPS, both_ways, on_device, same_bits

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
each_op = pytest.mark.parametrize("op", OPS)


def run(op, inputs, into):
    return *as_tuple(operator(op)(*inputs)), *as_tuple(operator(f"{op}_backward")(*into))


def assert_same_on(device, found, right):
    for a, b in zip(found, right, strict=True):
        assert a.device == torch.device("cuda", device) and same_bits(a, b)


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("form", op_calls.FORMS)
@each_op
def test_tensors_on_another_device_than_the_current_one(op, form, current):
    """Forward and backward run where the tensors are, with the same bits; the current device stays, its memory too."""
    other = 1 - current
    here = both_ways(op, form, 300, f"cuda:{current}")
    there = [on_device(arguments, f"cuda:{other}") for arguments in here]
    with torch.cuda.device(current):
        right = run(op, *here)
        torch.cuda.reset_peak_memory_stats(current)
        allocated = torch.cuda.memory_allocated(current)
        found = run(op, *there)
        assert torch.cuda.current_device() == current
        assert torch.cuda.max_memory_allocated(current) == allocated
        assert_same_on(other, found, right)


@each_op
def test_side_stream_of_another_device(op):
    """The stream is the tensors' device's current one: what the call reads is made there, after a long wait."""
    inputs, into = both_ways(op, "ragged with options", 300, "cuda:1")
    right = run(op, inputs, into)
    late = [[torch.empty_like(x) if isinstance(x, torch.Tensor) else x for x in given] for given in (inputs, into)]
    torch.cuda.synchronize(1)
    stream = torch.cuda.Stream(device=1)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        for to, x in zip((*late[0], *late[1]), (*inputs, *into)):
            if isinstance(x, torch.Tensor):
                to.copy_(x)
        with torch.cuda.device(0):
            found = run(op, *late)
            assert torch.cuda.current_device() == 0
    stream.synchronize()
    assert_same_on(1, found, right)


@each_op
def test_autograd_on_another_device(op):
    """Backward comes from autograd's thread of that device."""
    torch.cuda.set_device(0)
    results = []
    for device in (0, 1):
        torch.manual_seed(3)
        inputs = [
            x.detach().to(f"cuda:{device}").requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x
            for x in op_calls.arguments(op, ragged=True, options=True, rows=60)
        ]
        results.append([t.detach() for t in op_calls.run(operator(op), inputs)])
        assert torch.cuda.current_device() == 0
    assert_same_on(1, results[1], results[0])


@each_op
def test_tensors_on_two_devices_are_refused_by_name(op):
    """Each argument in turn, forward and backward; the next call is right."""
    for name, inputs in zip((op, f"{op}_backward"), both_ways(op, "ragged with options", 40, "cuda:0")):
        right, schema = as_tuple(operator(name)(*inputs)), operator(name)._schema.arguments
        places = [place for place, x in enumerate(inputs) if isinstance(x, torch.Tensor) and x.numel()]
        for place in places[1:]:
            mixed = [x.to("cuda:1") if n == place else x for n, x in enumerate(inputs)]
            with pytest.raises(RuntimeError, match=rf"muvox::{op}: {schema[place].name} is on another device"):
                operator(name)(*mixed)
        op_calls.assert_equal(as_tuple(operator(name)(*inputs)), right)


x, f, splits = torch.randn(8, 3), torch.randn(8, 5), torch.tensor([0, 3, 8])
MIXED = {
    "gravnet: feats": lambda a, b: muvox.gravnet(x.to(a), f.to(b), 3),
    "gravnet: splits": lambda a, b: muvox.gravnet(x.to(a), f.to(a), 3, splits=splits.to(b)),
    "knn: queries": lambda a, b: muvox.knn(x.to(a), 3, queries=x.to(b)),
    "aggregate: neighbours": lambda a, b: muvox.aggregate(f.to(a), x.int().to(b), x.to(a)),
    "pool: splits": lambda a, b: muvox.pool(f.to(a), splits=splits.to(b)),
    "voxelize: index": lambda a, b: muvox.voxelize(f.to(a), torch.arange(8, device=b), size=3),
    "devoxelize: weights": lambda a, b: muvox.devoxelize(f.to(a), splits[None].to(a), x[:1].to(b)),
}


@pytest.mark.parametrize("argument", MIXED)
def test_wrappers_name_the_argument_and_its_device(argument):
    with pytest.raises(ValueError, match=f"muvox.{argument} is on cuda:1 and .* on cuda:0"):
        MIXED[argument]("cuda:0", "cuda:1")
