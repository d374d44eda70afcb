"""Arrays of TomOpt, from NumPy's or LUMIN's files: muons by volume, truth in the order of `Volume.get_rad_cube`."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import h5py
import numpy as np

from .layout import COLUMNS, Grid, ScanError
from .sources import Given, Source, combine, need_columns, need_grid


def read_arrays(source: Path, given: Given, inputs, targets, names: Sequence[str] | None) -> Source:
    """`inputs` (volumes, muons, columns), `targets` (volumes, z, x, y) or (volumes, z · x · y), or None.

    Both may be on disk: they are read volume by volume.
    """
    return _source(source, given, [(inputs, targets)], names)


def read_folds(source: Path, given: Given) -> Source:
    """LUMIN's fold file: groups fold_0, fold_1, … with `matrix_inputs` and, for a scan with truth, `targets`."""
    try:
        file = h5py.File(source, "r")  # open until the last volume is read
    except FileNotFoundError:
        raise ScanError(f"{source}: no such file") from None
    except OSError:
        raise ScanError(f"{source}: not an HDF5 file, or a truncated one") from None
    if "format" in file.attrs:
        raise ScanError(f"{source}: a scan file already")
    folds = sorted((name for name in file if name.startswith("fold_")), key=lambda name: (len(name), name))
    if not folds:
        raise ScanError(f"{source}: neither a fold file of LUMIN (groups 'fold_0', …) nor anything else known")
    parts = [(file.get(f"{name}/matrix_inputs"), file.get(f"{name}/targets")) for name in folds]
    for name, (inputs, targets) in zip(folds, parts):
        if not isinstance(inputs, h5py.Dataset) or not isinstance(targets, h5py.Dataset | None):
            raise ScanError(f"{source}: '{name}' has no dataset 'matrix_inputs', or 'targets' is none")
    return _source(source, given, parts, _names(source, file))


def _names(source: Path, file: h5py.File) -> Sequence[str] | None:
    """The columns that LUMIN's meta data name, None if they name none."""
    if "meta_data/matrix_feats" not in file:
        return None
    try:
        facts = json.loads(file["meta_data/matrix_feats"][()])
        names, sparse, rows = list(map(str, facts["feats_per_vec"])), facts.get("is_sparse"), facts.get("row_wise")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ScanError(f"{source}: 'meta_data/matrix_feats' is not what LUMIN writes") from None
    if sparse or rows is False:
        raise ScanError(f"{source}: sparse or column-wise matrices; accepted are dense ones with a muon a row")
    return names if any(names) else None


def _source(source: Path, given: Given, parts: list, names: Sequence[str] | None) -> Source:
    grid = need_grid(source, given)
    for inputs, targets in parts:
        _check(source, inputs, targets, grid)
    width = parts[0][0].shape[2]
    if any(inputs.shape[2] != width for inputs, _ in parts):
        raise ScanError(f"{source}: the numbers of columns differ")
    if unnamed := names is None:
        names = tuple(COLUMNS)
        if width != len(names):
            raise ScanError(f"{source}: {width} columns without names; {len(names)} are taken for {', '.join(names)}")
    elif len(names) != width or len(set(names)) != width:
        raise ScanError(f"{source}: {len(set(names))} different names of {width} columns")
    need_columns(source, names)
    known = [targets is not None for _, targets in parts]
    if any(known) and not all(known):
        raise ScanError(f"{source}: targets of some volumes only")
    columns = {name: COLUMNS.get(name, "") for name in names}
    truth = (lambda: _truth(source, parts, grid)) if all(known) else None
    return combine(source, columns, _muons(source, parts, names, unnamed, given), truth, given)


def _check(source: Path, inputs, targets, grid: Grid) -> None:
    if inputs.ndim != 3 or inputs.dtype.kind != "f":
        expected = "expected floating point (volumes, muons, columns)"
        raise ScanError(f"{source}: muons are {inputs.dtype} of shape {inputs.shape}, {expected}")
    if targets is None:
        return
    x, y, z = grid.shape
    if targets.dtype.kind not in "fiu" or targets.shape not in [(len(inputs), z, x, y), (len(inputs), grid.voxels)]:
        raise ScanError(
            f"{source}: targets are {targets.dtype} of shape {targets.shape}, expected radiation lengths or numbers of "
            f"materials, (volumes, z, x, y) = {(len(inputs), z, x, y)}, or flat {(len(inputs), grid.voxels)}"
        )


def _rows(volume: np.ndarray) -> np.ndarray:
    """Muons of a volume without the rows that fill up its array, of NaN or of zeros."""
    return volume[~(np.isnan(volume) | (volume == 0)).all(axis=1)]


def _muons(
    source: Path, parts: list, names: Sequence[str], unnamed: bool, given: Given
) -> Iterator[tuple[int, np.ndarray]]:
    number = 0
    for inputs, _ in parts:
        for place in range(len(inputs)):
            if given.wants(number):
                rows = _rows(_read(source, inputs, place)).astype(np.float32)
                bad = np.argwhere(~np.isfinite(rows))
                if len(bad):
                    row, column = bad[0]
                    raise ScanError(f"{source}: volume {number}: muon {row} has a non-finite {names[column]}")
                # TomOpt's inferrer has 18 columns of its own: the last three are the PoCA again.
                if unnamed and len(rows) and np.array_equal(rows[:, 12:15], rows[:, 15:18]):
                    raise ScanError(f"{source}: columns 15 to 17 repeat the PoCA, expected are dx, dy and p: name them")
                yield number, rows
            number += 1


def _truth(source: Path, parts: list, grid: Grid) -> Iterator[tuple[int, np.ndarray]]:
    x, y, z = grid.shape
    number = 0
    for _, targets in parts:
        for place in range(len(targets)):
            yield number, _read(source, targets, place).reshape(z, x, y).transpose(1, 2, 0)
            number += 1


def _read(source: Path, values, place: int) -> np.ndarray:
    try:
        return values[place]
    except OSError:
        raise ScanError(f"{source}: cannot be read, the file is damaged") from None
