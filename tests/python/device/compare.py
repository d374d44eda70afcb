"""What the tests on the device share: the same calls on the CPU and on the device, and how close results must be."""

import op_calls
import torch
from op_calls import as_tuple

OPS = ["knn", "gravnet", "aggregate", "pool", "voxelize", "devoxelize", "trilinear_weights"]

# Of the largest value: roundings of results, and of sums that both sides take in another order.
CLOSE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 2e-5, torch.float64: 1e-12}


def arguments(op, form, rows, dtype=torch.float32):
    """Of the registered operator, on the CPU."""
    how = dict(rows=rows, dtype=dtype, requires_grad=False) | op_calls.FORMS[form]
    inputs = list(op_calls.arguments(op, **how))
    if op == "aggregate":  # neighbours of the six rows that others draw from, where there are as many
        inputs[1] = inputs[1].clamp(max=rows - 1)
    if dtype == torch.float64:  # weights of rows go with double
        inputs = [x.double() if isinstance(x, torch.Tensor) and x.dtype == torch.float32 else x for x in inputs]
    return inputs


def on_device(arguments, device="cuda"):
    return [x.detach().to(device) if isinstance(x, torch.Tensor) else x for x in arguments]


def both_ways(op, form, rows, device="cuda"):
    """Arguments of the operator and of its backward, on the device."""
    inputs = arguments(op, form, rows)
    return on_device(inputs, device), on_device(op_calls.OPS[op][1](inputs, op_calls.operator(op)(*inputs)), device)


def same_bits(got, right):
    """Any NaN equals any other."""
    got, right = got.cpu(), right.cpu()
    if got.dtype != right.dtype or got.shape != right.shape:
        return False
    if got.is_floating_point():
        return torch.equal(got.isnan(), right.isnan()) and torch.equal(got.nan_to_num(), right.nan_to_num())
    return torch.equal(got, right)


def assert_close(got, right):
    """Integers and what is not finite are equal, numbers close."""
    for a, b in zip(as_tuple(got), as_tuple(right), strict=True):
        assert a.is_cuda and a.shape == b.shape and a.dtype == b.dtype
        a = a.cpu()
        if not b.is_floating_point():
            assert torch.equal(a, b)
            continue
        finite = b.isfinite()
        assert torch.equal(a.isfinite(), finite) and same_bits(a[~finite], b[~finite])
        if finite.any():
            error = (a - b)[finite].abs().max().item()
            assert error <= CLOSE[b.dtype] * max(b[finite].abs().max().item(), 1e-3)


def log_normal_sizes(count, generator, largest=4000, empty=0.05):
    """Rows of sets from 1 to `largest`, a share of them empty."""
    sizes = torch.exp(1.2 * torch.randn(count, generator=generator) + 4.5).long().clamp(1, largest)
    sizes[torch.rand(count, generator=generator) < empty] = 0
    return sizes


def splits_of(sizes):
    return torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
