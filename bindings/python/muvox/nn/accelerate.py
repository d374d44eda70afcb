"""LUMIN's own modules on muvox's operators: their forward passes are swapped, nothing else changes."""

from types import MethodType

import torch
from torch import Tensor, nn

from muvox.nn.activations import Swish
from muvox.nn.attention import OffsetSelfAttention, SelfAttention
from muvox.nn.blocks import aggregations
from muvox.nn.collapse import graph_collapser, node_predictor
from muvox.nn.gravnet import gaussian_potential, gravnet, gravnet_layer
from muvox.nn.norms import lc_batch_norm, running_norm
from muvox.nn.sets import Block, check_rows


def _gravnet_layer(self, x: Tensor, splits: Tensor | None = None) -> Tensor:
    check_rows(x, splits, "GravNetLayer")
    return gravnet_layer(self, [Block(x)], splits)


def _gravnet(self, x: Tensor, splits: Tensor | None = None) -> Tensor:
    return gravnet(self, [Block(x)], splits)


def _graph_collapser(self, x: Tensor, splits: Tensor | None = None) -> Tensor:
    return graph_collapser(self, x, splits)


def _node_predictor(self, x: Tensor) -> Tensor:
    return node_predictor(self, x)


def _running_norm(self, x: Tensor) -> Tensor:
    return running_norm(self, x)


def _lc_batch_norm(self, x: Tensor) -> Tensor:
    return lc_batch_norm(self, x)


_ATTENTION = ("q", "k", "v", "out", "n_fpv", "n_a")
_COLLAPSER = ("f_inital", "f_final", "n_sa_layers", "gfv_pos", "flatten", "agg_methods")
_NORM = ("sums", "sqrs", "batch", "count", "nf", "mom", "n_warmup", "eps", "weight", "bias")

# Class name: its forward pass, the members it needs.
FORWARDS = {
    "GravNetLayer": (_gravnet_layer, ("f_slr", "f_out", "n_s", "n_lr", "k", "cat_means", "use_sa", "agg_methods")),
    "GravNet": (_gravnet, ("grav_layers",)),
    "GraphCollapser": (_graph_collapser, _COLLAPSER),
    "NodePredictor": (_node_predictor, (*_COLLAPSER, "out_act", "transpose_out")),
    "SelfAttention": (SelfAttention.forward, _ATTENTION),
    "OffsetSelfAttention": (OffsetSelfAttention.forward, _ATTENTION),
    "RunningBatchNorm1d": (_running_norm, _NORM),
    "RunningBatchNorm2d": (_running_norm, _NORM),
    "RunningBatchNorm3d": (_running_norm, _NORM),
    "LCBatchNorm1d": (_lc_batch_norm, ("bn",)),
    "Swish": (Swish.forward, ("inplace",)),
}
for _forward, _ in FORWARDS.values():
    _forward.__name__ = "forward"  # a pickled model finds its class's own forward again


def accelerate(model: nn.Module) -> nn.Module:
    """Run the LUMIN modules inside `model` on muvox's operators; changes the model in place and returns it.

    Modules are recognised by the name of their class and by their members (LUMIN is not imported): GravNetLayer,
    GravNet, GraphCollapser, NodePredictor, SelfAttention, OffsetSelfAttention, LCBatchNorm1d, RunningBatchNorm1d, 2d,
    3d and Swish.
    Subclasses of other names and modules of other makes are left alone. Parameters, buffers, state_dict keys, hooks and
    the class stay; results agree with LUMIN's up to rounding (and the choice among neighbours at equal distance).
    A model that is pickled whole comes back with LUMIN's own forward passes: accelerate it again.
    """
    for module in model.modules():
        kind = type(module)
        forward, members = FORWARDS.get(kind.__name__, (None, ()))
        if forward is None or kind.__module__.startswith("muvox.") or not all(hasattr(module, m) for m in members):
            continue
        if "agg_methods" in members:
            module.aggregates = aggregations(module.agg_methods)
        if kind.__name__ == "GravNetLayer" and "potential" not in vars(module) and _is_gaussian(module.potential):
            module.potential = gaussian_potential
        if forward is _running_norm:
            for state in module.buffers(recurse=False):
                state.detach_()  # LUMIN leaves the last batch's graph on them
        module.forward = MethodType(forward, module)
    return model


def _is_gaussian(potential) -> bool:
    distance = torch.tensor([0.0, 0.1, 0.4, 1.0], dtype=torch.float64)
    return torch.allclose(potential(distance), gaussian_potential(distance), rtol=1e-12, atol=0)
