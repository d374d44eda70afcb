"""The training loop, and how it goes on from a checkpoint."""

import contextlib
import dataclasses
import math
import time
import warnings
from collections.abc import Callable

import torch

from .. import checkpoint as checkpoints
from ..checkpoint import Checkpoint
from ..data import Scans
from ..errors import UserError
from .batches import TrainingData
from .recalibrate import recalibrate
from .recipe import Settings, make_optimiser, one_cycle
from .run import Run, fingerprint


class TrainingError(UserError):
    """Training that cannot go on."""


Report = Callable[[int, float, dict], None]  # step (from 1), loss, newest entry of history["validation"], or {}
Validating = Callable[[int, int], None]  # validation volumes done, and all of them


def train(
    scans: Scans,
    settings: Settings,
    out=None,
    report: Report = lambda *_: None,
    *,
    validating: Validating = lambda *_: None,
    resume: bool = False,
    save_every: int = 0,
    workers: int = 0,
    tensorboard: bool = False,
) -> Checkpoint:
    """Trains a VoxelNet on the training volumes of `scans` and returns it as it is after the last step.

    Arguments:
        scans: opened with columns `features.MUON_COLUMNS`
        settings: how to train
        out: a folder, or a `Run` that is open. `last.pt` is written there at every evaluation and at the end, `best.pt`
            whenever the validation loss is the lowest so far, and `log.csv` step by step
        report: called after each step
        validating: called after each volume of an evaluation
        resume: goes on from `last.pt` in `out`, if there is one. However often a run was killed and resumed, its
            weights, losses and log.csv are those of an uninterrupted run, bit for bit
        save_every: steps after which `last.pt` is written, besides at evaluations; 0: never
        workers: processes that read and prepare batches ahead; the result does not depend on their number
        tensorboard: write event files to the folder `tensorboard` in `out`

    The same seed, data, number of threads and machine give the same losses, bit for bit. Volumes without muons are left
    out with a warning.
    Raises ScanError for data that cannot be trained on, TrainingError when the loss is not finite or the checkpoint in
    `out` is of other settings or data, RunError when another run writes to `out`, OSError from saving.
    """
    data = TrainingData(scans, settings)
    with contextlib.ExitStack() as stack:
        run = out if out is None or isinstance(out, Run) else stack.enter_context(Run(out, tensorboard))
        return _Training(data, settings, run, run.last() if run and resume else None).go(
            report, validating, save_every, workers
        )


def is_finished(state: Checkpoint) -> bool:
    """Has a run reached its last step, or been stopped early?"""
    settings = settings_of(state)
    return state.step >= settings.steps or _is_stuck(state, settings)


def settings_of(state: Checkpoint) -> Settings:
    """The settings that a checkpoint was trained with."""
    return Settings(**{"nearest": 0, **state.history["settings"]})  # earlier checkpoints: voxels saw all muons


class _Training:
    """Network, optimiser and history of a run, new or as they were at a checkpoint."""

    def __init__(self, data: TrainingData, settings: Settings, run: Run | None, old: Checkpoint | None):
        self.data, self.settings, self.run = data, settings, run
        self.scans = data.scans
        torch.manual_seed(settings.seed)
        net = checkpoints.build(
            self.scans.grid.part((0, 0, 0), data.shape),
            len(self.scans.materials.names),
            settings.norm,
            settings.target,
        )
        self.net = net.to(settings.device)
        self.optimiser = make_optimiser(self.net, settings)
        self.state = Checkpoint(
            self.net,
            self.scans.grid,
            self.scans.materials,
            data.prior,
            settings.norm,
            settings.muons,
            nearest=settings.nearest,
            box=data.box,
            target=settings.target,
            history=dict(settings=dataclasses.asdict(settings), loss=[], lr=[], seconds=[], validation=[]),
        )
        if old is not None:
            self._restore(old)

    def _restore(self, old: Checkpoint) -> None:
        kept = old.training
        if not kept:
            raise TrainingError(f"{self.run.folder / 'last.pt'}: holds no state of training to go on from")
        if settings_of(old) != self.settings:
            raise TrainingError(f"{self.run.folder / 'last.pt'}: trained with other settings")
        if kept["scans"] != fingerprint(self.scans) or old.prior != self.data.prior:
            raise TrainingError(f"{self.scans.path}: not the scans that the run in {self.run.folder} was started with")
        if kept["threads"] != torch.get_num_threads():
            warnings.warn(
                f"the run had {kept['threads']} threads so far and goes on with {torch.get_num_threads()}: sums may be "
                "rounded otherwise",
                stacklevel=4,
            )
        checkpoints.load_weights(self.net, kept["net"])
        self.optimiser.load_state_dict(kept["optimiser"])
        torch.set_rng_state(kept["random"].cpu())
        self.state.step, self.state.history = old.step, old.history
        # Should no step be left, what was evaluated last is the result.
        self.state.net = old.net

    def go(self, report: Report, validating: Validating, save_every: int, workers: int) -> Checkpoint:
        state, settings, history = self.state, self.settings, self.state.history
        if self.run is not None:
            self.run.start_logs(history)
        if is_finished(state):
            return state
        prepare = self.run.let_go if self.run is not None else None
        for batch in self.data.batches(state.step, workers, prepare):
            lr, loss = self._step(batch)
            metrics = self._evaluate(validating) if _is_due(state.step, settings) else {}
            if self.run is not None:
                self.run.log(state.step, lr, loss, metrics)
                if metrics:
                    self._save(best=_is_best(state))
                elif save_every and state.step % save_every == 0:
                    self._save(best=False)
            report(state.step, loss, history["validation"][-1] if history["validation"] else {})
            if is_finished(state):
                break
        return state

    def _step(self, batch) -> tuple[float, float]:
        """One optimiser step: its learning rate and loss."""
        started, state, settings = time.perf_counter(), self.state, self.settings
        batch = type(batch)(*(part.to(settings.device) for part in batch))
        self.net.train()
        lr = one_cycle(state.step, settings.steps, settings.lr)
        for group in self.optimiser.param_groups:
            group["lr"] = lr
        said = state.decode(self.net(*batch.input(settings.nearest)))
        loss = self.data.loss(said, batch)
        self.optimiser.zero_grad()
        loss.backward()
        if settings.clip:
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), settings.clip)
        self.optimiser.step()
        state.step += 1
        value = loss.item()
        if not math.isfinite(value):
            raise TrainingError(f"the loss is {value} at step {state.step}; try a lower learning rate")
        state.history["loss"].append(value)
        state.history["lr"].append(lr)
        state.history["seconds"].append(time.perf_counter() - started)
        return lr, value

    def _evaluate(self, validating: Validating) -> dict:
        """Metrics of the network as it would be used now; it becomes `state.net`."""
        state = self.state
        net = self._usable()
        if self.settings.norm == "lumin" and self.settings.recalibration:
            recalibrate(net, lambda: self.data.recalibration_batches(state.step), self.settings.nearest)
        state.net = self._on_grid(net)
        metrics = dict(step=state.step, **self.data.validate(state, validating))
        state.history["validation"].append(metrics)
        return metrics

    def _usable(self) -> torch.nn.Module:
        return checkpoints.on_grid(
            self.net,
            self.scans.grid.part((0, 0, 0), self.data.shape),
            len(self.scans.materials.names),
            self.settings.norm,
            self.settings.target,
        )

    def _on_grid(self, net: torch.nn.Module) -> torch.nn.Module:
        return checkpoints.on_grid(
            net, self.scans.grid, len(self.scans.materials.names), self.settings.norm, self.settings.target
        ).eval()

    def _save(self, best: bool) -> None:
        state = self.state
        state.training = dict(
            net=checkpoints.weights(self.net),
            optimiser=self.optimiser.state_dict(),
            random=torch.get_rng_state(),
            scans=fingerprint(self.scans),
            threads=torch.get_num_threads(),
        )
        if not state.history["validation"] or state.history["validation"][-1]["step"] != state.step:
            state.net = self._on_grid(self.net)  # between evaluations: the network as it is
        self.run.save(state, best)


def _losses(state: Checkpoint) -> list[float]:
    losses = (entry["loss"] for entry in state.history["validation"] if "loss" in entry)
    return [math.inf if math.isnan(loss) else loss for loss in losses]


def _is_best(state: Checkpoint) -> bool:
    """Is the newest validation loss lower than all before? Without validation volumes the newest network is best."""
    losses = _losses(state)
    return not losses or losses[-1] < min(losses[:-1], default=math.inf)


def _is_stuck(state: Checkpoint, settings: Settings) -> bool:
    """Have the last `patience` evaluations not brought the validation loss below those before?"""
    losses = _losses(state)
    if not settings.patience or len(losses) <= settings.patience:
        return False
    return min(losses[-settings.patience :]) >= min(losses[: -settings.patience])


def _is_due(step: int, settings: Settings) -> bool:
    """Is there an evaluation after this step? The last always has one."""
    every = max(1, settings.steps // settings.evaluations) if settings.evaluations else settings.steps
    return step == settings.steps or (step % every == 0 and step + every <= settings.steps)
