"""accelerate on modules laid out as LUMIN's: classes of its names and members, written plainly in this file."""

import copy
import pickle

import pytest
import torch
from torch import nn

import muvox.nn as mnn

DOUBLE = torch.float64


def identity(x):
    return x


class Swish(nn.Module):
    inplace = False

    def forward(self, x):
        return x * torch.sigmoid(x)


class LCBatchNorm1d(nn.Module):
    def __init__(self, bn):
        super().__init__()
        self.bn = bn

    def forward(self, x):
        return self.bn(x.transpose(1, 2)).transpose(1, 2)


class SelfAttention(nn.Module):
    def __init__(self, n_fpv, n_a):
        super().__init__()
        self.n_fpv, self.n_a = n_fpv, n_a
        self.q, self.k, self.v = nn.Linear(n_fpv, n_a), nn.Linear(n_fpv, n_a), nn.Linear(n_fpv, n_fpv)
        self.out = nn.Sequential(nn.Linear(n_fpv, n_fpv), Swish())

    def weights(self, x):
        return torch.softmax(torch.einsum("...ia,...ja->...ij", self.q(x), self.k(x)) / self.n_a**0.5, -1)

    def forward(self, x):
        return x + self.out(self.weights(x) @ self.v(x))


class OffsetSelfAttention(SelfAttention):
    def forward(self, x):
        weights = torch.softmax(torch.einsum("...ia,...ja->...ij", self.q(x), self.k(x)), -2)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-17)
        return x + self.out(x - weights @ self.v(x))


def layers(*widths):
    return nn.Sequential(*[nn.Sequential(nn.Linear(a, b), Swish()) for a, b in zip(widths, widths[1:])])


def append_means(x):
    return torch.cat([x, x.mean(1, keepdim=True).expand_as(x)], -1)


class GravNetLayer(nn.Module):
    def __init__(self, n_fpv, n_s, n_lr, k, agg_methods, n_out, cat_means=True, potential=None, sa_class=None):
        super().__init__()
        self.n_s, self.n_lr, self.k, self.agg_methods, self.cat_means = n_s, n_lr, k, agg_methods, cat_means
        self.n_out, self.use_sa = n_out, sa_class is not None
        n_fpv *= 1 + cat_means
        self.f_slr = layers(n_fpv, 2 * (n_s + n_lr), n_s + n_lr)
        self.f_out = layers(n_fpv + len(agg_methods) * n_lr, n_out)
        if potential is not None:
            self.potential = potential
        if self.use_sa:
            self.sa_agg = sa_class(n_lr, n_lr // 4)

    @staticmethod
    def potential(distance):
        return torch.exp(-10 * distance**2)

    def forward(self, x):
        x = append_means(x) if self.cat_means else x
        s, lr = self.f_slr(x).split([self.n_s, self.n_lr], -1)
        distance = torch.linalg.vector_norm(s[:, :, None] - s[:, None], dim=-1)
        distance, order = distance.sort(-1)
        distance, order = distance[..., : self.k], order[..., : self.k]
        found = torch.stack([one[rows] for one, rows in zip(lr, order)]) * self.potential(distance)[..., None]
        found = self.sa_agg(found) if self.use_sa else found
        return self.f_out(torch.cat([x, *(agg(found) for agg in self.agg_methods)], -1))


class GravNet(nn.Module):
    def __init__(self, n_fpv, n_out, **arguments):
        super().__init__()
        self.grav_layers = nn.ModuleList()
        for width in n_out:
            self.grav_layers.append(GravNetLayer(n_fpv, n_out=width, **arguments))
            n_fpv = width

    @staticmethod
    def _agg_mean(x):
        return x.mean(2)

    @staticmethod
    def _agg_max(x):
        return x.max(2)[0]

    @staticmethod
    def _agg_absmax(x):
        return x.abs().max(2)[0]

    def forward(self, x):
        outs = [x]
        for layer in self.grav_layers:
            outs.append(layer(outs[-1]))
        return torch.cat(outs[1:], -1)


class GraphCollapser(nn.Module):
    def __init__(self, n_fpv, flatten=False, n_sa_layers=0, sa_class=SelfAttention, f_final_outs=None, gfv_pos=None):
        super().__init__()
        self.flatten, self.n_sa_layers, self.gfv_pos, self.f_inital = flatten, n_sa_layers, gfv_pos, identity
        self.agg_methods = [self._agg_mean, self._agg_max]
        if n_sa_layers:
            self.sa_layers = nn.ModuleList([sa_class(n_fpv, 3) for _ in range(n_sa_layers)])
            n_fpv *= n_sa_layers
        n_fpv *= 2 if gfv_pos else 1
        self.f_final = layers(n_fpv, *f_final_outs) if f_final_outs else identity

    @staticmethod
    def _agg_mean(x):
        return x.mean(1)

    @staticmethod
    def _agg_max(x):
        return x.max(1)[0]

    def _agg(self, x):
        return x.flatten(1) if self.flatten else torch.cat([agg(x) for agg in self.agg_methods], -1)

    def forward(self, x):
        outs = []
        for layer in self.sa_layers if self.n_sa_layers else []:
            outs.append(layer(outs[-1] if outs else x))
        x = torch.cat(outs, -1) if outs else x
        return self._agg(self.f_final(append_means(x) if self.gfv_pos else x))


class NodePredictor(GraphCollapser):
    def __init__(self, n_fpv, transpose_out, **arguments):
        super().__init__(n_fpv, flatten=True, **arguments)
        self.transpose_out, self.out_act = transpose_out, nn.LogSoftmax(1)

    def _agg(self, x):
        return self.out_act(x.transpose(1, 2) if self.transpose_out else x)


class RunningBatchNorm2d(nn.Module):
    def __init__(self, nf):
        super().__init__()
        self.nf, self.mom, self.n_warmup, self.eps, self.affine = nf, 0.1, 20, 1e-5, True
        self.weight, self.bias = nn.Parameter(torch.ones(nf, 1, 1)), nn.Parameter(torch.zeros(nf, 1, 1))
        for name in ("sums", "sqrs"):
            self.register_buffer(name, torch.zeros(1, nf, 1, 1))
        for name in ("batch", "count"):
            self.register_buffer(name, torch.tensor(0.0))

    def forward(self, x):
        share = 1 - (1 - self.mom) / (len(x) - 1 + self.eps) ** 0.5
        if self.training:
            new = [x.sum((0, 2, 3), keepdim=True), (x * x).sum((0, 2, 3), keepdim=True), x.numel() / self.nf]
            for name, value in zip(("sums", "sqrs", "count"), new):
                old = getattr(self, name).detach()
                setattr(self, name, old + share * (value - old))  # keeps this batch's graph, as LUMIN does
            self.batch += len(x)
        mean = self.sums / self.count
        variance = self.sqrs / self.count - mean**2
        variance = variance.clamp_min(0.01) if self.batch < self.n_warmup else variance
        return (x - mean) / (variance + self.eps).sqrt() * self.weight + self.bias


class Net(nn.Module):
    """All of them in one model, deep inside other modules."""

    def __init__(self, sa_class=SelfAttention, **arguments):
        super().__init__()
        torch.manual_seed(6)
        aggs = [GravNet._agg_mean, GravNet._agg_max, GravNet._agg_absmax]
        self.norm = RunningBatchNorm2d(5)
        graph = GravNet(5, [6, 8], n_s=3, n_lr=8, k=4, agg_methods=aggs, **arguments)
        self.stages = nn.ModuleDict({"graph": graph})
        self.collapse = GraphCollapser(14, n_sa_layers=2, sa_class=sa_class, f_final_outs=[6], gfv_pos="pre-final")
        self.out = NodePredictor(12, transpose_out=True, n_sa_layers=1, f_final_outs=[5])
        self.double()

    def forward(self, x):
        n, m, rows, _ = x.shape
        x = self.norm(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return self.out(self.collapse(self.stages["graph"](x.flatten(0, 1))).view(n, m, -1))


def muons(seed=3, rows=9):
    return torch.randn(4, 6, rows, 5, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def step(model, x):
    out = model(x)
    gradients = torch.autograd.grad(out.square().sum(), list(model.parameters()))
    return [out.detach(), *gradients, *(b.detach().clone() for b in model.buffers())]


def assert_same(got, want):
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)


VARIANTS = {
    "plain": {},
    "attention over neighbours": dict(sa_class=SelfAttention),
    "offset attention over neighbours": dict(sa_class=OffsetSelfAttention),
    "own potential": dict(potential=lambda distance: torch.exp(-distance)),
    "no means": dict(cat_means=False),
}


def build(variant):
    arguments = dict(VARIANTS[variant])
    neighbours = arguments.pop("sa_class", None)
    model = Net(sa_class=neighbours or SelfAttention, **arguments)
    if neighbours is not None:
        for layer in model.stages["graph"].grav_layers:
            layer.use_sa, layer.sa_agg = True, neighbours(8, 2).double()
    return model


@pytest.mark.parametrize("variant", VARIANTS)
def test_results_stay(variant):
    """Outputs, gradients and buffers over two training steps and in evaluation, fewer rows than k included."""
    plain = build(variant)
    model = copy.deepcopy(plain)
    keys = list(model.state_dict())
    assert mnn.accelerate(model) is model and list(model.state_dict()) == keys
    for seed, rows in ((3, 9), (4, 3)):
        assert_same(step(model, muons(seed, rows)), step(plain, muons(seed, rows)))
    plain.eval(), model.eval()
    torch.testing.assert_close(model(muons(5)), plain(muons(5)), rtol=1e-8, atol=1e-9)


def test_every_known_module_is_swapped():
    model = mnn.accelerate(Net())
    swapped = {type(m).__name__ for m in model.modules() if "forward" in vars(m)}
    known = {"GravNet", "GravNetLayer", "GraphCollapser", "NodePredictor", "SelfAttention"}
    assert swapped == known | {"RunningBatchNorm2d", "Swish"}


def test_no_pair_of_rows_is_kept():
    """A layer of 200 rows keeps nothing for the backward pass that has 200 × 200 values."""
    x, sizes = muons(rows=200), []
    for model in (Net(), mnn.accelerate(Net())):
        seen = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.numel()) or t, lambda t: t):
            model(x)
        sizes.append(max(seen))
    assert sizes[0] >= 24 * 200 * 200 > sizes[1]


def test_after_training_without():
    """LUMIN leaves the last batch's graph on its buffers; accelerating then must not drag it along."""
    model, plain = Net(), Net()
    for one in (model, plain):
        one(muons()).sum().backward()
    mnn.accelerate(model)
    assert not any(b.requires_grad for b in model.buffers())
    assert_same(step(model, muons(4)), step(plain, muons(4)))


def test_twice_is_once():
    model = mnn.accelerate(mnn.accelerate(Net()))
    assert_same(step(model, muons()), step(Net(), muons()))


def test_batch_norm_takes_every_shape():
    x, want = muons(), LCBatchNorm1d(nn.BatchNorm1d(5)).double()(muons().flatten(0, 1))
    for shape in ((24, 9, 5), (4, 6, 9, 5), (216, 5)):
        norm = mnn.accelerate(LCBatchNorm1d(nn.BatchNorm1d(5)).double())
        torch.testing.assert_close(norm(x.reshape(shape)).reshape(want.shape), want)


def test_hooks_still_run():
    model, seen = mnn.accelerate(Net()), []
    for module in model.modules():
        module.register_forward_hook(lambda m, args, out: seen.append(type(m).__name__))
    want = Net()(muons())
    torch.testing.assert_close(model(muons()), want, rtol=1e-8, atol=1e-9)
    assert {"GravNetLayer", "Linear", "SelfAttention", "NodePredictor", "RunningBatchNorm2d"} <= set(seen)


def test_copies_and_pickles():
    model = mnn.accelerate(Net())
    want = step(copy.deepcopy(model), muons())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert_same(step(twin, muons()), want)  # bound to its own parameters
    back = pickle.loads(pickle.dumps(twin))
    assert back.collapse.forward.__func__ is GraphCollapser.forward
    assert mnn.accelerate(back).collapse.forward.__func__ is not GraphCollapser.forward


class Steeper(GravNetLayer):
    """A subclass of another name: nobody knows what it does."""


class Foreign(nn.Module):
    pass


Foreign.__name__ = "SelfAttention"


def test_others_are_left_alone():
    """Subclasses of other names, foreign classes of a known name, muvox's own modules."""
    own = mnn.SelfAttention(8, 2)
    foreign = Foreign()
    steeper = Steeper(5, n_s=3, n_lr=8, k=4, agg_methods=[GravNet._agg_mean], n_out=6)
    mnn.accelerate(nn.ModuleList([own, foreign, steeper]))
    assert not any("forward" in vars(module) for module in (own, foreign, steeper))


def test_other_potential_of_the_class_is_kept(monkeypatch):
    monkeypatch.setattr(GravNetLayer, "potential", staticmethod(lambda distance: torch.exp(-distance)))
    assert_same(step(mnn.accelerate(Net()), muons()), step(Net(), muons()))


def test_compiles_into_one_graph():
    model = mnn.accelerate(Net())
    graph = torch.compile(model.stages["graph"], fullgraph=True, backend="aot_eager")
    x = muons()[0]
    torch.testing.assert_close(graph(x), Net().stages["graph"](x), rtol=1e-8, atol=1e-9)
