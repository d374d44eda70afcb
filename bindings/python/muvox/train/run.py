"""The folder of a training run: who writes to it, its checkpoints, its logs."""

import contextlib
import csv
import errno
import fcntl
import hashlib
import io
import math
import os
from pathlib import Path

from .. import checkpoint as checkpoints
from ..checkpoint import Checkpoint
from ..data import Scans
from ..errors import UserError
from ..files import atomic_write

WRITTEN = ("last.pt", "best.pt", "history.json", "log.csv")
COLUMNS = ("step", "lr", "loss", "validation_loss", "validation_accuracy", "validation_auc", "validation_rmse")


class RunError(UserError):
    """A folder that this run cannot use."""


class Run:
    """Writes `last.pt`, `best.pt`, `log.csv` and, if wanted, TensorBoard's event files to a folder.

    The folder is made, and locked as long as this object is open: one run writes to it at a time. Checkpoints are old
    or new, never half; the logs are cut back to the checkpoint that is gone on from.
    Raises RunError if another run writes there, OSError if the folder cannot be made or read.
    """

    def __init__(self, folder, tensorboard: bool = False):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(self.folder)
        self._csv: io.TextIOBase | None = None
        self._events = None
        self._wants_events = tensorboard
        self._remove_leftovers()

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *error) -> None:
        self.close(quietly=error[0] is not None)

    def close(self, quietly: bool = False) -> None:
        """Writes what is left in the logs and lets others use the folder. Raises OSError unless `quietly`."""
        try:
            with contextlib.suppress(OSError) if quietly else contextlib.nullcontext():
                if self._csv is not None:
                    self._csv.close()
                if self._events is not None:
                    with self._naming("tensorboard"):
                        self._events.close()
        finally:
            self._csv = self._events = None
            self.let_go()

    def let_go(self, *ignored) -> None:
        """Closes the lock: what a forked process does, which would else hold it beyond its parent's end."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def last(self) -> Checkpoint | None:
        """The newest checkpoint, with what is needed to go on from it; None before the first."""
        path = self.folder / "last.pt"
        return checkpoints.load(path) if path.exists() else None

    def clear(self) -> None:
        """Deletes what an earlier run wrote here."""
        for name in WRITTEN:
            (self.folder / name).unlink(missing_ok=True)
        for path in self.folder.glob("tensorboard/events.out.tfevents.*"):
            path.unlink()

    def save(self, state: Checkpoint, best: bool) -> None:
        """Saves `best.pt`, without what only training needs, and then `last.pt`.

        In this order: a kill in between leaves a best checkpoint that the run, going on from the last, writes again.
        """
        if best:
            checkpoints.save(self.folder / "best.pt", state.without_training())
        checkpoints.save(self.folder / "last.pt", state)

    def start_logs(self, history: dict) -> None:
        """Opens the logs: new ones that begin with what `history` has of the steps before."""
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerow(COLUMNS)
        validation = {entry["step"]: entry for entry in history["validation"]}
        steps = len(history["loss"])
        for step in range(1, steps + 1):
            table.writerow(_row(step, history["lr"][step - 1], history["loss"][step - 1], validation.get(step, {})))
        with atomic_write(self.folder / "log.csv") as file:
            file.write(text.getvalue().encode())
        self._csv = open(self.folder / "log.csv", "a", newline="", buffering=1)
        if self._wants_events:
            with self._naming("tensorboard"):
                from torch.utils.tensorboard import SummaryWriter

                # TensorBoard drops what earlier files of the folder say about later steps.
                self._events = SummaryWriter(self.folder / "tensorboard", purge_step=steps + 1)

    def log(self, step: int, lr: float, loss: float, metrics: dict) -> None:
        """One line a step, with the metrics of an evaluation after it, if there was one. Raises OSError."""
        with self._naming("log.csv"):
            csv.writer(self._csv, lineterminator="\n").writerow(_row(step, lr, loss, metrics))
        if self._events is not None:
            with self._naming("tensorboard"):
                self._events.add_scalar("training/loss", loss, step)
                self._events.add_scalar("training/learning rate", lr, step)
                for name, value in metrics.items():
                    if name != "step" and math.isfinite(value):
                        self._events.add_scalar(f"validation/{name}", value, step)
                if metrics:
                    self._events.flush()

    @contextlib.contextmanager
    def _naming(self, name: str):
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror or str(error), str(self.folder / name)) from None

    def _remove_leftovers(self) -> None:
        """Files that a killed run was writing; nobody else does, since the folder is locked."""
        for name in WRITTEN:
            for path in self.folder.glob(f".{name}.*.tmp"):
                path.unlink(missing_ok=True)


def fingerprint(scans: Scans) -> str:
    """A number of the volumes of a scan file, from all but the muons' and voxels' values: cheap to compute."""
    text = hashlib.sha256(f"{scans.grid} {scans.materials}".encode())
    for array in (scans.row_splits, scans.volume_id, scans.split, scans.background):
        text.update(array.astype("int64").tobytes())
    return text.hexdigest()


def _row(step: int, lr: float, loss: float, metrics: dict) -> list:
    return [step, lr, loss, *(metrics.get(name.removeprefix("validation_"), "") for name in COLUMNS[3:])]


def _locked(folder: Path) -> int:
    """A descriptor of the folder, locked until it is closed or the process ends, however it ends."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            os.close(descriptor)
            raise RunError(f"{folder}: another training run writes to this folder") from None
        # Network file systems that cannot lock a folder: it works as it would without.
    return descriptor
