"""Pictures of simulated scans and of how they compare."""

from __future__ import annotations

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

from ..data import Scans  # noqa: E402
from .compare import Row  # noqa: E402

DPI = 90
PARTS = (
    ("total_scatter", 0, "scattering angle, rad"),
    ("PoCA", 3, "height of the PoCA, m"),
    ("dx", 4, "displacement dx, mm"),
)


def scan(file, path) -> None:
    """The first volume with muons: a cut through its materials, its PoCAs, the angles and momenta, as PNG."""
    columns = ("poca_x", "poca_y", "poca_z", "total_scatter", "p")
    with Scans(path, columns) as scans:
        index = int(np.argmax(np.diff(scans.row_splits) > 0))
        volume, grid = scans.volume(index), scans.grid
    low = np.array(grid.origin)
    high = low + np.array(grid.shape) * grid.voxel_size
    block = volume.material != volume.background
    cut = int(block.sum((0, 2)).argmax())
    y = low[1] + np.array([cut, cut + 1]) * grid.voxel_size[1]
    figure, axes = plt.subplots(1, 4, figsize=(17, 4), dpi=DPI, layout="constrained")
    edges = [low[a] + np.arange(grid.shape[a] + 1) * grid.voxel_size[a] for a in (0, 2)]
    shown = axes[0].pcolormesh(
        *edges, np.log10(volume.x0[:, cut].T), cmap="magma", edgecolors=(1, 1, 1, 0.2), linewidth=0.3
    )
    figure.colorbar(shown, ax=axes[0], label="log10 X₀/m")
    axes[0].set(title=f"volume {volume.volume_id}: truth, y = {y[0]:.2g} to {y[1]:.2g} m")
    x, _, z, angle, p = volume.muons.T
    near = (volume.muons[:, 1] >= y[0]) & (volume.muons[:, 1] < y[1])
    dots = axes[1].scatter(
        x[near], z[near], c=np.log10(np.maximum(angle * p, 1e-4)[near]), s=9, cmap="viridis", linewidths=0
    )
    figure.colorbar(dots, ax=axes[1], label="log10 θp/(rad GeV)")
    axes[1].set(title=f"{near.sum()} PoCAs with y in the same slice")
    for ax in axes[:2]:
        ax.set(xlim=(low[0], high[0]), ylim=(low[2], high[2]), xlabel="x, m", ylabel="z, m", aspect="equal")
    for ax, values, label in ((axes[2], angle, "scattering angle, rad"), (axes[3], p, "momentum, GeV")):
        values = values[values > 0]
        bins = np.geomspace(values.min() * 0.99, values.max() * 1.01, 50)
        ax.hist(values, bins, color="C0")
        ax.set(xscale="log", xlabel=label, ylabel="muons", title=f"{len(values):,} muons")
        ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, format="png")
    plt.close(figure)


def comparison(file, rows: list[Row], reference: str) -> None:
    """Cumulative distributions of both files, and their distances, as PNG."""
    figure, axes = plt.subplots(2, 2, figsize=(13, 9), dpi=DPI, layout="constrained")
    colours = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(row.material for row in rows))}
    for ax, (name, column, label) in zip(axes.flat, PARTS):
        scale = 1e3 if name == "dx" else 1
        for row in rows:
            for sample, style in ((row.reference, "-"), (row.simulated, "--")):
                values = np.sort(sample[:, column]) * scale
                ax.plot(
                    values,
                    np.linspace(0, 1, len(values)),
                    style,
                    color=colours[row.material],
                    linewidth=1.6 if row.block else 0.8,
                    label=row.name if style == "-" else None,
                )
        ax.set(xlabel=label, ylabel="share of the muons below")
        ax.spines[["top", "right"]].set_visible(False)
        if name == "total_scatter":
            ax.set(xscale="log", title=f"lines: {reference}; dashes: simulated; thick: blocks")
            ax.legend(frameon=False, fontsize=7)
        if name == "dx":
            ax.set(xlim=(-12, 12))
    ax = axes.flat[3]
    places = np.arange(len(rows))
    for offset, (name, column, _) in enumerate(PARTS):
        ax.barh(places + 0.25 * (offset - 1), [row.distances[column] for row in rows], 0.23, label=name)
    ax.plot([row.chance for row in rows], places, "k|", markersize=16, label="chance, 1 %")
    ax.set_yticks(places, [row.name for row in rows], fontsize=8)
    ax.invert_yaxis()
    ax.set(xlabel="Kolmogorov distance")
    ax.legend(frameon=False, fontsize=8)
    figure.savefig(file, format="png")
    plt.close(figure)
