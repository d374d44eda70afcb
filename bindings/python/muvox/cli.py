"""The command line: `muvox`, or `python -m muvox`.

Whatever is wrong with the input ends with one line on stderr and exit status 2.
"""

import importlib
import signal
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape

from .errors import UserError
from .options import device, file, keep, seed_range, threads, volume_numbers

ELSEWHERE = {
    "bench": "muvox.bench:bench",
    "demo": "muvox.demo:demo",
    "evaluate": "muvox.evaluate_command:evaluate",
    "gradcheck": "muvox.gradcheck:gradcheck",
    "report": "muvox.report.command:report",
    "simulate": "muvox.simulate.command:simulate",
    "train": "muvox.train.command:train",
}
STOPPED: list[int] = []  # exit status that a signal asked for


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
        except Exception as error:
            if STOPPED:  # the signal came within a callback of HDF5, which makes an error of its own of it
                sys.exit(STOPPED[0])
            _tell(error)
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


def _tell(error: Exception) -> None:
    if isinstance(error, (click.ClickException, UserError, OSError, MemoryError, RuntimeError)):
        _fail(_explain(error), 2)
    raise error


def _fail(message: str, code: int) -> None:
    click.echo(f"muvox: {' '.join(message.split())}", err=True)
    sys.exit(code)


@click.group(cls=Commands, invoke_without_command=True)
@click.pass_context
def muvox(context: click.Context) -> None:
    """Muon tomography with VoxelNet on memory-efficient operators."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@muvox.command()
@click.argument("checkpoint", type=file)
@click.argument("scans", type=file)
@click.option("--out", type=file, help="HDF5 file: probabilities, mean and standard deviation of ln X0 of every voxel.")
@click.option("--vti", type=file, help="Folder for ParaView: one .vti file a volume.")
@click.option("--volumes", callback=volume_numbers, help="Only these, e.g. 0-39,200.")
@click.option(
    "--muons", type=click.IntRange(min=0), default=0, show_default=True, help="Muons drawn of a volume.  [0: all]"
)
@click.option("--seed", type=seed_range, default=17, show_default=True, help="Which muons are drawn.")
@threads
@device
def predict(checkpoint: Path, scans: Path, out, vti, volumes, muons: int, seed: int, device: str) -> None:
    """Predict the materials in SCANS, a scan file or a folder of them, with the network in CHECKPOINT, to --out, --vti or both."""
    from .checkpoint import load
    from .data import open_scans
    from .data.features import MUON_COLUMNS
    from .display import progress_bar
    from .predict import predict as run

    if out is None and vti is None:
        raise click.UsageError("nothing to write: name a file by --out, or a folder by --vti")
    if out is not None:
        keep([checkpoint, scans], out)
    console, state = Console(), load(checkpoint, device)
    with open_scans(scans, MUON_COLUMNS) as data, progress_bar(console) as progress:
        chosen = data.numbers(volumes)
        task = progress.add_task("predicting", total=len(chosen))
        run(
            state,
            data,
            out,
            muons,
            seed,
            lambda done: progress.update(task, completed=done),
            vti=vti,
            volumes=chosen,
        )
    written = " and ".join(str(target) for target in (out, vti) if target is not None)
    console.print(f"{written}: {len(chosen)} volumes", highlight=False, soft_wrap=True)


@muvox.command()
@click.argument("source", type=file)
@click.argument("target", type=file)
@click.option("--volumes", callback=volume_numbers, help="Only these, e.g. 0-39,200.")
def convert(source: Path, target: Path, volumes: list[int] | None) -> None:
    """Write the volumes of SOURCE, a NumPy archive (.npz), to TARGET, a scan file (.h5)."""
    from .data import convert as run

    keep([source], target)
    click.echo(f"{target}: {run(source, target, volumes)} volumes")


@muvox.command()
def info() -> None:
    """Show versions, devices, kernels in use, what was built and what was not."""
    from .info import facts

    console = Console(soft_wrap=True)
    for name, value in facts().items():
        console.print(f"[bold]{name:<20}[/bold]{escape(value)}", highlight=False)


def _stop(number: int, frame) -> None:
    STOPPED.append(128 + number)
    sys.exit(STOPPED[0])


def main() -> None:
    """Entry point. A terminated run cleans up behind it like an interrupted one."""
    signal.signal(signal.SIGTERM, _stop)
    muvox(prog_name="muvox")
