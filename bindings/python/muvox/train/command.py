"""`muvox train`."""

import dataclasses
import json
from pathlib import Path

import click
import numpy as np
from click.core import ParameterSource
from rich.console import Console

from ..checkpoint import Checkpoint
from ..data import Scans, open_scans
from ..data.features import LIMITS, MUON_COLUMNS
from ..display import told_warnings, training_progress
from ..files import atomic_write
from ..options import config, count, device, file, finite, seed_range, threads
from .loop import is_finished, settings_of
from .loop import train as run_training
from .recipe import Settings
from .run import Run

DEFAULT = Settings()
NAMES = tuple(field.name for field in dataclasses.fields(Settings))


def _option(name: str, kind, text: str, **more):
    default = getattr(DEFAULT, name)
    return click.option(f"--{name.replace('_', '-')}", type=kind, default=default, show_default=True, help=text, **more)


def _number(least: float = 0, open: bool = False):
    return click.FloatRange(min=least, min_open=open)


@click.command()
@click.argument("scans", type=file)
@click.option("--out", type=file, required=True, help="Folder for best.pt, last.pt, log.csv and history.json.")
@config
@click.option("--resume", is_flag=True, help="Go on from last.pt in the folder; start if there is none.")
@click.option("--overwrite", is_flag=True, help="Start anew in a folder that holds a run.")
@_option(
    "target",
    click.Choice(["classes", "log_x0"]),
    "What is predicted of a voxel: its material, or ln X0 with its uncertainty.",
)
@_option("steps", count, "Optimiser steps.")
@_option("batch", count, "Volumes of a step.")
@_option("muons", click.IntRange(min=0), "Muons drawn of every volume in a step; 0: all.")
@_option(
    "nearest",
    click.IntRange(min=0),
    "Of these each voxel sees only so many, with the nearest PoCAs, in training and in prediction; 0: all.",
)
@_option(
    "crop",
    click.IntRange(min=0),
    "Train on boxes of at most so many voxels a side, predict in boxes half as large again; 0: whole volumes.",
)
@click.option(
    "--mirror/--no-mirror",
    default=DEFAULT.mirror,
    show_default=True,
    help="Train on mirror images and quarter turns too.",
)
@_option("norm", click.Choice(["batch", "lumin"]), "Running norm: sound at any batch size, or LUMIN's.")
@_option(
    "recalibration",
    click.IntRange(min=0),
    "Batches over which LUMIN's norms are averaged before an evaluation; 0: left as they are.",
)
@_option("lr", _number(open=True), "Highest learning rate of the one-cycle schedule.", callback=finite)
@_option("weight_decay", _number(), "Of the weight matrices (AdamW).", callback=finite)
@_option("clip", _number(), "Longest gradient, longer ones are shortened; 0: any.", callback=finite)
@_option("patience", click.IntRange(min=0), "Stop after so many evaluations without a lower validation loss; 0: never.")
@_option("seed", seed_range, "Everything random.")
@_option("evaluations", count, "Validations, and checkpoints, of the run.")
@_option("validation", count, "Validation volumes used, at most.")
@click.option(
    "--save-every",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Steps between further checkpoints; 0: none.",
)
@click.option(
    "--workers", type=click.IntRange(0, 256), default=0, show_default=True, help="Processes that load batches ahead."
)
@click.option("--tensorboard/--no-tensorboard", default=True, show_default=True, help="Write files for TensorBoard.")
@threads
@device
@click.pass_context
def train(context, scans: Path, out: Path, resume, overwrite, save_every, workers, tensorboard, **options) -> None:
    """Train VoxelNet on SCANS, a scan file with truth or a folder of them.

    A run that was killed goes on with --resume, and ends with the same weights as one that was not.
    """
    if resume and overwrite:
        raise click.UsageError("--resume and --overwrite exclude each other")
    console, settings = Console(), Settings(**options)
    with (
        open_scans(scans, MUON_COLUMNS) as data,
        told_warnings(lambda text: click.echo(f"muvox: {scans}: {text}", err=True)),
        Run(out, tensorboard) as run,
    ):
        old = _old(run, resume, overwrite)
        if old is not None:
            settings = _same_settings(context, old, settings, out)
        done = old.step if old is not None else 0
        _tell(console, data, out, old)
        try:
            with training_progress(console, settings.steps, done) as (report, validating):
                state = run_training(
                    data,
                    settings,
                    run,
                    report,
                    validating=validating,
                    resume=resume,
                    save_every=save_every,
                    workers=workers,
                )
        except (KeyboardInterrupt, SystemExit):
            if (out / "last.pt").exists():
                click.echo(f"muvox: {out}: the same command with --resume goes on from the last checkpoint", err=True)
            raise
        if state.step < settings.steps:
            console.print(f"stopped early: {settings.patience} evaluations without a lower validation loss")
        with atomic_write(out / "history.json") as target:
            target.write(json.dumps(state.history, indent=1).encode())
    console.print(f"{out}: best.pt, last.pt, log.csv, history.json", highlight=False, soft_wrap=True)


def _old(run: Run, resume: bool, overwrite: bool) -> Checkpoint | None:
    """The checkpoint to go on from. Refuses to write over a run unless told so."""
    if overwrite:
        run.clear()
    old = run.last()
    if old is not None and not resume:
        raise click.UsageError(
            f"{run.folder} holds a run at step {old.step} of {settings_of(old).steps}: --resume goes on with it, "
            "--overwrite starts anew"
        )
    return old


def _same_settings(context, old: Checkpoint, given: Settings, out: Path) -> Settings:
    """The settings of the run that is gone on with. Refuses others, if they were asked for."""
    import torch

    settings = settings_of(old)
    for name in NAMES:
        asked = context.get_parameter_source(name) not in (ParameterSource.DEFAULT, None)
        if asked and getattr(given, name) != getattr(settings, name):
            option = name.replace("_", "-")
            raise click.UsageError(
                f"--{option} is {getattr(given, name)}, but the run in {out} was started with {getattr(settings, name)}"
            )
    if context.get_parameter_source("threads") in (ParameterSource.DEFAULT, None) and old.training:
        torch.set_num_threads(old.training["threads"])
    return settings


def _tell(console: Console, data: Scans, out: Path, old: Checkpoint | None) -> None:
    counts = np.diff(data.row_splits)
    volumes = " and ".join(f"{len(data.of_split(split))} {split}" for split in ("training", "validation"))
    said = f"{data.path}: {volumes} volumes of {data.grid}, {min(counts, default=0)} to {max(counts, default=0)} muons"
    console.print(said, highlight=False, soft_wrap=True)
    (low, high), (near, far) = LIMITS["pred_x0"], LIMITS["poca"]
    console.print(
        f"long tails: the network is shown log10 of pred_x0 kept within {low:g} and {high:g} m, PoCAs kept within "
        f"{near:g} and {far:g} m",
        highlight=False,
        soft_wrap=True,
    )
    if old is not None:
        what = "is complete" if is_finished(old) else "goes on"
        console.print(f"{out}: the run {what} at step {old.step}", highlight=False, soft_wrap=True)
