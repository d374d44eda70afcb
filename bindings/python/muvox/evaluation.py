"""How well a network images the volumes of a scan file, beside classical maps from the same muons."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from . import classical
from .checkpoint import Checkpoint
from .data import ScanError, Scans, open_scans
from .data.features import MUON_COLUMNS, drawn_muons
from .metrics import log_x0_scores, nearest_material, rise, roc_auc, roc_curve
from .predict import SEED, check_match, predict_volume
from .train import class_weights

DENSE = 0.02  # m; materials of a shorter radiation length (iron, lead, uranium) count as dense
FITTED = 240  # training volumes that the materials of classical maps are fitted on, at most
BINS = 40
# Name of each map; the columns and the function that give it, and its place among the function's maps.
CLASSICAL = {
    "PoCA": (classical.COLUMNS, classical.poca_maps, 0),
    "PoCA, 3×3×3": (classical.COLUMNS, classical.poca_maps, 1),
    "ASR, quantile": (classical.ASR_COLUMNS, classical.asr_maps, 0),
    "ASR, mean": (classical.ASR_COLUMNS, classical.asr_maps, 1),
}


def missing_columns(scans: Scans) -> dict[str, str]:
    """What classical maps lack, of those that cannot be made of these muon columns."""
    missing = {name: [c for c in columns if c not in scans.columns] for name, (columns, *_) in CLASSICAL.items()}
    return {name: ", ".join(columns) for name, columns in missing.items() if columns}


def classical_maps(
    scans: Scans, index: int, names: list[str], muons: int, seed: int
) -> Iterator[tuple[str, np.ndarray, float]]:
    """Name, values (voxels) and seconds taken of each of these maps of a volume; a network is shown the same muons."""
    rows = drawn_muons(scans, index, muons, seed)
    made = {}
    for name in names:
        columns, function, place = CLASSICAL[name]
        if function not in made:
            started = time.perf_counter()
            maps = function(rows[:, [scans.columns.index(c) for c in columns]], scans.grid)
            made[function] = maps, time.perf_counter() - started
        maps, seconds = made[function]
        yield name, maps[place].reshape(-1), seconds


@dataclass
class Result:
    """What one method says of the voxels, and its scores.

    `scores`: "loss" (weighted negative log-likelihood of the material, or of ln X0), "accuracy", "auc_block" (all
    voxels together), "auc_block_volumes" (mean over volumes), "auc_dense"; for ln X0 also "rmse" and "pull", the
    root mean square of (mean − truth)/σ, 1 for honest uncertainties. `confusion` (materials, materials): voxels of each
    true material (row) by what they are taken for. `curve`: ROC of block voxels, shares of false and true findings.
    """

    name: str
    scores: dict[str, float]
    confusion: np.ndarray
    curve: tuple[np.ndarray, np.ndarray]


@dataclass
class Evaluation:
    """`results`, the network's first; `left_out`: classical maps that lack muon columns, with what they lack."""

    materials: tuple[str, ...]
    volumes: int
    voxels: int
    block_fraction: float
    muons: int
    results: list[Result]
    left_out: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict:
        """The figures, for JSON; NaN (an AUC where one class is missing) becomes None."""
        return dict(
            materials=list(self.materials),
            volumes=self.volumes,
            voxels=self.voxels,
            block_fraction=self.block_fraction,
            muons=self.muons or "all",
            methods={
                result.name: dict(
                    {k: None if np.isnan(v) else v for k, v in result.scores.items()},
                    confusion=result.confusion.tolist(),
                )
                for result in self.results
            },
            left_out=self.left_out,
        )


def evaluate_scans(
    checkpoint: Checkpoint, scans: Scans, volumes: list[int], muons: int = 0, seed: int = SEED, report=lambda done: None
) -> Evaluation:
    """Compares a network with classical maps on the given volumes of a scan file with truth.

    `scans` must be opened with all columns; of each volume `muons` are drawn (0: all), the same for every method. The
    maps get materials by a histogram of their values over the true materials of training volumes. `report` is called
    with the number of volumes done, `work(scans, volumes)` in all.
    Raises ScanError without truth or volumes, MismatchError, ScanError for damaged data.
    """
    check_match(checkpoint, scans)
    if not scans.has_truth:
        raise ScanError(f"{scans.path}: no truth (x0, material, background), cannot evaluate")
    if not len(volumes):
        raise ScanError(f"{scans.path}: no volumes to evaluate")
    truth = Truth(scans, volumes)
    with open_scans(scans.path, MUON_COLUMNS) as data:
        said = []
        for done, index in enumerate(volumes, start=1):
            said.append(predict_volume(checkpoint, data, index, muons, seed))
            report(done)
    results = [_of_network(checkpoint, np.stack(said), truth)]
    missing = missing_columns(scans)
    there = [name for name in CLASSICAL if name not in missing]
    fitted = fitting_volumes(scans)
    maps = {name: np.empty((len(volumes), scans.grid.voxels)) for name in there}
    fit_maps = {name: np.empty((len(fitted), scans.grid.voxels)) for name in there}
    done = len(volumes)
    for target, chosen in ((fit_maps, fitted), (maps, volumes)):
        for place, index in enumerate(chosen):
            for name, values, _ in classical_maps(scans, index, there, muons, seed):
                target[name][place] = values
            done += 1
            report(done)
    fit_truth = Truth(scans, fitted) if len(fitted) else None
    results += [_of_map(name, maps[name], truth, fit_maps[name], fit_truth) for name in there]
    block = float(truth.block.mean())
    return Evaluation(scans.materials.names, len(volumes), scans.grid.voxels, block, muons, results, missing)


def work(scans: Scans, volumes: list[int]) -> int:
    """What `evaluate_scans` reports at its end."""
    return 2 * len(volumes) + len(fitting_volumes(scans))


def fitting_volumes(scans: Scans) -> list[int]:
    return [int(index) for index in scans.of_split("training")[:FITTED]]


class Truth:
    """Truth of volumes of a scan file that has it: `material`, `log_x0`, `block` (not the volume's commonest material),
    `dense`, and `weight` in the loss, each (volumes, voxels). Raises ScanError for damaged data."""

    def __init__(self, scans: Scans, volumes: list[int]):
        self.x0 = scans.materials.x0
        self.material = np.stack([scans.material(index).reshape(-1) for index in volumes]).astype(np.int64)
        self.log_x0 = np.stack([scans.log_x0(index).reshape(-1) for index in volumes]).astype(np.float64)
        self.block = self.material != scans.background[volumes][:, None]
        self.dense = np.asarray(self.x0)[self.material] < DENSE
        background, block = class_weights(self.block.mean())
        self.weight = np.where(self.block, block, background)

    def result(self, name: str, score: np.ndarray, dense: np.ndarray, material, nll, **more: float) -> Result:
        """`score` and `dense` (volumes, voxels) rise where a block and dense material are suspected; `material` and
        `nll` are None where nothing is said of the material."""
        from torchmetrics.functional.classification import multiclass_confusion_matrix

        relative, size = rise(score), len(self.x0)
        each = [roc_auc(s, b) for s, b in zip(relative, self.block)]
        scores = dict(
            loss=float("nan") if nll is None else float((self.weight * nll).mean()),
            accuracy=float("nan") if material is None else float((material == self.material).mean()),
            auc_block=roc_auc(relative, self.block),
            auc_block_volumes=float(np.mean([a for a in each if not np.isnan(a)] or [np.nan])),
            auc_dense=roc_auc(dense, self.dense),
            **more,
        )
        confusion = np.zeros((size, size), np.int64)
        if material is not None:
            flat = (torch.from_numpy(np.ascontiguousarray(part)).reshape(-1) for part in (material, self.material))
            confusion = multiclass_confusion_matrix(*flat, num_classes=size).numpy()
        return Result(name, scores, confusion, roc_curve(relative, self.block))


def _of_network(checkpoint: Checkpoint, said: np.ndarray, truth: Truth) -> Result:
    said, log_x0 = said.astype(np.float64), np.log(np.asarray(truth.x0))
    if checkpoint.target == "log_x0":
        mean, log_variance = said[:, 0], said[:, 1]
        error = mean - truth.log_x0
        return truth.result(
            "VoxelNet",
            -mean,
            -mean,
            nearest_material(mean, truth.x0),
            log_x0_scores(mean, log_variance, truth.log_x0),
            rmse=float(np.sqrt((error**2).mean())),
            pull=float(np.sqrt((error**2 * np.exp(-log_variance)).mean())),
        )
    nll = -np.take_along_axis(said, truth.material[:, None], axis=1)[:, 0]
    dense = np.exp(said)[:, np.asarray(truth.x0) < DENSE].sum(1)
    mean = np.einsum("vcn,c->vn", np.exp(said), log_x0)
    return truth.result("VoxelNet", -mean, dense, said.argmax(1), nll)


def _of_map(name: str, values: np.ndarray, truth: Truth, fit: np.ndarray, fit_truth: Truth | None) -> Result:
    """A map's values have no unit of X0: which material they suggest is read off training volumes."""
    score = classical.log_score(values)
    if fit_truth is None:
        return truth.result(name, score, score, None, None)
    fitted = classical.log_score(fit)
    edges = np.quantile(fitted, np.linspace(0, 1, BINS + 1)[1:-1])
    table = np.full((BINS, len(truth.x0)), 1e-3)
    np.add.at(table, (np.digitize(fitted, edges), fit_truth.material), fit_truth.weight)
    table /= table.sum(axis=1, keepdims=True)
    probability = table[np.digitize(score, edges)]
    nll = -np.log(np.take_along_axis(probability, truth.material[..., None], axis=2)[..., 0])
    return truth.result(name, score, score, probability.argmax(2), nll)
