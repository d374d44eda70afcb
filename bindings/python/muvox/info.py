"""What is installed and what runs: `muvox info`."""

import importlib.metadata
import os
import platform
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
        "CUDA operators": "not built: they are not part of this version; tensors must be on the CPU",
        "torch": torch.__version__,
        "Python": f"{platform.python_version()} ({platform.python_implementation()}, {platform.machine()})",
    }
    for package in ("numpy", "h5py", "click", "rich", "torchmetrics", "matplotlib"):
        rows[package] = _version(package)
    rows["CPU"] = f"{_processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads in use"
    count = torch.cuda.device_count()
    names = ", ".join(torch.cuda.get_device_name(i) for i in range(count))
    rows["GPU"] = f"{names} (unused: no CUDA operators)" if count else "none that torch can use"
    return rows


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
