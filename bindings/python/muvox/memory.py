"""Peak memory of this process, as Linux counts it."""

import ctypes
import resource
from pathlib import Path


def peak_memory_bytes() -> int:
    """Largest resident size so far, or since `reset_peak`."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def reset_peak() -> bool:
    """Gives freed memory back and lets the peak start again from there; False where the system does not offer it."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, AttributeError):
        return False
    return True
