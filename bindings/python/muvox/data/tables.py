"""CSV files: muons, one a row, and truth, one voxel a row; read some lines at a time."""

import csv
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from .layout import COLUMNS, Grid, ScanError
from .sources import Given, Source, combine, need_columns, need_grid

LINES = 8192  # read at once
TRUTH = ("volume", "i", "j", "k", "x0")


def read_tables(source: Path, given: Given) -> Source:
    """Muons of a CSV file with a column `volume` and others of COLUMNS; truth of one with the columns TRUTH.

    Both are in the order of the volumes' numbers. Memory: one volume and LINES lines. Raises ScanError.
    """
    grid = need_grid(source, given)
    header = _header(source, ("volume", *COLUMNS))
    columns = [name for name in header if name != "volume"]
    need_columns(source, columns)
    muons = _volumes(source, header, columns, np.float32)
    truth = None if given.truth is None else lambda: _maps(given.truth, grid)
    return combine(source, {name: COLUMNS[name] for name in columns}, muons, truth, given)


def _maps(path: Path, grid: Grid) -> Iterator[tuple[int, np.ndarray]]:
    """Radiation lengths (x, y, z) of each volume; every voxel must be there once."""
    for number, rows in _volumes(path, _header(path, TRUTH, TRUTH), TRUTH[1:], np.float64):
        index, x0 = rows[:, :3], np.full(grid.shape, np.nan)
        bad = ((index != np.floor(index)) | (index < 0) | (index >= grid.shape)).any(axis=1)
        if bad.any():
            voxel = ", ".join(f"{value:g}" for value in index[bad][0])
            raise ScanError(f"{path}: volume {number}: no voxel ({voxel}) in a grid of {grid.shape}")
        places = np.ravel_multi_index(index.astype(int).T, grid.shape)
        x0.reshape(-1)[places] = rows[:, 3]
        counts = np.bincount(places, minlength=grid.voxels)
        if (counts != 1).any():
            place = int(np.argmax(counts != 1))
            voxel = tuple(map(int, np.unravel_index(place, grid.shape)))
            times = f"is there {counts[place]} times" if counts[place] else "is missing"
            raise ScanError(f"{path}: volume {number}: voxel {voxel} {times}")
        yield number, x0


def _volumes(path: Path, header: list[str], names: Sequence[str], dtype) -> Iterator[tuple[int, np.ndarray]]:
    """Number and rows of each volume, columns in the order of `names`."""
    own, order = header.index("volume"), [header.index(name) for name in names]
    current, parts = None, []
    for values, lines in _blocks(path, header):
        ids = values[:, own]
        before = np.concatenate([[-1 if current is None else current], ids[:-1]])
        bad = (ids != np.floor(ids)) | (ids < 0) | (ids > 2**53) | (ids < before)
        if bad.any():
            place = int(np.argmax(bad))
            told = f"{path}: line {lines[place]}: volume {ids[place]:.15g}"
            if ids[place] < before[place]:
                told += f" after volume {before[place]:.15g}" if before[place] >= 0 else ""
            raise ScanError(f"{told}, expected whole numbers from 0 on, in rising order")
        with np.errstate(over="ignore"):
            rows = values[:, order].astype(dtype)
        infinite = np.argwhere(~np.isfinite(rows))
        if len(infinite):
            place, column = infinite[0]
            value = values[place, order[column]]
            raise ScanError(f"{path}: line {lines[place]}: {names[column]} is {value:g}, expected a finite number")
        cuts = np.flatnonzero(np.diff(ids)) + 1
        for number, part in zip(ids[np.concatenate([[0], cuts])], np.split(rows, cuts)):
            if parts and number != current:
                yield int(current), np.concatenate(parts)
                parts = []
            current = number
            parts.append(part)
    if parts:
        yield int(current), np.concatenate(parts)


def _blocks(path: Path, header: list[str]) -> Iterator[tuple[np.ndarray, list[int]]]:
    """Values (rows, columns) float64 of some lines, and the numbers of these lines."""
    with _opened(path) as text:
        numbered = enumerate(text, start=1)
        next(numbered)
        lines = ((number, line) for number, line in numbered if not line.isspace())
        while block := list(_told(path, itertools.islice(lines, LINES))):
            numbers, words = zip(*block)
            try:
                values = _parsed(words)
            except ValueError:
                values = None
            if values is None or values.shape[1] != len(header):
                raise _fault(path, header, block)
            yield values, numbers


def _parsed(lines: Sequence[str]) -> np.ndarray:
    return np.loadtxt(lines, delimiter=",", comments=None, quotechar='"', ndmin=2)


def _fault(path: Path, header: list[str], block: list[tuple[int, str]]) -> ScanError:
    """What is wrong with the first bad line of a block."""
    for number, line in block:
        cells = _cells(path, number, line)
        if len(cells) != len(header):
            return ScanError(f"{path}: line {number} has {len(cells)} cells, the header {len(header)}")
        for name, cell in zip(header, cells):
            if not _is_number(cell):
                return ScanError(f"{path}: line {number}: {name} is '{cell.strip()[:40]}', expected a number")
    return ScanError(f"{path}: lines {block[0][0]} to {block[-1][0]} are not numbers divided by commas")


def _is_number(cell: str) -> bool:
    try:
        return _parsed([cell if cell.strip() else "nothing"]).size == 1
    except ValueError:
        return False


def _header(path: Path, accepted: Sequence[str], needed: Sequence[str] = ("volume",)) -> list[str]:
    """Names of the columns. Raises ScanError for those that are there twice, not accepted, or needed and missing."""
    with _opened(path) as text:
        names = [name.strip() for name in _cells(path, 1, next(_told(path, text), ""))]
    twice = [name for name in names if names.count(name) > 1]
    unknown = [name for name in names if name not in accepted]
    missing = [name for name in needed if name not in names]
    if twice:
        raise ScanError(f"{path}: column '{twice[0]}' is there twice")
    if unknown:
        raise ScanError(f"{path}: unknown column '{unknown[0][:40]}'; accepted are {', '.join(accepted)}")
    if missing:
        raise ScanError(f"{path}: column '{missing[0]}' is missing")
    return names


def _cells(path: Path, number: int, line: str) -> list[str]:
    try:
        return next(csv.reader([line]), [])
    except csv.Error as error:
        raise ScanError(f"{path}: line {number}: {error}") from None


def _opened(path: Path):
    try:
        return open(path, encoding="utf-8-sig")
    except FileNotFoundError:
        raise ScanError(f"{path}: no such file") from None


def _told(path: Path, lines: Iterator) -> Iterator:
    """The lines, with an error of ours where one is not text."""
    try:
        yield from lines
    except UnicodeDecodeError:
        raise ScanError(f"{path}: not a text file in UTF-8") from None
