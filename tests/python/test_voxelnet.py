"""VoxelNet: shapes and errors, agreement of its shortcuts with the plain composition, and LUMIN's own training run."""

import copy
import json
import pickle
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

import muvox.nn as mnn
from muvox import ops
from muvox.nn import gravnet as gravnet_module

TESTS = Path(__file__).parents[1]


def centres(side=2, size=0.2):
    index = np.stack(np.meshgrid(*[np.arange(side)] * 3, indexing="ij"), -1).reshape(-1, 3)
    return ((index + 0.5) * size).astype(np.float32)


def small(**arguments):
    torch.manual_seed(1)
    widths = dict(centres=centres(), n_lr=6, n_out=10, n_final=8, sa_width=3, sa_width_out=4, k_mu=5, k_vox=4)
    return mnn.VoxelNet(**(widths | arguments)).double()


def muons(volumes=2, rows=11, seed=0):
    return torch.randn(volumes, 8, rows, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# Shape of the network


def test_parameter_count():
    assert sum(p.numel() for p in mnn.VoxelNet(centres(5)).parameters()) == 63_763


def test_initial_weights_are_lumins():
    """Modules draw their weights in LUMIN's order: the seed of its run gives its initial state."""
    torch.manual_seed(7)
    state = mnn.VoxelNet(grid_centres((4, 4, 4), (0, 0, 0.4), (0.2, 0.2, 0.2))).state_dict()
    want = state_of("init")
    assert state.keys() == want.keys()
    for key, value in want.items():
        torch.testing.assert_close(state[key], value, rtol=0, atol=1e-7, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("norm", ["lumin", "batch"])
def test_classes_are_normalised(norm):
    out = small(norm=norm)(muons(3))
    assert out.shape == (3, 5, 8)
    torch.testing.assert_close(out.exp().sum(1), torch.ones(3, 8, dtype=torch.float64))


def test_log_x0_head_gives_mean_and_log_variance():
    net = small(head="log_x0")
    out = net(muons(3))
    assert out.shape == (3, 2, 8)
    torch.nn.functional.gaussian_nll_loss(out[:, 0], torch.zeros(3, 8).double(), out[:, 1].exp()).backward()
    assert all(p.grad.isfinite().all() for p in net.parameters())
    assert out.min() < 0 < out.max()  # not squashed by an activation


def test_voxels_without_muons():
    net = small()
    net(muons())
    state = {key: value.clone() for key, value in net.mu_norm.state_dict().items()}
    out = net(muons(rows=0))
    assert out.isfinite().all()
    for key, value in net.mu_norm.state_dict().items():
        assert torch.equal(value, state[key]), f"{key} changed by an empty batch"


@pytest.mark.parametrize("arguments, message", [
    (dict(norm="layer"), "norm is 'layer'"),
    (dict(head="x0"), "head is 'x0'"),
    (dict(centres=np.zeros((4, 2))), r"centres have shape \(4, 2\)"),
])
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        mnn.VoxelNet(**({"centres": centres()} | arguments))


@pytest.mark.parametrize("x, splits, message", [
    (torch.zeros(2, 7, 4, 9), None, r"\(2, 7, 4, 9\)"),
    (torch.zeros(2, 8, 4, 8), None, r"\(2, 8, 4, 8\)"),
    (torch.zeros(8, 4, 9), None, r"\(8, 4, 9\)"),
    (torch.zeros(20, 8), torch.arange(9), r"\(20, 8\)"),
    (torch.zeros(20, 9), torch.arange(10), r"splits has shape \(10,\)"),
])
def test_bad_input(x, splits, message):
    with pytest.raises(ValueError, match=message):
        mnn.VoxelNet(centres())(x, splits)


@pytest.mark.parametrize("ragged", [False, True])
def test_centres_of_another_grid(ragged):
    """Given to forward they do what a network with them and the same state does."""
    net = small(centres=centres(3, 0.1)[:13], norm="batch")
    other = small(norm="batch")
    other.load_state_dict(dict(net.state_dict(), vox_dists=other.vox_dists))
    x, splits = torch.randn(2, 13, 7, 9, dtype=torch.float64), None
    if ragged:
        x, splits = x.reshape(-1, 9), torch.arange(0, 183, 7)
    places = torch.from_numpy(centres(3, 0.1)[:13])
    assert_same([other(x, splits, places), *other.vox_norm.buffers()], [net(x, splits), *net.vox_norm.buffers()])
    with pytest.raises(ValueError, match=r"centres have shape \(13, 2\)"):
        other(x, splits, places[:, :2])
    with pytest.raises(ValueError, match=r"shape \(27,\)|shape \(2, 13, 7, 9\)"):
        other(x, splits)


def test_copies_and_pickles():
    net = small()
    net(muons()).sum().backward()
    want = net.eval()(muons())
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(other(muons()), want)


# The shortcuts against the plain composition


def run(net, x, splits=None):
    """Output, gradients and buffers of one training step."""
    out = net(x, splits)
    gradients = torch.autograd.grad(out.square().sum(), list(net.parameters()))
    return [out.detach(), *gradients, *net.buffers()]


def assert_same(got, want):
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("norm", ["lumin", "batch"])
def test_hooks_see_the_pairs_of_voxels(norm):
    """With a hook on the norm the tensor of pairs is made, without it is not: same results, same state after."""
    net = small(norm=norm)
    plain, seen = copy.deepcopy(net), []
    plain.vox_norm.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    assert_same(run(net, muons()), run(plain, muons()))
    assert seen[0].shape == ((2, 20, 8, 8) if norm == "lumin" else (2, 8, 8, 20))


@pytest.mark.parametrize("norm", ["lumin", "batch"])
def test_ragged_input_equals_uniform(norm):
    net = small(norm=norm)
    other, x = copy.deepcopy(net), muons()
    splits = torch.arange(0, 2 * 8 * 11 + 1, 11)
    assert_same(run(net, x), run(other, x.reshape(-1, 9), splits))


def test_ragged_voxels_do_not_mix():
    """A muon more in one voxel leaves the vectors of the others alone."""
    net = small().eval()
    lengths = torch.tensor([0, 3, 9, 1, 0, 30, 2, 5])
    x = torch.randn(int(lengths.sum()), 9, dtype=torch.float64)
    before = net.muon_stage(x, torch.nn.functional.pad(lengths.cumsum(0), (1, 0)))
    lengths[3] += 1
    more = torch.cat([x[:13], torch.randn(1, 9, dtype=torch.float64), x[13:]])
    after = net.muon_stage(more, torch.nn.functional.pad(lengths.cumsum(0), (1, 0)))
    changed = ((before - after).abs() > 1e-9).any(-1)[0]  # matrix products round differently for another number of rows
    assert changed.tolist() == [voxel == 3 for voxel in range(8)]


def test_no_pair_tensor_is_kept():
    """Saved for backward: less than the pairs' input columns alone would take, and no tensor of muon pairs."""
    net = mnn.VoxelNet(centres(4))
    x, sizes = torch.randn(1, 64, 90, 9), {}

    def pack(t):
        sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        net(x).sum().backward()
    row = 4 * 90 * 64
    assert max(sizes.values()) <= 52 * row  # the widest hidden layer of all muons; pairs of muons would be 90 rows
    assert 84 * 4 * 64**2 not in sizes.values() and 168 * 4 * 64**2 not in sizes.values()


def test_jacobian_by_vmap():
    """The way TomOpt takes derivatives of predictions: the backward pass of all outputs at once, over one graph."""
    net, x = small().eval(), muons(volumes=1, rows=7).requires_grad_()
    out = net(x).flatten()
    (together,) = torch.autograd.grad(out, x, torch.eye(40).double(), is_grads_batched=True, retain_graph=True)
    one_by_one = [torch.autograd.grad(value, x, retain_graph=True)[0] for value in out]
    torch.testing.assert_close(together, torch.stack(one_by_one), rtol=1e-9, atol=1e-11)


def test_exports():
    """torch.export, also with another number of volumes and muons than the example has."""
    net = small().eval()
    sizes = {0: torch.export.Dim.DYNAMIC, 2: torch.export.Dim.DYNAMIC}
    program = torch.export.export(net, (muons(),), dynamic_shapes={"x": sizes})
    other = muons(volumes=3, rows=4)
    torch.testing.assert_close(program.module()(other), net(other), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("norm", ["lumin", "batch"])
def test_compiles_into_one_graph(norm):
    net = small(norm=norm)
    other = copy.deepcopy(net)
    other.muon_stage = torch.compile(other.muon_stage, fullgraph=True, backend="aot_eager")
    assert_same(run(net, muons()), run(other, muons()))
    if norm == "lumin":
        net.eval(), other.eval()
        assert_same(run(net, muons(seed=1)), run(other, muons(seed=1)))


def test_half_keeps_the_state_of_the_norms():
    for norm in ("lumin", "batch"):
        net = small(norm=norm).float()
        for _ in range(3):
            net(muons().float())
        want = net.eval()(muons().float())
        half = copy.deepcopy(net).to(torch.bfloat16)
        for module in (half.mu_norm, half.vox_norm):
            assert all(b.dtype != torch.bfloat16 for b in module.buffers())
            assert all(p.dtype == torch.bfloat16 for p in module.parameters())
        out = half(muons().bfloat16())
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.float(), want, rtol=0.1, atol=0.15)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", ["lumin", "batch"])
def test_trains_under_autocast(norm, dtype, ragged):
    """A step like in float: outputs and buffers to 4 units in the last place of the largest; gradients, all in float,
    to 48 of the largest of each parameter, or of a hundredth of the largest of all where they vanish by cancellation.

    k is the number of rows, so that rounding chooses no neighbours."""
    net, results = small(norm=norm, k_mu=11, k_vox=8).float(), []
    x, splits = muons(3).float(), None
    if ragged:
        x, splits = x.reshape(-1, 9), torch.arange(0, 265, 11)
    for enabled in (False, True):
        module = copy.deepcopy(net)
        with torch.autocast("cpu", dtype=dtype, enabled=enabled):
            out = module(x, splits)
        gradients = torch.autograd.grad(out.float().square().mean(), list(module.parameters()))
        results.append(([out.detach(), *module.buffers()], gradients))
    largest = max(g.abs().max() for g in results[0][1])
    for units, least, got, want in zip((4, 48), (0, largest / 100), results[1], results[0]):
        for one, other in zip(got, want, strict=True):
            assert one.dtype == other.dtype or one is got[0]
            limit = units * torch.finfo(dtype).eps * max(other.abs().max(), least)
            assert one.isfinite().all() and (one - other).abs().max() <= limit
    assert not torch.equal(results[1][1][0], results[0][1][0])


# LUMIN's training run on x0net250: the recipe that made the golden files

MUONS, STEPS, SUB = 64, 900, 4
ORDER_SEED, PICK_SEED, EVAL_SEED = 11, 13, 17
LR, LR_START, WARM = 3e-3, 3e-5, 0.25
BLOCK_FRACTION = 0.07


def state_of(name):
    return {key: torch.from_numpy(value) for key, value in np.load(TESTS / "golden" / f"voxelnet_{name}.npz").items()}


def grid_centres(shape, origin, size):
    index = np.stack(np.meshgrid(*[np.arange(n) for n in shape], indexing="ij"), -1).reshape(-1, 3)
    return (np.asarray(origin) + (index + 0.5) * np.asarray(size)).astype(np.float32)


class Sample:
    """Volumes of the committed sample by their ids in x0net250, cut to the voxels with all indices below 4."""

    def __init__(self):
        with h5py.File(TESTS / "data" / "x0net250-sample.h5") as file:
            names = [n.decode() if isinstance(n, bytes) else n for n in file["muons"].attrs["columns"]]
            self.muons = self.input_columns(dict(zip(names, file["muons"][:].T)))
            self.splits = file["row_splits"][:]
            self.place = {int(v): i for i, v in enumerate(file["volume_id"][:])}
            self.material = file["material"][:, :SUB, :SUB, :SUB].reshape(len(self.place), -1).astype(np.int64)
            self.block = self.material != file["background"][:][:, None]
            self.centres = grid_centres([SUB] * 3, file.attrs["grid_origin"], file.attrs["voxel_size"])

    @staticmethod
    def input_columns(c):
        angles = [np.clip(np.abs(c[f"theta_{a}_in"] - c[f"theta_{a}_out"]), 0, 0.3) * 100 for a in "xy"]
        offset = [np.clip(c[f"d{a}"], -0.02, 0.02) * 1000 for a in "xy"]
        x0 = np.log10(np.clip(c["pred_x0"], 1e-4, 1e2))
        return np.stack([*angles, *offset, x0, *(np.clip(c[f"poca_{a}"], -2, 4) for a in "xyz")], 1).astype(np.float32)

    def batch(self, volumes, rng):
        """(volumes, voxels, muons, 9): per muon 5 columns, PoCA - centre, its length."""
        chosen = []
        for volume in volumes:
            start, end = self.splits[self.place[int(volume)] : self.place[int(volume)] + 2]
            chosen.append(start + rng.choice(end - start, MUONS, replace=end - start < MUONS))
        rows = torch.from_numpy(self.muons[np.stack(chosen)])
        poca = rows[:, None, :, 5:] - torch.from_numpy(self.centres)[:, None, :]
        own = rows[:, None, :, :5].expand(*poca.shape[:-1], 5)
        return torch.cat([own, poca, poca.norm(dim=-1, keepdim=True)], -1)


@pytest.fixture(scope="module")
def sample():
    return Sample()


class Exchange:
    """Stands for muvox.ops in GravNet; in one row of one stage the k-th and (k + 1)-th neighbours change places."""

    def __init__(self, stage=None, row=None):
        self.stage, self.row, self.gaps = stage, row, []

    def __getattr__(self, name):
        return getattr(ops, name)

    def gravnet(self, coords, feats, k, *, splits=None, scale=10.0, aggregates=("mean", "max")):
        neighbours, distance2 = (t.flatten(0, -2) for t in ops.knn(coords, k + 1))
        if len(self.gaps) == self.stage:
            for t in (neighbours, distance2):
                t[self.row, k - 1] = t[self.row, k]
        self.gaps.append((distance2[:, k] - distance2[:, k - 1]) / distance2[:, k])
        shape = (*coords.shape[:-1], k)
        weights = torch.exp(-scale * distance2[:, :k]).reshape(shape)
        return ops.aggregate(feats, neighbours[:, :k].reshape(shape), weights, aggregates=aggregates)


def is_neighbour_swap(net, x, want, voxel, monkeypatch):
    """Whether exchanging two neighbours of nearly equal distance (relative gap < 1e-4) brings the voxel to `want`."""

    def error(exchange):
        monkeypatch.setattr(gravnet_module, "ops", exchange)
        return float((net(x)[0, :, voxel] - want[:, voxel]).abs().max())

    plain = Exchange()
    if error(plain) < 1e-4:
        return True
    for stage, gaps in enumerate(plain.gaps):
        near = [row for row in gaps.argsort().tolist() if gaps[row] < 1e-4][:60]
        if any(error(Exchange(stage, row)) < 1e-4 for row in near):
            return True
    return False


def test_trained_state_gives_lumins_predictions(sample, monkeypatch):
    """At least 99.9 % of the voxels within 1e-4, and each of the rest a swap of neighbours that are almost tied."""
    want = np.load(TESTS / "golden" / "voxelnet_val_logp.npz")
    net = mnn.VoxelNet(sample.centres).eval()
    net.load_state_dict(state_of("final"), strict=True)
    errors, odd = [], []
    with torch.no_grad():
        for volume, logp in zip(want["volumes"], torch.from_numpy(want["logp"])):
            x = sample.batch([volume], np.random.default_rng([EVAL_SEED, int(volume)]))
            errors.append((net(x)[0] - logp).abs().amax(0))
            odd += [(x, logp, int(voxel)) for voxel in (errors[-1] >= 1e-4).nonzero()]
        errors = torch.stack(errors)
        assert errors.shape == (200, 64)
        assert (errors < 1e-4).float().mean() >= 0.999
        assert errors.median() < 1e-5
        for x, logp, voxel in odd:
            assert is_neighbour_swap(net, x, logp, voxel, monkeypatch), f"voxel {voxel} differs by more than a swap"


def learning_rate(step):
    warm = WARM * STEPS
    if step < warm:
        return LR_START + (LR - LR_START) * step / warm
    return LR_START + (LR - LR_START) * 0.5 * (1 + np.cos(np.pi * (step - warm) / (STEPS - warm)))


def test_training_follows_lumins_losses(sample):
    """Ten Adam steps of four volumes from LUMIN's initial state: its losses to 1e-3."""
    want = json.loads((TESTS / "golden" / "voxelnet_losses.json").read_text())["losses"]
    net = mnn.VoxelNet(sample.centres)
    net.load_state_dict(state_of("init"), strict=True)
    order = np.random.default_rng(ORDER_SEED).permutation(1000)  # ids of the training volumes
    pick = np.random.default_rng(PICK_SEED)
    optimiser = torch.optim.Adam(net.parameters(), betas=(0.9, 0.99))
    losses = []
    for step, volumes in enumerate(order[:40].reshape(10, 4)):
        place = [sample.place[int(v)] for v in volumes]
        material, block = torch.from_numpy(sample.material[place]), torch.from_numpy(sample.block[place])
        weights = torch.where(block, 0.5 / BLOCK_FRACTION, 0.5 / (1 - BLOCK_FRACTION))
        nll = torch.nn.functional.nll_loss(net(sample.batch(volumes, pick)), material, reduction="none")
        loss = (weights * nll).mean()
        optimiser.param_groups[0]["lr"] = float(learning_rate(step))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    np.testing.assert_allclose(losses, want, rtol=0, atol=1e-3)
