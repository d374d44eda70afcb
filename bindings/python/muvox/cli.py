"""The command line: `muvox`, or `python -m muvox`.

Whatever is wrong with the input ends with one line on stderr and exit status 2.
"""

import dataclasses
import importlib
import json
import math
import signal
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape

from .errors import UserError

ELSEWHERE = {
    "bench": "muvox.bench:bench",
    "demo": "muvox.demo:demo",
    "gradcheck": "muvox.gradcheck:gradcheck",
    "simulate": "muvox.simulate.command:simulate",
}


class Commands(click.Group):
    """A group that imports some commands only when they are called, and tells errors in one line."""

    def list_commands(self, context) -> list[str]:
        return sorted([*super().list_commands(context), *ELSEWHERE])

    def get_command(self, context, name: str):
        if name not in ELSEWHERE:
            return super().get_command(context, name)
        module, command = ELSEWHERE[name].split(":")
        return getattr(importlib.import_module(module), command)

    def main(self, *args, standalone_mode: bool = True, **extra):
        if not standalone_mode:
            return super().main(*args, standalone_mode=False, **extra)
        try:
            code = super().main(*args, standalone_mode=False, **extra)
        except (click.Abort, KeyboardInterrupt):
            _fail("interrupted", 130)
        except (click.ClickException, UserError, OSError, MemoryError, RuntimeError) as error:
            _fail(_explain(error), 2)
        sys.exit(code if isinstance(code, int) else 0)


def _explain(error: Exception) -> str:
    """An error that the input or the machine is to blame for, in words; any other is raised again."""
    if isinstance(error, click.ClickException):
        return error.format_message()
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error)
    if isinstance(error, MemoryError) or "allocate memory" in str(error) or "out of memory" in str(error).lower():
        return "not enough memory; try fewer --muons or a smaller --batch or --crop"
    if isinstance(error, UserError):
        return str(error)
    raise error


def _fail(message: str, code: int) -> None:
    click.echo(f"muvox: {' '.join(message.split())}", err=True)
    sys.exit(code)


def _device(context, parameter, value: str) -> str:
    import torch

    try:
        kind = torch.device(value).type
    except RuntimeError:
        raise click.BadParameter(f"'{value}' is not a device") from None
    if kind != "cpu":
        raise click.BadParameter(f"'{value}': training and prediction run on the CPU in this version")
    return value


def _finite(context, parameter, value: float) -> float:
    if not math.isfinite(value):
        raise click.BadParameter(f"{value} is not a finite number")
    return value


def _threads(context, parameter, value: int | None) -> None:
    import torch

    if value is not None:
        torch.set_num_threads(value)


def _keep(inputs: list[Path], target: Path) -> None:
    """Refuses to write over what is read."""
    if any(target.exists() and path.exists() and target.samefile(path) for path in inputs):
        raise click.UsageError(f"{target} is read from and cannot be written to")


def _volumes(context, parameter, value: str | None) -> list[int] | None:
    """ "0-39,200" -> [0, …, 39, 200]."""
    if value is None:
        return None
    try:
        ranges = []
        for part in value.split(","):
            first, dash, last = part.partition("-")
            ranges.append(range(int(first), int(last if dash else first) + 1))
    except ValueError:
        raise click.BadParameter(f"'{value}' is not a list of numbers and ranges such as 0-39,200") from None
    return [index for indices in ranges for index in indices]


count = click.IntRange(min=1)
file = click.Path(path_type=Path)
threads = click.option(
    "--threads",
    type=click.IntRange(1, 1024),
    callback=_threads,
    expose_value=False,
    help="CPU threads.  [default: all cores]",
)
device = click.option("--device", default="cpu", show_default=True, callback=_device, help="Where the network runs.")


@click.group(cls=Commands, invoke_without_command=True)
@click.pass_context
def muvox(context: click.Context) -> None:
    """Muon tomography with VoxelNet on memory-efficient operators."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@muvox.command()
@click.argument("scans", type=file)
@click.option("--out", type=file, required=True, help="Folder for best.pt, last.pt and history.json.")
@click.option("--steps", type=count, default=2000, show_default=True, help="Optimiser steps.")
@click.option("--batch", type=count, default=4, show_default=True, help="Volumes of a step.")
@click.option("--muons", type=count, default=128, show_default=True, help="Muons drawn of every volume in a step.")
@click.option(
    "--crop",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Train on random boxes of at most this many voxels a side: quicker.  [0: whole volumes]",
)
@click.option(
    "--mirror/--no-mirror", default=True, show_default=True, help="Train on mirror images and quarter turns too."
)
@click.option(
    "--norm",
    type=click.Choice(["batch", "lumin"]),
    default="batch",
    show_default=True,
    help="Running norm: sound at any batch size, or LUMIN's.",
)
@click.option(
    "--lr",
    type=click.FloatRange(min=0, min_open=True),
    default=3e-3,
    show_default=True,
    callback=_finite,
    help="Highest learning rate of the one-cycle schedule.",
)
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=7, show_default=True, help="Everything random.")
@click.option(
    "--evaluations", type=count, default=10, show_default=True, help="Validations, and checkpoints, of the run."
)
@click.option("--validation", type=count, default=40, show_default=True, help="Validation volumes used, at most.")
@threads
@device
def train(scans: Path, out: Path, **options) -> None:
    """Train VoxelNet on SCANS, a scan file with truth."""
    from .data import Scans
    from .data.features import MUON_COLUMNS
    from .display import told_warnings, training_progress
    from .files import atomic_write
    from .train import Settings
    from .train import train as run

    console, settings = Console(), Settings(**options)
    with (
        Scans(scans, MUON_COLUMNS) as data,
        told_warnings(lambda text: click.echo(f"muvox: {scans}: {text}", err=True)),
    ):
        out.mkdir(parents=True, exist_ok=True)
        with training_progress(console, settings.steps) as report:
            state = run(data, settings, out, report)
    with atomic_write(out / "history.json") as target:
        target.write(json.dumps(dict(state.history, settings=dataclasses.asdict(settings)), indent=1).encode())
    console.print(f"{out}: best.pt, last.pt, history.json", highlight=False)


@muvox.command()
@click.argument("checkpoint", type=file)
@click.argument("scans", type=file)
@click.option("--out", type=file, required=True, help="HDF5 file with log-probabilities and E[ln X0] of every voxel.")
@click.option(
    "--muons", type=click.IntRange(min=0), default=0, show_default=True, help="Muons drawn of a volume.  [0: all]"
)
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=17, show_default=True, help="Which muons are drawn.")
@threads
@device
def predict(checkpoint: Path, scans: Path, out: Path, muons: int, seed: int, device: str) -> None:
    """Predict the materials in SCANS with the network in CHECKPOINT."""
    from .checkpoint import load
    from .data import Scans
    from .data.features import MUON_COLUMNS
    from .display import progress_bar
    from .predict import predict as run

    _keep([checkpoint, scans], out)
    console, state = Console(), load(checkpoint, device)
    with Scans(scans, MUON_COLUMNS) as data, progress_bar(console) as progress:
        task = progress.add_task("predicting", total=len(data))
        run(state, data, out, muons, seed, lambda done: progress.update(task, completed=done))
    console.print(f"{out}: {len(data)} volumes", highlight=False)


@muvox.command()
@click.argument("source", type=file)
@click.argument("target", type=file)
@click.option("--volumes", callback=_volumes, help="Only these, e.g. 0-39,200.")
def convert(source: Path, target: Path, volumes: list[int] | None) -> None:
    """Write the volumes of SOURCE, a NumPy archive (.npz), to TARGET, a scan file (.h5)."""
    from .data import convert as run

    _keep([source], target)
    click.echo(f"{target}: {run(source, target, volumes)} volumes")


@muvox.command()
def info() -> None:
    """Show versions, devices, kernels in use, what was built and what was not."""
    from .info import facts

    console = Console(soft_wrap=True)
    for name, value in facts().items():
        console.print(f"[bold]{name:<20}[/bold]{escape(value)}", highlight=False)


def main() -> None:
    """Entry point. A terminated run cleans up behind it like an interrupted one."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    muvox(prog_name="muvox")
