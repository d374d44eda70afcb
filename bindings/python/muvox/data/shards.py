"""Several scan files as one: a folder of them is what a large simulation leaves."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from .layout import ScanError
from .scans import CACHE_BYTES, Scans


class Shards(Scans):
    """Scan files with the same grid, materials and columns, read as one file that holds their volumes in order.

    `path` is what messages name. Raises ScanError for what `Scans` refuses, for no file, and for one that differs.
    """

    def __init__(self, path, files: Sequence, columns: Iterable[str] | None = None):
        self.path, columns = Path(path), None if columns is None else tuple(columns)
        if not files:
            raise self._error("no scan files (*.h5)")
        self._parts: list[Scans] = []
        try:
            for file in files:
                self._parts.append(Scans(file, columns, cache_bytes=max(CACHE_BYTES // len(files), 2 << 20)))
                self._compare(self._parts[0], self._parts[-1])
        except BaseException:
            self.close()
            raise
        first = self._parts[0]
        self.grid, self.materials, self.columns, self.units = first.grid, first.materials, first.columns, first.units
        names = ("volume_id", "split", *(("background",) if first.has_truth else ()))
        for name in names:
            setattr(self, name, np.concatenate([getattr(part, name) for part in self._parts]))
        counts = np.concatenate([np.diff(part.row_splits) for part in self._parts])
        self.row_splits = np.concatenate([[0], np.cumsum(counts)])
        self._ends = np.cumsum([len(part) for part in self._parts])

    def close(self) -> None:
        for part in self._parts:
            part.close()

    def __getstate__(self) -> dict:
        return self.__dict__

    def muons(self, index: int) -> np.ndarray:
        part, index = self._place(index)
        return part.muons(index)

    def _read(self, name: str, index: int) -> np.ndarray:
        part, index = self._place(index)
        return part._read(name, index)

    def _place(self, index: int) -> tuple[Scans, int]:
        """The file of a volume, and its number there."""
        part = int(np.searchsorted(self._ends, index, side="right"))
        return self._parts[part], int(index) - (int(self._ends[part - 1]) if part else 0)

    @staticmethod
    def _compare(first: Scans, other: Scans) -> None:
        for name in ("grid", "materials", "columns"):
            if getattr(first, name) != getattr(other, name):
                raise ScanError(f"{other.path}: other {name} than {first.path}; the files of a folder must agree")


def open_scans(path, columns: Iterable[str] | None = None) -> Scans:
    """A scan file, or all scan files (*.h5) of a folder in the order of their names; see `Scans`."""
    path = Path(path)
    return Shards(path, sorted(path.glob("*.h5")), columns) if path.is_dir() else Scans(path, columns)
