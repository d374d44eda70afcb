"""Training batches and validation of scan files; volumes are read from disk as they are needed.

What is drawn for a step depends on the seed and the number of the step alone. So a run that goes on from any step, with
any number of loading processes, sees what an uninterrupted one would have seen.
"""

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from ..checkpoint import Checkpoint
from ..data import Grid, ScanError, Scans
from ..data.features import LIMITS, cut_counts, draw, muon_features, voxel_features
from ..metrics import evaluate, evaluate_log_x0
from ..predict import predict_volume
from .recipe import Settings, class_weights, log_x0_loss, voxel_loss

ORDER, EXAMPLES, RECALIBRATION = range(3)  # streams of random numbers
LOOKED_AT = 32  # training volumes whose tails are looked at
MOSTLY_CUT = 0.2  # share of muons with a cut value from which on something is wrong


class Batch(NamedTuple):
    """Volumes of a step. Truth is (volumes, voxels)."""

    muons: torch.Tensor  # (all muons, 8), see `muon_features`; volume after volume
    counts: torch.Tensor  # (volumes) int64 muons of each
    centres: torch.Tensor  # (volumes, voxels, 3), m
    material: torch.Tensor  # int64
    log_x0: torch.Tensor  # float32, X0 in m
    block: torch.Tensor  # bool

    def input(self, nearest: int = 0) -> tuple[torch.Tensor, torch.Tensor | None]:
        """VoxelNet's x and splits: (volumes, voxels, muons, 9) and None, or, of volumes that show different numbers of
        muons, (rows, 9) and (volumes * voxels + 1). `nearest`: see `voxel_features`.
        """
        each = [
            voxel_features(muons, centres, nearest)
            for muons, centres in zip(self.muons.split(self.counts.tolist()), self.centres)
        ]
        sizes = torch.tensor([x.shape[1] for x in each])
        if (sizes == sizes[0]).all():
            return torch.stack(each), None
        sizes = sizes.repeat_interleave(self.centres.shape[1])
        return torch.cat([x.flatten(0, 1) for x in each]), torch.nn.functional.pad(sizes.cumsum(0), (1, 0))


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


class TrainingData:
    """Batches and validation of `scans`, opened with columns `features.MUON_COLUMNS`.

    Attributes: `training` and `validation`, numbers of the volumes used; `shape` of the boxes trained on, `box`, that of
    the boxes predicted in (see `Settings.crop`); `weights` of background and block voxels in the loss; `prior`, the
    prediction without muons (see `Checkpoint`); `cut`, share of the muons whose values are cut, by column. Volumes
    without muons are left out with a warning.
    Raises ScanError for data that cannot be trained on.
    """

    def __init__(self, scans: Scans, settings: Settings):
        if not scans.has_truth:
            raise ScanError(f"{scans.path}: no truth (x0, material, background), cannot train")
        self.scans, self.settings = scans, settings
        self.shape = tuple(min(settings.crop or side, side) for side in scans.grid.shape)
        self.box = tuple(min(n + (n + 1) // 2, side) for n, side in zip(self.shape, scans.grid.shape))
        self.training = self._with_muons("training")
        if not len(self.training):
            raise ScanError(f"{scans.path}: no training volume with muons")
        self.validation = scans.of_split("validation")[: settings.validation]
        same = scans.grid.shape[0] == scans.grid.shape[1] and scans.grid.voxel_size[0] == scans.grid.voxel_size[1]
        self.turns = (2, 2, 2 if same else 1)
        self._look_at_truth()
        self._look_at_tails()
        self._order = functools.lru_cache(4)(self._permutation)

    def _with_muons(self, split: str) -> np.ndarray:
        volumes = self.scans.of_split(split)
        filled = np.array([v for v in volumes if self.scans.count(v)], np.int64)
        if len(filled) < len(volumes):
            warnings.warn(
                f"{len(volumes) - len(filled)} of {len(volumes)} {split} volumes have no muons and are left out",
                stacklevel=2,
            )
        return filled

    def _look_at_truth(self) -> None:
        """Weights of the loss and the prior, from the truth of all training volumes."""
        classes = len(self.scans.materials.names)
        counts = np.zeros((2, classes))  # background and block voxels of each material
        moments = np.zeros((2, 3))  # number, sum and sum of squares of ln X0, over them
        for index in self.training:
            material = self.scans.material(index)
            block = material != self.scans.background[index]
            for kind in (0, 1):
                counts[kind] += np.bincount(material[block == kind], minlength=classes)
            if self.settings.target == "log_x0":
                log_x0 = self.scans.log_x0(index).astype(float)
                for kind in (0, 1):
                    part = log_x0[block == kind]
                    moments[kind] += len(part), part.sum(), (part**2).sum()
        self.weights = class_weights(counts[1].sum() / counts.sum())
        if self.settings.target == "log_x0":
            total, mean, square = self.weights @ moments
            variance = max(square / total - (mean / total) ** 2, 1e-4)
            self.prior = [float(mean / total), float(np.log(variance))]
        else:
            prior = self.weights @ counts + 1e-3
            self.prior = np.log(prior / prior.sum()).tolist()

    def _look_at_tails(self) -> None:
        looked_at = np.linspace(0, len(self.training) - 1, min(LOOKED_AT, len(self.training))).astype(int)
        counts = [cut_counts(self.scans.muons(int(index))) for index in self.training[looked_at]]
        muons = sum(self.scans.count(int(index)) for index in self.training[looked_at])
        self.cut = {name: sum(count[name] for count in counts) / muons for name in LIMITS}
        for name, share in self.cut.items():
            if share > MOSTLY_CUT:
                warnings.warn(
                    f"{share:.0%} of the muons have a {name} beyond what the network is shown (see "
                    "muvox.data.features); units or the origin of the coordinates may be wrong",
                    stacklevel=2,
                )

    def _generator(self, *key: int) -> np.random.Generator:
        return np.random.default_rng(np.random.SeedSequence(self.settings.seed, spawn_key=key))

    def _permutation(self, epoch: int) -> np.ndarray:
        return self._generator(ORDER, epoch).permutation(self.training)

    def batch(self, step: int) -> Batch:
        """The volumes of a step (from 0); every epoch is reordered."""
        positions = range(step * self.settings.batch, (step + 1) * self.settings.batch)
        epochs = (divmod(position, len(self.training)) for position in positions)
        chosen = [int(self._order(epoch)[place]) for epoch, place in epochs]
        return self._examples(chosen, EXAMPLES, step)

    def batches(self, first: int = 0, workers: int = 0, prepare: Callable[[int], None] | None = None):
        """Iterator over the batches of the steps from `first` on, loaded ahead by processes if `workers` > 0.

        `prepare` is called in every new process.
        """
        steps = range(first, self.settings.steps)
        more: dict = {}
        if workers:  # forked whatever Python's default is: nothing is copied, and the data need not be sent
            more = dict(prefetch_factor=2, worker_init_fn=prepare, multiprocessing_context="fork")
        more["generator"] = torch.Generator()  # or else each start of a loader would take a number from the common one
        return iter(torch.utils.data.DataLoader(_Steps(self), None, sampler=steps, num_workers=workers, **more))

    def recalibration_batches(self, step: int) -> Iterator[Batch]:
        """Batches of random training volumes, the same whenever they are asked for after the same step."""
        for number in range(self.settings.recalibration):
            chosen = self._generator(RECALIBRATION, step, number).choice(self.training, self.settings.batch)
            yield self._examples([int(index) for index in chosen], RECALIBRATION, step, number)

    def _examples(self, volumes: list[int], *key: int) -> Batch:
        muons, *rest = zip(
            *(self._example(index, self._generator(*key, slot)) for slot, index in enumerate(volumes, start=1))
        )
        counts = torch.tensor([len(rows) for rows in muons])
        rest = (torch.from_numpy(np.stack(part)) for part in rest)
        return Batch(torch.from_numpy(np.concatenate(muons)), counts, *rest)

    def _example(self, index: int, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        """One volume: features of its muons; of the voxels in the crop centres, material, ln X0, "is a block"."""
        grid, muons, material = self.scans.grid, self.scans.muons(index), self.scans.material(index)
        if self.settings.muons:
            muons = muons[draw(rng, len(muons), self.settings.muons)]
        voxels = np.arange(grid.voxels).reshape(grid.shape)
        if self.settings.mirror:
            muons, voxels = turn(muons, voxels, grid, *map(bool, rng.integers(self.turns)))
        first = tuple(map(int, rng.integers(np.subtract(grid.shape, self.shape) + 1)))
        voxels = voxels[tuple(slice(i, i + n) for i, n in zip(first, self.shape))].reshape(-1)
        material = material.reshape(-1)[voxels]
        if self.settings.target == "log_x0":
            log_x0 = self.scans.log_x0(index).reshape(-1)[voxels]
        else:
            log_x0 = np.log(np.asarray(self.scans.materials.x0, np.float32))[material]
        centres = grid.part(first, self.shape).centres()
        block = material != self.scans.background[index]
        return muon_features(muons), centres, material.astype(np.int64), log_x0, block

    def loss(self, prediction: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Loss of what the network says, decoded as in `Checkpoint.decode`."""
        if self.settings.target == "log_x0":
            return log_x0_loss(prediction, batch.log_x0, batch.block, self.weights)
        return voxel_loss(prediction, batch.material, batch.block, self.weights)

    def validate(self, state: Checkpoint, report: Callable[[int, int], None] = lambda *_: None) -> dict[str, float]:
        """Loss, accuracy and block AUC on the validation volumes, whole and with all muons; empty if there are none.

        `report` is called with the number of volumes done and that of all.
        """
        if not len(self.validation):
            return {}
        volumes, each = [int(v) for v in self.validation], []
        for done, index in enumerate(volumes, start=1):
            each.append(predict_volume(state, self.scans, index))
            report(done, len(volumes))
        said = np.stack(each)
        material = np.stack([self.scans.material(v).reshape(-1) for v in volumes])
        block = material != self.scans.background[self.validation][:, None]
        if state.target == "log_x0":
            log_x0 = np.stack([self.scans.log_x0(v).reshape(-1) for v in volumes])
            return evaluate_log_x0(said, log_x0, block, self.scans.materials.x0, self.weights)
        return evaluate(said, material, block, self.scans.materials.x0, self.weights)


class _Steps(torch.utils.data.Dataset):
    """Batches by step, for a DataLoader."""

    def __init__(self, data: TrainingData):
        self.data = data

    def __getitem__(self, step: int) -> Batch:
        return self.data.batch(step)
