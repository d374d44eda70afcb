"""`muvox evaluate`."""

import json
from pathlib import Path

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from .checkpoint import load
from .data import Scans
from .display import progress_bar
from .evaluation import Evaluation, Result, evaluate_scans, work
from .files import atomic_write
from .options import device, file, keep, seed_range, threads, volume_numbers
from .predict import SEED

SHOWN = {
    "auc_block": "block AUC",
    "auc_block_volumes": "mean of volumes",
    "auc_dense": "dense AUC",
    "accuracy": "accuracy",
    "loss": "loss",
    "rmse": "error of ln X0",
    "pull": "pull",
}


@click.command()
@click.argument("checkpoint", type=file)
@click.argument("scans", type=file)
@click.option("--picture", type=file, default="evaluation.png", show_default=True, help="ROC and confusion, a PNG.")
@click.option("--json", "figures", type=click.Path(path_type=Path, allow_dash=True), help="Figures too; - for stdout.")
@click.option(
    "--split", type=click.Choice(["validation", "training", "all"]), default="validation", show_default=True, help="Volumes."
)
@click.option("--volumes", callback=volume_numbers, help="Only these, e.g. 0-39,200.")
@click.option("--muons", type=click.IntRange(min=0), default=0, show_default=True, help="Drawn of a volume; 0: all.")
@click.option("--seed", type=seed_range, default=SEED, show_default=True, help="Which muons are drawn.")
@threads
@device
def evaluate(checkpoint: Path, scans: Path, picture: Path, figures, split, volumes, muons, seed, device) -> None:
    """Compare the network in CHECKPOINT with PoCA and ASR maps on SCANS, a scan file with truth.

    Block: a voxel of another material than most of its volume. Dense: a radiation length below 2 cm.
    """
    from .plots import evaluation_picture

    to_stdout = figures is not None and str(figures) == "-"
    for target in [picture] + ([figures] if figures and not to_stdout else []):
        keep([checkpoint, scans], target)
    console = Console(stderr=to_stdout)
    state = load(checkpoint, device)
    with Scans(scans) as data:
        chosen = _chosen(data, split, volumes)
        with progress_bar(console) as progress:
            task = progress.add_task("evaluating", total=work(data, chosen))
            result = evaluate_scans(
                state, data, chosen, muons, seed, lambda done: progress.update(task, completed=done)
            )
    with atomic_write(picture) as target:
        evaluation_picture(target, result)
    text = json.dumps(result.as_dict(), indent=1, ensure_ascii=False)
    if to_stdout:
        click.echo(text)
    elif figures:
        with atomic_write(figures) as target:
            target.write(text.encode())
    _show(console, result)
    written = ", ".join(str(path) for path in (picture, None if to_stdout else figures) if path)
    console.print(f"{written}: written", highlight=False, soft_wrap=True)


def _chosen(data: Scans, split: str, volumes: list[int] | None) -> list[int]:
    if volumes is not None:
        return data.numbers(volumes)
    return list(range(len(data))) if split == "all" else [int(index) for index in data.of_split(split)]


def _show(console: Console, result: Evaluation) -> None:
    muons = f"{result.muons} muons" if result.muons else "all muons"
    table = Table(
        title=f"{result.volumes} volumes of {result.voxels} voxels, {muons}, {result.block_fraction:.1%} block voxels"
    )
    table.add_column("method")
    shown = [name for name in SHOWN if name in result.results[0].scores]
    for name in shown:
        table.add_column(SHOWN[name], justify="right")
    best = {
        name: max(r.scores.get(name, np.nan) for r in result.results) for name in shown if name.startswith(("auc", "acc"))
    }
    for method in result.results:
        cells = []
        for name in shown:
            value = method.scores.get(name, np.nan)
            cell = "–" if np.isnan(value) else f"{value:.3f}"
            cells.append(f"[bold]{cell}[/bold]" if value == best.get(name) else cell)
        table.add_row(method.name, *cells)
    console.print(table)
    for name, missing in result.left_out.items():
        console.print(f"{name} left out: the scan has no {missing}", highlight=False, soft_wrap=True)
    console.print(confusion_table(result.results[0], result.materials))


def confusion_table(result: Result, materials: tuple[str, ...]) -> Table:
    """Per true material: voxels, and what share of them is taken for which."""
    table = Table(title=f"{result.name}: what voxels of a material (row) are taken for")
    for name in ("true", *materials, "voxels"):
        table.add_column(name, justify="left" if name == "true" else "right")
    for row, (name, counts) in enumerate(zip(materials, result.confusion)):
        total = counts.sum()
        shares = [f"{count / total:.1%}" if total else "–" for count in counts]
        shares[row] = f"[bold]{shares[row]}[/bold]"
        table.add_row(name, *shares, f"{total:,}")
    return table
