"""What modules run in place of an operator that has no CUDA kernels yet: plain torch, a few sets at a time.

Tensors over pairs exist, of these few sets only: backward computes them again. Splits are read on the host.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from muvox._library import WITHOUT_CUDA
from muvox.nn.sets import as_sets, in_runs

VALUES = 1 << 25  # of the largest tensor, unless one set alone needs more


def needed(op: str, x: Tensor) -> bool:
    return x.is_cuda and op in WITHOUT_CUDA


def attention(q: Tensor, k: Tensor, v: Tensor, splits: Tensor | None) -> Tensor:
    """As `ops.attention` without its options."""
    return by_sets(F.scaled_dot_product_attention, [q, k, v], splits, lambda M: M * M)


def offset_attention(q: Tensor, k: Tensor, v: Tensor, splits: Tensor | None) -> Tensor:
    """As `ops.offset_attention` without its options: sums, and the shares that eps is added to, are in float."""

    def of_sets(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        wide = torch.promote_types(v.dtype, torch.float32)
        with torch.autocast(v.device.type, enabled=False):
            share = (q.to(wide) @ k.to(wide).mT).softmax(-2)
            return (share @ v.to(wide) / (share.sum(-1, keepdim=True) + 1e-17)).to(v.dtype)

    return by_sets(of_sets, [q, k, v], splits, lambda M: M * M)


def by_sets(
    function: Callable[..., Tensor], tensors: list[Tensor], splits: Tensor | None, cost: Callable[[int], int]
) -> Tensor:
    """function of tensors (sets, M, F), a row of output for each, for (..., M, F), or (N, F) with splits.

    cost(M): values of the largest tensor within function, of a set of M rows."""

    def some(*sets: Tensor) -> Tensor:
        S, M = sets[0].shape[:2]
        step = max(1, VALUES // max(1, cost(M)))
        parts = zip(*(x.split(step) for x in sets))
        return torch.cat([checkpoint(function, *p, use_reentrant=False, preserve_rng_state=False) for p in parts])

    if splits is None:
        out = some(*(as_sets(x) for x in tensors))
        return out.reshape(*tensors[0].shape[:-1], out.shape[-1])
    found = [y.flatten(0, 1) for y in in_runs(some, tensors, splits) if not isinstance(y, int)]
    return torch.cat(found) if found else function(*(x.unsqueeze(0) for x in tensors)).squeeze(0)
