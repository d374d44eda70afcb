"""Whole networks: one compiled graph for all sizes, Jacobians of many rows from one graph and their memory."""

import copy
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import muvox
import muvox.nn as mnn
from op_calls import in_fresh_process

# Sets and rows of a set; then volumes, voxels and muons. There are also fewer rows than neighbours to search for. Sizes
# of the first call differ from all others there: those equal by chance torch takes for one until they are not.
SIZES = [(5, 11), (3, 4), (2, 7), (2, 2), (7, 40)]
GRIDS = [(2, 8, 11), (3, 8, 4), (3, 5, 4), (4, 6, 7), (2, 3, 2), (5, 27, 3)]


def assert_compiles_once(function, calls, compare):
    """The compiled function equals the eager one in all calls, is one graph each time, and never compiled again."""
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=graphs)
    for number, make in enumerate(calls):
        compare(compiled, function, make)
        if number == 0:
            first = graphs.frame_count  # 2 where torch starts afresh to take a float as a constant
    assert first <= 2 and graphs.frame_count == first


# VoxelNet


def centres(voxels):
    index = np.stack(np.meshgrid(*[np.arange(3)] * 3, indexing="ij"), -1).reshape(-1, 3)[:voxels]
    return torch.from_numpy((index + 0.5) * 0.2)


def training_step(function, net, x, splits, places):
    """Output, gradients of input and parameters, and the buffers after it; twice, so that the state counts."""
    results = []
    for _ in range(2):
        x = x.clone().requires_grad_()
        out = function(net, x, splits, places)
        results += [out.detach(), *torch.autograd.grad(out.square().sum(), [x, *net.parameters()])]
    return [*results, *net.buffers()]


@pytest.mark.parametrize("norm, ragged", [pytest.param("lumin", False, marks=pytest.mark.slow), ("batch", True)])
def test_voxelnet_is_compiled_once(norm, ragged):
    """Forward and backward in training with other numbers of volumes, voxels and muons each time."""
    torch.manual_seed(1)
    widths = dict(n_lr=6, n_out=10, n_final=8, sa_width=3, sa_width_out=4, k_mu=5, k_vox=4)
    net = mnn.VoxelNet(centres(8), norm=norm, **widths).double()

    def inputs(volumes, voxels, muons):
        x, splits = torch.randn(volumes, voxels, muons, 9, dtype=torch.float64), None
        if ragged:
            ends = (muons * torch.arange(1, volumes * voxels + 1)).roll(1) // 2 * 2  # uneven sets
            ends[0] = 0
            splits = torch.cat([ends.cummax(0).values, torch.tensor([volumes * voxels * muons])])
            x = x.reshape(-1, 9)
        return x, splits, centres(voxels)

    def compare(compiled, function, make):
        given = make()
        want, got = (training_step(f, copy.deepcopy(net), *given) for f in (function, compiled))
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)

    def function(net, x, splits, places):
        return net(x, splits, places)

    # Floats of modules are constants from the start: torch finds out only at the end of a first compilation.
    with torch._dynamo.config.patch(specialize_float=True):
        assert_compiles_once(function, [partial(inputs, *sizes) for sizes in GRIDS], compare)


@pytest.mark.parametrize("norm", [mnn.RunningNorm, mnn.RunningBatchNorm1d])
def test_gradient_through_compiled_norm_sees_the_state_before_its_update(norm):
    """Buffers are overwritten in the forward pass; the backward pass is not to compute with what they hold then."""
    torch._dynamo.reset()
    x = torch.randn(30, 4, dtype=torch.float64)
    weight = torch.linspace(0, 1, 4, dtype=torch.float64)
    found = []
    for compiled in (False, True):
        module = norm(4).double()
        function = torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module
        for factor in (0.3, 0.5):
            y = (factor * x).requires_grad_()
            out = function(torch.tanh(y))
            found += [out.detach(), *torch.autograd.grad((out**3 * weight).sum(), [y, *module.parameters()])]
        found += module.buffers()
    half = len(found) // 2
    for one, other in zip(found[half:], found[:half], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


# Each operator

OPERATORS = {
    "knn": lambda x, f, **s: (muvox.knn(x, 6, **s, return_counts=True)),
    "gravnet": lambda x, f, **s: muvox.gravnet(x, f, 6, **s),
    "aggregate": lambda x, f, **s: muvox.aggregate(f, muvox.knn(x.detach(), 6, **s)[0], x[..., :1] * f[..., :6], **s),
    "attention": lambda x, f, **s: muvox.attention(x, x.flip(-1), f, **s, return_lse=True),
    "offset_attention": lambda x, f, **s: muvox.offset_attention(x, x.flip(-1), f, **s),
    "neighbour_attention": lambda x, f, **s: muvox.neighbour_attention(x, f, 6, LAYERS, **s),
    "neighbour_attention, offset": lambda x, f, **s: muvox.neighbour_attention(x, f, 6, LAYERS, **s, offset=True),
    "pool": lambda x, f, **s: muvox.pool(torch.cat([x, f], -1), **s, aggregates=("mean", "max", "absmax", "sum")),
    "voxelize": lambda x, f, **s: muvox.voxelize(f.flatten(0, -2), cells(x), size=27),
    "devoxelize": lambda x, f, **s: muvox.devoxelize(f.flatten(0, -2), *corners(x)),
    "trilinear_weights": lambda x, f, **s: corners(x),
}
LAYERS = [torch.nn.functional.normalize(torch.arange(n * m, dtype=torch.float64).view(n, m).sin()).squeeze(-1)
          for n, m in ((2, 7), (2, 1), (2, 7), (2, 1), (7, 7), (7, 1), (7, 7), (7, 1))]


def corners(x):
    return muvox.trilinear_weights(x.flatten(0, -2), (-2, -2, -2), (1.5, 1.5, 1.5), (3, 3, 3))


def cells(x):
    return corners(x)[0][:, 0]


def results_and_gradients(function, x, f, splits):
    """All results, and the gradients of what they depend on."""
    x, f = x.clone().requires_grad_(), f.clone().requires_grad_()
    results = function(x, f, splits=splits)
    results = results if isinstance(results, tuple) else (results,)
    total = sum(r.masked_fill(r.isinf(), 0).square().sum() for r in results if r.requires_grad)
    gradients = torch.autograd.grad(total, (x, f), allow_unused=True)
    return *results, *(g for g in gradients if g is not None)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("name", OPERATORS)
def test_operator_is_compiled_once(name, ragged):
    def inputs(sets, rows):
        shape = (sets * rows,) if ragged else (sets, rows)
        x, f = (torch.randn(*shape, width, dtype=torch.float64) for width in (3, 7))
        splits = torch.cat([rows * torch.arange(sets) // 2 * 2, torch.tensor([sets * rows])]) if ragged else None
        return x, f, splits

    def compare(compiled, function, make):
        given = make()
        want, got = (results_and_gradients(f, *given) for f in (function, compiled))
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)

    assert_compiles_once(OPERATORS[name], [partial(inputs, *sizes) for sizes in SIZES], compare)


# Jacobians, as TomOpt takes them: predictions of a volume to what the detectors measured


class Predictor(torch.nn.Module):
    """Muons (volumes, muons, features) -> predictions (volumes, 8)."""

    def __init__(self, n_fpv, n_out=20, **arguments):
        super().__init__()
        extract = dict(cat_means=True, f_slr_depth=2, n_s=3, n_lr=12, k=6, f_out_depth=1, n_out=[n_out, n_out])
        self.gnn = mnn.GravNet(None, n_fpv, act="swish", **extract, **arguments)
        collapse = dict(flatten=False, n_sa_layers=1, sa_width=6, f_final_outs=[12], act="swish")
        self.collapse = mnn.GraphCollapser(None, 2 * n_out, **collapse)
        self.head = torch.nn.Linear(24, 8)

    def forward(self, x):
        return self.head(self.collapse(self.gnn(x)))


@pytest.mark.parametrize("use_sa", [False, True])
@pytest.mark.parametrize("shape", [(20, 30), (60, 10), (6, 100)])
def test_jacobian_of_eight_outputs_over_600_inputs(shape, use_sa):
    torch.manual_seed(3)
    net = Predictor(shape[1], use_sa=use_sa).double()
    x = torch.randn(1, *shape, dtype=torch.float64, requires_grad=True)
    y = net(x)[0]
    rows = torch.stack([torch.autograd.grad(value, x, retain_graph=True)[0] for value in y])
    assert rows.shape == (8, 1, *shape) and (rows.flatten(1) != 0).float().mean() > 0.9
    eye = torch.eye(8, dtype=torch.float64)
    for _ in range(2):  # the graph stays
        (found,) = torch.vmap(lambda v: torch.autograd.grad(y, x, v, retain_graph=True))(eye)
        torch.testing.assert_close(found, rows, rtol=1e-10, atol=1e-13)
    by_transform = torch.func.jacrev(lambda x: net(x)[0])(x.detach())
    torch.testing.assert_close(by_transform, rows, rtol=1e-10, atol=1e-13)


def test_a_thousand_rows_of_a_jacobian_on_one_graph():
    """125 volumes of 6 muons, 8 predictions each: the derivative of every prediction, all at once."""
    torch.manual_seed(3)
    net = Predictor(10).double()
    x = torch.randn(125, 6, 10, dtype=torch.float64, requires_grad=True)
    y = net(x)
    eye = torch.eye(1000, dtype=torch.float64)
    (found,) = torch.vmap(lambda v: torch.autograd.grad(y.flatten(), x, v, retain_graph=True))(eye)
    found = found.view(125, 8, 125, 6, 10)
    own = found.diagonal(dim1=0, dim2=2).movedim(-1, 0)  # of each volume to its own muons
    assert found.count_nonzero() == own.count_nonzero() > 0.9 * own.numel()
    for output in range(8):
        (want,) = torch.autograd.grad(y[:, output].sum(), x, retain_graph=True)
        torch.testing.assert_close(own[:, output], want, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(
    "volumes, muons, rows, use_sa",
    [(100, 60, 32, False), (1, 2000, 64, True), pytest.param(20, 60, 128, True, marks=pytest.mark.slow)],
)
def test_memory_of_many_rows_of_a_jacobian(volumes, muons, rows, use_sa):
    """No row has a copy of what the forward pass saved.

    A row takes what one backward pass by itself has in use at its peak, half as much again where results of several
    calls are put side by side; the process twice that at most, and 32 MB for all. A copy of the saved tensors for each
    row would add more than four times as much."""
    program = f"""
import sys, torch
sys.path.insert(0, {str(Path(__file__).parent)!r})
from torch.profiler import ProfilerActivity, profile
from test_network import Predictor
torch.set_num_threads(1)

def status(field):
    for line in open("/proc/self/status"):
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024

def peak(function):
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        function()
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    used = torch.tensor([e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]).cumsum(0)
    return used.max().item()

net = Predictor(10, use_sa={use_sa})
x, kept = torch.randn({volumes}, {muons}, 10, requires_grad=True), dict()

def keep(t):
    kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
    return t

with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
    y = net(x).flatten()
cotangents = torch.randn({rows}, len(y))

def row(v):
    return torch.autograd.grad(y, x, v, retain_graph=True)[0]

row(cotangents[0])
before = status("VmRSS")
torch.vmap(row)(cotangents)
growth = status("VmHWM") - before
print(growth, peak(lambda: torch.vmap(row)(cotangents)), peak(lambda: row(cotangents[0])), sum(kept.values()))
"""
    growth, together, one, saved = map(int, in_fresh_process(program).split())
    assert saved > 4 * one and rows * saved > 150e6, "copies would not be seen"
    assert together <= 1.5 * rows * one
    assert growth <= 2 * rows * one + 32e6
