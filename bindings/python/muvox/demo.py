"""`muvox demo`: trains VoxelNet on the sample scans on the CPU, in minutes, and compares it with classical maps."""

import dataclasses
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import torch
from rich.console import Console

from . import __version__, classical, ops
from .checkpoint import Checkpoint, save
from .data import Scans
from .data.features import MUON_COLUMNS
from .display import progress_bar, told_warnings, training_progress
from .files import atomic_write
from .memory import peak_memory_bytes, reset_peak
from .metrics import evaluate, expected_log_x0, rise, roc_auc
from .predict import predict_volume
from .train import Settings, class_weights, train

# Boxes of 3 × 3 × 3 voxels cost a fifth of the whole volumes and give more different examples: in the same time they
# lead to a better network than larger boxes, more muons or larger batches.
RECIPE = Settings(steps=3500, batch=4, muons=64, nearest=0, crop=3, evaluations=5, validation=40)
OPERATOR_SIZE = 125, 1000  # sets × rows: a volume of the sample seen by four times its muons
BLOCKS_SHOWN = ("lead", "iron", "silicon", "graphite")


@dataclass
class Comparison:
    """Network and classical maps of the validation volumes: ln X0, (volumes, x, y, z), and their scores."""

    volumes: np.ndarray
    truth: np.ndarray
    block: np.ndarray
    voxelnet: np.ndarray
    poca: np.ndarray  # the better of the two maps
    poca_name: str
    scores: dict[str, float]


@click.command()
@click.option(
    "--scans",
    type=click.Path(path_type=Path),
    default="tests/data/x0net250-sample.h5",
    show_default=True,
    help="Scan file with truth.",
)
@click.option(
    "--out", type=click.Path(path_type=Path), default="demo", show_default=True, help="Folder for the results."
)
@click.option("--steps", type=click.IntRange(min=1), default=RECIPE.steps, show_default=True, help="Training steps.")
@click.option(
    "--seed", type=click.IntRange(0, 2**63 - 1), default=RECIPE.seed, show_default=True, help="Everything random."
)
@click.option("--threads", type=click.IntRange(1, 1024), default=2, show_default=True, help="CPU threads.")
def demo(scans: Path, out: Path, steps: int, seed: int, threads: int) -> None:
    """Train VoxelNet on the sample scans and compare it with PoCA maps.

    Writes slices.png, loss.png, metrics.json, table.md and the network, voxelnet.pt.
    """
    started, console = time.monotonic(), Console()
    torch.set_num_threads(threads)
    settings = dataclasses.replace(RECIPE, steps=steps, seed=seed)
    with Scans(scans, MUON_COLUMNS) as data, Scans(scans, classical.COLUMNS) as tracks:
        out.mkdir(parents=True, exist_ok=True)
        console.print(f"{scans}: {len(data)} volumes of {data.grid}", highlight=False, soft_wrap=True)
        with (
            training_progress(console, steps) as (report, validating),
            told_warnings(lambda text: console.print(f"{scans}: {text}")),
        ):
            state = train(data, settings, report=report, validating=validating)
        trained = time.monotonic()
        save(out / "voxelnet.pt", state)
        result = compare(state, data, tracks, console)
        predicted = time.monotonic()
        peak = peak_memory_bytes()
        rows = [
            (
                "training step",
                f"{settings.batch} volumes × {settings.crop}³ voxels × {settings.muons} muons",
                1e3 * statistics.median(state.history["seconds"]),
                peak,
            ),
            (
                "prediction, with PoCA maps",
                f"1 volume × {data.grid.voxels} voxels × all its muons",
                1e3 * (predicted - trained) / len(result.volumes),
                peak,
            ),
        ]
        draw_pictures(out, state, result, data)
    table = render_table(rows, time_operators(*OPERATOR_SIZE))
    with atomic_write(out / "table.md") as file:
        file.write(table.encode())
    metrics = dict(
        result.scores,
        seconds=time.monotonic() - started,
        seconds_training=trained - started,
        peak_memory_bytes=peak,
        volumes=len(result.volumes),
        voxels=data.grid.voxels,
        muons="all of each volume",
        threads=threads,
        seed=seed,
        settings=dataclasses.asdict(settings),
        muvox=__version__,
        torch=torch.__version__,
        loss=state.history["loss"],
        validation=state.history["validation"],
    )
    with atomic_write(out / "metrics.json") as file:
        file.write(json.dumps(metrics, indent=1).encode())
    console.print(table, highlight=False, markup=False, soft_wrap=True)
    console.print(
        f"block AUC: VoxelNet {metrics['auc_voxelnet']:.3f}, {result.poca_name} {metrics['auc_poca']:.3f}; "
        f"{metrics['seconds']:.0f} s, peak memory {peak / 2**20:.0f} MiB. Results are in {out}/",
        highlight=False,
        soft_wrap=True,
    )


def compare(state: Checkpoint, data: Scans, tracks: Scans, console: Console) -> Comparison:
    """Maps and scores on all validation volumes, every method from all muons of the volume."""
    volumes, shape = data.of_split("validation"), data.grid.shape
    logp, poca = [], []
    with progress_bar(console) as progress:
        for index in progress.track(volumes, description="validating"):
            logp.append(predict_volume(state, data, int(index)))
            poca.append(classical.poca_maps(tracks.muons(int(index)), data.grid))
    logp = np.stack(logp)
    material = np.stack([data.material(int(index)) for index in volumes])
    block = material != data.background[volumes].reshape(-1, 1, 1, 1)
    flat = block.reshape(len(volumes), -1)
    scores = evaluate(logp, material.reshape(flat.shape), flat, data.materials.x0, class_weights(flat.mean()))
    classic = {
        name: classical.log_score(np.stack(maps)) for name, maps in zip(("PoCA map", "PoCA map, 3×3×3"), zip(*poca))
    }
    aucs = {name: roc_auc(rise(score.reshape(flat.shape)), flat) for name, score in classic.items()}
    better = max(aucs, key=aucs.get)
    named = dict(
        auc_voxelnet=scores["auc"],
        auc_poca=aucs[better],
        auc_poca_raw=aucs["PoCA map"],
        auc_poca_3x3x3=aucs["PoCA map, 3×3×3"],
        loss_voxelnet=scores["loss"],
        accuracy_voxelnet=scores["accuracy"],
    )
    truth = np.log(np.asarray(data.materials.x0))[material]
    # 1/X0 is proportional to the score: one factor for all volumes, so that the medians agree.
    calibrated = np.median(truth + classic[better]) - classic[better]
    voxelnet = expected_log_x0(logp, data.materials.x0).reshape(len(volumes), *shape)
    return Comparison(volumes, truth, block, voxelnet, calibrated, better, named)


def draw_pictures(out: Path, state: Checkpoint, result: Comparison, data: Scans) -> None:
    from . import plots

    methods = (
        "Truth",
        f"{result.poca_name} (AUC {result.scores['auc_poca']:.3f})",
        f"VoxelNet (AUC {result.scores['auc_voxelnet']:.3f})",
    )
    examples = [
        plots.Example(title, (result.truth[i], result.poca[i], result.voxelnet[i]), result.block[i])
        for i, title in choose(result, data)
    ]
    with atomic_write(out / "slices.png") as file:
        plots.slices(file, examples, methods, data.grid, data.materials)
    with atomic_write(out / "loss.png") as file:
        plots.loss_curve(file, state.history["loss"], state.history["validation"], result.scores["auc_poca"])


def choose(result: Comparison, data: Scans) -> list[tuple[int, str]]:
    """For each block material the first validation volume with at least six voxels of it: no picking by result."""
    names, chosen = data.materials.names, []
    for material in (names.index(name) for name in BLOCKS_SHOWN if name in names):
        for i, index in enumerate(result.volumes):
            if ((data.material(int(index)) == material) & result.block[i]).sum() >= 6:
                where = f"{names[material]}\nin {names[data.background[index]]}\nvolume {data.volume_id[index]}"
                chosen.append((i, where))
                break
    return chosen or [(0, f"volume {data.volume_id[result.volumes[0]]}")]


def time_operators(sets: int, rows: int) -> list[tuple]:
    """Operator, size, forward ms, backward ms, peak memory above the inputs, bytes of one float pair tensor."""
    torch.manual_seed(0)
    coords, feats, values = (torch.randn(sets, rows, width, requires_grad=True) for width in (4, 22, 48))
    queries, keys = (torch.randn(sets, rows, 12, requires_grad=True) for _ in range(2))
    calls = {
        "knn, k = 25": lambda: ops.knn(coords, 25)[1],
        "gravnet, k = 25, mean and max": lambda: ops.gravnet(coords, feats, 25),
        "attention, widths 12 and 48": lambda: ops.attention(queries, keys, values),
        "pool, mean and max": lambda: ops.pool(values),
    }
    size = f"{sets} sets × {rows} rows"
    return [(name, size, *_measure(call), 4 * sets * rows * rows) for name, call in calls.items()]


def _measure(call, repeats: int = 3) -> tuple[float, float, int | None]:
    times: list[tuple[float, float]] = []
    ones = torch.ones_like(call())
    before = peak_memory_bytes() if reset_peak() else None
    for _ in range(repeats):
        start = time.perf_counter()
        out = call()
        middle = time.perf_counter()
        out.backward(ones)
        times.append((middle - start, time.perf_counter() - middle))
    forward, backward = (1e3 * statistics.median(column) for column in zip(*times))
    return forward, backward, None if before is None else peak_memory_bytes() - before


def render_table(rows: list[tuple], operators: list[tuple]) -> str:
    def mib(size: int | None) -> str:
        return "–" if size is None else f"{size / 2**20:.0f}"

    lines = ["| what | size | time, ms | peak memory of the process, MiB |", "| --- | --- | ---: | ---: |"]
    lines += [f"| {what} | {size} | {ms:.0f} | {mib(peak)} |" for what, size, ms, peak in rows]
    lines += [
        "",
        "| operator | size | forward, ms | backward, ms | memory, both, MiB | one pair tensor, MiB |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {name} | {size} | {forward:.1f} | {backward:.1f} | {mib(peak)} | {mib(pairs)} |"
        for name, size, forward, backward, peak, pairs in operators
    ]
    lines += [
        "",
        f"Threads: {torch.get_num_threads()}; float32. Memory of an operator: outputs, saved tensors, gradients and "
        "workspace. The pair tensor, (sets, rows, rows), is what plain PyTorch would hold several of; muvox has none.",
    ]
    return "\n".join(lines) + "\n"
