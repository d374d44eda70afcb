"""What the command line shows: progress bars and warnings."""

import contextlib
import warnings
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .train import Report, Validating


@contextlib.contextmanager
def told_warnings(tell: Callable[[str], None]) -> Iterator[None]:
    """Passes the text of every warning to `tell`, whatever Python's filters say."""
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *rest: tell(str(message))
        yield


def progress_bar(console: Console, *extra: TextColumn) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        *extra,
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )


@contextlib.contextmanager
def training_progress(console: Console, steps: int, done: int = 0) -> Iterator[tuple[Report, Validating]]:
    """A bar with loss (running mean) and block AUC, and a line for every evaluation; yields the two functions that
    `train` reports steps and validation volumes to.

    `done`: steps of earlier runs.
    """
    columns = TextColumn("loss {task.fields[loss]}"), TextColumn("block AUC {task.fields[auc]}")
    with progress_bar(console, *columns) as progress:
        task = progress.add_task("training", total=steps, completed=done, loss="–", auc="–")
        mean: float | None = None
        shown: dict = {}

        def report(step: int, loss: float, metrics: dict) -> None:
            nonlocal mean, shown
            mean = loss if mean is None else mean + (loss - mean) * max(0.04, 1 / step)
            if "loss" in metrics and metrics is not shown:
                shown = metrics
                rmse = f", error of ln X0 {metrics['rmse']:.3f}" if "rmse" in metrics else ""
                console.print(
                    f"step {step}: loss {mean:.3f}; validation: loss {metrics['loss']:.3f}, accuracy "
                    f"{metrics['accuracy']:.3f}, block AUC {metrics['auc']:.3f}{rmse}",
                    highlight=False,
                    soft_wrap=True,
                )
            auc = f"{metrics['auc']:.3f}" if "auc" in metrics else "–"
            progress.update(task, completed=step, loss=f"{mean:.3f}", auc=auc)

        def validating(done: int, volumes: int) -> None:
            progress.update(task, description="training" if done == volumes else f"validating {done}/{volumes}")

        yield report, validating
