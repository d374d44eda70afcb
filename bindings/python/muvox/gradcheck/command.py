"""The command line of the gradient check."""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace

import click
import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from .. import _library
from ..files import atomic_write
from .cases import CASES, Case, Op
from .check import DTYPES, Result, applies, check, check_second_order, differentiates_twice
from .registry import OPS


def run(ops: Iterable[Op], cases: Iterable[Case], dtypes: Iterable[str], seed: int = 0) -> Iterator[Result]:
    """Check after check, of every combination that applies."""
    for op in ops:
        for case in cases:
            for dtype in dtypes:
                if applies(op, case, DTYPES[dtype]):
                    yield check(op, case, dtype, seed)


def run_second_order(ops: Iterable[Op], cases: Iterable[Case], seed: int = 0) -> Iterator[Result]:
    """Second derivatives in double, of every combination that has them."""
    for op in ops:
        for case in cases:
            if differentiates_twice(case) and applies(op, case, DTYPES["double"]):
                yield check_second_order(op, case, seed)


def table_of(results: list[Result]) -> Table:
    table = Table(title="muvox gradcheck: errors in ulps of the dtype at the largest value")
    for name in ("op", "case", "dtype"):
        table.add_column(name)
    for name in ("max error", "limit", "time (ms)"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for r in results:
        verdict = "[green]pass[/green]" if r.passed else "[red]FAIL[/red]"
        figures = f"{r.error:.2f}", f"{r.limit:g}", f"{1e3 * r.seconds:.1f}"
        table.add_row(r.op, r.case, r.dtype, *figures, verdict)
    return table


def save(path: str, seed: int, results: list[Result]) -> None:
    """All figures as JSON, written whole or not at all."""
    rows = [asdict(r) | {"error": r.error if math.isfinite(r.error) else None, "passed": r.passed} for r in results]
    try:
        with atomic_write(path) as file:
            file.write(json.dumps({"seed": seed, "unit": "ulp", "results": rows}, indent=1).encode())
    except OSError as problem:
        raise refusal(f"cannot write {path}: {problem.strerror}") from None


def refusal(message: str) -> click.ClickException:
    """One line, exit status 2."""
    error = click.ClickException(message)
    error.exit_code = 2
    return error


def on_device(ops: list[Op], device: str, console: Console) -> list[Op]:
    """The operators that run on the device, to run there; the others are named."""
    if device == "cpu":
        return ops
    if not torch.cuda.is_available():
        raise refusal("--device cuda: torch finds no CUDA device")
    if not _library.cuda_info:
        raise refusal(f"--device cuda: CUDA kernels are {_library.cuda_status}")
    left_out = [op.name for op in ops if op.name.split(",")[0] in _library.WITHOUT_CUDA]
    if left_out:
        console.print(f"left out, without CUDA kernels: {'; '.join(left_out)}", highlight=False)
    return [replace(op, device=device) for op in ops if op.name not in left_out]


@click.command("gradcheck")
@click.option("--op", "ops", multiple=True, type=click.Choice(list(OPS)), help="Only this operator (repeatable).")
@click.option("--case", "cases", multiple=True, type=click.Choice([c.name for c in CASES]), help="Only this case.")
@click.option("--dtype", "dtypes", multiple=True, type=click.Choice(list(DTYPES)), help="Only this dtype.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False), help="Write all figures to this file.")
@click.option("--second-order", is_flag=True, help="Check second derivatives instead, in double.")
@click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Where the operators run."
)
@click.option("--seed", default=0, show_default=True, help="Other inputs.")
@click.pass_context
def gradcheck(context: click.Context, ops, cases, dtypes, json_file, second_order, device, seed) -> None:
    """Check every operator's gradient against finite differences and a plain double reference.

    The reference runs on the CPU, whatever the device. Exit status 1 if any check fails.
    """
    console = Console()
    chosen_ops = on_device([OPS[name] for name in ops or OPS], device, console)
    chosen_cases = [c for c in CASES if not cases or c.name in cases]
    if second_order and dtypes and "double" not in dtypes:
        raise click.UsageError("--second-order is a check in double")
    checks = (
        run_second_order(chosen_ops, chosen_cases, seed)
        if second_order
        else run(chosen_ops, chosen_cases, dtypes or DTYPES, seed)
    )
    results = list(track(checks, "checking", console=console, transient=True, disable=not console.is_terminal))
    console.print(table_of(results))
    failures = [r for r in results if not r.passed]
    for r in failures:
        line = f"[red]FAIL[/red] {r.op}, {r.case}, {r.dtype}: {escape(r.failure)}"
        console.print(line, highlight=False, soft_wrap=True)
    seconds = sum(r.seconds for r in results)
    console.print(f"{len(results)} checks, {len(failures)} failed, {seconds:.1f} s")
    if json_file:
        save(json_file, seed, results)
    context.exit(1 if failures else 0)
