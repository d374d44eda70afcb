"""Training and prediction: the recipe's parts by hand, empty and nearly empty volumes, repeatability, checkpoints."""

import dataclasses
import io
import warnings
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from muvox import checkpoint as checkpoints
from muvox.checkpoint import CheckpointError
from muvox.cli import muvox as command
from muvox.data import COLUMNS, Grid, ScanError, Scans, Volume, write_scans
from muvox.data.features import MUON_COLUMNS, muon_features, voxel_features
from muvox.display import training_progress
from muvox.predict import MismatchError, predict, predict_volume
from muvox.train import Settings, TrainingData, TrainingError, class_weights, one_cycle, train, turn, voxel_loss
from muvox.train.loop import settings_of

DATA = Path(__file__).parents[1] / "data"
TINY, SAMPLE = DATA / "tiny.h5", DATA / "x0net250-sample.h5"
QUICK = Settings(steps=3, batch=3, muons=8, crop=3, seed=5, evaluations=1)


def run(settings=QUICK, out=None, **changes):
    """Trains on tiny.h5, where two volumes are empty and others have 2 or 6 muons."""
    with Scans(TINY, MUON_COLUMNS) as scans, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return train(scans, dataclasses.replace(settings, **changes), out)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A short run on one thread, its folder."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("run")
    return run(out=folder), folder


def test_loss_by_hand():
    logp = torch.log(torch.tensor([[[0.5, 0.2], [0.5, 0.8]]]))  # (1, 2 classes, 2 voxels)
    loss = voxel_loss(logp, torch.tensor([[0, 1]]), torch.tensor([[False, True]]), (0.6, 4.0))
    assert loss.item() == pytest.approx(-(0.6 * np.log(0.5) + 4 * np.log(0.8)) / 2)
    background, block = class_weights(0.07)
    assert 0.93 * background == pytest.approx(0.5) and 0.07 * block == pytest.approx(0.5)
    assert class_weights(0.0) == class_weights(1.0) == (1.0, 1.0)


def test_learning_rate_follows_one_cycle():
    rates = [one_cycle(step, 100, 0.01) for step in range(100)]
    assert rates[0] == pytest.approx(1e-4) and max(rates) == rates[25] == pytest.approx(0.01)
    assert rates[62] == pytest.approx((0.01 + 1e-4) / 2, rel=0.03) and rates[99] < 2e-4
    assert rates[:26] == sorted(rates[:26]) and rates[25:] == sorted(rates[25:], reverse=True)


@pytest.mark.parametrize("flips", [(x, y, s) for x in (0, 1) for y in (0, 1) for s in (0, 1)])
def test_mirrored_muons_see_the_mirrored_volume(flips):
    """What a voxel sees of a muon is, after mirroring both, what its image sees; x and y components change places."""
    grid = Grid((4, 4, 3), (-0.3, 0.1, 0.4), (0.1, 0.1, 0.2))
    rng = np.random.default_rng(1)
    muons = rng.normal(scale=0.05, size=(7, len(MUON_COLUMNS))).astype(np.float32)
    muons[:, MUON_COLUMNS.index("pred_x0")] = rng.random(7)
    muons[:, 7:] = rng.uniform((-0.3, 0.1, 0.4), (0.1, 0.5, 1.0), (7, 3))
    numbers = np.arange(48).reshape(grid.shape)
    moved, numbers_moved = turn(muons, numbers, grid, *map(bool, flips))
    centres = torch.from_numpy(grid.centres())
    before, after = (voxel_features(torch.from_numpy(muon_features(m)), centres).numpy() for m in (muons, moved))
    after = after[np.argsort(numbers_moved.ravel())]  # row n: the voxel that voxel n has become
    flip_x, flip_y, swap = flips
    signs = np.array([1, 1, 1 - 2 * flip_x, 1 - 2 * flip_y, 1, 1 - 2 * flip_x, 1 - 2 * flip_y, 1, 1])
    order = [1, 0, 3, 2, 4, 6, 5, 7, 8] if swap else list(range(9))
    np.testing.assert_allclose(after, (before * signs)[..., order], atol=2e-5)


def test_few_and_no_muons_are_trained_on(trained):
    state, _ = trained
    assert len(state.history["loss"]) == 3 and np.isfinite(state.history["loss"]).all()
    assert np.isfinite(state.history["validation"][-1]["loss"])
    with Scans(TINY, MUON_COLUMNS) as scans:
        with pytest.warns(UserWarning, match="1 of 8 training volumes have no muons and are left out"):
            train(scans, dataclasses.replace(QUICK, steps=1))
        for index in range(len(scans)):
            for muons in (0, 8):
                logp = predict_volume(state, scans, index, muons)
                assert logp.shape == (5, 216) and np.isfinite(logp).all(), (index, muons)
                np.testing.assert_allclose(np.exp(logp).sum(0), 1, rtol=1e-5)
        empty = predict_volume(state, scans, 1)
    np.testing.assert_allclose(empty, np.repeat(np.float32(state.prior)[:, None], 216, 1))


def test_the_prior_is_the_weighted_share_of_each_material(trained):
    state, _ = trained
    with Scans(TINY) as scans:
        share = np.zeros((2, 5))
        for index in (0, 2, 3, 4, 5, 6, 7):  # the training volumes with muons
            block = scans.material(index) != scans.background[index]
            for kind in (0, 1):
                share[kind] += np.bincount(scans.material(index)[block == kind], minlength=5)
    expected = (share / share.sum(1, keepdims=True)).mean(0)
    np.testing.assert_allclose(np.exp(state.prior), expected, atol=1e-5)


def test_the_same_seed_gives_the_same_losses_bit_for_bit(trained):
    state, _ = trained
    again, other = run(), run(seed=6)
    assert again.history["loss"] == state.history["loss"]
    for key, value in state.net.state_dict().items():
        assert torch.equal(value, again.net.state_dict()[key]), key
    assert other.history["loss"] != state.history["loss"]


def test_training_learns():
    """Some steps on two volumes bring the loss down."""
    with Scans(SAMPLE, MUON_COLUMNS) as scans:
        scans.split = np.ones_like(scans.split)
        scans.split[:2] = 0
        settings = Settings(steps=30, batch=2, muons=32, crop=4, mirror=False, lr=1e-2, evaluations=1, validation=1)
        loss = train(scans, settings).history["loss"]
    assert np.mean(loss[-10:]) < 0.6 * np.mean(loss[:5])


@pytest.mark.slow
def test_the_defaults_learn_from_simulated_scans(tmp_path):
    """As many muons a voxel as by default, fewer volumes and steps: the material is far from guessed (0.53)."""
    path = tmp_path / "scans.h5"
    arguments = ["simulate", "--out", str(path), "--volumes", "80", "--shape", "6x6x6", "--muons", "360"]
    assert CliRunner().invoke(command, arguments).exit_code == 0
    torch.set_num_threads(1)
    with Scans(path, MUON_COLUMNS) as scans:
        metrics = train(scans, Settings(steps=500, evaluations=1)).history["validation"][-1]
    assert metrics["accuracy"] > 0.7 and metrics["auc"] > 0.7


@pytest.mark.parametrize("norm", ["batch", "lumin"])
def test_checkpoints_give_the_same_predictions(tmp_path, norm):
    state = run(norm=norm, out=tmp_path)
    loaded = checkpoints.load(tmp_path / "last.pt")
    assert (loaded.grid, loaded.materials, loaded.norm, loaded.step) == (state.grid, state.materials, norm, 3)
    assert loaded.history["loss"] == state.history["loss"]
    assert not loaded.net.training
    with Scans(TINY, MUON_COLUMNS) as scans:
        assert np.array_equal(predict_volume(loaded, scans, 4), predict_volume(state, scans, 4))


def test_training_and_prediction_see_the_same_muons(tmp_path):
    """Those nearest to each voxel; a checkpoint knows how many, one from before there was a choice shows all."""
    state = run(muons=0, nearest=20, crop=0, mirror=False, batch=1, out=tmp_path)
    loaded = checkpoints.load(tmp_path / "last.pt")
    assert loaded.nearest == 20
    with Scans(TINY, MUON_COLUMNS) as scans, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = TrainingData(scans, Settings(batch=1, crop=0, mirror=False, nearest=20))
        batch = data.batch(0)
        index = next(v for v in data.training if np.array_equal(scans.material(v).ravel(), batch.material[0]))
        with torch.no_grad():
            said = loaded.net(*batch.input(20))[0].numpy()
        np.testing.assert_array_equal(predict_volume(loaded, scans, index), said)
        assert scans.count(index) > 20
        everything = dataclasses.replace(state, nearest=0)
        assert np.abs(predict_volume(everything, scans, index) - said).max() > 1e-3
    saved = torch.load(tmp_path / "last.pt", weights_only=True)
    del saved["nearest"], saved["box"], saved["history"]["settings"]["nearest"]
    torch.save(saved, tmp_path / "last.pt")
    earlier = checkpoints.load(tmp_path / "last.pt")
    assert (earlier.nearest, earlier.box) == (0, ()) and settings_of(earlier).nearest == 0


@pytest.mark.parametrize("target", ["classes", "log_x0"])
def test_a_volume_is_predicted_in_boxes(target, monkeypatch):
    """By hand: the network on each box alone, what it says of a voxel averaged over the boxes that hold it."""
    state = run(muons=0, nearest=8, crop=3, target=target)
    assert state.box == (5, 5, 5) and state.grid.shape == (6, 6, 6)
    state.box = (4, 4, 4)
    part = checkpoints.on_grid(state.net, state.grid.part((1, 0, 2), state.box), 5, "batch", target).eval()
    with Scans(TINY, MUON_COLUMNS) as scans, torch.no_grad():
        muons, numbers = torch.from_numpy(muon_features(scans.muons(4))), np.arange(216).reshape(6, 6, 6)
        total, count = np.zeros((len(state.prior), 216)), np.zeros(216)
        for x, y, z in np.ndindex(2, 2, 2):
            box = numbers[2 * x : 2 * x + 4, 2 * y : 2 * y + 4, 2 * z : 2 * z + 4].ravel()
            seen = voxel_features(muons, torch.from_numpy(state.grid.centres()[box]), 8)
            total[:, box] += state.decode(part(seen[None]))[0].numpy()
            count[box] += 1
        expected = total / count
        if target == "classes":
            expected -= np.log(np.exp(expected).sum(0))
        np.testing.assert_allclose(predict_volume(state, scans, 4), expected, rtol=1e-4, atol=1e-5)
        for crop, box in {0: (6, 6, 6), 2: (3, 3, 3), 3: (5, 5, 5), 5: (6, 6, 6)}.items():
            with pytest.warns(UserWarning, match="left out"):
                assert TrainingData(scans, Settings(crop=crop)).box == box
        monkeypatch.setattr("muvox.predict.PAIRS", 3 * 64**2)  # three boxes at once: 3, 3 and 2
        np.testing.assert_allclose(predict_volume(state, scans, 4), expected, rtol=1e-4, atol=1e-5)


def test_validation_is_reported_volume_by_volume():
    told = []
    with Scans(TINY, MUON_COLUMNS) as scans, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = dataclasses.replace(QUICK, steps=4, evaluations=2, validation=3)
        train(scans, settings, validating=lambda *done: told.append(done))
    assert told == 2 * [(1, 3), (2, 3), (3, 3)]
    shown = io.StringIO()
    with training_progress(Console(file=shown, force_terminal=True, width=120), 4) as (report, validating):
        report(1, 1.5, {})
        validating(1, 3)
    assert "training" in shown.getvalue() and "validating 1/3" in shown.getvalue()


def test_best_is_the_checkpoint_with_the_lowest_validation_loss(tmp_path):
    state = run(steps=4, evaluations=4, lr=0.05, out=tmp_path)
    losses = [entry["loss"] for entry in state.history["validation"]]
    assert [entry["step"] for entry in state.history["validation"]] == [1, 2, 3, 4]
    best, last = checkpoints.load(tmp_path / "best.pt"), checkpoints.load(tmp_path / "last.pt")
    assert best.step == 1 + int(np.argmin(losses)) and last.step == 4


def test_training_without_validation_volumes(tmp_path):
    with Scans(TINY, MUON_COLUMNS) as scans, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scans.split = np.zeros_like(scans.split)
        state = train(scans, QUICK, tmp_path)
    assert state.history["validation"] == [{"step": 3}]
    assert checkpoints.load(tmp_path / "best.pt").step == checkpoints.load(tmp_path / "last.pt").step == 3


def test_what_cannot_be_trained_on_is_refused(tmp_path):
    with Scans(TINY) as scans:
        known = list(scans.volumes())
        bare = [Volume(v.muons, v.volume_id, v.split) for v in known]
        write_scans(tmp_path / "bare.h5", bare, scans.grid)
        empty = [dataclasses.replace(v, muons=v.muons[:0]) for v in known]
        write_scans(tmp_path / "empty.h5", empty, scans.grid, scans.materials)
    for name, words in {"bare.h5": "no truth", "empty.h5": "no training volume with muons"}.items():
        with Scans(tmp_path / name, MUON_COLUMNS) as scans, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(ScanError, match=words):
                train(scans, QUICK)
    with pytest.raises(TrainingError, match="the loss is .* at step"):
        run(steps=20, lr=1e30)


def test_damaged_checkpoints_are_refused(tmp_path, trained):
    _, folder = trained
    content = (folder / "last.pt").read_bytes()
    (tmp_path / "short.pt").write_bytes(content[: len(content) // 2])
    (tmp_path / "text.pt").write_text("weights")
    torch.save({"weights": torch.ones(3)}, tmp_path / "foreign.pt")
    saved = torch.load(folder / "last.pt", weights_only=True)
    torch.save({k: v for k, v in saved.items() if k != "grid"}, tmp_path / "incomplete.pt")
    torch.save(dict(saved, version=9), tmp_path / "later.pt")
    saved["net"].popitem()
    torch.save(saved, tmp_path / "weights.pt")
    for name, words in {
        "short.pt": "not a checkpoint, or a damaged one",
        "text.pt": "not a checkpoint",
        "none.pt": "no such file",
        "foreign.pt": "not a muvox checkpoint",
        "incomplete.pt": "incomplete checkpoint",
        "later.pt": "version 9",
        "weights.pt": "incomplete checkpoint",
    }.items():
        with pytest.raises(CheckpointError, match=words) as error:
            checkpoints.load(tmp_path / name)
        assert "\n" not in str(error.value)


def test_predictions_are_written(tmp_path, trained):
    state, _ = trained
    with Scans(TINY, MUON_COLUMNS) as scans:
        predict(state, scans, tmp_path / "out.h5", muons=8, seed=3)
        expected = predict_volume(state, scans, 4, 8, 3)
        alone = tmp_path / "alone.h5"
        write_scans(alone, [Scans(TINY).volume(4)], scans.grid, scans.materials)
    with h5py.File(tmp_path / "out.h5") as file:
        assert list(file["volume_id"]) == list(range(12))
        assert file["log_probability"].shape == (12, 5, 6, 6, 6)
        np.testing.assert_array_equal(file["log_probability"][4].reshape(5, -1), expected)
        mean = np.tensordot(np.log(file.attrs["x0"]), np.exp(file["log_probability"][4].astype(float)), 1)
        np.testing.assert_allclose(file["expected_log_x0"][4], mean, rtol=1e-5)
        assert np.isfinite(file["log_probability"][:]).all()
        assert file.attrs["format"] == "muvox-prediction" and list(file.attrs["materials"]) == list(
            state.materials.names
        )
    with Scans(alone, MUON_COLUMNS) as scans:  # what else is in the file does not matter, volume_id seeds the draw
        np.testing.assert_array_equal(predict_volume(state, scans, 0, 8, 3), expected)


def test_network_and_scan_must_agree(tmp_path, trained):
    state, _ = trained
    with (
        Scans(SAMPLE, MUON_COLUMNS) as scans,
        pytest.raises(MismatchError, match="the scan has 5 × 5 × 5 .* trained on 6 × 6 × 6"),
    ):
        predict(state, scans, tmp_path / "out.h5")
    with Scans(TINY) as scans:
        other = dataclasses.replace(scans.materials, names=("a", "b", "c", "d", "e"))
        write_scans(tmp_path / "scan.h5", scans.volumes([0]), scans.grid, other)
    with (
        Scans(tmp_path / "scan.h5", MUON_COLUMNS) as scans,
        pytest.raises(MismatchError, match="materials a, b, c, d, e"),
    ):
        predict(state, scans, tmp_path / "out.h5")
    assert not (tmp_path / "out.h5").exists()
    assert len(MUON_COLUMNS) < len(COLUMNS)
