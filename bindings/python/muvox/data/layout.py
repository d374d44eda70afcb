"""What a scan file holds: column names, the grid, the materials, one volume."""

from dataclasses import dataclass

import numpy as np

from ..errors import UserError

FORMAT = "muvox-scans"
VERSION = 1
SPLITS = ("training", "validation")

# The muon columns muvox knows, with their units. Those X0Net reads must be there, the others are needed for maps only.
COLUMNS = {
    "pred_x0": "m",
    "dtheta": "rad",
    "dphi": "rad",
    "total_scatter": "rad",
    "theta_x_in": "rad",
    "theta_y_in": "rad",
    "theta_x_out": "rad",
    "theta_y_out": "rad",
    "x_in": "m",
    "y_in": "m",
    "x_out": "m",
    "y_out": "m",
    "poca_x": "m",
    "poca_y": "m",
    "poca_z": "m",
    "dx": "m",
    "dy": "m",
    "p": "GeV",
}
REQUIRED = (
    "pred_x0",
    "theta_x_in",
    "theta_y_in",
    "theta_x_out",
    "theta_y_out",
    "poca_x",
    "poca_y",
    "poca_z",
    "dx",
    "dy",
)


class ScanError(UserError):
    """A scan file that cannot be used; the message names the file and what is wrong with it."""


@dataclass(frozen=True)
class Grid:
    """Voxels of a volume: `shape` (x, y, z), corner `origin` and `voxel_size`, m."""

    shape: tuple[int, int, int]
    origin: tuple[float, float, float]
    voxel_size: tuple[float, float, float]

    @property
    def voxels(self) -> int:
        return int(np.prod(self.shape))

    def centres(self) -> np.ndarray:
        """(voxels, 3) float32, m: origin + (index + ½) · size, in the order of a raveled (x, y, z) array."""
        index = np.indices(self.shape).reshape(3, -1).T
        return (np.asarray(self.origin) + (index + 0.5) * np.asarray(self.voxel_size)).astype(np.float32)

    def part(self, first: tuple[int, int, int], shape: tuple[int, int, int]) -> "Grid":
        """The voxels from index `first` on."""
        origin = tuple(float(o + i * size) for o, i, size in zip(self.origin, first, self.voxel_size))
        return Grid(shape, origin, self.voxel_size)

    def boxes(self, shape: tuple[int, ...]) -> np.ndarray:
        """(boxes, voxels of one) int64 numbers of voxels in as few boxes of a shape as hold all; they may overlap."""
        numbers = np.arange(self.voxels).reshape(self.shape)
        every = np.lib.stride_tricks.sliding_window_view(numbers, shape)
        starts = [sorted({*range(0, side - n, n), side - n}) for side, n in zip(self.shape, shape)]
        return every[np.ix_(*starts)].reshape(-1, int(np.prod(shape)))

    def __str__(self) -> str:
        size = " × ".join(f"{edge:g}" for edge in self.voxel_size)
        return f"{' × '.join(map(str, self.shape))} voxels of {size} m from {tuple(map(float, self.origin))}"


@dataclass(frozen=True)
class Materials:
    """Material classes: `names` and radiation lengths `x0`, m."""

    names: tuple[str, ...]
    x0: tuple[float, ...]


@dataclass
class Volume:
    """One volume. Truth (`x0`, `material`: shape of the grid; `background`) is None in a scan of the unknown."""

    muons: np.ndarray  # (muons, columns) float32
    volume_id: int
    split: int = 0
    x0: np.ndarray | None = None
    material: np.ndarray | None = None
    background: int | None = None
