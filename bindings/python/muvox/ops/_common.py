"""What the operators share: arguments, sets in and results out, shapes of the fakes."""

import math
from typing import NamedTuple

import torch

from muvox import _library  # noqa: F401  (defines torch.ops.muvox)

KINDS = {"mean": 1, "max": 2, "absmax": 3, "sum": 4}


# Arguments of the wrappers


def encode(op, aggregates):
    """Names of aggregates as the number that the operators take: four bits each, the first lowest."""
    names = (aggregates,) if isinstance(aggregates, str) else tuple(aggregates)
    accepted = "expected one or more of " + ", ".join(KINDS) + ", none twice"
    if not names:
        raise ValueError(f"muvox.{op}: aggregates is empty, {accepted}")
    code = 0
    for place, name in enumerate(names):
        if not isinstance(name, str) or name not in KINDS or name in names[:place]:
            raise ValueError(f"muvox.{op}: aggregates has {name!r} in {names!r}, {accepted}")
        code |= KINDS[name] << 4 * place
    return code


def finite(op, name, value):
    value = float(value)
    if not -math.inf < value < math.inf:  # not math.isfinite, which torch.compile cannot follow on a free number
        raise ValueError(f"muvox.{op}: {name} is {value}, expected a finite number")
    return value


def radius(max_radius):
    """max_radius as the operators take it: +inf is none."""
    return math.inf if max_radius is None else float(max_radius)


def three(op, name, values, number=float):
    """Three numbers, one for each axis."""
    found = [number(v) for v in values] if hasattr(values, "__len__") else []
    if len(found) != 3:
        raise ValueError(f"muvox.{op}: {name} is {values!r}, expected three numbers")
    return found


class Layout(NamedTuple):
    """How results go back to the caller: with the leading dimensions of the arguments (`lead`), as they are (ragged), or
    as a jagged nested tensor (`offsets`)."""

    lead: tuple | None
    offsets: torch.Tensor | None


def flatten(op, splits, rows, columns=None, splits_name="splits"):
    """Arguments as the operators take them.

    rows: tensors by name that have a width, columns: those without (None: not given). All in one order and one form.
    Returns rows as (S, M, width) or (N, width), columns as (S, M) or (N), an empty tensor for each not given, then splits,
    empty for uniform sets, then the Layout.
    """
    first, x = next(iter(rows.items()))
    require_tensors(op, rows)
    given = {name: y for name, y in (columns or {}).items() if y is not None}
    require_tensors(op, given)
    offsets = None
    if x.is_nested or any(y.is_nested for y in (*rows.values(), *given.values())):
        check_nested(op, splits, splits_name, rows | given)
        offsets = splits = x.offsets()
        rows = {name: y.values() for name, y in rows.items()}
        given = {name: y.values() for name, y in given.items()}
        x = rows[first]
    if splits is None:
        check_alike(op, rows, 2, "or more (…, rows, width)")
        check_columns(op, given, first, x)
        flat = [as_sets(y, 1) for y in rows.values()]
        given = {name: as_sets(y, 0) for name, y in given.items()}
        layout = Layout(x.shape[:-2], None)
        splits = none = torch.empty(0, dtype=torch.int64, device=x.device)
    else:
        if not isinstance(splits, torch.Tensor) or (not torch.jit.is_tracing() and splits.numel() == 0):
            got = "empty" if isinstance(splits, torch.Tensor) else type(splits).__name__
            raise ValueError(
                f"muvox.{op}: {splits_name} is {got}, expected a tensor of one value more than there are sets"
            )
        check_alike(op, rows, 2, f"(rows, width) with {splits_name}", most=2)
        check_columns(op, given, first, x)
        check_device(op, splits_name, splits, first, x)
        flat = rows.values()
        layout = Layout(None, offsets)
        none = torch.empty(0, dtype=torch.int64, device=x.device)
    return *flat, *(given.get(name, none) for name in columns or {}), splits, layout


def require_tensors(op, tensors):
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            raise ValueError(f"muvox.{op}: {name} is {type(x).__name__}, expected a tensor")


def as_sets(x, width):
    """(…, M, width) as (S, M, width), or without the width."""
    dims = x.dim() - width
    return x if dims == 2 else x.flatten(0, dims - 2) if dims > 2 else x.unsqueeze(0)


def check_nested(op, splits, splits_name, tensors):
    """All are jagged and have their rows in the same places."""
    first, x = next(iter(tensors.items()))
    if splits is not None:
        raise ValueError(f"muvox.{op}: {splits_name} is given beside nested tensors, whose offsets say it")
    for name, y in tensors.items():
        if not y.is_nested or y.layout != torch.jagged:
            got = "nested with layout torch.strided" if y.is_nested else "not nested"
            raise ValueError(f"muvox.{op}: {name} is {got}, expected all tensors nested with layout torch.jagged, or none")
        if y.lengths() is not None or y._ragged_idx != 1:
            raise ValueError(f"muvox.{op}: {name} is nested with holes or transposed, call .contiguous() on it")
        if y.shape[:2] != x.shape[:2]:
            raise ValueError(f"muvox.{op}: {name} and {first} are nested with different offsets, expected the same tensor")


def restore(x, layout):
    """A result with one row for each row of the arguments, in their form."""
    if layout.offsets is not None:
        return torch.nested.nested_tensor_from_jagged(x, layout.offsets)
    return restore_sets(x, layout)


def restore_sets(x, layout):
    """A result with one row for each set: (…, width), or (S, width)."""
    lead = layout.lead
    return x if lead is None or len(lead) == 1 else x.reshape(*lead, *x.shape[1:])


def widened(x):
    """Row weights and biases are float: half and bfloat16, as a layer under autocast gives them, become it."""
    return x.float() if isinstance(x, torch.Tensor) and x.dtype in (torch.float16, torch.bfloat16) else x


def needs_grad(*tensors):
    """Whether backward may follow, so that forward has to save for it. What torch.jit.trace records must serve both, and
    functorch's transforms (vmap) may hide that a tensor requires gradients."""
    return torch.jit.is_tracing() or (
        torch.is_grad_enabled()
        and (torch._C._are_functorch_transforms_active() or any(x.requires_grad for x in tensors))
    )


# Shapes and devices: looked at in the wrappers, and in the fakes, where nothing else would see them


def check_alike(op, tensors, least, meaning, most=None):
    """All have one device, as many dimensions as expected, and shapes that differ in the last dimension only."""
    first, x = next(iter(tensors.items()))
    if x.dim() < least or (most is not None and x.dim() > most):
        raise ValueError(f"muvox.{op}: {first} has {x.dim()} dimensions, expected {least} {meaning}")
    for name, y in tensors.items():
        if y is not x and (y.dim() != x.dim() or differ(y.shape[:-1], x.shape[:-1])):
            raise ValueError(
                f"muvox.{op}: {name} has shape {tuple(y.shape)} and {first} {tuple(x.shape)}, "
                "expected the same but for the last dimension"
            )
        check_device(op, name, y, first, x)


def check_columns(op, columns, first, x):
    """One number for each row of x, bool for masks."""
    for name, y in columns.items():
        if y.dim() != x.dim() - 1 or differ(y.shape, x.shape[:-1]):
            raise ValueError(
                f"muvox.{op}: {name} has shape {tuple(y.shape)}, expected one value for each row of {first}, "
                f"{tuple(x.shape[:-1])}"
            )
        if name == "mask" and y.dtype != torch.bool:
            raise ValueError(f"muvox.{op}: mask is {y.dtype}, expected bool (True: the row takes part)")
        check_device(op, name, y, first, x)


def differ(shape, other):
    """Whether two shapes differ; a trace, whose sizes are free, leaves that to the kernels."""
    return not torch.jit.is_tracing() and shape != other


def check_device(op, name, y, first, x):
    if y.device != x.device:
        raise ValueError(f"muvox.{op}: {name} is on {y.device} and {first} on {x.device}, expected one device")


def check_rows(op, splits, columns=None, splits_name="splits", **tensors):
    """The fakes' check of tensors of rows, and of columns that may be none; returns (S, M) or (N,)."""
    first, x = next(iter(tensors.items()))
    if splits.dtype != torch.int64 or splits.dim() != 1:
        raise ValueError(
            f"muvox.{op}: {splits_name} is {splits.dtype} with {splits.dim()} dimensions, expected int64 with 1"
        )
    uniform = splits.numel() == 0
    meaning = f"(sets, rows, width), {splits_name} is empty" if uniform else "(rows, width)"
    check_alike(op, tensors, 3 if uniform else 2, meaning, most=3 if uniform else 2)
    check_device(op, splits_name, splits, first, x)
    for name, y in (columns or {}).items():
        check_device(op, name, y, first, x)
    check_columns(op, {name: y for name, y in (columns or {}).items() if not is_none(y)}, first, x)
    return x.shape[:-1]


def is_none(x):
    """The empty tensor that stands for an argument not given."""
    return x.dim() == 1 and x.shape[0] == 0


def set_count(splits, x):
    return x.shape[0] if splits.numel() == 0 else splits.shape[0] - 1


# Results of the fakes


def blocks(aggregates):
    """Blocks of columns of the output."""
    return (aggregates.bit_length() + 3) // 4


def winner_blocks(aggregates):
    """Blocks of columns of the winners."""
    return sum(aggregates >> 4 * place & 15 in (KINDS["max"], KINDS["absmax"]) for place in range(blocks(aggregates)))


def rank_dtype(k):
    return torch.uint8 if k <= 254 else torch.int32


def wide(dtype):
    """dtype of distances and statistics."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty(like, shape=None, dtype=None):
    """A new tensor; without a shape the empty one that stands for none."""
    return like.new_empty((0,) if shape is None else shape, dtype=like.dtype if dtype is None else dtype)


def empty_gradients(wanted, *inputs):
    """One gradient per input, those whose bit is not set in `wanted` empty."""
    return tuple(empty(x, x.shape if wanted >> place & 1 else None) for place, x in enumerate(inputs))


# Gradients


def wanted(needed):
    """Which gradients to compute, one bit each, the first lowest."""
    return sum(1 << place for place, need in enumerate(needed) if need)


def only(needed, gradients):
    """None in place of the empty tensors of gradients that were not asked for."""
    return tuple(gradient if need else None for need, gradient in zip(needed, gradients))
