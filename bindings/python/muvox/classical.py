"""Classical maps of a volume, NumPy only: point of closest approach (PoCA) and angle statistics (ASR).

A muon of momentum p scattered by θ suggests a density of scattering ∝ (θ·p)² where its two tracks come closest.
"""

import numpy as np

from .data.layout import Grid

COLUMNS = ("total_scatter", "p", "poca_x", "poca_y", "poca_z")
ASR_COLUMNS = ("total_scatter", "p", "x_in", "y_in", "x_out", "y_out")


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


def asr_maps(muons: np.ndarray, grid: Grid, quantile: float = 0.75) -> tuple[np.ndarray, np.ndarray]:
    """(muons, 6) columns ASR_COLUMNS -> two (x, y, z) float64 maps, rad·GeV: angle statistics reconstruction (ASR).

    The values of a voxel are the quantile and the mean of θ·p over the muons whose straight line from entry to exit
    crosses it (the quantile of n muons is number ⌊quantile · (n − 1)⌋ in order). Voxels that none crosses get the map's
    minimum; a map without any crossing is 0. Time and memory grow with muons × (nx + ny + nz).
    """
    muons = muons.astype(np.float64)
    value = muons[:, 0] * muons[:, 1]
    crossed, voxel = _crossings(muons[:, 2:4], muons[:, 4:6], grid)
    count = np.bincount(voxel, minlength=grid.voxels)
    total = np.bincount(voxel, value[crossed], grid.voxels)
    ranked = value[crossed][np.lexsort((value[crossed], voxel))]
    chosen = np.cumsum(count) - count + np.floor(quantile * np.maximum(count - 1, 0)).astype(np.int64)
    chosen = ranked[np.minimum(chosen, len(ranked) - 1)] if len(ranked) else total
    # _mean with counts of 1 fills what no muon crosses.
    maps = _mean(np.where(count > 0, chosen, 0), np.minimum(count, 1)), _mean(total, count)
    return maps[0].reshape(grid.shape), maps[1].reshape(grid.shape)


def _crossings(entry: np.ndarray, exit: np.ndarray, grid: Grid) -> tuple[np.ndarray, np.ndarray]:
    """Which muon crosses which voxel: two arrays of numbers. entry, exit (muons, 2): x, y at the top and bottom, m."""
    low = np.asarray(grid.origin, np.float64)
    size, shape = np.asarray(grid.voxel_size, np.float64), np.asarray(grid.shape)
    ends = low + shape * size
    start = np.column_stack([entry, np.full(len(entry), ends[2])])
    way = np.column_stack([exit, np.full(len(exit), low[2])]) - start
    # Where, in 0..1 of its way, the line passes the planes between voxels; between two of these it is in one voxel.
    passes = [np.zeros((len(start), 1)), np.ones((len(start), 1))]
    for axis in range(3):
        planes = low[axis] + np.arange(shape[axis] + 1) * size[axis]
        with np.errstate(divide="ignore", invalid="ignore"):
            passes.append((planes - start[:, axis, None]) / way[:, axis, None])
    at = np.sort(np.clip(np.nan_to_num(np.concatenate(passes, axis=1), posinf=1, neginf=0), 0, 1), axis=1)
    middle, inside = (at[:, 1:] + at[:, :-1]) / 2, at[:, 1:] - at[:, :-1] > 1e-9
    index = np.floor((start[:, None] + middle[..., None] * way[:, None] - low) / size).astype(np.int64)
    inside &= ((index >= 0) & (index < shape)).all(axis=2)
    return np.nonzero(inside)[0], np.ravel_multi_index(index[inside].T, grid.shape)
