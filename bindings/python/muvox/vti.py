"""Volumes for ParaView: VTK image data, one .vti file a volume, written by PyEVTK."""

import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from .data import Grid
from .files import atomic_write


def write_vti(path, grid: Grid, cells: Mapping[str, np.ndarray]) -> None:
    """Writes arrays over the voxels of a grid, each (x, y, z), as cell data. Raises OSError; no partial file is left.

    Coordinates are metres.
    """
    from pyevtk.hl import imageToVTK

    path = Path(path)
    try:
        with atomic_write(path) as file, tempfile.TemporaryDirectory() as folder:
            # PyEVTK writes to a path of its own choice of ending, and not atomically.
            made = imageToVTK(
                str(Path(folder, "volume")),
                origin=grid.origin,
                spacing=grid.voxel_size,
                cellData={name: np.asfortranarray(values) for name, values in cells.items()},
            )
            file.write(Path(made).read_bytes())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
