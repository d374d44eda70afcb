"""`muvox report`."""

import platform
import shlex
from importlib import metadata
from pathlib import Path

import click
import h5py
import torch
from rich.console import Console

from .. import __version__
from ..checkpoint import Checkpoint, load
from ..data import Scans, open_scans
from ..display import progress_bar
from ..files import atomic_write
from ..options import device, file, keep, seed_range, threads, volume_numbers
from ..predict import SEED
from .contents import VOLUMES, collect
from .page import LIMIT, render


@click.command()
@click.argument("scans", type=file)
@click.argument("checkpoint", type=file)
@click.option("-o", "--out", type=file, default="report.html", show_default=True, help="The page.")
@click.option(
    "--volumes",
    callback=volume_numbers,
    help=f"Only these, e.g. 0-39,200.  [default: the first {VOLUMES} for validation]",
)
@click.option("--muons", type=click.IntRange(min=0), default=0, show_default=True, help="Drawn of a volume; 0: all.")
@click.option("--seed", type=seed_range, default=SEED, show_default=True, help="Which muons are drawn.")
@click.option("--screenshot", type=file, help="A picture of the page too, PNG, by Chromium.")
@threads
@device
@click.pass_context
def report(context, scans: Path, checkpoint: Path, out, volumes, muons: int, seed: int, screenshot, device) -> None:
    """Make one HTML page of SCANS, a scan file or a folder of them, and the network in CHECKPOINT.

    Slices, 3-D view, ROC, loss, time and memory. The page has all it needs in it and opens offline.
    """
    if checkpoint.is_dir() or (checkpoint.is_file() and h5py.is_hdf5(checkpoint)):  # in the order of `muvox predict`
        scans, checkpoint = checkpoint, scans
    for target in filter(None, (out, screenshot)):
        keep([checkpoint, scans], target)
    if screenshot is not None:
        from .browser import check

        check()
        if screenshot.absolute() == out.absolute():
            raise click.UsageError(f"{out} cannot be both the page and its picture")
    console, state = Console(), load(checkpoint, device)
    with open_scans(scans) as data:
        chosen = data.numbers(volumes) if volumes is not None else _first(data)
        with progress_bar(console) as progress:
            task = progress.add_task("predicting", total=len(chosen))
            contents = collect(
                state,
                data,
                chosen,
                muons,
                seed,
                checkpoint.parent / "log.csv",
                lambda done: progress.update(task, completed=done),
            )
    facts = _facts(context, scans, checkpoint, state, contents.muons, muons, seed)
    content = render(contents, facts, f"{scans.name} · {checkpoint.name}")
    with atomic_write(out) as target:
        target.write(content)
    if screenshot is not None:
        from .browser import opened, photograph

        with opened(out) as window:
            picture = photograph(window)
        with atomic_write(screenshot) as target:
            target.write(picture)
    for each in contents.maps:
        if each.auc is not None:
            console.print(f"block AUC of {each.name}: {each.auc:.3f}", highlight=False)
    for name, missing in contents.left_out.items():
        console.print(f"{name} left out: the scan has no {missing}", highlight=False, soft_wrap=True)
    written = f"{out}: {len(chosen)} volumes, {len(content) / 1e6:.1f} MB"
    if len(content) > LIMIT:
        written += "; large: a volume has many voxels"
    console.print(written, highlight=False, soft_wrap=True)


def _first(data: Scans) -> list[int]:
    """Volumes for validation, or any if there are none."""
    chosen = [int(index) for index in data.of_split("validation")] or list(range(len(data)))
    return chosen[:VOLUMES]


def _facts(context, scans: Path, checkpoint: Path, state: Checkpoint, counts, muons: int, seed: int) -> list:
    """What was reported on and by what, in the words of a table."""
    drawn = f"{muons} drawn of each volume, seed {seed}" if muons else f"all: {min(counts)} to {max(counts)} a volume"
    settings = state.history.get("settings", {})
    rows = {
        "command": _command(context),
        "scan": str(scans),
        "network": f"{checkpoint}, step {state.step:,}, {sum(p.numel() for p in state.net.parameters()):,} parameters",
        "trained with": ", ".join(f"{name} {value}" for name, value in settings.items()),
        "grid": str(state.grid),
        "materials": ", ".join(f"{n} ({100 * x0:.3g} cm)" for n, x0 in zip(state.materials.names, state.materials.x0)),
        "muons": drawn,
        "threads": str(torch.get_num_threads()),
        "versions": f"muvox {__version__}, torch {torch.__version__}, plotly {metadata.version('plotly')}, "
        f"Python {platform.python_version()} on {platform.machine()}",
    }
    return [(name, value) for name, value in rows.items() if value]


def _command(context: click.Context) -> str:
    """The command line again, with every option that was given."""
    words = ["muvox", "report"]
    for parameter in context.command.params:
        name = parameter.name
        if context.get_parameter_source(name) is not click.core.ParameterSource.COMMANDLINE:
            continue
        value = torch.get_num_threads() if name == "threads" else context.params.get(name)
        if name == "volumes":
            value = _ranges(value)
        words += [str(value)] if isinstance(parameter, click.Argument) else [parameter.opts[-1], str(value)]
    return shlex.join(words)


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 7] -> "0-2,7"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
