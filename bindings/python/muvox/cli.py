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
from .options import device, file, finite, keep, seed_range, threads, triple, volume_numbers

ELSEWHERE = {
    "bench": "muvox.bench:bench",
    "demo": "muvox.demo:demo",
    "evaluate": "muvox.evaluate_command:evaluate",
    "gradcheck": "muvox.gradcheck:gradcheck",
    "report": "muvox.report.command:report",
    "simulate": "muvox.simulate.command:simulate",
    "train": "muvox.train.command:train",
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
        except Exception as error:
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
    """Predict the materials in SCANS, a scan file or a folder of them, with the network in CHECKPOINT.

    Writes what --out or --vti or both name.
    """
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
@click.option("--truth", type=file, help="Radiation lengths beside the muons: .csv for .csv, .npy for .npy.")
@click.option("--shape", callback=triple(int, "10x10x6"), help="Voxels along x, y, z, where SOURCE does not say.")
@click.option("--voxel", callback=triple(float, "0.1 or 0.1x0.1x0.2"), help="Edges of a voxel, m.")
@click.option("--origin", callback=triple(float, "0,0,0.4"), help="Lowest corner of the volume, m.")
@click.option(
    "--materials",
    help="Classes of the truth: names, or NAME=X0 in m, divided by commas.  [default: of the known ones those there]",
)
@click.option(
    "--validation",
    type=click.FloatRange(0, 1),
    callback=finite,
    help="Share of the volumes for validation, the last ones.  [default: 0.2]",
)
@click.option("--volumes", callback=volume_numbers, help="Only these, e.g. 0-39,200.")
def convert(source: Path, target: Path, truth, shape, voxel, origin, materials, validation, volumes) -> None:
    """Write the volumes of SOURCE to TARGET, a scan file (.h5).

    SOURCE: NumPy arrays (.npz, .npy) or LUMIN's fold file (.h5) with TomOpt's muons, or a table of muons (.csv).
    """
    from .data import Grid, convert as run
    from .data.materials import materials_of
    from .display import progress_bar

    if None in (shape, voxel, origin) and (shape, voxel, origin) != (None, None, None):
        raise click.UsageError("--shape, --voxel and --origin go together: one is missing")
    keep([source, *([truth] if truth else [])], target)
    console = Console()
    with progress_bar(console) as progress:
        task = progress.add_task("converting", total=None)
        done = run(
            source,
            target,
            volumes,
            truth=truth,
            grid=Grid(shape, origin, voxel) if shape else None,
            materials=materials_of(materials.split(",")) if materials else None,
            validation=validation,
            report=lambda done: progress.update(task, completed=done),
        )
        progress.update(task, total=done)
    console.print(f"{target}: {done} volumes", highlight=False, soft_wrap=True)


@muvox.command()
def info() -> None:
    """Show versions, devices, kernels in use, what was built and what was not."""
    from .info import facts

    console = Console(soft_wrap=True)
    for name, value in facts().items():
        console.print(f"[bold]{name:<20}[/bold]{escape(value)}", highlight=False)


def _stop(number: int, frame) -> None:
    sys.exit(128 + number)


def main() -> None:
    """Entry point. A terminated run cleans up behind it like an interrupted one."""
    signal.signal(signal.SIGTERM, _stop)
    try:
        muvox(prog_name="muvox")
    finally:  # it ends already: a second signal would only leave a traceback
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
