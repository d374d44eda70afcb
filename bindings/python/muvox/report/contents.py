"""What a report shows: maps of ln X0 by every method, their scores, time and memory."""

import csv
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from .. import classical
from ..checkpoint import Checkpoint
from ..data import Grid, Materials, ScanError, Scans, open_scans
from ..data.features import MUON_COLUMNS
from ..evaluation import CLASSICAL, Truth, classical_maps, missing_columns
from ..memory import peak_memory_bytes, reset_peak
from ..metrics import rise, roc_auc, roc_curve
from ..predict import SEED, check_match, log_x0_moments, predict_volume

VOLUMES = 40  # shown unless others are asked for
# The value of a map goes as this power of the scattering density, which goes as 1/X0.
POWERS = {classical.poca_maps: 1, classical.asr_maps: 0.5}


@dataclass
class Map:
    """One method: `log_x0` (volumes, voxels) float64, ln X0, X0 in m.

    Of classical maps and the network, and with truth only: `auc` of block voxels, of all volumes together and of each
    (NaN where a volume has no block or nothing else), and the ROC curve. `seconds` a volume, median; None for truth.
    """

    name: str
    log_x0: np.ndarray
    seconds: float | None = None
    auc: float | None = None
    auc_volumes: np.ndarray | None = None
    curve: tuple[np.ndarray, np.ndarray] | None = None


@dataclass
class Contents:
    """`maps`, truth first where it is known, the network last; `block` (volumes, voxels) or None, True where the
    material is not the volume's commonest; `muons` used of each volume; `left_out`: what is missing for a method."""

    grid: Grid
    materials: Materials
    numbers: list[int]
    volume_id: list[int]
    muons: list[int]
    background: list[str | None]
    block: np.ndarray | None
    maps: list[Map]
    peak_memory: int
    peak_is_of_prediction: bool
    history: dict
    left_out: dict[str, str] = field(default_factory=dict)


def collect(
    checkpoint: Checkpoint,
    scans: Scans,
    volumes: list[int],
    muons: int = 0,
    seed: int = SEED,
    log: Path | None = None,
    report=lambda done: None,
) -> Contents:
    """Maps and scores of the given volumes of a scan file or a folder of them, opened with all columns.

    Of each volume `muons` are drawn (0: all), the same for every method. Values of classical maps are turned into X0 by
    one factor for all volumes: the median agrees with the truth's, or with the network's where none is known. `log`: a
    log.csv of training, read if the checkpoint has no history of its own. `report` is called with the number of
    predicted volumes.
    Raises ScanError without volumes or for damaged data, MismatchError.
    """
    check_match(checkpoint, scans)
    if not len(volumes):
        raise ScanError(f"{scans.path}: no volumes to report on")
    resettable = reset_peak()
    said, seconds = [], []
    with open_scans(scans.path, MUON_COLUMNS) as data:
        for done, index in enumerate(volumes, start=1):
            started = time.perf_counter()
            said.append(log_x0_moments(checkpoint, predict_volume(checkpoint, data, index, muons, seed))[0])
            seconds.append(time.perf_counter() - started)
            report(done)
    network = Map("VoxelNet", np.stack(said), float(np.median(seconds)))
    peak = peak_memory_bytes()
    truth = Truth(scans, volumes) if scans.has_truth else None
    maps, left_out = _classical(scans, volumes, muons, seed)
    level = np.median((truth or network).log_x0)
    for each in maps:
        each.log_x0 += level - np.median(each.log_x0)
    maps.append(network)
    if truth:
        for each in maps:
            _score(each, truth.block)
    used = [scans.count(index) for index in volumes]
    names = checkpoint.materials.names
    return Contents(
        grid=checkpoint.grid,
        materials=checkpoint.materials,
        numbers=[int(index) for index in volumes],
        volume_id=[int(scans.volume_id[index]) for index in volumes],
        muons=[min(count, muons) if muons else count for count in used],
        background=[names[scans.background[index]] if scans.has_truth else None for index in volumes],
        block=truth.block if truth else None,
        maps=([Map("Truth", truth.log_x0)] if truth else []) + maps,
        peak_memory=peak,
        peak_is_of_prediction=resettable,
        history=checkpoint.history if checkpoint.history.get("loss") else _logged(log),
        left_out=left_out,
    )


def _classical(scans: Scans, volumes: list[int], muons: int, seed: int) -> tuple[list[Map], dict[str, str]]:
    """Maps, each up to a constant, and those that cannot be made, with the columns they lack."""
    left_out = missing_columns(scans)
    values = {name: [] for name in CLASSICAL if name not in left_out}
    seconds = {name: [] for name in values}
    for index in volumes:
        for name, found, took in classical_maps(scans, index, list(values), muons, seed):
            values[name].append(-classical.log_score(found) / POWERS[CLASSICAL[name][1]])
            seconds[name].append(took)
    return [Map(name, np.stack(values[name]), float(np.median(seconds[name]))) for name in values], left_out


def _score(each: Map, block: np.ndarray) -> None:
    """As in `muvox evaluate`: a block voxel is where ln X0 falls below the volume's median."""
    score = rise(-each.log_x0)
    each.auc = roc_auc(score, block)
    each.auc_volumes = np.array([roc_auc(*pair) for pair in zip(score, block)])
    if not np.isnan(each.auc):
        each.curve = roc_curve(score, block)


def _logged(log: Path | None) -> dict:
    """Loss and validation of a log.csv, as a history; empty if there is none that can be read."""
    if log is None or not log.is_file():
        return {}
    try:
        with open(log, newline="", encoding="utf-8") as text:
            rows = list(csv.DictReader(text))
        loss = [float(row["loss"]) for row in rows]
        validation = [
            dict(step=int(row["step"]), loss=float(row["validation_loss"]), auc=float(row["validation_auc"] or "nan"))
            for row in rows
            if row.get("validation_loss")
        ]
    except (OSError, KeyError, ValueError, TypeError):
        return {}
    return dict(loss=loss, validation=validation)
