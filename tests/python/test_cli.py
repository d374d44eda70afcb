"""The command line: what it does; and that wrong input ends in one line, exit status 2 and no partial file."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from click.testing import CliRunner

import muvox
from muvox import _library
from muvox.cli import muvox as command
from muvox.data import Scans, write_scans
from muvox.info import runs_on

DATA = Path(__file__).parents[1] / "data"
TINY, SAMPLE = DATA / "tiny.h5", DATA / "x0net250-sample.h5"
SHORT = ["--steps", "2", "--batch", "2", "--muons", "8", "--crop", "3", "--evaluations", "1", "--threads", "1"]


def call(*arguments):
    return CliRunner().invoke(command, [str(a) for a in arguments])


def assert_refused(result, words, target=None):
    """One line on stderr that says so, exit status 2; the target does not exist."""
    assert result.exit_code == 2, result.output
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("muvox: ") and words in lines[0], result.stderr
    assert "Traceback" not in result.output
    if target is not None:
        assert not target.exists()
        assert not any(name.endswith(".tmp") for name in os.listdir(target.parent))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Folder of a short training run."""
    folder = tmp_path_factory.mktemp("trained")
    result = call("train", TINY, "--out", folder, *SHORT)
    assert result.exit_code == 0, result.output
    return folder


def test_training_writes_checkpoints_and_history(trained):
    assert sorted(os.listdir(trained)) == ["best.pt", "history.json", "last.pt", "log.csv", "tensorboard"]
    history = json.loads((trained / "history.json").read_text())
    assert len(history["loss"]) == 2 and history["settings"]["muons"] == 8
    assert history["validation"][-1]["step"] == 2


def test_training_shows_loss_metric_and_what_was_left_out(tmp_path):
    result = call("train", TINY, "--out", tmp_path, *SHORT)
    assert "validation: loss" in result.stdout and "block AUC" in result.stdout
    assert result.stderr == f"muvox: {TINY}: 1 of 8 training volumes have no muons and are left out\n"


def test_the_same_command_gives_the_same_losses(tmp_path, trained):
    losses = []
    for name in "ab":
        assert call("train", TINY, "--out", tmp_path / name, *SHORT, "--seed", 3).exit_code == 0
        losses.append(json.loads((tmp_path / name / "history.json").read_text())["loss"])
    assert losses[0] == losses[1] != json.loads((trained / "history.json").read_text())["loss"]


def test_prediction(tmp_path, trained):
    target = tmp_path / "out.h5"
    result = call("predict", trained / "best.pt", TINY, "--out", target, "--threads", 1)
    assert result.exit_code == 0 and "12 volumes" in result.stdout
    with h5py.File(target) as file:
        assert file["log_probability"].shape == (12, 5, 6, 6, 6)
        assert np.isfinite(file["log_probability"][:]).all() and np.isfinite(file["expected_log_x0"][:]).all()


def test_info_tells_versions_devices_and_what_was_not_built():
    result = call("info")
    assert result.exit_code == 0
    for words in (muvox.__version__, torch.__version__, sys.version.split()[0], "CPU kernels in use", "driver", "GPU"):
        assert words in result.stdout
    told = next(line for line in result.stdout.splitlines() if line.startswith("CUDA kernels"))
    assert (_library.cuda_info or _library.cuda_status) in told


def test_info_tells_what_the_cuda_kernels_were_built_for(monkeypatch):
    """A device of another architecture is named."""
    devices = {"H200": (9, 0), "A100": (8, 0)}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: list(devices)[i])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: list(devices.values())[i])
    monkeypatch.setattr(_library, "driver", lambda: (12, 8))
    monkeypatch.setattr(_library, "cuda_info", "muvox 0.1.0; architectures 90; CUDA 12.8")
    monkeypatch.setattr(_library, "WITHOUT_CUDA", {"attention", "attention_backward"})
    lines = call("info").stdout.splitlines()
    rows = {line[:20].strip(): line[20:] for line in lines}
    assert rows["CUDA kernels"] == "muvox 0.1.0; architectures 90; CUDA 12.8; all operators but attention"
    assert rows["driver"].endswith("runs CUDA 12.8")
    assert rows["GPU"] == "H200 (9.0), A100 (8.0, muvox has no kernels for it: build with -Dgpu_arch)"


@pytest.mark.parametrize(
    "architectures, capability, expected",
    [
        ("90", (9, 0), True),
        ("90", (10, 0), True),
        ("90", (8, 9), False),
        ("80 90", (8, 9), True),
        ("80 90", (7, 5), False),
        ("86", (8, 0), False),
        ("120 80", (9, 0), True),
    ],
)
def test_which_devices_the_kernels_run_on(architectures, capability, expected):
    assert runs_on(f"muvox 0.1.0; architectures {architectures}; CUDA 13.0", capability) == expected


def test_help_lists_every_command():
    for result in (call(), call("--help")):
        assert result.exit_code == 0
        for name in ("convert", "demo", "gradcheck", "info", "predict", "simulate", "train"):
            assert f"\n  {name} " in result.stdout
    assert "--crop" in call("train", "--help").stdout


def test_gradcheck_runs_from_here():
    assert call("gradcheck", "--op", "pool", "--dtype", "double", "--case", "one row").exit_code == 0


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--steps", "0"], "'--steps'"),
        (["--steps", "many"], "'--steps'"),
        (["--batch", "-1"], "'--batch'"),
        (["--muons", "-1"], "'--muons'"),
        (["--weight-decay", "inf"], "'--weight-decay'"),
        (["--patience", "-1"], "'--patience'"),
        (["--threads", "0"], "'--threads'"),
        (["--lr", "0"], "'--lr'"),
        (["--lr", "nan"], "'--lr'"),
        (["--lr", "inf"], "'--lr'"),
        (["--seed", "-1"], "'--seed'"),
        (["--crop", "-1"], "'--crop'"),
        (["--norm", "layer"], "'--norm'"),
        (["--device", "cuda"], "run on the CPU in this version"),
        (["--device", "abacus"], "'abacus' is not a device"),
        (["--colour", "red"], "--colour"),
        (["again"], "again"),
    ],
)
def test_bad_options_are_refused(tmp_path, arguments, words):
    assert_refused(call("train", TINY, "--out", tmp_path / "run", *arguments), words, tmp_path / "run")


def test_missing_arguments_are_refused(tmp_path):
    assert_refused(call("train", "--out", tmp_path / "run"), "SCANS", tmp_path / "run")
    assert_refused(call("train", TINY), "--out")
    assert_refused(call("trane"), "trane")


def broken_scans(folder):
    """Files that cannot be trained on, by what is wrong with them, and the words that must tell it."""
    content = TINY.read_bytes()
    (folder / "truncated.h5").write_bytes(content[:30_000])
    (folder / "foreign.h5").write_text("x,y,z\n")
    with h5py.File(folder / "other.h5", "w") as file:
        file["tracks"] = np.zeros(3)
    for name in ("column", "splits", "nan", "truth"):
        (folder / f"{name}.h5").write_bytes(content)
    with h5py.File(folder / "column.h5", "r+") as file:
        file["muons"].attrs["columns"] = ["?" if c == "dx" else c for c in file["muons"].attrs["columns"]]
    with h5py.File(folder / "splits.h5", "r+") as file:
        file["row_splits"][3] = 10**6
    with h5py.File(folder / "nan.h5", "r+") as file:
        file["muons"][:, 15] = np.nan
    with h5py.File(folder / "truth.h5", "r+") as file:
        del file["background"]
    return {
        "truncated.h5": "truncated",
        "foreign.h5": "not an HDF5 file",
        "other.h5": "not a muon scan",
        "column.h5": "muon column 'dx' is missing",
        "splits.h5": "'row_splits' must rise",
        "nan.h5": "non-finite dx",
        "truth.h5": "dataset 'background' is missing",
        "none.h5": "no such file",
    }


def test_broken_scans_are_refused(tmp_path, trained):
    for name, words in broken_scans(tmp_path).items():
        result = call("predict", trained / "last.pt", tmp_path / name, "--out", tmp_path / "out")
        assert_refused(result, words, tmp_path / "out")
        result = call("train", tmp_path / name, "--out", tmp_path / "run", *SHORT)
        # the volumes without muons are told first, where the file can be read so far
        assert result.exit_code == 2 and words in result.stderr.splitlines()[-1] and str(name) in result.stderr
        assert len(result.stderr.splitlines()) <= 2 and "Traceback" not in result.output
        assert not (tmp_path / "run").exists() or os.listdir(tmp_path / "run") == []


def test_scans_without_truth_can_be_predicted_but_not_trained_on(tmp_path, trained):
    with Scans(TINY) as scans:
        volumes = [v for v in scans.volumes([4, 1])]
        for volume in volumes:
            volume.x0 = volume.material = volume.background = None
        write_scans(tmp_path / "scan.h5", volumes, scans.grid)
    assert call("predict", trained / "last.pt", tmp_path / "scan.h5", "--out", tmp_path / "out.h5").exit_code == 0
    assert_refused(call("train", tmp_path / "scan.h5", "--out", tmp_path / "run"), "no truth")


def test_network_and_scan_must_agree(tmp_path, trained):
    result = call("predict", trained / "last.pt", SAMPLE, "--out", tmp_path / "out.h5")
    assert_refused(result, "the network was trained on 6 × 6 × 6 voxels", tmp_path / "out.h5")


def test_bad_checkpoints_are_refused(tmp_path):
    (tmp_path / "text.pt").write_text("weights")
    for name, words in {"text.pt": "not a checkpoint", "none.pt": "no such file"}.items():
        assert_refused(call("predict", tmp_path / name, TINY, "--out", tmp_path / "out.h5"), words, tmp_path / "out.h5")


def test_targets_that_cannot_be_written_are_refused(tmp_path, trained):
    (tmp_path / "file").touch()
    checkpoint = trained / "last.pt"
    assert_refused(call("train", TINY, "--out", tmp_path / "file", *SHORT), "File exists")
    assert_refused(call("predict", checkpoint, TINY, "--out", tmp_path / "no" / "out.h5"), "No such file or directory")
    assert_refused(call("predict", checkpoint, TINY, "--out", tmp_path), "not a regular file")
    assert_refused(call("predict", checkpoint, TINY, "--out", "/dev/full"), "not a regular file")
    assert os.path.exists("/dev/full")
    before = checkpoint.read_bytes()
    assert_refused(call("predict", checkpoint, TINY, "--out", checkpoint), "is read from and cannot be written to")
    assert checkpoint.read_bytes() == before


def limited(bytes_a_file, *arguments):
    """Runs the command in a process of its own in which no file may grow beyond a size: the full disk."""

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_a_file, bytes_a_file))

    return subprocess.run(
        [sys.executable, "-m", "muvox", *map(str, arguments)], capture_output=True, text=True, preexec_fn=limit
    )


def test_a_full_disk_leaves_no_partial_file(tmp_path, trained):
    for target, arguments in {
        tmp_path / "out.h5": [
            "predict",
            trained / "last.pt",
            TINY,
            "--out",
            tmp_path / "out.h5",
            "--muons",
            8,
            "--threads",
            1,
        ],
        tmp_path / "run" / "best.pt": ["train", TINY, "--out", tmp_path / "run", *SHORT],
    }.items():
        result = limited(20_000, *arguments)
        assert result.returncode == 2, result.stderr
        assert result.stderr.splitlines()[-1] == f"muvox: {target}: File too large"
        assert "Traceback" not in result.stderr
        assert not target.exists() and not list(target.parent.glob(".*"))
    assert sorted(os.listdir(tmp_path)) == ["run"]


@pytest.mark.parametrize("stop, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stopped_run_leaves_no_partial_file(tmp_path, trained, stop, code):
    """The prediction of all muons takes seconds; it is stopped while its temporary file is there."""
    with Scans(TINY) as scans:
        volume = scans.volume(4)
        volume.muons = np.tile(volume.muons, (4, 1))
        write_scans(tmp_path / "scan.h5", [volume] * 50, scans.grid)
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "muvox",
            "predict",
            trained / "last.pt",
            tmp_path / "scan.h5",
            "--out",
            tmp_path / "out.h5",
            "--threads",
            "1",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        # A shell gives its background jobs an ignored SIGINT, which they would hand on to this process.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    started = time.monotonic()
    while not list(tmp_path.glob(".out.h5.*.tmp")):
        assert process.poll() is None and time.monotonic() - started < 60
        time.sleep(0.02)
    process.send_signal(stop)
    told = process.stderr.read()
    assert process.wait(60) == code, told
    assert b"Traceback" not in told
    process.stderr.close()
    assert os.listdir(tmp_path) == ["scan.h5"]
