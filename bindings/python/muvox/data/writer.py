"""Writing scan files."""

from collections.abc import Iterable, Mapping

import h5py
import numpy as np

from ..files import atomic_write, held_signals
from .layout import COLUMNS, FORMAT, VERSION, Grid, Materials, Volume

ROWS_PER_CHUNK = 16384  # of one column: equal columns side by side compress best
VOLUMES_PER_CHUNK = 64  # at most, and of one block that is written at once
ROWS_PER_BLOCK, VOXELS_PER_CHUNK = 1 << 18, 1 << 22  # at most, unless a volume alone has more


def write_scans(
    path,
    volumes: Iterable[Volume],
    grid: Grid,
    materials: Materials | None = None,
    columns: Mapping[str, str] = COLUMNS,
    compression: int = 6,
) -> None:
    """Writes volumes to a scan file; they are taken one by one, and `path` appears only when all are written.

    `columns` gives name and unit of the muon columns. With `materials` every volume must have its truth, without them
    none is written. Raises ValueError for a volume that does not fit, OSError if the file cannot be written.

    >>> grid = Grid(shape=(10, 10, 6), origin=(0.0, 0.0, 0.4), voxel_size=(0.1, 0.1, 0.1))
    >>> write_scans("scans.h5", (Volume(tracks(day), volume_id=day) for day in range(7)), grid)  # tracks: (muons, 18)
    """
    with held_signals() as deliver, atomic_write(path) as raw, h5py.File(raw, "w", libver="v110") as file:
        file.attrs.update(
            format=FORMAT,
            version=VERSION,
            grid_shape=np.array(grid.shape, np.int64),
            grid_origin=np.array(grid.origin, float),
            voxel_size=np.array(grid.voxel_size, float),
        )
        _create(file, grid, materials, columns, compression)
        block: list[Volume] = []
        rows = 0
        for volume in volumes:
            _check(volume, len(file["volume_id"]) + len(block), grid, materials, columns)
            block.append(volume)
            rows += len(volume.muons)
            if len(block) == _volumes_per_chunk(grid) or rows >= ROWS_PER_BLOCK:
                _append(file, block)
                block.clear()
                rows = 0
            deliver()
            if raw.error:
                raise raw.error
        _append(file, block)


def _volumes_per_chunk(grid: Grid) -> int:
    return max(1, min(VOLUMES_PER_CHUNK, VOXELS_PER_CHUNK // grid.voxels))


def _create(file: h5py.File, grid: Grid, materials: Materials | None, columns: Mapping[str, str], level: int) -> None:
    def create(name, shape, dtype, chunk):
        return file.create_dataset(
            name,
            (0, *shape),
            dtype,
            maxshape=(None, *shape),
            chunks=chunk,
            shuffle=True,
            compression="gzip",
            compression_opts=level,
        )

    muons = create("muons", (len(columns),), np.float32, (ROWS_PER_CHUNK, 1))
    muons.attrs.update(columns=list(columns.keys()), units=list(columns.values()))
    create("row_splits", (), np.int64, (1024,)).resize(1, 0)
    create("volume_id", (), np.int64, (1024,))
    create("split", (), np.uint8, (1024,))
    if materials is None:
        return
    chunk = (_volumes_per_chunk(grid), *grid.shape)
    create("x0", grid.shape, np.float32, chunk).attrs["units"] = "m"
    create("material", grid.shape, np.uint8, chunk).attrs.update(names=list(materials.names), x0=np.array(materials.x0))
    create("background", (), np.uint8, (1024,))


def _check(volume: Volume, number: int, grid: Grid, materials: Materials | None, columns: Mapping[str, str]) -> None:
    if volume.muons.ndim != 2 or volume.muons.shape[1] != len(columns):
        raise ValueError(f"volume {number}: muons have shape {volume.muons.shape}, expected (muons, {len(columns)})")
    if not np.isfinite(volume.muons).all():
        raise ValueError(f"volume {number}: muons are not all finite")
    if materials is None:
        return
    if volume.x0 is None or volume.material is None or volume.background is None:
        raise ValueError(f"volume {number} has no truth")
    if volume.x0.shape != grid.shape or volume.material.shape != grid.shape:
        raise ValueError(f"volume {number}: truth has shape {volume.x0.shape}, the grid {grid.shape}")


def _append(file: h5py.File, block: list[Volume]) -> None:
    def extend(name, rows):
        data = file[name]
        data.resize(len(data) + len(rows), 0)
        data[len(data) - len(rows) :] = rows

    if not block:
        return
    first = len(file["muons"])
    extend("muons", np.concatenate([volume.muons for volume in block]))
    extend("row_splits", first + np.cumsum([len(volume.muons) for volume in block]))
    extend("volume_id", np.array([volume.volume_id for volume in block]))
    extend("split", np.array([volume.split for volume in block]))
    if "x0" in file:
        extend("x0", np.stack([volume.x0 for volume in block]))
        extend("material", np.stack([volume.material for volume in block]))
        extend("background", np.array([volume.background for volume in block]))
