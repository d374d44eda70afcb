"""Activations and weight initialisations by name, as LUMIN names them."""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Swish(nn.Module):
    """x * sigmoid(x), element by element; keeps only x for the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x)


def _class_dim(x: Tensor) -> int:
    # LUMIN normalises over dimension 1 of (batch, ., .); with more leading dimensions that is the last but one.
    return 1 if x.dim() < 3 else x.dim() - 2


class SetSoftmax(nn.Module):
    """Softmax over dimension 1 of (B, ., .) as in LUMIN; over the last but one of (..., ., .)."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x, dim=_class_dim(x))


class SetLogSoftmax(nn.Module):
    """Logarithm of `SetSoftmax`."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.log_softmax(x, dim=_class_dim(x))


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "prelu": nn.PReLU,
    "selu": nn.SELU,
    "sigmoid": nn.Sigmoid,
    "logsoftmax": SetLogSoftmax,
    "softmax": SetSoftmax,
    "linear": nn.Identity,
    "mish": nn.Mish,
    "swish": Swish,
}


def _canonical(act: str) -> str:
    name = "swish" if "swish" in act else act
    if name not in ACTIVATIONS:
        raise ValueError(f"act: got {act!r}, accepted are {', '.join(ACTIVATIONS)}")
    return name


def lookup_act(act: str) -> nn.Module:
    """A new activation module; any name that contains "swish" is x * sigmoid(x). ValueError for an unknown name.

    "softmax" and "logsoftmax" normalise over dimension 1 of a 3-D tensor as in LUMIN: over the classes only when those
    are in the middle (`NodePredictor(transpose_out=True)`).
    """
    return ACTIVATIONS[_canonical(act)]()


def lookup_normal_init(
    act: str, fan_in: int | None = None, fan_out: int | None = None
) -> Callable[[Tensor], Tensor | None]:
    """Function that fills a weight in place with normal values fit for the activation that follows.

    Kaiming (relu gain) for relu, prelu, mish, swish; deviation 1/sqrt(fan_in) for selu; Xavier for the others.
    """
    name = _canonical(act)
    if name in ("relu", "prelu", "mish", "swish"):
        return partial(nn.init.kaiming_normal_, a=0, nonlinearity="relu")
    if name == "selu":
        return partial(nn.init.normal_, std=1 / math.sqrt(fan_in))
    return nn.init.xavier_normal_
