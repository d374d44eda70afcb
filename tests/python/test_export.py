"""torch.export with dynamic sizes, traces with free sizes, compilation without recompilations, flop counts."""

import copy
import io

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import muvox
from op_calls import FORMS, OPS, arguments, as_tuple, assert_equal, backward_arguments, operator

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*is_fx_tracing:UserWarning")


class Network(torch.nn.Module):
    """All operators on sets with all their options, from coordinates and features to a number for each row and one for each
    set."""

    def forward(self, x, f, mask, splits=None):
        s = dict(splits=splits)
        neighbours, distance2 = muvox.knn(x, 3, **s, exclude_self=True, max_radius=3.0, mask=mask)
        near = torch.exp(-distance2)  # 0 in places without a neighbour
        m = muvox.aggregate(f, neighbours, near, **s, aggregates=("sum", "absmax"))
        w = torch.sigmoid(f[..., 0])
        g = muvox.gravnet(x, f, 4, **s, scale=0.5, mean="k", mask=mask, row_weights=w)
        out, lse = muvox.attention(g, m, f, **s, bias=x[..., 0], mask=mask, row_weights=w, return_lse=True)
        offset = muvox.offset_attention(out, f, g, **s, mask=mask)
        rows = torch.cat([offset, lse.masked_fill(~mask, 0)[..., None]], -1)
        return rows, muvox.pool(rows, **s, mask=mask, row_weights=w)


class Voxels(torch.nn.Module):
    """The operators on voxels."""

    def forward(self, points, feats):
        index, weights = muvox.trilinear_weights(points, (-2.0, -2.0, -2.0), (1.5, 1.5, 1.5), (3, 3, 3))
        means = muvox.voxelize(feats, index[:, 0], size=27)
        return muvox.devoxelize(means, index, weights)


class Queries(torch.nn.Module):
    """Search in other rows, and leading dimensions."""

    def forward(self, x, queries):
        return muvox.knn(x, 3, queries=queries, return_counts=True)


def sets(rows, count=3, ragged=False):
    """Inputs of Network; the ragged ones in three sets of which one is empty."""
    shape = (rows,) if ragged else (count, rows)
    x, f = torch.randn(*shape, 3), torch.randn(*shape, 4)
    inputs = x.requires_grad_(), f.requires_grad_(), torch.rand(shape) < 0.8
    return (*inputs, torch.tensor([0, rows // 2, rows // 2, rows])) if ragged else inputs


def points(rows):
    return torch.randn(rows, 3).requires_grad_(), torch.randn(rows, 5).requires_grad_()


def queries(rows, volumes=2):
    return torch.randn(volumes, 3, rows, 2), torch.randn(volumes, 3, rows + 1, 2)


def run(function, inputs):
    """Results, and the gradients of the inputs for results that have one."""
    results = as_tuple(function(*inputs))
    leaves = [x for x in inputs if x.requires_grad]
    if not leaves:
        return results
    return *results, *torch.autograd.grad(results, leaves, [torch.ones_like(r) for r in results])


CASES = {
    "uniform": (Network(), sets),
    "ragged": (Network(), lambda rows: sets(rows, ragged=True)),
    "voxels": (Voxels(), points),
    "queries": (Queries(), queries),
}
each_case = pytest.mark.parametrize("case", CASES)
SIZES = [9, 0, 1, 2, 5]


# Traces


@pytest.mark.filterwarnings("error::torch.jit.TracerWarning")
@each_case
@pytest.mark.parametrize("training", [False, True])
def test_trace_has_free_sizes(case, training):
    """Traced at 5 rows, with gradients or without; run at others, 0 and 1 too, forward and backward."""
    module, make = CASES[case]
    with torch.set_grad_enabled(training):
        traced = torch.jit.trace(module, make(5), check_trace=False)
    for rows in SIZES:
        inputs = make(rows)
        assert_equal(run(traced, inputs), run(module, inputs))


def test_trace_has_free_numbers_of_sets():
    traced = torch.jit.trace(Network(), sets(5), check_trace=False)
    for rows, count in ((4, 7), (3, 1), (2, 0), (0, 4)):
        inputs = sets(rows, count)
        assert_equal(run(traced, inputs), run(Network(), inputs))
    traced = torch.jit.trace(Network(), sets(5, ragged=True), check_trace=False)
    for splits in ([0, 9], [0, 1, 2, 3, 9, 9]):
        inputs = *sets(9, ragged=True)[:3], torch.tensor(splits)
        assert_equal(run(traced, inputs), run(Network(), inputs))


def test_trace_has_free_leading_dimensions():
    def function(x):
        rows = muvox.gravnet(x, x, 3)
        return rows, muvox.pool(rows), muvox.trilinear_weights(x, (0, 0, 0), (1, 1, 1), (2, 2, 2))[1]

    traced = torch.jit.trace(function, (torch.randn(2, 3, 5, 3),), check_trace=False)
    for shape in ((4, 1, 7, 3), (1, 2, 0, 3), (0, 2, 1, 3)):
        x = torch.randn(shape)
        assert_equal(traced(x), function(x))


def test_saved_trace():
    traced = torch.jit.trace(Network(), sets(5), check_trace=False)
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    loaded = torch.jit.load(file)
    inputs = sets(8)
    assert_equal(run(loaded, inputs), run(Network(), inputs))


# torch.export


def dynamic(inputs):
    """Every size but the widths is dynamic."""
    return tuple(
        {dim: torch.export.Dim.DYNAMIC for dim in range(x.dim() if x.dim() < 2 or x.dtype == torch.bool else x.dim() - 1)}
        for x in inputs
    )


@each_case
@pytest.mark.parametrize("strict", [False, True])
def test_export_has_dynamic_sizes(case, strict):
    module, make = CASES[case]
    inputs = make(5)
    shapes = dynamic(inputs)
    program = torch.export.export(module, inputs, dynamic_shapes=shapes, strict=strict)
    names = [str(node.target) for node in program.graph.nodes if "muvox" in str(node.target)]
    assert names
    for rows in (9, 2, 7):
        inputs = make(rows)
        assert_equal(program.module()(*inputs), module(*inputs))


def test_saved_export():
    inputs = sets(5)
    program = torch.export.export(Network(), inputs, dynamic_shapes=dynamic(inputs))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    inputs = sets(8, 4)
    assert_equal(loaded(*inputs), Network()(*inputs))


@pytest.mark.parametrize("op", OPS)
def test_export_of_each_operator_keeps_it_whole(op):
    class One(torch.nn.Module):
        def forward(self, *tensors):
            given = iter(tensors)
            return operator(op)(*(next(given) if isinstance(x, torch.Tensor) else x for x in inputs))

    inputs = arguments(op, **FORMS["ragged with options"], requires_grad=False)
    tensors = tuple(x for x in inputs if isinstance(x, torch.Tensor))
    program = torch.export.export(One(), tensors).run_decompositions()
    called = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert called.count(operator(op)) == 1
    assert_equal(as_tuple(program.module()(*tensors)), as_tuple(operator(op)(*inputs)))


# torch.compile


def assert_compiled(compiled, module, inputs):
    for a, b in zip(run(compiled, inputs), run(module, inputs)):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


@each_case
def test_compiled_once_for_all_sizes(case):
    """Sizes of at least 2, forward and backward, without a break."""
    torch._dynamo.reset()
    module, make = CASES[case]
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    assert_compiled(compiled, module, make(6))
    with torch.compiler.set_stance("fail_on_recompile"):
        for rows in (8, 11, 2):
            assert_compiled(compiled, module, make(rows))


@pytest.mark.parametrize("case", ["uniform", "ragged"])
def test_recompiled_once_when_sizes_first_change(case):
    """Without dynamic=True the second size makes them all free."""
    torch._dynamo.reset()
    module, make = CASES[case]
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for rows in (6, 8):
        assert_compiled(compiled, module, make(rows))
    with torch.compiler.set_stance("fail_on_recompile"):
        for rows in (11, 5):
            assert_compiled(compiled, module, make(rows))


def test_copied_module():
    module, make = CASES["uniform"]
    inputs = make(4)
    assert_equal(run(copy.deepcopy(module), inputs), run(module, inputs))


# Flop counts


def count(op, inputs):
    with FlopCounterMode(display=False) as counter:
        operator(op)(*inputs)
    return counter.get_total_flops()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("form", FORMS)
def test_every_operator_has_a_flop_count(op, form):
    """Forward and backward; with real, fake and meta tensors."""
    for name, inputs in (
        (op, arguments(op, **FORMS[form], requires_grad=False)),
        (op + "_backward", backward_arguments(op, **FORMS[form])),
    ):
        assert count(name, inputs) > 0
        meta = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in inputs]
        assert count(name, meta) > 0
        with FakeTensorMode() as mode:
            fake = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in inputs]
            assert count(name, fake) > 0


def test_flop_counts():
    """Of attention they are those of torch's products; ragged sets count their own pairs only."""
    q, k, v = torch.randn(2, 7, 3), torch.randn(2, 7, 3), torch.randn(2, 7, 5)
    with FlopCounterMode(display=False) as counter:
        (q @ k.mT).softmax(-1) @ v
    with FlopCounterMode(display=False) as ours:
        muvox.attention(q, k, v)
    assert ours.get_total_flops() == counter.get_total_flops() == 2 * 2 * 7 * 7 * (3 + 5)
    splits = torch.tensor([0, 2, 2, 7])
    with FlopCounterMode(display=False) as ragged:
        muvox.attention(q[0], k[0], v[0], splits=splits)
    assert ragged.get_total_flops() == 2 * (4 + 25) * (3 + 5)
    with FlopCounterMode(display=False) as cross:
        muvox.knn(q[0], 2, splits=splits, queries=k[0, :4], query_splits=torch.tensor([0, 1, 1, 4]))
    assert cross.get_total_flops() == 3 * 3 * (1 * 2 + 3 * 5)


def test_flop_count_of_training():
    x = torch.randn(2, 7, 3, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        muvox.attention(x, x, x).sum().backward()
    counts = counter.get_flop_counts()["Global"]
    assert counts[torch.ops.muvox.attention] == 2 * 2 * 49 * 6
    assert counts[torch.ops.muvox.attention_backward] == 2 * 2 * 49 * 15
