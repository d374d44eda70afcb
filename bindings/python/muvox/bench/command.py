"""The command `muvox bench`."""

from __future__ import annotations

import json
import platform
import re
import subprocess
from collections.abc import Callable
from datetime import date
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.markup import escape

import muvox
from muvox import _library
from muvox.files import atomic_write

from . import peers
from .cases import Case, Setup, cpu_cases, cuda_cases
from .measure import DeviceClock, HostClock, measure
from .tables import DTYPES, Row, failures, markdown, terminal

OPS = ("knn", "gravnet", "attention", "pool", "voxelize", "devoxelize")


def check_device(context, parameter, value: str) -> torch.device:
    """The CPU, or a GPU that torch can use and muvox was built for."""
    try:
        device = torch.device(value)
    except RuntimeError:
        raise click.BadParameter(f"'{value}' is not a device") from None
    if device.type not in ("cpu", "cuda"):
        raise click.BadParameter(f"'{value}': the operators run on the CPU and on CUDA")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise click.BadParameter(f"'{value}': CUDA devices that torch finds here: {count or 'none'}")
        try:
            muvox.knn(torch.zeros(1, 1, 1, device=device), 1)
        except NotImplementedError:
            raise click.BadParameter(f"'{value}': muvox was built without CUDA operators (see muvox info)") from None
    return device


def processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def driver() -> str:
    """Version of NVIDIA's driver."""
    try:
        found = re.search(r"Module\s.*?(\d+\.\d+(\.\d+)*)", Path("/proc/driver/nvidia/version").read_text())
        if found:
            return found[1]
    except OSError:
        pass
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def where(device: torch.device) -> str:
    """Machine, versions and date."""
    if device.type == "cpu":
        machine = f"{processor()}, {torch.get_num_threads()} threads, {_library.simd_name()} kernels"
    else:
        machine = f"{torch.cuda.get_device_name(device)}, driver {driver()}, CUDA {torch.version.cuda}"
    return f"{machine}, torch {torch.__version__}, muvox {muvox.__version__}, {date.today()}"


def run(cases: list[Case], device: torch.device, clock: HostClock | DeviceClock, repeats: int, dtype: str | None = None,
        compile: bool = True, tell: Callable[[list[Row]], None] = lambda rows: None) -> list[Row]:
    """Measures the cases one after the other; `tell` has the rows so far after each."""
    rows: list[Row] = []
    for case in cases:
        name = dtype or next(name for name, of in DTYPES.items() if getattr(torch, of) == case.dtype)
        calls = case.build(Setup(device, getattr(torch, DTYPES[name]), compile))
        rows.append(Row(case, name, *measure(calls, clock, repeats)))
        del calls  # before the inputs of the next case are made
        tell(rows)
    return rows


@click.command()
@click.option("--device", default="cpu", show_default=True, callback=check_device, help="cpu, cuda or cuda:1.")
@click.option("--op", "ops", multiple=True, type=click.Choice(OPS),
              help="Only these operators (may be given several times).")
@click.option("--dtype", type=click.Choice(list(DTYPES)),
              help="Of all inputs; default: that of the targets, half for voxelize and devoxelize, else float.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads; default: torch's.")
@click.option("--repeats", type=click.IntRange(1), help="Timed runs of each; default: 5, on CUDA 20.")
@click.option("--large/--no-large", default=True, show_default=True, help="On the CPU, the set of 20,000 rows too.")
@click.option("--compile/--no-compile", default=True, show_default=True,
              help="On CUDA, the compositions through torch.compile too.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, writable=True, path_type=Path),
              help="Write all peers of all rows to a file, after every row.")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print the table in Markdown.")
def bench(device: torch.device, ops: tuple[str, ...], dtype: str | None, threads: int | None, repeats: int | None,
          large: bool, compile: bool, json_file: Path | None, as_markdown: bool) -> None:
    """Time the operators beside stock PyTorch, and beside other libraries that can be imported, in one run."""
    if threads:
        torch.set_num_threads(threads)
    on_cpu = device.type == "cpu"
    repeats = repeats or (5 if on_cpu else 20)
    cases = [case for case in (cpu_cases(large) if on_cpu else cuda_cases()) if not ops or case.op in ops]
    if not cases:
        raise click.UsageError(f"{', '.join(ops)} on {device.type}: there is nothing to measure")
    if not on_cpu:
        torch.cuda.set_device(device.index or 0)
    place, absent = where(device), peers.missing()

    def tell(rows: list[Row]) -> None:
        click.echo(f"{len(rows)}/{len(cases)}  {' '.join(' '.join(rows[-1].cells()).split())}", err=True)
        if json_file:
            content = {"where": place, "repeats": repeats, "not importable": absent,
                       "rows": [row.record() for row in rows]}
            with atomic_write(json_file) as file:
                file.write(json.dumps(content, indent=1, ensure_ascii=False).encode())

    rows = run(cases, device, HostClock() if on_cpu else DeviceClock(), repeats, dtype, compile and not on_cpu, tell)
    title, notes = f"Median of {repeats}; {place}", failures(rows)
    if absent:
        notes.append(f"Not importable here: {', '.join(absent)}")
    if as_markdown:
        click.echo("\n".join([markdown(rows, title), *(f"\n{note}" for note in notes)]))
        return
    console = Console(width=190)
    console.print(terminal(rows, escape(title)))
    for note in notes:
        console.print(note, markup=False, highlight=False)
