"""Runs that are killed and resumed end like runs that were not, bit for bit; what a killed or failing run leaves."""

import dataclasses
import errno
import json
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from muvox import checkpoint as checkpoints
from muvox.cli import muvox as command
from muvox.data import Scans, write_scans
from muvox.data.features import MUON_COLUMNS
from muvox.train import Run, Settings, TrainingError, train
from muvox.train.run import RunError

TINY = Path(__file__).parents[1] / "data" / "tiny.h5"
QUICK = Settings(steps=12, batch=2, muons=16, crop=3, evaluations=3, validation=2, clip=50.0, weight_decay=0.01)
SETTINGS = {
    "classes, drawn muons": QUICK,
    "LUMIN's norm, recalibrated": dataclasses.replace(QUICK, norm="lumin", recalibration=3, lr=0.01),
    "ln X0, all muons": dataclasses.replace(QUICK, steps=6, target="log_x0", muons=0, crop=2),
    "all muons, the nearest of each voxel": dataclasses.replace(QUICK, muons=0, nearest=10),
    "stopped early": dataclasses.replace(QUICK, steps=14, evaluations=14, patience=2, lr=0.1),
}
LONGER = dataclasses.replace(QUICK, steps=50, evaluations=5)
SMALL: Path


@pytest.fixture(scope="module", autouse=True)
def small(tmp_path_factory):
    """The 4 × 4 × 3 voxels in a corner of tiny.h5, with the first 60 muons: quick to train on and to predict."""
    global SMALL
    SMALL = tmp_path_factory.mktemp("scan") / "small.h5"
    write_small(SMALL)


def write_small(path):
    with Scans(TINY) as scans:
        volumes = list(scans.volumes())
        for volume in volumes:
            volume.muons = volume.muons[:60]
            volume.material, volume.x0 = volume.material[:4, :4, :3], volume.x0[:4, :4, :3]
        write_scans(path, volumes, scans.grid.part((0, 0, 0), (4, 4, 3)), scans.materials)


def run(settings, folder, scan=None, **options):
    torch.set_num_threads(1)
    with Scans(scan or SMALL, MUON_COLUMNS) as scans, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return train(scans, settings, folder, **options)


def run_until(step, settings, folder, **options):
    """A run that is given up after a step, as an interrupt from the keyboard would do."""

    def report(done, loss, metrics):
        if done == step:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(settings, folder, report=report, **options)


def assert_equal(one, other, where=""):
    """Equal to the last bit, tensors and numbers, in dictionaries and lists."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_equal(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for number, (a, b) in enumerate(zip(one, other)):
            assert_equal(a, b, f"{where}/{number}")
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other), where
    else:
        assert one == other, where


def content(path):
    """All of a checkpoint but the times that the steps took."""
    saved = torch.load(path, weights_only=True)
    assert len(saved["history"].pop("seconds")) == saved["step"]
    return saved


def assert_same_run(folder, other):
    for name in ("last.pt", "best.pt"):
        assert_equal(content(folder / name), content(other / name), name)
    assert (folder / "log.csv").read_bytes() == (other / "log.csv").read_bytes()


@pytest.mark.parametrize("name", SETTINGS)
def test_a_resumed_run_ends_like_an_uninterrupted_one(tmp_path, name):
    settings = SETTINGS[name]
    whole = run(settings, tmp_path / "whole")
    for stop, save_every in ((1, 0), (whole.step - 2, 3)):
        folder = tmp_path / f"{stop}-{save_every}"
        run_until(stop, settings, folder, save_every=save_every)
        resumed = run(settings, folder, resume=True)
        assert resumed.step == whole.step
        assert_same_run(folder, tmp_path / "whole")
    if settings.patience:
        assert settings.patience < whole.step < settings.steps


def test_a_finished_run_stays_as_it_is(tmp_path):
    run(QUICK, tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert run(QUICK, tmp_path, resume=True).step == QUICK.steps
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_loading_processes_change_nothing(tmp_path):
    run(QUICK, tmp_path / "whole")
    run_until(7, QUICK, tmp_path / "run", save_every=2, workers=2)
    run(QUICK, tmp_path / "run", resume=True, workers=1)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_a_folder_of_scans_trains_as_the_file_does(tmp_path):
    (tmp_path / "shards").mkdir()
    with Scans(SMALL) as scans:
        for name, part in (("a.h5", range(5)), ("b.h5", range(5, 12))):
            write_scans(tmp_path / "shards" / name, scans.volumes(part), scans.grid, scans.materials)
    run(dataclasses.replace(QUICK, steps=3), tmp_path / "whole")
    given = options(dataclasses.replace(QUICK, steps=3))
    result = call("train", tmp_path / "shards", "--out", tmp_path / "run", "--workers", 2, "--no-tensorboard", *given)
    assert result.exit_code == 0, result.output
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_tensorboard_shows_every_step_once(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_until(7, QUICK, tmp_path, save_every=5, tensorboard=True)
    state = run(QUICK, tmp_path, resume=True, tensorboard=True)
    events = EventAccumulator(str(tmp_path / "tensorboard"), {"scalars": 0}).Reload()
    losses = events.Scalars("training/loss")
    assert [event.step for event in losses] == list(range(1, QUICK.steps + 1))
    np.testing.assert_allclose([event.value for event in losses], state.history["loss"], rtol=1e-6)
    assert [event.step for event in events.Scalars("validation/auc")] == [4, 8, 12]
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2


def child(settings, folder, scan, workers):
    run(settings, folder, scan, resume=True, save_every=1, workers=workers)


def kill_and_compare(folder, kills, workers):
    """Kills runs at random moments until that many were killed and one has reached its end."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["muvox.nn", "muvox.train", __name__])

    def start(target):
        process = context.Process(target=child, args=(LONGER, target, SMALL, workers))
        process.start()
        return process, time.monotonic()

    warm = context.Process(target=int)  # the server starts, and imports
    warm.start()
    warm.join()
    process, started = start(folder / "whole")
    process.join()
    assert process.exitcode == 0
    whole = content(folder / "whole" / "last.pt")
    seed, duration = time.time_ns(), time.monotonic() - started
    print(f"an uninterrupted run takes {duration:.1f} s; moments drawn from seed {seed}")
    moments, killed, finished, steps = random.Random(seed), 0, 0, []
    while killed < kills or not finished:
        target = folder / f"run {finished}"
        process, started = start(target)
        if killed < kills:
            process.join(moments.uniform(0.1, 0.8) * duration)
            killed += process.is_alive()
            process.kill()
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)
        for name in ("best.pt", "last.pt"):
            step = checkpoints.load(target / name).step if (target / name).exists() else 0
        steps.append(step)
        if process.exitcode == 0:
            assert_same_run(target, folder / "whole")
            assert sorted(os.listdir(target)) == ["best.pt", "last.pt", "log.csv"]
            finished += 1
    print(f"{killed} runs were killed; checkpoints of the steps {steps} of {whole['step']}")
    assert 0 < sum(step not in (0, LONGER.steps) for step in steps)


def test_five_killed_runs_end_like_an_uninterrupted_one(tmp_path):
    kill_and_compare(tmp_path, 5, workers=0)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_fifty_killed_runs_end_like_an_uninterrupted_one(tmp_path, workers):
    kill_and_compare(tmp_path, 50, workers)


def call(*arguments):
    return CliRunner().invoke(command, [str(a) for a in arguments])


def options(settings=QUICK):
    """The settings as options of the command."""
    given = []
    for name, value in dataclasses.asdict(settings).items():
        if name == "mirror":
            given.append("--mirror" if value else "--no-mirror")
        else:
            given += [f"--{name.replace('_', '-')}", value]
    return [*given, "--threads", 1]


def assert_refused(result, *words):
    lines = [line for line in result.stderr.splitlines() if "have no muons and are left out" not in line]
    assert result.exit_code == 2 and len(lines) == 1 and lines[0].startswith("muvox: "), result.output
    assert all(word in lines[0] for word in words) and "Traceback" not in result.output, lines[0]


def test_the_command_resumes(tmp_path):
    """Without options, too: they are those of the run. What was asked for otherwise is refused by name."""
    out = tmp_path / "run"
    run(QUICK, tmp_path / "whole")
    run_until(5, QUICK, out, save_every=1)
    before = content(out / "last.pt")
    assert_refused(call("train", SMALL, "--out", out), f"{out} holds a run at step 5 of 12", "--resume", "--overwrite")
    assert_refused(call("train", SMALL, "--out", out, "--resume", "--steps", 13), "--steps is 13", "started with 12")
    assert_refused(call("train", TINY, "--out", out, "--resume"), "not the scans that the run")
    assert_refused(call("train", SMALL, "--out", out, "--resume", "--overwrite"), "exclude each other")
    assert_equal(content(out / "last.pt"), before)
    result = call("train", SMALL, "--out", out, "--resume", "--muons", 16, "--no-tensorboard")
    assert result.exit_code == 0 and "goes on at step 5" in result.stdout, result.output
    assert_same_run(out, tmp_path / "whole")
    assert json.loads((out / "history.json").read_text())["loss"] == content(out / "last.pt")["history"]["loss"]
    result = call("train", SMALL, "--out", out, "--resume", "--no-tensorboard")
    assert result.exit_code == 0 and "is complete at step 12" in result.stdout
    result = call("train", SMALL, "--out", out, "--overwrite", *options(dataclasses.replace(QUICK, steps=1)))
    assert result.exit_code == 0 and checkpoints.load(out / "best.pt").step == 1


def test_a_run_that_never_reached_a_checkpoint_starts_again(tmp_path):
    run_until(2, QUICK, tmp_path / "run")
    result = call("train", SMALL, "--out", tmp_path / "run", "--resume", *options(), "--no-tensorboard")
    assert result.exit_code == 0, result.output
    run(QUICK, tmp_path / "whole")
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_one_run_writes_to_a_folder(tmp_path):
    run(dataclasses.replace(QUICK, steps=1), tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with Run(tmp_path):
        with pytest.raises(RunError, match="another training run writes to this folder"):
            Run(tmp_path)
        for how in ("--resume", "--overwrite"):
            assert_refused(call("train", SMALL, "--out", tmp_path, how), "another training run writes to this folder")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    Run(tmp_path).close()


def test_a_damaged_checkpoint_is_not_gone_on_from(tmp_path):
    run_until(5, QUICK, tmp_path, save_every=1)
    whole, best = (tmp_path / "last.pt").read_bytes(), (tmp_path / "best.pt").read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", best):
        (tmp_path / "last.pt").write_bytes(damaged)
        words = "no state of training" if damaged == best else "not a checkpoint, or a damaged one"
        assert_refused(call("train", SMALL, "--out", tmp_path, "--resume"), f"{tmp_path / 'last.pt'}: ", words)
        assert (tmp_path / "last.pt").read_bytes() == damaged and (tmp_path / "best.pt").read_bytes() == best


def test_a_disk_that_fills_up_costs_no_more_than_the_steps_since_the_last_checkpoint(tmp_path):
    """The limit on the size of files stands for the disk. With room again the run goes on as if nothing had been."""
    run(QUICK, tmp_path / "whole")
    out = tmp_path / "run"
    run_until(5, QUICK, out, save_every=1)
    before = {name: (out / name).read_bytes() for name in ("best.pt", "last.pt")}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit, name in ((20_000, "last.pt"), (10, "log.csv")):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
        try:
            result = call("train", SMALL, "--out", out, "--resume", "--save-every", 1, "--no-tensorboard")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert_refused(result, f"{out / name}: ", os.strerror(errno.EFBIG))
        assert {name: (out / name).read_bytes() for name in before} == before
        assert not list(out.glob(".*"))
    run(QUICK, out, resume=True)
    assert_same_run(out, tmp_path / "whole")


def test_a_full_disk_stops_tensorboard_in_one_line(tmp_path):
    process = subprocess.run(
        [sys.executable, "-m", "muvox", "train", SMALL, "--out", tmp_path / "run", *map(str, options())],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (150, 150)),
    )
    assert process.returncode == 2 and "Traceback" not in process.stderr, process.stderr
    assert process.stderr.splitlines()[-1].startswith(f"muvox: {tmp_path / 'run'}")


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    """Root writes to any folder but those that the kernel keeps for itself."""
    folder = tmp_path if os.geteuid() else Path("/sys")
    if os.geteuid():
        tmp_path.chmod(0o555)
    for target in (folder, folder / "run"):
        assert_refused(call("train", SMALL, "--out", target, *options()), str(target))


def test_a_configuration_file_gives_values_and_the_command_line_wins(tmp_path):
    (tmp_path / "run.toml").write_text(
        f'scans = "{SMALL}"\nsteps = 2\nbatch = 3\nmuons = 8\ncrop = 2\nlr = 1e-4\nsave-every = 1\nmirror = false\n'
        'norm = "lumin"\nrecalibration = 1\nweight_decay = 0\nvalidation = 1\nevaluations = 1\nthreads = 1\n'
        "tensorboard = false\n"
    )
    result = call("train", "--config", tmp_path / "run.toml", "--out", tmp_path / "run", "--batch", 2)
    assert result.exit_code == 0, result.output
    settings = json.loads((tmp_path / "run" / "history.json").read_text())["settings"]
    given = dict(steps=2, batch=2, muons=8, crop=2, lr=1e-4, mirror=False, norm="lumin", recalibration=1, validation=1)
    assert {name: settings[name] for name in given} == given and settings["patience"] == 0


@pytest.mark.parametrize(
    "text, words",
    [
        ("colour = 'red'", ["unknown key 'colour'", "weight_decay"]),
        ("resume = true", ["unknown key 'resume'"]),
        ("[train]\nsteps = 3", ["unknown key 'train'"]),
        ("steps = 'many'", ["'steps' is 'many', accepted is a whole number"]),
        ("steps = 1.5", ["'steps' is 1.5"]),
        ("steps = true", ["'steps' is True"]),
        ("mirror = 1", ["'mirror' is 1, accepted is true or false"]),
        ("weight-decay = 1\nweight_decay = 1", ["twice"]),
        ("steps = 0", ["--steps"]),
        ("norm = 'layer'", ["--norm"]),
        ("steps = ", ["not a TOML file"]),
        ("\xff", ["not a TOML file"]),
        (None, ["No such file"]),
    ],
)
def test_bad_configuration_files_are_refused(tmp_path, text, words):
    path = tmp_path / "run.toml"
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    result = call("train", SMALL, "--config", path, "--out", tmp_path / "run")
    assert_refused(result, *words)
    assert not (tmp_path / "run").exists()


def train_streaming(folder, volumes, compression):
    """Largest growth of memory while a process trains on a file of that many volumes of 70,000 muons (5 MB each)."""
    rng = np.random.default_rng(0)
    with Scans(SMALL) as scans:
        volume = scans.volume(0)
        volume.muons = np.tile(volume.muons, (1 + 70_000 // len(volume.muons), 1))[:70_000].astype(np.float32)
        volume.muons *= rng.uniform(0.9, 1.1, volume.muons.shape).astype(np.float32)
        every = (dataclasses.replace(volume, volume_id=number, split=0) for number in range(volumes))
        write_scans(folder / "large.h5", every, scans.grid, scans.materials, compression=compression)
    code = f"""
import torch
from muvox.data import Scans
from muvox.data.features import MUON_COLUMNS
from muvox.memory import peak_memory_bytes
from muvox.train import Settings, train
torch.set_num_threads(1)
settings = Settings(steps={volumes}, batch=1, muons=8, crop=2, evaluations=1, validation=1)
with Scans({str(folder / "large.h5")!r}, MUON_COLUMNS) as scans:
    begun = []
    train(scans, settings, report=lambda step, *rest: begun.append(peak_memory_bytes()) if step == 3 else None)
    print(peak_memory_bytes() - begun[0], scans.path.stat().st_size)
"""
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout
    return map(int, output.split())


def test_memory_stays_flat_while_training_streams(tmp_path):
    """All of the 100 MB are read once after the third step."""
    grown, size = train_streaming(tmp_path, 20, 0)
    assert size > 100e6 and grown < 30e6, (grown, size)


@pytest.mark.slow
def test_memory_stays_flat_while_training_streams_5_gb(tmp_path):
    grown, size = train_streaming(tmp_path, 1000, 0)
    assert size > 5e9 and grown < 30e6, (grown, size)
