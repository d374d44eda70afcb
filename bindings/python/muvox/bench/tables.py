"""Measured rows as a table for the terminal, for the README, and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from rich.table import Table

from .cases import Case
from .measure import Measured

DTYPES = {"float": "float32", "half": "float16", "bfloat16": "bfloat16", "double": "float64"}
# Columns of words, and of figures.
WORDS = ("op", "sets × rows", "options", "dtype", "direction")
FIGURES = ("muvox ms", "fastest peer", "peer ms", "ratio", "target ms", "target ratio", "muvox MiB", "peer MiB",
           "target MiB")


@dataclass
class Row:
    """A case as measured. `ratio` is muvox's time to that of the fastest peer: below 1 is faster. Targets hold for the
    dtype that they were set for."""

    case: Case
    dtype: str
    muvox: Measured
    peers: dict[str, Measured]

    @property
    def fastest(self) -> str | None:
        timed = {name: peer.ms for name, peer in self.peers.items() if peer.ms is not None}
        return min(timed, key=timed.get) if timed else None

    @property
    def ratio(self) -> float | None:
        return self.muvox.ms / self.peers[self.fastest].ms if self.fastest else None

    @property
    def targets(self) -> tuple[float | None, float | None, float | None]:
        """Milliseconds, ratio to the fastest peer, MiB."""
        target = self.case.target
        if str(self.case.dtype) != f"torch.{DTYPES[self.dtype]}" and not target.ratio:
            return None, None, None
        return target.ms, target.ratio_to(self.fastest), target.mib

    def cells(self) -> list[str]:
        case, peer = self.case, self.peers.get(self.fastest, Measured())
        ms, ratio, mib = self.targets
        return [case.op, case.size, case.options, self.dtype, case.direction, three_figures(self.muvox.ms),
                self.fastest or "; ".join(f"{name}: {peer.problem}" for name, peer in self.peers.items()),
                three_figures(peer.ms), three_figures(self.ratio), plain(ms), three_figures(ratio),
                memory(self.muvox.mib), memory(peer.mib), plain(mib)]

    def record(self) -> dict:
        """For JSON: every peer, and why one has no time."""
        case, (ms, ratio, mib) = self.case, self.targets
        return {
            "op": case.op, "size": case.size, "options": case.options, "dtype": self.dtype,
            "direction": case.direction, "muvox": asdict(self.muvox),
            "peers": {name: asdict(peer) for name, peer in self.peers.items()}, "fastest": self.fastest,
            "ratio": self.ratio, "target": {"ms": ms, "ratio": ratio, "mib": mib},
        }


def three_figures(value: float | None) -> str:
    """Three figures, at most three decimals."""
    if value is None:
        return ""
    size = abs(value)
    return f"{value:.{0 if size >= 99.95 else 1 if size >= 9.995 else 2 if size >= 0.9995 else 3}f}"


def memory(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def plain(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def cells(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """Heads and lines of the table, without the columns that no row fills."""
    heads, lines = [*WORDS, *FIGURES], [row.cells() for row in rows]
    filled = [place for place in range(len(heads)) if any(line[place] for line in lines)]
    return [heads[place] for place in filled], [[line[place] for place in filled] for line in lines]


def numeric(head: str) -> bool:
    return head in FIGURES and head != "fastest peer"


def failures(rows: list[Row]) -> list[str]:
    """One line for each peer's problem, and where it had it."""
    told: dict[str, list[str]] = {}
    for row in rows:
        for name, peer in row.peers.items():
            if peer.problem:
                told.setdefault(f"{name}: {peer.problem}", []).append(
                    f"{row.case.op} {row.case.size}, {row.case.options}, {row.case.direction}")
    return [f"{problem} ({'; '.join(where)})" for problem, where in told.items()]


def terminal(rows: list[Row], title: str) -> Table:
    heads, lines = cells(rows)
    table = Table(title=title)
    for head in heads:
        table.add_column(head, justify="right" if numeric(head) else "left")
    for line in lines:
        table.add_row(*line)
    return table


def markdown(rows: list[Row], title: str) -> str:
    heads, lines = cells(rows)
    rule = ["---:" if numeric(head) else "---" for head in heads]
    return "\n".join([title, "", *(f"| {' | '.join(line)} |" for line in (heads, rule, *lines))])
