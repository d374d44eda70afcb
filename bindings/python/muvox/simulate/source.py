"""Where muons come from and what records them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..data import Grid

MUON_MASS = 0.1056583755  # GeV
ENERGIES, ANGLES = (0.5, 500.0), (0.0, np.radians(70))  # of the sea-level flux: GeV, rad


@dataclass(frozen=True)
class Source:
    """Momenta and directions as quantiles: `momentum` (K), GeV, at probabilities 0 … 1, and `zenith` (K, T), rad, the
    quantiles of the zenith angle at each of those momenta; between them both are linear."""

    momentum: np.ndarray
    zenith: np.ndarray

    @classmethod
    def spectrum(cls) -> Source:
        """Cosmic muons at sea level, through a horizontal area, 0.5 to 500 GeV and up to 70° from the vertical."""
        energy = np.geomspace(*ENERGIES, 4001)
        angle = np.linspace(*ANGLES, 281)
        centre = (angle[1:] + angle[:-1]) / 2
        weight = flux(energy[:, None], centre) * np.sin(centre) * np.cos(centre)
        momentum = np.sqrt(energy**2 - MUON_MASS**2)
        chosen = _quantiles(energy, _integral(energy, weight.sum(1)), 1025)
        return cls(np.interp(chosen, energy, momentum), _zenith(chosen))

    @classmethod
    def of_momentum(cls, momentum) -> Source:
        """One momentum, or as many as are to be drawn from, GeV; the zenith angles of the sea-level flux at them."""
        p = np.quantile(np.atleast_1d(np.asarray(momentum, float)), np.linspace(0, 1, 1025))
        p = p[:1] if p[0] == p[-1] else p
        return cls(p, _zenith(np.sqrt(p**2 + MUON_MASS**2)))

    @classmethod
    def beam(cls, momentum: float, zenith: float = 0.0) -> Source:
        """One momentum, GeV, and one zenith angle, rad."""
        return cls(np.array([momentum]), np.array([[zenith]]))


def flux(energy, zenith) -> np.ndarray:
    """Muons of an energy, GeV, at sea level per area, solid angle, time and energy, 1 / (cm² sr s GeV): Gaisser's
    formula as modified by Guan and others (arXiv:1509.06176) for low energies and the curvature of the Earth."""
    p1, p2, p3, p4, p5 = 0.102573, -0.068287, 0.958633, 0.0407253, 0.817285
    c = np.cos(zenith)
    c = np.sqrt((c**2 + p1**2 + p2 * c**p3 + p4 * c**p5) / (1 + p1**2 + p2 + p4))
    pions, kaons = 1 / (1 + 1.1 * energy * c / 115), 0.054 / (1 + 1.1 * energy * c / 850)
    return 0.14 * (energy * (1 + 3.64 / (energy * c**1.29))) ** -2.7 * (pions + kaons)


def _integral(at: np.ndarray, density: np.ndarray) -> np.ndarray:
    """From the first place on, by trapezia."""
    return np.concatenate([[0], np.cumsum((density[1:] + density[:-1]) / 2 * np.diff(at))])


def _quantiles(at: np.ndarray, integral: np.ndarray, count: int) -> np.ndarray:
    return np.interp(np.linspace(0, integral[-1], count), integral, at)


def _zenith(energy: np.ndarray) -> np.ndarray:
    """(energies, 257) quantiles of the angle of muons through a horizontal area."""
    angle = np.linspace(*ANGLES, 1401)
    density = flux(energy[:, None], angle) * np.sin(angle) * np.cos(angle)
    return np.stack([_quantiles(angle, _integral(angle, row), 257) for row in density])


@dataclass(frozen=True)
class Detector:
    """Panels at heights `z`, m, two or more above and below the volume, all over the rectangle `x` × `y`, m; a hit is
    off by `resolution`, m, in x and y (standard deviation), and there with probability `efficiency`."""

    z: tuple[float, ...]
    x: tuple[float, float]
    y: tuple[float, float]
    resolution: float = 1e-4
    efficiency: float = 1.0

    @classmethod
    def around(
        cls,
        grid: Grid,
        panels: int = 4,
        gap: float = 0.05,
        spacing: float = 0.1,
        margin: float = 0.3,
        resolution: float = 1e-4,
        efficiency: float = 1.0,
    ) -> Detector:
        """`panels` on each side, the first `gap` from the volume, the others `spacing` apart; they reach `margin` beyond."""
        low = np.array(grid.origin)
        high = low + np.array(grid.shape) * grid.voxel_size
        far = gap + spacing * np.arange(panels)
        return cls(
            tuple(map(float, [*(high[2] + far[::-1]), *(low[2] - far)])),
            *((float(a - margin), float(b + margin)) for a, b in zip(low[:2], high[:2])),
            resolution,
            efficiency,
        )
