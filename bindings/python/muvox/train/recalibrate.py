"""Running statistics of LUMIN's norms from plain averages over training batches.

LUMIN's running norm gives the last batch of B volumes the weight 1 − 0.9/√(B − 1): 0.48 at B = 4, so that what a
network predicts jumps from step to step; at B = 1 it diverges.
"""

import math
from collections.abc import Callable, Iterable

import torch

from ..nn.norms import RunningBatchNorm2d
from .batches import Batch

WARM = 1000.0  # samples seen: past the warm-up, in which the variance is kept above 0.01


@torch.no_grad()
def recalibrate(net: torch.nn.Module, batches: Callable[[], Iterable[Batch]], nearest: int = 0) -> None:
    """Sets the statistics of both norms of a VoxelNet to averages over `batches()`; leaves other norms alone.

    First those of the muons, then, with them fixed, those of the voxels. The network is left in evaluation mode.
    `nearest`: see `Batch.input`.
    """
    net.eval()
    for norm, run in ((net.mu_norm, net.muon_stage), (net.vox_norm, net)):
        if not isinstance(norm, RunningBatchNorm2d):
            continue
        momentum = norm.mom
        norm.train()
        for buffer in (norm.sums, norm.sqrs, norm.count):
            buffer.zero_()
        for number, batch in enumerate(batches(), start=1):
            # The momentum at which a batch counts 1/number, which makes plain averages of the running sums.
            norm.mom = 1 - (1 - 1 / number) * math.sqrt(len(batch.counts) - 1 + norm.eps)
            run(*batch.input(nearest))
        norm.mom = momentum
        norm.batch.fill_(WARM)
        norm.eval()
