"""Self-attention over the rows of a set, with LUMIN's arguments and state_dict keys."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from muvox import ops
from muvox.nn import _plain
from muvox.nn.activations import Swish, lookup_act, lookup_normal_init
from muvox.nn.blocks import new_linear, tail
from muvox.nn.sets import check_rows, has_hooks


class SelfAttention(nn.Module):
    """x + out(softmax(q kᵀ / sqrt(n_a)) v) over the rows of each set.

    Arguments:
        n_fpv: features of a row
        n_a: width of queries and keys, at least 1
        do, bn, act: dropout rate, batch norm and activation of the output layer
        lookup_init, lookup_act, bn_class: as in LUMIN
    """

    def __init__(
        self,
        n_fpv: int,
        n_a: int,
        do: float = 0,
        bn: bool = False,
        act: str = "relu",
        lookup_init: Callable = lookup_normal_init,
        lookup_act: Callable = lookup_act,
        bn_class: Callable[[int], nn.Module] = nn.BatchNorm1d,
    ):
        super().__init__()
        if n_a < 1:
            raise ValueError(f"{type(self).__name__}: n_a is {n_a}, accepted is 1 or more")
        self.n_fpv, self.n_a, self.do, self.bn, self.act = n_fpv, n_a, do, bn, act
        self.lookup_init, self.lookup_act, self.bn_class = lookup_init, lookup_act, bn_class
        self.q = self._linear(n_fpv, n_a)
        self.k = self._linear(n_fpv, n_a)
        self.v = self._linear(n_fpv, n_fpv)
        self.out = nn.Sequential(self._linear(n_fpv, n_fpv), *tail(self, n_fpv))

    def _linear(self, fan_in: int, fan_out: int) -> nn.Linear:
        return new_linear(fan_in, fan_out, self.lookup_init("linear", fan_in, fan_out))

    def forward(self, x: Tensor, splits: Tensor | None = None) -> Tensor:
        """x (..., M, n_fpv), or (N, n_fpv) with splits (S + 1); returns the same shape."""
        return self_attention(self, x, splits)

    def get_out_size(self) -> int:
        """Features of a row of the output."""
        return self.n_fpv


class OffsetSelfAttention(SelfAttention):
    """x + out(x - A v), A = softmax of q kᵀ over the queries, each row then divided by its sum + 1e-17."""

    def forward(self, x: Tensor, splits: Tensor | None = None) -> Tensor:
        """x (..., M, n_fpv), or (N, n_fpv) with splits (S + 1); returns the same shape."""
        return offset_self_attention(self, x, splits)


def self_attention(module: nn.Module, x: Tensor, splits: Tensor | None) -> Tensor:
    """Forward pass of a module with SelfAttention's members."""
    check_rows(x, splits, "SelfAttention")
    attention = _plain.attention if _plain.needed("attention", x) else ops.attention
    return x + module.out(attention(module.q(x), module.k(x), module.v(x), splits=splits))


def offset_self_attention(module: nn.Module, x: Tensor, splits: Tensor | None) -> Tensor:
    """Forward pass of a module with OffsetSelfAttention's members."""
    check_rows(x, splits, "OffsetSelfAttention")
    attention = _plain.offset_attention if _plain.needed("offset_attention", x) else ops.offset_attention
    return x + module.out(x - attention(module.q(x), module.k(x), module.v(x), splits=splits))


ACTIVATIONS = {
    nn.Identity: "linear",
    nn.ReLU: "relu",
    nn.SELU: "selu",
    nn.Sigmoid: "sigmoid",
    nn.SiLU: "swish",
    Swish: "swish",
    nn.Mish: "mish",
}


def fused_arguments(module: nn.Module) -> dict | None:
    """layers, activation and offset of `ops.neighbour_attention`, if it computes what the module computes; else None.

    It does for both attentions of this file (also as forward of LUMIN's, see `accelerate`) with an activation that it
    knows, without batch norm, dropout in force, hooks and layers that are more than torch's own Linear.
    """
    kinds = {SelfAttention.forward: False, OffsetSelfAttention.forward: True}
    offset = kinds.get(_forward_of(module))
    if offset is None or any(has_hooks(m) for m in module.modules()) or not isinstance(module.out, nn.Sequential):
        return None
    linears = [module.q, module.k, module.v, *module.out[:1]]
    rest = [m for m in module.out[1:] if not (isinstance(m, (nn.Dropout, nn.AlphaDropout)) and _does_nothing(m))]
    if len(linears) < 4 or len(rest) > 1 or any(type(m) is not nn.Linear or m.bias is None for m in linears):
        return None
    activation = _activation_name(rest[0]) if rest else "linear"
    layers = [parameter for m in linears for parameter in (m.weight, m.bias)]
    return None if activation is None else dict(layers=layers, activation=activation, offset=offset)


def _forward_of(module: nn.Module):
    """The function that is the module's forward pass, as torch.compile finds it too: not by way of a bound method."""
    own = module.__dict__.get("forward")
    return type(module).forward if own is None else getattr(own, "__func__", None)


def _does_nothing(dropout: nn.Module) -> bool:
    return not dropout.training or dropout.p == 0


def _activation_name(module: nn.Module) -> str | None:
    if _forward_of(module) is Swish.forward:  # LUMIN's too, after `accelerate`
        return "swish"
    kind = type(module)
    if kind.__name__ == "Mish" and kind.__module__.startswith("lumin."):
        return "mish"
    return ACTIVATIONS.get(kind)
