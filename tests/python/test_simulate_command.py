"""`muvox simulate`: files, contents, comparison; bad input, interruption, a full disk, memory."""

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
from click.testing import CliRunner

from muvox.cli import muvox as command
from muvox.data import COLUMNS, Grid, Scans
from muvox.data.materials import RADIATION_LENGTHS, materials_of
from muvox.simulate import Detector, Source, simulate_muons
from muvox.simulate.compare import compare, kolmogorov
from muvox.simulate.layouts import RandomBlock, RandomBoxes, read_maps
from muvox.simulate.scans import Settings, simulate, simulate_volumes

SAMPLE = Path(__file__).parents[1] / "data" / "x0net250-sample.h5"
SMALL = ["--shape", "4x3x2", "--voxel", "0.2", "--volumes", "6", "--muons", "30", "--threads", "1"]


def call(*arguments):
    return CliRunner().invoke(command, ["simulate", *(str(a) for a in arguments)])


def simulated(tmp_path, *arguments):
    """What the command wrote: grid, materials, volumes."""
    result = call("--out", tmp_path / "s.h5", *arguments)
    assert result.exit_code == 0, result.output
    with Scans(tmp_path / "s.h5") as scans:
        return scans.grid, scans.materials, list(scans.volumes())


def assert_refused(result, words, *targets):
    assert result.exit_code == 2, result.output
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("muvox: ") and words in lines[0], result.stderr
    for target in targets:
        assert not target.exists()
        assert not any(name.endswith(".tmp") for name in os.listdir(target.parent))


def test_a_file_that_is_trained_on(tmp_path):
    result = call("--out", tmp_path / "a.h5", "--picture", tmp_path / "a.png", *SMALL)
    assert result.exit_code == 0
    for words in ("volumes/s", "6 of 4 × 3 × 2 voxels", "180 recorded", "simulating"):
        assert words in result.stdout
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with Scans(tmp_path / "a.h5") as scans:
        assert scans.columns == tuple(COLUMNS) and scans.units == tuple(COLUMNS.values())
        assert scans.split.tolist() == [0, 0, 0, 0, 0, 1] and np.diff(scans.row_splits).tolist() == [30] * 6
        for volume in scans.volumes():
            assert np.allclose(np.take(scans.materials.x0, volume.material), volume.x0)
            assert np.bincount(volume.material.ravel()).argmax() == volume.background
    short = ["--steps", "2", "--batch", "2", "--muons", "8", "--evaluations", "1", "--threads", "1"]
    trained = CliRunner().invoke(command, ["train", str(tmp_path / "a.h5"), "--out", str(tmp_path / "run"), *short])
    assert trained.exit_code == 0, trained.output


def test_the_same_command_gives_the_same_file_on_any_number_of_threads(tmp_path):
    options = [*SMALL, "--muons", "5-60", "--layout", "block"]
    files = [tmp_path / f"{n}.h5" for n in range(3)]
    for path, extra in zip(files, (["--threads", 1], ["--threads", 3], ["--seed", 8])):
        assert call("--out", path, *options, *extra).exit_code == 0
    assert files[0].read_bytes() == files[1].read_bytes() != files[2].read_bytes()
    with Scans(files[0]) as scans:
        counts = np.diff(scans.row_splits)
        assert counts.min() >= 5 and counts.max() <= 60 and len(set(counts)) > 3


def test_volumes_depend_on_their_number_alone(monkeypatch):
    """However they are grouped, and however many there are."""
    grid = Grid((3, 3, 3), (0.0, 0.0, 0.4), (0.2, 0.2, 0.2))
    layout = RandomBoxes(grid, materials_of(["iron", "lead", "water"]), [2])

    def muons(volumes):
        settings = Settings(volumes, (20, 40), Source.of_momentum(3.0), Detector.around(grid), threads=1)
        return [volume.muons for volume in simulate_volumes(layout, settings)]

    many = muons(9)
    monkeypatch.setattr("muvox.simulate.scans.ROWS_AT_ONCE", 70)
    for a, b in zip(muons(5), many):
        np.testing.assert_array_equal(a, b)


def test_random_contents():
    grid, rng = Grid((10, 8, 5), (0.0, 0.0, 0.4), (0.1, 0.1, 0.1)), np.random.default_rng(1)
    materials = materials_of(["lead", "beryllium", "iron", "graphite"])
    boxes, share, grounds = RandomBoxes(grid, materials, [1, 3]), [], set()
    for index in range(200):
        volume = boxes.material(index, rng)
        ground = np.bincount(volume.ravel()).argmax()
        grounds.add(int(ground))
        share.append((volume != ground).mean())
    assert grounds == {1, 3} and 0.02 < np.mean(share) < 0.15 and min(share) > 0
    block, pairs = RandomBlock(grid, materials), set()
    for index in range(300):
        volume = block.material(index, rng)
        kinds, counts = np.unique(volume, return_counts=True)
        ground, inner = kinds[counts.argmax()], kinds[counts.argmin()]
        where = np.argwhere(volume == inner)
        sides = where.max(0) - where.min(0) + 1
        assert sides.prod() == len(where) and (sides <= [5, 4, 3]).all()
        assert materials.x0[inner] < materials.x0[ground]
        pairs.add((int(ground), int(inner)))
    assert len(pairs) == 6  # of four materials by density


def test_boxes(tmp_path):
    grid, materials, volumes = simulated(
        tmp_path, *SMALL, "--box", "lead:0,0,0.4:0.2,0.6,0.6", "--box", "gold:0.4,0,0.6:0.8,0.4,0.8",
        "--materials", "lead,gold=0.003344", "--background", "air", "--volumes", "2",
    )  # fmt: skip
    assert materials.names == ("lead", "gold", "air") and materials.x0 == (0.005612, 0.003344, 303.9)
    expected = np.full((4, 3, 2), 2)
    expected[0, :, 0] = 0
    expected[2:, :2, 1] = 1
    for volume in volumes:
        np.testing.assert_array_equal(volume.material, expected)
        assert volume.background == 2


@pytest.mark.parametrize("form", ["x0.npy", "x0.npz", "numbers.npz", "names.npz", "names.npy", "x0.h5", "scan.h5"])
def test_maps(tmp_path, form):
    """One content in every form: two volumes of iron, lead and a material of 4 mm."""
    numbers = np.random.default_rng(2).integers(0, 3, (2, 3, 4, 5)).astype(np.uint8)
    names, lengths = np.array(["iron", "lead", "mine"]), np.array([0.01757, 0.005612, 0.004])
    path, x0 = tmp_path / form, lengths[numbers].astype(np.float32)
    extra = ["--materials", "iron,lead"]
    if form == "x0.npy":
        np.save(path, x0)
    elif form == "x0.npz":
        np.savez(path, x0=x0, voxel_size=[0.1, 0.2, 0.3], grid_origin=[1.0, 2.0, 3.0])
    elif form == "numbers.npz":
        np.savez(path, material=numbers, material_names=names, material_x0=lengths)
    elif form.startswith("names"):
        np.savez(path, material=names[numbers]) if form.endswith("z") else np.save(path, names[numbers])
        extra = ["--materials", "iron,lead,mine=0.004"]
    else:
        with h5py.File(path, "w") as file:
            file["x0"] = x0
            if form == "scan.h5":
                file["material"] = numbers
                file["material"].attrs.update(names=names.tolist(), x0=lengths)
            file.attrs.update(voxel_size=[0.1, 0.2, 0.3], grid_origin=[1.0, 2.0, 3.0])
    grid, materials, volumes = simulated(tmp_path, "--map", path, "--volumes", 3, "--muons", 5, *extra)
    assert grid.shape == (3, 4, 5) and len(volumes) == 3
    own = form in ("x0.npz", "x0.h5", "scan.h5")
    assert (grid.origin, grid.voxel_size) == (
        ((1.0, 2.0, 3.0), (0.1, 0.2, 0.3)) if own else ((0.0, 0.0, 0.4), (0.1, 0.1, 0.1))
    )
    assert materials.names[:2] == ("iron", "lead") and materials.x0[2] == pytest.approx(0.004)
    for index, volume in enumerate(volumes):
        np.testing.assert_array_equal(volume.material, numbers[index % 2])
        np.testing.assert_array_equal(volume.x0, x0[index % 2])
    grid = simulated(tmp_path, "--map", path, "--volumes", 1, "--muons", 5, "--voxel", 0.5, *extra)[0]
    assert grid.voxel_size == (0.5, 0.5, 0.5)


def test_a_map_of_any_radiation_length(tmp_path):
    """More than 256 of them: the truth is kept, the class is the nearest listed."""
    x0 = np.random.default_rng(0).uniform(0.004, 0.4, (12, 6, 6)).astype(np.float32)
    np.save(tmp_path / "x0.npy", x0)
    _, materials, (volume,) = simulated(
        tmp_path, "--map", tmp_path / "x0.npy", "--volumes", 1, "--muons", 5, "--materials", "lead,graphite"
    )
    assert materials.names == ("lead", "graphite")
    np.testing.assert_array_equal(volume.x0, x0)
    np.testing.assert_array_equal(volume.material, x0 > np.sqrt(0.005612 * 0.1932))
    few = read_maps(SAMPLE, materials_of(["water"]), None, None)
    assert few.materials.names == ("beryllium", "graphite", "silicon", "iron", "lead") and len(few) == 873


def test_momenta(tmp_path):
    for momentum, low, high in (("2.5", 2.5, 2.5), (SAMPLE, 5.0, 5.0), ("spectrum", 0.49, 500)):
        _, _, volumes = simulated(tmp_path, *SMALL, "--momentum", momentum)
        p = np.concatenate([volume.muons[:, -1] for volume in volumes])
        assert low <= p.min() <= p.max() <= high and (len(np.unique(p)) > 100) == (momentum == "spectrum")


def test_kolmogorov_distances_by_hand():
    assert kolmogorov(np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 3.0])) == 0
    assert kolmogorov(np.array([1.0, 2.0]), np.array([3.0])) == 1
    rng = np.random.default_rng(0)
    for _ in range(20):
        a, b = rng.integers(0, 9, 30), rng.integers(1, 10, 20)
        assert kolmogorov(a, b) == pytest.approx(max(abs((a <= x).mean() - (b <= x).mean()) for x in range(11)))


def test_the_sample_is_met_by_a_simulation_of_its_volumes(tmp_path):
    """TomOpt's muons against ours, by material: close with the logarithm of each step, as TomOpt has it; wider by the
    logarithm of the whole way otherwise. The distances tell a wrong momentum at once."""
    found = {}
    for log_term, momentum in (("step", "spectrum"), ("path", "spectrum"), ("path", "2.5")):
        options = ["--log-term", log_term, "--momentum", momentum, "--volumes", 150, "--threads", 2]
        result = call("--out", tmp_path / "c.h5", "--compare", SAMPLE, "--picture", tmp_path / "c.png", *options)
        assert result.exit_code == 0, result.output
        assert "Kolmogorov distances to x0net250-sample.h5" in result.stdout and "lead" in result.stdout
        assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
        found[log_term, momentum] = {(r.material, r.block): r for r in compare(SAMPLE, tmp_path / "c.h5")}
    step, path, slow = found.values()
    assert len(step) == 8 and sum(len(row.reference) for row in step.values()) > 20_000
    for key, row in step.items():
        assert (row.distances < 1.3 * row.chance + 0.02).all(), (key, row.distances, row.chance)
        ratio = [np.median(rows[key].simulated[:, 0]) / np.median(row.reference[:, 0]) for rows in (step, path, slow)]
        assert ratio[0] == pytest.approx(1, abs=0.05 + row.chance)
        assert 1.02 < ratio[1] < 1.35 and ratio[2] == pytest.approx(2 * ratio[1], rel=0.1)
        assert slow[key].distances[0] > 0.2


def test_a_comparison_with_itself_finds_nothing():
    for row in compare(SAMPLE, SAMPLE):
        assert (row.distances == 0).all() and row.chance > 0


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--volumes", "0"], "'--volumes'"),
        (["--muons", "many"], "expected a number of muons or a range such as 800-1200"),
        (["--muons", "9-5"], "'9-5'"),
        (["--muons", "-4"], "'-4'"),
        (["--shape", "4x4"], "expected something like 10x10x6"),
        (["--shape", "4x0x4"], "expected numbers above 0"),
        (["--voxel", "nan"], "'nan', expected something like"),
        (["--voxel", "-0.1"], "expected numbers above 0"),
        (["--origin", "0,0"], "expected something like 0,0,0.4"),
        (["--layout", "spheres"], "'--layout'"),
        (["--materials", "cheese"], "no material 'cheese'; known are air, water"),
        (["--materials", "cheese=-1"], "material 'cheese=-1', expected NAME=X0"),
        (["--materials", "lead,lead"], "material 'lead' is named twice"),
        (["--background", "cheese"], "no material 'cheese'"),
        (["--box", "lead:0,0,0"], "expected MATERIAL:X,Y,Z:X,Y,Z"),
        (["--box", "lead:0,0,0.4:0,1,1"], "expected MATERIAL:X,Y,Z:X,Y,Z"),
        (["--box", "cheese:0,0,0:1,1,1"], "'cheese' is not among the materials"),
        (["--box", "lead:5,5,5:6,6,6"], "holds no centre of a voxel"),
        (["--map", "none.npy"], "none.npy: no such file"),
        (["--momentum", "-3"], "momentum -3, expected GeV above 0"),
        (["--momentum", "none.h5"], "none.h5: no such file (expected GeV, 'spectrum' or a scan file)"),
        (["--panels", "1"], "'--panels'"),
        (["--gap", "0"], "'--gap'"),
        (["--spacing", "inf"], "'--spacing'"),
        (["--margin", "-9"], "expected a rectangle"),
        (["--resolution", "-1"], "'--resolution'"),
        (["--efficiency", "0"], "efficiency is 0, expected above 0 and up to 1"),
        (["--efficiency", "nan"], "'--efficiency'"),
        (["--step", "0"], "'--step'"),
        (["--log-term", "none"], "'--log-term'"),
        (["--validation", "2"], "'--validation'"),
        (["--seed", "-1"], "'--seed'"),
        (["--threads", "0"], "'--threads'"),
        (["--compare", "none.h5"], "none.h5: no such file"),
        (["--compare", str(SAMPLE), "--box", "lead:0,0,0:1,1,1"], "not with --map, --box or --shape"),
        (["--materials", "lead", "--layout", "block"], "a block needs two materials"),
        (["--margin", "30", "--gap", "4000", "--momentum", "0.001"], "none is recorded"),
    ],
)
def test_bad_options_are_refused(tmp_path, arguments, words):
    assert_refused(call("--out", tmp_path / "s.h5", "--volumes", 2, "--muons", 5, *arguments), words, tmp_path / "s.h5")


def test_bad_maps_are_refused(tmp_path):
    np.savez(tmp_path / "other.npz", density=np.ones((3, 3, 3)))
    np.save(tmp_path / "flat.npy", np.ones((3, 3)))
    np.save(tmp_path / "negative.npy", -np.ones((3, 3, 3)))
    np.save(tmp_path / "nan.npy", np.full((3, 3, 3), np.nan))
    np.savez(tmp_path / "number.npz", material=np.full((3, 3, 3), 7))
    np.savez(tmp_path / "name.npz", material=np.full((3, 3, 3), "cheese"))
    (tmp_path / "text.npz").write_text("hello")
    (tmp_path / "text.h5").write_text("hello")
    for name, words in {
        "other.npz": "neither an array 'x0' nor an array 'material'",
        "flat.npy": "a map of shape (3, 3), expected (x, y, z) or (volumes, x, y, z)",
        "negative.npy": "a finite radiation length above 0 m for every voxel",
        "nan.npy": "a finite radiation length above 0 m for every voxel",
        "number.npz": "names, or numbers from 0 to 4",
        "name.npz": "no material 'cheese'",
        "text.npz": "not a NumPy (.npy, .npz) or HDF5 file that can be read",
        "text.h5": "not a NumPy (.npy, .npz) or HDF5 file that can be read",
    }.items():
        assert_refused(call("--out", tmp_path / "s.h5", "--map", tmp_path / name), words, tmp_path / "s.h5")
    np.save(tmp_path / "good.npy", np.ones((3, 3, 3)))
    refused = call("--out", tmp_path / "s.h5", "--map", tmp_path / "good.npy", "--shape", "4x4x4")
    assert_refused(refused, "the map has the shape (3, 3, 3), --shape says (4, 4, 4)", tmp_path / "s.h5")
    assert_refused(call("--out", tmp_path / "good.npy", "--map", tmp_path / "good.npy"), "is read from")
    assert_refused(call("--out", tmp_path, *SMALL), "not a regular file")
    assert_refused(call("--out", tmp_path / "no" / "s.h5", *SMALL), "No such file")
    same = call("--out", tmp_path / "s.h5", "--picture", tmp_path / "s.h5", *SMALL)
    assert_refused(same, "cannot be the scan file", tmp_path / "s.h5")


def test_an_interrupted_run_leaves_nothing(tmp_path):
    line = [sys.executable, "-m", "muvox", "simulate", "--out", str(tmp_path / "s.h5"), "--volumes", "1000000"]
    line += ["--shape", "1x1x1", "--momentum", "5", "--threads", "2"]
    run = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        for _ in range(600):
            if any(p.stat().st_size for p in tmp_path.iterdir()):
                break
            time.sleep(0.1)
        assert [p.suffix for p in tmp_path.iterdir()] == [".tmp"]
        run.send_signal(signal.SIGINT)
        _, errors = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode == 130 and errors.strip() == "muvox: interrupted"
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_told_in_one_line(tmp_path):
    """The limit on the size of files stands for the disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        result = call("--out", tmp_path / "s.h5", "--volumes", 20, "--threads", 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert_refused(result, f"{tmp_path / 's.h5'}: File too large", tmp_path / "s.h5")


def test_nothing_is_simulated_for_a_file_that_cannot_be_written_on(tmp_path, monkeypatch):
    """It stops at the first block that the disk does not take, not after the last volume."""
    monkeypatch.setattr("muvox.data.writer.ROWS_PER_BLOCK", 1000)
    grid, done = Grid((2, 2, 2), (0.0, 0.0, 0.4), (0.2, 0.2, 0.2)), []
    settings = Settings(500, (500, 500), Source.of_momentum(3.0), Detector.around(grid), threads=1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            simulate(tmp_path / "s.h5", RandomBoxes(grid, materials_of(["iron"]), [0]), settings, done.append)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert 0 < done[-1] < 250 and list(tmp_path.iterdir()) == []


def test_memory_does_not_grow_with_the_file(tmp_path):
    """Ten times the volumes, 27 MB more in a file: no more memory, with calls and blocks smaller than by default."""
    code = """
import sys
from click.testing import CliRunner
import muvox.data.writer, muvox.simulate.scans
from muvox.cli import muvox as command
from muvox.memory import peak_memory_bytes
muvox.data.writer.ROWS_PER_BLOCK, muvox.simulate.scans.ROWS_AT_ONCE = 8192, 4096
def peak(volumes):
    line = ["simulate", "--out", sys.argv[1], "--volumes", volumes, "--muons", "4000", "--threads", "2"]
    result = CliRunner().invoke(command, [*line, "--shape", "2x2x2", "--momentum", "5"])
    assert result.exit_code == 0, result.output
    return peak_memory_bytes()
few = peak("10")
print(peak("100") - few)
"""
    extra = int(subprocess.run([sys.executable, "-c", code, tmp_path / "s.h5"], capture_output=True, check=True).stdout)
    with Scans(tmp_path / "s.h5") as scans:
        assert scans.row_splits[-1] == 400_000
    assert extra < 8e6


def test_every_material_scatters_by_its_length():
    """Rms of the angle behind 5 cm of each, against the formula, in one call."""
    grid = Grid((1, 1, 1), (-40.0, -40.0, 0.0), (80.0, 80.0, 0.05))
    lengths = np.array(list(RADIATION_LENGTHS.values()))
    detector = Detector((0.3, 0.2, -0.2, -0.3), (-20.0, 20.0), (-20.0, 20.0), 0.0)
    rows = 10_000
    muons, _ = simulate_muons(
        grid, lengths.reshape(-1, 1, 1, 1), [rows] * len(lengths), source=Source.beam(4.0), detector=detector,
        dtype=np.float64, threads=1,
    )  # fmt: skip
    thickness = 0.05 / lengths
    theta0 = 0.0136 * np.hypot(4, 0.1056584) / 16 * np.sqrt(thickness) * (1 + 0.038 * np.log(thickness))
    rms = np.sqrt((muons[:, 3] ** 2).reshape(len(lengths), rows).mean(1) / 2)
    np.testing.assert_allclose(rms, theta0, rtol=4.5 / np.sqrt(4 * rows))
