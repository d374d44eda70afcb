"""The gradient check is green on muvox's operators, and red on every wrong gradient planted in them."""

import json
import time
from dataclasses import replace
from unittest import mock

import pytest
import torch
from click.testing import CliRunner

from muvox import _library
from muvox.gradcheck import (
    CASES,
    DTYPES,
    OPS,
    Inputs,
    Op,
    applies,
    check,
    check_second_order,
    gradcheck,
    references,
    run,
)
from muvox.gradcheck.cases import ALL, largest_gap, normal
from muvox.gradcheck.check import call, draw, finite_differences
from muvox.gradcheck.registry import KINKED, LAYERS, SMOOTH

ATTENTIONS = "neighbour_attention", "neighbour_attention, offset"
CASE = {case.name: case for case in CASES}


class Scale(torch.autograd.Function):
    """The identity, with a gradient that is wrong by a factor."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return g * ctx.factor(), None


def with_inputs(op: Op, change) -> Op:
    """op with a change of its floating inputs."""

    def function(**arguments):
        changed = {n: change(a) if torch.is_tensor(a) and a.requires_grad else a for n, a in arguments.items()}
        return op.function(**changed)

    return replace(op, function=function)


def scaled(op: Op, factor: float = 1.001) -> Op:
    return with_inputs(op, lambda x: Scale.apply(x, lambda: factor))


def with_gradient_of(op: Op, wrong) -> Op:
    """op's outputs with the gradient of another reference of one set; uniform sets only."""

    def function(splits, **arguments):
        right = op.function(splits=splits, **arguments)
        shared = op.draw(CASE["regular"], torch.Generator()).shared
        tensors = {n: a for n, a in arguments.items() if torch.is_tensor(a) and n not in shared}
        options = {n: a.double() if n in shared else a for n, a in arguments.items() if n not in tensors}
        S, M = next(iter(tensors.values())).shape[:2]
        rows = {n: t.flatten(0, 1).double() if t.is_floating_point() else t.flatten(0, 1) for n, t in tensors.items()}
        other = references.set_by_set(wrong, rows, [M] * S, options)
        return tuple(
            y.detach() + (z - z.detach()).to(y.dtype).view_as(y) if y.is_floating_point() else y
            for y, z in zip(right, other)
        )

    return replace(op, function=function)


def distances_without_neighbours(coords, k, nearest=references.nearest):
    """As references.nearest, with nothing flowing to the neighbour's coordinates."""
    rows, _ = nearest(coords, k)
    return rows, (coords[:, None] - coords.detach()[rows]).square().sum(-1)


def knn_without_neighbours(coords, *, k):
    return distances_without_neighbours(coords, k)[1], *references.knn(coords, k=k)[1:]


def gravnet_without_neighbours(coords, feats, *, k, scale, aggregates):
    rows, distance2 = distances_without_neighbours(coords, k)
    m = torch.exp(-scale * distance2)[..., None] * feats[rows]
    return (references.combine(m, torch.ones_like(rows, dtype=torch.bool), aggregates),)


def aggregate_without_last(feats, weights, neighbours, *, aggregates):
    m = weights[..., None] * feats[neighbours.long().clamp(min=0)]
    m = torch.cat([m[:, :-1], m[:, -1:].detach()], 1)
    return (references.combine(m, neighbours >= 0, aggregates),)


def attention_without_sum(q, k, v, *, scale=None):
    """The softmax's denominator taken as a constant."""
    scores = q @ k.T * q.shape[1] ** -0.5
    return torch.exp(scores - scores.logsumexp(1, keepdim=True).detach()) @ v, scores.logsumexp(1)


def offset_attention_without_sum(q, k, v, *, scale, eps):
    """The division of each row taken as one by a constant."""
    weights = (scale * q @ k.T).softmax(0)
    return (weights @ v / (weights.sum(1, keepdim=True).detach() + eps),)


def neighbour_attention_without_neighbours(coords, feats, **options):
    with mock.patch.object(references, "nearest", distances_without_neighbours):
        return references.neighbour_attention(coords, feats, **options)


def voxelize_without_last(feats, index, counts):
    return references.voxelize(torch.cat([feats[:-1], feats[-1:].detach()]), torch.zeros_like(index), counts + 1)


def devoxelize_without_last(feats, weights, index):
    return references.devoxelize(feats, torch.cat([weights[:, :-1], weights[:, -1:].detach()], 1), index)


def trilinear_weights_without_last(points, **options):
    return references.trilinear_weights(torch.cat([points[:, :-1], points[:, -1:].detach()], 1), **options)


def pool_without_last(x, *, aggregates):
    return references.pool(torch.cat([x[:-1], x[-1:].detach()]), aggregates=aggregates)


DROPPED = {
    "knn": knn_without_neighbours,
    "gravnet": gravnet_without_neighbours,
    "aggregate": aggregate_without_last,
    "attention": attention_without_sum,
    "offset_attention": offset_attention_without_sum,
    "neighbour_attention": neighbour_attention_without_neighbours,
    "neighbour_attention, offset": neighbour_attention_without_neighbours,
    "pool": pool_without_last,
    "voxelize": voxelize_without_last,
    "devoxelize": devoxelize_without_last,
    "trilinear_weights": trilinear_weights_without_last,
}


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dtype", ["double", "float"])
def test_a_gradient_wrong_by_a_thousandth_is_red(name, dtype):
    result = check(scaled(OPS[name]), CASE["regular"], dtype)
    assert not result.passed and result.error > 10 * result.limit, result


@pytest.mark.parametrize("name", OPS)
def test_finite_differences_alone_see_a_thousandth(name):
    inputs, leaves = draw(OPS[name], CASE["regular"], torch.double, 0)
    assert finite_differences(OPS[name], CASE["regular"], inputs, leaves) == ""
    assert "Jacobian mismatch" in finite_differences(scaled(OPS[name]), CASE["regular"], inputs, leaves)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_dropped_term_is_red(name, dtype):
    result = check(with_gradient_of(OPS[name], DROPPED[name]), CASE["regular"], dtype)
    assert not result.passed and result.error > 10 * result.limit, result


@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("case", ["regular", "alone"])
def test_a_wrong_gradient_of_one_layer_is_red(name, layer, case):
    """Of those too whose gradient is 0 by cancellation."""

    class Shift(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, g):
            return g + 0.01

    def shifted(**arguments):
        return OPS[name].function(**arguments | {layer: Shift.apply(arguments[layer])})

    result = check(replace(OPS[name], function=shifted), replace(CASE[case], finite=False), "float")
    assert not result.passed and result.error > 10 * result.limit, result


@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_and_aggregates_of_neighbour_attention(name, dtype):
    """All in double, float and half; in bfloat16, whose rounding no choice of inputs withstands, the smooth ones."""
    cases = [case for case in CASES if applies(OPS[name], case, DTYPES[dtype])]
    options = [draw(OPS[name], case, DTYPES[dtype], 0)[0].options for case in cases]
    smooth = dtype == "bfloat16"
    assert {o["activation"] for o in options} == set(SMOOTH if smooth else SMOOTH + KINKED)
    assert {a for o in options for a in o["aggregates"]} == set(("mean", "sum") if smooth else ALL)


@pytest.mark.parametrize("name", OPS)
def test_the_right_gradient_planted_the_same_way_is_green(name):
    result = check(with_gradient_of(OPS[name], OPS[name].reference), CASE["regular"], "float")
    assert result.passed, result


@pytest.mark.parametrize("name", OPS)
def test_a_backward_that_differs_from_run_to_run_is_red(name):
    state = iter(range(1, 1000))
    noisy = with_inputs(OPS[name], lambda x: Scale.apply(x, lambda: 1 + 2.0**-52 * (next(state) % 7)))
    result = check(noisy, replace(CASE["regular"], finite=False), "double")
    assert result.failure == "gradient differs from run to run", result


@pytest.mark.parametrize("name", ["gravnet", "aggregate", "pool", *ATTENTIONS])
def test_a_tie_given_to_the_last_place_is_red(name, monkeypatch):
    honest = references.first_largest

    def last_largest(score, dim):
        return score.shape[dim] - 1 - honest(score.flip(dim), dim)

    monkeypatch.setattr(references, "first_largest", last_largest)
    result = check(OPS[name], CASE["lattice ties"], "double")
    assert not result.passed and result.error > 1e6, result


def test_neighbours_in_another_order_are_red(monkeypatch):
    def reversed_ties(**arguments):
        distance2, neighbours, counts = OPS["knn"].function(**arguments)
        tied = distance2[..., 0:1] == distance2[..., 1:2]
        first, second, rest = neighbours.split([1, 1, neighbours.shape[-1] - 2], -1)
        swapped = torch.where(tied, second, first), torch.where(tied, first, second), rest
        return distance2, torch.cat(swapped, -1), counts

    result = check(replace(OPS["knn"], function=reversed_ties), CASE["coincident"], "float")
    assert result.failure == "integer output differs"


def test_an_operator_that_raises_is_red_and_the_check_goes_on():
    def broken(**arguments):
        raise RuntimeError("no kernel")

    results = list(run([replace(OPS["pool"], function=broken), OPS["pool"]], [CASE["regular"]], ["half"]))
    assert [r.passed for r in results] == [False, True]
    assert results[0].failure == "RuntimeError: no kernel"


def test_a_gradient_of_another_dtype_or_output_of_another_shape_is_red():
    short = replace(OPS["pool"], function=lambda **a: (OPS["pool"].function(**a)[0][:1],))
    assert "shape" in check(short, CASE["regular"], "float").failure
    more = replace(OPS["pool"], function=lambda **a: OPS["pool"].function(**a) * 2)
    assert check(more, CASE["regular"], "float").failure == "2 outputs, expected 1"


def test_a_new_operator_joins_by_one_entry():
    squares = Op(
        "squares",
        lambda x, splits: (x.square(),),
        lambda case, generator: Inputs({"x": normal(case, 4, generator)}),
        lambda x: (x.square(),),
        lambda x: torch.inf,
    )
    results = list(run([squares], CASES, DTYPES))
    assert len(results) == sum(applies(squares, case, dtype) for case in CASES for dtype in DTYPES.values())
    assert all(r.passed for r in results), [r for r in results if not r.passed]


@pytest.mark.parametrize("dtype", DTYPES)
def test_near_ties_are_drawn_again(dtype):
    case = CASE["wide"]
    inputs, leaves = draw(OPS["pool"], case, DTYPES[dtype], 0)
    assert largest_gap(leaves[0].double(), inputs.options["aggregates"]) > 1e-5


def test_command_is_green_in_under_a_minute(tmp_path):
    begin = time.process_time()  # of this process alone, whatever else runs
    result = CliRunner().invoke(gradcheck, ["--json", str(tmp_path / "figures.json")])
    assert time.process_time() - begin < 60
    assert result.exit_code == 0, result.output
    figures = json.loads((tmp_path / "figures.json").read_text())
    rows = figures["results"]
    assert {row["op"] for row in rows} == set(OPS)
    assert {row["case"] for row in rows} == {case.name for case in CASES}
    for case in CASES:
        for op in OPS.values():
            ran = any(row["op"] == op.name and row["case"] == case.name for row in rows)
            assert ran == any(applies(op, case, dtype) for dtype in DTYPES.values())
    assert {row["dtype"] for row in rows} == set(DTYPES)
    assert all(row["passed"] and row["error"] <= row["limit"] for row in rows)
    assert f"{len(rows)} checks, 0 failed" in result.output


def test_second_derivatives_are_green(tmp_path):
    path = tmp_path / "figures.json"
    result = CliRunner().invoke(gradcheck, ["--second-order", "--json", str(path)])
    assert result.exit_code == 0, result.output
    rows = json.loads(path.read_text())["results"]
    assert {row["op"] for row in rows} == set(OPS)
    names = {row["case"].removesuffix(", second order") for row in rows}
    assert {case.name for case in CASES if case.options and case.finite} <= names


@pytest.mark.parametrize("name", OPS)
def test_a_wrong_second_derivative_is_red(name):
    """Right outputs and right first derivatives, the second wrong by a hundredth."""

    class Second(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.view_as(y)

        @staticmethod
        def backward(ctx, g):
            return Scale.apply(g, lambda: 1.01)

    def function(**arguments):
        return tuple(Second.apply(y) if y.requires_grad else y for y in OPS[name].function(**arguments))

    result = check_second_order(replace(OPS[name], function=function), CASE["regular"])
    assert result.failure.startswith("second derivatives: ") and not result.passed, result


def test_an_operator_without_second_derivatives_is_red():
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.square()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, g):
            return 2 * g * ctx.saved_tensors[0]

    once = Op(
        "once",
        lambda x, splits: (Once.apply(x),),
        lambda case, generator: Inputs({"x": normal(case, 4, generator)}),
        lambda x: (x.square(),),
        lambda x: torch.inf,
    )
    result = check_second_order(once, CASE["regular"])
    assert not result.passed and "not supported" in result.failure, result


def test_command_other_seed_is_green_too():
    dtypes = ["--dtype", "float", "--dtype", "half", "--dtype", "bfloat16"]
    result = CliRunner().invoke(gradcheck, ["--seed", "7", *dtypes])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("name", OPS)
def test_command_exit_status_1_on_a_wrong_gradient(name, monkeypatch, tmp_path):
    monkeypatch.setitem(OPS, name, scaled(OPS[name]))
    path = tmp_path / "figures.json"
    arguments = ["--op", name, "--case", "regular", "--dtype", "double", "--json", str(path)]
    result = CliRunner().invoke(gradcheck, arguments)
    assert result.exit_code == 1
    assert "FAIL" in result.output and "differs from the double reference" in result.output
    assert [row["passed"] for row in json.loads(path.read_text())["results"]] == [False]


def test_command_refuses_what_it_does_not_know(tmp_path):
    assert CliRunner().invoke(gradcheck, ["--op", "convolution"]).exit_code == 2
    assert CliRunner().invoke(gradcheck, ["--dtype", "int8"]).exit_code == 2
    arguments = ["--op", "pool", "--case", "regular", "--dtype", "half", "--json", str(tmp_path / "none" / "f.json")]
    result = CliRunner().invoke(gradcheck, arguments)
    assert result.exit_code == 2 and "cannot write" in result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("case", ["regular", "ragged", "masked, ragged", "sliced"])
@pytest.mark.parametrize("name", OPS)
def test_all_that_an_operator_is_given_is_on_its_device(name, case):
    if not applies(OPS[name], CASE[case], torch.float):
        case = "ragged"
    devices = {}

    def record(**arguments):
        devices.update({name: x.device.type for name, x in arguments.items() if torch.is_tensor(x)})
        return ()

    op = replace(OPS[name], function=record, device="meta")
    call(op, CASE[case], *draw(op, CASE[case], torch.float, 0))
    assert set(devices.values()) == {"meta"} and ("splits" in devices) == CASE[case].ragged


def test_command_on_a_device_without_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(gradcheck, ["--device", "cuda"])
    assert result.exit_code == 2 and result.output == "Error: --device cuda: torch finds no CUDA device\n"


def test_command_on_a_device_without_kernels(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(_library, "cuda_info", None)
    monkeypatch.setattr(_library, "cuda_status", "not built")
    result = CliRunner().invoke(gradcheck, ["--device", "cuda"])
    assert result.exit_code == 2 and result.output == "Error: --device cuda: CUDA kernels are not built\n"


def test_operators_without_kernels_are_left_out(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(_library, "cuda_info", "muvox")
    monkeypatch.setattr(_library, "WITHOUT_CUDA", {"neighbour_attention"})
    names = [argument for name in ATTENTIONS for argument in ("--op", name)]
    result = CliRunner().invoke(gradcheck, [*names, "--device", "cuda"])
    assert result.exit_code == 0 and "0 checks, 0 failed" in result.output
    assert "left out, without CUDA kernels: neighbour_attention; neighbour_attention, offset\n" in result.output


@pytest.mark.cuda
@pytest.mark.parametrize("order", [[], ["--second-order"]])
def test_command_is_green_on_a_device(order, tmp_path):
    path = tmp_path / "figures.json"
    result = CliRunner().invoke(gradcheck, ["--device", "cuda", "--json", str(path), *order])
    assert result.exit_code == 0, result.output
    rows = json.loads(path.read_text())["results"]
    assert {row["op"].split(",")[0] for row in rows} == {name.split(",")[0] for name in OPS} - _library.WITHOUT_CUDA


@pytest.mark.cuda
@pytest.mark.parametrize("name", [name for name in OPS if name.split(",")[0] not in _library.WITHOUT_CUDA])
def test_a_gradient_wrong_by_a_thousandth_is_red_on_a_device(name):
    result = check(replace(scaled(OPS[name]), device="cuda"), CASE["regular"], "float")
    assert not result.passed and result.error > 10 * result.limit, result
