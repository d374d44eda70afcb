"""Predictions of a trained network for the volumes of a scan file."""

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path

import h5py
import numpy as np
import torch

from .checkpoint import Checkpoint
from .data import Scans
from .data.features import drawn_muons, muon_features, voxel_features
from .errors import UserError
from .files import atomic_write, held_signals
from .metrics import nearest_material
from .vti import write_vti

SEED = 17
PAIRS = 1 << 16  # pairs of voxels looked at at once, but for a box that alone has more


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
    predicted alone, so nothing depends on what else is in the file. Of these muons each voxel sees as many as in
    training (`checkpoint.nearest`). A volume without muons gets the prior.
    """
    rows = drawn_muons(scans, index, muons, seed)
    grid = checkpoint.grid
    if not len(rows):
        return np.repeat(np.float32(checkpoint.prior)[:, None], grid.voxels, axis=1)
    device = next(checkpoint.net.parameters()).device
    x = voxel_features(torch.from_numpy(muon_features(rows)), torch.from_numpy(grid.centres()), checkpoint.nearest)
    return _in_boxes(checkpoint, checkpoint.net.muon_stage(x[None].to(device))[0]).float().cpu().numpy()


def _in_boxes(checkpoint: Checkpoint, x: torch.Tensor) -> torch.Tensor:
    """Prediction (outputs, voxels) from one vector a voxel, (voxels, F): box after box, mean where boxes overlap.

    The voxel stage sees all voxels of a box. Shown more than in training it takes the background for another material,
    and its cost grows with the square.
    """
    net, grid = checkpoint.net, checkpoint.grid
    shape = checkpoint.box or grid.shape
    if tuple(shape) == grid.shape:
        return checkpoint.decode(net.voxel_stage(x[None]))[0]
    centres = torch.from_numpy(grid.part((0, 0, 0), shape).centres())
    total = count = 0
    boxes = torch.from_numpy(grid.boxes(shape)).to(x.device)
    for some in boxes.split(max(1, PAIRS // boxes.shape[1] ** 2)):
        said = checkpoint.decode(net.voxel_stage(x[some], centres)).movedim(1, 0).flatten(1)
        total = total + said.new_zeros(len(said), grid.voxels).index_add_(1, some.flatten(), said)
        count = count + torch.bincount(some.flatten(), minlength=grid.voxels)
    mean = total / count
    return mean.log_softmax(0) if checkpoint.target == "classes" else mean


def log_x0_moments(checkpoint: Checkpoint, said: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of ln X0 (X0 in m), each (voxels) float64, from what `predict_volume` gives."""
    said = said.astype(np.float64)
    if checkpoint.target == "log_x0":
        return said[0], np.exp(said[1] / 2)
    probability, log_x0 = np.exp(said), np.log(np.asarray(checkpoint.materials.x0, np.float64))
    mean = log_x0 @ probability
    return mean, np.sqrt(np.maximum((log_x0**2) @ probability - mean**2, 0))


def predict(
    checkpoint: Checkpoint,
    scans: Scans,
    out=None,
    muons: int = 0,
    seed: int = SEED,
    report: Callable[[int], None] = lambda done: None,
    *,
    vti=None,
    volumes: Iterable[int] | None = None,
) -> None:
    """Writes predictions for volumes of `scans` (None: all), one after the other.

    Arguments:
        out: an HDF5 file, format "muvox-prediction" version 1 (see FORMAT.md), that appears when all are done:
            `/expected_log_x0` and `/sigma_log_x0` float32 (volumes, x, y, z), mean and standard deviation of ln X0 (X0
            in m), and, of a network that gives materials, `/log_probability` float32 (volumes, classes, x, y, z)
        vti: a folder for ParaView files, one a volume, named by its number in the scan file; cell data `x0` (m, exp of
            the mean), `log_x0`, `sigma_log_x0`, `material` (likeliest, or nearest to the mean), and, where known,
            `true_x0` and `true_material`
        muons, seed: see `predict_volume`
        report: called with the number of volumes done

    Raises MismatchError, ScanError, OSError.
    """
    check_match(checkpoint, scans)
    chosen = list(range(len(scans))) if volumes is None else list(volumes)
    with contextlib.ExitStack() as stack:
        deliver = stack.enter_context(held_signals())
        writers = []
        if vti is not None:
            Path(vti).mkdir(parents=True, exist_ok=True)
            digits = len(str(max(len(scans) - 1, 0)))
            writers.append(lambda _, index, said: _write_vti(Path(vti), digits, checkpoint, scans, index, said))
        if out is not None:
            file = stack.enter_context(h5py.File(stack.enter_context(atomic_write(out)), "w", libver="v110"))
            writers.append(_file_writer(file, checkpoint, scans.volume_id[chosen]))
        for place, index in enumerate(chosen):
            said = predict_volume(checkpoint, scans, index, muons, seed)
            for write in writers:
                write(place, index, said)
            deliver()
            report(place + 1)


def _file_writer(file: h5py.File, checkpoint: Checkpoint, volume_id: np.ndarray) -> Callable:
    grid, materials = checkpoint.grid, checkpoint.materials
    file.attrs.update(
        format="muvox-prediction",
        version=1,
        materials=list(materials.names),
        x0=np.array(materials.x0),
        grid_shape=np.array(grid.shape),
        grid_origin=np.array(grid.origin),
        voxel_size=np.array(grid.voxel_size),
    )
    file["volume_id"] = volume_id.astype(np.int64)

    def create(name: str, *shape: int) -> h5py.Dataset:
        options = dict(dtype=np.float32, compression="gzip", shuffle=True, chunks=(1, *shape))
        return file.create_dataset(name, (len(volume_id), *shape), **options)

    means, sigmas = create("expected_log_x0", *grid.shape), create("sigma_log_x0", *grid.shape)
    means.attrs["units"] = sigmas.attrs["units"] = "ln(m)"
    logs = create("log_probability", len(materials.names), *grid.shape) if checkpoint.target == "classes" else None

    def write(place: int, index: int, said: np.ndarray) -> None:
        mean, sigma = log_x0_moments(checkpoint, said)
        means[place], sigmas[place] = mean.reshape(grid.shape), sigma.reshape(grid.shape)
        if logs is not None:
            logs[place] = said.reshape(logs.shape[1:])

    return write


def _write_vti(folder: Path, digits: int, checkpoint: Checkpoint, scans: Scans, index: int, said: np.ndarray) -> None:
    mean, sigma = log_x0_moments(checkpoint, said)
    if checkpoint.target == "classes":
        material = said.argmax(0)
    else:
        material = nearest_material(mean, checkpoint.materials.x0)
    cells = dict(x0=np.exp(mean), log_x0=mean, sigma_log_x0=sigma)
    cells = {name: values.astype(np.float32) for name, values in cells.items()}
    cells["material"] = material.astype(np.uint8)
    if scans.has_truth:
        cells.update(true_x0=np.exp(scans.log_x0(index)), true_material=scans.material(index))
    shaped = {name: values.reshape(checkpoint.grid.shape) for name, values in cells.items()}
    write_vti(folder / f"volume-{index:0{digits}}.vti", checkpoint.grid, shaped)
