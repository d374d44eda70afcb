"""The network's modules on the device: those whose operators have kernels there, those that compose plain torch in
their place, and all of VoxelNet, which is X0Net's configuration. Forward and backward are what the CPU gives."""

import copy

import pytest
import torch

from device.compare import log_normal_sizes, splits_of
from muvox import nn

pytestmark = pytest.mark.cuda

ATTENTIONS = {"": nn.SelfAttention, ", offset": nn.OffsetSelfAttention}
COLLAPSE = dict(f_initial_outs=[8], n_sa_layers=2, sa_width=3, f_final_outs=[7], global_feat_vec=True, act="swish")
GRAVNET = dict(cat_means=True, f_slr_depth=2, n_s=3, n_lr=8, k=6, f_out_depth=1, n_out=[5, 4], act="swish")
MODULES = {
    "SelfAttention": lambda sa: sa(6, 3),
    "GraphCollapser": lambda sa: nn.GraphCollapser(None, 6, flatten=False, sa_class=sa, **COLLAPSE),
    "NodePredictor": lambda sa: nn.NodePredictor(None, 6, "linear", True, sa_class=sa, **COLLAPSE),
    "GravNet": lambda sa: nn.GravNet(None, 6, sa_class=sa, **GRAVNET),
    "GravNet with self-attention": lambda sa: nn.GravNet(None, 6, use_sa=True, sa_class=sa, **GRAVNET),
}


def step(module, *inputs):
    """Output, gradients of the input and all parameters, and the module's state, on the CPU."""
    inputs = [x if x is None else x.detach().to(next(module.parameters()).device) for x in inputs]
    inputs[0].requires_grad_()
    out = module(*inputs)
    gradients = torch.autograd.grad(out.square().sum(), [inputs[0], *module.parameters()])
    return [out.detach().cpu()], [g.cpu() for g in gradients], [b.cpu() for b in module.buffers()]


def assert_as_on_the_cpu(module, *inputs, tolerance):
    """Relative to the largest of each tensor, or to a hundredth of the largest of all where one vanishes by cancellation."""
    there = copy.deepcopy(module).cuda()
    for found, right in zip(step(there, *inputs), step(module, *inputs)):
        least = max((y.abs().max().item() for y in right if y.numel()), default=0) / 100
        for a, b in zip(found, right, strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape and a.isfinite().all()
            if a.numel():
                assert (a - b).abs().max() <= tolerance * max(b.abs().max(), least)


@pytest.mark.parametrize("form", ["uniform", "ragged"])
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", MODULES)
def test_modules(name, attention, form):
    """In double: in float another rounding may choose other neighbours."""
    module = MODULES[name](ATTENTIONS[attention]).double()
    generator = torch.Generator().manual_seed(1)
    if form == "uniform":
        for shape in ((5, 30, 6), (2, 3, 9, 6), (9, 6), (300, 2, 6)):
            assert_as_on_the_cpu(module, torch.randn(shape, generator=generator).double(), tolerance=1e-10)
    elif name != "NodePredictor":  # which has no ragged form
        splits = splits_of(log_normal_sizes(40, generator, 400))
        x = torch.randn(int(splits[-1]), 6, generator=generator).double()
        assert_as_on_the_cpu(module, x, splits, tolerance=1e-10)


@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16], ids=str)
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", MODULES)
def test_modules_under_autocast(name, attention, dtype):
    """Finite, near to float, gradients in float; neighbours are all rows, or another rounding would choose others."""
    module = MODULES[name](ATTENTIONS[attention]).cuda()
    x = torch.randn(50, 6, 6, device="cuda").requires_grad_()
    right = module(x)
    with torch.autocast("cuda", dtype):
        out = module(x)
    assert (out - right).abs().max() <= 16 * torch.finfo(dtype).eps * right.abs().max()
    found = torch.autograd.grad(out.float().square().sum(), [x, *module.parameters()])
    assert all(g.dtype == torch.float and g.isfinite().all() for g in found)


def centres(side):
    axis = (torch.arange(side) + 0.5) * 0.2
    return torch.cartesian_prod(axis, axis, axis)


def muons(voxels, form, dtype):
    """Two volumes; ragged ones with voxels that no muon crosses."""
    generator = torch.Generator().manual_seed(2)
    if form == "uniform":
        return torch.randn(2, voxels, 40, 9, generator=generator, dtype=dtype), None
    splits = splits_of(log_normal_sizes(2 * voxels, generator, 90))
    return torch.randn(int(splits[-1]), 9, generator=generator, dtype=dtype), splits


@pytest.mark.parametrize("form", ["uniform", "ragged"])
@pytest.mark.parametrize("norm", ["lumin", "batch"])
@pytest.mark.parametrize("head", ["classes", "log_x0"])
def test_voxelnet(head, norm, form):
    """X0Net's widths, in double; the state of the norms too, in training and after it."""
    net = nn.VoxelNet(centres(4), head=head, norm=norm).double()
    assert_as_on_the_cpu(net, *muons(64, form, torch.double), tolerance=1e-9)
    assert_as_on_the_cpu(net.eval(), *muons(64, form, torch.double), tolerance=1e-9)


@pytest.mark.parametrize("form", ["uniform", "ragged"])
@pytest.mark.parametrize("norm", ["lumin", "batch"])
def test_voxelnet_in_float(norm, form):
    """As it is trained, but for k: all rows are neighbours, or another rounding would choose others."""
    net = nn.VoxelNet(centres(3), norm=norm, k_mu=90, k_vox=27)
    assert_as_on_the_cpu(net, *muons(27, form, torch.float), tolerance=5e-4)
