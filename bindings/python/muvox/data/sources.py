"""What files of others hold, put together to the volumes of a scan file, one after the other."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import UserError
from .layout import REQUIRED, Grid, Materials, ScanError, Volume
from .materials import RADIATION_LENGTHS, classes, commonest

VALIDATION = 0.2
# Numbers of volumes, rising, each with its muons (muons, columns) or its truth (x, y, z).
Numbered = Iterable[tuple[int, np.ndarray]]


@dataclass(frozen=True)
class Given:
    """What is said beside the file: see `convert`."""

    volumes: list[int] | None = None
    truth: Path | None = None
    grid: Grid | None = None
    materials: Materials | None = None
    validation: float | None = None

    def wants(self, number: int) -> bool:
        return self.volumes is None or number in self._set

    @functools.cached_property
    def _set(self) -> frozenset[int]:
        return frozenset(self.volumes)


@dataclass(frozen=True)
class Source:
    """What `write_scans` takes."""

    volumes: Iterable[Volume]
    grid: Grid
    materials: Materials | None
    columns: Mapping[str, str]


def need_grid(source, given: Given) -> Grid:
    if given.grid is None:
        raise ScanError(f"{source}: does not say where its voxels are: give a grid (--shape, --voxel, --origin)")
    return given.grid


def need_columns(source, names: Iterable[str]) -> None:
    for name in REQUIRED:
        if name not in names:
            raise ScanError(f"{source}: muon column '{name}' is missing")


def combine(
    source, columns: Mapping[str, str], muons: Numbered, truth: Callable[[], Numbered] | None, given: Given
) -> Source:
    """Muons and, where there is any, truth of the same volumes: radiation lengths, m, or numbers of `given.materials`.

    The truth is read twice: at once for its materials, and later with the muons, from which volumes may be missing
    that have none. Raises ScanError, now or when the volumes are read.
    """
    muons = _wanted(muons, given)
    if truth is None:
        if (given.materials, given.validation) != (None, None):
            raise ScanError(f"{source}: materials and validation volumes are of a scan with truth; here is none")
        return Source((Volume(rows, number) for number, rows in muons), given.grid, None, columns)
    numbers, materials = _survey(source, truth(), given)
    training = len(numbers) - round((VALIDATION if given.validation is None else given.validation) * len(numbers))

    def volumes() -> Iterator[Volume]:
        empty = np.empty((0, len(columns)), np.float32)
        number, rows = next(muons, (None, None))
        for place, (index, values) in enumerate(_wanted(truth(), given)):
            if number is not None and number < index:
                break
            x0, material = _lengths_and_numbers(values, materials)
            here = rows if number == index else empty
            yield Volume(here, index, int(place >= training), x0, material, commonest(material))
            if number == index:
                number, rows = next(muons, (None, None))
        if number is not None:
            raise ScanError(f"{given.truth or source}: no truth of volume {number}, which has muons")

    return Source(volumes(), given.grid, materials, columns)


def _wanted(values: Numbered, given: Given) -> Iterator[tuple[int, np.ndarray]]:
    return ((number, value) for number, value in values if given.wants(number))


def _survey(source, truth: Numbered, given: Given) -> tuple[list[int], Materials]:
    """Numbers of the volumes that are wanted, and the materials: those given, or the known ones that occur."""
    known = Materials(tuple(RADIATION_LENGTHS), tuple(RADIATION_LENGTHS.values()))
    numbers, met = [], set()
    for number, values in _wanted(truth, given):
        try:
            if values.dtype.kind in "iu" and given.materials is None:
                raise UserError("numbers of materials: say by --materials which these are")
            met.update(np.unique(_lengths_and_numbers(values, given.materials or known)[1]).tolist())
        except UserError as error:
            raise ScanError(f"{given.truth or source}: volume {number}: {error}") from None
        numbers.append(number)
    chosen = [place for place in range(len(known.names)) if place in met]
    found = Materials(tuple(known.names[p] for p in chosen), tuple(known.x0[p] for p in chosen))
    return numbers, given.materials or found


def _lengths_and_numbers(values: np.ndarray, materials: Materials) -> tuple[np.ndarray, np.ndarray]:
    """Radiation lengths, float32, and materials, uint8, of voxels of which either is given."""
    if values.dtype.kind not in "iu":
        return values.astype(np.float32), classes(values, materials)
    if values.min() < 0 or values.max() >= len(materials.names):
        wrong = values.min() if values.min() < 0 else values.max()
        raise UserError(f"material {wrong}, expected 0 to {len(materials.names) - 1}")
    return np.take(np.float32(materials.x0), values), values.astype(np.uint8)
