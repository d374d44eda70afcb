"""The shared object with the CUDA kernels: loaded where it fits, otherwise one line says why not and the CPU goes on.

Stand-ins without kernels take its place, so that no device and no nvcc are needed."""

import subprocess
import warnings
from pathlib import Path

import pytest
import torch

import muvox
from muvox import _library
from op_calls import FORMS, OPS, arguments, backward_arguments, in_fresh_process, operator



@pytest.fixture
def stand_in(monkeypatch, tmp_path):
    """stand_in(version, toolkit): a build folder with an object that only says what it is; the driver of CUDA 12.4."""
    path = tmp_path / "bindings" / "torch" / _library.CUDA_NAME
    path.parent.mkdir(parents=True)
    monkeypatch.setenv("MUVOX_BUILD", str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", "12.4")
    monkeypatch.setattr(_library, "driver", lambda: (12, 4))

    def build(version, toolkit):
        info = f"muvox {version}; architectures 90; CUDA {toolkit}"
        functions = {"muvox_version": version, "muvox_cuda_build_info": info}
        source = "".join(f'const char *{name}(void) {{ return "{text}"; }}\n' for name, text in functions.items())
        command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)]
        subprocess.run(command, input=source, text=True, check=True)
        return path

    return build


def loaded(path):
    return str(path) in Path("/proc/self/maps").read_text()


def test_both_objects_are_loaded_where_both_are():
    """A device is not needed."""
    built = torch.version.cuda is not None and _library._path(_library.CUDA_NAME).is_file()
    assert built == (_library.cuda_status == "loaded") == (_library.cuda_info is not None)
    assert not built or _library.cuda_info.startswith(f"muvox {muvox.__version__}; architectures ")
    with_kernels = set(OPS) - _library.WITHOUT_CUDA
    assert with_kernels == (set(OPS) - {"attention", "offset_attention", "neighbour_attention"} if built else set())


@pytest.mark.parametrize("toolkit", ["12.0", "12.9", "11.8"])
def test_cuda_kernels_that_fit_are_loaded(toolkit, stand_in, monkeypatch):
    path = stand_in("0.1.0", toolkit)
    expected = f"muvox 0.1.0; architectures 90; CUDA {toolkit}", "loaded"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _library._load_cuda("0.1.0") == expected and loaded(path)
        monkeypatch.setattr(_library, "driver", lambda: None)
        assert _library._load_cuda("0.1.0") == expected


@pytest.mark.parametrize(
    "version, toolkit, words",
    [
        ("0.0.9", "12.4", "is of muvox 0.0.9, this is 0.1.0"),
        ("0.1.0", "13.0", "the driver is too old for CUDA 13.0, it runs 12.4"),
    ],
)
def test_cuda_kernels_that_do_not_fit_are_unloaded(version, toolkit, words, stand_in):
    path = stand_in(version, toolkit)
    with pytest.warns(RuntimeWarning, match=f"^muvox: CUDA kernels are not loaded: .*{words}.*on the CPU only$"):
        info, status = _library._load_cuda("0.1.0")
    assert info is None and words in status and not loaded(path)


def test_broken_cuda_kernels(stand_in):
    stand_in("0.1.0", "12.4").write_bytes(b"not a library")
    with pytest.warns(RuntimeWarning, match="^muvox: CUDA kernels are not loaded: .* is broken"):
        assert _library._load_cuda("0.1.0")[0] is None


@pytest.mark.parametrize("devices", [0, 1])
def test_missing_cuda_kernels_are_told_where_a_device_is(devices, stand_in, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        info, status = _library._load_cuda("0.1.0")
    assert info is None and status.startswith("not built") and len(told) == devices


def test_torch_for_the_cpu_loads_no_cuda_kernels(stand_in, monkeypatch):
    path = stand_in("0.1.0", "12.4")
    monkeypatch.setattr(torch.version, "cuda", None)
    info, status = _library._load_cuda("0.1.0")
    assert info is None and status.endswith("is not for CUDA") and not loaded(path)


def test_operators_work_beside_broken_cuda_kernels(tmp_path):
    """One line tells, and the CPU goes on."""
    folder = tmp_path / "bindings" / "torch"
    folder.mkdir(parents=True)
    (folder / _library.NAME).symlink_to(_library.path)
    (folder / _library.CUDA_NAME).write_bytes(b"not a library")
    program = f"""
import os, warnings
os.environ["MUVOX_BUILD"] = {str(tmp_path)!r}
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    import torch
    torch.version.cuda = "12.4"
    import muvox
print(len([w for w in told if "muvox: CUDA kernels are not loaded" in str(w.message)]))
print(muvox.knn(torch.zeros(1, 2, 3), 2)[0].tolist())
"""
    assert in_fresh_process(program).splitlines() == ["1", "[[[0, 1], [0, 1]]]"]


@pytest.mark.parametrize("op", ["attention", "offset_attention", "neighbour_attention"])
@pytest.mark.parametrize("info, words", [("x", "has no CUDA kernels yet"), (None, "on a CUDA device, but .* no nvcc")])
def test_operators_without_cuda_kernels_say_so(op, info, words, monkeypatch):
    """The kernel that CUDA tensors would meet, forward and backward."""
    monkeypatch.setattr(_library, "cuda_info", info)
    monkeypatch.setattr(_library, "cuda_status", "not built: no nvcc")
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    inputs = arguments(op, **FORMS["uniform"], requires_grad=False), backward_arguments(op, **FORMS["uniform"])
    for name, tensors in zip((op, op + "_backward"), inputs):
        with pytest.raises(NotImplementedError, match=rf"^muvox\.{op}: .*{words}"):
            operator(name).redispatch(key, *tensors)
