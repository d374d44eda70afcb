"""Pictures of volumes and of training."""

from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.cm import ScalarMappable  # noqa: E402
from matplotlib.collections import LineCollection  # noqa: E402
from matplotlib.colors import Normalize  # noqa: E402

from .data import Grid, Materials  # noqa: E402

COLOURS = "magma"  # dense is dark
DPI = 200


@dataclass
class Example:
    """A volume to show: `maps` of ln X0 (X0 in m), one per method, and the voxels of the blocks, all (x, y, z)."""

    title: str
    maps: Sequence[np.ndarray]
    block: np.ndarray


def slices(file, examples: Sequence[Example], methods: Sequence[str], grid: Grid, materials: Materials) -> None:
    """One row per volume, one group of columns per method, in it all horizontal slices from the bottom up, as PNG.

    All share one colour scale of log X0; the true outline of the blocks is drawn over every map.
    """
    levels, sides = grid.shape[2], np.array(grid.shape[:2]) * grid.voxel_size[:2]
    tile = 0.92
    width, height = tile * levels * len(methods) + 2.6, tile * sides[1] / sides[0] * len(examples) + 1.1
    figure = plt.figure(figsize=(width, height), dpi=DPI)
    outer = figure.add_gridspec(
        1,
        len(methods),
        wspace=0.05,
        left=1.35 / width,
        right=1 - 1.25 / width,
        bottom=0.35 / height,
        top=1 - 0.66 / height,
    )
    x0 = np.log(materials.x0)
    scale = Normalize(x0.min() - 0.15, x0.max() + 0.15)
    for group, method in enumerate(methods):
        inner = outer[group].subgridspec(len(examples), levels, wspace=0.06, hspace=0.06)
        axes = inner.subplots(squeeze=False)
        box = outer[group].get_position(figure)
        figure.text((box.x0 + box.x1) / 2, 1 - 0.24 / height, method, ha="center", va="center", size=12, weight="bold")
        for example, row in zip(examples, axes):
            for level, ax in enumerate(row):
                _tile(ax, example.maps[group][..., level], example.block[..., level], grid, scale)
        for level, ax in enumerate(axes[0]):
            ax.set_title(f"z = {grid.origin[2] + (level + 0.5) * grid.voxel_size[2]:.2f} m", size=7, pad=3)
        if group == 0:
            for example, row in zip(examples, axes):
                row[0].set_ylabel(example.title, rotation=0, ha="right", va="center", size=8.5, labelpad=6)
    bar = figure.add_axes((1 - 1.1 / width, 0.35 / height, 0.16 / width, 1 - 1.01 / height))
    colours = figure.colorbar(ScalarMappable(scale, COLOURS), cax=bar)
    colours.set_ticks(
        x0, labels=[f"{name}\n{100 * value:.3g} cm" for name, value in zip(materials.names, materials.x0)]
    )
    colours.ax.tick_params(labelsize=7)
    colours.ax.set_title("X₀", size=9)
    figure.text(
        0.5,
        0.12 / height,
        f"tiles are {sides[0]:g} m × {sides[1]:g} m, seen from above; colour: radiation length "
        "on a log scale; cyan: true outline of the block",
        ha="center",
        va="center",
        size=7.5,
        color="0.3",
    )
    figure.savefig(file, format="png")
    plt.close(figure)


def _tile(ax, values: np.ndarray, block: np.ndarray, grid: Grid, scale: Normalize) -> None:
    """One slice (x, y), x to the right and y upwards."""
    xs, ys = (grid.origin[a] + np.arange(grid.shape[a] + 1) * grid.voxel_size[a] for a in (0, 1))
    ax.pcolormesh(xs, ys, values.T, norm=scale, cmap=COLOURS, edgecolors=(1, 1, 1, 0.25), linewidth=0.4)
    ax.add_collection(LineCollection(_outline(block, xs, ys), colors="#00e5ff", linewidths=1.1))
    ax.set(aspect="equal", xticks=[], yticks=[], xlim=(xs[0], xs[-1]), ylim=(ys[0], ys[-1]))
    for spine in ax.spines.values():
        spine.set_color("0.5")


def _outline(block: np.ndarray, xs: np.ndarray, ys: np.ndarray) -> list:
    """Edges between a block voxel and another, or the border, as line segments."""
    lines = []
    padded = np.pad(block, 1)
    for i, j in np.argwhere(padded[1:, 1:-1] != padded[:-1, 1:-1]):
        lines.append([(xs[i], ys[j]), (xs[i], ys[j + 1])])
    for i, j in np.argwhere(padded[1:-1, 1:] != padded[1:-1, :-1]):
        lines.append([(xs[i], ys[j]), (xs[i + 1], ys[j])])
    return lines


def loss_curve(file, loss: Sequence[float], validation: Sequence[dict], auc_poca: float) -> None:
    """Training loss with its running mean, validation loss and block AUC over the steps, as PNG."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), dpi=DPI, layout="constrained")
    steps, window = np.arange(1, len(loss) + 1), max(1, min(50, len(loss) // 4))
    mean = np.convolve(loss, np.full(window, 1 / window), "valid")
    left.plot(steps, loss, color="0.8", linewidth=0.6, label="training: drawn muons, step by step")
    left.plot(steps[window - 1 :], mean, color="C0", label=f"training: mean of {window} steps")
    left.set(xlabel="step", ylabel="weighted negative log-likelihood", ylim=(0, np.percentile(loss, 98)))
    right.axhline(auc_poca, color="C1", linestyle="--", label="PoCA map")
    if validation:
        at = [entry["step"] for entry in validation]
        style = dict(marker="o", markersize=4, color="C3")
        left.plot(at, [entry["loss"] for entry in validation], label="validation: whole volumes, all muons", **style)
        right.plot(at, [entry["auc"] for entry in validation], label="VoxelNet", **style)
    right.set(xlabel="step", ylabel="ROC AUC of block voxels, validation")
    for ax in (left, right):
        ax.legend(frameon=False, fontsize=8)
        ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, format="png")
    plt.close(figure)


def evaluation_picture(file, result) -> None:
    """ROC curves of all methods of an `evaluation.Evaluation`, and the confusion of the first, as PNG."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.8), dpi=DPI, layout="constrained")
    for number, method in enumerate(result.results):
        false, true = method.curve
        label = f"{method.name} (AUC {method.scores['auc_block']:.3f})"
        left.plot(false, true, color=f"C{number}", linewidth=2.2 if number == 0 else 1.1, label=label)
    left.plot([0, 1], [0, 1], color="0.7", linestyle=":", linewidth=1)
    left.set(
        xlabel="background voxels taken for blocks",
        ylabel="block voxels found",
        xlim=(0, 1),
        ylim=(0, 1),
        title=f"ROC of block voxels, {result.volumes} volumes",
    )
    left.legend(frameon=False, fontsize=8, loc="lower right")
    left.spines[["top", "right"]].set_visible(False)
    confusion = result.results[0].confusion
    share = confusion / np.maximum(confusion.sum(axis=1, keepdims=True), 1)
    image = right.imshow(share, vmin=0, vmax=1, cmap="Blues")
    places = range(len(result.materials))
    for row in places:
        for column in places:
            value = share[row, column]
            right.text(column, row, f"{value:.2f}", ha="center", va="center", color="w" if value > 0.5 else "k", size=9)
    right.set_xticks(places, result.materials, rotation=30, ha="right")
    right.set_yticks(places, [f"{m}\n{n:,}" for m, n in zip(result.materials, confusion.sum(axis=1))])
    right.set(xlabel="taken for", ylabel="true material, voxels", title=f"{result.results[0].name}: share of each material")
    figure.colorbar(image, ax=right, shrink=0.8)
    figure.savefig(file, format="png")
    plt.close(figure)
