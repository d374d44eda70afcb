"""torch.func and vmap over the operators, forward and backward: equal to one call after the other, without copies."""

import pytest
import torch

import muvox
from op_calls import (
    FORMS,
    OPS,
    arguments,
    as_tuple,
    assert_equal,
    backward_arguments,
    in_fresh_process,
    operator,
)

each_op = pytest.mark.parametrize("op", OPS)
each_form = pytest.mark.parametrize("form", FORMS)


def tensors_of(inputs):
    """Places of the tensors that are given."""
    return [place for place, x in enumerate(inputs) if isinstance(x, torch.Tensor) and x.numel()]


def batch(x, size, dim):
    """So many variants of x side by side; the first is x itself."""
    if x.is_floating_point():
        variants = [x.detach() * (1 - 0.1 * b) for b in range(size)]
    elif x.dtype == torch.bool:
        variants = [x.roll(b, -1) for b in range(size)]
    else:
        variants = [x for _ in range(size)]
    return torch.stack(variants, dim)


def check(name, inputs, places, size, dim=0):
    """The operator with the tensors at these places batched, under vmap and in a loop."""
    dims = [dim if place in places else None for place in range(len(inputs))]
    batched = [batch(x, size, dim) if d is not None else x for x, d in zip(inputs, dims)]
    results = as_tuple(torch.vmap(operator(name), in_dims=tuple(dims))(*batched))
    rows = [
        as_tuple(operator(name)(*(x if d is None else x.select(d, b) for x, d in zip(batched, dims))))
        for b in range(size)
    ]
    for found, known in zip(results, zip(*rows)):
        if known[0].shape == (0,):  # not asked for
            assert found.numel() == 0
        else:
            torch.testing.assert_close(found, torch.stack(known), rtol=0, atol=0, equal_nan=True)


def subsets(inputs, splits):
    """Everything but splits; each tensor alone; all but the last."""
    places = [place for place in tensors_of(inputs) if place not in splits]
    return [places, *([place] for place in places), *([places[:-1]] if len(places) > 2 else [])]


def splits_of(name):
    return [i for i, x in enumerate(operator(name)._schema.arguments) if x.name in ("splits", "query_splits")]


# 2 is less than the sets there are and 5 more: the rules go through what there is less of.
@each_op
@each_form
@pytest.mark.parametrize("size", [1, 2, 5])
def test_forward(op, form, size):
    inputs = arguments(op, **FORMS[form], requires_grad=False)
    for places in subsets(inputs, splits_of(op)):
        check(op, inputs, places, size)


@each_op
@each_form
@pytest.mark.parametrize("size", [1, 2, 5])
def test_backward(op, form, size):
    inputs = backward_arguments(op, **FORMS[form])
    for places in subsets(inputs, splits_of(op + "_backward")):
        check(op + "_backward", inputs, places, size)


@each_op
def test_one_set(op):
    """What is not batched is one set seen by all."""
    forward = arguments(op, **FORMS["uniform with options"], requires_grad=False)
    backward = backward_arguments(op, **FORMS["uniform with options"])
    for name, inputs in ((op, forward), (op + "_backward", backward)):
        if op not in ("voxelize", "devoxelize", "trilinear_weights"):
            inputs = [x[:1] if isinstance(x, torch.Tensor) and x.dim() > 1 else x for x in inputs]
        for places in subsets(inputs, splits_of(name)):
            check(name, inputs, places, 4)


@each_op
def test_other_dimension_of_the_batch(op):
    inputs = arguments(op, **FORMS["uniform"], requires_grad=False)
    check(op, inputs, tensors_of(inputs), 3, dim=1)
    check(op, inputs, tensors_of(inputs)[:1], 3, dim=-1)


@pytest.mark.parametrize("op", ["gravnet", "pool"])
def test_batched_splits(op):
    inputs = arguments(op, **FORMS["ragged"], requires_grad=False)
    (place,) = splits_of(op)
    splits = torch.tensor([[0, 6, 6, 18], [0, 1, 17, 18], [0, 0, 0, 18]])
    dims = tuple(0 if i == place else None for i in range(len(inputs)))
    found = torch.vmap(operator(op), in_dims=dims)(*inputs[:place], splits, *inputs[place + 1 :])
    for b in range(3):
        known = operator(op)(*inputs[:place], splits[b], *inputs[place + 1 :])
        assert_equal([x[b] for x in found], known)


@each_op
def test_empty_batch(op):
    inputs = arguments(op, **FORMS["uniform"], requires_grad=False)
    places = tensors_of(inputs)
    dims = tuple(0 if place in places else None for place in range(len(inputs)))
    none = [x[None][:0] if d == 0 else x for x, d in zip(inputs, dims)]
    found = as_tuple(torch.vmap(operator(op), in_dims=dims)(*none))
    for x, y in zip(found, as_tuple(operator(op)(*inputs))):
        assert x.shape == (0, *y.shape) and x.dtype == y.dtype


@pytest.mark.parametrize("ragged", [False, True])
def test_empty_sets(ragged):
    x = torch.randn(4, 0, 3) if ragged else torch.randn(4, 2, 0, 3)
    splits = torch.tensor([0, 0, 0]) if ragged else None
    assert torch.vmap(lambda x: muvox.gravnet(x, x, 3, splits=splits))(x).shape == (*x.shape[:-1], 6)
    assert torch.vmap(lambda x: muvox.pool(x, splits=splits))(x).shape == (4, 2, 6)
    assert torch.vmap(lambda x: muvox.attention(x, x, x, splits=splits))(x).shape == x.shape


def test_vmap_of_vmap():
    x, f = torch.randn(2, 5, 3, 6, 2), torch.randn(5, 3, 6, 4)
    found = torch.vmap(torch.vmap(lambda x, f: muvox.gravnet(x, f, 3)), in_dims=(0, None))(x, f)
    expected = torch.stack([muvox.gravnet(y, f, 3) for y in x])
    assert torch.equal(found, expected)


# Gradients


def network(x, f, splits=None):
    """All operators on sets, from coordinates and features to one number for each set and column."""
    neighbours, distance2 = muvox.knn(x, 3, splits=splits, exclude_self=True)
    distance2 = distance2.masked_fill(neighbours < 0, 0)
    m = muvox.aggregate(f, neighbours, torch.exp(-distance2), splits=splits, aggregates=("sum", "absmax"))
    weights = torch.sigmoid(f[..., 0])
    g = muvox.gravnet(x, f, 4, splits=splits, scale=0.5, row_weights=weights)
    out, lse = muvox.attention(g, m, f, splits=splits, bias=x[..., 0], return_lse=True)
    offset = muvox.offset_attention(out, f, g, splits=splits)
    return muvox.pool(torch.cat([offset, lse[..., None]], -1), splits=splits, row_weights=weights)


def voxels(x, f, splits=None):
    """The other three operators."""
    points = x.flatten(0, -2)
    index, weights = muvox.trilinear_weights(points, (-2, -2, -2), (1.3, 1.3, 1.3), (3, 3, 3))
    means = muvox.voxelize(f.flatten(0, -2), index[:, 0].clamp(min=0), size=27)
    return muvox.devoxelize(means, index, weights)[::4]


def problem(ragged=False, sets=3):
    shape = (6 * sets,) if ragged else (sets, 6)
    x, f = (torch.randn(*shape, width, dtype=torch.float64, requires_grad=True) for width in (3, 4))
    return x, f, torch.tensor([0, 6, 6, 6 * sets]) if ragged else None


def rows_of_jacobian(y, inputs):
    """One call of autograd for each output."""
    rows = [torch.autograd.grad(y, inputs, v.reshape(y.shape), retain_graph=True) for v in torch.eye(y.numel()).double()]
    return [torch.stack(column) for column in zip(*rows)]


def assert_close(found, known):
    for a, b in zip(found, known):
        assert torch.allclose(a.reshape(b.shape), b, rtol=1e-11, atol=1e-12)


NETWORKS = {
    "sets": (network, {}),
    "one set": (network, {"sets": 1}),
    "ragged": (network, {"ragged": True}),
    "voxels": (voxels, {}),
}
each_network = pytest.mark.parametrize("name", NETWORKS)


@each_network
@pytest.mark.parametrize("way", ["vmap", "is_grads_batched"])
def test_vmap_over_autograd_grad(name, way):
    """A Jacobian from one graph, as TomOpt computes it."""
    function, how = NETWORKS[name]
    *inputs, splits = problem(**how)
    y = function(*inputs, splits).flatten()
    eye = torch.eye(len(y), dtype=torch.float64)
    if way == "vmap":
        found = torch.vmap(lambda v: torch.autograd.grad(y, inputs, v, retain_graph=True))(eye)
    else:
        found = torch.autograd.grad(y, inputs, eye, retain_graph=True, is_grads_batched=True)
    assert_close(found, rows_of_jacobian(y, inputs))


@each_network
def test_jacrev(name):
    function, how = NETWORKS[name]
    *inputs, splits = problem(**how)
    y = function(*inputs, splits)
    found = torch.func.jacrev(lambda *i: function(*i, splits), argnums=(0, 1))(*(x.detach() for x in inputs))
    assert_close(found, [g.reshape(*y.shape, *x.shape) for g, x in zip(rows_of_jacobian(y, inputs), inputs)])


@each_network
def test_grad(name):
    function, how = NETWORKS[name]
    *inputs, splits = problem(**how)
    known = torch.autograd.grad(function(*inputs, splits).square().sum(), inputs)
    found = torch.func.grad(lambda *i: function(*i, splits).square().sum(), argnums=(0, 1))(*inputs)
    assert_close(found, known)


@each_network
def test_vmap_of_grad_and_grad_of_vmap(name):
    function, how = NETWORKS[name]
    batches = [problem(**how) for _ in range(3)]
    splits = batches[0][-1]
    inputs = [torch.stack([b[i].detach() for b in batches]) for i in range(2)]
    known = [torch.stack(g) for g in zip(*(
        torch.autograd.grad(function(x, f, splits).square().sum(), (x, f)) for x, f, _ in batches
    ))]

    def loss(x, f):
        return function(x, f, splits).square().sum()

    assert_close(torch.vmap(torch.func.grad(loss, argnums=(0, 1)))(*inputs), known)
    assert_close(torch.func.grad(lambda *i: torch.vmap(loss)(*i).sum(), argnums=(0, 1))(*inputs), known)
    leaves = [x.clone().requires_grad_() for x in inputs]
    assert_close(torch.autograd.grad(torch.vmap(loss)(*leaves).sum(), leaves), known)


@pytest.mark.parametrize("levels", [1, 2])
def test_no_grad_inside_a_transform(levels):
    """Holds for all levels, as for torch's own operators."""
    x = torch.randn(3, 6, 2, dtype=torch.float64)

    def loss(x):
        with torch.no_grad():
            constant = muvox.pool(x, aggregates="mean")
        return (constant[:, None] * x.square()).sum()

    def expected(x):
        with torch.no_grad():
            constant = x.mean(1)
        return (constant[:, None] * x.square()).sum()

    def derivative(loss):
        for _ in range(levels):
            loss = lambda x, inner=torch.func.grad(loss): inner(x).sum()  # noqa: E731
        return torch.func.grad(loss)(x)

    assert torch.allclose(derivative(loss), derivative(expected), rtol=1e-12)


def test_ensemble_of_networks():
    """One input, seen by several networks whose parameters are batched."""
    x = torch.randn(3, 6, 5, dtype=torch.float64)
    layers = [torch.nn.Linear(5, 8).double() for _ in range(4)]
    parameters, buffers = torch.func.stack_module_state(layers)

    def run(parameters, x):
        h = torch.func.functional_call(layers[0], (parameters, {}), x)
        return muvox.pool(muvox.gravnet(x[..., :2], h, 3), aggregates=("mean", "sum"))

    found = torch.vmap(run, in_dims=(0, None))(parameters, x)
    for one, layer in zip(found, layers):
        assert torch.allclose(one, run(dict(layer.named_parameters()), x), rtol=1e-12)
    grads = torch.vmap(torch.func.grad(lambda p, x: run(p, x).sum()), in_dims=(0, None))(parameters, x)
    for b, layer in enumerate(layers):
        known = torch.autograd.grad(run(dict(layer.named_parameters()), x).sum(), layer.weight)[0]
        assert torch.allclose(grads["weight"][b], known, rtol=1e-11, atol=1e-12)


def test_jacobian_of_eight_outputs_over_600_inputs():
    x = torch.randn(1, 100, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(12, 8, dtype=torch.float64)

    def run(x):
        h = muvox.gravnet(x[..., :3], x, 10)
        return muvox.pool(muvox.attention(h, h, h), aggregates="mean") @ weight

    y = run(x).flatten()
    known = rows_of_jacobian(y, (x,))[0]
    assert known.shape == (8, 1, 100, 6)
    found = torch.vmap(lambda v: torch.autograd.grad(y, x, v, retain_graph=True)[0])(torch.eye(8, dtype=torch.float64))
    assert_close([found, torch.func.jacrev(run)(x.detach())], [known, known])


# Second derivatives


def second_arguments(op, form):
    """Of muvox::op_second, for random gradients of the gradients."""
    inputs = backward_arguments(op, **FORMS[form])
    return *inputs, *(torch.randn_like(g) for g in as_tuple(operator(op + "_backward")(*inputs)))


SECOND = pytest.mark.parametrize("op", [op for op in OPS if op != "voxelize"])  # which is its own second derivative


@SECOND
@each_form
def test_opcheck_of_second_derivatives(op, form):
    torch.library.opcheck(operator(op + "_second"), second_arguments(op, form))


@SECOND
@pytest.mark.parametrize("form", ["uniform with options", "ragged"])
def test_second_derivative_under_vmap(op, form):
    name, inputs = op + "_second", second_arguments(op, form)
    check(name, inputs, [place for place in tensors_of(inputs) if place not in splits_of(name)], 3)
    check(name, inputs, [len(inputs) - 1], 3)


@each_network
def test_hessian(name):
    function, how = NETWORKS[name]
    x, f, splits = problem(**how)

    def loss(x):
        return function(x, f.detach(), splits).square().sum()

    known = torch.autograd.functional.hessian(loss, x)
    x = x.detach()
    sums = torch.func.grad(lambda x: torch.func.grad(loss)(x).sum())(x)
    assert known.any() and torch.allclose(sums, known.flatten(0, x.dim() - 1).sum(0), rtol=1e-9, atol=1e-10)
    for found in (
        torch.func.jacrev(torch.func.grad(loss))(x),
        torch.func.jacrev(torch.func.jacrev(loss))(x),
        torch.autograd.functional.hessian(loss, x, vectorize=True),
    ):
        assert torch.allclose(found, known, rtol=1e-9, atol=1e-10)


def test_gradient_of_a_jacobian():
    """From a Jacobian by vmap with create_graph, which a design is optimised for."""
    x, f, _ = problem()

    def penalty(jacobian):
        return torch.autograd.grad(jacobian.square().sum(), (x, f), retain_graph=True)

    y = network(x, f).flatten()
    rows = torch.eye(len(y), dtype=torch.float64)
    found = torch.vmap(lambda v: torch.autograd.grad(y, x, v, retain_graph=True, create_graph=True)[0])(rows)
    known = torch.stack([torch.autograd.grad(y, x, v, create_graph=True)[0] for v in rows])
    assert_close([found, *penalty(found)], [known, *penalty(known)])


def test_third_derivatives_are_refused():
    """Never silent zeros."""
    x = torch.randn(3, 6, 2)
    third = torch.func.grad(lambda x: muvox.attention(x, x, x).sum())
    for _ in range(2):
        third = torch.func.grad(lambda x, inner=third: inner(x).square().sum())
    with pytest.raises(NotImplementedError, match=r"^muvox\.attention: third derivatives are not supported"):
        third(x)


@pytest.mark.parametrize("transform", ["jvp", "jacfwd", "dual numbers"])
def test_forward_mode_is_refused(transform):
    """Never silent zeros."""
    x = torch.randn(3, 6, 2)
    with pytest.raises(NotImplementedError, match=r"^muvox\.pool: forward-mode derivatives are not supported"):
        if transform == "jvp":
            torch.func.jvp(muvox.pool, (x,), (x,))
        elif transform == "jacfwd":
            torch.func.jacfwd(muvox.pool)(x)
        else:
            with torch.autograd.forward_ad.dual_level():
                muvox.pool(torch.autograd.forward_ad.make_dual(x, x))


@pytest.mark.parametrize("transform", ["vmap", "grad", "jacrev"])
def test_compiled(transform):
    torch._dynamo.reset()
    x, f, _ = problem()
    functions = {
        "vmap": torch.vmap(network),
        "grad": torch.func.grad(lambda x, f: network(x, f).square().sum()),
        "jacrev": torch.func.jacrev(network),
    }
    inputs = [torch.stack([y, 2 * y]).detach() if transform == "vmap" else y.detach() for y in (x, f)]
    compiled = torch.compile(functions[transform], fullgraph=True, backend="aot_eager")
    assert_close([compiled(*inputs)], [functions[transform](*inputs)])


@pytest.mark.parametrize("sets, way", [(1, "vmap"), (4, "is_grads_batched")])
def test_saved_tensors_are_not_copied(sets, way):
    """64 rows of a Jacobian to the coordinates: 10 MB; a copy of the saved features for each would be 650 MB."""
    program = f"""
import resource, torch, muvox
torch.set_num_threads(1)
x = torch.rand({sets}, {20000 // sets}, 2, requires_grad=True)
f = torch.randn({sets}, {20000 // sets}, 128)
neighbours = torch.randint(0, {20000 // sets}, ({sets}, {20000 // sets}, 2), dtype=torch.int32)
y = muvox.aggregate(f, neighbours, x, aggregates=("mean",)).sum()
rows = torch.arange(64.0)
def row(v):
    return torch.autograd.grad(y, x, v, retain_graph=True)[0]
row(rows[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
if "{way}" == "vmap":
    found = torch.vmap(row)(rows)
else:
    found = torch.autograd.grad(y, x, rows, retain_graph=True, is_grads_batched=True)[0]
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
assert torch.equal(found[7], row(rows[7]))
"""
    assert int(in_fresh_process(program)) < 64 * 1024
