"""Scan files from files of others: NumPy arrays, TomOpt's and LUMIN's, and CSV tables."""

import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from .layout import Grid, Materials, ScanError, Volume
from .sources import Given, Source
from .tables import read_tables
from .tomopt import read_arrays, read_folds
from .writer import write_scans

ARRAYS = (
    "muons",
    "row_splits",
    "x0",
    "material",
    "background",
    "split",
    "feature_names",
    "feature_units",
    "material_names",
    "material_x0",
    "grid_origin",
    "voxel_size",
    "grid_shape",
)
TOMOPT = ("inputs", "targets", "columns")


def convert(
    source,
    target,
    volumes: Sequence[int] | None = None,
    compression: int = 6,
    *,
    truth=None,
    grid: Grid | None = None,
    materials: Materials | None = None,
    validation: float | None = None,
    report: Callable[[int], None] = lambda done: None,
) -> int:
    """Writes the given volumes (None = all) of a file to a scan file and returns their number.

    What `source` may be, by its ending; FORMAT.md has the details:
        .npz: arrays of the names of a scan file's (`muons`, `row_splits`, …), which say all that is needed; or
            `inputs` and `targets`, arrays of TomOpt
        .npy: `inputs` alone; `truth` may be such a file of `targets`
        .h5, .hdf5: LUMIN's fold file
        .csv: muons, one a row; `truth` may be such a file of voxels

    Arguments:
        volumes: numbers in the archive, or in the column `volume`; those become `volume_id`
        truth: radiation lengths of the voxels, or numbers of `materials`
        grid: voxels, where the file does not say
        materials: the classes of the file (None: of the known materials those that occur)
        validation: share of the volumes for validation, the last ones (None: a fifth); only with truth
        report: called with the number of volumes written

    Memory: CSV, .npy and HDF5 are read volume by volume, .npz as a whole.
    Raises ScanError for a file that cannot be used and OSError if `target` cannot be written.
    """
    source = Path(source)
    given = Given(
        None if volumes is None else list(volumes), None if truth is None else Path(truth), grid, materials, validation
    )
    read = READERS.get(source.suffix.lower())
    if read is None:
        raise ScanError(f"{source}: cannot be converted; accepted are {', '.join(READERS)}")
    if truth is not None and source.suffix.lower() not in (".csv", ".npy"):
        raise ScanError(f"{source}: the truth is expected in the same file, not in {truth}")
    made, met = read(source, given), []

    def told() -> Iterator[Volume]:
        for volume in made.volumes:
            yield volume
            met.append(volume.volume_id)
            report(len(met))
        if missing := sorted(set(given.volumes or []) - set(met)):
            raise ScanError(f"{source}: no volume {missing[0]}")
        if not met:
            raise ScanError(f"{source}: no volumes")

    try:
        write_scans(target, told(), made.grid, made.materials, made.columns, compression)
    except ScanError:
        raise
    except (ValueError, IndexError, TypeError) as error:
        raise ScanError(f"{source}: {error}") from None
    return len(met)


def _read_npz(source: Path, given: Given) -> Source:
    data = _load(source)
    if isinstance(data, np.ndarray):
        raise ScanError(f"{source}: not a NumPy archive (.npz)")
    if "inputs" in data:
        names = None if "columns" not in data else list(map(str, data["columns"]))
        return read_arrays(source, given, data["inputs"], data.get("targets"), names)
    missing = [name for name in ARRAYS if name not in data]
    if missing:
        raise ScanError(f"{source}: array '{missing[0]}' is missing")
    if (given.grid, given.materials, given.validation) != (None, None, None):
        raise ScanError(f"{source}: has its own grid, materials and split; none can be given")
    splits = data["row_splits"]
    chosen = range(len(splits) - 1) if given.volumes is None else given.volumes
    for index in chosen:
        if not 0 <= index < len(splits) - 1:
            raise ScanError(f"{source}: no volume {index}, there are {len(splits) - 1}")

    def volume(index: int) -> Volume:
        return Volume(
            data["muons"][splits[index] : splits[index + 1]],
            index,
            data["split"][index],
            data["x0"][index],
            data["material"][index],
            data["background"][index],
        )

    grid = Grid(*(tuple(data[name].tolist()) for name in ("grid_shape", "grid_origin", "voxel_size")))
    materials = Materials(tuple(map(str, data["material_names"])), tuple(map(float, data["material_x0"])))
    columns = dict(zip(map(str, data["feature_names"]), map(str, data["feature_units"])))
    return Source(map(volume, chosen), grid, materials, columns)


def _read_npy(source: Path, given: Given) -> Source:
    return read_arrays(source, given, _load(source), None if given.truth is None else _load(given.truth), None)


def _load(source: Path):
    """A NumPy file: an array, left on disk, or a dict of arrays. Raises ScanError."""
    try:
        data = np.load(source, mmap_mode="r", allow_pickle=False)
        if isinstance(data, np.ndarray):
            return data
        with data:
            return {name: data[name] for name in (*ARRAYS, *TOMOPT) if name in data.files}
    except FileNotFoundError:
        raise ScanError(f"{source}: no such file") from None
    except (ValueError, EOFError, OSError, zipfile.BadZipFile, TypeError, AttributeError):
        raise ScanError(f"{source}: not a NumPy file (.npz, .npy)") from None


READERS = {".npz": _read_npz, ".npy": _read_npy, ".h5": read_folds, ".hdf5": read_folds, ".csv": read_tables}
