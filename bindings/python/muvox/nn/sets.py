"""Columns of set rows that are never joined: the building bricks of the memory-saving forward passes.

A layer's input is written as `Columns`: blocks whose features side by side make the input. A block has a value for each
row, (..., M, F) or ragged (N, F), or one for each set, (..., 1, F) or ragged (S, F). Uniform blocks broadcast against
each other, so that VoxelNet's pairs of voxels need no tensor of all pairs and features.
"""

from collections.abc import Callable
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muvox import ops


class Block(NamedTuple):
    values: Tensor
    per_set: bool = False


Columns = list[Block]


def check_rows(x: Tensor, splits: Tensor | None, name: str) -> None:
    """ValueError unless x is (..., M, F), or (N, F) when splits are given."""
    if splits is None and x.dim() < 2:
        raise ValueError(f"{name}: x has shape {tuple(x.shape)}, accepted is (..., rows, features)")
    if splits is not None and x.dim() != 2:
        raise ValueError(f"{name}: x has shape {tuple(x.shape)}, accepted with splits is (rows, features)")


def as_sets(x: Tensor) -> Tensor:
    """(..., M, F) as (S, M, F)."""
    return x.flatten(0, -3) if x.dim() > 3 else x.reshape(1, *x.shape) if x.dim() == 2 else x


def set_mean(x: Tensor, splits: Tensor | None) -> Tensor:
    """Mean over the rows of each set: (..., M, F) -> (..., 1, F), ragged (N, F) -> (S, F); an empty set gives 0.

    Keeps the type of x under autocast: coordinates depend on it.
    """
    with torch.autocast(x.device.type, enabled=False):
        mean = ops.pool(x, splits=splits, aggregates=("mean",))
    return mean if splits is not None else mean.unsqueeze(-2)


def with_means(columns: Columns, splits: Tensor | None) -> Columns:
    """The columns followed by their means over each set (LUMIN's cat_means and global_feat_vec)."""
    return columns + [Block(b.values if b.per_set else set_mean(b.values, splits), True) for b in columns]


def row_sets(splits: Tensor, rows: int) -> Tensor:
    """Number of the set that each of the ragged rows belongs to, (N) int64; empty sets are passed over."""
    return torch.bucketize(torch.arange(rows, device=splits.device), splits[1:], right=True)


def in_runs(function: Callable[..., Tensor], tensors: list[Tensor], splits: Tensor) -> list[Tensor | int]:
    """function of uniform (sets, M, F) tensors for ragged ones (N, F): one call for each run of sets of equal length M,
    none is padded. Where M = 0 the result is the number of sets. The splits are read on the host."""
    runs = [(M, len(list(sets))) for M, sets in groupby(splits.diff().tolist())]
    parts = zip(*(x.split([M * sets for M, sets in runs]) for x in tensors))
    return [
        function(*(x.reshape(sets, M, x.shape[-1]) for x in part)) if M > 0 else sets
        for (M, sets), part in zip(runs, parts)
    ]


def _rows_of(columns: Columns) -> int:
    return next(b.values.shape[0] for b in columns if not b.per_set)


def join(columns: Columns, splits: Tensor | None) -> Tensor:
    """The columns as one tensor, (..., M, F) or ragged (N, F)."""
    if len(columns) == 1:
        return columns[0].values
    if splits is None:
        shape = torch.broadcast_shapes(*(b.values.shape[:-1] for b in columns))
        return torch.cat([b.values.expand(*shape, b.values.shape[-1]) for b in columns], -1)
    sets = row_sets(splits, _rows_of(columns))
    return torch.cat([b.values.index_select(0, sets) if b.per_set else b.values for b in columns], -1)


def _add(total: Tensor | None, part: Tensor) -> Tensor:
    # `total` is always fresh, so the sum may take its place when it has room for it.
    if total is None:
        return part
    return total.add_(part) if torch.broadcast_shapes(total.shape, part.shape) == total.shape else total + part


def linear(layer: nn.Linear, columns: Columns, splits: Tensor | None) -> Tensor:
    """layer(join(columns)) as a sum over the blocks, W [a, b] = W_a a + W_b b, without joining them."""
    weights = layer.weight.split([b.values.shape[-1] for b in columns], dim=1)
    bias_at = next((i for i, b in enumerate(columns) if b.per_set), 0)  # the cheapest place to add it
    rows = sets = None
    for i, (block, weight) in enumerate(zip(columns, weights)):
        part = F.linear(block.values, weight, layer.bias if i == bias_at else None)
        if block.per_set:
            sets = _add(sets, part)
        else:
            rows = _add(rows, part)
    if sets is None:
        return rows
    if splits is not None:
        sets = sets.index_select(0, row_sets(splits, rows.shape[0]))
    return _add(rows, sets)


def has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def _divisible(layer: nn.Module) -> bool:
    # Hooks, and layers that are not torch's own Linear, must see the whole input.
    return type(layer) is nn.Linear and not has_hooks(layer)


def apply_layer(layer: nn.Module, columns: Columns, splits: Tensor | None) -> Tensor:
    """One layer (a Sequential that begins with a Linear, or any module) on the joined columns."""
    if len(columns) > 1 and _divisible(layer):
        return linear(layer, columns, splits)
    if len(columns) > 1 and isinstance(layer, nn.Sequential) and len(layer) and not has_hooks(layer):
        x = apply_layer(layer[0], columns, splits)
        for module in layer[1:]:
            x = module(x)
        return x
    return layer(join(columns, splits))


def apply_layers(layers: nn.Module, columns: Columns, splits: Tensor | None) -> Tensor:
    """A Sequential of layers (or an identity, or any callable) on the joined columns."""
    if not isinstance(layers, nn.Sequential) or len(layers) == 0 or has_hooks(layers):
        return layers(join(columns, splits))
    for layer in layers:
        columns = [Block(apply_layer(layer, columns, splits))]
    return columns[0].values
