"""How the operators join torch: gradients, autocast, flop counts. vmap is in _vmap.py."""

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.utils.flop_counter import register_flop_formula

from muvox import _library as _shared

_library = torch.library.Library("muvox", "IMPL")
_autocast_keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)


def operator(op):
    return getattr(torch.ops.muvox, op).default


def _refuse_cuda(op):
    """What a call of an operator without CUDA kernels says; fake tensors and compilation need none."""
    name = f"muvox.{op.removesuffix('_backward')}"

    def kernel(*arguments):
        if _shared.cuda_info:
            raise NotImplementedError(f"{name}: this operator has no CUDA kernels yet, expected its tensors on the CPU")
        raise NotImplementedError(
            f"{name}: tensors are on a CUDA device, but the CUDA kernels are {_shared.cuda_status}"
        )

    _library.impl(op, kernel, "CUDA")


for _op in _shared.WITHOUT_CUDA:
    _refuse_cuda(_op)


def register_autograd(op, backward, setup_context):
    """What torch.library.register_autograd does, which refuses functorch's transforms (torch.func.grad, jacrev, …).

    setup_context(ctx, inputs, output) and backward(ctx, *gradients) are those of a torch.autograd.Function. Within
    transforms the dispatcher calls the kernel once for each of them, so the function has to know of one level only.
    """
    function = operator(op)

    def below(keyset, inputs):
        with torch._C._AutoDispatchBelowAutograd():
            return function.redispatch(keyset & torch._C._after_autograd_keyset, *inputs)

    def forward(ctx, *arguments):
        *inputs, (keyset, gradients) = arguments
        # A function runs with gradients disabled; the transforms further out still want theirs: grad of grad.
        with torch.set_grad_enabled(gradients):
            output = below(keyset, inputs)
        setup_context(ctx, inputs, output)
        return output

    def backward_of_all(ctx, *gradients):
        return *backward(ctx, *gradients), None

    def jvp(ctx, *tangents):
        raise NotImplementedError(f"muvox.{op}: forward-mode derivatives are not supported, only those by backward")

    name = "".join(part.capitalize() for part in ("muvox", *op.split("_")))  # what graphs and profiles show
    methods = {"forward": forward, "backward": backward_of_all, "jvp": jvp}
    methods = {method: staticmethod(body) for method, body in methods.items()}
    function_class = type(name, (torch.autograd.function._SingleLevelFunction,), methods)

    def kernel(keyset, *inputs):
        gradients = torch.is_grad_enabled()
        forward_mode = torch.autograd.forward_ad._current_level >= 0  # the function refuses what has a tangent
        if not forward_mode and not (gradients and any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs)):
            return below(keyset, inputs)
        with enable_single_level_autograd_function():
            return function_class.apply(*inputs, (keyset, gradients))

    _library.impl(op, kernel, "Autograd", with_keyset=True)


def register_autocast(op, places, dtype=None):
    """Under autocast the arguments at these places go to the autocast dtype, or to the one given here, all others stay as
    they are. Like torch's own rules it leaves double alone."""
    function = operator(op)

    def rule(device):
        def cast(x):
            small = x.is_floating_point() and x.dtype != torch.float64 and x.device.type == device
            return x.to(dtype or torch.get_autocast_dtype(device)) if small else x

        def kernel(*arguments):
            with torch._C._ExcludeDispatchKeyGuard(_autocast_keys):
                return function(*(cast(x) if place in places else x for place, x in enumerate(arguments)))

        return kernel

    for device in ("cpu", "cuda"):
        _library.impl(op, rule(device), "Autocast" + device.upper())


def register_flops(op, forward, backward=None, second=None):
    """forward(*arguments of op), backward and second(*arguments of op_backward) say how many operations a call takes.

    second: of op_second, where there is one; otherwise what backward takes, and twice that for its derivative."""
    counts = {op: forward} | ({f"{op}_backward": backward} if backward else {})
    if hasattr(torch.ops.muvox, f"{op}_second"):
        arity = len(operator(f"{op}_backward")._schema.arguments)
        second = second or (lambda *arguments: 3 * backward(*arguments))
        counts[f"{op}_second"] = lambda *arguments: second(*arguments[:arity])
    for name, count in counts.items():

        def formula(*arguments, out_val=None, count=count, **_):
            return count(*arguments)

        register_flop_formula(getattr(torch.ops.muvox, name), get_raw=True)(formula)


def pairs(splits, x, query_splits=None, queries=None):
    """Pairs of rows of one set, (query, other): what the time of searches and attentions goes with."""
    query_splits = splits if query_splits is None else query_splits
    queries = x if queries is None else queries
    if splits.numel() == 0:
        return queries.shape[0] * queries.shape[1] * x.shape[1]
    if isinstance(splits, torch._subclasses.FakeTensor) or splits.device.type == "meta":  # as if all sets were alike
        return queries.shape[0] * x.shape[0] // max(splits.shape[0] - 1, 1)
    return int((query_splits.diff() * splits.diff()).sum())
