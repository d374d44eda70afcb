"""A trained network in one file: weights, and what they need to be used on another scan."""

import dataclasses
import math
import pickle
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import torch

from .data.layout import Grid, Materials
from .errors import UserError
from .files import atomic_write, held_signals

FORMAT = "muvox-checkpoint"
VERSION = 1
LARGEST_LOG_RATIO = 10.0  # of a predicted variance to the prior one: no exponential overflows


class CheckpointError(UserError):
    """A checkpoint that cannot be used; the message names the file and what is wrong with it."""


@dataclass
class Checkpoint:
    """`net` predicts the voxels of `grid` as `materials`.

    `prior` (classes): log-probabilities of the classes before any muon, under the weights of the loss: the prediction
    for an empty volume. `muons`: how many were drawn of a volume in training, 0 for all. `history`: what training
    recorded. `target`: "classes", or "log_x0" for a network that gives ln X0 (X0 in m) with its uncertainty; `prior` is
    then mean and logarithm of the variance of ln X0. `training`: what a run needs to go on from here, or empty.
    `nearest`: how many muons each voxel sees, those whose PoCA is nearest to it; 0 for all. `box`: voxels (x, y, z) of
    the boxes that a volume is predicted in; empty for the whole volume at once.
    """

    net: torch.nn.Module
    grid: Grid
    materials: Materials
    prior: list[float]
    norm: str
    muons: int
    step: int = 0
    history: dict = field(default_factory=dict)
    target: str = "classes"
    training: dict = field(default_factory=dict)
    nearest: int = 0
    box: tuple[int, ...] = ()

    def decode(self, output: torch.Tensor) -> torch.Tensor:
        """What the network gives (volumes, outputs, voxels) as prediction: log-probabilities of the classes as they
        are, or mean and logarithm of the variance of ln X0, given relative to the prior.
        """
        if self.target == "classes":
            return output
        mean, log_variance = self.prior
        return torch.stack(
            [
                mean + math.exp(log_variance / 2) * output[:, 0],
                log_variance + output[:, 1].clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO),
            ],
            1,
        )

    def without_training(self) -> "Checkpoint":
        """The same network without what only a run that goes on needs: a third of the size."""
        return dataclasses.replace(self, training={})


def build(grid: Grid, classes: int, norm: str, target: str = "classes") -> torch.nn.Module:
    """VoxelNet for the voxels of a grid, in X0Net's configuration."""
    from .nn import VoxelNet

    return VoxelNet(grid.centres(), n_classes=classes, norm=norm, head=target)


def on_grid(net: torch.nn.Module, grid: Grid, classes: int, norm: str, target: str = "classes") -> torch.nn.Module:
    """A copy of VoxelNet for the voxels of another grid: it knows voxels by their relative positions alone."""
    with torch.random.fork_rng(devices=[]):  # first weights are drawn, then copied over
        copy = build(grid, classes, norm, target)
    load_weights(copy, weights(net))
    return copy.to(next(net.parameters()).device)


def weights(net: torch.nn.Module) -> dict[str, torch.Tensor]:
    """State of a VoxelNet without the positions of its voxels, which follow from the grid and would be most of it."""
    return {key: value for key, value in net.state_dict().items() if key != "vox_dists"}


def load_weights(net: torch.nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Fills a VoxelNet with `weights` of another. Raises KeyError or RuntimeError if they do not fit."""
    net.load_state_dict(dict(state, vox_dists=net.vox_dists))


def save(path, checkpoint: Checkpoint) -> None:
    """Writes a checkpoint whole or not at all. Raises OSError."""
    content = {f.name: getattr(checkpoint, f.name) for f in dataclasses.fields(checkpoint)}
    content["net"] = {key: value.cpu() for key, value in weights(checkpoint.net).items()}
    content["grid"] = dataclasses.asdict(checkpoint.grid)
    content["materials"] = dataclasses.asdict(checkpoint.materials)
    with held_signals(), atomic_write(path) as file:
        torch.save(dict(content, format=FORMAT, version=VERSION), file)


def load(path, device="cpu") -> Checkpoint:
    """Reads a checkpoint, its network in evaluation mode on `device`. Runs no code from the file.

    Raises CheckpointError.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    try:
        content = torch.load(path, map_location=device, weights_only=True)
    except PermissionError:
        raise CheckpointError(f"{path}: permission denied") from None
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError, zipfile.BadZipFile):
        raise CheckpointError(f"{path}: not a checkpoint, or a damaged one") from None
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        raise CheckpointError(f"{path}: not a muvox checkpoint")
    if (version := content.pop("version", None)) != VERSION:
        raise CheckpointError(f"{path}: version {version} of the format, this muvox reads version {VERSION}")
    try:
        state = content.pop("net")
        content["grid"] = Grid(**content["grid"])
        content["materials"] = Materials(**content["materials"])
        checkpoint = Checkpoint(net=torch.nn.Identity(), **content)
        checkpoint.net = build(checkpoint.grid, len(checkpoint.materials.names), checkpoint.norm, checkpoint.target)
        load_weights(checkpoint.net, state)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path}: incomplete checkpoint ({str(error).splitlines()[0]})") from None
    checkpoint.net.to(device).eval()
    return checkpoint
