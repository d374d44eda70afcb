"""What is installed and what runs: `muvox info`."""

import importlib.metadata
import os
import platform
import re
from pathlib import Path

import torch

from . import _library


def facts() -> dict[str, str]:
    """Versions, devices, kernels, and what was not built and why, in the order to print them."""
    rows = {
        "muvox": _library.version(),
        "library": str(_library.path),
        "built with": _library.build_info(),
        "CPU kernels in use": f"{_library.simd_name()} (MUVOX_SIMD = {os.environ.get('MUVOX_SIMD', 'not set')})",
        "CUDA kernels": _cuda_kernels(),
        "torch": f"{torch.__version__}, for {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'the CPU'}",
        "Python": f"{platform.python_version()} ({platform.python_implementation()}, {platform.machine()})",
    }
    for package in ("numpy", "h5py", "click", "rich", "torchmetrics", "matplotlib", "plotly"):
        rows[package] = _version(package)
    rows["CPU"] = f"{_processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads in use"
    rows["driver"] = _driver()
    rows["GPU"] = ", ".join(map(_device, range(torch.cuda.device_count()))) or "none that torch can use"
    return rows


def _cuda_kernels() -> str:
    if not _library.cuda_info:
        return _library.cuda_status
    missing = sorted(name for name in _library.WITHOUT_CUDA if not name.endswith("_backward"))
    return f"{_library.cuda_info}; all operators{' but ' + ', '.join(missing) if missing else ''}"


def _driver() -> str:
    """As the kernel module names itself, and the CUDA that it is for."""
    version = _library.driver()
    if version is None:
        return "none"
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split()
    except OSError:
        words = []
    number = next((f"{word}, " for word in words if re.fullmatch(r"\d+(\.\d+)+", word)), "")
    return f"{number}runs CUDA {version[0]}.{version[1]}"


def _device(index: int) -> str:
    """Name and compute capability, and whether the kernels were built for it."""
    name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
    built = _library.cuda_info and runs_on(_library.cuda_info, capability)
    note = "" if built or not _library.cuda_info else ", muvox has no kernels for it: build with -Dgpu_arch"
    return f"{name} ({capability[0]}.{capability[1]}{note})"


def runs_on(cuda_info: str, capability: tuple[int, int]) -> bool:
    """Machine code runs on its own and later minor versions of an architecture, PTX of the last on all later ones."""
    architectures = cuda_info.split("architectures ")[1].split(";")[0].split()
    built = [divmod(int(name.rstrip("af")), 10) for name in architectures]
    return capability >= built[-1] or any(capability[0] == major and capability[1] >= minor for major, minor in built)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed (pip install 'muvox[train]')"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
