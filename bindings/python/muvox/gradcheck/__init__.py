"""`muvox gradcheck`: every operator, dtype and edge case against a plain double reference and finite differences."""

from .cases import CASES, Case, Inputs, Op
from .check import DTYPES, LIMITS, Result, applies, check, check_second_order
from .command import gradcheck, run
from .registry import OPS

__all__ = [
    "CASES", "DTYPES", "LIMITS", "OPS", "Case", "Inputs", "Op", "Result", "applies", "check",
    "check_second_order", "gradcheck", "run"
]
