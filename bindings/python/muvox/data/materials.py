"""Materials by name and by radiation length."""

from collections.abc import Sequence

import numpy as np

from ..errors import UserError
from .layout import Materials

# Radiation lengths, m (PDG, Atomic and nuclear properties of materials; silica is quartz glass).
RADIATION_LENGTHS = {
    "air": 303.9,
    "water": 0.3608,
    "beryllium": 0.3528,
    "graphite": 0.1932,
    "silica": 0.1229,
    "concrete": 0.1155,
    "silicon": 0.0937,
    "aluminium": 0.08897,
    "steel": 0.01782,
    "iron": 0.01757,
    "copper": 0.01436,
    "lead": 0.005612,
    "tungsten": 0.003504,
    "uranium": 0.003166,
}
MOST_MATERIALS = 256  # a byte each
TOLERANCE = 0.01  # between tables of radiation lengths: 0.8 % for uranium


def materials_of(names: Sequence[str]) -> Materials:
    """Materials by name, or as NAME=X0 with a radiation length in m of one's own. Raises UserError."""
    chosen: dict[str, float] = {}
    for word in names:
        name, given, value = word.partition("=")
        try:
            x0 = float(value) if given else RADIATION_LENGTHS[name]
        except KeyError:
            known = ", ".join(RADIATION_LENGTHS)
            raise UserError(f"no material '{name}'; known are {known}; others as NAME=X0 in m") from None
        except ValueError:
            x0 = np.nan
        if not (np.isfinite(x0) and x0 > 0 and name):
            raise UserError(f"material '{word}', expected NAME=X0 with a radiation length above 0 m")
        if name in chosen:
            raise UserError(f"material '{name}' is named twice")
        chosen[name] = x0
    if not 1 <= len(chosen) <= MOST_MATERIALS:
        raise UserError(f"{len(chosen)} materials, expected 1 to {MOST_MATERIALS}")
    return Materials(tuple(chosen), tuple(chosen.values()))


def classes(x0: np.ndarray, materials: Materials) -> np.ndarray:
    """Numbers of the materials that have these radiation lengths, m, within TOLERANCE; uint8, same shape.

    Raises UserError for a length that none has.
    """
    if not (np.isfinite(x0).all() and (x0 > 0).all()):
        raise UserError("a radiation length is not positive and finite")
    lengths = np.asarray(materials.x0)
    values, place = np.unique(x0, return_inverse=True)
    distance = np.abs(np.log(values[:, None] / lengths))
    if (far := distance.min(1) > TOLERANCE).any():
        known = ", ".join(f"{name} {length:g}" for name, length in zip(materials.names, materials.x0))
        raise UserError(f"no material has a radiation length of {values[far][0]:g} m; there are {known}")
    return distance.argmin(1)[place].reshape(x0.shape).astype(np.uint8)


def commonest(material: np.ndarray) -> int:
    """The background of a volume: the material of most of its voxels, the lowest number of several."""
    return int(np.bincount(material.ravel()).argmax())
