"""Conversion: what comes out of arrays, fold files and tables is what went in; and a clear word about what is wrong."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings, strategies as st

from muvox.cli import muvox as command
from muvox.data import COLUMNS, Grid, Materials, ScanError, Scans, convert, tables
from muvox.data.layout import REQUIRED
from muvox.data.materials import RADIATION_LENGTHS, classes, materials_of
from muvox.errors import UserError

TINY = Path(__file__).parents[1] / "data" / "tiny.h5"
GRID = Grid((2, 3, 4), (0.0, -1.0, 0.4), (0.1, 0.2, 0.3))


def call(*arguments):
    return CliRunner().invoke(command, ["convert", *(str(a) for a in arguments)])


def assert_refused(result, words, target):
    assert result.exit_code == 2, result.output
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("muvox: ") and words in lines[0], result.stderr
    assert "Traceback" not in result.output and not target.exists()


@pytest.fixture(scope="module")
def tiny():
    with Scans(TINY) as scans:
        scans.every = list(scans.volumes())
        yield scans


def assert_same(path, tiny, indices=range(12)):
    """The volumes of the sample came out, bit for bit."""
    with Scans(path) as made:
        assert (made.grid, made.columns, made.units) == (tiny.grid, tiny.columns, tiny.units)
        assert made.materials.names == tiny.materials.names
        np.testing.assert_allclose(made.materials.x0, tiny.materials.x0, rtol=1e-6)
        for got, index in itertools.zip_longest(made.volumes(), indices):
            want = tiny.every[index]
            assert (got.volume_id, got.split, got.background) == (index, want.split, want.background)
            for name in ("muons", "x0", "material"):
                assert np.array_equal(getattr(got, name), getattr(want, name)), name


def archive(path, scans, **changes):
    """The arrays of a scan file as a NumPy archive."""
    data = dict(
        muons=np.concatenate([v.muons for v in scans.every]),
        row_splits=scans.row_splits,
        x0=np.stack([v.x0 for v in scans.every]),
        material=np.stack([v.material for v in scans.every]),
        background=scans.background,
        split=scans.split,
        feature_names=np.array(scans.columns),
        feature_units=np.array(scans.units),
        material_names=np.array(scans.materials.names),
        material_x0=np.array(scans.materials.x0),
        grid_origin=np.array(scans.grid.origin),
        voxel_size=np.array(scans.grid.voxel_size),
        grid_shape=np.array(scans.grid.shape),
    )
    data.update(changes)
    np.savez_compressed(path, **{name: value for name, value in data.items() if value is not None})
    return path


def padded(scans, fill=np.nan):
    """Muons as TomOpt's users keep them: (volumes, muons, columns), filled up; radiation lengths (volumes, z, x, y)."""
    inputs = np.full((len(scans), max(map(scans.count, range(len(scans)))), len(scans.columns)), fill, np.float32)
    for volume, rows in zip(scans.every, inputs):
        rows[: len(volume.muons)] = volume.muons
    return inputs, np.stack([volume.x0 for volume in scans.every]).transpose(0, 3, 1, 2)


def fold_file(path, inputs, targets, names=None, folds=3, **meta):
    """The layout of lumin 0.9.1's `df2foldfile`."""
    with h5py.File(path, "w") as file:
        for number, chosen in enumerate(np.array_split(np.arange(len(inputs)), folds)):
            group = file.create_group(f"fold_{number}")
            group["inputs"] = np.zeros((len(chosen), 0), np.float32)
            group.create_dataset("matrix_inputs", data=inputs[chosen], compression="lzf")
            if targets is not None:
                group.create_dataset("targets", data=targets[chosen], compression="lzf")
        if names is not None:
            vectors = [f"mu_{i}" for i in range(inputs.shape[1])]
            facts = dict(vecs=vectors, missing=[], feats_per_vec=list(names), row_wise=True, shape=inputs.shape[1:])
            file["meta_data/matrix_feats"] = json.dumps(facts | meta)
    return path


def muon_table(path, numbered, columns=tuple(COLUMNS)):
    """CSV of (volume, muons) with the columns in an order of its own, `volume` somewhere among them."""
    header = [*columns[1:4], "volume", *columns[:1], *columns[4:]]
    order = [columns.index(name) for name in header if name != "volume"]
    with open(path, "w") as file:
        print(*header, sep=",", file=file)
        for number, muons in numbered:
            for row in muons:
                cells = [repr(float(row[column])) for column in order]
                print(*cells[:3], number, *cells[3:], sep=",", file=file)
    return path


def truth_table(path, numbered):
    with open(path, "w") as file:
        print("volume,x0,i,j,k", file=file)
        for number, x0 in numbered:
            for (i, j, k), value in reversed(list(np.ndenumerate(x0))):
                print(number, repr(float(value)), i, j, k, sep=",", file=file)
    return path


def test_archives_give_the_scan_they_came_from(tmp_path, tiny):
    source = archive(tmp_path / "tiny.npz", tiny)
    assert convert(source, tmp_path / "tiny.h5") == 12
    assert_same(tmp_path / "tiny.h5", tiny)
    assert convert(source, tmp_path / "some.h5", [4, 1, 9]) == 3
    assert_same(tmp_path / "some.h5", tiny, [4, 1, 9])


@pytest.mark.parametrize("fill", [np.nan, 0.0])
def test_arrays_of_tomopt_give_the_same_scan(tmp_path, tiny, fill):
    inputs, targets = padded(tiny, fill)
    flat = targets.reshape(len(targets), -1)
    swapped = [*range(5, 18), *range(5)]
    names = [tiny.columns[place] for place in swapped]
    np.savez(tmp_path / "unnamed.npz", inputs=inputs, targets=targets)
    np.savez(tmp_path / "flat.npz", inputs=inputs.astype(np.float64), targets=flat, columns=np.array(tiny.columns))
    np.save(tmp_path / "inputs.npy", inputs)
    np.save(tmp_path / "targets.npy", flat)
    fold_file(tmp_path / "lumin.hdf5", inputs, flat, tiny.columns)
    for name, more in {
        "unnamed.npz": {},
        "flat.npz": {},
        "inputs.npy": dict(truth=tmp_path / "targets.npy"),
        "lumin.hdf5": {},
    }.items():
        target = tmp_path / f"{name}.made.h5"
        assert convert(tmp_path / name, target, grid=tiny.grid, validation=4 / 12, **more) == 12
        assert_same(target, tiny)
    fold_file(tmp_path / "swapped.h5", inputs[..., swapped], None, names, folds=2)
    convert(tmp_path / "swapped.h5", tmp_path / "swapped.made.h5", [9, 3], grid=tiny.grid)
    with Scans(tmp_path / "swapped.made.h5") as made, Scans(TINY, names) as want:
        assert not made.has_truth and made.columns == tuple(names) and made.volume_id.tolist() == [3, 9]
        for got, index in zip(made.volumes(), (3, 9)):
            assert np.array_equal(got.muons, want.muons(index))


def test_numbers_of_materials_are_a_truth_too(tmp_path, tiny):
    inputs, _ = padded(tiny)
    targets = np.stack([v.material for v in tiny.every]).transpose(0, 3, 1, 2)
    np.savez(tmp_path / "a.npz", inputs=inputs, targets=targets)
    words = ("beryllium", "graphite", "silicon", "iron", "lead=0.005612")
    convert(tmp_path / "a.npz", tmp_path / "a.h5", grid=tiny.grid, materials=materials_of(words), validation=1 / 3)
    assert_same(tmp_path / "a.h5", tiny)
    with pytest.raises(ScanError, match="volume 0: numbers of materials: say by --materials"):
        convert(tmp_path / "a.npz", tmp_path / "b.h5", grid=tiny.grid)
    with pytest.raises(ScanError, match="volume 1: material 4, expected 0 to 3"):
        convert(tmp_path / "a.npz", tmp_path / "b.h5", grid=tiny.grid, materials=materials_of(words[:4]))


def test_tables_give_the_scan_that_arrays_give(tmp_path, tiny):
    muons = muon_table(tmp_path / "muons.csv", enumerate(v.muons for v in tiny.every), tiny.columns)
    truth = truth_table(tmp_path / "truth.csv", enumerate(v.x0 for v in tiny.every))
    place = ["--shape", "6", "--voxel", "0.1", "--origin", "0,0,0.4"]
    result = call(muons, tmp_path / "a.h5", "--truth", truth, *place, "--validation", 0.33)
    assert result.exit_code == 0 and "a.h5: 12 volumes" in result.stdout and "converting" in result.stdout
    with Scans(tmp_path / "a.h5") as made:
        assert sorted(made.columns) == sorted(tiny.columns)
        own = list(made.columns)
        table = [made.muons(i) for i in range(12)]
    with Scans(TINY, own) as want:
        for index, rows in enumerate(table):
            assert np.array_equal(rows, want.muons(index))
    inputs, targets = padded(tiny)
    np.savez(tmp_path / "a.npz", inputs=inputs[..., [tiny.columns.index(n) for n in own]], targets=targets, columns=own)
    assert call(tmp_path / "a.npz", tmp_path / "b.h5", *place, "--validation", 0.33).exit_code == 0
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()
    assert call(muons, tmp_path / "c.h5", *place, "--volumes", "4,2").exit_code == 0
    assert_refused(call(muons, tmp_path / "d.h5", *place, "--volumes", "0-2"), "no volume 1", tmp_path / "d.h5")
    with Scans(tmp_path / "c.h5") as made:
        assert not made.has_truth and made.volume_id.tolist() == [2, 4]
        assert [made.count(i) for i in range(2)] == [2, 257]


numbers32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_table_comes_out_as_it_went_in(tmp_path, data):
    """Volumes with any numbers and sizes, some known only by their truth, read a few lines at a time."""
    columns = data.draw(
        st.permutations(list(COLUMNS)).map(lambda names: [n for n in names if n in REQUIRED or n < "p"])
    )
    counts = data.draw(st.dictionaries(st.integers(0, 2**53), st.integers(0, 7), min_size=1, max_size=5))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    odd = data.draw(st.lists(numbers32, min_size=1, max_size=5))
    muons = {number: rng.choice(np.float32(odd), (counts[number], len(columns))) for number in sorted(counts)}
    x0 = {number: rng.choice([0.3528, 0.005612], GRID.shape) for number in muons}
    source = muon_table(tmp_path / "muons.csv", muons.items(), columns)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "LINES", data.draw(st.integers(1, 30)))
        convert(source, tmp_path / "a.h5", truth=truth_table(tmp_path / "truth.csv", x0.items()), grid=GRID)
    with Scans(tmp_path / "a.h5") as made:
        order = [made.columns.index(name) for name in columns]
        assert made.volume_id.tolist() == list(muons)
        for got, rows, lengths in zip(made.volumes(), muons.values(), x0.values()):
            assert np.array_equal(got.muons[:, order], rows) and np.array_equal(got.x0, np.float32(lengths))


def lines_of(path):
    return path.read_text().splitlines()


def cell(line, column, value):
    """Changes a cell of a line, counted from 1."""

    def change(lines):
        cells = lines[line - 1].split(",")
        cells[lines[0].split(",").index(column)] = value
        lines[line - 1] = ",".join(cells)

    return change


def insert(line, text):
    return lambda lines: lines.insert(line - 1, text)


BAD_MUONS = {
    "unknown column": (cell(1, "p", "momentum"), "unknown column 'momentum'; accepted are volume"),
    "column twice": (cell(1, "p", "dx"), "column 'dx' is there twice"),
    "empty": (lambda lines: lines.clear(), "column 'volume' is missing"),
    "semicolons": (lambda lines: lines.__setitem__(0, lines[0].replace(",", ";")), "unknown column 'dtheta;dphi"),
    "only a header": (lambda lines: lines.__delitem__(slice(1, None)), "no volumes"),
    "missing column": (
        lambda lines: lines.__setitem__(slice(None), [line.rpartition(",")[0].rpartition(",")[0] for line in lines]),
        "muon column 'dy' is missing",
    ),
    "short line": (
        lambda lines: lines.__setitem__(4, lines[4].rpartition(",")[0]),
        "line 5 has 18 cells, the header 19",
    ),
    "long line": (lambda lines: lines.__setitem__(4, lines[4] + ","), "line 5 has 20 cells, the header 19"),
    "word": (cell(7, "dx", "north"), "line 7: dx is 'north', expected a number"),
    "decimal comma": (cell(7, "dx", '"0,5"'), "line 7: dx is '0,5', expected a number"),
    "nothing": (cell(3, "p", " "), "line 3: p is '', expected a number"),
    "not a number": (cell(8, "poca_z", "nan"), "line 8: poca_z is nan, expected a finite number"),
    "infinite": (cell(8, "poca_z", "-inf"), "line 8: poca_z is -inf, expected a finite number"),
    "beyond float32": (cell(8, "poca_z", "1e39"), "line 8: poca_z is 1e+39, expected a finite number"),
    "half a volume": (cell(4, "volume", "0.5"), "line 4: volume 0.5, expected whole numbers from 0 on"),
    "negative volume": (cell(2, "volume", "-1"), "line 2: volume -1, expected whole numbers from 0 on"),
    "back again": (cell(9, "volume", "0"), "line 9: volume 0 after volume 2, expected whole numbers"),
    "large number": (cell(9, "volume", "1234567"), "line 10: volume 2 after volume 1234567, expected whole"),
    "after blank lines": (lambda lines: (insert(3, " ")(lines), cell(9, "dx", "?")(lines)), "line 9: dx is '?'"),
    "comment": (insert(3, "# cosmic run 7"), "line 3 has 1 cells, the header 19"),
    "no truth of it": (cell(14, "volume", "77"), "no truth of volume 77, which has muons"),
}


@pytest.fixture
def small(tmp_path):
    """Two volumes of 5 and 8 muons, numbers 0 and 2, and their truth."""
    rng = np.random.default_rng(1)
    muons = muon_table(tmp_path / "muons.csv", [(0, rng.random((5, 18))), (2, rng.random((8, 18)))])
    truth = truth_table(tmp_path / "truth.csv", [(0, np.full(GRID.shape, 0.1932)), (2, np.full(GRID.shape, 0.0056))])
    return muons, truth


@pytest.mark.parametrize("what", BAD_MUONS)
@pytest.mark.parametrize("size", [2, tables.LINES])
def test_bad_tables_of_muons_are_refused_with_file_and_line(tmp_path, small, what, size, monkeypatch):
    monkeypatch.setattr(tables, "LINES", size)
    muons, truth = small
    change, words = BAD_MUONS[what]
    lines = lines_of(muons)
    change(lines)
    muons.write_text("".join(f"{line}\n" for line in lines))
    told = truth if "truth" in words else muons
    place = ["--shape", "2x3x4", "--voxel", "0.1x0.2x0.3", "--origin", "0,-1,0.4"]
    more = ["--truth", truth] if "truth" in words else []
    assert_refused(call(muons, tmp_path / "a.h5", *place, *more), f"{told}: {words}", tmp_path / "a.h5")
    assert sorted(os.listdir(tmp_path)) == ["muons.csv", "truth.csv"]


BAD_TRUTH = {
    "missing voxel": (lambda lines: lines.__delitem__(3), "volume 0: voxel (1, 2, 1) is missing"),
    "voxel twice": (insert(3, "0,0.1932,0,0,0"), "volume 0: voxel (0, 0, 0) is there 2 times"),
    "beyond the grid": (cell(5, "k", "4"), "volume 0: no voxel (1, 2, 4) in a grid of (2, 3, 4)"),
    "between voxels": (cell(5, "i", "0.5"), "volume 0: no voxel (0.5, 2, 0) in a grid"),
    "no length": (cell(5, "x0", "0"), "volume 0: a radiation length is not positive and finite"),
    "another material": (cell(30, "x0", "0.5"), "volume 2: no material has a radiation length of 0.5 m; there are air"),
    "unknown column": (cell(1, "x0", "X0"), "unknown column 'X0'; accepted are volume, i, j, k, x0"),
    "missing column": (
        lambda lines: lines.__setitem__(slice(None), [line.rpartition(",")[0] for line in lines]),
        "column 'k' is missing",
    ),
    "words": (cell(2, "x0", "lead"), "line 2: x0 is 'lead', expected a number"),
}


@pytest.mark.parametrize("what", BAD_TRUTH)
def test_bad_tables_of_truth_are_refused(tmp_path, small, what):
    muons, truth = small
    change, words = BAD_TRUTH[what]
    lines = lines_of(truth)
    change(lines)
    truth.write_text("".join(f"{line}\n" for line in lines))
    with pytest.raises(ScanError) as error:
        convert(muons, tmp_path / "a.h5", truth=truth, grid=GRID)
    assert str(error.value).startswith(f"{truth}: {words}") and not (tmp_path / "a.h5").exists()


def test_tables_from_spreadsheets_are_read(tmp_path, small):
    """A mark of UTF-8, ends of lines and quotes as other programs write them."""
    muons, truth = small
    convert(muons, tmp_path / "a.h5", truth=truth, grid=GRID)
    text = "".join(",".join(f'"{word}"' for word in line.split(",")) + "\r\n" for line in lines_of(muons))
    (tmp_path / "b.CSV").write_bytes(b"\xef\xbb\xbf" + text.encode())
    convert(tmp_path / "b.CSV", tmp_path / "b.h5", truth=truth, grid=GRID)
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()


def test_the_tables_of_the_documentation_are_converted(tmp_path, monkeypatch):
    text = Path(tables.__file__).with_name("FORMAT.md").read_text()
    examples = [part.split("```")[0] for part in text.split("```csv\n")[1:]]
    monkeypatch.chdir(tmp_path)
    for name, example in zip(("muons.csv", "truth.csv"), examples, strict=True):
        Path(name).write_text(example)
    line = next(line for line in text.splitlines() if line.startswith("muvox convert muons.csv"))
    assert call(*line.split()[2:]).exit_code == 0
    with Scans("scans.h5") as scans:
        assert scans.volume_id.tolist() == [0, 7] and scans.materials.names == ("beryllium", "lead")
        assert [scans.count(i) for i in range(2)] == [2, 1]
        assert np.exp(scans.log_x0(1)).ravel() == pytest.approx([0.3528, 0.005612])


def test_the_loader_of_the_readme_writes_scans(tmp_path, monkeypatch):
    readme = (Path(__file__).parents[2] / "README.md").read_text().split("## Your own scans")[1]
    monkeypatch.chdir(tmp_path)
    days = {name: np.random.default_rng(1).random((5, 18), np.float32) for name in ("monday.npy", "tuesday.npy")}
    for name, muons in days.items():
        np.save(name, muons)
    exec(readme.split("```py\n")[1].split("```")[0], {})  # `make test` runs what is under ```python as it stands
    with Scans("scans.h5") as scans:
        for got, muons in zip(scans.volumes(), days.values(), strict=True):
            assert np.array_equal(got.muons, muons)


def test_files_that_cannot_be_converted_are_refused(tmp_path, tiny):
    inputs, targets = padded(tiny)
    (tmp_path / "text.npz").write_text("hello")
    (tmp_path / "text.h5").write_text("hello")
    (tmp_path / "bytes.csv").write_bytes(b"volume,\xff\n")
    (tmp_path / "muons.root").write_text("hello")
    np.save(tmp_path / "flat.npy", np.zeros(3))
    np.save(tmp_path / "words.npy", np.full((1, 2, 18), "a"))
    np.save(tmp_path / "wide.npy", np.ones((2, 3, 22)))
    copied = inputs.copy()
    copied[..., 15:] = copied[..., 12:15]
    np.save(tmp_path / "tomopt18.npy", copied)
    inputs[4, 7, 3] = np.inf
    np.save(tmp_path / "infinite.npy", inputs)
    np.savez(tmp_path / "named.npz", inputs=inputs, columns=tiny.columns[:17])
    np.savez(tmp_path / "twice.npz", inputs=inputs, columns=[*tiny.columns[:17], "dx"])
    np.savez(tmp_path / "lacking.npz", inputs=inputs[..., :15], columns=tiny.columns[:15])
    np.savez(tmp_path / "order.npz", inputs=inputs, targets=np.ones((12, 6, 6, 5)))
    archive(tmp_path / "incomplete.npz", tiny, poca=np.zeros(2), background=None)
    archive(tmp_path / "nan.npz", tiny, muons=np.full((765, 18), np.nan, np.float32))
    (tmp_path / "short.npz").write_bytes(archive(tmp_path / "tiny.npz", tiny).read_bytes()[:20_000])
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["tracks"] = np.zeros(3)
    fold_file(tmp_path / "half.h5", inputs, targets)
    with h5py.File(tmp_path / "half.h5", "r+") as file:
        del file["fold_1/targets"]
    fold_file(tmp_path / "nothing.h5", inputs, targets)
    with h5py.File(tmp_path / "nothing.h5", "r+") as file:
        del file["fold_2/matrix_inputs"]
    fold_file(tmp_path / "sparse.h5", inputs, targets, tiny.columns, is_sparse=True)
    fold_file(tmp_path / "columns.h5", inputs, targets, tiny.columns, row_wise=False)
    fold_file(tmp_path / "facts.h5", inputs, targets)
    with h5py.File(tmp_path / "facts.h5", "r+") as file:
        file["meta_data/matrix_feats"] = "muons"
    with h5py.File(fold_file(tmp_path / "rotten.h5", inputs, None)) as file:
        chunk = file["fold_0/matrix_inputs"].id.get_chunk_info(0)
    content = bytearray((tmp_path / "rotten.h5").read_bytes())
    content[chunk.byte_offset : chunk.byte_offset + chunk.size] = b"\xff" * chunk.size
    (tmp_path / "rotten.h5").write_bytes(content)
    for name, words in {
        "none.npz": "no such file",
        "none.npy": "no such file",
        "none.h5": "no such file",
        "none.csv": "no such file",
        "text.npz": "not a NumPy file",
        "short.npz": "not a NumPy file",
        "text.h5": "not an HDF5 file",
        "bytes.csv": "not a text file in UTF-8",
        "muons.root": "cannot be converted; accepted are .npz, .npy, .h5, .hdf5, .csv",
        "flat.npy": r"muons are float64 of shape \(3,\), expected floating point \(volumes, muons, columns\)",
        "words.npy": "muons are <U1 of shape",
        "wide.npy": "22 columns without names; 18 are taken for pred_x0, dtheta",
        "tomopt18.npy": "columns 15 to 17 repeat the PoCA",
        "infinite.npy": "volume 4: muon 7 has a non-finite total_scatter",
        "named.npz": "17 different names of 18 columns",
        "twice.npz": "17 different names of 18 columns",
        "lacking.npz": "muon column 'dx' is missing",
        "order.npz": r"expected radiation lengths .* \(volumes, z, x, y\) = \(12, 6, 6, 6\), or flat \(12, 216\)",
        "incomplete.npz": "array 'background' is missing",
        "nan.npz": "volume 0: muons are not all finite",
        "tiny.npz": "has its own grid",
        "other.h5": "neither a fold file of LUMIN",
        "half.h5": "targets of some volumes only",
        "nothing.h5": "'fold_2' has no dataset 'matrix_inputs'",
        "sparse.h5": "sparse or column-wise",
        "columns.h5": "sparse or column-wise",
        "facts.h5": "is not what LUMIN writes",
        "rotten.h5": "cannot be read, the file is damaged",
    }.items():
        grid = None if name in ("incomplete.npz", "nan.npz") else tiny.grid
        with pytest.raises(ScanError, match=f"{name}: .*{words}"):
            convert(tmp_path / name, tmp_path / "made.h5", grid=grid)
    with pytest.raises(ScanError, match="no volume 12, there are 12"):
        convert(tmp_path / "tiny.npz", tmp_path / "made.h5", [3, 12])
    assert not list(tmp_path.glob("*made*"))


def test_options_that_do_not_fit_are_refused(tmp_path, small):
    muons, truth = small
    target = tmp_path / "a.h5"
    place = ["--shape", "2x3x4", "--voxel", "0.1", "--origin", "0"]
    for arguments, words in (
        ([], "does not say where its voxels are: give a grid (--shape, --voxel, --origin)"),
        (place[:4], "--shape, --voxel and --origin go together"),
        ([*place[:1], "2x3", *place[2:]], "'2x3', expected something like 10x10x6"),
        ([*place, "--validation", 0.2], "here is none"),
        ([*place, "--materials", "iron"], "here is none"),
        ([*place, "--materials", "cheese", "--truth", truth], "no material 'cheese'"),
        (
            [*place, "--materials", "iron,lead", "--truth", truth],
            "volume 0: no material has a radiation length of 0.19",
        ),
        ([*place, "--truth", truth, "--volumes", "1-2"], "no volume 1"),
        ([*place, "--truth", truth, "--volumes", "7"], "no volume 7"),
        ([*place, "--volumes", "2,9"], "no volume 9"),
        ([*place, "--truth", tmp_path / "none.csv"], "none.csv: no such file"),
        *[([*place, "--volumes", value], "--volumes") for value in ("x", "1-", "1-2-3", "")],
    ):
        assert_refused(call(muons, target, *arguments), words, target)
    assert_refused(call(TINY, target), "a scan file already", target)
    before = muons.read_bytes()
    assert call(muons, muons, *place).exit_code == 2 and call(muons, truth, *place, "--truth", truth).exit_code == 2
    assert muons.read_bytes() == before


def test_known_materials_are_told_apart():
    every = materials_of(list(RADIATION_LENGTHS))
    assert classes(np.array(every.x0) * 1.004, every).tolist() == list(range(len(every.x0)))
    with pytest.raises(UserError, match="no material has a radiation length of 0.25 m; there are lead 0.005612"):
        classes(np.array([0.005612, 0.25]), Materials(("lead",), (0.005612,)))


def test_memory_does_not_grow_with_the_table(tmp_path):
    """Ten times the rows, 35 MB more of text: no more memory."""
    code = """
import sys
import numpy as np
from muvox.data import COLUMNS, Grid, convert
from muvox.memory import peak_memory_bytes
import muvox.data.writer
muvox.data.writer.ROWS_PER_BLOCK = 8192
row = ",".join(["0.125"] * len(COLUMNS))
def peak(volumes):
    with open(sys.argv[1] + ".csv", "w") as file:
        print("volume", *COLUMNS, sep=",", file=file)
        for volume in range(volumes):
            file.write(f"{volume},{row}\\n" * 2000)
    assert convert(sys.argv[1] + ".csv", sys.argv[1], grid=Grid((2, 2, 2), (0, 0, 0), (1, 1, 1))) == volumes
    return peak_memory_bytes()
few = peak(15)
print(peak(150) - few)
"""
    extra = int(subprocess.run([sys.executable, "-c", code, tmp_path / "s.h5"], capture_output=True, check=True).stdout)
    with Scans(tmp_path / "s.h5") as scans:
        assert scans.row_splits[-1] == 300_000
    assert extra < 8e6
