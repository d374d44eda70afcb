"""Rows 38-40: Jacobians by vmap and torch.func, compilation, scripts, traces, export."""

import io
import warnings

import pytest
import torch
import torch._dynamo.testing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import muvox
import op_calls
from cases.calls import CALLS, K, POINTS, SETS, assert_same, gradients, ragged, rows, run

each_call = pytest.mark.parametrize("name", CALLS)
_WARNINGS = "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:.*is_fx_tracing:UserWarning"
pytestmark = pytest.mark.filterwarnings(*_WARNINGS)  # of torch, about its own ways


# vmap and functorch: 6 muons, 8 outputs


def network(name, width=8):
    """One operator and a layer, from (x, f) of 6 muons to `width` numbers."""
    x, f = (t.detach() for t in rows(1, 6, dtype=torch.double))
    weights = [torch.randn(y.numel(), width, dtype=torch.double) for y in CALLS[name](x, f)]

    def function(x, f):
        return sum(y.flatten() @ w for y, w in zip(CALLS[name](x, f), weights))

    return function, x, f


def row_by_row(function, x, f):
    """The Jacobian, one call of autograd for each output."""
    x, f = x.clone().requires_grad_(), f.clone().requires_grad_()
    y = function(x, f)
    rows_of_eye = torch.eye(len(y), dtype=torch.double)
    found = [torch.autograd.grad(y, [x, f], e, retain_graph=True, materialize_grads=True) for e in rows_of_eye]
    return [torch.stack(column) for column in zip(*found)]


def assert_close(found, known):
    assert any(k.any() for k in known)
    for a, b in zip(found, known):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@each_call
def test_jacobian_by_vmap_over_autograd(name):
    """Row 38: one graph, eight directions at once, as TomOpt computes the Jacobian of its inference."""
    function, x, f = network(name)
    known = row_by_row(function, x, f)
    x, f = x.requires_grad_(), f.requires_grad_()
    y = function(x, f)

    def back(e):
        return torch.autograd.grad(y, [x, f], e, retain_graph=True, materialize_grads=True)

    assert_close(torch.vmap(back)(torch.eye(8, dtype=torch.double)), known)
    batched = torch.autograd.grad(
        y, [x, f], torch.eye(8, dtype=torch.double), is_grads_batched=True, retain_graph=True, allow_unused=True
    )
    assert_close([torch.zeros_like(k) if g is None else g for g, k in zip(batched, known)], known)
    assert_close(torch.vmap(back, chunk_size=3)(torch.eye(8, dtype=torch.double)), known)


@each_call
def test_jacobian_by_functorch(name):
    """Row 38: jacrev, grad of one output, vmap of vjp."""
    function, x, f = network(name)
    known = row_by_row(function, x, f)
    assert_close(torch.func.jacrev(function, argnums=(0, 1))(x, f), known)
    assert_close(torch.func.grad(lambda x, f: function(x, f)[3], argnums=(0, 1))(x, f), [k[3] for k in known])
    y, back = torch.func.vjp(function, x, f)
    assert torch.equal(y, function(x, f))
    assert_close(torch.func.vmap(back)(torch.eye(8, dtype=torch.double)), known)


@each_call
def test_per_sample_gradients(name):
    """Row 38: vmap of grad over volumes."""
    function, x, f = network(name)
    samples = [torch.stack([t, 0.5 * t, -0.7 * t]) for t in (x, f)]
    slopes = torch.func.grad(lambda x, f: function(x, f)[2], (0, 1))
    values, found = torch.vmap(lambda x, f: (function(x, f), slopes(x, f)))(*samples)
    for b, (x, f) in enumerate(zip(*samples)):
        torch.testing.assert_close(values[b], function(x, f), rtol=1e-12, atol=1e-12)
        assert_close([g[b] for g in found], [k[2] for k in row_by_row(function, x, f)])


@each_call
def test_forward_mode_gives_a_clear_error(name):
    """Row 38: never silent zeros."""
    function, x, f = network(name)
    with pytest.raises(NotImplementedError, match="muvox.*forward-mode derivatives are not supported"):
        torch.func.jacfwd(function, argnums=(0, 1))(x, f)


# Compile


@each_call
def test_compiled_without_breaks_for_changing_sizes(name):
    """Row 39: numbers of voxels and muons change, results and gradients are those of eager mode. One
    recompilation at most."""
    torch._dynamo.reset()
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(CALLS[name], fullgraph=True, dynamic=True, backend=graphs)
    for S, M in ((3, 6), (2, 9), (5, 3)):
        x, f = rows(S, M)
        found, known = run(compiled, x, f), run(CALLS[name], x, f)
        for a, b in zip(found, known):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert graphs.frame_count <= 2


@pytest.mark.parametrize("use_sa", [False, True])
def test_compiled_gravnet_layer_for_changing_sizes(use_sa):
    """Row 39: the reported layer, uniform and ragged; fewer muons than neighbours too. One recompilation at most."""
    layer = muvox.nn.GravNetLayer(7, 3, 8, 5, ["mean", "max"], 10, use_sa=use_sa)
    for ragged_sets in (False, True):
        torch._dynamo.reset()
        graphs = torch._dynamo.testing.EagerAndRecordGraphs()
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=graphs)
        for S, M in ((3, 6), (2, 9), (5, 3), (4, 11)):
            inputs = [torch.randn(S, M, 7)]
            if ragged_sets:
                inputs = [inputs[0].flatten(0, 1), torch.arange(S + 1) * M]
            torch.testing.assert_close(compiled(*inputs), layer(*inputs), rtol=1e-5, atol=1e-5)
        assert len(graphs.graphs) <= 2
        # The layer is the fused operator, as in eager mode: nothing is gathered over neighbours.
        called = str(graphs.graphs[0].graph)
        assert ("muvox.neighbour_attention" if use_sa else "muvox.gravnet") in called and "muvox.knn" not in called


@pytest.mark.parametrize("name", [name for name in SETS if "knn" in name or name == "gravnet"])
def test_shapes_do_not_depend_on_data(name):
    """Row 39: k > M, with symbolic sizes: the fake kernels give k columns and no guard on M, forward and backward."""
    shapes, real = ShapeEnv(), torch.randn(7, 3, 4)
    with FakeTensorMode(shape_env=shapes, static_shapes=False) as mode:
        free = [DimDynamic.DYNAMIC, DimDynamic.DYNAMIC, DimDynamic.STATIC]
        x = mode.from_tensor(real, symbolic_context=StatelessSymbolicContext(free))
        f = torch.cat([x, x[..., :1]], -1)
        M = x.shape[1]
        assert isinstance(M, torch.SymInt)
        neighbours, distance2, counts = muvox.knn(x, 64, return_counts=True)
        out = CALLS[name](x.requires_grad_(), f.requires_grad_())[0]
        found = gradients(out, [x, f])
    assert neighbours.shape[2] == distance2.shape[2] == 64 and counts.dim() == 2
    assert str(neighbours.shape[1]) == str(out.shape[1]) == str(M) and not shapes.guards
    assert [str(g.shape) for g in found] == [str(t.shape) for t in (x, f)]
    assert CALLS[name](*rows(7, 3))[0].shape == (7, 3, K if "knn" in name else 20)


@each_call
def test_opcheck_where_k_exceeds_the_sets(name):
    """Row 39: torch's own check of schema, gradient and fake kernel, on sets of 3 rows for 4 neighbours."""
    op = name.split(",")[0].split(" ")[0]
    least = 6 if op == "aggregate" else 3  # whose neighbours are given, up to row 5
    inputs = op_calls.arguments(op, ragged=False, options="," in name or " " in name, rows=least)
    torch.library.opcheck(op_calls.operator(op), inputs)


# Scripts, traces, export


class Module(torch.nn.Module):
    def __init__(self, name):
        super().__init__()
        self.call = CALLS[name]

    def forward(self, x, f):
        return self.call(x, f)


def script(op):
    """Source of a function of all arguments that calls the operator."""
    schema = op_calls.operator(op)._schema
    types = {"Tensor": "Tensor", "SymInt": "int", "int": "int", "float": "float", "bool": "bool"}
    arguments = ", ".join(f"{a.name}: {types[str(a.type)]}" for a in schema.arguments)
    names = ", ".join(a.name for a in schema.arguments)
    return f"def function({arguments}):\n    return torch.ops.muvox.{op}({names})\n"


@pytest.mark.parametrize("op", op_calls.OPS)
@pytest.mark.parametrize("form", op_calls.FORMS)
def test_scripted(op, form):
    """Row 40: a TorchScript function with the operator, in training."""
    inputs = op_calls.arguments(op, **op_calls.FORMS[form])
    function = torch.jit.CompilationUnit(script(op)).function
    assert f"muvox::{op}" in str(function.graph)
    op_calls.assert_equal(op_calls.run(function, inputs), op_calls.run(op_calls.operator(op), inputs))


def by_hand(x: torch.Tensor, f: torch.Tensor, splits: torch.Tensor) -> torch.Tensor:
    """As a user would script it."""
    none = torch.empty(0, dtype=torch.int64)
    out = torch.ops.muvox.gravnet(x, f, splits, none, none, 4, 10.0, 0x21, False, False, float("inf"), True)[0]
    return torch.ops.muvox.pool(out, splits, none, none, 0x1, True)[0]


def test_saved_script():
    """Row 40: saved, loaded, run at other sizes, differentiated."""
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(by_hand), file)
    file.seek(0)
    loaded = torch.jit.load(file)
    x, f = rows(9)
    splits = ragged(4, 0, 5)
    right = muvox.pool(muvox.gravnet(x, f, 4, splits=splits), splits=splits, aggregates="mean")
    out = loaded(x, f, splits)
    assert_same((out, *gradients(out, [x, f])), (right, *gradients(right, [x, f])))


def test_wrappers_are_traced_not_scripted():
    """Row 40: the Python wrappers take names and options that TorchScript does not know: an error at once."""
    with pytest.raises((RuntimeError, torch.jit.frontend.FrontendError)):
        torch.jit.script(muvox.gravnet)


@each_call
def test_traced_for_other_sizes(name):
    """Row 40: traced at 5 muons, run at others, forward and backward."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # of the shapes that the calls of points look at
        traced = torch.jit.trace(CALLS[name], rows(2, 5), check_trace=False)
    for shape in ((2, 5),) if name in POINTS else ((2, 5), (3, 9), (1, 2), (0, 3)):
        x, f = rows(*shape)
        assert_same(run(traced, x, f), run(CALLS[name], x, f))


@each_call
def test_exported_for_other_sizes(name):
    """Row 40: torch.export with free numbers of voxels and muons; the operator stays whole."""
    x, f = (t.detach() for t in rows(3, 5))
    free = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    program = torch.export.export(Module(name), (x, f), dynamic_shapes=(free, free))
    called = [str(node.target) for node in program.graph.nodes]
    operator = "voxelize_by_size" if name == "voxelize" else name.split(",")[0].split(" ")[0]
    assert f"muvox.{operator}.default" in called
    for shape in ((3, 5), (2, 9), (4, 2)):
        inputs = [t.detach() for t in rows(*shape)]
        assert_same(program.module()(*inputs), CALLS[name](*inputs))


@each_call
def test_onnx_refuses_by_name(name):
    """Row 40: ONNX has no such operators, and the exporter says which one; nothing is written."""
    inputs = tuple(t.detach() for t in rows(2, 5))
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(torch.onnx.errors.UnsupportedOperatorError, match="muvox::"):
            torch.onnx.export(Module(name), inputs, file, dynamo=False)
    assert not file.getvalue()
