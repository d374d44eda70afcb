"""Modules against outputs and gradients of LUMIN 0.9.1 (golden/lumin_fixtures.npz), in double and in float.

A case: x, grad_out and the state before (float32 numbers); then out, grad_x, gradients of the parameters and buffers
after, of a run in double and one in float. The loss is sum(out * grad_out).
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import muvox.nn as mnn

FIXTURES = np.load(Path(__file__).parents[1] / "golden" / "lumin_fixtures.npz")
CASES = json.loads(str(FIXTURES["index"]))
POTENTIALS = {"exp(-d)": lambda distance: torch.exp(-distance)}


def tensors(prefix):
    """Fixture arrays under a prefix, by the rest of their names."""
    return {key[len(prefix) :]: torch.from_numpy(FIXTURES[key]) for key in FIXTURES.files if key.startswith(prefix)}


def grid_centres(shape, size):
    """Centres of a grid of cubes, x-major; only differences matter to VoxelNet."""
    ijk = np.stack(np.meshgrid(*[np.arange(n) for n in shape], indexing="ij"), -1).reshape(-1, 3)
    return ((ijk + 0.5) * size).astype(np.float32)


def build(case):
    arguments = dict(case["kw"])
    if case["cls"] == "X0Net":
        return mnn.VoxelNet(grid_centres(arguments.pop("grid"), arguments.pop("size")), **arguments)
    if "sa_class" in arguments:
        arguments["sa_class"] = getattr(mnn, arguments["sa_class"])
    if "potential" in arguments:
        arguments["potential"] = POTENTIALS[arguments["potential"]]
    return getattr(mnn, case["cls"])(**arguments)


def load(case):
    """Module of a case in its mode, with the state of the fixture (keys and shapes must match one to one)."""
    module = build(case)
    state = tensors(case["name"] + "/param/") | tensors(case["name"] + "/buffer/")
    module.load_state_dict(state, strict=True)
    return module.train(case["mode"] == "train")


def sum_over_groups(x, case):
    """Rows of equal group added up: among identical rows LUMIN's choice of a neighbour is unspecified."""
    if case["ties"] != "duplicates":
        return x
    groups = torch.from_numpy(FIXTURES[case["name"] + "/groups"]).long()
    groups = groups.expand(x.shape[:-1]) if groups.dim() < x.dim() - 1 else groups
    total = torch.zeros(*x.shape[:-2], int(groups.max()) + 1, x.shape[-1], dtype=x.dtype)
    return total.scatter_add(-2, groups.unsqueeze(-1).expand_as(x), x)


def largest(expected):
    return max(float(t.double().nan_to_num(0).abs().max()) for t in expected.values() if t.numel())


def check(got, expected, tolerance):
    """Every tensor within the tolerance times the largest value of all of them; NaN where NaN is expected."""
    assert got.keys() == expected.keys()
    bound = tolerance * largest(expected)
    for key, want in expected.items():
        assert got[key].shape == want.shape, key
        torch.testing.assert_close(
            got[key], want, rtol=0, atol=bound, equal_nan=True, msg=lambda m, key=key: f"{key}: {m}"
        )


@pytest.mark.parametrize("precision", ["f64", "f32"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_fixture(case, precision):
    double = precision == "f64"
    tolerance = 1e-10 if double else 2e-4 if case["cls"] == "X0Net" else 2e-5
    dtype, name = torch.float64 if double else torch.float32, case["name"]
    module = load(case).to(dtype)
    x = torch.from_numpy(FIXTURES[f"{name}/x"]).to(dtype).requires_grad_(not case["forward_only"])
    out = module(x)
    check({"out": out}, {"out": torch.from_numpy(FIXTURES[f"{name}/{precision}/out"])}, tolerance)
    after = tensors(f"{name}/{precision}/buffer_after/")
    if after:
        buffers = dict(module.named_buffers())
        for key, want in after.items():  # each by its own scale: counts are larger than statistics by far
            check({key: buffers[key]}, {key: want.to(buffers[key].dtype)}, tolerance)
    if case["forward_only"]:
        return
    (out * torch.from_numpy(FIXTURES[f"{name}/grad_out"]).to(dtype)).sum().backward()
    got = {key: parameter.grad for key, parameter in module.named_parameters()}
    want = tensors(f"{name}/{precision}/grad/")
    got["x"] = sum_over_groups(x.grad, case)
    want["x"] = sum_over_groups(torch.from_numpy(FIXTURES[f"{name}/{precision}/grad_x"]), case)
    check(got, want, tolerance)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_state_dict_has_lumins_keys(case):
    """What LUMIN saves loads strictly (in `load`), and what is saved here has the same keys, shapes and values."""
    saved = load(case).state_dict()
    expected = tensors(case["name"] + "/param/") | tensors(case["name"] + "/buffer/")
    assert saved.keys() == expected.keys()
    for key, want in expected.items():
        assert saved[key].shape == want.shape, key
        torch.testing.assert_close(saved[key].double(), want.double(), rtol=0, atol=0)
