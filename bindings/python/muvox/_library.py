"""Loads the shared objects that define torch.ops.muvox: the one of the CPU, and the one with the CUDA kernels where
torch is for CUDA."""

import _ctypes
import ctypes
import os
import warnings
from importlib.resources import files
from pathlib import Path

import torch

OLDEST_TORCH = (2, 10)
NAME, CUDA_NAME = "libmuvox_torch.so", "libmuvox_torch_cuda.so"


def _path(name):
    """A shared object of the build folder that MUVOX_BUILD names (`meson devenv` sets it), else the installed one."""
    build = os.environ.get("MUVOX_BUILD")
    # Not __file__: in an editable install the shared object lies in the build folder, not beside the sources.
    return Path(build, "bindings", "torch", name) if build else Path(str(files("muvox").joinpath(name)))


def _find():
    path = _path(NAME)
    if not path.is_file():
        build = os.environ.get("MUVOX_BUILD")
        where = "MUVOX_BUILD names a folder without it: build it there" if build else "muvox is not built: pip install ."
        raise ImportError(f"muvox needs {NAME}, which is not at {path} ({where})")
    return path


def _text(library, name):
    function = getattr(library, name)
    function.restype = ctypes.c_char_p
    return function().decode()


def _load():
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < OLDEST_TORCH:
        raise ImportError(f"muvox needs torch {'.'.join(map(str, OLDEST_TORCH))} or newer, this is {torch.__version__}")
    path = _find()
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise ImportError(f"muvox cannot load {path}: {error}") from error
    return path, ctypes.CDLL(str(path))


def driver():
    """The newest CUDA that the driver runs, (major, minor); None without a driver. Starts nothing on the device."""
    version = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)):
            return None
    except OSError:
        return None
    return version.value // 1000, version.value % 1000 // 10


def _load_cuda(expected):
    """(what the CUDA kernels were built for, "loaded"), or (None, why they are not loaded).

    Without them everything works on the CPU; a warning tells those who have reason to expect them."""
    if not torch.version.cuda:
        return None, f"not loaded: torch {torch.__version__} is not for CUDA"
    path = _path(CUDA_NAME)
    if not path.is_file():
        reason = "not built: there was no nvcc when muvox was installed (pip install -v . tells)"
        return _without_cuda(reason, tell=torch.cuda.device_count() > 0)
    try:
        library = ctypes.CDLL(str(path))  # registers the kernels; unloading takes them back
    except OSError as error:
        return _without_cuda(f"not loaded: {path} is broken ({error})")
    found, supported = _text(library, "muvox_version"), driver()
    if found == expected:
        info = _text(library, "muvox_cuda_build_info")
        toolkit = info.rsplit(" ", 1)[1]
        if not supported or supported[0] >= int(toolkit.split(".")[0]):  # minor versions go with each other
            torch.ops.load_library(str(path))
            return info, "loaded"
        reason = f"not loaded: the driver is too old for CUDA {toolkit}, it runs {supported[0]}.{supported[1]}"
    else:
        reason = f"not loaded: {path} is of muvox {found}, this is {expected}; install or build muvox again"
    _ctypes.dlclose(library._handle)
    return _without_cuda(reason)


def _without_cuda(reason, tell=True):
    if tell:
        warnings.warn(f"muvox: CUDA kernels are {reason}; operators run on the CPU only", RuntimeWarning, stacklevel=2)
    return None, reason


path, _functions = _load()


def version():
    """Version of the loaded library, "major.minor.patch"."""
    return _text(_functions, "muvox_version")


def build_info():
    """Compiler and CPU kernels of the loaded library, on one line."""
    return _text(_functions, "muvox_build_info")


def simd_name():
    """The CPU kernels that run now: "reference", "portable", "avx2" or "avx512"."""
    return _text(_functions, "muvox_simd_name")


# muvox_status muvox_simulate_scans(muvox_context *, const muvox_simulate *): muvox.simulate.native has the structures.
simulate_scans = _functions.muvox_simulate_scans
simulate_scans.argtypes = [ctypes.c_void_p, ctypes.c_void_p]

cuda_info, cuda_status = _load_cuda(version())


WITHOUT_CUDA = frozenset(
    name.removeprefix("muvox::")
    for name in torch._C._dispatch_get_all_op_names()
    if name.startswith("muvox::") and not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")
)  # operators that no CUDA tensor can be given to
