"""Predictions of a trained network for the volumes of a scan file."""

import h5py
import numpy as np
import torch

from .checkpoint import Checkpoint
from .data import Scans
from .data.features import draw, muon_features, voxel_features
from .errors import UserError
from .files import atomic_write
from .metrics import expected_log_x0

SEED = 17


class MismatchError(UserError):
    """Network and scan do not belong together."""


def check_match(checkpoint: Checkpoint, scans: Scans) -> None:
    """Raises MismatchError unless the network was trained on volumes like those of `scans`."""
    if checkpoint.grid != scans.grid:
        raise MismatchError(f"{scans.path}: the scan has {scans.grid}, the network was trained on {checkpoint.grid}")
    if scans.has_truth and scans.materials.names != checkpoint.materials.names:
        raise MismatchError(
            f"{scans.path}: the scan has the materials {', '.join(scans.materials.names)}, the network was "
            f"trained on {', '.join(checkpoint.materials.names)}"
        )


@torch.no_grad()
def predict_volume(checkpoint: Checkpoint, scans: Scans, index: int, muons: int = 0, seed: int = SEED) -> np.ndarray:
    """(classes, voxels) float32 log-probabilities of one volume, or (2, voxels) mean and logarithm of the variance of
    ln X0; `scans` must be opened with features.MUON_COLUMNS.

    `muons` > 0: as many are drawn, with a generator of its own for every volume_id; 0: all are used. The volume is
    predicted alone, so nothing depends on what else is in the file. A volume without muons gets the prior.
    """
    rows = scans.muons(index)
    grid = checkpoint.grid
    if not len(rows):
        return np.repeat(np.float32(checkpoint.prior)[:, None], grid.voxels, axis=1)
    if muons:
        rows = rows[draw(np.random.default_rng([seed, int(scans.volume_id[index])]), len(rows), muons)]
    device = next(checkpoint.net.parameters()).device
    x = voxel_features(torch.from_numpy(muon_features(rows)), torch.from_numpy(grid.centres()))
    return checkpoint.decode(checkpoint.net(x[None].to(device)))[0].float().cpu().numpy()


def predict(
    checkpoint: Checkpoint, scans: Scans, out, muons: int = 0, seed: int = SEED, report=lambda done: None
) -> None:
    """Writes predictions for all volumes of `scans` to the HDF5 file `out`, format "muvox-prediction", version 1.

    `/log_probability` float32 (volumes, classes, x, y, z); `/expected_log_x0` float32 (volumes, x, y, z), mean of ln X0
    (X0 in m) under them; `/volume_id` int64; attributes `materials`, `x0` (m), and the grid as in a scan file.
    Raises MismatchError, ScanError, OSError.
    """
    check_match(checkpoint, scans)
    grid, materials = checkpoint.grid, checkpoint.materials
    shape = (len(materials.names), *grid.shape)
    with atomic_write(out) as raw, h5py.File(raw, "w", libver="v110") as file:
        file.attrs.update(
            format="muvox-prediction",
            version=1,
            materials=list(materials.names),
            x0=np.array(materials.x0),
            grid_shape=np.array(grid.shape),
            grid_origin=np.array(grid.origin),
            voxel_size=np.array(grid.voxel_size),
        )
        file["volume_id"] = scans.volume_id.astype(np.int64)
        options = dict(dtype=np.float32, compression="gzip", shuffle=True)
        logs = file.create_dataset("log_probability", (len(scans), *shape), chunks=(1, *shape), **options)
        means = file.create_dataset("expected_log_x0", (len(scans), *grid.shape), chunks=(1, *grid.shape), **options)
        means.attrs["units"] = "ln(m)"
        for index in range(len(scans)):
            logp = predict_volume(checkpoint, scans, index, muons, seed)
            logs[index] = logp.reshape(shape)
            means[index] = expected_log_x0(logp[None], materials.x0).reshape(grid.shape)
            report(index + 1)
