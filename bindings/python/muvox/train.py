"""Training VoxelNet on a scan file: `train` is the whole recipe, `muvox train` and the demo call it."""

import dataclasses
import math
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from . import checkpoint as checkpoints
from .checkpoint import Checkpoint
from .data import Grid, ScanError, Scans
from .data.features import draw, muon_features, voxel_features
from .errors import UserError
from .metrics import evaluate
from .predict import predict_volume


class TrainingError(UserError):
    """Training that cannot go on."""


@dataclass(frozen=True)
class Settings:
    """How to train.

    `muons` are drawn of every volume anew in each step. `crop` n > 0 trains on random boxes of at most n voxels a side,
    which is much quicker; the network predicts whole volumes all the same. `mirror` trains on random mirror images and
    quarter turns about the vertical. `evaluations` on at most `validation` volumes are spread over the run.
    """

    steps: int = 2000
    batch: int = 4
    muons: int = 128
    norm: str = "batch"
    lr: float = 3e-3
    seed: int = 7
    device: str = "cpu"
    crop: int = 0
    mirror: bool = True
    evaluations: int = 10
    validation: int = 40


Report = Callable[[int, float, dict], None]  # step (from 1), loss, newest validation metrics (empty before the first)


def train(scans: Scans, settings: Settings, out: Path | None = None, report: Report = lambda *_: None) -> Checkpoint:
    """Trains a VoxelNet on the training volumes of `scans` and returns it as it is after the last step.

    `scans` must be opened with columns `features.MUON_COLUMNS`. If `out` is given, a folder, `last.pt` is written there
    at every evaluation and at the end, and `best.pt` whenever the validation loss is the lowest so far. The same seed,
    data, number of threads and machine give the same losses, bit for bit. Volumes without muons are left out with a
    warning.
    Raises ScanError for data that cannot be trained on, TrainingError when the loss is not finite, OSError from saving.
    """
    data = _TrainingData(scans, settings)
    torch.manual_seed(settings.seed)
    kind = len(scans.materials.names), settings.norm
    net = checkpoints.build(scans.grid.part((0, 0, 0), data.shape), *kind).to(settings.device)
    state = Checkpoint(
        net,
        scans.grid,
        scans.materials,
        data.prior,
        settings.norm,
        settings.muons,
        history=dict(settings=dataclasses.asdict(settings), loss=[], seconds=[], validation=[]),
    )
    optimiser = torch.optim.Adam(net.parameters(), lr=settings.lr, betas=(0.9, 0.99))
    metrics: dict = {}
    best = math.inf
    for step, (x, material, block) in zip(range(settings.steps), data.batches()):
        started = time.perf_counter()
        net.train()
        optimiser.param_groups[0]["lr"] = one_cycle(step, settings.steps, settings.lr)
        loss = voxel_loss(net(x), material, block, data.weights)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        state.history["loss"].append(loss.item())
        state.history["seconds"].append(time.perf_counter() - started)
        state.step = step + 1
        if not math.isfinite(state.history["loss"][-1]):
            raise TrainingError(
                f"the loss is {state.history['loss'][-1]} at step {step + 1}; try a lower learning rate"
            )
        if _is_due(step + 1, settings):
            state.net = checkpoints.on_grid(net, scans.grid, *kind).eval()
            metrics = data.validate(state)
            state.history["validation"].append(dict(step=step + 1, **metrics))
            if out is not None:
                checkpoints.save(out / "last.pt", state)
                if metrics.get("loss", -math.inf) < best:
                    best = metrics.get("loss", math.inf)
                    checkpoints.save(out / "best.pt", state)
        report(step + 1, state.history["loss"][-1], metrics)
    return state


def one_cycle(step: int, steps: int, peak: float) -> float:
    """Learning rate: linear from peak/100 to the peak in the first quarter, then down again along a cosine."""
    low, rising = peak / 100, 0.25 * steps
    if step < rising:
        return low + (peak - low) * step / rising
    return low + (peak - low) * (1 + math.cos(math.pi * (step - rising) / (steps - rising))) / 2


def voxel_loss(
    logp: torch.Tensor, material: torch.Tensor, block: torch.Tensor, weights: tuple[float, float]
) -> torch.Tensor:
    """Weighted negative log-likelihood, mean over voxels.

    logp (volumes, classes, voxels); material int64 and block bool (volumes, voxels); `weights` of background and block
    voxels, see `class_weights`.
    """
    nll = torch.nn.functional.nll_loss(logp, material, reduction="none")
    return (torch.where(block, weights[1], weights[0]).to(nll) * nll).mean()


def class_weights(block_fraction: float) -> tuple[float, float]:
    """Weights of background and block voxels that give each half of the loss: ½ / fraction; 1 if one is missing."""
    if block_fraction in (0.0, 1.0):
        return 1.0, 1.0
    return 0.5 / (1 - block_fraction), 0.5 / block_fraction


def turn(muons: np.ndarray, material: np.ndarray, grid: Grid, flip_x: bool, flip_y: bool, swap: bool):
    """A volume in the mirror: x and y reversed, then exchanged; in all combinations, mirror images and quarter turns.

    muons (muons, 10) columns MUON_COLUMNS, material (x, y, z). `swap` needs a grid that looks the same along x and y.
    """
    muons = muons.copy()
    columns = ((0, 2, 4, 7), (1, 3, 5, 8))  # theta in, theta out, displacement, PoCA along x and along y
    for axis, flip in enumerate((flip_x, flip_y)):
        if flip:
            muons[:, columns[axis]] *= -1
            muons[:, columns[axis][-1]] += np.float32(2 * grid.origin[axis] + grid.shape[axis] * grid.voxel_size[axis])
            material = np.flip(material, axis)
    if swap:
        muons[:, columns[0] + columns[1]] = muons[:, columns[1] + columns[0]]
        shift = np.float32(grid.origin[0] - grid.origin[1])
        muons[:, 7] += shift
        muons[:, 8] -= shift
        material = np.swapaxes(material, 0, 1)
    return muons, material


class _TrainingData:
    """Training batches and validation of one scan file; reads volumes from disk as they are needed."""

    def __init__(self, scans: Scans, settings: Settings):
        if not scans.has_truth:
            raise ScanError(f"{scans.path}: no truth (x0, material, background), cannot train")
        self.scans, self.settings = scans, settings
        self.shape = tuple(min(settings.crop or side, side) for side in scans.grid.shape)
        self.training = self._with_muons("training")
        if not len(self.training):
            raise ScanError(f"{scans.path}: no training volume with muons")
        self.validation = scans.of_split("validation")[: settings.validation]
        same = scans.grid.shape[0] == scans.grid.shape[1] and scans.grid.voxel_size[0] == scans.grid.voxel_size[1]
        self.turns = (2, 2, 2 if same else 1)
        self._count_classes()

    def _with_muons(self, split: str) -> np.ndarray:
        volumes = self.scans.of_split(split)
        filled = np.array([v for v in volumes if self.scans.count(v)], np.int64)
        if len(filled) < len(volumes):
            warnings.warn(
                f"{len(volumes) - len(filled)} of {len(volumes)} {split} volumes have no muons and are left out",
                stacklevel=2,
            )
        return filled

    def _count_classes(self) -> None:
        """Weights of the loss and class prior from the truth of all training volumes."""
        counts = np.zeros((2, len(self.scans.materials.names)))  # background and block voxels of each material
        for index in self.training:
            material = self.scans.material(index)
            block = material != self.scans.background[index]
            for kind in (0, 1):
                counts[kind] += np.bincount(material[block == kind], minlength=counts.shape[1])
        self.weights = class_weights(counts[1].sum() / counts.sum())
        prior = self.weights @ counts + 1e-3
        self.prior = np.log(prior / prior.sum()).tolist()

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Without end: input (batch, voxels, muons, 9), material and block (batch, voxels); every epoch reordered."""
        order, *others = (np.random.default_rng([self.settings.seed, n]) for n in range(3))
        waiting = np.empty(0, np.int64)
        while True:
            while len(waiting) < self.settings.batch:
                waiting = np.concatenate([waiting, order.permutation(self.training)])
            chosen, waiting = np.split(waiting, [self.settings.batch])
            parts = zip(*(self._example(int(index), *others) for index in chosen))
            muons, centres, material, block = (
                torch.from_numpy(np.stack(part)).to(self.settings.device) for part in parts
            )
            yield voxel_features(muons, centres), material.long(), block

    def _example(self, index: int, picks: np.random.Generator, views: np.random.Generator):
        """One volume: features of the drawn muons, and of the voxels in the crop centres, material, "is a block"."""
        grid, muons, material = self.scans.grid, self.scans.muons(index), self.scans.material(index)
        muons = muons[draw(picks, len(muons), self.settings.muons)]
        if self.settings.mirror:
            muons, material = turn(muons, material, grid, *map(bool, views.integers(self.turns)))
        first = tuple(map(int, views.integers(np.subtract(grid.shape, self.shape) + 1)))
        material = material[tuple(slice(i, i + n) for i, n in zip(first, self.shape))].reshape(-1)
        centres = grid.part(first, self.shape).centres()
        return muon_features(muons), centres, material, material != self.scans.background[index]

    def validate(self, state: Checkpoint) -> dict[str, float]:
        """Loss, accuracy and block AUC on the validation volumes; empty if there are none."""
        if not len(self.validation):
            return {}
        logp = np.stack([predict_volume(state, self.scans, int(v)) for v in self.validation])
        material = np.stack([self.scans.material(v).reshape(-1) for v in self.validation])
        block = material != self.scans.background[self.validation][:, None]
        return evaluate(logp, material, block, self.scans.materials.x0, self.weights)


def _is_due(step: int, settings: Settings) -> bool:
    """Is there an evaluation after this step? The last always has one."""
    every = max(1, settings.steps // settings.evaluations) if settings.evaluations else settings.steps
    return step == settings.steps or (step % every == 0 and step + every <= settings.steps)
