"""What the volumes hold: materials and where they lie."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from ..data import Grid, Materials
from ..data.materials import MOST_MATERIALS, RADIATION_LENGTHS, materials_of
from ..errors import UserError
from .native import SimulationError

@dataclass(frozen=True)
class Box:
    """A material between two corners, m: it fills the voxels whose centre lies within."""

    material: int
    low: tuple[float, ...]
    high: tuple[float, ...]

    @classmethod
    def read(cls, text: str, materials: Materials) -> Box:
        """MATERIAL:X,Y,Z:X,Y,Z."""
        try:
            name, low, high = text.split(":")
            corners = [tuple(float(x) for x in corner.split(",")) for corner in (low, high)]
        except ValueError:
            corners = []
        if list(map(len, corners)) != [3, 3] or not (np.isfinite(corners).all() and np.less(*corners).all()):
            raise SimulationError(f"box '{text}', expected MATERIAL:X,Y,Z:X,Y,Z, its lower and its higher corner in m")
        if name not in materials.names:
            raise SimulationError(f"box '{text}': '{name}' is not among the materials {', '.join(materials.names)}")
        return cls(materials.names.index(name), *corners)


class Layout:
    """Volumes by number: `material(index, rng)` gives (x, y, z) uint8 of one; `materials` lists them, `x0` may give
    radiation lengths that are no material's."""

    def __init__(self, grid: Grid, materials: Materials):
        self.grid, self.materials = grid, materials

    def material(self, index: int, rng: np.random.Generator) -> np.ndarray:
        raise NotImplementedError

    def x0(self, index: int, material: np.ndarray) -> np.ndarray:
        """(x, y, z) float32, m."""
        return np.take(np.float32(self.materials.x0), material)


class RandomBoxes(Layout):
    """One to four boxes of other materials in a background, a fifth to two fifths of the volume's sides."""

    def __init__(self, grid: Grid, materials: Materials, background: Sequence[int]):
        super().__init__(grid, materials)
        self.background = background

    def material(self, index, rng):
        sides, ground = np.array(self.grid.shape), rng.choice(self.background)
        volume = np.full(sides, ground, np.uint8)
        others = [m for m in range(len(self.materials.names)) if m != ground]
        for _ in range(rng.integers(1, 5) if others else 0):
            side = rng.integers(np.maximum(1, np.round(0.2 * sides)), np.maximum(1, np.round(0.4 * sides)) + 1)
            first = rng.integers(0, sides - side.astype(int) + 1)
            volume[tuple(slice(int(a), int(a + b)) for a, b in zip(first, side))] = rng.choice(others)
        return volume


class RandomBlock(Layout):
    """One block of a denser material, up to half of each side (rounded up), in a background of any of the others."""

    def material(self, index, rng):
        order = np.argsort(self.materials.x0)[::-1]  # light ones first
        if len(order) < 2:
            raise SimulationError("a block needs two materials, one is given")
        light, dense = np.sort(rng.choice(len(order), 2, replace=False))
        sides = np.array(self.grid.shape)
        volume = np.full(sides, order[light], np.uint8)
        side = rng.integers(1, (sides + 1) // 2 + 1)
        first = rng.integers(0, sides - side + 1)
        volume[tuple(slice(int(a), int(a + b)) for a, b in zip(first, side))] = order[dense]
        return volume


class GivenBoxes(Layout):
    """The same boxes in every volume, later ones over earlier ones, in a background drawn for each."""

    def __init__(self, grid: Grid, materials: Materials, background: Sequence[int], boxes: Sequence[Box]):
        super().__init__(grid, materials)
        self.background, self.boxes = background, []
        centres = grid.centres().reshape(*grid.shape, 3).astype(float)
        for box in boxes:
            inside = ((centres > box.low) & (centres < box.high)).all(-1)
            if not inside.any():
                raise SimulationError(f"the box from {box.low} to {box.high} m holds no centre of a voxel of {grid}")
            self.boxes.append((inside, box.material))

    def material(self, index, rng):
        volume = np.full(self.grid.shape, rng.choice(self.background), np.uint8)
        for inside, material in self.boxes:
            volume[inside] = material
        return volume


class Maps(Layout):
    """Volumes from a file; after the last comes the first again."""

    def __init__(self, grid: Grid, materials: Materials, volumes, x0):
        super().__init__(grid, materials)
        self.volumes, self._x0 = volumes, x0

    def __len__(self) -> int:
        return len(self.volumes)

    def material(self, index, rng):
        return self.volumes[index % len(self)]

    def x0(self, index, material):
        return super().x0(index, material) if self._x0 is None else np.float32(self._x0[index % len(self)])


def read_maps(path, materials: Materials, voxel_size, origin) -> Maps:
    """Maps of a NumPy file (.npy, .npz) or an HDF5 file (.h5), a scan file for instance.

    Array `x0`, radiation lengths in m, or `material`, names or numbers (`material_names`, `material_x0`, or attributes
    `names` and `x0`, list what the numbers mean; else `materials`); (x, y, z) or (volumes, x, y, z). `voxel_size` and
    `grid_origin` in the file count where the arguments are None. Radiation lengths of no listed material become
    materials of their own, or from 257 different ones on go to the nearest listed.
    Raises SimulationError.
    """
    arrays = _arrays(Path(path))
    if "material_names" in arrays:
        names, lengths = map(str, arrays["material_names"]), arrays.get("material_x0")
        known = RADIATION_LENGTHS | dict(zip(materials.names, materials.x0))
        if lengths is not None:
            known = {name: float(length) for name, length in zip(arrays["material_names"], lengths)}
        materials = materials_of([f"{name}={known[name]!r}" if name in known else name for name in names])
    if "x0" not in arrays and "material" not in arrays:
        raise SimulationError(f"{path}: neither an array 'x0' nor an array 'material'")
    volumes = np.asarray(arrays["material" if "material" in arrays else "x0"])
    if volumes.ndim not in (3, 4) or not volumes.size:
        raise SimulationError(f"{path}: a map of shape {volumes.shape}, expected (x, y, z) or (volumes, x, y, z)")
    volumes = volumes.reshape(-1, *volumes.shape[-3:])
    x0 = None
    if "x0" in arrays:
        x0 = np.asarray(arrays["x0"]).reshape(-1, *np.shape(arrays["x0"])[-3:])
        if x0.dtype.kind not in "fiu" or x0.shape != volumes.shape or not ((x0 > 0).all() and np.isfinite(x0).all()):
            raise SimulationError(f"{path}: x0 must hold a finite radiation length above 0 m for every voxel")
    try:
        if "material" not in arrays:
            volumes, materials = _classes(x0, materials)
        elif volumes.dtype.kind in "USO":
            volumes, materials = _named(volumes, materials)
        elif volumes.dtype.kind not in "iu" or volumes.min() < 0 or volumes.max() >= len(materials.names):
            raise SimulationError(f"material must hold names, or numbers from 0 to {len(materials.names) - 1}")
    except UserError as error:
        raise SimulationError(f"{path}: {error}") from None
    grid = Grid(
        tuple(map(int, volumes.shape[1:])),
        tuple(map(float, arrays.get("grid_origin", (0, 0, 0.4)) if origin is None else origin)),
        tuple(map(float, arrays.get("voxel_size", (0.1, 0.1, 0.1)) if voxel_size is None else voxel_size)),
    )
    return Maps(grid, materials, volumes.astype(np.uint8), x0)


def _classes(x0: np.ndarray, materials: Materials) -> tuple[np.ndarray, Materials]:
    """Materials for radiation lengths: listed ones within 0.1 %, others by their value."""
    values, place = np.unique(x0, return_inverse=True)
    listed = np.log(materials.x0)
    nearest = np.abs(np.log(values)[:, None] - listed).argmin(1)
    known = np.abs(np.log(values) - listed[nearest]) < 1e-3
    if len(values) - known.sum() + len(listed) <= MOST_MATERIALS:
        own = [f"{value:.6g} m={float(value)!r}" for value in values[~known]]
        nearest[~known] = len(listed) + np.arange(len(own))
        materials = materials_of([*(f"{n}={x!r}" for n, x in zip(materials.names, materials.x0)), *own])
    return nearest[place].reshape(x0.shape), materials


def _named(volumes: np.ndarray, materials: Materials) -> tuple[np.ndarray, Materials]:
    names, place = np.unique(volumes.astype(str), return_inverse=True)
    missing = [name for name in names if name not in materials.names]
    materials = materials_of([*(f"{n}={x!r}" for n, x in zip(materials.names, materials.x0)), *missing])
    numbers = np.array([materials.names.index(name) for name in names])
    return numbers[place].reshape(volumes.shape), materials


def _arrays(path: Path) -> dict:
    """The arrays of a map file by name."""
    wanted = ("x0", "material", "material_names", "material_x0", "grid_origin", "voxel_size")
    try:
        if path.suffix in (".npy", ".npz"):
            data = np.load(path, allow_pickle=False)
            if isinstance(data, np.ndarray):
                return {"material" if data.dtype.kind in "US" else "x0": data}
            with data:
                return {name: data[name] for name in wanted if name in data.files}
        with h5py.File(path, "r") as file:
            found = {n: file[n].asstr()[()] if file[n].dtype.kind == "O" else file[n][()] for n in wanted if n in file}
            found |= {n: file.attrs[n] for n in ("grid_origin", "voxel_size") if n in file.attrs}
            attributes = file["material"].attrs if "material" in file else {}
            found |= {f"material_{n}": attributes[n] for n in ("names", "x0") if n in attributes}
            return found
    except FileNotFoundError:
        raise SimulationError(f"{path}: no such file") from None
    except (OSError, ValueError, EOFError, TypeError, AttributeError, zipfile.BadZipFile):
        raise SimulationError(f"{path}: not a NumPy (.npy, .npz) or HDF5 file that can be read") from None
