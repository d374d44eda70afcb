"""What the operators share: sets, aggregates, shapes of results, autocast."""

import math

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


def flatten(op, splits, **tensors):
    """Tensors as the operators take them, (S, M, width) or (N, width), then splits (empty for uniform sets), then the
    leading dimensions to give back (None for ragged sets)."""
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            raise ValueError(f"muvox.{op}: {name} is {type(x).__name__}, expected a tensor")
    first = next(iter(tensors.values()))
    if splits is None:
        check_alike(op, tensors, 2, "or more (…, rows, width)")
        flat = [x if x.dim() == 3 else x.flatten(0, -3) if x.dim() > 3 else x.unsqueeze(0) for x in tensors.values()]
        return *flat, torch.empty(0, dtype=torch.int64, device=first.device), first.shape[:-2]
    if not isinstance(splits, torch.Tensor) or splits.numel() == 0:
        got = "empty" if isinstance(splits, torch.Tensor) else type(splits).__name__
        raise ValueError(f"muvox.{op}: splits is {got}, expected a tensor of one value more than there are sets")
    check_alike(op, tensors, 2, "(rows, width) with splits", splits, most=2)
    return *tensors.values(), splits, None


def restore(x, lead):
    """A result with the leading dimensions of the arguments."""
    return x if lead is None or len(lead) == 1 else x.reshape(*lead, *x.shape[1:])


def needs_grad(*tensors):
    """Whether backward may follow, so that forward has to save for it. What torch.jit.trace records must serve both."""
    return torch.jit.is_tracing() or (torch.is_grad_enabled() and any(x.requires_grad for x in tensors))


# Shapes and devices: looked at in the wrappers, and in the fakes, where nothing else would see them


def check_alike(op, tensors, least, meaning, splits=None, most=None):
    """All have one device, as many dimensions as expected, and shapes that differ in the last dimension only."""
    names = iter(tensors)
    first = next(names)
    x = tensors[first]
    if x.dim() < least or (most is not None and x.dim() > most):
        raise ValueError(f"muvox.{op}: {first} has {x.dim()} dimensions, expected {least} {meaning}")
    for name in names:
        y = tensors[name]
        if y.shape[:-1] != x.shape[:-1] or y.dim() != x.dim():
            raise ValueError(
                f"muvox.{op}: {name} has shape {tuple(y.shape)} and {first} {tuple(x.shape)}, "
                "expected the same but for the last dimension"
            )
        check_device(op, name, y, first, x)
    if splits is not None:
        check_device(op, "splits", splits, first, x)


def check_device(op, name, y, first, x):
    if y.device != x.device:
        raise ValueError(f"muvox.{op}: {name} is on {y.device} and {first} on {x.device}, expected one device")


def check_rows(op, splits, **tensors):
    """The fakes' check of tensors of rows; returns (S, M) or (N,)."""
    if splits.dtype != torch.int64 or splits.dim() != 1:
        raise ValueError(f"muvox.{op}: splits is {splits.dtype} with {splits.dim()} dimensions, expected int64 with 1")
    dims, meaning = (3, "(sets, rows, width), splits is empty") if splits.numel() == 0 else (2, "(rows, width)")
    check_alike(op, tensors, dims, meaning, splits, most=dims)
    return next(iter(tensors.values())).shape[:-1]


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


# Gradients and autocast


def mask(needed):
    return sum(1 << place for place, need in enumerate(needed) if need)


def only(needed, gradients):
    """None in place of the empty tensors of gradients that were not asked for."""
    return tuple(gradient if need else None for need, gradient in zip(needed, gradients))


def refuse_second_derivative(op):
    """Makes differentiating through op_backward an error: without it such gradients would silently be lost."""

    def backward(ctx, *gradients):
        raise NotImplementedError(f"muvox.{op}: second derivatives are not supported yet")

    torch.library.register_autograd(f"muvox::{op}_backward", backward)


_autocast = torch.library.Library("muvox", "IMPL")
_autocast_keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)


def register_autocast(op, places):
    """Under autocast the arguments at these places go to the autocast dtype, all others stay as they are. Like torch's
    own rules it leaves double alone."""
    function = getattr(torch.ops.muvox, op).default

    def rule(device):
        def cast(x):
            small = x.is_floating_point() and x.dtype != torch.float64 and x.device.type == device
            return x.to(torch.get_autocast_dtype(device)) if small else x

        def kernel(*arguments):
            with torch._C._ExcludeDispatchKeyGuard(_autocast_keys):
                return function(*(cast(x) if place in places else x for place, x in enumerate(arguments)))

        return kernel

    for device in ("cpu", "cuda"):
        _autocast.impl(op, rule(device), "Autocast" + device.upper())
