"""Scan files of simulated volumes, a few volumes at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from ..data import Volume, write_scans
from ..data.materials import commonest
from .layouts import Layout
from .native import SimulationError, simulate_muons
from .source import Detector, Source

ROWS_AT_ONCE, VOXELS_AT_ONCE = 1 << 16, 1 << 22  # of the volumes simulated in one call; a volume is never split


@dataclass(frozen=True)
class Settings:
    """What to simulate. `muons` to record of a volume: (least, most), a number drawn between them for each, or a list
    with one number for each volume. The last `validation` (a share) of the volumes are for validation."""

    volumes: int
    muons: tuple[int, int] | Sequence[int]
    source: Source
    detector: Detector
    validation: float = 0.2
    step: float | None = None  # m; None as in simulate_muons
    log_per_step: bool = False
    seed: int = 7
    threads: int = 0
    splits: np.ndarray | None = field(default=None, compare=False)  # of each volume, in place of `validation`


@dataclass
class Result:
    """How many muons were recorded, and how many crossed the upper panels and the volume for that."""

    volumes: int = 0
    muons: int = 0
    aimed: int = 0


def simulate_volumes(layout: Layout, settings: Settings, result: Result | None = None) -> Iterator[Volume]:
    """Volumes 0, 1, … with muons and truth. Each depends on its number and the settings alone: the first 10 of 1000 are
    those of a run of 10 (but for the split). The next are simulated while one works with what came.

    Memory: muons and truth of the volumes of two calls, about 40 MB, or of two volumes where those are larger.
    """
    result = result or Result()
    with ThreadPoolExecutor(1) as ahead:
        groups = iter(_groups(layout, settings))
        waiting = next(groups, None)
        future = ahead.submit(_simulate, layout, settings, waiting) if waiting else None
        while future:
            volumes, aimed = future.result()
            waiting = next(groups, None)
            future = ahead.submit(_simulate, layout, settings, waiting) if waiting else None
            result.aimed += int(aimed)
            for volume in volumes:
                result.volumes += 1
                result.muons += len(volume.muons)
                yield volume


def _groups(layout: Layout, settings: Settings) -> Iterator[list[tuple[int, int]]]:
    """Volume numbers and muon counts of one call each."""
    group, rows = [], 0
    for index in range(settings.volumes):
        if isinstance(settings.muons, tuple):
            rng = np.random.default_rng([settings.seed, index, 1])
            count = int(rng.integers(settings.muons[0], settings.muons[1] + 1))
        else:
            count = int(settings.muons[index])
        if group and (rows + count > ROWS_AT_ONCE or (len(group) + 1) * layout.grid.voxels > VOXELS_AT_ONCE):
            yield group
            group, rows = [], 0
        group.append((index, count))
        rows += count
    if group:
        yield group


def _simulate(layout: Layout, settings: Settings, group: list[tuple[int, int]]) -> tuple[list[Volume], int]:
    material = [layout.material(index, np.random.default_rng([settings.seed, index, 0])) for index, _ in group]
    x0 = [layout.x0(index, volume) for (index, _), volume in zip(group, material)]
    muons, aimed = simulate_muons(
        layout.grid,
        np.stack(x0),
        [count for _, count in group],
        ids=[index for index, _ in group],
        source=settings.source,
        detector=settings.detector,
        step=settings.step,
        log_per_step=settings.log_per_step,
        seed=settings.seed,
        threads=settings.threads,
    )
    volumes, first = [], 0
    training = settings.volumes - round(settings.validation * settings.volumes)
    for (index, count), volume, lengths in zip(group, material, x0):
        split = int(index >= training) if settings.splits is None else int(settings.splits[index])
        volumes.append(Volume(muons[first : first + count], index, split, lengths, volume, commonest(volume)))
        first += count
    return volumes, int(aimed.sum())


def simulate(path, layout: Layout, settings: Settings, report: Callable[[int], None] = lambda done: None) -> Result:
    """Writes a scan file (muvox.data) of simulated volumes; `report` is told how many are done.

    Memory does not grow with the number of volumes. Raises SimulationError, and OSError if the file cannot be written;
    `path` appears only when all are there.
    """
    if settings.volumes < 1 or not 0 <= settings.validation <= 1:
        raise SimulationError(
            f"{settings.volumes} volumes, {settings.validation:g} of them for validation: expected 1 or more, 0 to 1"
        )
    result = Result()
    with contextlib.closing(simulate_volumes(layout, settings, result)) as volumes:  # also when writing fails

        def told() -> Iterator[Volume]:
            for volume in volumes:
                yield volume
                report(result.volumes)

        write_scans(path, told(), layout.grid, layout.materials, compression=4)
    return result
