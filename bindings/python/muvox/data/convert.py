"""Scan files from NumPy archives with the same arrays (`muons`, `row_splits`, `x0`, …)."""

import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .layout import Grid, Materials, ScanError, Volume
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


def convert(source, target, volumes: Sequence[int] | None = None, compression: int = 6) -> int:
    """Writes the given volumes (None = all) of an .npz archive to a scan file and returns their number.

    `volume_id` becomes the number in the archive. Raises ScanError for an archive that cannot be used and OSError if
    `target` cannot be written.
    """
    data = _load(Path(source))
    splits = data["row_splits"]
    chosen = range(len(splits) - 1) if volumes is None else list(volumes)
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
    try:
        write_scans(target, map(volume, chosen), grid, materials, columns, compression)
    except (ValueError, IndexError, TypeError) as error:
        raise ScanError(f"{source}: {error}") from None
    return len(chosen)


def _load(source: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(source, allow_pickle=False) as archive:
            if not hasattr(archive, "files"):
                raise ValueError
            missing = [name for name in ARRAYS if name not in archive.files]
            if missing:
                raise ScanError(f"{source}: array '{missing[0]}' is missing")
            return {name: archive[name] for name in ARRAYS}
    except FileNotFoundError:
        raise ScanError(f"{source}: no such file") from None
    except ScanError:
        raise
    except (ValueError, EOFError, OSError, zipfile.BadZipFile, TypeError, AttributeError):
        raise ScanError(f"{source}: not a NumPy archive (.npz)") from None
