"""What holds for every operator: registration, compilation, threads, memory, devices; and the shared object itself."""

import doctest
import importlib
import os
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch._dynamo.testing
from torch._subclasses.fake_tensor import FakeTensorMode

import muvox
from muvox import _library
from op_calls import (
    FORMS,
    OPS,
    arguments,
    as_tuple,
    assert_equal,
    backward_arguments,
    differentiable,
    draw,
    in_fresh_process,
    operator,
    run,
)

ROOT = Path(__file__).parents[2]


each_op = pytest.mark.parametrize("op", OPS)
each_form = pytest.mark.parametrize("form", FORMS)


# Registration


@each_op
@each_form
@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(op, form, requires_grad):
    torch.library.opcheck(operator(op), arguments(op, **FORMS[form], requires_grad=requires_grad))


@each_op
@each_form
def test_opcheck_backward(op, form):
    torch.library.opcheck(operator(op + "_backward"), backward_arguments(op, **FORMS[form]))


@pytest.mark.parametrize("op", ["gravnet", "aggregate", "pool"])
def test_unsaved_results_are_empty(op):
    *inputs, save = arguments(op, **FORMS["uniform"], requires_grad=False)
    assert save is True
    results = operator(op)(*inputs, False)
    assert results[0].numel() and all(r.shape == (0,) for r in results[1:])


@pytest.mark.parametrize("op", [op for op in OPS if op not in ("voxelize", "trilinear_weights")])
def test_unwanted_gradients_are_empty(op):
    inputs = list(backward_arguments(op, **FORMS["uniform with options"]))
    everything = operator(op + "_backward")(*inputs)
    for place in range(len(everything)):
        inputs[-1] = 1 << place
        for i, (found, full) in enumerate(zip(operator(op + "_backward")(*inputs), everything)):
            assert torch.equal(found, full) if i == place else found.shape == (0,)


# torch.compile


@each_op
@each_form
def test_compiled_is_eager(op, form):
    torch._dynamo.reset()  # all operators count as one function, compiled again too often
    inputs = arguments(op, **FORMS[form])
    compiled = torch.compile(operator(op), fullgraph=True, backend="aot_eager")
    assert_equal(run(compiled, inputs), run(operator(op), inputs))


def network(x, f, splits):
    """All wrappers with all that they make of their arguments."""
    neighbours, distance2 = muvox.knn(x, 3, splits=splits)
    m = muvox.aggregate(f, neighbours, torch.exp(-distance2), splits=splits, aggregates=("sum", "absmax"))
    g = muvox.gravnet(x, f, 3, splits=splits, scale=2)
    out, lse = muvox.attention(g, m, f, splits=splits, return_lse=True)
    return muvox.pool(torch.cat([out, lse[..., None]], -1), splits=splits)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_network(backend):
    x, f, _ = draw(3, 4, ragged=False)
    x, f = (y.detach()[None].repeat(2, 1, 1, 1).requires_grad_() for y in (x, f))
    compiled = torch.compile(network, fullgraph=True, backend=backend)
    for a, b in zip(run(compiled, (x, f, None)), run(network, (x, f, None))):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def test_compiled_once_for_all_sizes():
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(network, fullgraph=True, backend=graphs, dynamic=True)
    for rows in (6, 8, 11):
        x, f, splits = draw(3, 4, rows=rows, ragged=True)
        assert_equal(run(compiled, (x, f, splits)), run(network, (x, f, splits)))
    assert graphs.frame_count == 1


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_traced():
    """A trace has free sizes and serves training and inference, whichever it was recorded in."""
    x, f, splits = draw(3, 4, ragged=True)
    with torch.no_grad():
        traced = torch.jit.trace(network, (x, f, splits))
    x, f, splits = draw(3, 4, rows=9, ragged=True)
    assert_equal(run(traced, (x, f, splits)), run(network, (x, f, splits)))


def test_autocast_reaches_fake_cuda_tensors():
    """The rule for CUDA is the one for the CPU; without a GPU only fake tensors show it."""
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x, f = torch.empty(2, 6, 3, device="cuda"), torch.empty(2, 6, 5, device="cuda")
        torch.set_autocast_enabled("cuda", True)
        try:
            results = muvox.gravnet(x, f, 3), muvox.attention(x, x, f), muvox.pool(f), muvox.knn(x, 3)[1]
        finally:
            torch.set_autocast_enabled("cuda", False)
    assert [r.dtype for r in results] == [torch.float16] * 3 + [torch.float32]


# Devices


@each_op
@pytest.mark.parametrize("device", ["meta", "cuda"])
def test_mixed_devices(op, device):
    """Every operator names the first tensor that is elsewhere, splits included."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = list(arguments(op, **FORMS["ragged with options"], requires_grad=False))
        schema = operator(op)._schema.arguments
        for place, x in enumerate(inputs):
            if place and isinstance(x, torch.Tensor):
                mixed = [*inputs[:place], torch.empty_like(x, device=device), *inputs[place + 1 :]]
                with pytest.raises(Exception, match=rf"muvox\.{op}: {schema[place].name} is on {device}"):
                    operator(op)(*mixed)


@each_op
def test_meta(op):
    """Shapes without values, forward and backward."""
    for name, inputs in (
        (op, arguments(op, **FORMS["uniform with options"], requires_grad=False)),
        (op + "_backward", backward_arguments(op, **FORMS["uniform with options"])),
    ):
        real = as_tuple(operator(name)(*inputs))
        meta = as_tuple(operator(name)(*(x.to("meta") if isinstance(x, torch.Tensor) else x for x in inputs)))
        assert [(r.shape, r.dtype, r.device.type) for r in meta] == [(r.shape, r.dtype, "meta") for r in real]


# Arguments that reach the binding only without the wrappers


@pytest.mark.parametrize(
    "message, change",
    [
        (r"coords has 2 dimensions, expected 3: .* \(splits is empty\)", {0: torch.randn(5, 3)}),
        (r"feats has 4 dimensions, expected 3", {1: torch.randn(1, 3, 6, 5)}),
        (r"feats has size 5 in dimension 1, expected 6", {1: torch.randn(3, 5, 5)}),
        (r"feats has size 2 in dimension 0, expected 3", {1: torch.randn(2, 6, 5)}),
        (r"splits is float, expected int64", {2: torch.tensor([])}),
        (r"coords has 3 dimensions, expected 2: rows, width", {2: torch.tensor([0, 6])}),
        (r"mask is float, expected bool", {3: torch.ones(3, 6)}),
        (r"mask is uint8, expected bool", {3: torch.ones(3, 6, dtype=torch.uint8)}),
        (r"mask has size 5 in dimension 1, expected 6", {3: torch.ones(3, 5, dtype=torch.bool)}),
        (r"row_weights has 3 dimensions, expected 2", {4: torch.ones(3, 6, 1)}),
        (r"row_weights is bool, which is not supported", {4: torch.ones(3, 6) > 0}),
        (r"row_weights is half, expected float", {4: torch.ones(3, 6).half()}),
        (r"aggregates", {7: -1}),
        (r"aggregates", {7: 1 << 40}),
        (r"aggregates", {7: 0x201}),
        (r"scale", {6: float("nan")}),
        (r"max_radius is nan", {10: float("nan")}),
    ],
)
def test_errors_of_the_binding(message, change):
    inputs = list(arguments("gravnet", **FORMS["uniform"], requires_grad=False))
    expected = operator("gravnet")(*inputs)
    bad = [change.get(place, x) for place, x in enumerate(inputs)]
    with pytest.raises(RuntimeError, match=rf"^muvox::gravnet: {message}"):
        operator("gravnet")(*bad)
    assert_equal(operator("gravnet")(*inputs), expected)


@pytest.mark.parametrize("op", ["gravnet", "aggregate", "pool"])
def test_backward_without_saved_results(op):
    inputs = arguments(op, **FORMS["uniform"])
    results = operator(op)(*inputs[:-1], False)
    with pytest.raises(RuntimeError, match=rf"^muvox::{op}: backward needs (neighbours|winners)"):
        torch.autograd.grad(results[0].sum(), inputs[0])


def test_strided_splits():
    x, f, splits = draw(3, 5, ragged=True)
    apart = splits.repeat_interleave(2)[::2]
    assert not apart.is_contiguous()
    assert torch.equal(muvox.gravnet(x, f, 3, splits=apart), muvox.gravnet(x, f, 3, splits=splits))


# Repeatability, threads, memory


@each_op
@each_form
def test_same_bits_again_and_on_two_threads(op, form):
    inputs = arguments(op, **FORMS[form], rows=200)
    first = run(operator(op), inputs)
    assert_equal(run(operator(op), inputs), first)
    torch.set_num_threads(2)
    assert_equal(run(operator(op), inputs), first)


def test_python_threads_at_once():
    inputs = arguments("gravnet", **FORMS["ragged"], rows=50)
    expected = run(operator("gravnet"), inputs)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: run(operator("gravnet"), inputs), range(40)):
            assert_equal(found, expected)


def test_forked_process():
    """OpenMP's threads do not survive a fork; the workers of a DataLoader are set to one thread for that reason."""
    program = """
import os, torch, muvox
torch.set_num_threads(2)
x = torch.randn(64, 100, 3)
expected = muvox.knn(x, 8)[1]
child = os.fork()
if child == 0:
    torch.set_num_threads(1)
    os._exit(0 if torch.equal(muvox.knn(x, 8)[1], expected) else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert in_fresh_process(program).split() == ["0"]


@each_op
def test_gradient_of_a_sum(op):
    """Such a gradient is one number for all places (stride 0)."""
    inputs = arguments(op, **FORMS["uniform with options"])
    results = differentiable(as_tuple(operator(op)(*inputs)))
    leaves = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
    found = torch.autograd.grad([r.sum() for r in results], leaves)
    assert_equal([*results, *found], run(operator(op), inputs))


def test_gradient_of_a_sum_is_not_copied_out():
    """The peak of backward is its results: 64 MB here; a copy of the gradient would add 256 MB."""
    program = """
import resource, torch, muvox
torch.set_num_threads(1)
x = torch.zeros(2000000, 8, requires_grad=True)
out = muvox.pool(x, splits=torch.arange(2000001), aggregates=("mean", "max", "absmax", "sum"))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
out.sum().backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    assert int(in_fresh_process(program)) < 96 * 1024


def test_a_set_shared_by_all_is_not_copied():
    """4 MB seen by 200 voxels, the mask and the weights too; copies would be 800 MB. Its gradient is one for each voxel."""
    program = """
import resource, torch, muvox
torch.set_num_threads(1)
x, mask, weights = torch.randn(20000, 50), torch.rand(20000) < 0.5, torch.rand(20000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
outs = []
for rows in (200, 20000), (1, 200, 20000), (200, 1, 20000):
    outs.append(muvox.pool(x.expand(*rows, 50), mask=mask.expand(rows), row_weights=weights.expand(rows)))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
for out in outs:
    assert torch.equal(out[0].flatten()[:100], muvox.pool(x, mask=mask, row_weights=weights))
"""
    assert int(in_fresh_process(program)) < 16 * 1024


def test_obeys_the_number_of_threads():
    """OpenMP's threads stay once they were started: one thread starts none, four start three."""
    program = """
import os, torch, muvox
x = torch.randn(64, 100, 3)
for threads in (1, 4):
    before = len(os.listdir("/proc/self/task"))
    torch.set_num_threads(threads)
    muvox.knn(x, 8)
    print(len(os.listdir("/proc/self/task")) - before)
"""
    assert in_fresh_process(program).split() == ["0", "3"]


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def grows(function, calls=20000, warm_up=2000):
    for _ in range(warm_up):
        function()
    before = resident_bytes()
    for _ in range(calls):
        function()
    return resident_bytes() - before


@each_op
def test_calls_do_not_leak(op):
    """A tensor that is not freed costs 300 bytes and more: 6 MB in all."""
    forward, backward = operator(op), operator(op + "_backward")
    inputs = arguments(op, **FORMS["uniform with options"], requires_grad=False)
    apart = tuple(x.mT.contiguous().mT if isinstance(x, torch.Tensor) and x.dim() == 3 else x for x in inputs)
    after = backward_arguments(op, **FORMS["uniform with options"])
    assert grows(lambda: (forward(*apart), backward(*after)), calls=10000, warm_up=1000) < 2 << 20


def test_errors_do_not_leak():
    inputs = list(arguments("gravnet", **FORMS["uniform"], requires_grad=False))
    inputs[0] = inputs[0].mT.contiguous().mT  # copied before the error
    inputs[5] = 0

    def fails():
        try:
            torch.ops.muvox.gravnet(*inputs)
        except RuntimeError:
            return
        raise AssertionError("k = 0 is not refused")

    assert grows(fails) < 2 << 20


@each_op
def test_examples_of_the_docstrings(op):
    names = dict(torch=torch, muvox=muvox, coords=torch.randn(2, 30, 3), points=torch.rand(9, 3))
    names["feats"] = torch.randn(600, 4) if op == "devoxelize" else torch.randn(2, 30, 4)
    result = doctest.testmod(importlib.import_module(f"muvox.ops.{op}"), extraglobs=names)
    assert result.attempted and not result.failed


# The shared object


def test_shim_is_what_torch_declares(tmp_path):
    include = Path(torch.__file__).parent / "include"
    command = ["g++", "-std=c++20", "-fsyntax-only", "-isystem", str(include), "-I", str(ROOT / "bindings/torch")]
    good = subprocess.run([*command, str(ROOT / "tests/shim/compare.cpp")], capture_output=True, text=True)
    assert good.returncode == 0, good.stderr
    # The comparison does compare: a prototype that is wrong in one place is found, in either list.
    for name, right, wrong in (
        ("shim.def", "uint32_t *out))", "int32_t *out))"),
        ("shim_cuda.def", "(uint64_t bytes,", "(uint32_t bytes,"),
    ):
        (tmp_path / name).write_text((ROOT / "bindings/torch" / name).read_text().replace(right, wrong))
    command[-1] = str(tmp_path)
    bad = subprocess.run([*command, str(ROOT / "tests/shim/compare.cpp")], capture_output=True, text=True)
    assert bad.returncode != 0
    assert "torch_get_num_threads" in bad.stderr and "caching_allocator_raw_alloc" in bad.stderr


def test_shared_objects_export_functions_that_describe_them_and_need_no_folder():
    functions = ["muvox_build_info", "muvox_simd_name", "muvox_version"]
    objects = {_library.path: ([*functions[:2], "muvox_simulate_scans", functions[2]], "libtorch_cpu.so")}
    cuda = _library._path(_library.CUDA_NAME)
    if cuda.is_file():
        objects[cuda] = (sorted([*functions, "muvox_cuda_build_info"]), "libtorch_cuda.so")
    for path, (expected, torch_library) in objects.items():
        names = subprocess.run(["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=True)
        assert sorted(line.split()[-1] for line in names.stdout.splitlines()) == expected
        header = subprocess.run(["readelf", "-d", path], capture_output=True, text=True, check=True).stdout
        assert torch_library in header and "RPATH" not in header and "RUNPATH" not in header


def test_version_and_build():
    assert muvox.__version__ == _library.version() and muvox.__version__.count(".") == 2
    assert "kernels" in _library.build_info()
    assert _library.simd_name() in ("reference", "portable", "avx2", "avx512")


def test_too_old_torch_is_refused(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    with pytest.raises(ImportError, match=r"^muvox needs torch 2\.10 or newer, this is 2\.9\.1\+cu128"):
        _library._load()


def test_missing_shared_object(monkeypatch, tmp_path):
    monkeypatch.setenv("MUVOX_BUILD", str(tmp_path))
    with pytest.raises(ImportError, match="muvox needs libmuvox_torch.so, which is not at .*MUVOX_BUILD"):
        _library._load()


def test_broken_shared_object(monkeypatch, tmp_path):
    path = tmp_path / "bindings" / "torch" / "libmuvox_torch.so"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"not a library")
    monkeypatch.setenv("MUVOX_BUILD", str(tmp_path))
    with pytest.raises(ImportError, match="muvox cannot load"):
        _library._load()


# Threads


@pytest.mark.parametrize("given, first, expected", [("", "muvox", "1000"), ("7", "muvox", "7"), ("", "torch", "None")])
def test_waiting_threads_sleep_soon(given, first, expected):
    """Set before torch brings the OpenMP runtime, and never over the user's own choice."""
    environment = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    environment |= {"GOMP_SPINCOUNT": given} if given else {}
    code = f"import {first}, muvox, os; print(os.environ.get('GOMP_SPINCOUNT'))"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected
