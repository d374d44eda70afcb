"""What LUMIN's graph blocks share: layers of a linear map, an activation, a batch norm and a dropout."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from muvox.nn.activations import lookup_act, lookup_normal_init
from muvox.nn.norms import LCBatchNorm1d

AGGREGATIONS = ("mean", "max", "absmax", "sum")


def as_list(x) -> list:
    """A list of what may be one value or several."""
    return list(x) if isinstance(x, (list, tuple)) else [x]


def new_linear(fan_in: int, fan_out: int, init: Callable[[Tensor], object]) -> nn.Linear:
    """A linear layer with weights filled by `init` and zero bias."""
    layer = nn.Linear(fan_in, fan_out)
    init(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def tail(block: nn.Module, width: int) -> list[nn.Module]:
    """What follows a linear layer of `block`: activation, batch norm, dropout, as far as the block has them."""
    layers = [block.lookup_act(block.act)] if block.act != "linear" else []
    if block.bn:
        layers.append(LCBatchNorm1d(block.bn_class(width)))
    if block.do:
        layers.append(nn.AlphaDropout(block.do) if block.act == "selu" else nn.Dropout(block.do))
    return layers


def aggregations(methods) -> list[str | Callable[[Tensor], Tensor]]:
    """Aggregation methods with those of LUMIN by name: "mean", "max", "absmax", "sum"; other callables stay.

    ValueError for an unknown name, TypeError for what is neither a name nor callable.
    """
    found: list[str | Callable[[Tensor], Tensor]] = []
    for method in as_list(methods):
        if isinstance(method, str):
            name = method.lower()
            if name not in AGGREGATIONS:
                raise ValueError(f"agg_methods: got {method!r}, accepted are {', '.join(AGGREGATIONS)} and callables")
            found.append(name)
        elif callable(method):
            owner, _, name = getattr(method, "__qualname__", "").rpartition("._agg_")
            lumin = owner in ("GravNet", "GraphCollapser") and name in AGGREGATIONS
            found.append(name if lumin else method)
        else:
            raise TypeError(f"agg_methods: got {type(method).__name__}, accepted are names and callables")
    return found


class GraphBlock(nn.Module):
    """Base of the graph blocks: holds LUMIN's common arguments and builds their layers.

    Arguments:
        n_v: rows of a set; reported, never enforced
        n_fpv: features of a row
        do: dropout rate
        bn: whether each layer has a batch norm
        act: name of the activation (`lookup_act`)
        lookup_init: (activation, fan_in, fan_out) -> function that fills a weight
        lookup_act: name -> activation module
        bn_class: width -> 1-D batch norm over (sets, width, rows)
    """

    def __init__(
        self,
        n_v: int | None,
        n_fpv: int,
        do: float = 0,
        bn: bool = False,
        act: str = "relu",
        lookup_init: Callable = lookup_normal_init,
        lookup_act: Callable = lookup_act,
        bn_class: Callable[[int], nn.Module] = nn.BatchNorm1d,
    ):
        super().__init__()
        self.n_v, self.n_fpv, self.do, self.bn, self.act = n_v, n_fpv, do, bn, act
        self.lookup_init, self.lookup_act, self.bn_class = lookup_init, lookup_act, bn_class

    def _layer(self, fan_in: int, fan_out: int) -> nn.Sequential:
        linear = new_linear(fan_in, fan_out, self.lookup_init(self.act, fan_in, fan_out))
        return nn.Sequential(linear, *tail(self, fan_out))

    def _layers(self, fan_in: int, widths: Sequence[int]) -> nn.Sequential:
        widths = [fan_in, *widths]
        return nn.Sequential(*[self._layer(a, b) for a, b in zip(widths, widths[1:])])


def autocast_enabled(x: Tensor) -> bool:
    """Whether autocast is on for the device of x."""
    return torch.is_autocast_enabled(x.device.type)
