"""HTML of a report: page.html with style, script, plotly.js and the data put in."""

import base64
import html
import json
import math
import re
from importlib import resources

import numpy as np

from .contents import Contents, Map

LIMIT = 8_000_000  # bytes of a page; at least one volume is shown, however large
STEPS = 1500  # points of the loss curve


def render(contents: Contents, facts: list[tuple[str, str]], title: str) -> bytes:
    """The page in UTF-8: self-contained, opens from disk. `facts`: names and values for the table at its end.

    Volumes are shown in their order as long as the page stays below LIMIT; scores are of all.
    """
    from plotly.offline import get_plotlyjs

    parts = dict(title=html.escape(title), style=_read("page.css"), plotly=get_plotlyjs(), script=_read("page.js"))
    fixed = sum(len(part.encode()) for part in parts.values()) + 300_000
    # Of each voxel and map two bytes, and one that says whether it is a block voxel; base64 makes 4 bytes of 3.
    volume = (2 * len(contents.maps) + 1) * contents.grid.voxels * 4 // 3 + 400
    shown = max(1, min(len(contents.numbers), (LIMIT - fixed) // volume))
    # Nothing in the data may end the script element.
    parts["data"] = json.dumps(_data(contents, facts, title, shown), allow_nan=False).replace("<", "\\u003c")
    # Nothing is looked for in what was put in.
    text = re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _read("page.html"))
    return text.encode()


def _read(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _data(contents: Contents, facts: list[tuple[str, str]], title: str, shown: int) -> dict:
    grid, materials = contents.grid, contents.materials
    x0 = np.log(materials.x0)
    volumes = [
        dict(number=number, id=identity, muons=muons, background=background)
        for number, identity, muons, background in zip(
            contents.numbers[:shown], contents.volume_id, contents.muons, contents.background
        )
    ]
    return dict(
        title=title,
        grid=dict(shape=grid.shape, origin=grid.origin, size=grid.voxel_size),
        materials=[dict(name=name, x0=value) for name, value in zip(materials.names, materials.x0)],
        colours=_colours(),
        range=[float(x0.min() - 0.15), float(x0.max() + 0.15)],
        volumes=volumes,
        total=len(contents.numbers),
        block=None if contents.block is None else _base64(contents.block[:shown].astype(np.uint8)),
        maps=[_map(each, shown) for each in contents.maps],
        leftOut=contents.left_out,
        loss=_loss(contents.history),
        times=_times(contents),
        peak="Peak memory is that of the process "
        + ("while it predicts." if contents.peak_is_of_prediction else "since its start: the system cannot reset it."),
        facts=facts,
    )


def _colours() -> list[tuple[float, str]]:
    """The colour scale of all pictures, for plotly."""
    import matplotlib
    from matplotlib.colors import to_hex

    from ..plots import COLOURS

    return [(place, to_hex(matplotlib.colormaps[COLOURS](place))) for place in np.linspace(0, 1, 21).round(3).tolist()]


def _map(each: Map, shown: int) -> dict:
    """Values in 16 bits between the least and the largest: 1e-4 of ln X0 at most is lost."""
    values = each.log_x0[:shown]
    low, high = float(values.min()), float(values.max())
    step = (high - low) / 65535 or 1.0
    data = dict(name=each.name, low=low, step=step, data=_base64(np.rint((values - low) / step).astype("<u2")))
    if each.auc is not None:
        data.update(auc=_number(each.auc), aucs=[_number(value) for value in each.auc_volumes[:shown]])
    if each.curve is not None:
        data["curve"] = [np.round(part, 5).tolist() for part in each.curve]
    return data


def _number(value: float) -> float | None:
    return round(float(value), 6) if math.isfinite(value) else None


def _base64(values: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(values).tobytes()).decode()


def _loss(history: dict) -> dict | None:
    """Training loss as means of consecutive steps, and validation; None without a history."""
    loss = np.asarray(history.get("loss", []), np.float64)
    if not len(loss):
        return None
    parts = np.array_split(np.arange(len(loss)), min(STEPS, len(loss)))
    return dict(
        step=[int(part[-1]) + 1 for part in parts],
        loss=[_number(loss[part].mean()) for part in parts],
        window=max(1, min(50, len(parts) // 4)),
        validation=[
            {name: _number(entry[name]) for name in ("step", "loss", "auc") if name in entry}
            for entry in history.get("validation", [])
        ],
    )


def _times(contents: Contents) -> list[tuple[str, str, str]]:
    """Rows of method, time of a volume, peak memory of the process."""
    rows = []
    for each in contents.maps:
        if each.seconds is not None:
            memory = f"{contents.peak_memory / 2**20:,.0f} MiB" if each is contents.maps[-1] else "–"
            rows.append((each.name, f"{1e3 * each.seconds:,.2f} ms", memory))
    return rows
