"""What is trained, and how: settings, learning rate, loss, optimiser."""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Settings:
    """How to train.

    Arguments:
        steps: optimiser steps
        batch: volumes of a step
        muons: drawn of every volume anew in each step; 0: all of them, in ragged batches without padding
        nearest: of these each voxel sees only so many, those whose PoCA is nearest to its centre, in training and in
            prediction; 0: all. Those far away say little of a voxel and cost as much as the others
        target: "classes" (the material of each voxel) or "log_x0" (ln X0 of each voxel with its uncertainty)
        norm: "batch" for a running norm that is sound at any batch size, "lumin" for LUMIN's
        recalibration: batches of training volumes over which LUMIN's norms are averaged before each evaluation, since
            their running values mean little at small batches; 0: left as they are. The other norm needs none
        lr: highest learning rate, see `one_cycle`
        weight_decay: of the weight matrices, decoupled from the gradient (AdamW)
        clip: gradients longer than this are shortened to it; 0: never
        patience: evaluations without a lower validation loss after which training stops; 0: never
        seed: of everything random
        device: where the network runs
        crop: n > 0 trains on random boxes of at most n voxels a side, which is much quicker. A whole volume is then
            predicted in boxes of half as many again a side: more to see helps, but not ten times as much
        mirror: trains on random mirror images and quarter turns about the vertical
        evaluations: spread over the run, each on at most `validation` volumes, with all their muons
    """

    steps: int = 4000
    batch: int = 4
    muons: int = 0
    nearest: int = 32
    target: str = "classes"
    norm: str = "batch"
    recalibration: int = 50
    lr: float = 3e-3
    weight_decay: float = 0.0
    clip: float = 0.0
    patience: int = 0
    seed: int = 7
    device: str = "cpu"
    crop: int = 4
    mirror: bool = True
    evaluations: int = 5
    validation: int = 20


def one_cycle(step: int, steps: int, peak: float) -> float:
    """Learning rate: linear from peak/100 to the peak in the first quarter, then down again along a cosine."""
    low, rising = peak / 100, 0.25 * steps
    if step < rising:
        return low + (peak - low) * step / rising
    return low + (peak - low) * (1 + math.cos(math.pi * (step - rising) / (steps - rising))) / 2


def make_optimiser(net: torch.nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """Adam; weight decay acts on matrices, not on offsets and the factors of norms."""
    parameters = list(net.parameters())
    groups = [
        dict(params=[p for p in parameters if p.dim() > 1], weight_decay=settings.weight_decay),
        dict(params=[p for p in parameters if p.dim() <= 1], weight_decay=0.0),
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=settings.lr, betas=(0.9, 0.99))


def class_weights(block_fraction: float) -> tuple[float, float]:
    """Weights of background and block voxels that give each half of the loss: ½ / fraction; 1 if one is missing."""
    if block_fraction in (0.0, 1.0):
        return 1.0, 1.0
    return 0.5 / (1 - block_fraction), 0.5 / block_fraction


def voxel_loss(
    logp: torch.Tensor, material: torch.Tensor, block: torch.Tensor, weights: tuple[float, float]
) -> torch.Tensor:
    """Weighted negative log-likelihood, mean over voxels.

    logp (volumes, classes, voxels); material int64 and block bool (volumes, voxels); `weights` of background and block
    voxels, see `class_weights`.
    """
    nll = torch.nn.functional.nll_loss(logp, material, reduction="none")
    return (torch.where(block, weights[1], weights[0]).to(nll) * nll).mean()


def log_x0_loss(
    prediction: torch.Tensor, log_x0: torch.Tensor, block: torch.Tensor, weights: tuple[float, float]
) -> torch.Tensor:
    """Weighted negative log-likelihood of a normal distribution of ln X0, mean over voxels; constants left out.

    prediction (volumes, 2, voxels): mean and logarithm of the variance of ln X0; the others as in `voxel_loss`.
    """
    mean, log_variance = prediction.unbind(1)
    nll = torch.nn.functional.gaussian_nll_loss(mean, log_x0, log_variance.exp(), reduction="none")
    return (torch.where(block, weights[1], weights[0]).to(nll) * nll).mean()
