"""How far two scan files of the same volumes differ: Kolmogorov distances of what muons do in each material."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from rich import box
from rich.table import Table

from ..data import ScanError, Scans

QUANTITIES = ("total_scatter", "poca_x", "poca_y", "poca_z", "dx", "dy")
FEWEST = 50  # muons of a row of the table, in both files


@dataclass
class Row:
    """Muons of both files whose PoCA lies in a material, as background or as block: (muons, 6) QUANTITIES of each, and
    the Kolmogorov distances."""

    material: str
    block: bool
    reference: np.ndarray
    simulated: np.ndarray
    distances: np.ndarray

    @property
    def chance(self) -> float:
        """Distance that two samples of one distribution pass in 1 of 100 cases."""
        n, m = len(self.reference), len(self.simulated)
        return 1.628 * np.sqrt((n + m) / (n * m))

    @property
    def name(self) -> str:
        return f"{self.material}, {'block' if self.block else 'background'}"


def kolmogorov(a: np.ndarray, b: np.ndarray) -> float:
    """Largest difference between the cumulative distributions of two samples."""
    both = np.concatenate([a, b])
    shares = [np.searchsorted(np.sort(sample), both, side="right") / len(sample) for sample in (a, b)]
    return float(np.abs(shares[0] - shares[1]).max())


def compare(reference, simulated) -> list[Row]:
    """One row for each material, as background and as block, in which both files have 50 PoCAs or more. If one file has
    more volumes than the other, those beyond are left out.

    Takes 24 bytes for each muon in memory. Raises ScanError if a file has no truth or the grids or materials differ.
    """
    with Scans(reference, QUANTITIES) as first, Scans(simulated, QUANTITIES) as second:
        for scans in (first, second):
            if not scans.has_truth:
                raise ScanError(f"{scans.path}: no truth (x0, material, background), cannot compare by material")
        if first.grid != second.grid or first.materials.names != second.materials.names:
            raise ScanError(f"{simulated}: another grid or other materials than {reference}")
        volumes = range(min(len(first), len(second)))
        parts = [_by_material(scans, volumes) for scans in (first, second)]
        names = first.materials.names
    rows = []
    for key in sorted(parts[0].keys() & parts[1].keys()):
        a, b = (part[key] for part in parts)
        if min(len(a), len(b)) >= FEWEST:
            distances = np.array([kolmogorov(a[:, c], b[:, c]) for c in range(len(QUANTITIES))])
            rows.append(Row(names[key[1]], key[0], a, b, distances))
    return rows


def _by_material(scans: Scans, volumes: range) -> dict[tuple[bool, int], np.ndarray]:
    found: dict = {}
    for volume in scans.volumes(volumes):
        place = np.floor((volume.muons[:, 1:4] - scans.grid.origin) / scans.grid.voxel_size)
        inside = ((place >= 0) & (place < scans.grid.shape)).all(1)
        material = volume.material[tuple(place[inside].astype(int).T)]
        for number in np.unique(material):
            key = bool(number != volume.background), int(number)
            found.setdefault(key, []).append(volume.muons[inside][material == number])
    return {key: np.concatenate(parts) for key, parts in found.items()}


def table(rows: list[Row], reference) -> Table:
    """For the terminal; distances beyond chance are bold."""
    shown = Table(
        title=f"Kolmogorov distances to {reference}, by the material at the PoCA",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for name in ("material", "as", "muons", "θ ratio", "θ", "PoCA x", "PoCA y", "PoCA z", "dx", "dy", "chance"):
        shown.add_column(name, justify="left" if name in ("material", "as") else "right", no_wrap=True)
    for row in rows:
        ratio = np.median(row.simulated[:, 0]) / np.median(row.reference[:, 0])
        distances = [f"[bold]{d:.3f}*[/bold]" if d > row.chance else f"{d:.3f} " for d in row.distances]
        kind = "block" if row.block else "rest"
        shown.add_row(row.material, kind, f"{len(row.reference):,}", f"{ratio:.3f}", *distances, f"{row.chance:.3f}")
    shown.caption = "θ: scattering angle, ratio of the medians; *: beyond what chance does in 1 of 100 cases"
    return shown
