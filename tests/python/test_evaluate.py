"""`muvox evaluate` and the files of `muvox predict`: figures by hand, maps as published, files read back."""

import dataclasses
import json
import os
import resource
import warnings
import xml.etree.ElementTree as xml
from pathlib import Path

import h5py
import matplotlib.image
import numpy as np
import pytest
import torch
from click.testing import CliRunner

from muvox import checkpoint as checkpoints
from muvox.checkpoint import Checkpoint, build
from muvox.classical import ASR_COLUMNS, asr_maps, log_score
from muvox.cli import muvox as command
from muvox.data import COLUMNS, Grid, Materials, Scans, write_scans
from muvox.data.features import MUON_COLUMNS, cut_counts
from muvox.evaluation import evaluate_scans
from muvox.metrics import evaluate_log_x0, rise, roc_auc, roc_curve
from muvox.nn.norms import RunningBatchNorm2d
from muvox.predict import log_x0_moments, predict_volume
from muvox.train import Settings, TrainingData, log_x0_loss
from muvox.train.batches import Batch
from muvox.train.recalibrate import recalibrate

DATA = Path(__file__).parents[1] / "data"
TINY, SAMPLE = DATA / "tiny.h5", DATA / "x0net250-sample.h5"


def call(*arguments):
    return CliRunner().invoke(command, [str(a) for a in arguments])


@pytest.fixture(scope="module", params=["classes", "log_x0"])
def network(request, tmp_path_factory):
    """An untrained network for tiny.h5, and its file."""
    torch.manual_seed(1)
    with Scans(TINY) as scans:
        prior = [-1.5] * 5 if request.param == "classes" else [-2.0, 0.5]
        net = build(scans.grid, 5, "batch", request.param).eval()
        state = Checkpoint(net, scans.grid, scans.materials, prior, "batch", 0, target=request.param)
    path = tmp_path_factory.mktemp("network") / f"{request.param}.pt"
    checkpoints.save(path, state)
    return state, path


def test_asr_by_hand():
    """Two voxels side by side: one muon straight down through each, one across both."""
    grid = Grid((2, 1, 1), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    rows = [[0.1, 2.0, 0.5, 0.5, 0.5, 0.5], [0.3, 1.0, 1.5, 0.5, 1.5, 0.5], [0.5, 1.0, 0.25, 0.5, 1.75, 0.5]]
    quantile, mean = asr_maps(np.array(rows, np.float32), grid, quantile=1.0)
    np.testing.assert_allclose(quantile.ravel(), [0.5, 0.5], rtol=1e-6)
    np.testing.assert_allclose(mean.ravel(), [(0.2 + 0.5) / 2, (0.3 + 0.5) / 2], rtol=1e-6)
    np.testing.assert_allclose(asr_maps(np.array(rows, np.float32), grid, 0.5)[0].ravel(), [0.2, 0.3], rtol=1e-6)
    beside = np.array([[0.1, 2.0, 5.0, 5.0, 6.0, 5.0]])
    assert all((part == 0).all() for part in asr_maps(beside, grid) + asr_maps(np.empty((0, 6)), grid))
    filled = asr_maps(np.array(rows[:1]), grid)[1]
    np.testing.assert_allclose(filled.ravel(), [0.2, 0.2], rtol=1e-6)  # nothing crosses the second


def test_asr_of_the_sample_scores_as_published():
    """Block AUC 0.8717 (quantile) and 0.8794 (mean), by another implementation that samples 120 points of each line."""
    with Scans(SAMPLE, ASR_COLUMNS) as scans:
        volumes = [int(v) for v in scans.of_split("validation")]
        block = np.stack([scans.material(v) != scans.background[v] for v in volumes]).reshape(200, -1)
        maps = zip(*(asr_maps(scans.muons(v), scans.grid) for v in volumes))
        quantile, mean = (roc_auc(rise(log_score(np.stack(m).reshape(200, -1))), block) for m in maps)
    assert quantile == pytest.approx(0.8717, abs=3e-3) and mean == pytest.approx(0.8794, abs=3e-3)


def test_curves_and_log_x0_scores_by_hand():
    false, true = roc_curve(np.array([3.0, 2.0, 1.0, 0.0]), np.array([True, False, True, False]))
    assert false.tolist() == [0, 0, 0.5, 0.5, 1] and true.tolist() == [0, 0.5, 0.5, 1, 1]
    x0 = (1.0, np.exp(-2.0))
    said = np.array([[[-0.5, -1.5], [0.0, np.log(4.0)]]])  # means; variances 1 and 4
    truth, block = np.array([[0.0, -2.0]]), np.array([[False, True]])
    found = evaluate_log_x0(said, truth, block, x0, (2.0, 3.0))
    assert found["loss"] == pytest.approx((2 * 0.125 + 3 * (0.5 * np.log(4) + 0.25 / 8)) / 2)
    assert (found["accuracy"], found["auc"]) == (1.0, 1.0) and found["rmse"] == pytest.approx(0.5)
    loss = log_x0_loss(torch.from_numpy(said), torch.from_numpy(truth), torch.from_numpy(block), (2.0, 3.0))
    assert loss.item() == pytest.approx(found["loss"])


def test_a_network_is_scored_as_by_hand(network):
    state, _ = network
    with Scans(TINY) as scans, Scans(TINY, MUON_COLUMNS) as data:
        volumes = [4, 6, 9]
        found = evaluate_scans(state, scans, volumes)
        said = np.stack([predict_volume(state, data, v) for v in volumes])
        material = np.stack([scans.material(v).reshape(-1) for v in volumes])
        block = material != scans.background[volumes][:, None]
        mean = np.stack([log_x0_moments(state, s)[0] for s in said])
    result = found.results[0]
    assert result.name == "VoxelNet" and len(found.results) == 5 and not found.left_out
    assert result.scores["auc_block"] == pytest.approx(roc_auc(rise(-mean), block))
    distance = np.abs(mean[..., None] - np.log(state.materials.x0))
    taken = said.argmax(1) if state.target == "classes" else distance.argmin(-1)
    assert result.scores["accuracy"] == pytest.approx((taken == material).mean())
    assert result.confusion[1, 0] == ((material == 1) & (taken == 0)).sum() and result.confusion.sum() == material.size
    assert ("rmse" in result.scores) == (state.target == "log_x0")
    for other in found.results:
        assert 0 <= other.scores["auc_block"] <= 1 and other.confusion.sum() == material.size
        assert np.trapezoid(other.curve[1], other.curve[0]) == pytest.approx(other.scores["auc_block"], abs=0.01)


def test_the_command_shows_draws_and_writes(tmp_path, network):
    state, path = network
    arguments = ["evaluate", path, TINY, "--picture", tmp_path / "e.png", "--threads", 1]
    result = call(*arguments, "--json", tmp_path / "e.json", "--muons", 20)
    assert result.exit_code == 0, result.output
    for words in ("VoxelNet", "PoCA", "ASR", "AUC", "beryllium", "4 volumes of 216 voxels, 20 muons"):
        assert words in result.stdout
    figures = json.loads((tmp_path / "e.json").read_text())
    assert figures["muons"] == 20 and set(figures["methods"]) >= {"VoxelNet", "PoCA", "ASR, mean"}
    image = matplotlib.image.imread(tmp_path / "e.png")
    assert image.shape[0] > 700 and len(np.unique(image[::7, ::7].reshape(-1, image.shape[-1]), axis=0)) > 50
    result = call(*arguments, "--json", "-", "--volumes", "4")
    assert json.loads(result.stdout)["volumes"] == 1
    for extra, words in {
        ("--volumes", "12"): "no volume 12, there are 12",
        ("--picture", TINY): "is read from",
        ("--picture", tmp_path / "no" / "e.png"): "No such file",
    }.items():
        result = call(*arguments, *extra)
        assert result.exit_code == 2 and words in result.stderr.splitlines()[-1] and "Traceback" not in result.output


def test_maps_whose_columns_are_missing_are_left_out(tmp_path, network):
    state, path = network
    with Scans(TINY) as scans:
        kept = [name for name in scans.columns if name != "p"]
        volumes = list(scans.volumes([0, 4, 9]))
        for volume in volumes:
            volume.muons = volume.muons[:, [scans.columns.index(name) for name in kept]]
        write_scans(tmp_path / "s.h5", volumes, scans.grid, scans.materials, {name: COLUMNS[name] for name in kept})
    result = call("evaluate", path, tmp_path / "s.h5", "--split", "all", "--picture", tmp_path / "e.png")
    assert result.exit_code == 0 and "PoCA left out: the scan has no p" in result.stdout, result.output


def read_vti(path):
    """Cell data of a VTK image file with appended raw data: name -> (x, y, z), and the header."""
    head, _, data = path.read_bytes().partition(b'<AppendedData encoding="raw">')
    data = data[data.index(b"_") + 1 :]
    image = xml.fromstring(head + b"</VTKFile>").find("ImageData")
    extent = list(map(int, image.find("Piece").get("Extent").split()))
    shape = tuple(extent[2 * axis + 1] - extent[2 * axis] for axis in range(3))
    arrays = {}
    for array in image.find("Piece").find("CellData"):
        start, kind = int(array.get("offset")), dict(Float32="<f4", UInt8="u1")[array.get("type")]
        size = int(np.frombuffer(data, "<u8", 1, start)[0])
        values = np.frombuffer(data, kind, size // np.dtype(kind).itemsize, start + 8)
        arrays[array.get("Name")] = values.reshape(shape, order="F")  # x runs fastest
    return arrays, [tuple(map(float, image.get(name).split())) for name in ("Origin", "Spacing")]


def test_predictions_for_paraview_and_hdf5_agree(tmp_path, network):
    state, path = network
    result = call("predict", path, TINY, "--out", tmp_path / "p.h5", "--vti", tmp_path / "vti", "--volumes", "1,4")
    assert result.exit_code == 0 and "2 volumes" in result.stdout, result.output
    assert sorted(os.listdir(tmp_path / "vti")) == ["volume-01.vti", "volume-04.vti"]
    with h5py.File(tmp_path / "p.h5") as file, Scans(TINY) as scans, Scans(TINY, MUON_COLUMNS) as data:
        assert list(file["volume_id"]) == [1, 4]
        assert ("log_probability" in file) == (state.target == "classes")
        for place, index in enumerate((1, 4)):
            cells, (origin, spacing) = read_vti(tmp_path / "vti" / f"volume-0{index}.vti")
            assert origin == pytest.approx(scans.grid.origin) and spacing == pytest.approx(scans.grid.voxel_size)
            np.testing.assert_array_equal(cells["true_material"], scans.material(index))
            np.testing.assert_allclose(cells["true_x0"], scans.volume(index).x0, rtol=1e-5)
            np.testing.assert_array_equal(cells["log_x0"], file["expected_log_x0"][place])
            np.testing.assert_array_equal(cells["sigma_log_x0"], file["sigma_log_x0"][place])
            np.testing.assert_allclose(np.log(cells["x0"]), cells["log_x0"], rtol=1e-5, atol=1e-5)
            said = predict_volume(state, data, index)
            if state.target == "log_x0":
                np.testing.assert_allclose(cells["sigma_log_x0"].ravel(), np.exp(said[1] / 2), rtol=1e-5)
            else:
                np.testing.assert_array_equal(cells["material"].ravel(), said.argmax(0))


def test_predictions_that_cannot_be_written_are_refused(tmp_path, network):
    _, path = network
    assert "--out" in call("predict", path, TINY).stderr
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        result = call("predict", path, TINY, "--vti", tmp_path / "vti")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert result.exit_code == 2 and result.stderr == f"muvox: {tmp_path / 'vti' / 'volume-00.vti'}: File too large\n"
    assert os.listdir(tmp_path / "vti") == []


def test_two_predictions_to_one_file_leave_one_whole(tmp_path, network):
    """Both write beside the file; the last to end is there."""
    from muvox.files import atomic_write

    target = tmp_path / "p.h5"
    with atomic_write(target) as file:
        file.write(b"the other writer's")
        assert call("predict", network[1], TINY, "--out", target, "--volumes", "1").exit_code == 0
        with h5py.File(target) as written:
            assert len(written["volume_id"]) == 1
    assert target.read_bytes() == b"the other writer's" and os.listdir(tmp_path) == ["p.h5"]


def test_recalibrated_norms_have_the_moments_of_the_batches():
    settings = Settings(norm="lumin", recalibration=4, batch=3, muons=16, crop=2)
    with Scans(TINY, MUON_COLUMNS) as scans, pytest.warns(UserWarning, match="left out"):
        data = TrainingData(scans, settings)
        net = build(scans.grid.part((0, 0, 0), data.shape), 5, "lumin")
        momentum = net.mu_norm.mom
        recalibrate(net, lambda: data.recalibration_batches(10), nearest=5)
        x = torch.cat([batch.input(5)[0] for batch in data.recalibration_batches(10)]).double().flatten(0, 2)
    norm = net.mu_norm
    assert isinstance(norm, RunningBatchNorm2d) and norm.mom == momentum and not net.training
    mean = norm.sums.flatten().double() / norm.count
    torch.testing.assert_close(mean, x.mean(0), rtol=1e-4, atol=1e-5)
    variance = norm.sqrs.flatten().double() / norm.count - mean**2
    torch.testing.assert_close(variance, x.var(0, correction=0), rtol=1e-3, atol=1e-4)
    assert net.vox_norm.count > 0 and norm.batch > norm.n_warmup


def test_all_muons_train_as_drawn_ones_do():
    """Volumes of different numbers of muons, side by side in a ragged batch, are what each is alone."""
    with Scans(TINY, MUON_COLUMNS) as scans, pytest.warns(UserWarning, match="left out"):
        batch = TrainingData(scans, Settings(batch=7, muons=0, crop=2)).batch(0)
        net = build(scans.grid.part((0, 0, 0), (2, 2, 2)), 5, "batch").eval()
    assert sorted(batch.counts.tolist()) == [2, 6, 23, 56, 99, 133, 257]
    for nearest in (0, 10):
        x, splits = batch.input(nearest)
        sizes = batch.counts.clamp(max=nearest or 1000)
        assert splits.diff().tolist() == sizes.repeat_interleave(8).tolist() and len(x) == 8 * sizes.sum()
        together = net(x, splits)
        for volume, muons in enumerate(batch.muons.split(batch.counts.tolist())):
            one = Batch(muons, batch.counts[volume : volume + 1], *(part[volume : volume + 1] for part in batch[2:]))
            alone, none = one.input(nearest)
            assert none is None
            torch.testing.assert_close(net(alone)[0], together[volume], rtol=1e-4, atol=1e-5)


def test_muons_with_cut_values_are_counted_and_told(tmp_path):
    muons = np.zeros((4, len(MUON_COLUMNS)), np.float32)
    muons[:, MUON_COLUMNS.index("pred_x0")] = (0.1, 1354, 1e-6, 100)
    muons[3, MUON_COLUMNS.index("poca_z")] = -50
    assert cut_counts(muons) == dict(dtheta=0, dxy=0, pred_x0=2, poca=1)
    with Scans(TINY) as scans:
        volumes = [dataclasses.replace(v, muons=v.muons * np.float32(100)) for v in scans.volumes([0, 4])]
        write_scans(tmp_path / "cm.h5", volumes, scans.grid, Materials(scans.materials.names, scans.materials.x0))
    with Scans(tmp_path / "cm.h5", MUON_COLUMNS) as scans, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        TrainingData(scans, Settings(muons=4))
    assert any("of the muons have a poca beyond what the network is shown" in str(w.message) for w in told)
