"""The command `muvox simulate`."""

from __future__ import annotations

import math
import time
from pathlib import Path

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from ..data import Grid, Scans
from ..data.materials import materials_of
from ..display import progress_bar
from ..errors import UserError
from ..files import atomic_write
from ..options import count, file, finite, keep, seed_range, triple
from .layouts import Box, GivenBoxes, Layout, RandomBlock, RandomBoxes, read_maps
from .native import SimulationError
from .scans import Settings, simulate as run
from .source import Detector, Source

FIVE = "beryllium,graphite,silicon,iron,lead"
length = click.FloatRange(min=0, min_open=True)


def _range(context, parameter, value: str | None) -> tuple[int, int] | None:
    """1000 or 800-1200."""
    if value is None:
        return None
    first, dash, last = value.partition("-")
    try:
        limits = int(first), int(last if dash else first)
    except ValueError:
        limits = (-1, -1)
    if not 0 <= limits[0] <= limits[1] < 2**31:
        raise click.BadParameter(f"'{value}', expected a number of muons or a range such as 800-1200")
    return limits


@click.command()
@click.option("--out", type=file, required=True, help="Scan file to write (.h5).")
@click.option("--volumes", type=count, help="How many.  [default: 200, or all of --compare]")
@click.option(
    "--muons", callback=_range, help="Recorded of each: a number, or a range. [default: 1000, or as --compare]"
)
@click.option("--shape", callback=triple(int, "10x10x6"), help="Voxels along x, y, z.  [default: 10x10x6]")
@click.option("--voxel", callback=triple(float, "0.1 or 0.1x0.1x0.2"), help="Edges of a voxel, m.  [default: 0.1]")
@click.option(
    "--origin", callback=triple(float, "0,0,0.4"), help="Lowest corner of the volume, m.  [default: 0,0,0.4]"
)
@click.option(
    "--layout",
    type=click.Choice(["boxes", "block"]),
    default="boxes",
    show_default=True,
    help="Random content: 1 to 4 boxes in a background, or one block of a denser material in a lighter one.",
)
@click.option(
    "--materials",
    default=FIVE,
    show_default=True,
    help="Names, or NAME=X0 in m, divided by commas: the classes of the file.",
)
@click.option(
    "--background",
    default="beryllium,graphite",
    show_default=True,
    help="Materials that a volume may be filled with, but for --layout block. Those not among --materials are added.",
)
@click.option(
    "--box", "boxes", multiple=True, help="MATERIAL:X,Y,Z:X,Y,Z, corners in m, in place of --layout. Any number."
)
@click.option(
    "--map",
    "maps",
    type=file,
    help="Radiation lengths or materials from a .npy, .npz or .h5 file, in place of --layout.",
)
@click.option(
    "--momentum",
    default="spectrum",
    show_default=True,
    help="GeV; or spectrum, of cosmic muons at sea level; or a scan file whose column p is drawn from.",
)
@click.option("--panels", type=click.IntRange(2, 1000), default=4, show_default=True, help="Panels above, and below.")
@click.option("--gap", type=length, default=0.05, show_default=True, callback=finite, help="From volume to panel, m.")
@click.option("--spacing", type=length, default=0.1, show_default=True, callback=finite, help="Panel to panel, m.")
@click.option(
    "--margin",
    type=float,
    default=0.3,
    show_default=True,
    callback=finite,
    help="How far panels reach beyond the volume, m.",
)
@click.option(
    "--resolution",
    type=click.FloatRange(min=0),
    default=1e-4,
    show_default=True,
    callback=finite,
    help="Standard deviation of a hit in x and y, m.",
)
@click.option(
    "--efficiency", type=float, default=1.0, show_default=True, callback=finite, help="Share of the hits seen."
)
@click.option(
    "--step",
    type=click.FloatRange(min=1e-6),
    callback=finite,
    help="Longest step, m.  [default: the shortest edge of a voxel, or 0.01 with --log-term step]",
)
@click.option(
    "--log-term",
    type=click.Choice(["path", "step"]),
    default="path",
    show_default=True,
    help="Thickness in the formula's logarithm: all that the muon crosses (PDG), or one step (as TomOpt).",
)
@click.option(
    "--validation",
    type=click.FloatRange(0, 1),
    default=0.2,
    show_default=True,
    help="Share of the volumes for validation: the last ones.",
)
@click.option(
    "--compare",
    "reference",
    type=file,
    help="Scan file with truth: simulate its volumes with its momenta, and tell how the muons differ.",
)
@click.option("--picture", type=file, help="PNG of the first volume, or of the comparison.")
@click.option("--seed", type=seed_range, default=7, show_default=True, help="Everything random.")
@click.option(
    "--threads", type=click.IntRange(1, 1024), help="CPU threads; they change no result.  [default: all cores]"
)
def simulate(out: Path, reference: Path | None, maps: Path | None, picture: Path | None, **options) -> None:
    """Simulate muon scans: cosmic muons scattered in volumes of known materials, seen by a detector.

    Writes a scan file that `muvox train` reads. A muon's random numbers depend on the seed, its volume and its place in
    it: threads change nothing.
    """
    keep([path for path in (reference, maps) if path], out)
    if picture:
        keep([path for path in (reference, maps, out) if path], picture)
        if picture.resolve() == out.resolve():
            raise click.UsageError(f"{picture}: the picture cannot be the scan file")
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(100, console.width))  # a log has room for the tables
    layout, settings = _prepare(reference, maps, **options)
    started = time.perf_counter()
    with progress_bar(console) as progress:
        task = progress.add_task("simulating", total=settings.volumes)
        result = run(out, layout, settings, lambda done: progress.update(task, completed=done))
    seconds = time.perf_counter() - started
    _print_summary(console, out, layout, settings, result, seconds)
    rows = None
    if reference:
        from .compare import compare, table

        rows = compare(reference, out)
        console.print(table(rows, reference.name))
    if picture:
        from . import pictures

        with atomic_write(picture) as file:
            if rows is None:
                pictures.scan(file, out)
            else:
                pictures.comparison(file, rows, reference.name)


def _prepare(reference: Path | None, maps: Path | None, **options) -> tuple[Layout, Settings]:
    muons, volumes, splits = options["muons"] or (1000, 1000), options["volumes"], None
    momentum = options["momentum"]
    if reference:
        if maps or options["boxes"] or options["shape"]:
            raise click.UsageError("--compare takes the volumes of its file: not with --map, --box or --shape")
        with Scans(reference, ("p",)) as scans:
            if not scans.has_truth:
                raise SimulationError(f"{reference}: no truth (x0, material), there is nothing to simulate")
            volumes = min(volumes or len(scans), len(scans))
            splits = scans.split
            muons = options["muons"] or np.diff(scans.row_splits)
        maps = reference
        momentum = str(reference) if momentum == "spectrum" else momentum
    layout = _layout(maps, **options)
    detector = Detector.around(
        layout.grid, *(options[name] for name in ("panels", "gap", "spacing", "margin", "resolution", "efficiency"))
    )
    settings = Settings(
        volumes or 200,
        muons,
        _source(momentum),
        detector,
        options["validation"],
        options["step"],
        options["log_term"] == "step",
        options["seed"],
        options["threads"] or 0,
        splits,
    )
    return layout, settings


def _layout(maps: Path | None, **options) -> Layout:
    words = options["materials"].split(",")
    grounds = [word.partition("=")[0] for word in options["background"].split(",")]
    if maps:
        if options["boxes"]:
            raise click.UsageError("--map and --box exclude each other")
        layout = read_maps(maps, materials_of(words), options["voxel"], options["origin"])
        if options["shape"] not in (None, layout.grid.shape):
            raise SimulationError(f"{maps}: the map has the shape {layout.grid.shape}, --shape says {options['shape']}")
        return layout
    names = [word.partition("=")[0] for word in words]
    extra = [word for word in options["background"].split(",") if word.partition("=")[0] not in names]
    if options["layout"] == "block" and not options["boxes"]:
        extra = []
    materials = materials_of([*words, *extra])
    grid = Grid(
        options["shape"] or (10, 10, 6), options["origin"] or (0.0, 0.0, 0.4), options["voxel"] or (0.1, 0.1, 0.1)
    )
    background = [] if options["layout"] == "block" and not options["boxes"] else [*map(materials.names.index, grounds)]
    if options["boxes"]:
        return GivenBoxes(grid, materials, background, [Box.read(text, materials) for text in options["boxes"]])
    return RandomBlock(grid, materials) if options["layout"] == "block" else RandomBoxes(grid, materials, background)


def _source(momentum: str) -> Source:
    if momentum == "spectrum":
        return Source.spectrum()
    try:
        value = float(momentum)
    except ValueError:
        pass
    else:
        if not (math.isfinite(value) and value > 0):
            raise SimulationError(f"momentum {momentum}, expected GeV above 0, 'spectrum' or a scan file")
        return Source.of_momentum(value)
    try:
        with Scans(momentum, ("p",)) as scans:
            drawn = [scans.muons(index)[:, 0] for index in range(min(len(scans), 2000))]
    except UserError as error:
        raise SimulationError(f"momentum: {error} (expected GeV, 'spectrum' or a scan file)") from None
    values = np.concatenate([*drawn, np.empty(0)])
    if not len(values) or values.min() <= 0:
        raise SimulationError(f"momentum: {momentum} has no muons, or some without momentum")
    return Source.of_momentum(values)


def _print_summary(console: Console, out: Path, layout: Layout, settings: Settings, result, seconds: float) -> None:
    table = Table(show_header=False)
    share = f"{result.muons / result.aimed:.1%}" if result.aimed else "–"
    for name, value in (
        ("file", f"{out}, {out.stat().st_size / 1e6:.1f} MB"),
        ("volumes", f"{result.volumes:,} of {layout.grid}"),
        ("materials", ", ".join(layout.materials.names)),
        ("muons", f"{result.muons:,} recorded, {share} of those that crossed the panels above and the volume"),
        ("time", f"{seconds:.1f} s"),
        ("speed", f"{result.volumes / seconds:.1f} volumes/s, {result.muons / seconds:,.0f} muons/s"),
    ):
        table.add_row(name, value)
    console.print(table)
