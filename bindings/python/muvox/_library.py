"""Loads the shared object that defines torch.ops.muvox."""

import ctypes
import os
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


def _load():
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < OLDEST_TORCH:
        raise ImportError(f"muvox needs torch {'.'.join(map(str, OLDEST_TORCH))} or newer, this is {torch.__version__}")
    path = _find()
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise ImportError(f"muvox cannot load {path}: {error}") from error
    library = ctypes.CDLL(str(path))
    if torch.version.cuda and _path(CUDA_NAME).is_file():
        torch.ops.load_library(str(_path(CUDA_NAME)))
    for name in ("muvox_version", "muvox_build_info", "muvox_simd_name"):
        getattr(library, name).restype = ctypes.c_char_p
    return path, library


path, _functions = _load()


def version():
    """Version of the loaded library, "major.minor.patch"."""
    return _functions.muvox_version().decode()


def build_info():
    """Compiler and CPU kernels of the loaded library, on one line."""
    return _functions.muvox_build_info().decode()


def simd_name():
    """The CPU kernels that run now: "reference", "portable", "avx2" or "avx512"."""
    return _functions.muvox_simd_name().decode()
