"""Options and checks that several commands share."""

import math
import sys
from pathlib import Path

import click


def _device(context, parameter, value: str) -> str:
    import torch

    try:
        kind = torch.device(value).type
    except RuntimeError:
        raise click.BadParameter(f"'{value}' is not a device") from None
    if kind != "cpu":
        raise click.BadParameter(f"'{value}': training and prediction run on the CPU in this version")
    return value


def finite(context, parameter, value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is not a finite number")
    return value


def _threads(context, parameter, value: int | None) -> None:
    import torch

    if value is not None:
        torch.set_num_threads(value)


def keep(inputs: list[Path], target: Path) -> None:
    """Refuses to write over what is read, a file in a folder of scans for instance."""
    files = [file for path in inputs for file in (path, *path.glob("*.h5"))]
    if any(target.exists() and file.exists() and target.samefile(file) for file in files):
        raise click.UsageError(f"{target} is read from and cannot be written to")


def volume_numbers(context, parameter, value: str | None) -> list[int] | None:
    """ "0-39,200" -> [0, …, 39, 200]."""
    if value is None:
        return None
    try:
        ranges = []
        for part in value.split(","):
            first, dash, last = part.partition("-")
            ranges.append(range(int(first), int(last if dash else first) + 1))
    except ValueError:
        raise click.BadParameter(f"'{value}' is not a list of numbers and ranges such as 0-39,200") from None
    return [index for indices in ranges for index in indices]


def triple(kind, example: str):
    """A callback for 10x10x6 or 0.1,0.1,0.1: three numbers, or one for all of them; above 0 but for an origin."""

    def read(context, parameter, value: str | None):
        if value is None:
            return None
        try:
            numbers = tuple(kind(part) for part in value.replace("x", ",").split(","))
        except ValueError:
            numbers = ()
        if len(numbers) == 1:
            numbers *= 3
        if len(numbers) != 3 or not all(map(math.isfinite, numbers)):
            raise click.BadParameter(f"'{value}', expected something like {example}")
        if parameter.name != "origin" and min(numbers) <= 0:
            raise click.BadParameter(f"'{value}', expected numbers above 0")
        return numbers

    return read


def read_config(context: click.Context, parameter, path: Path | None) -> None:
    """Takes a TOML file's values as defaults of the command's other options and arguments; keys are their names."""
    if path is None:
        return
    known = {p.name: p for p in context.command.params if p.name not in NOT_IN_CONFIG}
    values = {}
    for key, value in _toml(path).items():
        name = key.replace("-", "_")
        if name not in known:
            raise click.UsageError(f"{path}: unknown key '{key}'; accepted are {', '.join(sorted(known))}")
        if name in values:
            raise click.UsageError(f"{path}: '{key}' is there twice, with - and _")
        accepted, words = _accepted(known[name])
        if not isinstance(value, accepted) or (isinstance(value, bool) and accepted is not bool):
            raise click.UsageError(f"{path}: '{key}' is {value!r}, accepted is {words}")
        values[name] = value
    context.default_map = {**(context.default_map or {}), **values}


def _accepted(parameter: click.Parameter) -> tuple[type | tuple[type, ...], str]:
    if getattr(parameter, "is_flag", False):
        return bool, "true or false"
    if isinstance(parameter.type, click.IntRange):
        return int, "a whole number"
    if isinstance(parameter.type, click.FloatRange):
        return (int, float), "a number"
    return str, "a string"


def _toml(path: Path) -> dict:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise click.UsageError(f"{path}: not a TOML file ({error})") from None


NOT_IN_CONFIG = ("config", "help", "resume", "overwrite")
count = click.IntRange(min=1)
file = click.Path(path_type=Path)
threads = click.option(
    "--threads",
    type=click.IntRange(1, 1024),
    callback=_threads,
    expose_value=False,
    help="CPU threads.  [default: all cores]",
)
device = click.option("--device", default="cpu", show_default=True, callback=_device, help="Where the network runs.")
config = click.option(
    "--config",
    type=file,
    callback=read_config,
    is_eager=True,
    expose_value=False,
    help="TOML file with values of these options, by name (steps = 500); the command line wins.",
)
seed_range = click.IntRange(0, 2**63 - 1)
