"""VoxelNet's input from muons: nine columns per voxel and muon, after X0Net.

======  ===========  ==========================================================  ================
column  name         value                                                       unit
======  ===========  ==========================================================  ================
0, 1    dtheta_x, y  \\|theta_in − theta_out\\|, at most 0.3 rad                   10 mrad
2, 3    dx, dy       displacement between the tracks, within ±20 mm              mm
4       pred_x0      log10 of the radiation length, kept within 1e-4 and 1e2 m   log10(m)
5 – 7   dpoca        PoCA (each coordinate kept within −2 and 4 m) − centre      m
8       dpoca_r      length of dpoca                                             m
======  ===========  ==========================================================  ================

Columns 0 to 4 depend on the muon alone, 5 to 8 on the voxel too. The tails are cut because a few PoCAs lie tens of
metres away and radiation lengths reach 1e3 m; the units keep all columns well above the epsilon of the network's norm.
"""

import numpy as np
import torch

from .. import ops

MUON_COLUMNS = (
    "theta_x_in",
    "theta_y_in",
    "theta_x_out",
    "theta_y_out",
    "dx",
    "dy",
    "pred_x0",
    "poca_x",
    "poca_y",
    "poca_z",
)
FEATURES = ("dtheta_x", "dtheta_y", "dx", "dy", "log10_pred_x0", "dpoca_x", "dpoca_y", "dpoca_z", "dpoca_r")

# What is shown of each column, in its unit; beyond, values are cut. dtheta: |theta_in − theta_out|.
LIMITS = {"dtheta": (0.0, 0.3), "dxy": (-0.02, 0.02), "pred_x0": (1e-4, 1e2), "poca": (-2.0, 4.0)}


def cut_counts(muons: np.ndarray) -> dict[str, int]:
    """Number of the muons of which a value is cut, by the names of LIMITS. muons (muons, 10) columns MUON_COLUMNS."""
    beyond = {
        name: ((values < LIMITS[name][0]) | (values > LIMITS[name][1])).any(axis=1)
        for name, values in zip(LIMITS, _parts(muons))
    }
    return {name: int(cut.sum()) for name, cut in beyond.items()}


def _parts(muons: np.ndarray) -> tuple[np.ndarray, ...]:
    """Scattering angles, displacement, radiation length, PoCA."""
    angles_in, angles_out, offset, x0, poca = np.split(muons, (2, 4, 6, 7), axis=1)
    return np.abs(angles_in - angles_out), offset, x0, poca


def muon_features(muons: np.ndarray) -> np.ndarray:
    """(muons, 10) columns MUON_COLUMNS -> (muons, 8) float32: columns 0 to 4 of the input, then PoCA x, y, z, m."""
    angles, offset, x0, poca = (np.clip(part, *limits) for part, limits in zip(_parts(muons), LIMITS.values()))
    return np.concatenate([angles * 100, offset * 1000, np.log10(x0), poca], axis=1).astype(np.float32)


def voxel_features(muons: torch.Tensor, centres: torch.Tensor, nearest: int = 0) -> torch.Tensor:
    """(muons, 8) of `muon_features` and (voxels, 3) centres, m -> (voxels, muons, 9), VoxelNet's input.

    `nearest` > 0: of each voxel only so many muons, those whose PoCA is nearest to its centre, nearest first, or all if
    there are fewer.
    """
    if 0 < nearest < len(muons):
        rows, _ = ops.knn(muons[:, 5:8].contiguous(), nearest, queries=centres)
        seen = muons[rows.long()]
    else:
        seen = muons.expand(len(centres), *muons.shape)
    offset = seen[..., 5:8] - centres[:, None]
    return torch.cat([seen[..., :5], offset, offset.norm(dim=-1, keepdim=True)], dim=-1)


def draw(rng: np.random.Generator, available: int, wanted: int) -> np.ndarray:
    """(wanted) row numbers below `available`: each at most once, or with repetition when there are too few."""
    return rng.choice(available, wanted, replace=available < wanted)


def drawn_muons(scans, index: int, muons: int, seed: int) -> np.ndarray:
    """Muon rows of a volume of `scans`: all for `muons` 0, else as many, drawn by `seed` and its volume_id alone."""
    rows = scans.muons(index)
    if not muons or not len(rows):
        return rows
    return rows[draw(np.random.default_rng([seed, int(scans.volume_id[index])]), len(rows), muons)]
