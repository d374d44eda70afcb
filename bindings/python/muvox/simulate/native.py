"""The C simulation, `include/muvox/simulate.h`, for NumPy arrays."""

import ctypes
from collections.abc import Sequence

import numpy as np

from .. import _library
from ..data import COLUMNS, Grid
from ..errors import UserError
from .source import Detector, Source

LOG_PER_STEP = 1
F32, F64, I64 = 2, 3, 6  # muvox_dtype


class SimulationError(UserError):
    """A scan that cannot be simulated; the message says what came and what is accepted."""


class _Matrix(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int),
        *((name, ctypes.c_int64) for name in ("rows", "cols", "row_stride", "set_stride")),
    ]


class _Sets(ctypes.Structure):
    _fields_ = [("splits", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("count", "rows", "size"))]


class _Context(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        *((name, ctypes.c_void_p) for name in ("alloc", "free", "user")),
        *((name, ctypes.c_int) for name in ("threads", "simd", "device")),
        ("stream", ctypes.c_void_p),
        ("message", ctypes.c_char * 256),
    ]


class _Simulate(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("sets", _Sets),
        ("shape", ctypes.c_int64 * 3),
        ("origin", ctypes.c_double * 3),
        ("voxel_size", ctypes.c_double * 3),
        ("x0", _Matrix),
        ("ids", ctypes.c_void_p),
        ("seed", ctypes.c_uint64),
        ("options", ctypes.c_uint),
        ("step", ctypes.c_double),
        ("momentum", _Matrix),
        ("zenith", _Matrix),
        ("panels", _Matrix),
        ("panel_x", ctypes.c_double * 2),
        ("panel_y", ctypes.c_double * 2),
        ("resolution", ctypes.c_double),
        ("efficiency", ctypes.c_double),
        ("out", _Matrix),
        ("aimed", _Matrix),
    ]


_KINDS = {np.dtype(np.float32): F32, np.dtype(np.float64): F64, np.dtype(np.int64): I64}


def _matrix(array: np.ndarray) -> _Matrix:
    rows, cols = array.shape
    return _Matrix(array.ctypes.data, _KINDS[array.dtype], rows, cols, cols, 0)


def simulate_muons(
    grid: Grid,
    x0: np.ndarray,
    muons: Sequence[int],
    *,
    ids: Sequence[int] | None = None,
    source: Source | None = None,
    detector: Detector | None = None,
    step: float | None = None,
    log_per_step: bool = False,
    seed: int = 0,
    threads: int = 0,
    dtype=np.float32,
) -> tuple[np.ndarray, np.ndarray]:
    """Muons recorded behind volumes of known radiation lengths: (muons in all, 18) and (volumes) int64 how many crossed
    the upper panels and the volume until as many were recorded. `include/muvox/simulate.h` has the physics and columns.

    x0 (volumes, x, y, z), m, inf for a void, or (x, y, z) for all volumes; `muons` of each volume to record; `ids`
    (0, 1, …) choose each volume's random numbers; `dtype` is float32 or float64. `step`, m, is the longest, by default
    the shortest edge of a voxel, or 0.01 with `log_per_step`. The result depends on nothing but the
    arguments other than `threads` (0 = all). Raises SimulationError. Time: about 0.15 µs for every step of a muon.
    """
    counts = np.asarray(muons, np.int64)
    shape, volumes = tuple(grid.shape), len(counts)
    maps = np.ascontiguousarray(x0, np.float32)
    if counts.ndim != 1 or (counts < 0).any():
        raise SimulationError(f"muons is {muons}, expected a list of how many to record of each volume, 0 or more")
    if maps.shape not in (shape, (volumes, *shape)):
        expected = f"expected {shape} or {(volumes, *shape)}"
        raise SimulationError(f"x0 has shape {maps.shape} for {volumes} volumes, {expected}")
    shared = maps.ndim == 3
    maps = maps.reshape(-1, grid.voxels)
    source, detector = source or Source.spectrum(), detector or Detector.around(grid)
    splits = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    numbers = np.arange(volumes, dtype=np.int64) if ids is None else np.array(ids, np.int64)
    if numbers.shape != (volumes,):
        raise SimulationError(f"ids has shape {numbers.shape}, expected ({volumes},)")
    rows = int(splits[-1])
    out, aimed = np.empty((rows, len(COLUMNS)), dtype), np.zeros((volumes, 1), np.int64)
    panels = np.array(detector.z, float).reshape(-1, 1)
    arrays = np.array(source.momentum, float).reshape(-1, 1), np.atleast_2d(np.array(source.zenith, float))
    call = _Simulate(
        struct_size=ctypes.sizeof(_Simulate),
        sets=_Sets(splits.ctypes.data, volumes, rows, 0),
        shape=shape,
        origin=tuple(grid.origin),
        voxel_size=tuple(grid.voxel_size),
        x0=_matrix(maps),
        ids=numbers.ctypes.data,
        seed=seed,
        options=LOG_PER_STEP if log_per_step else 0,
        step=step or (0.01 if log_per_step else min(grid.voxel_size)),
        momentum=_matrix(arrays[0]),
        zenith=_matrix(arrays[1]),
        panels=_matrix(panels),
        panel_x=tuple(detector.x),
        panel_y=tuple(detector.y),
        resolution=detector.resolution,
        efficiency=detector.efficiency,
        out=_matrix(out),
        aimed=_matrix(aimed),
    )
    if shared:
        call.x0.rows, call.x0.row_stride = volumes, 0
    context = _Context(struct_size=ctypes.sizeof(_Context), threads=threads)
    if _library.simulate_scans(ctypes.byref(context), ctypes.byref(call)):
        raise SimulationError(context.message.decode().removeprefix("simulate: "))
    return out, aimed[:, 0]
