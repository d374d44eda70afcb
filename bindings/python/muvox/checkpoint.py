"""A trained network in one file: weights, and what they need to be used on another scan."""

import dataclasses
import pickle
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import torch

from .data.layout import Grid, Materials
from .errors import UserError
from .files import atomic_write

FORMAT = "muvox-checkpoint"
VERSION = 1


class CheckpointError(UserError):
    """A checkpoint that cannot be used; the message names the file and what is wrong with it."""


@dataclass
class Checkpoint:
    """`net` predicts the voxels of `grid` as `materials`.

    `prior` (classes): log-probabilities of the classes before any muon, under the weights of the loss: the prediction
    for an empty volume. `muons`: how many were drawn of a volume in training. `history`: what training recorded.
    """

    net: torch.nn.Module
    grid: Grid
    materials: Materials
    prior: list[float]
    norm: str
    muons: int
    step: int = 0
    history: dict = field(default_factory=dict)


def build(grid: Grid, classes: int, norm: str) -> torch.nn.Module:
    """VoxelNet for the voxels of a grid, in X0Net's configuration."""
    from .nn import VoxelNet

    return VoxelNet(grid.centres(), n_classes=classes, norm=norm)


def on_grid(net: torch.nn.Module, grid: Grid, classes: int, norm: str) -> torch.nn.Module:
    """A copy of VoxelNet for the voxels of another grid: it knows voxels by their relative positions alone."""
    copy = build(grid, classes, norm)
    copy.load_state_dict(dict(net.state_dict(), vox_dists=copy.vox_dists))
    return copy.to(next(net.parameters()).device)


def save(path, checkpoint: Checkpoint) -> None:
    """Writes a checkpoint whole or not at all. Raises OSError."""
    content = {f.name: getattr(checkpoint, f.name) for f in dataclasses.fields(checkpoint)}
    content["net"] = {key: value.cpu() for key, value in checkpoint.net.state_dict().items()}
    content["grid"] = dataclasses.asdict(checkpoint.grid)
    content["materials"] = dataclasses.asdict(checkpoint.materials)
    with atomic_write(path) as file:
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
        checkpoint.net = build(checkpoint.grid, len(checkpoint.materials.names), checkpoint.norm)
        checkpoint.net.load_state_dict(state)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path}: incomplete checkpoint ({str(error).splitlines()[0]})") from None
    checkpoint.net.to(device).eval()
    return checkpoint
