"""GravNet, collapsers and attentions: leading dimensions, ragged sets, user functions, hooks, autocast, memory."""

import copy
from functools import partial
from itertools import groupby

import pytest
import torch
from torch import nn

import muvox.nn as mnn
from muvox import ops
from muvox.nn import gravnet as gravnet_module
from muvox.nn import sets
from muvox.nn.activations import ACTIVATIONS

DOUBLE = torch.float64


def gravnet_layer(**arguments):
    torch.manual_seed(2)
    widths = dict(n_fpv=5, n_s=3, n_lr=8, k=4, agg_methods=["mean", "max"], n_out=6, act="swish")
    return mnn.GravNetLayer(**(widths | arguments)).double()


def gravnet(**arguments):
    torch.manual_seed(2)
    widths = dict(n_v=None, n_fpv=5, cat_means=True, f_slr_depth=2, n_s=3, n_lr=8, k=4, f_out_depth=1, n_out=[6, 4])
    return mnn.GravNet(**(widths | dict(act="swish") | arguments)).double()


def collapser(**arguments):
    torch.manual_seed(2)
    widths = dict(n_v=7, n_fpv=5, flatten=False, n_sa_layers=2, sa_width=2, f_final_outs=[6], act="swish")
    return mnn.GraphCollapser(**(widths | arguments)).double()


def attention(cls=mnn.SelfAttention, **arguments):
    torch.manual_seed(2)
    return cls(**(dict(n_fpv=5, n_a=2, act="swish") | arguments)).double()


def spread(values):
    """A callable aggregation that is not one of the names, over the rows (…, rows, features)."""
    return values.max(-2)[0] - values.min(-2)[0]


MODULES = {
    "gravnet_layer": gravnet_layer,
    "gravnet_layer, deep": partial(gravnet_layer, f_slr_depth=3, f_out_depth=2, agg_methods=["absmax", "sum"]),
    "gravnet_layer, no means": partial(gravnet_layer, cat_means=False, act="relu"),
    "gravnet_layer, sa": partial(gravnet_layer, use_sa=True),
    "gravnet_layer, offset": partial(gravnet_layer, use_sa=True, sa_class=mnn.OffsetSelfAttention),
    "gravnet_layer, potential": partial(gravnet_layer, potential=lambda d: 1 / (1 + d)),
    "gravnet_layer, callable": partial(gravnet_layer, agg_methods=["mean", spread]),
    "gravnet": gravnet,
    "gravnet, one": partial(gravnet, n_out=6, agg_methods="max"),
    "collapser": collapser,
    "collapser, offset": partial(collapser, sa_class=mnn.OffsetSelfAttention, agg_methods="absmax"),
    "collapser, plain": partial(collapser, n_sa_layers=0, sa_width=None, f_final_outs=None),
    "collapser, callable": partial(collapser, agg_methods=["max", spread]),
    "collapser, initial means": partial(collapser, f_initial_outs=[4, 3], global_feat_vec=True),
    "collapser, final means": partial(collapser, n_sa_layers=0, sa_width=None, global_feat_vec=True),
    "attention": attention,
    "offset attention": partial(attention, mnn.OffsetSelfAttention),
}
by_name = pytest.mark.parametrize("name", MODULES)


def step(module, *arguments):
    """Output and gradients of input and parameters."""
    x, *others = arguments
    x = x.clone().requires_grad_()
    out = module(x, *others)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), [x, *module.parameters()])]


def assert_same(got, want, rtol=1e-9, atol=1e-11):
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol)


# Leading dimensions and ragged sets


@by_name
def test_any_leading_dimensions(name):
    module, x = MODULES[name](), torch.randn(2, 3, 7, 5, dtype=DOUBLE)
    flat = step(module, x.reshape(6, 7, 5))
    got = step(module, x)
    assert got[0].shape[:2] == (2, 3)
    assert_same([got[0].flatten(0, 1), got[1].flatten(0, 1), *got[2:]], flat)
    single = module(x[1, 2])
    torch.testing.assert_close(single, got[0][1, 2], rtol=1e-9, atol=1e-11)


@by_name
def test_ragged_sets_as_one_by_one(name):
    """Sets of 6, 0, 1, 9 and 3 rows together as each for itself: outputs and, added up, gradients."""
    module, lengths = MODULES[name](), [6, 0, 1, 9, 3]
    x = torch.randn(sum(lengths), 5, dtype=DOUBLE)
    splits = torch.tensor([0, *torch.tensor(lengths).cumsum(0)])
    weights = torch.randn(sum(lengths), 64, dtype=DOUBLE)  # of the outputs, enough for a row or a set

    def loss(out, start):
        return (out * weights[start : start + len(out), : out.shape[-1]]).sum()

    inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    together = module(inputs[0], splits)
    per_row = len(together) == len(x)
    alone = [module(part[None]) for part in inputs[1].split(lengths)]
    alone = torch.cat([one[0] if per_row else one for one in alone])
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-11)
    got, want = (
        torch.autograd.grad(loss(out, 0), [inp, *module.parameters()]) for out, inp in zip((together, alone), inputs)
    )
    assert_same(got, want)


def test_batch_norm_of_ragged_and_of_many_dimensions():
    """Statistics run over all rows of all sets, whatever the shape that holds them."""
    x = torch.randn(2, 3, 7, 5, dtype=DOUBLE)
    outs = []
    for shape, splits in (((6, 7, 5), None), ((2, 3, 7, 5), None), ((42, 5), torch.arange(0, 43, 7))):
        module = gravnet_layer(bn=True)
        outs.append([module(x.reshape(shape), splits).reshape(6, 7, -1), *module.buffers()])
    assert_same(outs[0], outs[1])
    assert_same(outs[0], outs[2])


@pytest.mark.parametrize("module, x, splits, message", [
    (gravnet_layer(), torch.zeros(5), None, r"shape \(5,\)"),
    (gravnet_layer(), torch.zeros(2, 3, 5), torch.tensor([0, 3]), r"shape \(2, 3, 5\)"),
    (collapser(flatten=True), torch.zeros(3, 5), torch.tensor([0, 3]), "flatten"),
])
def test_bad_shapes(module, x, splits, message):
    with pytest.raises(ValueError, match=message):
        module(x, splits)


@pytest.mark.parametrize("make, message", [
    (partial(gravnet_layer, agg_methods=["median"]), "'median'"),
    (partial(gravnet_layer, k=0), "k is 0"),
    (partial(gravnet_layer, act="tanh"), "'tanh'"),
    (partial(gravnet_layer, use_sa=True, n_lr=3), "n_a is 0"),
    (partial(collapser, sa_width=None), "sa_width is missing"),
    (partial(collapser, agg_methods="mode"), "'mode'"),
])
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_aggregation_of_a_wrong_type():
    with pytest.raises(TypeError, match="agg_methods: got int"):
        gravnet_layer(agg_methods=[3])


# Aggregations and potentials of the user's own


def test_callable_aggregations_equal_named_ones():
    x = torch.randn(2, 9, 5, dtype=DOUBLE)
    named = gravnet_layer(agg_methods=["mean", "max", "absmax"])
    called = gravnet_layer(agg_methods=[lambda t: t.mean(2), lambda t: t.max(2)[0], lambda t: t.abs().max(2)[0]])
    assert_same(step(called, x), step(named, x))


def test_callable_collapse_equals_named_one():
    x = torch.randn(2, 3, 9, 5, dtype=DOUBLE)
    assert_same(step(collapser(agg_methods=[lambda t: t.mean(1), "max"]), x), step(collapser(), x))


@pytest.mark.parametrize("lengths", [[4, 4, 0, 0, 4, 7, 7, 1], [5, 5, 5], [0, 0], []])
def test_callables_see_ragged_sets_without_padding(lengths):
    """One call for each run of equal lengths, none for empty sets, whose result is 0."""
    seen = []

    def total(values):
        seen.append(tuple(values.shape[:2]))
        assert values.shape[1] > 0
        return values.sum(-2)

    x = torch.randn(sum(lengths), 5, dtype=DOUBLE)
    splits = torch.tensor([0, *lengths]).cumsum(0)
    runs = [(len(list(sets)), rows) for rows, sets in groupby(lengths) if rows > 0]
    for make in (collapser, gravnet_layer):
        called, named = (step(make(agg_methods=[one, "max"]), x, splits) for one in (total, "sum"))
        assert_same(called, named)
        assert seen == runs
        seen.clear()


@pytest.mark.parametrize("splits", [[0, 3, 6], [0, 8], [0, 5, 3, 7], [1, 7]])
def test_callables_refuse_splits_of_other_rows(splits):
    with pytest.raises(RuntimeError, match="split"):
        collapser(agg_methods=[spread], n_sa_layers=0, sa_width=None)(torch.randn(7, 5).double(), torch.tensor(splits))


def test_potential_is_called_with_the_distance():
    """exp(-10 d²) of the user's own gives what the fused operator gives, also with fewer rows than k."""
    for rows in (9, 3):
        x = torch.randn(2, rows, 5, dtype=DOUBLE)
        own = gravnet_layer(potential=lambda d: torch.exp(-10 * d * d))
        assert_same(step(own, x), step(gravnet_layer(), x))


def test_potential_that_is_a_module_is_learnt():
    class Decay(nn.Module):
        def __init__(self):
            super().__init__()
            self.rate = nn.Parameter(torch.tensor(1.5, dtype=DOUBLE))

        def forward(self, distance):
            return torch.exp(-self.rate * distance)

    module, x = gravnet_layer(potential=Decay()), torch.randn(2, 9, 5, dtype=DOUBLE)
    assert "potential.rate" in module.state_dict()
    assert_same(step(module, x)[:1], step(gravnet_layer(potential=lambda d: torch.exp(-1.5 * d)), x)[:1])
    assert torch.autograd.gradcheck(lambda rate: functional_rate(module, rate, x), module.potential.rate)


def functional_rate(module, rate, x):
    return torch.func.functional_call(module, {"potential.rate": rate}, (x,))


@pytest.mark.parametrize("potential", [lambda d: torch.exp(-d), lambda d: d * torch.exp(-d), lambda d: 1 / (1 + d)])
def test_potential_has_no_gradient_at_distance_zero(potential):
    """Coincident rows, and places without a neighbour: finite gradients, no force between equal coordinates."""
    x = torch.ones(2, 3, 5, dtype=DOUBLE)
    out, *gradients = step(gravnet_layer(potential=potential), x)
    assert out.isfinite().all() and all(g.isfinite().all() for g in gradients)
    ragged = step(gravnet_layer(potential=potential), x[0], torch.tensor([0, 2, 2, 3]))
    assert all(t.isfinite().all() for t in ragged)


def test_gravnet_swallows_further_arguments_but_not_the_potential_of_its_class():
    x = torch.randn(2, 9, 5, dtype=DOUBLE)
    plain = gravnet()
    torch.testing.assert_close(gravnet(potential=lambda d: d, colour="red")(x), plain(x), rtol=0, atol=0)
    layers = gravnet(gn_class=partial(mnn.GravNetLayer, potential=lambda d: 1 / (1 + d)))
    assert (layers(x) - plain(x)).abs().max() > 1e-3


def test_gravnet_subclass_may_define_the_potential():
    class Own(mnn.GravNetLayer):
        @staticmethod
        def potential(distance):
            return torch.exp(-distance)

    x = torch.randn(2, 9, 5, dtype=DOUBLE)
    torch.manual_seed(2)
    own = Own(n_fpv=5, n_s=3, n_lr=8, k=4, agg_methods=["mean", "max"], n_out=6, act="swish").double()
    assert_same(step(own, x), step(gravnet_layer(potential=lambda d: torch.exp(-d)), x))


# Layers


@pytest.mark.parametrize("act", list(ACTIVATIONS))
def test_layer_is_linear_activation_norm_dropout(act):
    """Modules and keys of one layer in LUMIN's order, and the layer split into columns equals the layer joined."""
    module = gravnet_layer(act=act, bn=True, do=0.1)
    kinds = [nn.Linear, *([] if act == "linear" else [nn.Module]), mnn.LCBatchNorm1d]
    kinds.append(nn.AlphaDropout if act == "selu" else nn.Dropout)
    assert len(module.f_slr[0]) == len(kinds) and all(map(isinstance, module.f_slr[0], kinds))
    keys = set(module.state_dict())
    assert f"f_slr.0.{1 if act == 'linear' else 2}.bn.running_mean" in keys
    assert ("f_out.0.1.weight" in keys) == (act == "prelu")
    assert module.f_slr[0][0].bias.abs().max() == 0
    module.eval()
    x = torch.randn(2, 7, 5, dtype=DOUBLE)
    joined = copy.deepcopy(module)
    joined.f_slr.register_forward_hook(lambda *_: None)
    joined.f_out.register_forward_hook(lambda *_: None)
    torch.testing.assert_close(module(x), joined(x), rtol=1e-9, atol=1e-11)


def test_hooks_on_inner_layers_see_the_joined_input():
    x = torch.randn(2, 7, 5, dtype=DOUBLE)
    plain, seen = gravnet_layer(), []
    watched = gravnet_layer()
    for layer in (watched.f_slr, watched.f_slr[0], watched.f_slr[0][0]):
        watched.zero_grad()
        handle = layer.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        assert_same(step(watched, x), step(plain, x))
        handle.remove()
    assert len(seen) == 3
    for joined in seen:
        torch.testing.assert_close(joined, torch.cat([x, x.mean(1, keepdim=True).expand_as(x)], -1))


def test_replaced_linear_layers_are_called():
    """A user's own layer in place of a Linear (an adapter, a quantised one) is called, not bypassed."""

    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    x = torch.randn(2, 7, 5, dtype=DOUBLE)
    module, twice = gravnet_layer(), gravnet_layer()
    twice.f_out[0][0] = Doubled(*reversed(twice.f_out[0][0].weight.shape)).double()
    twice.f_out[0][0].load_state_dict(module.f_out[0][0].state_dict())
    with torch.no_grad():
        for p in module.f_out[0][0].parameters():
            p *= 2
    torch.testing.assert_close(twice(x), module(x), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("ragged", [False, True])
def test_linear_of_columns(ragged):
    """W [a, b, m] without joining: broadcast blocks, and blocks with one value a set."""
    layer = nn.Linear(9, 4).double()
    if ragged:
        splits = torch.tensor([0, 3, 3, 7])
        columns = [sets.Block(torch.randn(7, 4).double()), sets.Block(torch.randn(3, 5).double(), True)]
    else:
        splits = None
        columns = [sets.Block(torch.randn(2, 1, 6, 3).double()), sets.Block(torch.randn(3, 6, 4).double())]
        columns.append(sets.Block(torch.randn(3, 1, 2).double(), True))
    joined = sets.join(columns, splits)
    assert joined.shape == ((7, 9) if ragged else (2, 3, 6, 9))
    torch.testing.assert_close(sets.linear(layer, columns, splits), layer(joined), rtol=1e-9, atol=1e-11)
    if ragged:
        assert torch.equal(joined[3:, 4:], columns[1].values[2].expand(4, 5))


@pytest.mark.parametrize("dims, dim", [(3, 1), (4, 2)])
def test_softmax_over_the_classes(dims, dim):
    x = torch.randn(*range(2, 2 + dims), dtype=DOUBLE)
    torch.testing.assert_close(mnn.lookup_act("softmax")(x).sum(dim), torch.ones_like(x).mean(dim))
    torch.testing.assert_close(mnn.lookup_act("logsoftmax")(x).exp(), mnn.lookup_act("softmax")(x))


def test_node_predictor():
    """A prediction for each row; the last layer is a bare Linear drawn for the output's activation."""
    torch.manual_seed(4)
    predict = mnn.NodePredictor(7, 5, out_act="sigmoid", transpose_out=False, f_final_outs=[6, 3], do=0.5).double()
    assert isinstance(predict.f_final[-1], nn.Linear)
    x = torch.randn(2, 4, 7, 5, dtype=DOUBLE)
    predict.eval()
    out = predict(x)
    assert out.shape == (2, 4, 7, 3) and 0 < out.min() and out.max() < 1
    predict.transpose_out = True
    torch.testing.assert_close(predict(x), out.transpose(-1, -2))


def test_sizes():
    assert gravnet().get_out_size() == (None, 10) and gravnet(n_out=6).grav_layers[0].get_out_size() == 6
    assert collapser().get_out_size() == 12 and collapser(flatten=True).get_out_size() == 42
    assert collapser(f_final_outs=None, agg_methods="max").get_out_size() == 10
    assert attention().get_out_size() == 5
    x = torch.randn(2, 7, 5, dtype=DOUBLE)
    for module in (collapser(), collapser(flatten=True), collapser(f_final_outs=None, agg_methods="max")):
        assert module(x).shape == (2, module.get_out_size())


# Offset attention


def test_offset_attention_keeps_no_weights():
    module, x, kept = attention(mnn.OffsetSelfAttention), torch.randn(6, 9, 5, dtype=DOUBLE), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        module(x).sum()
    assert kept and not any(shape[-2:] == (9, 9) for shape in kept)


def test_offset_attention_of_distant_scores():
    """A row whose weights all underflow gives 0, in half too: no NaN."""
    q = torch.tensor([[[0.0], [60.0]]])
    k = torch.tensor([[[1.0], [2.0]]])
    v = torch.ones(1, 2, 3)
    for dtype in (torch.float32, torch.float16):
        out = ops.offset_attention(q.to(dtype) * 4, k.to(dtype), v.to(dtype))
        torch.testing.assert_close(out, torch.tensor([[[0.0] * 3, [1.0] * 3]], dtype=dtype))


# Autocast and memory


def test_coordinates_are_computed_in_float_under_autocast(monkeypatch):
    seen = {}

    def spy(coords, feats, k, **others):
        seen.update(coords=coords.detach(), feats=feats.detach())
        return ops.gravnet(coords, feats, k, **others)

    class Spied:
        def __getattr__(self, name):
            return spy if name == "gravnet" else getattr(ops, name)

    monkeypatch.setattr(gravnet_module, "ops", Spied())
    for depth in (1, 3):
        module = gravnet_layer(f_slr_depth=depth).float()
        x = torch.randn(2, 9, 5)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = module(x)
        assert out.dtype == torch.bfloat16 and seen["coords"].dtype == torch.float32
        assert not torch.equal(seen["coords"], seen["coords"].bfloat16().float())
        rounded = seen["coords"]
        module(x)
        limit = 1e-6 if depth == 1 else 2e-2  # float all through, or from hidden layers in bfloat16
        torch.testing.assert_close(rounded, seen["coords"], rtol=limit, atol=limit)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@by_name
def test_trains_under_autocast(name, dtype, ragged):
    """Like in float: outputs to 8 units in the last place of the largest, gradients, all in float, to 16.

    As k is the number of rows, rounding chooses no neighbours. Gradients that vanish by cancellation are compared with
    a tenth of the largest."""
    module, splits = MODULES[name]().float(), torch.tensor([0, 6, 6, 18]) if ragged else None
    for each in module.modules():
        if isinstance(each, mnn.GravNetLayer):
            each.k = 12
    x = torch.randn(18, 5) if ragged else torch.randn(2, 9, 5)
    assert_trains_under_autocast(module, [x, splits], dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_node_predictor_trains_under_autocast(dtype):
    arguments = dict(out_act="logsoftmax", transpose_out=True, f_final_outs=[6, 3], n_sa_layers=1, sa_width=2)
    module = mnn.NodePredictor(7, 5, **arguments)
    assert_trains_under_autocast(module, [torch.randn(2, 9, 5)], dtype)


def assert_trains_under_autocast(module, arguments, dtype, outputs=8, gradients=16):
    x, *others = arguments
    found = []
    for enabled in (False, True):
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", dtype=dtype, enabled=enabled):
            out = module(leaf, *others)
        found.append([out, *torch.autograd.grad(out.float().square().sum(), [leaf, *module.parameters()])])
    plain, cast = found
    largest = max(g.abs().max() for g in plain[1:])
    for place, (one, other) in enumerate(zip(cast, plain, strict=True)):
        assert one.isfinite().all() and (place == 0 or one.dtype == torch.float32)
        scale = max(other.abs().max(), largest / 10 if place else 0)
        assert (one - other).abs().max() <= (gradients if place else outputs) * torch.finfo(dtype).eps * scale
    assert not torch.equal(cast[1], plain[1])


def saved_bytes(module, x):
    """Largest and total size of the tensors kept for the backward pass."""
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.update({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()}) or t, lambda t: t
    ):
        out = module(x)
    del out
    return max(kept.values()), sum(kept.values())


def test_kept_memory_grows_with_rows_not_with_pairs():
    torch.manual_seed(2)
    arguments = dict(n_v=None, n_fpv=9, cat_means=True, f_slr_depth=3, n_s=4, n_lr=22, k=25, f_out_depth=1, n_out=48)
    for module in (mnn.GravNet(**arguments), mnn.SelfAttention(9, 12)):
        small, large = (saved_bytes(module, torch.randn(3, rows, 9, requires_grad=True)) for rows in (150, 600))
        assert large[1] < 4.2 * small[1]
        assert large[0] <= 3 * 600 * 52 * 4  # the widest hidden layer
