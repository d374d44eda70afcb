"""Reading scan files, one volume at a time."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import h5py
import numpy as np

from .layout import FORMAT, REQUIRED, SPLITS, VERSION, Grid, Materials, ScanError, Volume

CACHE_BYTES = 64 << 20  # decompressed chunks kept by HDF5, per dataset


class Scans:
    """A scan file, opened for reading (the layout is in `muvox.data`).

    The file's structure is checked on opening; muons and truth stay on disk and are read, and checked, one volume at a
    time. `columns` are the muon columns to read, in that order; None takes all there are; `cache_bytes` of decompressed
    data are kept per dataset. It can be used in forked processes and sent to others: each opens the file for itself.

    Attributes: `grid`, `materials` (None without truth), `columns`, `units`, `row_splits`, `volume_id`, `split`.
    Raises ScanError for a file that is missing, truncated, foreign or inconsistent.
    """

    def __init__(self, path, columns: Iterable[str] | None = None, cache_bytes: int = CACHE_BYTES):
        self.path, self._cache_bytes = Path(path), cache_bytes
        self._file, self._process = self._open(), os.getpid()
        self._data = {}  # open datasets: HDF5 drops its cache of decompressed chunks with the last handle
        try:
            self._read_header()
            self._select(columns)
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self.volume_id)

    def __enter__(self) -> "Scans":
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def __getstate__(self) -> dict:
        return dict(self.__dict__, _file=None, _process=None, _data=dict.fromkeys(self._data))

    @property
    def has_truth(self) -> bool:
        return self.materials is not None

    def count(self, index: int) -> int:
        """Number of muons of a volume."""
        return int(self.row_splits[index + 1] - self.row_splits[index])

    def of_split(self, split: str) -> np.ndarray:
        """Numbers of the volumes for "training" or "validation"."""
        return np.flatnonzero(self.split == SPLITS.index(split))

    def numbers(self, volumes: Iterable[int] | None = None) -> list[int]:
        """The given numbers of volumes, or all. Raises ScanError for one that is not there."""
        chosen = list(range(len(self)) if volumes is None else volumes)
        for index in chosen:
            if not 0 <= index < len(self):
                raise self._error(f"no volume {index}, there are {len(self)}")
        return chosen

    def muons(self, index: int) -> np.ndarray:
        """(muons, columns) float32 of one volume. Raises ScanError for a value that is not finite."""
        rows = slice(int(self.row_splits[index]), int(self.row_splits[index + 1]))
        muons = self._read("muons", rows)[:, self._selected]
        bad = np.argwhere(~np.isfinite(muons))
        if len(bad):
            row, column = bad[0]
            raise self._error(f"volume {index}: muon {row} has a non-finite {self.columns[column]}")
        return muons

    def material(self, index: int) -> np.ndarray:
        """(x, y, z) uint8 true material of every voxel. Raises ScanError for one that the file does not list."""
        material = self._read("material", index)
        if material.max() >= len(self.materials.names):
            raise self._error(
                f"volume {index}: material {material.max()} is not among the {len(self.materials.names)} listed"
            )
        return material

    def log_x0(self, index: int) -> np.ndarray:
        """(x, y, z) float32 ln of the true radiation length, m. Raises ScanError unless it is positive and finite."""
        x0 = self._read("x0", index)
        if not (np.isfinite(x0).all() and (x0 > 0).all()):
            raise self._error(f"volume {index}: a radiation length is not positive and finite")
        return np.log(x0).astype(np.float32)

    def volume(self, index: int) -> Volume:
        """Muons and, if known, truth of one volume."""
        truth = {}
        if self.has_truth:
            truth = dict(
                x0=self._read("x0", index), material=self.material(index), background=int(self.background[index])
            )
        return Volume(self.muons(index), int(self.volume_id[index]), int(self.split[index]), **truth)

    def volumes(self, indices: Iterable[int] | None = None, split: str | None = None) -> Iterator[Volume]:
        """The given volumes, those of a split, or all, one after the other."""
        if indices is None:
            indices = range(len(self)) if split is None else self.of_split(split)
        return (self.volume(int(index)) for index in indices)

    def _error(self, reason: str) -> ScanError:
        return ScanError(f"{self.path}: {reason}")

    def _open(self) -> h5py.File:
        if not self.path.exists():
            raise self._error("no such file")
        if not self.path.is_file():
            raise self._error("not a file")
        try:
            return h5py.File(self.path, "r", rdcc_nbytes=self._cache_bytes, rdcc_nslots=10007)
        except PermissionError:
            raise self._error("permission denied") from None
        except OSError as error:
            reason = "truncated HDF5 file" if "truncated" in str(error) else "not an HDF5 file"
            raise self._error(reason) from None

    def _read(self, name: str, where) -> np.ndarray:
        if self._process != os.getpid():  # HDF5's state does not survive a fork
            self._file, self._process = self._open(), os.getpid()
            self._data = {known: self._file[known] for known in self._data}
        try:
            return self._data[name][where]
        except OSError:
            raise self._error(f"'{name}' cannot be read, the file is damaged") from None

    def _dataset(self, name: str, kind: str, shape: tuple) -> h5py.Dataset:
        """A dataset after a check of its dtype kind and shape (None = any length)."""
        try:
            data = self._file.get(name)
        except (OSError, RuntimeError, KeyError):
            raise self._error(f"'{name}' cannot be read, the file is damaged") from None
        if not isinstance(data, h5py.Dataset):
            raise self._error(f"dataset '{name}' is missing")
        same = len(data.shape) == len(shape) and all(want in (None, have) for have, want in zip(data.shape, shape))
        if data.dtype.kind not in kind or not same:
            want = "(" + ", ".join("any" if n is None else str(n) for n in shape) + ")"
            raise self._error(f"dataset '{name}' is {data.dtype} {data.shape}, expected {_kinds(kind)} {want}")
        self._data[name] = data
        return data

    def _attribute(self, owner, name: str, size: int | None = None) -> np.ndarray:
        if name not in owner.attrs:
            raise self._error(f"attribute '{name}' of '{owner.name}' is missing")
        value = np.atleast_1d(owner.attrs[name])
        if size is not None and value.shape != (size,):
            raise self._error(f"attribute '{name}' of '{owner.name}' has shape {value.shape}, expected ({size},)")
        return value

    def _names(self, owner, name: str, size: int | None = None) -> tuple[str, ...]:
        return tuple(x.decode() if isinstance(x, bytes) else str(x) for x in self._attribute(owner, name, size))

    def _read_header(self) -> None:
        if "format" not in self._file.attrs or self._names(self._file, "format") != (FORMAT,):
            raise self._error(f"not a muon scan (attribute 'format' is not '{FORMAT}')")
        version = self._attribute(self._file, "version", 1)[0]
        if version != VERSION:
            raise self._error(f"version {version} of the format, this muvox reads version {VERSION}")
        shape, origin, size = (
            self._attribute(self._file, name, 3) for name in ("grid_shape", "grid_origin", "voxel_size")
        )
        if not (
            np.issubdtype(shape.dtype, np.integer)
            and (shape > 0).all()
            and np.isfinite(origin).all()
            and np.isfinite(size).all()
            and (size > 0).all()
        ):
            raise self._error(f"bad grid: shape {shape}, origin {origin}, voxel size {size}")
        self.grid = Grid(tuple(map(int, shape)), tuple(map(float, origin)), tuple(map(float, size)))
        self._read_muon_header()
        self.volume_id = self._dataset("volume_id", "iu", (self._count,))[:]
        self.split = self._dataset("split", "iu", (self._count,))[:]
        if self._count and not np.isin(self.split, (0, 1)).all():
            raise self._error("'split' has values other than 0 (training) and 1 (validation)")
        self._read_truth_header()

    def _read_muon_header(self) -> None:
        muons = self._dataset("muons", "f", (None, None))
        self.columns = self._names(muons, "columns", muons.shape[1])
        self.units = self._names(muons, "units", muons.shape[1])
        splits = self._dataset("row_splits", "iu", (None,))[:].astype(np.int64)
        if len(splits) == 0 or splits[0] != 0 or splits[-1] != len(muons) or (np.diff(splits) < 0).any():
            raise self._error(f"'row_splits' must rise from 0 to the number of muons, {len(muons)}")
        self.row_splits, self._count = splits, len(splits) - 1

    def _read_truth_header(self) -> None:
        there = [name for name in ("x0", "material", "background") if name in self._file]
        self.materials = None
        if not there:
            return
        self._dataset("x0", "f", (self._count, *self.grid.shape))
        material = self._dataset("material", "u", (self._count, *self.grid.shape))
        self.background = self._dataset("background", "u", (self._count,))[:]
        names = self._names(material, "names")
        x0 = self._attribute(material, "x0", len(names)).astype(float)
        if not (np.isfinite(x0).all() and (x0 > 0).all()):
            raise self._error(f"the radiation lengths of the materials must be positive: {x0}")
        self.materials = Materials(names, tuple(map(float, x0)))

    def _select(self, columns: Iterable[str] | None) -> None:
        for name in REQUIRED if columns is None else (columns := tuple(columns)):
            if name not in self.columns:
                raise self._error(f"muon column '{name}' is missing")
        if columns is None:
            self._selected = slice(None)
            return
        self._selected = [self.columns.index(name) for name in columns]
        self.units = tuple(self.units[i] for i in self._selected)
        self.columns = columns


def _kinds(kind: str) -> str:
    return {"f": "floating point", "u": "unsigned integer", "iu": "integer"}[kind]
