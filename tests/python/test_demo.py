"""The demo, on a few volumes and steps: everything it promises to write is there and right."""

import json
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import torch
from click.testing import CliRunner

from muvox import checkpoint as checkpoints
from muvox import classical, plots
from muvox.cli import muvox as command
from muvox.data import Grid, Materials, Scans, write_scans
from muvox.data.features import MUON_COLUMNS
from muvox.demo import demo
from muvox.memory import peak_memory_bytes, reset_peak
from muvox.metrics import block_auc, rise, roc_auc
from muvox.predict import predict_volume

SAMPLE = Path(__file__).parents[1] / "data" / "x0net250-sample.h5"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Folder of a demo of three steps on six training and ten validation volumes, and its scan file."""
    folder = tmp_path_factory.mktemp("demo")
    with Scans(SAMPLE) as scans:
        some = [*scans.of_split("training")[:6], *scans.of_split("validation")[:10]]
        write_scans(folder / "scan.h5", scans.volumes(some), scans.grid, scans.materials)
    arguments = ["demo", "--scans", folder / "scan.h5", "--out", folder / "demo", "--steps", 3, "--threads", 1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("muvox.demo.OPERATOR_SIZE", (20, 40))
        result = CliRunner().invoke(command, [str(a) for a in arguments])
    assert result.exit_code == 0, result.output
    return folder / "demo", folder / "scan.h5"


def test_pictures_are_drawn(results):
    folder, _ = results
    for name, least in (("slices.png", (400, 3000)), ("loss.png", (500, 1000))):
        image = matplotlib.image.imread(folder / name)
        assert image.shape[0] >= least[0] and image.shape[1] >= least[1], name
        assert len(np.unique(image[::7, ::7].reshape(-1, image.shape[-1]), axis=0)) > 50, name


def test_metrics_are_those_of_the_model_and_the_maps(results):
    folder, scan = results
    metrics = json.loads((folder / "metrics.json").read_text())
    assert len(metrics["loss"]) == 3 and metrics["seconds"] > metrics["seconds_training"] > 0
    assert metrics["settings"]["steps"] == 3 and metrics["seed"] == metrics["settings"]["seed"]
    assert 1e8 < metrics["peak_memory_bytes"] < 1e11
    state = checkpoints.load(folder / "voxelnet.pt")
    with Scans(scan, MUON_COLUMNS) as scans, Scans(scan, classical.COLUMNS) as tracks:
        volumes = [int(v) for v in scans.of_split("validation")]
        block = np.stack([scans.material(v) != scans.background[v] for v in volumes]).reshape(10, -1)
        logp = np.stack([predict_volume(state, scans, v) for v in volumes])
        maps = zip(*(classical.poca_maps(tracks.muons(v), scans.grid) for v in volumes))
        raw, smooth = (roc_auc(rise(classical.log_score(np.stack(m).reshape(10, -1))), block) for m in maps)
    assert metrics["auc_voxelnet"] == pytest.approx(block_auc(logp, scans.materials.x0, block), abs=1e-6)
    assert (metrics["auc_poca_raw"], metrics["auc_poca_3x3x3"]) == pytest.approx((raw, smooth))
    assert metrics["auc_poca"] == max(metrics["auc_poca_raw"], metrics["auc_poca_3x3x3"])


def test_the_table_has_every_operator(results):
    table = (results[0] / "table.md").read_text()
    for name in ("training step", "prediction", "knn", "gravnet", "attention", "pool"):
        row = next(line for line in table.splitlines() if line.startswith(f"| {name}"))
        assert row.count("|") == table.splitlines()[0 if name in ("training step", "prediction") else 5].count("|")


def test_the_demo_needs_its_scans(tmp_path):
    result = CliRunner().invoke(
        command, ["demo", "--scans", str(tmp_path / "none.h5"), "--out", str(tmp_path / "demo")]
    )
    assert result.exit_code == 2 and result.stderr == f"muvox: {tmp_path / 'none.h5'}: no such file\n"
    assert not (tmp_path / "demo").exists()


def test_the_sample_is_where_the_demo_looks_for_it():
    default = next(option.default for option in demo.params if option.name == "scans")
    assert SAMPLE == Path(__file__).parents[2] / default


def test_slices_of_an_uneven_grid_have_one_scale(tmp_path):
    """A map that is the truth looks like the truth: its commonest colours are the same."""
    grid = Grid((4, 2, 3), (0, 0, 0), (0.1, 0.2, 0.1))
    truth = np.log(np.where(np.random.default_rng(0).random(grid.shape) < 0.3, 0.0056, 0.35))
    example = plots.Example("volume", (truth, truth), truth < -4)
    plots.slices(
        tmp_path / "slices.png", [example], ("one", "two"), grid, Materials(("light", "heavy"), (0.35, 0.0056))
    )
    image = matplotlib.image.imread(tmp_path / "slices.png")
    commonest = []
    for half in np.array_split(image, 2, axis=1):
        colours, counts = np.unique(half.reshape(-1, 4), axis=0, return_counts=True)
        commonest.append({tuple(c) for c in colours[counts.argsort()[-3:]]})  # white, light, heavy
    assert commonest[0] == commonest[1] and len(commonest[0]) == 3


def test_peak_memory_counts_what_was_used():
    can_reset, before = reset_peak(), peak_memory_bytes()
    torch.ones(25_000_000)
    grown = peak_memory_bytes() - before
    assert 90e6 < grown < 130e6 if can_reset else 0 <= grown < 130e6
