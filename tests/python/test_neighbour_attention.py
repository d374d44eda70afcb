"""muvox.neighbour_attention against LUMIN's attention over gathered neighbours in plain torch; gradients, errors."""

import math

import pytest
import torch
import torch.nn.functional as F

import muvox
import muvox.nn as mnn
import op_cases as cases
from test_memory import fresh_process

ACTIVATIONS = {
    "linear": lambda z: z,
    "relu": torch.relu,
    "selu": torch.selu,
    "sigmoid": torch.sigmoid,
    "swish": F.silu,
    "mish": F.mish,
}
OFFSET = pytest.mark.parametrize("offset", [False, True], ids=["plain", "offset"])
SHAPES = [(2, 5), (2,), (2, 5), (2,), (5, 5), (5,), (5, 5), (5,)]


def make_layers(dtype=torch.float64, shapes=SHAPES):
    return [(0.6 * torch.randn(shape)).to(dtype).requires_grad_() for shape in shapes]


def formula(x, f, *layers, k=3, scale=10.0, aggregates=("mean", "max"), activation="relu", offset=False):
    """One set in double: distances, gathered features, LUMIN's attention as its layers stand, aggregation."""
    order, distance2 = cases.nearest(x, k)
    ft = torch.exp(-scale * distance2)[..., None] * f[order]
    q, keys, v, out = (lambda y, w=w, b=b: y @ w.T + b for w, b in zip(layers[::2], layers[1::2]))
    scores = q(ft) @ keys(ft).mT
    if offset:
        weights = scores.softmax(-2)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-17)
        z = out(ft - weights @ v(ft))
    else:
        z = out((scores / math.sqrt(layers[0].shape[0])).softmax(-1) @ v(ft))
    return cases.combine(ft + ACTIVATIONS[activation](z), 1, aggregates)


def compare(x, f, splits=None, k=3, views=(lambda x: x, lambda x: x), dtype=torch.float64, units=4, **options):
    layers = make_layers(dtype)

    def op(x, f, *layers):
        return muvox.neighbour_attention(views[0](x), views[1](f), k, layers, splits=splits, **options)

    def expected(x, f, *layers):
        return cases.per_set(lambda x, f: formula(x, f, *layers, k=k, **options), splits, views[0](x), views[1](f))

    if f.numel():
        cases.compare(op, expected, (x, f, *layers), dtype, units)
        return
    out = op(x, f, *layers)
    assert out.shape == (*f.shape[:-1], 10) and out.dtype == dtype
    assert not any(g.any() for g in torch.autograd.grad(out.sum(), (x, f, *layers)))


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("layout", cases.LAYOUTS)
@OFFSET
def test_layouts(layout, dtype, offset):
    x, f, splits = cases.layout(layout, 3, 5, dtype=dtype)
    # A maximum may go to another neighbour where its inputs were rounded.
    compare(x, f, splits, dtype=dtype, scale=0.7, activation="swish", offset=offset, aggregates=("mean", "sum"))


@pytest.mark.parametrize("view", cases.VIEWS)
@pytest.mark.parametrize("other", ["contiguous", "columns apart"])
def test_strides(view, other):
    x, f, _ = cases.layout("uniform", 4, 5)
    views = cases.VIEWS[view], cases.VIEWS[other]
    coords_tie = view.startswith("one row") or view.startswith("one column")
    if not coords_tie:  # among coincident rows another winner would do
        compare(x, f, views=views, scale=0.5)
    compare(x, f, views=views[::-1], scale=0.5, aggregates=("mean", "sum"), offset=True)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@OFFSET
def test_activations(activation, offset):
    x, f, splits = cases.layout("ragged", 2, 5)
    compare(x, f, splits, k=4, scale=0.4, activation=activation, offset=offset)


@pytest.mark.parametrize("aggregates", [("mean",), ("max",), ("absmax",), ("sum",), cases.ALL, cases.ALL[::-1]])
@OFFSET
def test_aggregates(aggregates, offset):
    compare(*cases.layout("ragged", 2, 5), aggregates=aggregates, scale=0.3, offset=offset)


@pytest.mark.parametrize("k", [1, 2, 6, 7, 40])
@OFFSET
def test_k(k, offset):
    compare(*cases.layout("uniform", 2, 5), k=k, scale=0.3, offset=offset)


def test_many_neighbours():
    """Winners are int32 above k = 254."""
    x, f, _ = cases.layout("one set", 2, 5)
    x, f = (y.detach().repeat(40, 1).add(0.1 * torch.randn(280, 1)).requires_grad_() for y in (x, f))
    compare(x, f, k=260, scale=0.01, aggregates=("max", "absmax"))


@pytest.mark.parametrize("scale", [0.0, -0.2, 10.0])
@OFFSET
def test_scale(scale, offset):
    compare(*cases.layout("ragged", 2, 5), scale=scale, aggregates=("mean", "sum"), offset=offset)


@pytest.mark.parametrize("large", [30.0, 300.0])
@pytest.mark.parametrize("activation", ["selu", "swish", "mish", "sigmoid"])
@OFFSET
def test_large_and_small_values(activation, large, offset):
    """Exponentials overflow and underflow, results do not."""
    x, f, _ = cases.layout("uniform", 2, 5)
    f = (large * f.detach()).requires_grad_()
    compare(x, f, scale=0.1, activation=activation, offset=offset, aggregates=("mean", "sum"))


@pytest.mark.parametrize("layout", ["uniform", "ragged", "one row"])
@pytest.mark.parametrize("activation", ["relu", "mish"])
@OFFSET
def test_gradcheck(layout, activation, offset):
    x, f, splits = cases.layout(layout, 2, 5)

    def op(x, f, *layers):
        return muvox.neighbour_attention(
            x, f, 3, layers, splits=splits, scale=0.5, aggregates=cases.ALL, activation=activation, offset=offset
        )

    assert torch.autograd.gradcheck(op, (x, f, *make_layers()), nondet_tol=0)


@pytest.mark.parametrize("layout", ["uniform", "ragged", "one row"])
@OFFSET
def test_gradgradcheck(layout, offset):
    x, f, splits = cases.layout(layout, 2, 3)
    mask = torch.ones(f.shape[:-1], dtype=torch.bool)
    mask[:1] = mask.numel() < 5
    layers = make_layers(shapes=[(2, 3), (2,), (2, 3), (2,), (3, 3), (3,), (3, 3), (3,)])

    def op(x, f, *layers):
        options = dict(splits=splits, scale=0.5, aggregates=cases.ALL, activation="mish", offset=offset)
        return muvox.neighbour_attention(x, f, 3, layers, mask=mask, **options)

    assert torch.autograd.gradgradcheck(op, (x, f, *layers), nondet_tol=0, fast_mode=True)


def arguments(ragged, offset, requires_grad=False):
    """Of the raw operator."""
    lead = (9,) if ragged else (2, 4)
    rows = [torch.randn(*lead, width) for width in (3, 5, 2, 2, 5, 5)]
    rows[5] = rows[5] if offset else torch.empty(0)
    biases = [torch.randn(1, width) for width in (2, 2, 5, 5)]
    tensors = [x.requires_grad_(requires_grad and x.numel() > 0) for x in (*rows, *biases)]
    splits = torch.tensor([0, 4, 4, 9]) if ragged else torch.empty(0, dtype=torch.int64)
    mask = torch.rand(lead) < 0.8
    return *tensors, splits, mask, 3, 0.5, 0x21, 4, offset, True


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("ragged", [False, True])
@OFFSET
def test_opcheck(ragged, offset, requires_grad):
    torch.library.opcheck(torch.ops.muvox.neighbour_attention.default, arguments(ragged, offset, requires_grad))


@pytest.mark.parametrize("ragged", [False, True])
@OFFSET
def test_opcheck_backward(ragged, offset):
    inputs = arguments(ragged, offset)
    out, neighbours, winners = torch.ops.muvox.neighbour_attention(*inputs)
    given = torch.randn_like(out), *inputs[:11], neighbours, winners, *inputs[13:17]
    everything = 0b1111111111 if offset else 0b1111011111
    for wanted in (everything, 0b1, 0b1000000100):
        torch.library.opcheck(torch.ops.muvox.neighbour_attention_backward.default, (*given, wanted))


@OFFSET
def test_compiled_is_eager(offset):
    x, f, splits = cases.layout("ragged", 3, 5)
    layers = make_layers()

    def op(x, f, *layers):
        return muvox.neighbour_attention(x, f, 3, layers, splits=splits, activation="selu", offset=offset)

    compiled = torch.compile(op, fullgraph=True, backend="aot_eager", dynamic=True)
    for inputs in ((x, f, *layers), (x.detach()[:12].requires_grad_(), 2 * f.detach().requires_grad_(), *layers)):
        out, expected = compiled(*inputs), op(*inputs)
        torch.testing.assert_close(out, expected)
        given = [y for y in inputs if y.is_leaf]
        found, known = (torch.autograd.grad(y.sum(), given) for y in (out, expected))
        torch.testing.assert_close(found, known)


@OFFSET
def test_batched_by_vmap(offset):
    """Over feats, over layers, and over gradients; each gives what calls one by one give."""
    x, f, _ = cases.layout("uniform", 2, 5)
    layers = make_layers()

    def op(f, weight):
        return muvox.neighbour_attention(x, f, 3, [weight, *layers[1:]], scale=0.5, offset=offset)

    fs, weights = torch.stack([f, -f, 2 * f]), torch.stack([layers[0], -layers[0], 2 * layers[0]])
    torch.testing.assert_close(
        torch.func.vmap(op)(fs, weights), torch.stack([op(*each) for each in zip(fs, weights)]), rtol=0, atol=1e-14
    )
    out, inputs = op(f, layers[0]), (x, f, *layers)
    gradients = torch.randn(4, *out.shape, dtype=torch.float64)
    batched = torch.autograd.grad(out, inputs, gradients, is_grads_batched=True, retain_graph=True)
    for place, g in enumerate(gradients):
        for a, b in zip(batched, torch.autograd.grad(out, inputs, g, retain_graph=True)):
            torch.testing.assert_close(a[place], b, rtol=0, atol=1e-13)


def test_traced_at_five_rows():
    layers = [y.detach() for y in make_layers()]

    def op(x, f):
        return muvox.neighbour_attention(x, f, 3, layers)

    traced = torch.jit.trace(op, (torch.randn(5, 2).double(), torch.randn(5, 5).double()))
    for rows in (9, 0, 1):
        x, f = torch.randn(rows, 2, dtype=torch.float64), torch.randn(rows, 5, dtype=torch.float64)
        assert torch.equal(traced(x, f), op(x, f))


@OFFSET
def test_every_run_and_number_of_threads_gives_the_same_bits(offset):
    x, f = torch.randn(300, 20, 3), torch.randn(300, 20, 5)
    inputs = [y.requires_grad_() for y in (x, f, *make_layers(torch.float32))]

    def run(threads):
        torch.set_num_threads(threads)
        out = muvox.neighbour_attention(*inputs[:2], 6, inputs[2:], scale=1.0, activation="mish", offset=offset)
        return out, *torch.autograd.grad(out.square().sum(), inputs)

    # The biases' gradients come from the operator as they are; the weights' are torch's own products, made of its rows.
    expected = run(1)
    for threads in (1, 2, 2):
        for place, (a, b) in enumerate(zip(run(threads), expected)):
            if place in (0, 1, 2, 4, 6, 8, 10):
                assert torch.equal(a, b), place


@OFFSET
def test_masked_rows_equal_removed_rows(offset):
    x, f, _ = cases.layout("one set", 2, 5)
    layers, keep = make_layers(), torch.tensor([1, 0, 1, 1, 0, 1, 1]).bool()
    x, f = x.detach(), f.detach()
    bad = [torch.where(keep[:, None], y, torch.nan).requires_grad_() for y in (x, f)]
    good = [y[keep].requires_grad_() for y in (x, f)]
    options = dict(scale=0.5, activation="swish", offset=offset)
    out = muvox.neighbour_attention(*bad, 4, layers, mask=keep, **options)
    expected = muvox.neighbour_attention(*good, 4, layers, **options)
    assert torch.equal(out[keep], expected) and not out[~keep].any()
    found, known = (torch.autograd.grad(y.sum(), (*inputs, *layers)) for y, inputs in ((out, bad), (expected, good)))
    for g, e in zip(found[:2], known[:2]):
        torch.testing.assert_close(g[keep], e, rtol=0, atol=1e-13)
        assert not g[~keep].any()
    torch.testing.assert_close(found[2:], known[2:], rtol=0, atol=1e-13)


def test_nested_is_ragged():
    x, f, splits = cases.layout("ragged", 2, 5)
    layers, nested = make_layers(), [torch.nested.nested_tensor_from_jagged(y, splits) for y in (x, f)]
    out = muvox.neighbour_attention(*nested, 3, layers)
    assert torch.equal(out.values(), muvox.neighbour_attention(x, f, 3, layers, splits=splits))


def test_nan_is_not_hidden():
    x, f, _ = cases.layout("uniform", 2, 5)
    f = f.detach().clone()
    f[1, 2, 3] = torch.nan
    out = muvox.neighbour_attention(x.detach(), f, 6, make_layers(), aggregates=cases.ALL)
    assert out[1].isnan().all() and not out[::2].isnan().any()


def test_coincident_rows_have_no_coordinate_gradient():
    x = torch.ones(5, 2, dtype=torch.float64, requires_grad=True)
    f = torch.randn(5, 5, dtype=torch.float64)
    assert not torch.autograd.grad(muvox.neighbour_attention(x, f, 9, make_layers()).sum(), x)[0].any()


@OFFSET
def test_saves_what_it_says(offset):
    """Nothing of k · F values for each row."""
    x, f, _ = cases.layout("uniform", 3, 5, dtype=torch.float32)
    layers, saved = make_layers(torch.float32), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        muvox.neighbour_attention(x, f, 4, layers, offset=offset)
    rows = sorted(tuple(t.shape) for t in saved if t.dim() == 3)
    # coords, q and k, neighbours, feats for the operator and for each layer, v (and o), winners
    assert set(rows) == {(3, 6, 3), (3, 6, 2), (3, 6, 4), (3, 6, 5)}
    assert sum(t.untyped_storage().nbytes() for t in {t.data_ptr(): t for t in saved}.values()) < 4 * 3 * 6 * 60


@OFFSET
def test_peak_memory(offset):
    """Values of each row only: the gathered neighbours' features alone take 44 MB, and the plain path makes several."""
    sets, rows, k, d, A, width = 20, 1000, 25, 4, 5, 22
    shapes = [s for n in (A, A, width, width) for s in ((n, width), (n,))]
    found = fresh_process(
        dict(
            make=f"x, f = (torch.randn(sets, rows, n, requires_grad=True) for n in ({d}, {width}));"
            f" layers = [torch.randn(s, requires_grad=True) for s in {shapes}]",
            forward=f"out = muvox.neighbour_attention(x, f, {k}, layers, offset={offset})",
            backward="torch.autograd.grad(out, (x, f, *layers), torch.ones_like(out))",
        ),
        sets,
        rows,
    )
    projected = 2 * A + (1 + offset) * width
    numbers = (d + width) + 2 * width + projected + k + width / 4  # inputs, output, saved
    gradients = (d + width) + 2 * width + projected + (3 + offset) * width  # the last: of feats, by each layer
    assert found["growth"] <= 4 * sets * rows * (numbers + gradients) + 64e6


def test_nothing_is_saved_without_gradients():
    inputs = arguments(False, False)
    _, neighbours, winners = torch.ops.muvox.neighbour_attention(*inputs[:-1], False)
    assert neighbours.shape == winners.shape == (0,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@OFFSET
def test_autocast(dtype, offset):
    x, f, _ = cases.layout("uniform", 3, 5, dtype=torch.float32)
    layers = make_layers(torch.float32)
    with torch.autocast("cpu", dtype):
        out = muvox.neighbour_attention(x, f, 3, layers, offset=offset, aggregates=("mean", "sum"), scale=0.5)
        double = [y.double() for y in (x, f)]
        assert muvox.neighbour_attention(*double, 3, make_layers()).dtype == torch.float64
    assert out.dtype == dtype
    grads = torch.autograd.grad(out.sum(), (x, f, *layers))
    assert all(g.dtype == torch.float32 for g in grads)
    expected = muvox.neighbour_attention(x, f, 3, layers, offset=offset, aggregates=("mean", "sum"), scale=0.5)
    cases.assert_near(out, expected, dtype)
    for g, e in zip(grads[:2], torch.autograd.grad(expected.sum(), (x, f))):
        cases.assert_near(g, e, dtype, 16)


# In GravNetLayer


def gravnet_layer(sa_class=mnn.SelfAttention, act="swish", methods=("mean", "max"), **arguments):
    return mnn.GravNetLayer(6, 3, 8, 4, list(methods), 7, use_sa=True, sa_class=sa_class, act=act, **arguments).double()


@pytest.fixture
def calls(monkeypatch):
    """How often a layer called the fused operator."""
    made = []

    def counted(*arguments, **options):
        made.append(options)
        return muvox.ops.neighbour_attention(*arguments, **options)

    monkeypatch.setattr("muvox.nn.gravnet.ops", type("ops", (), dict(vars(muvox.ops), neighbour_attention=counted)))
    return made


def results(layer, x, splits=None):
    out = layer(x, splits)
    return out, *torch.autograd.grad(out.square().sum(), (x, *layer.parameters()))


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("sa_class", [mnn.SelfAttention, mnn.OffsetSelfAttention])
@pytest.mark.parametrize("ragged", [False, True])
def test_layer_uses_it_and_equals_the_gathered_path(ragged, sa_class, act, calls):
    layer = gravnet_layer(sa_class, act)
    x = torch.randn(*((11,) if ragged else (2, 3, 5)), 6, dtype=torch.float64, requires_grad=True)
    splits = torch.tensor([0, 5, 5, 6, 11]) if ragged else None
    fused = results(layer, x, splits)
    assert [(c["activation"], c["offset"]) for c in calls] == [(act, sa_class is mnn.OffsetSelfAttention)]
    layer.sa_agg.register_forward_hook(lambda *_: None)
    torch.testing.assert_close(results(layer, x, splits), fused, rtol=0, atol=1e-11)
    assert len(calls) == 1


class Twice(mnn.SelfAttention):
    def forward(self, x, splits=None):
        return super().forward(super().forward(x, splits), splits)


OTHERS = {
    "hook on a layer": lambda: _hooked(gravnet_layer()),
    "other forward": lambda: gravnet_layer(Twice),
    "other activation": lambda: gravnet_layer(act="prelu"),
    "other aggregation": lambda: gravnet_layer(methods=[lambda ft: ft.mean(2)]),
    "other potential": lambda: gravnet_layer(potential=lambda d: torch.exp(-d)),
    "dropout": lambda: gravnet_layer(do=0.5),
}


def _hooked(layer):
    layer.sa_agg.v.register_forward_hook(lambda *_: None)
    return layer


@pytest.mark.parametrize("what", OTHERS)
def test_layer_takes_the_general_path_for(what, calls):
    assert OTHERS[what]()(torch.randn(2, 5, 6, dtype=torch.float64)).isfinite().all()
    assert not calls


def test_dropout_in_evaluation_is_none(calls):
    gravnet_layer(do=0.5).eval()(torch.randn(2, 5, 6, dtype=torch.float64))
    assert len(calls) == 1


X, Y, L = torch.randn(2, 5, 3), torch.randn(2, 5, 5), make_layers(torch.float32)


def replaced(place, x):
    return [*L[:place], x, *L[place + 1 :]]


BAD = {
    "k is 0": lambda op: op(X, Y, 0, L),
    "scale is nan": lambda op: op(X, Y, 2, L, scale=float("nan")),
    "aggregates is empty": lambda op: op(X, Y, 2, L, aggregates=()),
    "activation is 'gelu'": lambda op: op(X, Y, 2, L, activation="gelu"),
    "layers has 7 tensors, expected 8: q weight": lambda op: op(X, Y, 2, L[:7]),
    "q bias is NoneType": lambda op: op(X, Y, 2, replaced(1, None)),
    r"q weight has shape \(2, 4\)": lambda op: op(X, Y, 2, replaced(0, torch.randn(2, 4))),
    r"k weight has shape \(3, 5\), expected \(2, 5\)": lambda op: op(X, Y, 2, replaced(2, torch.randn(3, 5))),
    r"out bias has shape \(\), expected \(5,\)": lambda op: op(X, Y, 2, replaced(7, torch.tensor(0.0))),
    "v weight is torch.float64 and feats is torch.float32": lambda op: op(X, Y, 2, replaced(4, L[4].double())),
    "v bias is on meta": lambda op: op(X, Y, 2, replaced(5, L[5].to("meta"))),
    "coords is double and feats is float": lambda op: op(X.double(), Y, 2, L),
    "coords is int64": lambda op: op(X.long(), Y, 2, L),
    "q has width 0": lambda op: op(X, Y, 2, [*(L[place][:0] for place in range(4)), *L[4:]]),
    r"feats has shape \(2, 4, 5\)": lambda op: op(X, Y[:, :4], 2, L),
    r"mask has shape \(2, 4\)": lambda op: op(X, Y, 2, L, mask=torch.ones(2, 4, dtype=torch.bool)),
    "splits decrease": lambda op: op(X[0], Y[0], 2, L, splits=torch.tensor([0, 4, 3, 5])),
}


@pytest.mark.parametrize("message", BAD)
def test_errors_name_operator_and_argument(message):
    before = muvox.neighbour_attention(X, Y, 2, L)
    with pytest.raises((ValueError, RuntimeError), match=rf"^muvox(\.|::)neighbour_attention: {message}"):
        BAD[message](muvox.neighbour_attention)
    assert torch.equal(muvox.neighbour_attention(X, Y, 2, L), before)
