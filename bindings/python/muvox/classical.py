"""Classical maps of a volume: point of closest approach (PoCA), NumPy only.

A muon of momentum p scattered by θ suggests a density of scattering ∝ (θ·p)² where its two tracks come closest.
"""

import numpy as np

from .data.layout import Grid

COLUMNS = ("total_scatter", "p", "poca_x", "poca_y", "poca_z")


def poca_maps(muons: np.ndarray, grid: Grid) -> tuple[np.ndarray, np.ndarray]:
    """(muons, 5) columns COLUMNS -> two (x, y, z) float64 maps, (rad·GeV)²: PoCA, and PoCA summed over 3×3×3 voxels.

    The value of a voxel is the mean of (θ·p)² over the muons whose PoCA lies in it; for the second map sums and counts
    are first added over the neighbourhood. Voxels without a PoCA get the map's minimum; a map without any is 0.
    """
    muons = muons.astype(np.float64)
    index = np.floor((muons[:, 2:5] - grid.origin) / grid.voxel_size).astype(np.int64)
    inside = ((index >= 0) & (index < grid.shape)).all(axis=1)
    voxel = np.ravel_multi_index(index[inside].T, grid.shape)
    value = (muons[inside, 0] * muons[inside, 1]) ** 2
    total = np.bincount(voxel, value, grid.voxels).reshape(grid.shape)
    count = np.bincount(voxel, minlength=grid.voxels).reshape(grid.shape)
    return _mean(total, count), _mean(_neighbourhood(total), _neighbourhood(count))


def log_score(maps: np.ndarray) -> np.ndarray:
    """Logarithm of a map, for scores and pictures: 0, in a volume without muons, becomes 1e-12."""
    return np.log(np.maximum(maps, 1e-12))


def _mean(total: np.ndarray, count: np.ndarray) -> np.ndarray:
    if not count.any():
        return np.zeros_like(total)
    mean = total / np.maximum(count, 1)
    return np.where(count > 0, mean, mean[count > 0].min())


def _neighbourhood(values: np.ndarray) -> np.ndarray:
    """Sum over each voxel and its up to 26 neighbours, one axis after the other."""
    for axis in range(3):
        padded = np.pad(values, [(int(a == axis),) * 2 for a in range(3)])
        n = values.shape[axis]
        values = sum(padded.take(range(shift, shift + n), axis) for shift in range(3))
    return values
